//! Background threads: load windows ahead of streams, save dirty folios, give memory back.
use crate::pager::Pager;
use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ffi::CStr;
use memfold_sys::Errno;
use memfold_sys::thread::Thread;

/// Starts a thread: its name, the CPU to pin it to, what it runs and with what.
pub type Spawn = fn(&'static CStr, Option<usize>, fn(usize), usize) -> Result<(), Errno>;

/// Starts an engine thread that libc knows of, as a [`Spawn`].
///
/// # Errors
/// EAGAIN: no more threads.
pub fn by_libc(name: &'static CStr, cpu: Option<usize>, main: fn(usize), arg: usize) -> Result<(), Errno> {
    Thread::start(name, cpu, main, arg).map(drop)
}

/// Starts `count` background threads by `spawn`; they never end.
///
/// # Errors
/// What `spawn` says.
pub fn start_by(pager: &Arc<Pager>, count: usize, spawn: Spawn) -> Result<(), Errno> {
    (0..count).try_for_each(|_| {
        // Never given back: a child of fork starts the thread again with it.
        let pager: &'static Arc<Pager> = Box::leak(Box::new(pager.clone()));
        spawn(c"memfold-worker", None, run_for_ever, pager as *const Arc<Pager> as usize)
    })
}

fn run_for_ever(pager: usize) {
    // SAFETY: `start_by` leaked the Arc.
    let pager = unsafe { &*(pager as *const Arc<Pager>) };
    while pager.work() {}
}

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
