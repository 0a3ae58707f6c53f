//! Which handler threads are on duty.
//!
//! A fault wakes every thread that waits for the descriptor. While one thread of the program
//! faults, one handler on that thread's CPU serves it without an interrupt between CPUs; any other
//! would wake for nothing, and as it runs on another CPU, every change of the page table would
//! interrupt that one too (10 us a call, `DESIGN.md`). So handler 0 alone is on duty while faults
//! come from one thread, and follows that thread to its CPU. When they come from several threads,
//! all handlers are, each on a CPU of its own.
//!
//! # Who serves and who wakes
//! Every thread that waits for the descriptor wakes at each fault, so while one thread of the program
//! faults only handler 0 waits, pinned to that thread's CPU and following it (it looks at `/proc`
//! every 4 faults); when several threads fault, all handlers wait, one for each CPU. A thread that
//! is woken by a handler working on its CPU is put on another CPU by the kernel, which costs two
//! wakes from idle for each fault from then on. So handler 0 does not wake it: it asks the waker, a
//! SCHED_IDLE thread on the same CPU, and goes to sleep; the kernel leaves a thread where only
//! SCHED_IDLE threads run. If the waker does not get to run within 10 ms (the CPU is busy), the
//! handler wakes by itself, and for the next 256 to 8192 faults. Measured in one run on a quiet
//! machine: 25 us a random 4 KiB read in place of 70 to 90.
//!
//! After a fault a handler looks for the next before it sleeps: the thread that it has woken has
//! mostly run and faulted again by then.
use crate::delivery::program::waker::{PATIENCE_NS, Waker};
use alloc::sync::Arc;
use alloc::vec::Vec;
use memfold_sys::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed, Ordering::SeqCst};
use memfold_sys::sync::{Condvar, Mutex};
use memfold_sys::thread::{Whereabouts, each_cpu, pin, wait_readable};
use memfold_sys::uffd::Uffd;

/// Handlers at most; CPUs beyond this share them.
const HANDLERS_MAX: usize = 16;
/// Faults after which it is decided who is on duty.
const ROUND: u32 = 64;
/// Faults in a round that came from another thread than the one before, from which on all handlers
/// are on duty.
const SWITCHES: u32 = 8;
/// Faults after which handler 0 looks where the faulting thread runs.
const LOOK: u32 = 4;
/// Faults for which the waker isn't asked after it came too late, the first time; twice as many
/// each time after. At the most, what it costs to find out whether the CPU is still busy is a small
/// part of what the faults cost.
const PAUSE_MIN: u32 = 1 << 8;
const PAUSE_MAX: u32 = 1 << 13;

/// Decides which handlers wait for faults.
pub(crate) struct Duty {
    uffd: Arc<Uffd>,
    cpus: Vec<usize>,
    waker: Option<Arc<Waker>>,
    all: AtomicBool,
    ended: AtomicBool,
    off: Mutex<()>,
    changed: Condvar,
    last: AtomicU32,
    faults: AtomicU32,
    switches: AtomicU32,
}

/// One handler's own part.
pub(crate) struct Shift {
    handler: usize,
    cpu: usize,
    /// The thread that the waker was asked to wake, until it is known to be awake.
    posted: Option<u32>,
    /// Faults left for which the waker isn't asked.
    skip: u32,
    pause: u32,
    whereabouts: Whereabouts,
}

impl Duty {
    /// For a handler on each CPU that the caller may run on.
    pub fn new(uffd: &Arc<Uffd>) -> Duty {
        let mut cpus = Vec::new();
        each_cpu(|cpu| cpus.push(cpu));
        cpus.truncate(HANDLERS_MAX);
        let waker = (cpus.len() > 1).then(|| Waker::new(uffd));
        Duty {
            uffd: uffd.clone(),
            cpus,
            waker,
            all: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            off: Mutex::new(()),
            changed: Condvar::default(),
            last: AtomicU32::new(0),
            faults: AtomicU32::new(0),
            switches: AtomicU32::new(0),
        }
    }

    /// What the thread "memfold-wake" is to run, if there is to be one: see [`Waker::thread`].
    pub fn waker_thread(&self) -> Option<(fn(usize), usize)> {
        self.waker.as_ref().map(Waker::thread)
    }

    /// The CPUs to start a handler on, the n-th as handler n.
    pub fn cpus(&self) -> &[usize] {
        &self.cpus
    }

    /// Sleeps until the descriptor may have something to read for this handler.
    pub fn wait(&self, shift: &mut Shift) {
        if shift.posted.is_some() {
            if wait_readable(self.uffd.fd(), Some(PATIENCE_NS)) {
                return;
            }
            self.finish_wake(shift);
        }
        self.report(shift);
        wait_readable(self.uffd.fd(), None);
    }

    /// Makes sure that the waker has done what it was asked for.
    fn finish_wake(&self, shift: &mut Shift) {
        shift.posted = None;
        if self.waker.as_ref().is_some_and(|w| !w.finish()) {
            shift.skip = shift.pause;
            shift.pause = (shift.pause * 2).min(PAUSE_MAX);
        }
    }

    fn is_off(&self, shift: &Shift) -> bool {
        shift.handler > 0 && !self.all.load(Relaxed) && !self.is_ended()
    }

    /// Sleeps until this handler is on duty.
    fn report(&self, shift: &Shift) {
        if self.is_off(shift) {
            let mut off = self.off.lock();
            while self.is_off(shift) {
                off = self.changed.wait(off);
            }
        }
    }

    /// Notes a fault of `thread` that the handler has taken. Whether the handler should leave the
    /// waking to [`Duty::wake`].
    pub fn note(&self, shift: &mut Shift, thread: u32) -> bool {
        if self.last.load(Relaxed) != thread {
            self.last.store(thread, Relaxed);
            self.switches.fetch_add(1, Relaxed);
        }
        let faults = self.faults.fetch_add(1, Relaxed) + 1;
        if faults.is_multiple_of(ROUND) {
            self.end_round();
        }
        if shift.handler > 0 {
            return false;
        }
        // A thread that faults is awake. Another's fault says nothing about it.
        if shift.posted.take().is_some_and(|posted| posted != thread) {
            self.finish_wake(shift);
        }
        let all = self.all.load(Relaxed);
        if faults.is_multiple_of(LOOK) {
            if shift.skip == 0 {
                shift.pause = (shift.pause / 2).max(PAUSE_MIN);
            }
            let cpu = if all { Some(self.cpus[0]) } else { shift.whereabouts.cpu_of(thread) };
            self.follow(shift, cpu);
        }
        shift.skip = shift.skip.saturating_sub(1);
        self.waker.is_some() && !all && shift.skip == 0
    }

    /// Decides who is on duty for the next round.
    fn end_round(&self) {
        let several = self.switches.swap(0, Relaxed) >= SWITCHES;
        if several != self.all.load(Relaxed) {
            self.set(several);
        }
    }

    fn follow(&self, shift: &mut Shift, cpu: Option<usize>) {
        if let (Some(cpu), Some(waker)) = (cpu.filter(|cpu| *cpu != shift.cpu), &self.waker) {
            shift.cpu = cpu;
            pin(cpu);
            waker.follow(cpu);
        }
    }

    /// Wakes whoever waits for pages in `[start, start + len)`, in the best way.
    pub fn wake(&self, shift: &mut Shift, start: usize, len: usize) {
        match &self.waker {
            Some(waker) if waker.post(start, len) => shift.posted = Some(self.last.load(Relaxed)),
            _ => self.uffd.wake(start, len),
        }
    }

    /// Puts all handlers on duty, or all but the first off duty.
    fn set(&self, all: bool) {
        let _off = self.off.lock();
        self.all.store(all, SeqCst);
        self.changed.notify_all();
    }

    /// In a child of fork, before any handler runs: the lock is free, whoever of the parent's
    /// threads had it.
    ///
    /// # Safety
    /// - No handler runs in this process.
    pub unsafe fn reset_in_child(&self) {
        // SAFETY: by the caller's promise nobody holds the lock.
        unsafe { self.off.reset() };
    }

    /// Wakes every handler, for good: the service ends.
    pub fn end(&self) {
        let _off = self.off.lock();
        self.ended.store(true, Relaxed);
        self.changed.notify_all();
    }

    /// Whether the service is to end.
    pub fn is_ended(&self) -> bool {
        self.ended.load(Relaxed)
    }

    /// Ends the waker's thread; to be called when every handler has ended.
    pub fn end_waker(&self) {
        if let Some(waker) = &self.waker {
            waker.end();
        }
    }
}

impl Shift {
    /// A handler that begins, pinned to a CPU.
    pub fn new(handler: usize, cpu: usize) -> Shift {
        Shift {
            handler,
            cpu,
            posted: None,
            skip: 0,
            pause: PAUSE_MIN,
            whereabouts: Whereabouts::default(),
        }
    }

    /// Whether the handler may look for the next fault before it sleeps: a thread that it has woken
    /// on its own CPU has often run and faulted again by then. Not if the waker must run first, for
    /// which this CPU must be idle.
    pub fn may_look(&self) -> bool {
        self.posted.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_sys::memory::zone::Zone;
    use memfold_sys::thread::Thread;
    use memfold_sys::uffd::feature;
    use memfold_sys::units::PAGE_SIZE;

    fn duty() -> Duty {
        let uffd =
            Arc::new(Uffd::open(feature::MOVE | feature::THREAD_ID, true).expect("userfaultfd"));
        let duty = Duty::new(&uffd);
        if let Some((main, arg)) = duty.waker_thread() {
            Thread::start(c"memfold-wake", None, main, arg).expect("a thread");
        }
        duty
    }

    #[test]
    fn one_thread_is_served_by_one_handler_and_several_by_all() {
        let duty = duty();
        let mut shift = Shift::new(0, duty.cpus()[0]);
        let is_off = || duty.is_off(&Shift::new(1, 0));
        assert!(is_off());
        (0..2 * ROUND).for_each(|i| {
            duty.note(&mut shift, 1 + i % 2);
        });
        assert!(!is_off());
        duty.report(&Shift::new(1, 0));
        (0..2 * ROUND).for_each(|i| {
            duty.note(&mut shift, 1 + i / ROUND);
        });
        assert!(is_off());
        duty.end_waker();
    }

    #[test]
    fn a_handler_off_duty_sleeps_until_it_is_needed_or_the_service_ends() {
        let duty = duty();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| duty.report(&Shift::new(1, 0)));
            duty.set(true);
            waiting.join().unwrap();
            duty.set(false);
            let waiting = scope.spawn(|| duty.report(&Shift::new(1, 0)));
            duty.end();
            waiting.join().unwrap();
        });
        duty.end_waker();
    }

    /// The waker's thread is stopped for good, as on a CPU that others keep busy: the handler wakes
    /// in its place.
    #[test]
    fn a_waker_that_never_runs_is_made_up_for() {
        let duty = duty();
        let Some(waker) = &duty.waker else { return };
        let zone = Zone::reserve(PAGE_SIZE, PAGE_SIZE).unwrap();
        let page = zone.start();
        // SAFETY: this test serves it.
        unsafe { duty.uffd.register(page, PAGE_SIZE, false).unwrap() };
        let mut shift = Shift::new(0, duty.cpus()[0]);
        std::thread::scope(|scope| {
            // SAFETY: inside the zone; the page is zeros once it is served.
            let reader = scope.spawn(move || unsafe { (page as *const u8).read_volatile() });
            duty.wait(&mut shift);
            let Ok(memfold_sys::uffd::Event::Fault { thread, .. }) = duty.uffd.read() else {
                panic!("no fault")
            };
            let source = Zone::reserve(PAGE_SIZE, PAGE_SIZE).unwrap();
            // SAFETY: both pages are the test's own.
            unsafe {
                source.as_ptr().write(7);
                duty.uffd.move_pages(page, source.start(), PAGE_SIZE, false).unwrap();
            }
            duty.note(&mut shift, thread);
            waker.stop_for_test(page, PAGE_SIZE);
            shift.posted = Some(thread);
            assert!(!reader.is_finished());
            duty.finish_wake(&mut shift);
            assert_eq!(reader.join().unwrap(), 7);
            assert_eq!((shift.skip, shift.posted), (PAUSE_MIN, None));
        });
    }
}
