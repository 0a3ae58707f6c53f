//! Thread delivery: handler threads, one pinned to each CPU, all asleep in `read`. The one on the faulting thread's CPU
//! wakes without an interrupt between CPUs.
use crate::fault::{Fault, Served};
use crate::pager::Pager;
use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use memfold_sys::Errno;
use memfold_sys::sync::atomic::{AtomicBool, Ordering::SeqCst};
use memfold_sys::thread::{Thread, each_cpu, yield_now};
use memfold_sys::uffd::{Event, Uffd};
use memfold_sys::units::PAGE_SIZE;
use memfold_sys::zone::Zone;

/// Handlers at most; CPUs beyond this share them.
const HANDLERS_MAX: usize = 16;

/// Running handlers. They end when this is dropped.
pub(crate) struct Handlers {
    shared: Arc<Shared>,
    threads: Vec<Thread>,
}

struct Shared {
    pager: Arc<Pager>,
    uffd: Arc<Uffd>,
    /// One page for each handler, registered: a touch wakes a handler, which ends if `stop` is set.
    bells: Zone,
    stop: AtomicBool,
}

impl Handlers {
    /// Starts a handler for each CPU.
    ///
    /// # Errors
    /// EAGAIN: no more threads; what registering the bells says.
    pub fn start(pager: &Arc<Pager>, uffd: &Arc<Uffd>) -> Result<Handlers, Errno> {
        let mut cpus = Vec::new();
        each_cpu(|cpu| cpus.push(cpu));
        cpus.truncate(HANDLERS_MAX);
        let bells = Zone::reserve(HANDLERS_MAX * PAGE_SIZE, PAGE_SIZE)?;
        // SAFETY: the handlers started below serve it; only `drop` touches it.
        unsafe { uffd.register(bells.start(), bells.len(), false)? };
        let shared = Arc::new(Shared { pager: pager.clone(), uffd: uffd.clone(), bells, stop: AtomicBool::new(false) });
        let mut handlers = Handlers { shared, threads: Vec::new() };
        for cpu in cpus {
            let arg = Box::into_raw(Box::new(handlers.shared.clone())) as usize;
            handlers.threads.push(Thread::start(c"memfold-fault", Some(cpu), run, arg)?);
        }
        Ok(handlers)
    }
}

impl Drop for Handlers {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        for bell in 0..self.threads.len() {
            // SAFETY: inside the zone. The page is missing, so this waits until a handler has served it and ended.
            unsafe { self.shared.bells.as_ptr().add(bell * PAGE_SIZE).read_volatile() };
        }
        self.threads.drain(..).for_each(Thread::join);
    }
}

fn run(shared: usize) {
    // SAFETY: `start` gave this thread the box.
    let shared = *unsafe { Box::from_raw(shared as *mut Arc<Shared>) };
    loop {
        let Ok(Event::Fault { address, protected, .. }) = shared.uffd.read() else { continue };
        if shared.bells.contains(address) {
            let page = address & !(PAGE_SIZE - 1);
            // SAFETY: the bell is the engine's own page; zeros are as good as anything.
            let _ = unsafe { shared.uffd.zero(page, PAGE_SIZE) };
            if shared.stop.load(SeqCst) {
                return;
            }
            continue;
        }
        let fault = Fault { addr: address, protected };
        loop {
            match shared.pager.fault(fault) {
                Served::Yes => break,
                Served::Again => yield_now(),
                Served::NotManaged => {
                    // Its area has ended since: let the thread look again.
                    shared.uffd.wake(address & !(PAGE_SIZE - 1), PAGE_SIZE);
                    break;
                }
            }
        }
    }
}
