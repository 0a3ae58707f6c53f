//! Keeps threads that fault all the time on the CPU where their faults are served.
//!
//! The kernel puts a thread that is woken on an idle CPU if there is one, as the CPU of who wakes
//! it is busy (`select_idle_sibling` in Linux kernel/sched/fair.c). There the next fault must
//! interrupt a CPU that sleeps, and the handler must follow: on a virtual machine with two CPUs
//! this made faults cost twice as much. So while a thread does little else but fault, it may for
//! some time run on its handler's CPU only: its affinity is narrowed, and given back before anybody
//! misses it. Threads and programs that it starts would inherit the narrow one, and it may ask for
//! its own: whoever lets a program be managed so has it call [`Keep::release`] before it does such
//! things.
//!
//! There is no lock: a signal handler of the program may call for a release in the middle of one.
use core::cell::UnsafeCell;
use memfold_sys::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use memfold_sys::thread::{Affinity, now_ns};

/// After a release no thread is kept for so long: what the release is for takes less.
const RELEASED_NS: u64 = 1_000_000_000;

/// Threads that are kept at most.
pub(crate) const KEPT_MAX: usize = 16;

/// The threads that are kept on a CPU.
pub(crate) struct Keep {
    allowed: bool,
    /// Their numbers; 0 where there is none. Looked through at each fault, so they lie side by
    /// side.
    threads: [AtomicU32; KEPT_MAX],
    before: [UnsafeCell<Before>; KEPT_MAX],
    /// Threads in [`Keep::widen`], which may look at a `before`.
    widening: AtomicU32,
    not_before_ns: AtomicU64,
}

/// What the thread that is kept had, and has.
#[derive(Default)]
struct Before {
    wide: Affinity,
    narrow: Affinity,
}

// SAFETY: each `before` is written by one thread (`narrow`) while no other looks at it: see there.
unsafe impl Sync for Keep {}

impl Keep {
    /// Keeps no thread, and never will unless it is allowed.
    pub fn new(allowed: bool) -> Keep {
        Keep {
            allowed,
            threads: Default::default(),
            before: Default::default(),
            widening: AtomicU32::new(0),
            not_before_ns: AtomicU64::new(0),
        }
    }

    /// Whether any thread is kept.
    pub fn is_any(&self) -> bool {
        self.threads.iter().any(|kept| kept.load(SeqCst) != 0)
    }

    /// Whether this thread is kept.
    pub fn keeps(&self, thread: u32) -> bool {
        self.threads.iter().any(|kept| kept.load(SeqCst) == thread)
    }

    /// Whether threads may be kept at this time.
    pub fn is_allowed(&self) -> bool {
        self.allowed && !self.is_forbidden()
    }

    fn is_forbidden(&self) -> bool {
        now_ns() < self.not_before_ns.load(SeqCst)
    }

    /// Keeps `thread`, which isn't kept yet, on `cpu` from now on. Called by one handler, always
    /// the same, while the thread waits for it. Returns whether the thread is kept.
    pub fn narrow(&self, thread: u32, cpu: usize) -> bool {
        if !self.is_allowed() {
            return false;
        }
        let Some(place) = self.threads.iter().position(|kept| kept.load(SeqCst) == 0) else {
            return false;
        };
        let kept = &self.threads[place];
        // After that: who has taken the number that was there may look at `before` still.
        if self.widening.load(SeqCst) != 0 {
            return false;
        }
        let (wide, narrow) = (Affinity::of(thread), Affinity::to(cpu));
        let Some(wide) = wide.filter(|wide| wide.count() > 1) else {
            self.forbid();
            return false;
        };
        // SAFETY: only this thread writes. Another looks only if it has taken a number out of
        // `kept`, which this one puts there after writing; and until it has looked, `widening` is
        // not 0.
        unsafe { *self.before[place].get() = Before { wide, narrow } };
        // First this and then the look at the time: a release does it the other way round, so one
        // of the two sees the other.
        kept.store(thread, SeqCst);
        let given = !self.is_forbidden() && narrow.give(thread);
        if !given {
            self.forbid();
            kept.store(0, SeqCst);
        } else if kept.load(SeqCst) != thread {
            // Released before it was narrowed.
            wide.give(thread);
        }
        kept.load(SeqCst) == thread
    }

    /// The threads that are kept may run where they could before; unless somebody has changed that
    /// meanwhile.
    pub fn widen(&self) {
        self.widening.fetch_add(1, SeqCst);
        for (kept, before) in self.threads.iter().zip(&self.before) {
            let thread = kept.swap(0, SeqCst);
            if thread != 0 {
                // SAFETY: it was written before `kept` was set, and is not written again while
                // `widening` counts this thread.
                let before = unsafe { &*before.get() };
                if Affinity::of(thread) == Some(before.narrow) {
                    before.wide.give(thread);
                }
            }
        }
        self.widening.fetch_sub(1, SeqCst);
    }

    /// As [`Keep::widen`], and for a second no thread is kept. Called by threads of the program.
    pub fn release(&self) {
        if self.allowed {
            self.forbid();
            if self.is_any() {
                self.widen();
            }
        }
    }

    fn forbid(&self) {
        self.not_before_ns.store(now_ns() + RELEASED_NS, SeqCst);
    }

    /// In a child of fork: the thread that made it had released, and whom the parent keeps are not
    /// here.
    ///
    /// # Safety
    /// - No other thread of this process uses it.
    pub unsafe fn reset_in_child(&self) {
        self.threads.iter().for_each(|kept| kept.store(0, SeqCst));
        self.widening.store(0, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_sys::thread::{each_cpu, thread_id};

    /// Runs on a thread of its own, with two CPUs to choose from.
    fn with_choice(test: impl FnOnce(u32, [usize; 2], Affinity) + Send + 'static) {
        let (mut cpus, wide) = (Vec::new(), Affinity::of(0).unwrap());
        each_cpu(|cpu| cpus.push(cpu));
        let Some(&two) = cpus.first_chunk::<2>() else {
            eprintln!("skipped: this machine has one CPU");
            return;
        };
        std::thread::spawn(move || test(thread_id(), two, wide)).join().unwrap();
    }

    #[test]
    fn a_thread_is_kept_and_gets_its_affinity_back() {
        with_choice(|thread, [_, cpu], wide| {
            let keep = Keep::new(true);
            assert!(keep.narrow(thread, cpu));
            assert_eq!((keep.is_any(), Affinity::of(0)), (true, Some(Affinity::to(cpu))));
            keep.widen();
            assert_eq!((keep.is_any(), Affinity::of(0)), (false, Some(wide)));
        });
    }

    #[test]
    fn several_are_kept_and_all_let_go_at_once() {
        with_choice(|thread, [_, cpu], wide| {
            let (keep, here) = (Keep::new(true), std::sync::Barrier::new(2));
            std::thread::scope(|scope| {
                let other = scope.spawn(|| {
                    assert!(keep.narrow(thread_id(), cpu));
                    here.wait();
                    here.wait();
                    Affinity::of(0)
                });
                here.wait();
                assert!(keep.narrow(thread, cpu));
                assert_eq!(Affinity::of(0), Some(Affinity::to(cpu)));
                keep.widen();
                here.wait();
                assert_eq!((other.join().unwrap(), Affinity::of(0)), (Some(wide), Some(wide)));
            });
        });
    }

    #[test]
    fn a_release_lasts() {
        with_choice(|thread, [_, cpu], wide| {
            let keep = Keep::new(true);
            assert!(keep.narrow(thread, cpu));
            keep.release();
            assert_eq!(Affinity::of(0), Some(wide));
            assert!(!keep.narrow(thread, cpu));
            assert_eq!((keep.is_any(), Affinity::of(0)), (false, Some(wide)));
        });
    }

    #[test]
    fn what_somebody_else_has_set_stays() {
        with_choice(|thread, [other, cpu], _| {
            let keep = Keep::new(true);
            assert!(keep.narrow(thread, cpu));
            assert!(Affinity::to(other).give(0));
            keep.widen();
            assert_eq!((keep.is_any(), Affinity::of(0)), (false, Some(Affinity::to(other))));
        });
    }

    #[test]
    fn nobody_is_kept_where_it_is_not_allowed_or_changes_nothing() {
        with_choice(|thread, [_, cpu], wide| {
            assert!(!Keep::new(false).narrow(thread, cpu));
            assert_eq!(Affinity::of(0), Some(wide));
            assert!(Affinity::to(cpu).give(0));
            assert!(!Keep::new(true).narrow(thread, cpu));
            assert!(!Keep::new(true).narrow(u32::MAX >> 1, cpu), "there is no such thread");
        });
    }
}
