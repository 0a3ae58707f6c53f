//! Which handler threads are on duty.
//!
//! A fault wakes every thread that waits for the descriptor. While one thread of the program
//! faults, one handler on that thread's CPU serves it without an interrupt between CPUs; any other
//! would wake for nothing, and as it runs on another CPU, every change of the page table would
//! interrupt that one too (10 us a call, `DESIGN.md`). So handler 0 alone is on duty while faults
//! come from one thread, and follows that thread to its CPU. When they come from several threads,
//! all handlers are, each on a CPU of its own; or handler 0 alone with all those threads kept on
//! its CPU, if that is faster ([`crate::delivery::program::contest`]).
//!
//! A thread that faults all the time is kept on that CPU ([`crate::delivery::program::keep`]), for
//! a while: then the kernel may move it once.
//!
//! # Who serves and who wakes
//! `delivery/program/duty.rs`, `delivery/program/waker.rs`, `delivery/program/keep.rs`. Every
//! thread that waits for the descriptor wakes at each fault, so while one thread of the program
//! faults only handler 0 waits, pinned to that thread's CPU and following it (it looks at `/proc`
//! every 4 faults); when several threads fault, all handlers wait, one for each CPU. A thread that
//! is woken by a handler working on its CPU is put on another CPU by the kernel, which costs two
//! wakes from idle for each fault from then on. So handler 0 does not wake it: it asks the waker, a
//! SCHED_IDLE thread on the same CPU, and goes to sleep; the kernel leaves a thread where only
//! SCHED_IDLE threads run. If the waker does not get to run within 10 ms (the CPU is busy), the
//! handler wakes by itself, and for the next 256 to 8192 faults. Measured in one run on a quiet
//! machine: 25 us a random 4 KiB read in place of 70 to 90.
//!
//! Any other thread that happens to be awake on that CPU (a kernel thread will do) makes the kernel
//! move the program all the same: 300 times a second here, and until the handler has found it each
//! fault is one between CPUs. So `run` keeps a thread that faults all the time (16 faults in a row
//! within 8 ms) on the handler's CPU: `delivery/program/keep.rs` narrows its affinity to that CPU
//! while it waits for a fault, and the handler then wakes it by itself, with two context switches a
//! fault in place of four. It is let go 10 ms after its last fault, and every 50 ms in any case:
//! for the next 16 faults the kernel may put it elsewhere, if this CPU is wanted by others. Nobody
//! may see this who doesn't look from outside. What a thread starts inherits its affinity, so every
//! call of libc that starts a thread or a process, executes a program, asks for or sets an
//! affinity, or changes the user (the engine may then not be allowed to give it back), lets it go
//! first, and for a second nothing is kept (`release.rs`; `fork.rs`, `clone.rs`, `threads.rs`,
//! `syscall.rs`). A Go program does such things by system calls of its own, and is left alone
//! (`go.rs`). Sorting and redis GET, a third of the data in memory: 1.7 times as fast, SET 1.25
//! times (`--keep-cpu off` compares). After a fault a handler looks for the next before it sleeps:
//! the thread that it has woken on its CPU has mostly run and faulted again by then.
//!
//! **Several threads** are served apart, by all handlers, or together: by handler 0, with those
//! that fault often (four times in 50 ms, 16 threads at most) kept on its CPU. Apart uses several
//! CPUs, and each page that leaves memory interrupts the others; together interrupts nobody. Which
//! is better depends on the program: memcached, whose threads wait for each other's locks, is 1.4
//! times as fast together, MariaDB half as fast. So both are tried in turn
//! (`delivery/program/contest.rs`), 512 timed faults each; together must win twice by a tenth, and
//! go on winning, after each 16,384 faults. Where it loses clearly, the next contest is 262,144
//! faults later.
use crate::delivery::program::contest::{Contest, Way};
use crate::delivery::program::keep::{KEPT_MAX, Keep};
use crate::delivery::program::waker::{PATIENCE_NS, Waker};
use alloc::sync::Arc;
use alloc::vec::Vec;
use memfold_sys::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed, Ordering::SeqCst};
use memfold_sys::sync::{Condvar, Mutex};
use memfold_sys::thread::{Whereabouts, each_cpu, now_ns, pin, wait_readable};
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
/// A thread is kept on its CPU if so many faults in a row were its, within that time.
const KEEP_FAULTS: u32 = 16;
const KEEP_WITHIN_NS: u64 = 8_000_000;
/// It is kept for so long at most, and no longer than [`PATIENCE_NS`] after its last fault.
const KEEP_NS: u64 = 50_000_000;
/// Of several threads, those are kept that fault so often in that time.
const GATHER_FAULTS: u32 = 4;
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
    keep: Keep,
    contest: Mutex<Contest>,
    all: AtomicBool,
    /// Several threads are served together; then not all are on duty.
    together: AtomicBool,
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
    /// The thread of the last fault, how many in a row were its, and when the first of them was.
    thread: u32,
    row: u32,
    row_ns: u64,
    /// When what is kept must be let go.
    keep_until_ns: u64,
    /// Threads that have faulted since the last that were kept were let go, and how often.
    seen: [(u32, u32); KEPT_MAX],
}

impl Duty {
    /// For a handler on each CPU that the caller may run on. With `keeps`, a thread may be kept on
    /// its CPU.
    pub fn new(uffd: &Arc<Uffd>, keeps: bool) -> Duty {
        let mut cpus = Vec::new();
        each_cpu(|cpu| cpus.push(cpu));
        cpus.truncate(HANDLERS_MAX);
        let waker = (cpus.len() > 1).then(|| Waker::new(uffd));
        Duty {
            uffd: uffd.clone(),
            cpus,
            waker,
            keep: Keep::new(keeps),
            contest: Mutex::new(Contest::new()),
            all: AtomicBool::new(false),
            together: AtomicBool::new(false),
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
        let keeps = shift.handler == 0 && self.keep.is_any();
        if keeps || shift.posted.is_some() {
            if wait_readable(self.uffd.fd(), Some(PATIENCE_NS)) {
                return;
            }
            self.keep.widen();
            if shift.posted.is_some() {
                self.finish_wake(shift);
            }
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
        if self.together.load(Relaxed) {
            self.gather(shift, thread);
            return false;
        }
        let all = self.all.load(Relaxed);
        if self.keep.is_any() {
            if !all && now_ns() < shift.keep_until_ns {
                return false;
            }
            self.keep.widen();
            shift.row = 0;
        }
        shift.count(thread);
        if faults.is_multiple_of(LOOK) {
            if shift.skip == 0 {
                shift.pause = (shift.pause / 2).max(PAUSE_MIN);
            }
            let cpu = if all { Some(self.cpus[0]) } else { shift.whereabouts.cpu_of(thread) };
            self.follow(shift, cpu);
            if !all && cpu == Some(shift.cpu) && self.keep_if_hot(shift) {
                return false;
            }
        }
        shift.skip = shift.skip.saturating_sub(1);
        self.waker.is_some() && !all && shift.skip == 0
    }

    /// Decides who is on duty for the next round.
    fn end_round(&self) {
        let Some(mut contest) = self.contest.try_lock() else { return };
        let several = self.switches.swap(0, Relaxed) >= SWITCHES;
        let way = if several && self.keep.is_allowed() {
            contest.end_round(now_ns())
        } else {
            contest.break_off();
            Way::Apart
        };
        let (all, together) = (several && way == Way::Apart, several && way == Way::Together);
        if (all, together) != (self.all.load(Relaxed), self.together.load(Relaxed)) {
            self.set(all, together);
        }
    }

    /// Keeps a thread on the handler's CPU, if it faults often, and lets all go from time to time.
    fn gather(&self, shift: &mut Shift, thread: u32) {
        let now = now_ns();
        if now >= shift.keep_until_ns {
            self.keep.widen();
            (shift.seen, shift.keep_until_ns) = ([(0, 0); KEPT_MAX], now + KEEP_NS);
        }
        if shift.count_seen(thread) >= GATHER_FAULTS && !self.keep.keeps(thread) {
            self.keep.narrow(thread, shift.cpu);
        }
    }

    fn follow(&self, shift: &mut Shift, cpu: Option<usize>) {
        if let (Some(cpu), Some(waker)) = (cpu.filter(|cpu| *cpu != shift.cpu), &self.waker) {
            shift.cpu = cpu;
            pin(cpu);
            waker.follow(cpu);
        }
    }

    /// Keeps the thread of the last fault on the handler's CPU, if it faults all the time.
    fn keep_if_hot(&self, shift: &mut Shift) -> bool {
        if shift.row < KEEP_FAULTS {
            return false;
        }
        let now = now_ns();
        let hot = now - shift.row_ns < KEEP_WITHIN_NS;
        shift.row = 0;
        shift.keep_until_ns = now + KEEP_NS;
        let kept = hot && self.keep.narrow(shift.thread, shift.cpu);
        if kept && self.all.load(SeqCst) {
            // Another handler has put all on duty meanwhile.
            self.keep.widen();
            return false;
        }
        kept
    }

    /// A thread of the program is about to make another, or a program, or to ask for its own CPUs:
    /// what is kept is let go, and for a second nothing is kept.
    pub fn release(&self) {
        self.keep.release();
    }

    /// Wakes whoever waits for pages in `[start, start + len)`, in the best way.
    pub fn wake(&self, shift: &mut Shift, start: usize, len: usize) {
        match &self.waker {
            Some(waker) if waker.post(start, len) => shift.posted = Some(self.last.load(Relaxed)),
            _ => self.uffd.wake(start, len),
        }
    }

    /// Puts all handlers on duty, or all but the first off duty; with `together`, several threads
    /// are served by that.
    fn set(&self, all: bool, together: bool) {
        let _off = self.off.lock();
        self.all.store(all, SeqCst);
        self.together.store(together, SeqCst);
        self.changed.notify_all();
        self.keep.widen();
    }

    /// In a child of fork, before any handler runs: the lock is free, whoever of the parent's
    /// threads had it.
    ///
    /// # Safety
    /// - No handler runs in this process.
    pub unsafe fn reset_in_child(&self) {
        // SAFETY: by the caller's promise nobody holds the locks.
        unsafe {
            self.off.reset();
            self.contest.reset();
        }
        // SAFETY: likewise.
        unsafe { self.keep.reset_in_child() };
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
            thread: 0,
            row: 0,
            row_ns: 0,
            keep_until_ns: 0,
            seen: [(0, 0); KEPT_MAX],
        }
    }

    /// Whether the handler may look for the next fault before it sleeps: a thread that it has woken
    /// on its own CPU has often run and faulted again by then. Not if the waker must run first, for
    /// which this CPU must be idle.
    pub fn may_look(&self) -> bool {
        self.posted.is_none()
    }

    /// Counts a fault of one of several threads: how many it has had. 0 for a thread for which
    /// there is no room.
    fn count_seen(&mut self, thread: u32) -> u32 {
        let Some(seen) = self.seen.iter_mut().find(|seen| seen.0 == thread || seen.0 == 0) else {
            return 0;
        };
        *seen = (thread, seen.1 + 1);
        seen.1
    }

    /// Counts the faults in a row of one thread.
    fn count(&mut self, thread: u32) {
        if self.row == 0 || self.thread != thread {
            (self.thread, self.row, self.row_ns) = (thread, 0, now_ns());
        }
        self.row += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_sys::memory::zone::Zone;
    use memfold_sys::thread::{Affinity, Thread, thread_id};
    use memfold_sys::uffd::feature;
    use memfold_sys::units::PAGE_SIZE;

    fn duty() -> Duty {
        let uffd =
            Arc::new(Uffd::open(feature::MOVE | feature::THREAD_ID, true).expect("userfaultfd"));
        let duty = Duty::new(&uffd, true);
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

    /// Does something while two other threads are there, whose numbers it is given.
    fn beside_two(test: impl FnOnce([u32; 2]) + Send) {
        let (numbers, end) = (std::sync::mpsc::channel(), std::sync::Barrier::new(3));
        std::thread::scope(|scope| {
            let (sender, end) = (&numbers.0, &end);
            for _ in 0..2 {
                scope.spawn(move || {
                    sender.send(thread_id()).unwrap();
                    end.wait();
                });
            }
            let two = [numbers.1.recv().unwrap(), numbers.1.recv().unwrap()];
            // One that fails must end too.
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| test(two)));
            end.wait();
            result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        });
    }

    #[test]
    fn several_threads_are_kept_together_and_let_go_from_time_to_time() {
        let duty = duty();
        let Some(&cpu) = duty.cpus().get(1) else { return };
        beside_two(|two| {
            let (mut shift, wide) = (Shift::new(0, cpu), Affinity::of(two[0]));
            let of_both = || two.map(|thread| Affinity::of(thread) == Some(Affinity::to(cpu)));
            let mut faults =
                |thread, count| (0..count).for_each(|_| assert!(!duty.note(&mut shift, thread)));
            duty.set(false, true);
            faults(two[0], GATHER_FAULTS);
            faults(two[1], GATHER_FAULTS - 1);
            assert_eq!(of_both(), [true, false], "the other has not faulted often");
            faults(two[1], 1);
            assert_eq!(of_both(), [true, true]);
            duty.set(true, false);
            assert_eq!(of_both(), [false, false], "it is no longer the faster way");
            duty.set(false, true);
            shift.keep_until_ns = 0;
            (0..GATHER_FAULTS).for_each(|_| assert!(!duty.note(&mut shift, two[0])));
            assert_eq!(of_both(), [true, false]);
            shift.keep_until_ns = 0;
            duty.note(&mut shift, two[1]);
            assert_eq!(two.map(Affinity::of), [wide, wide], "the time is up");
        });
        duty.end_waker();
    }

    #[test]
    fn several_threads_are_served_in_the_way_that_is_faster() {
        let duty = duty();
        let Some(&cpu) = duty.cpus().get(1) else { return };
        beside_two(|two| {
            let (mut shift, mut apart, mut together) = (Shift::new(0, cpu), 0, 0);
            for fault in 0..200 * ROUND {
                duty.note(&mut shift, two[fault as usize % 2]);
                if duty.together.load(Relaxed) {
                    together += 1;
                    continue;
                }
                apart += 1;
                let until = now_ns() + 20_000;
                while now_ns() < until {}
            }
            assert!(together > apart, "{together} faults together, {apart} apart");
        });
        duty.end_waker();
    }

    #[test]
    fn a_handler_off_duty_sleeps_until_it_is_needed_or_the_service_ends() {
        let duty = duty();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| duty.report(&Shift::new(1, 0)));
            duty.set(true, false);
            waiting.join().unwrap();
            duty.set(false, false);
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
