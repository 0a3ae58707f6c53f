//! Thread delivery: handler threads. One at a time waits for a fault.
use crate::fault::{FaultOutcome, PageFault};
use crate::pager::Pager;
use alloc::sync::Arc;
use alloc::vec::Vec;
use memfold_os::Errno;
use memfold_os::memory::zone::Zone;
use memfold_os::sync::Mutex;
use memfold_os::sync::atomic::{AtomicBool, Ordering::SeqCst};
use memfold_os::thread::{Thread, cpus, wait_readable, yield_now};
use memfold_os::uffd::{FaultReport, Uffd};
use memfold_os::units::PAGE_SIZE;

/// Most handlers.
const HANDLERS_MAX: usize = 16;

/// Returns the number of handlers: one for each CPU that the caller may run on, up to a bound.
pub(crate) fn handler_count() -> usize {
    cpus().min(HANDLERS_MAX)
}

/// Running handlers. They end when this is dropped.
pub(crate) struct FaultHandlers {
    shared: Arc<HandlerState>,
    threads: Vec<Thread>,
}

struct HandlerState {
    pager: Arc<Pager>,
    uffd: Arc<Uffd>,
    /// Locked by the handler that waits, because a fault wakes every thread that waits for the
    /// descriptor.
    turn: Mutex<()>,
    ended: AtomicBool,
    /// One registered page for each handler. A touch wakes a handler, which ends when the service
    /// does.
    bells: Zone,
}

impl FaultHandlers {
    /// Starts the handlers.
    ///
    /// # Errors
    /// EAGAIN: no more threads. The errors of registering the bells.
    pub fn start(pager: &Arc<Pager>, uffd: &Arc<Uffd>) -> Result<FaultHandlers, Errno> {
        let count = handler_count();
        let bells = Zone::reserve(count * PAGE_SIZE, PAGE_SIZE)?;
        // SAFETY: the handlers started below serve it; only `drop` touches it.
        unsafe { uffd.register(bells.start(), bells.len(), false)? };
        let (pager, uffd) = (pager.clone(), uffd.clone());
        let (turn, ended) = (Mutex::new(()), AtomicBool::new(false));
        let handler_state = Arc::new(HandlerState { pager, uffd, turn, ended, bells });
        let mut handlers = FaultHandlers { shared: handler_state, threads: Vec::new() };
        for _ in 0..count {
            let arg = Arc::into_raw(handlers.shared.clone()) as usize;
            handlers.threads.push(Thread::start(c"memfold-fault", run, arg)?);
        }
        Ok(handlers)
    }
}

impl Drop for FaultHandlers {
    fn drop(&mut self) {
        self.shared.ended.store(true, SeqCst);
        for bell in 0..self.threads.len() {
            // SAFETY: the address is inside the zone. The page is missing, so this waits until a
            // handler has served it and ended.
            unsafe { self.shared.bells.as_ptr().add(bell * PAGE_SIZE).read_volatile() };
        }
        self.threads.drain(..).for_each(Thread::join);
    }
}

fn next(shared: &HandlerState) -> Result<FaultReport, Errno> {
    let _turn = shared.turn.lock();
    wait_readable(shared.uffd.fd(), None);
    shared.uffd.read()
}

fn run(shared: usize) {
    // SAFETY: `start` gave this thread one reference of the Arc.
    let shared = unsafe { Arc::from_raw(shared as *const HandlerState) };
    loop {
        let Ok(FaultReport { address, protected }) = next(&shared) else { continue };
        if shared.bells.contains(address) {
            let page = address & !(PAGE_SIZE - 1);
            // SAFETY: the bell is the engine's own page, and its contents are not used.
            let _ = unsafe { shared.uffd.zero(page, PAGE_SIZE) };
            if shared.ended.load(SeqCst) {
                return;
            }
            continue;
        }
        let fault = PageFault { addr: address, protected, ..PageFault::default() };
        loop {
            match shared.pager.faults().fault(fault) {
                FaultOutcome::Yes => break,
                FaultOutcome::Again => yield_now(),
                FaultOutcome::NotManaged => {
                    // Its area has ended since: the thread faults again, and finds that.
                    shared.uffd.wake(address & !(PAGE_SIZE - 1), PAGE_SIZE);
                    break;
                }
            }
        }
    }
}
