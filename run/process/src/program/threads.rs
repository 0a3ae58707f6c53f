//! The engine's threads in the process: those that fold and load, and the one that works for
//! children of vfork. Also what may end a thread without a call.
use crate::diagnostics;
use crate::engine;
use crate::marks::state::ProgramState;
use crate::paging::Paging;
use crate::program::{LOST, get};
use crate::threads::{self, SERVER};
use alloc::sync::Arc;
use core::sync::atomic::{AtomicBool, Ordering::SeqCst};
use memfold_engine::delivery::background;
use memfold_engine::pager::Pager;
use memfold_gate::{child, hand_over};
use memfold_os::sync::Mutex;
use memfold_os::thread::{bare, yield_now};

/// The engine's threads in the program's process.
pub struct ProgramThreads {
    pager: Arc<Pager>,
    /// Number of threads that fold and load.
    worker_count: usize,
    /// Nice value of the first engine thread before it raised its priority. All other engine
    /// threads have it.
    nice: i32,
    /// Whether a thread runs that does what children of vfork must not do.
    serves_errands: AtomicBool,
    /// Whether a thread has a seccomp filter, which may kill it.
    is_filtered: AtomicBool,
    /// Whether this program has set such a filter. One from before has allowed the engine to start.
    has_own_filter: AtomicBool,
}

impl ProgramThreads {
    /// Returns the threads of an engine of which only the first one runs, the caller. `is_filtered`
    /// is whether it has a seccomp filter.
    pub fn new(pager: &Arc<Pager>, worker_count: usize, is_filtered: bool) -> ProgramThreads {
        ProgramThreads {
            pager: pager.clone(),
            worker_count,
            nice: threads::own_nice(),
            serves_errands: AtomicBool::new(false),
            is_filtered: AtomicBool::new(is_filtered),
            has_own_filter: AtomicBool::new(false),
        }
    }

    /// Runs `what`. If the caller is a child of vfork, a thread of the engine runs it, because the
    /// child may be killed while it holds a lock. `what` must not touch the program's memory. The
    /// child ends if its parent's process has ended in the middle of this.
    pub fn on_behalf<T: Send>(&self, what: impl FnOnce() -> T + Send) -> T {
        self.try_on_behalf(what).unwrap_or_else(|| diagnostics::die(format_args!("{LOST}")))
    }

    /// Does as [`ProgramThreads::on_behalf`]. Returns `None` if the process of the child's parent
    /// has ended, and with it the engine, or the thread that ran `what`.
    pub fn try_on_behalf<T: Send>(&self, what: impl FnOnce() -> T + Send) -> Option<T> {
        let (mut what, mut result) = (Some(what), None);
        while self.serves_errands() && child().is_some() {
            // SAFETY: `what` is `Send`. `result` is only read when no thread runs `what`: when it is
            // done, or after `inherit`. `what` touches no memory of the program, as documented.
            let is_done =
                unsafe { hand_over(&mut || result = what.take().map(|what| what()), &SERVER) };
            if is_done {
                return result;
            }
            engine::inherit();
            if result.is_some() || what.is_none() || get().is_none() {
                return result;
            }
        }
        what.map(|what| what())
    }

    /// Returns whether a thread does errands for children of vfork.
    pub fn serves_errands(&self) -> bool {
        self.serves_errands.load(SeqCst)
    }

    /// Starts the thread that does errands for children of vfork. Without it they do the work
    /// themselves. Locks the program's `state`.
    pub fn start_serving(&self, state: &Mutex<ProgramState>) {
        if !self.serves_errands() {
            // A copy of the process must not have a thread that is half started.
            let _state = state.lock();
            engine::have_done(|| {
                if !self.serves_errands() {
                    let outcome = threads::start_serving();
                    self.serves_errands.store(outcome.is_ok(), SeqCst);
                }
            });
        }
    }

    /// Records that a thread is about to set a seccomp filter.
    pub fn note_filter(&self) {
        self.is_filtered.store(true, SeqCst);
        self.has_own_filter.store(true, SeqCst);
    }

    /// Returns whether a thread has a seccomp filter, which may kill it.
    pub fn is_filtered(&self) -> bool {
        self.is_filtered.load(SeqCst)
    }

    /// Returns whether this program has set such a filter.
    pub fn has_own_filter(&self) -> bool {
        self.has_own_filter.load(SeqCst)
    }

    /// Starts all engine threads except the first, which calls this. Threads that can't be started
    /// now are tried again at the next look.
    pub fn start(&self, state: &mut ProgramState, paging: &Paging, is_past: bool) {
        let list = || {
            self.pager.prepare();
            let mut all = background::threads(&self.pager, self.worker_count);
            all.extend(paging.reader_of_moves());
            all
        };
        state.threads.advance(list, self.nice, is_past);
    }

    /// Stops all engine threads except the first. The workers are stopped first, because a worker
    /// may wait for another thread.
    pub fn stop(&self, paging: &Paging) {
        self.pager.stop_workers();
        bare::await_others_end(background::is_worker, yield_now);
        self.pager.stop();
        threads::stop_serving(true);
        if let Err(e) = paging.stop_reading_moves() {
            diagnostics::die(format_args!("An engine thread can't be stopped: {e}"));
        }
    }

    /// Undoes [`ProgramThreads::stop`]: the threads are about to be started again.
    pub fn resume(&self) {
        self.pager.resume();
        threads::stop_serving(false);
    }
}
