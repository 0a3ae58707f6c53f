//! Background threads: load windows ahead of streams, save dirty folios, give memory back; compress cold blocks again.
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
    let start = |name, main: fn(usize)| Thread::start(name, None, main, Arc::into_raw(pager.clone()) as usize);
    let mut threads = (0..count).map(|_| start(c"memfold-worker", run)).collect::<Result<Vec<_>, _>>()?;
    if pager.recompress.is_some() {
        threads.push(start(c"memfold-again", recompress)?);
    }
    Ok(threads)
}

fn run(pager: usize) {
    // SAFETY: `start` gave this thread one reference of the Arc.
    let pager = unsafe { Arc::from_raw(pager as *const Pager) };
    while pager.work() {}
}

fn recompress(pager: usize) {
    // SAFETY: `start` gave this thread one reference of the Arc.
    let pager = unsafe { Arc::from_raw(pager as *const Pager) };
    pager.recompress_until_stopped();
}
