//! How the kernel reports touches of folded pages: by a userfaultfd, or by the protection of memory
//! if there is none (`memfold_os::protection`).
use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use core::ops::Range;
use memfold::config::Config;
use memfold_gate::KeeperCall;
use memfold_os::Errno;
use memfold_os::maps::pagemap::{PAGEMAP_SCAN, Pagemap};
use memfold_os::protection::{Protection, ProtectionSpace};
use memfold_os::uffd::space::{Space, UffdSpace};
use memfold_os::uffd::{REQUESTS, Uffd, feature};
use memfold_os::units::PAGE_SIZE;
use rustix::fd::OwnedFd;

const WAIT: usize = (libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG) as usize;
const WAKE: usize = (libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG) as usize;

/// Calls in threads of the program, whatever the kind of paging.
const BY_BOTH: [KeeperCall; 8] = [
    KeeperCall::needed(libc::SYS_futex, [0, WAIT, 0, 0]),
    KeeperCall::needed(libc::SYS_futex, [0, WAKE, 0, 0]),
    KeeperCall::needed(libc::SYS_sched_yield, [0; 4]),
    KeeperCall::needed(libc::SYS_clock_gettime, [0; 4]),
    KeeperCall::needed(libc::SYS_pread64, [0; 4]),
    KeeperCall::needed(libc::SYS_madvise, [0, 0, libc::MADV_DONTNEED as usize, 0]),
    KeeperCall::needed(libc::SYS_madvise, [0, 0, libc::MADV_POPULATE_WRITE as usize, 0]),
    KeeperCall::needed(libc::SYS_ioctl, [0, PAGEMAP_SCAN as usize, 0, 0]),
];

const BY_USERFAULT: [KeeperCall; 4] = [
    KeeperCall::needed(libc::SYS_ioctl, [0, REQUESTS[0] as usize, 0, 0]),
    KeeperCall::needed(libc::SYS_ioctl, [0, REQUESTS[1] as usize, 0, 0]),
    KeeperCall::needed(libc::SYS_ioctl, [0, REQUESTS[2] as usize, 0, 0]),
    KeeperCall::needed(libc::SYS_ioctl, [0, REQUESTS[3] as usize, 0, 0]),
];

const BY_PROTECTION: [KeeperCall; 2] = [
    KeeperCall::needed(libc::SYS_pwrite64, [0; 4]),
    KeeperCall::needed(libc::SYS_mprotect, [0; 4]),
];

const NEW: usize = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE) as usize;
const ACCESS: usize = (libc::PROT_READ | libc::PROT_WRITE) as usize;

/// Further calls of the engine's own threads, which have no handler of SIGSYS.
const BY_ENGINE_THREADS: [KeeperCall; 24] = [
    KeeperCall::needed(libc::SYS_mmap, [0, PAGE_SIZE, ACCESS, NEW]),
    KeeperCall::needed(libc::SYS_munmap, [0; 4]),
    KeeperCall::needed(libc::SYS_mprotect, [0; 4]),
    KeeperCall::needed(libc::SYS_exit, [0; 4]),
    KeeperCall::needed(libc::SYS_clone, [ENGINE_THREAD, 0, 0, 0]),
    KeeperCall::needed(libc::SYS_tgkill, [0; 4]),
    KeeperCall::tried(libc::SYS_process_madvise, [0; 4]),
    KeeperCall::tried(libc::SYS_prctl, [libc::PR_SET_NAME as usize, 0, 0, 0]),
    KeeperCall::tried(libc::SYS_nanosleep, [0; 4]),
    KeeperCall::tried(libc::SYS_clock_nanosleep, [0; 4]),
    KeeperCall::tried(libc::SYS_open, [0; 4]),
    KeeperCall::tried(libc::SYS_openat, [0; 4]),
    KeeperCall::tried(libc::SYS_read, [0; 4]),
    KeeperCall::tried(libc::SYS_close, [0; 4]),
    KeeperCall::tried(libc::SYS_stat, [0; 4]),
    KeeperCall::tried(libc::SYS_newfstatat, [0; 4]),
    KeeperCall::tried(libc::SYS_getpriority, [0; 4]),
    KeeperCall::tried(libc::SYS_setpriority, [0; 4]),
    KeeperCall::tried(libc::SYS_getrusage, [0; 4]),
    KeeperCall::tried(libc::SYS_mlock2, [0; 4]),
    KeeperCall::tried(libc::SYS_munlock, [0; 4]),
    KeeperCall::tried(libc::SYS_mincore, [0; 4]),
    KeeperCall::tried(libc::SYS_getpid, [0; 4]),
    KeeperCall::tried(libc::SYS_gettid, [0; 4]),
];

/// The flags with which an engine thread starts another one.
const ENGINE_THREAD: usize = (libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SETTLS
    | libc::CLONE_PARENT_SETTID
    | libc::CLONE_FILES) as usize;

/// Calls `each` with the system calls that are made in threads of the program. With `of_all` also
/// with those of the engine's threads.
pub fn each_call(by_protection: bool, of_all: bool, each: &mut dyn FnMut(&KeeperCall)) {
    let of_kind: &[KeeperCall] = if by_protection { &BY_PROTECTION } else { &BY_USERFAULT };
    let of_engine: &[KeeperCall] = if of_all { &BY_ENGINE_THREADS } else { &[] };
    BY_BOTH.iter().chain(of_kind).chain(of_engine).for_each(each);
}

/// The means by which touches of folded pages are reported.
pub enum Paging {
    /// Missing pages of registered memory raise SIGBUS.
    Userfault(Arc<Uffd>),
    /// Folded pages are hidden, so a touch raises SIGSEGV.
    Protection(Arc<Protection>),
}

impl Paging {
    /// Opens the kind that the settings ask for. Its descriptor gets a number of at least `least`.
    ///
    /// # Errors
    /// A message that says why it is unavailable.
    pub fn open(config: &Config, least: i32) -> Result<Paging, String> {
        let number = |e: Errno| format!("Numbering a descriptor failed: {e}");
        if config.by_protection {
            let protection = Protection::open().map_err(|e| format!("/proc/self/mem: {e}"))?;
            return Ok(Paging::Protection(Arc::new(protection.at_least(least).map_err(number)?)));
        }
        let moves = if config.use_move { feature::MOVE } else { 0 };
        let uffd = Uffd::open(feature::GATE | moves, true).map_err(|e| format!("{e}"))?;
        Ok(Paging::Userfault(Arc::new(uffd.at_least(least).map_err(number)?)))
    }

    pub fn fd(&self) -> &OwnedFd {
        match self {
            Paging::Userfault(uffd) => uffd.fd(),
            Paging::Protection(protection) => protection.fd(),
        }
    }

    /// Returns the address space as the engine changes it.
    pub fn space(&self, pagemap: &Arc<Pagemap>) -> Box<dyn Space> {
        match self {
            Paging::Userfault(uffd) => {
                Box::new(UffdSpace::with_free(uffd.clone(), pagemap.clone()))
            }
            Paging::Protection(protection) => {
                Box::new(ProtectionSpace::new(protection.clone(), pagemap.clone()))
            }
        }
    }

    /// Registers the engine's frames, but not for write protection: a protected page that the kernel
    /// has swapped out keeps its protection when it is moved to a frame (`move_swap_pte` in
    /// `mm/userfaultfd.c`). The engine writes to frames, and nothing would serve that fault.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn register_frames(&self, start: usize, len: usize) -> Result<(), Errno> {
        match self {
            // SAFETY: the engine never touches its frames while they are empty, so no fault there
            // needs handling.
            Paging::Userfault(uffd) => unsafe { uffd.register(start, len, false) },
            Paging::Protection(_) => Ok(()),
        }
    }

    /// Registers a range of the program in a child of fork. Hidden memory needs nothing, because it
    /// is hidden in the child too.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn register_in_child(&self, range: &Range<usize>, protects: bool) -> Result<(), Errno> {
        match self {
            // SAFETY: faults are handled from now on, and this is the only thread.
            Paging::Userfault(uffd) => unsafe { uffd.register(range.start, range.len(), protects) },
            Paging::Protection(_) => Ok(()),
        }
    }

    /// Ends the registration of a range of the program. All of its memory must be resident or new.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn unregister(&self, range: &Range<usize>) -> Result<(), Errno> {
        match self {
            Paging::Userfault(uffd) => uffd.unregister(range.start, range.len()),
            Paging::Protection(protection) => {
                protection.show(range);
                Ok(())
            }
        }
    }

    /// Hides all of `range` if this kind hides memory. The range must hold nothing of the
    /// program's, or be about to move.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn hide(&self, range: &Range<usize>) -> Result<(), Errno> {
        match self {
            Paging::Userfault(_) => Ok(()),
            Paging::Protection(protection) => protection.hide(range),
        }
    }

    /// Returns whether memory is hidden.
    pub fn hides(&self) -> bool {
        matches!(self, Paging::Protection(_))
    }

    /// Puts a page of zeros where a page is missing that is registered and not managed. Returns
    /// `false` if the page isn't missing or isn't registered.
    pub fn fills(&self, page: usize) -> bool {
        match self {
            // SAFETY: a missing page that is registered and not managed is a new one, so the
            // program expects zeros there.
            Paging::Userfault(uffd) => unsafe { uffd.zero(page, PAGE_SIZE) }.is_ok(),
            Paging::Protection(_) => false,
        }
    }

    /// Opens a userfaultfd or a protection of its own in a child of fork, in place of the parent's.
    ///
    /// # Errors
    /// A message that says why it is unavailable.
    pub fn reopen(&self) -> Result<(), String> {
        match self {
            Paging::Userfault(uffd) => uffd.reopen().map_err(|e| format!("{e}")),
            Paging::Protection(protection) => {
                protection.reopen().map_err(|e| format!("/proc/self/mem: {e}"))
            }
        }
    }
}
