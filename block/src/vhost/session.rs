//! One VMM's connection: the backend of the crate `vhost-user-backend`.
use super::config;
use super::ring::{SharedGuestMap, VhostRing};
use super::worker::{NextRequest, QueueWorker};
use crate::export::Export;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd};
use std::sync::atomic::{AtomicU64, Ordering::AcqRel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use vhost::vhost_user::message::VhostUserProtocolFeatures;
use vhost_user_backend::{VhostUserBackend, VringEpollHandler, VringT};
use virtio_queue::QueueT;
use vm_memory::{GuestAddressSpace, GuestMemoryBackend, GuestMemoryRegion};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::event::{EventConsumer, EventNotifier};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Number of the event for postponed queues. It follows the numbers of the queues and of the
/// thread's end.
pub(super) const PUT_OFF: u16 = config::QUEUES_MAX as u16 + 1;

/// A device and the threads' own memory, for one connection after the other.
pub(super) struct VhostDisk {
    export: Arc<Export>,
    /// One for each thread of a connection.
    workers: Vec<Mutex<QueueWorker>>,
    /// Time that a thread serves a queue before it looks at its others.
    turn: Duration,
}

impl VhostDisk {
    pub fn new(export: Arc<Export>, threads: usize, turn: Duration) -> VhostDisk {
        let threads = threads.clamp(1, config::QUEUES_MAX);
        let workers = (0..threads).map(|_| Mutex::new(QueueWorker::new(&export))).collect();
        VhostDisk { workers, export, turn }
    }

    fn worker(&self, thread: usize) -> MutexGuard<'_, QueueWorker> {
        self.workers[thread].lock().expect("nobody panics with the lock")
    }
}

/// The event that ends a thread of the crate.
struct ThreadExit {
    /// The crate waits on it, and never closes it, so this value owns it.
    event: EventFd,
    notifier: Mutex<Option<EventNotifier>>,
}

impl ThreadExit {
    fn new() -> io::Result<ThreadExit> {
        let event = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        let clone = event.try_clone()?.into_raw_fd();
        // SAFETY: the file is open, and nothing else uses it any more.
        let notifier = unsafe { EventNotifier::from_raw_fd(clone) };
        Ok(ThreadExit { event, notifier: Mutex::new(Some(notifier)) })
    }
}

/// Queues of a thread whose turn ended before they were empty.
struct PutOff {
    queues: AtomicU64,
    event: EventFd,
}

impl PutOff {
    fn new() -> io::Result<PutOff> {
        let event = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        Ok(PutOff { queues: AtomicU64::new(0), event })
    }

    /// Serves a queue again after the other work of the thread.
    fn add(&self, queue: u16) {
        self.queues.fetch_or(1 << queue, AcqRel);
        // A full event wakes the thread too.
        let _ = self.event.write(1);
    }

    fn take(&self) -> impl Iterator<Item = u16> + use<> {
        let _ = self.event.read();
        let queues = self.queues.swap(0, AcqRel);
        (0..u64::BITS as u16).filter(move |queue| queues >> queue & 1 == 1)
    }
}

/// Why a queue is no longer served.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum PauseReason {
    /// It is empty.
    Empty,
    /// Its turn is over.
    Over,
    /// Its content is invalid.
    Nonsense,
}

/// A VMM's connection to a disk.
pub(super) struct VhostSession {
    disk: Arc<VhostDisk>,
    memory: SharedGuestMap,
    exits: Vec<ThreadExit>,
    /// One for each thread.
    put_off: Vec<PutOff>,
}

impl VhostSession {
    /// # Errors
    /// No more files can be open.
    pub fn new(disk: Arc<VhostDisk>, memory: SharedGuestMap) -> io::Result<VhostSession> {
        let exits = disk.workers.iter().map(|_| ThreadExit::new()).collect::<io::Result<_>>()?;
        let put_off = disk.workers.iter().map(|_| PutOff::new()).collect::<io::Result<_>>()?;
        Ok(VhostSession { disk, memory, exits, put_off })
    }

    /// Makes the crate's threads wait for postponed queues, too.
    ///
    /// # Errors
    /// The system's.
    pub fn attend(&self, handlers: &[Arc<VringEpollHandler<Arc<VhostSession>>>]) -> io::Result<()> {
        for (handler, put_off) in handlers.iter().zip(&self.put_off) {
            handler.register_listener(put_off.event.as_raw_fd(), EventSet::IN, PUT_OFF.into())?;
        }
        Ok(())
    }

    /// Ends the crate's threads that were started before one failed to start.
    pub fn end_threads(&self) {
        for exit in &self.exits {
            let _ = exit.event.write(1);
        }
    }

    /// Serves a queue until it is empty and the driver will announce more, or until its turn ends.
    /// So a driver with endless requests delays neither other queues nor the end of the thread.
    fn serve(&self, ring: &VhostRing, queue: u16, thread: usize) {
        let end = Instant::now() + self.disk.turn;
        while self.begin(ring) {
            match self.serve_until(end, ring, thread) {
                PauseReason::Over => return self.put_off[thread].add(queue),
                PauseReason::Nonsense => return,
                // Requests that came before the driver knew that it must announce them.
                PauseReason::Empty if matches!(ring.enable_notification(), Ok(true)) => {}
                PauseReason::Empty => return,
            }
        }
    }

    /// Returns `false` if the queue is not in use, or not in the guest's memory.
    fn begin(&self, ring: &VhostRing) -> bool {
        ring.get_ref().get_queue().is_valid(&*self.memory.memory())
            && ring.disable_notification().is_ok()
    }

    fn serve_until(&self, end: Instant, ring: &VhostRing, thread: usize) -> PauseReason {
        loop {
            match self.serve_next(ring, thread) {
                NextRequest::Served if Instant::now() >= end => return PauseReason::Over,
                NextRequest::Served => {}
                NextRequest::Nothing => return PauseReason::Empty,
                NextRequest::Nonsense => return PauseReason::Nonsense,
            }
        }
    }

    /// Serves the next request, if there is one.
    ///
    /// It holds the locks only meanwhile. So a thread that stops a queue, or takes memory away,
    /// waits for the end of the request, and none is in progress after that.
    fn serve_next(&self, ring: &VhostRing, thread: usize) -> NextRequest {
        let mut worker = self.disk.worker(thread);
        let mut ring = ring.get_mut();
        let memory = self.memory.memory();
        let next = worker.serve_next(&self.disk.export, &memory, ring.get_queue_mut());
        if next == NextRequest::Served && ring.needs_notification().unwrap_or(true) {
            // A VMM without events polls.
            let _ = ring.signal_used_queue();
        }
        next
    }
}

impl VhostUserBackend for VhostSession {
    type Bitmap = ();
    type Vring = VhostRing;

    fn num_queues(&self) -> usize {
        config::QUEUES_MAX
    }

    fn max_queue_size(&self) -> usize {
        config::QUEUE_SIZE_MAX
    }

    fn features(&self) -> u64 {
        config::features(&self.disk.export)
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        config::protocol_features()
    }

    /// Does nothing, because the queues keep this state.
    fn set_event_idx(&self, _enabled: bool) {}

    fn get_config(&self, offset: u32, size: u32) -> Vec<u8> {
        config::config(&self.disk.export, offset, size)
    }

    fn set_config(&self, _offset: u32, _bytes: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::PermissionDenied.into())
    }

    /// Waits until no thread uses the old memory.
    fn update_memory(&self, memory: SharedGuestMap) -> io::Result<()> {
        for region in memory.memory().iter() {
            // SAFETY: the region is mapped while this thread holds the memory; unlocking changes no
            // byte. All mappings of this process may be locked, but the VMM decides about the
            // guest's memory.
            let _ = unsafe { libc::munlock(region.as_ptr().cast(), region.len() as usize) };
        }
        (0..self.disk.workers.len()).for_each(|thread| drop(self.disk.worker(thread)));
        Ok(())
    }

    fn queues_per_thread(&self) -> Vec<u64> {
        let threads = self.disk.workers.len();
        let mask = |thread| {
            (thread..config::QUEUES_MAX)
                .step_by(threads)
                .fold(0, |mask, queue| mask | 1_u64 << queue)
        };
        (0..threads).map(mask).collect()
    }

    fn exit_event(&self, thread: usize) -> Option<(EventConsumer, EventNotifier)> {
        let exit = &self.exits[thread];
        let notifier = exit.notifier.lock().expect("nobody panics with the lock").take()?;
        // SAFETY: the file is open, and stays so until the crate's threads have dropped this
        // session. The crate never closes it.
        let consumer = unsafe { EventConsumer::from_raw_fd(exit.event.as_raw_fd()) };
        Some((consumer, notifier))
    }

    fn handle_event(
        &self,
        event: u16,
        _set: EventSet,
        rings: &[VhostRing],
        thread: usize,
    ) -> io::Result<()> {
        if let Some(ring) = rings.get(usize::from(event)) {
            self.serve(ring, event, thread);
        } else if event == PUT_OFF {
            for queue in self.put_off[thread].take() {
                let ring = rings.get(usize::from(queue)).filter(|ring| ring.get_ref().is_enabled());
                ring.iter().for_each(|ring| self.serve(ring, queue, thread));
            }
        }
        // An error would end the thread.
        Ok(())
    }
}
