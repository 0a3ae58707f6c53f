//! Errands: what a thread of the program has done by engine threads, and waits for.
//!
//! Engine threads have a table of descriptors that isn't the program's ([`crate::thread::bare`]),
//! and every signal blocked: what the engine opens is there, and what it does to a file sends no
//! SIGXFSZ to the program. So where faults are served by the thread that has them, what needs such
//! a descriptor is handed to a thread that does nothing else. It takes no lock but the queue's, so
//! whoever waits may hold any other.
use crate::sync::atomic::{AtomicBool, Ordering::Relaxed};
use crate::sync::{Condvar, Mutex};
use alloc::sync::Arc;

/// One errand, on the stack of who waits for it.
struct DelegatedCall<'a> {
    work: *mut (dyn FnMut() + Send + 'a),
    next: *mut DelegatedCall<'a>,
    done: bool,
}

/// First in, first out; null where there is none.
struct CallList {
    first: *mut DelegatedCall<'static>,
    last: *mut DelegatedCall<'static>,
    /// Who serves is to end.
    stop: bool,
}

// SAFETY: the pointers lead to errands of threads that wait until they are done, whose work may be
// done by another thread; all else of them is used with the lock held.
unsafe impl Send for CallList {}

/// Where errands are handed over.
pub struct DelegateQueue {
    line: Mutex<CallList>,
    asked: Condvar,
    done: Condvar,
    /// Whether the calling thread has what errands need.
    is_own: fn() -> bool,
    /// Nobody serves yet.
    is_alone: AtomicBool,
}

impl DelegateQueue {
    /// No errands. `is_own`: whether the calling thread does its own, as an engine thread does.
    pub fn new(is_own: fn() -> bool) -> DelegateQueue {
        let line =
            CallList { first: core::ptr::null_mut(), last: core::ptr::null_mut(), stop: false };
        let (asked, done) = (Condvar::new(), Condvar::new());
        DelegateQueue {
            line: Mutex::new(line),
            asked,
            done,
            is_own,
            is_alone: AtomicBool::new(false),
        }
    }

    /// Does `work`: here, or by a thread that calls [`DelegateQueue::serve`], and waits until it is done.
    pub fn run<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        if (self.is_own)() || self.is_alone.load(Relaxed) {
            return work();
        }
        let (mut work, mut result) = (Some(work), None);
        let mut once = || result = work.take().map(|work| work());
        let mut errand =
            DelegatedCall { work: &raw mut once, next: core::ptr::null_mut(), done: false };
        // The line names no lifetime: nothing of the errand is used once this has returned.
        let own = (&raw mut errand).cast::<DelegatedCall<'static>>();
        let mut line = self.line.lock();
        match line.last.is_null() {
            true => line.first = own,
            // SAFETY: what is in the line waits, so it is there; the lock is held.
            false => unsafe { (*line.last).next = own },
        }
        line.last = own;
        self.asked.notify_one();
        // SAFETY: its own errand; the lock is held at each look.
        let is_done = || unsafe { (*own).done };
        while !is_done() {
            line = self.done.wait(line);
        }
        drop(line);
        result.expect("it was done")
    }

    /// Waits for one errand and does it. `false`: there is none, and [`DelegateQueue::stop`] was called.
    pub fn serve(&self) -> bool {
        let mut line = self.line.lock();
        while line.first.is_null() {
            if line.stop {
                return false;
            }
            line = self.asked.wait(line);
        }
        let errand = line.first;
        // SAFETY: what is in the line waits until `done`, which only this thread sets for it, as it
        // takes it out; the lock is held.
        let work = unsafe {
            line.first = (*errand).next;
            (*errand).work
        };
        if line.first.is_null() {
            line.last = core::ptr::null_mut();
        }
        drop(line);
        // SAFETY: as above: its owner waits, and touches nothing of it.
        unsafe { (*work)() };
        let _line = self.line.lock();
        // SAFETY: the owner looks with the lock held only, so it still waits.
        unsafe { (*errand).done = true };
        self.done.notify_all();
        true
    }

    /// Ends the threads that serve, when they have done what waits.
    pub fn stop(&self) {
        self.line.lock().stop = true;
        self.asked.notify_all();
    }

    /// Takes back [`DelegateQueue::stop`]: they are about to be started again.
    pub fn resume(&self) {
        self.line.lock().stop = false;
    }

    /// In a child of fork, while it has one thread: that does all by itself, until this is said not
    /// to be so any more.
    pub fn set_alone(&self, alone: bool) {
        self.is_alone.store(alone, Relaxed);
    }

    /// Nobody hands anything over until [`DelegateQueue::unfreeze`]: for a fork. Nothing is under way.
    pub fn freeze(&self) {
        core::mem::forget(self.line.lock());
    }

    /// Ends [`DelegateQueue::freeze`].
    ///
    /// # Safety
    /// - `freeze` has returned, in this process or in the parent that it is a copy of, and this is
    ///   called once for it.
    pub unsafe fn unfreeze(&self) {
        // SAFETY: the guard was forgotten.
        unsafe { self.line.unlock() };
    }
}

/// What is used by way of [`DelegateQueue`]: a disk or a remote store, where `T` is one.
pub struct Delegated<T: ?Sized> {
    to: Arc<T>,
    errands: Arc<DelegateQueue>,
}

impl<T: ?Sized> Delegated<T> {
    /// `to`, used by errands.
    pub fn new(to: Arc<T>, errands: Arc<DelegateQueue>) -> Delegated<T> {
        Delegated { to, errands }
    }

    /// The thing itself, for what needs no descriptor.
    pub fn itself(&self) -> &T {
        &self.to
    }

    /// Does something with it.
    pub fn with<R: Send>(&self, work: impl FnOnce(&T) -> R + Send) -> R
    where
        T: Send + Sync,
    {
        self.errands.run(|| work(&self.to))
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
    use std::thread::{current, scope};

    #[test]
    fn errands_of_many_threads_are_each_done_once_by_those_who_serve() {
        fn is_server() -> bool {
            current().name() == Some("server")
        }
        let errands = Arc::new(DelegateQueue::new(is_server));
        for _ in 0..3 {
            let errands = errands.clone();
            let serve = move || {
                loop {
                    errands.serve();
                }
            };
            std::thread::Builder::new().name("server".into()).spawn(serve).unwrap();
        }
        let sum = AtomicU64::new(0);
        let ask = |n: u64| {
            for i in 0..2000 {
                let mut local = 7;
                let by = errands.run(|| {
                    sum.fetch_add(n + i, SeqCst);
                    local += i;
                    is_server()
                });
                assert!(by && local == 7 + i);
            }
        };
        scope(|s| {
            (0..6).for_each(|n| {
                drop(s.spawn({
                    let ask = &ask;
                    move || ask(n)
                }))
            })
        });
        let each: u64 = (0..2000).sum();
        assert_eq!(sum.load(SeqCst), 6 * each + 2000 * (1 + 2 + 3 + 4 + 5));
    }

    #[test]
    fn who_has_what_is_needed_does_it_itself() {
        let here = current().id();
        assert_eq!(DelegateQueue::new(|| true).run(|| current().id()), here);
        let errands = DelegateQueue::new(|| false);
        errands.set_alone(true);
        assert_eq!(errands.run(|| current().id()), here);
    }
}
