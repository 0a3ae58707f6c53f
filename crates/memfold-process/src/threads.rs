//! When the engine's threads start, and before whom they run.
use crate::diagnostics::unserved::unserved_later;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use memfold::delivery::background::EngineThread;
use memfold_os::Errno;
use memfold_os::thread::bare;
use rustix::process::{getpriority_process, setpriority_process};
use rustix::thread::{futex, gettid};

/// The engine's threads start at one part in this many of what the program may have before anything
/// is taken: on busy CPUs that takes a while, in which a program that grows fast would go past its
/// limit.
pub const START_SHARE: u64 = 2;
/// What the first engine thread raises itself to where it may: a program grows while it waits for a
/// processor.
const NICE: i32 = -20;

/// The calling thread's.
pub fn own_nice() -> i32 {
    getpriority_process(Some(gettid())).unwrap_or(0)
}

fn set_own_nice(nice: i32) {
    // Not fatal: less than before needs a privilege.
    let _ = setpriority_process(Some(gettid()), nice);
}

/// Lets the calling thread, the first of the engine, run before all others.
pub fn raise() {
    set_own_nice(NICE);
}

/// Starts engine threads, the last one first, at the program's `nice`; the caller is the first of
/// them. Those that can't be had stay in `pending`, which is told once, if the program is past its
/// limit by then.
pub fn start_pending(pending: &mut Vec<EngineThread>, nice: i32, is_past: bool, told: &mut bool) {
    set_own_nice(nice);
    let mut result = Ok(());
    while let (Ok(()), Some(next)) = (result, pending.last()) {
        result = bare::start(next.name, next.main, next.arg);
        if result.is_ok() {
            pending.pop();
        }
    }
    set_own_nice(NICE);
    if let (Err(e), true, false) = (result, is_past, *told) {
        *told = true;
        unserved_later(format_args!("starting engine threads failed: {e}. memfold tries again"));
    }
}

/// Raised for the thread that serves children of vfork.
static BELL: AtomicU32 = AtomicU32::new(0);

/// Tells that thread that there is something to do.
pub fn ring() {
    BELL.fetch_add(1, SeqCst);
    let _ = futex::wake(&BELL, futex::Flags::PRIVATE, 1);
}

/// That thread is to end.
static STOPS: AtomicBool = AtomicBool::new(false);

/// Has it end, or, before it is started again with all others, no more. No child is there.
pub fn stop_serving(stops: bool) {
    STOPS.store(stops, SeqCst);
    ring();
}

/// Starts it; the caller is the first engine thread.
///
/// # Errors
/// EAGAIN: no more threads.
pub fn start_serving() -> Result<(), Errno> {
    bare::start(c"memfold-serve", serve, 0)
}

fn serve(_: usize) {
    loop {
        let bell = BELL.load(SeqCst);
        if STOPS.load(SeqCst) {
            return;
        }
        memfold_gate::serve_errands();
        let _ = futex::wait(&BELL, futex::Flags::PRIVATE, bell, None);
    }
}
