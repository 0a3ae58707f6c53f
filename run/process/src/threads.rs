//! When the engine's threads start, and their priority.
use crate::diagnostics::unserved::unserved_later;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use memfold_engine::delivery::background::EngineThread;
use memfold_gate::ErrandServer;
use memfold_os::Errno;
use memfold_os::thread::bare;
use rustix::process::{getpriority_process, setpriority_process};
use rustix::thread::{futex, gettid};

/// The engine's threads start when the program's size reaches its bound divided by this, before any
/// memory is taken. On busy CPUs the start takes a while, in which a fast-growing program would
/// exceed its limit.
pub const START_SHARE: u64 = 2;
/// The nice value to which the first engine thread raises itself if it may. A program grows while
/// this thread waits for a CPU.
const NICE: i32 = -20;

/// Returns the nice value of the calling thread.
pub fn own_nice() -> i32 {
    getpriority_process(Some(gettid())).unwrap_or(0)
}

fn set_own_nice(nice: i32) {
    // A failure is ignored, because a lower value than before needs a privilege.
    let _ = setpriority_process(Some(gettid()), nice);
}

/// Makes the calling thread, the first of the engine, run before all others.
pub fn raise() {
    set_own_nice(NICE);
}

/// The start of all engine threads but the first.
#[derive(Default)]
pub struct ThreadStarts {
    /// Threads that are still to be started, the next one last; `None` before the first try.
    pending: Option<Vec<EngineThread>>,
    /// Whether it was reported that they can't be started.
    is_reported: bool,
}

impl ThreadStarts {
    /// Starts the engine threads with the program's nice value. The caller is the first engine
    /// thread. `list` returns them at the first try. Threads that can't be started are tried again
    /// at the next one. That is reported once, if the program is past its limit by then.
    pub fn advance(&mut self, list: impl FnOnce() -> Vec<EngineThread>, nice: i32, is_past: bool) {
        let pending = self.pending.get_or_insert_with(|| {
            let mut all = list();
            all.reverse();
            all
        });
        set_own_nice(nice);
        let mut result = Ok(());
        while let (Ok(()), Some(next)) = (result, pending.last()) {
            result = bare::start(next.name, next.main, next.arg);
            if result.is_ok() {
                pending.pop();
            }
        }
        set_own_nice(NICE);
        if let (Err(e), true, false) = (result, is_past, self.is_reported) {
            self.is_reported = true;
            unserved_later(format_args!(
                "starting engine threads failed: {e}. memfold tries again"
            ));
        }
    }

    /// Returns whether all engine threads run.
    pub fn is_complete(&self) -> bool {
        self.pending.as_ref().is_some_and(Vec::is_empty)
    }
}

/// Incremented to wake the thread that does errands for children of vfork.
static BELL: AtomicU32 = AtomicU32::new(0);

/// That thread, as children of vfork use it.
pub const SERVER: ErrandServer = ErrandServer { ring, life: bare::life };

/// Wakes that thread, because it has something to do.
fn ring() {
    BELL.fetch_add(1, SeqCst);
    let _ = futex::wake(&BELL, futex::Flags::PRIVATE, 1);
}

/// Whether that thread must end.
static STOPS: AtomicBool = AtomicBool::new(false);

/// Ends that thread; with `false`, takes that back before it is started again with all others. No
/// child of vfork may run.
pub fn stop_serving(stops: bool) {
    STOPS.store(stops, SeqCst);
    ring();
}

/// Starts the thread that does errands for children of vfork. The caller is the first engine
/// thread.
///
/// # Errors
/// EAGAIN: no more threads can be started.
pub fn start_serving() -> Result<(), Errno> {
    bare::start(c"memfold-serve", serve, 0)
}

fn serve(_: usize) {
    loop {
        let bell = BELL.load(SeqCst);
        if STOPS.load(SeqCst) {
            return;
        }
        memfold_gate::serve_errands(bare::life());
        let _ = futex::wait(&BELL, futex::Flags::PRIVATE, bell, None);
    }
}
