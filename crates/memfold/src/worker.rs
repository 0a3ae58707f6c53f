//! Background threads: load windows ahead of streams, save dirty folios, give memory back; compress cold blocks again.
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
    let start = |name, main: fn(usize)| Thread::start(name, None, main, Arc::into_raw(pager.clone()) as usize);
    let mut threads = (0..count).map(|_| start(c"memfold-worker", run)).collect::<Result<Vec<_>, _>>()?;
    if pager.recompress.is_some() {
        threads.push(start(c"memfold-again", recompress)?);
    }
    if let Some(swap) = &pager.swap {
        swap.outbox.set_writer();
        threads.push(start(c"memfold-swap", write)?);
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

fn recompress(pager: usize) {
    // SAFETY: `start` gave this thread one reference of the Arc.
    let pager = unsafe { Arc::from_raw(pager as *const Pager) };
    pager.recompress_until_stopped();
}
