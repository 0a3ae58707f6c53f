//! Delegated calls: a thread of the program has an engine thread make a call, and waits for it.
//!
//! Engine threads have a table of descriptors that isn't the program's ([`crate::thread::bare`]),
//! and block every signal. The engine's files are open only there, and an engine thread's write to
//! a file sends no SIGXFSZ to the program. So in inline delivery the faulting thread passes calls
//! that need such a descriptor to a dedicated thread. That thread takes only the queue's lock, so
//! the waiting thread may hold any other.
use crate::sync::atomic::{AtomicBool, Ordering::Relaxed};
use crate::sync::{Condvar, Mutex};
use alloc::sync::Arc;

/// One call, on the stack of the waiting thread.
struct DelegatedCall<'a> {
    work: *mut (dyn FnMut() + Send + 'a),
    next: *mut DelegatedCall<'a>,
    done: bool,
}

/// The queue, first in, first out; null where it is empty.
struct CallList {
    first: *mut DelegatedCall<'static>,
    last: *mut DelegatedCall<'static>,
    /// Whether the serving threads are to end.
    stop: bool,
}

// SAFETY: the pointers lead to calls of threads that wait until they are done. Another thread may
// run their work; all other fields are used with the lock held.
unsafe impl Send for CallList {}

/// The queue of delegated calls.
pub struct DelegateQueue {
    line: Mutex<CallList>,
    asked: Condvar,
    done: Condvar,
    /// Returns whether the calling thread has the engine's descriptors.
    is_own: fn() -> bool,
    /// Whether no thread serves yet.
    is_alone: AtomicBool,
}

impl DelegateQueue {
    /// Makes an empty queue. `is_own` returns whether the calling thread is an engine thread, which
    /// makes its own calls.
    pub fn new(is_own: fn() -> bool) -> DelegateQueue {
        let line =
            CallList { first: core::ptr::null_mut(), last: core::ptr::null_mut(), stop: false };
        let (calls, answers) = (Condvar::new(), Condvar::new());
        DelegateQueue {
            line: Mutex::new(line),
            asked: calls,
            done: answers,
            is_own,
            is_alone: AtomicBool::new(false),
        }
    }

    /// Runs `work` here, or in a thread that calls [`DelegateQueue::serve`], and waits until it is
    /// done.
    pub fn run<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        if (self.is_own)() || self.is_alone.load(Relaxed) {
            return work();
        }
        let (mut work, mut result) = (Some(work), None);
        let mut run_work = || result = work.take().map(|work| work());
        let mut call =
            DelegatedCall { work: &raw mut run_work, next: core::ptr::null_mut(), done: false };
        // The queue's type has no lifetime: it doesn't use the call after this has returned.
        let own = (&raw mut call).cast::<DelegatedCall<'static>>();
        let mut line = self.line.lock();
        match line.last.is_null() {
            true => line.first = own,
            // SAFETY: queued calls wait, so the last one exists; the lock is held.
            false => unsafe { (*line.last).next = own },
        }
        line.last = own;
        self.asked.notify_one();
        // SAFETY: it is this thread's own call; the lock is held at each look.
        let is_done = || unsafe { (*own).done };
        while !is_done() {
            line = self.done.wait(line);
        }
        drop(line);
        result.expect("it was done")
    }

    /// Waits for one call and runs it. Returns `false` if there is none after
    /// [`DelegateQueue::stop`].
    pub fn serve(&self) -> bool {
        let mut line = self.line.lock();
        while line.first.is_null() {
            if line.stop {
                return false;
            }
            line = self.asked.wait(line);
        }
        let call = line.first;
        // SAFETY: a queued call waits until `done`. Only this thread sets that, because it takes
        // the call out; the lock is held.
        let work = unsafe {
            line.first = (*call).next;
            (*call).work
        };
        if line.first.is_null() {
            line.last = core::ptr::null_mut();
        }
        drop(line);
        // SAFETY: the caller waits until `done`, and touches nothing of the call.
        unsafe { (*work)() };
        let _line = self.line.lock();
        // SAFETY: the caller reads `done` only with the lock held, so it still waits.
        unsafe { (*call).done = true };
        self.done.notify_all();
        true
    }

    /// Ends the serving threads when the queue is empty.
    pub fn stop(&self) {
        self.line.lock().stop = true;
        self.asked.notify_all();
    }

    /// Undoes [`DelegateQueue::stop`]: the threads are about to be started again.
    pub fn resume(&self) {
        self.line.lock().stop = false;
    }

    /// Sets whether the calling thread makes all calls itself. It does in a child of fork while it
    /// is the only thread.
    pub fn set_alone(&self, alone: bool) {
        self.is_alone.store(alone, Relaxed);
    }

    /// Blocks the queue until [`DelegateQueue::unfreeze`], for a fork. No call is in progress then.
    pub fn freeze(&self) {
        core::mem::forget(self.line.lock());
    }

    /// Returns whether a thread uses the queue at this moment, or has ended while it did.
    pub fn is_held(&self) -> bool {
        self.line.is_held()
    }

    /// Ends [`DelegateQueue::freeze`].
    ///
    /// # Safety
    /// - `freeze` has returned, in this process or in the parent that it is a copy of, and this is
    ///   called once for it.
    pub unsafe fn unfreeze(&self) {
        // SAFETY: the guard was forgotten by `freeze`, so the lock is held.
        unsafe { self.line.unlock() };
    }
}

/// A disk or a remote store that is used through a [`DelegateQueue`].
pub struct Delegated<T: ?Sized> {
    to: Arc<T>,
    queue: Arc<DelegateQueue>,
}

impl<T: ?Sized> Delegated<T> {
    /// Makes calls to `to` go through the queue.
    pub fn new(to: Arc<T>, queue: Arc<DelegateQueue>) -> Delegated<T> {
        Delegated { to, queue }
    }

    /// Returns the object itself, for calls that need no descriptor.
    pub fn itself(&self) -> &T {
        &self.to
    }

    /// Runs a call on it.
    pub fn with<R: Send>(&self, work: impl FnOnce(&T) -> R + Send) -> R
    where
        T: Send + Sync,
    {
        self.queue.run(|| work(&self.to))
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
    use std::thread::{current, scope};

    #[test]
    fn delegated_calls_of_many_threads_each_run_once() {
        fn is_server() -> bool {
            current().name() == Some("server")
        }
        let queue = Arc::new(DelegateQueue::new(is_server));
        for _ in 0..3 {
            let queue = queue.clone();
            let serve = move || {
                loop {
                    queue.serve();
                }
            };
            std::thread::Builder::new().name("server".into()).spawn(serve).unwrap();
        }
        let sum = AtomicU64::new(0);
        let ask = |n: u64| {
            for i in 0..2000 {
                let mut local = 7;
                let by = queue.run(|| {
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
    fn thread_with_own_descriptors_runs_its_call_itself() {
        let own_id = current().id();
        assert_eq!(DelegateQueue::new(|| true).run(|| current().id()), own_id);
        let queue = DelegateQueue::new(|| false);
        queue.set_alone(true);
        assert_eq!(queue.run(|| current().id()), own_id);
    }
}
