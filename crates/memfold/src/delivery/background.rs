//! Background threads: load windows ahead of streams, save dirty folios, give memory back; compress cold blocks again; write
//! and read the swap file, and move its cold end on.
use crate::config::Canned;
use crate::pager::Pager;
use crate::pager::background_requests::Request;
use crate::pager::device_faults::READERS;
use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ffi::CStr;
use memfold_sys::Errno;
use memfold_sys::thread::Thread;

impl Pager {
    /// Waits for one request to the background threads and serves it. `false`: [`Pager::stop`] was called.
    pub fn work(&self) -> bool {
        let request = self.queue.next();
        let _open = self.gates.background();
        match request {
            Request::Load(window) => self.load_ahead(window),
            Request::Reclaim => {
                if self.reclaim_in_background() {
                    self.queue.go_on();
                }
                if self.config.canned == Canned::On {
                    self.store.canned_step();
                }
            }
            Request::Stop => return false,
        }
        true
    }
}

/// Starts a thread: its name, the CPU to pin it to, what it runs and with what.
pub type Spawn = fn(&'static CStr, Option<usize>, fn(usize), usize) -> Result<(), Errno>;

/// Starts an engine thread that libc knows of, as a [`Spawn`].
///
/// # Errors
/// EAGAIN: no more threads.
pub fn by_libc(name: &'static CStr, cpu: Option<usize>, main: fn(usize), arg: usize) -> Result<(), Errno> {
    Thread::start(name, cpu, main, arg).map(drop)
}

/// Starts `count` background threads by `spawn`; those of the swap file if there is one, which write it and, in thread
/// delivery, read it for faults; and one that moves its cold end to the remote store if there is one. They never end.
///
/// # Errors
/// What `spawn` says.
pub fn start_by(pager: &Arc<Pager>, count: usize, spawn: Spawn) -> Result<(), Errno> {
    // Never given back: a child of fork starts the threads again with it.
    let leaked: &'static Arc<Pager> = Box::leak(Box::new(pager.clone()));
    let arg = leaked as *const Arc<Pager> as usize;
    (0..count).try_for_each(|_| spawn(c"memfold-worker", None, run_for_ever, arg))?;
    if pager.recompress.is_some() {
        spawn(c"memfold-again", None, recompress_for_ever, arg)?;
    }
    if let Some(swap) = &pager.swap {
        swap.outbox.set_writer();
        spawn(c"memfold-swap", None, write_for_ever, arg)?;
        if !pager.is_signal() {
            pager.expect_readers();
            (0..READERS).try_for_each(|_| spawn(c"memfold-read", None, read_for_ever, arg))?;
        }
        if let Some(tier) = swap.tier() {
            tier.set_mover();
            spawn(c"memfold-remote", None, move_for_ever, arg)?;
        }
    }
    Ok(())
}

fn write_for_ever(pager: usize) {
    // SAFETY: `start_by` leaked the Arc.
    let pager = unsafe { &*(pager as *const Arc<Pager>) };
    while pager.write_pending(true) {}
}

fn read_for_ever(pager: usize) {
    // SAFETY: `start_by` leaked the Arc.
    let pager = unsafe { &*(pager as *const Arc<Pager>) };
    while pager.read() {}
}

fn move_for_ever(pager: usize) {
    // SAFETY: `start_by` leaked the Arc.
    let pager = unsafe { &*(pager as *const Arc<Pager>) };
    while pager.move_out(true) {}
}

fn recompress_for_ever(pager: usize) {
    // SAFETY: `start_by` leaked the Arc.
    let pager = unsafe { &*(pager as *const Arc<Pager>) };
    pager.recompress_until_stopped();
}

fn run_for_ever(pager: usize) {
    // SAFETY: `start_by` leaked the Arc.
    let pager = unsafe { &*(pager as *const Arc<Pager>) };
    memfold_sys::thread::stand_back();
    while pager.work() {}
}

/// Starts the same threads, known to libc. They run until [`Pager::stop`].
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
        if !pager.is_signal() {
            pager.expect_readers();
            for _ in 0..READERS {
                threads.push(start(c"memfold-read", read)?);
            }
        }
        if let Some(tier) = swap.tier() {
            tier.set_mover();
            threads.push(start(c"memfold-remote", move_out)?);
        }
    }
    Ok(threads)
}

fn write(pager: usize) {
    // SAFETY: `start` gave this thread one reference of the Arc.
    let pager = unsafe { Arc::from_raw(pager as *const Pager) };
    while pager.write_pending(true) {}
}

fn read(pager: usize) {
    // SAFETY: `start` gave this thread one reference of the Arc.
    let pager = unsafe { Arc::from_raw(pager as *const Pager) };
    while pager.read() {}
}

fn move_out(pager: usize) {
    // SAFETY: `start` gave this thread one reference of the Arc.
    let pager = unsafe { Arc::from_raw(pager as *const Pager) };
    while pager.move_out(true) {}
}

fn run(pager: usize) {
    // SAFETY: `start` gave this thread one reference of the Arc.
    let pager = unsafe { Arc::from_raw(pager as *const Pager) };
    memfold_sys::thread::stand_back();
    while pager.work() {}
}

fn recompress(pager: usize) {
    // SAFETY: `start` gave this thread one reference of the Arc.
    let pager = unsafe { Arc::from_raw(pager as *const Pager) };
    pager.recompress_until_stopped();
}
