//! Thread delivery: handler threads, each pinned to a CPU; those on duty sleep in `poll`.
use crate::delivery::program::duty::{Duty, Shift};
use crate::fault::{Fault, Served};
use crate::pager::Pager;
use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use memfold_sys::Errno;
use memfold_sys::memory::zone::Zone;
use memfold_sys::thread::{Thread, yield_now};
use memfold_sys::uffd::{Event, Uffd};
use memfold_sys::units::PAGE_SIZE;

/// Running handlers. They end when this is dropped.
pub(crate) struct Handlers {
    shared: Arc<Shared>,
    threads: Vec<Thread>,
    waker: Option<Thread>,
}

struct Shared {
    pager: Arc<Pager>,
    uffd: Arc<Uffd>,
    duty: Duty,
    /// One page for each handler, registered: a touch wakes a handler, which ends if the service
    /// does.
    bells: Zone,
}

struct Start {
    shared: Arc<Shared>,
    handler: usize,
    cpu: usize,
}

impl Handlers {
    /// Starts a handler for each CPU.
    ///
    /// # Errors
    /// EAGAIN: no more threads; what registering the bells says.
    pub fn start(pager: &Arc<Pager>, uffd: &Arc<Uffd>) -> Result<Handlers, Errno> {
        let duty = Duty::new(uffd);
        let waker =
            duty.waker_thread().map(|(main, arg)| Thread::start(c"memfold-wake", None, main, arg));
        let cpus = duty.cpus().to_vec();
        let bells = Zone::reserve(cpus.len() * PAGE_SIZE, PAGE_SIZE)?;
        // SAFETY: the handlers started below serve it; only `drop` touches it.
        unsafe { uffd.register(bells.start(), bells.len(), false)? };
        let shared = Arc::new(Shared { pager: pager.clone(), uffd: uffd.clone(), duty, bells });
        let mut handlers = Handlers { shared, threads: Vec::new(), waker: waker.transpose()? };
        for (handler, &cpu) in cpus.iter().enumerate() {
            let start = Box::new(Start { shared: handlers.shared.clone(), handler, cpu });
            let arg = Box::into_raw(start) as usize;
            handlers.threads.push(Thread::start(c"memfold-fault", Some(cpu), run, arg)?);
        }
        Ok(handlers)
    }
}

impl Drop for Handlers {
    fn drop(&mut self) {
        self.shared.duty.end();
        for bell in 0..self.threads.len() {
            // SAFETY: inside the zone. The page is missing, so this waits until a handler has
            // served it and ended.
            unsafe { self.shared.bells.as_ptr().add(bell * PAGE_SIZE).read_volatile() };
        }
        self.threads.drain(..).for_each(Thread::join);
        self.shared.duty.end_waker();
        self.waker.take().into_iter().for_each(Thread::join);
    }
}

fn run(start: usize) {
    // SAFETY: `start` gave this thread the box.
    let Start { shared, handler, cpu } = *unsafe { Box::from_raw(start as *mut Start) };
    let mut shift = Shift::new(handler, cpu);
    loop {
        shared.duty.wait(&mut shift);
        let Ok(Event::Fault { address, protected, thread, .. }) = shared.uffd.read() else {
            continue;
        };
        if shared.bells.contains(address) {
            let page = address & !(PAGE_SIZE - 1);
            // SAFETY: the bell is the engine's own page; zeros are as good as anything.
            let _ = unsafe { shared.uffd.zero(page, PAGE_SIZE) };
            if shared.duty.is_ended() {
                return;
            }
            continue;
        }
        let late = shared.duty.note(&mut shift, thread);
        let fault = Fault { addr: address, protected, late, ..Fault::default() };
        loop {
            match shared.pager.fault(fault) {
                Served::Yes => break,
                Served::Mapped { start, len } => {
                    shared.duty.wake(&mut shift, start, len);
                    break;
                }
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
