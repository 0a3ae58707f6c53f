//! A queue of the crate `vhost-user-backend` whose thread no VMM can block.
use super::spans::GuestMap;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use vhost_user_backend::{VringMutex, VringStateGuard, VringStateMutGuard, VringT};
use virtio_queue::Error;
use vm_memory::GuestMemoryAtomic;

/// The guest's memory, which may be replaced.
pub(super) type SharedGuestMap = GuestMemoryAtomic<GuestMap>;

/// The crate's queue without its event. The crate reads the event in the thread that serves the
/// queue. If another thread had read it first, that thread would sleep for good or end, and a VMM
/// may give two queues one event. Here the thread never sleeps, and a missing event is no error.
#[derive(Clone)]
pub(super) struct VhostRing(VringMutex<SharedGuestMap>);

impl<'a> VringStateGuard<'a, SharedGuestMap> for VhostRing {
    type G = <VringMutex<SharedGuestMap> as VringStateGuard<'a, SharedGuestMap>>::G;
}

impl<'a> VringStateMutGuard<'a, SharedGuestMap> for VhostRing {
    type G = <VringMutex<SharedGuestMap> as VringStateMutGuard<'a, SharedGuestMap>>::G;
}

/// Methods of the crate's queue.
macro_rules! as_they_are {
    ($(fn $name:ident(&self $(, $argument:ident: $type:ty)*) $(-> $result:ty)?;)*) => {
        $(fn $name(&self $(, $argument: $type)*) $(-> $result)? {
            self.0.$name($($argument),*)
        })*
    };
}

impl VringT<SharedGuestMap> for VhostRing {
    fn new(memory: SharedGuestMap, size_max: u16) -> Result<VhostRing, Error> {
        VringMutex::new(memory, size_max).map(VhostRing)
    }

    fn set_kick(&self, file: Option<File>) {
        file.iter().for_each(never_sleep);
        self.0.set_kick(file);
    }

    fn read_kick(&self) -> io::Result<bool> {
        match self.0.read_kick() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            read => read,
        }
    }

    fn get_ref(&self) -> <Self as VringStateGuard<'_, SharedGuestMap>>::G {
        self.0.get_ref()
    }

    fn get_mut(&self) -> <Self as VringStateMutGuard<'_, SharedGuestMap>>::G {
        self.0.get_mut()
    }

    as_they_are! {
        fn add_used(&self, index: u16, len: u32) -> Result<(), Error>;
        fn signal_used_queue(&self) -> io::Result<()>;
        fn enable_notification(&self) -> Result<bool, Error>;
        fn disable_notification(&self) -> Result<(), Error>;
        fn needs_notification(&self) -> Result<bool, Error>;
        fn set_enabled(&self, enabled: bool);
        fn set_queue_info(&self, descriptors: u64, available: u64, used: u64) -> Result<(), Error>;
        fn queue_next_avail(&self) -> u16;
        fn set_queue_next_avail(&self, base: u16);
        fn set_queue_next_used(&self, index: u16);
        fn queue_used_idx(&self) -> Result<u16, Error>;
        fn set_queue_size(&self, size: u16);
        fn set_queue_event_idx(&self, enabled: bool);
        fn set_queue_ready(&self, ready: bool);
        fn set_call(&self, file: Option<File>);
        fn set_err(&self, file: Option<File>);
    }
}

/// Makes reads of this file return at once.
fn never_sleep(file: &File) {
    let fd = file.as_raw_fd();
    // SAFETY: the file is open, and neither call takes a pointer.
    unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        if flags != -1 {
            libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK);
        }
    }
}
