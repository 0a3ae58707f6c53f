//! Background threads: load windows ahead of streams, save dirty folios, give memory back.
use crate::pager::Pager;
use alloc::sync::Arc;
use alloc::vec::Vec;
use memfold_sys::Errno;
use memfold_sys::thread::Thread;

/// Starts `count` background threads, and one that writes to the swap file if there is one. They run until
/// [`Pager::stop`].
///
/// # Errors
/// EAGAIN: no more threads.
pub fn start(pager: &Arc<Pager>, count: usize) -> Result<Vec<Thread>, Errno> {
    let own = || Arc::into_raw(pager.clone()) as usize;
    let mut threads =
        (0..count).map(|_| Thread::start(c"memfold-worker", None, run, own())).collect::<Result<Vec<_>, _>>()?;
    if let Some(swap) = &pager.swap {
        swap.outbox.set_writer();
        threads.push(Thread::start(c"memfold-swap", None, write, own())?);
    }
    Ok(threads)
}

fn write(pager: usize) {
    // SAFETY: `start` gave this thread one reference of the Arc.
    let pager = unsafe { Arc::from_raw(pager as *const Pager) };
    while pager.write_pending(true) {}
}

fn run(pager: usize) {
    // SAFETY: `start` gave this thread one reference of the Arc.
    let pager = unsafe { Arc::from_raw(pager as *const Pager) };
    while pager.work() {}
}
