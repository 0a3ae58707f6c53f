//! Background threads: load windows ahead of streams, save dirty folios, give memory back.
use crate::pager::Pager;
use alloc::sync::Arc;
use alloc::vec::Vec;
use memfold_sys::Errno;
use memfold_sys::thread::Thread;

/// Starts `count` background threads, which run until the queue is stopped.
///
/// # Errors
/// EAGAIN: no more threads.
pub fn start(pager: &Arc<Pager>, count: usize) -> Result<Vec<Thread>, Errno> {
    (0..count).map(|_| Thread::start(c"memfold-worker", None, run, Arc::into_raw(pager.clone()) as usize)).collect()
}

fn run(pager: usize) {
    // SAFETY: `start` gave this thread one reference of the Arc.
    let pager = unsafe { Arc::from_raw(pager as *const Pager) };
    while pager.work() {}
}
