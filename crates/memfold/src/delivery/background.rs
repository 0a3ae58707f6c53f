//! Background threads: load windows ahead of streams, save dirty folios, give memory back; compress
//! cold blocks again; write and read the swap file, and move its cold end on.
use crate::config::{Canned, Delivery};
use crate::pager::Pager;
use crate::pager::background_requests::Request;
use crate::pager::device_faults::READERS;
use crate::stats;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ffi::CStr;
use memfold_sys::Errno;
use memfold_sys::thread::{Thread, cpu_ns};

impl Pager {
    /// Waits for one request to the background threads and serves it. `false`: [`Pager::stop`] was
    /// called.
    pub fn work(&self) -> bool {
        let request = self.queue.next();
        let _open = self.gates.background();
        let begin = cpu_ns();
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
        stats::add(&self.stats.background_ns, cpu_ns() - begin);
        true
    }
}

/// An engine thread that is to be started: by libc's means or past it.
pub struct Start {
    /// Its name.
    pub name: &'static CStr,
    /// What it runs, and with what: to be called once; in gate delivery once more where the thread
    /// is no more: after [`Pager::stop`], and in a child of fork.
    pub main: fn(usize),
    /// See `main`.
    pub arg: usize,
}

impl Start {
    /// Starts it as a thread that libc knows of.
    ///
    /// # Errors
    /// EAGAIN: no more threads.
    pub fn by_libc(&self) -> Result<Thread, Errno> {
        Thread::start(self.name, self.main, self.arg)
    }
}

/// Names of those that may wait for what the others do.
const WORKER: &CStr = c"memfold-worker";
const RECOMPRESSES: &CStr = c"memfold-again";

/// Whether a thread with this name ends at [`Pager::stop_workers`].
pub fn is_worker(name: &CStr) -> bool {
    name == WORKER || name == RECOMPRESSES
}

/// The background threads of a pager, `count` of them for reclaim and read-ahead; those of the swap
/// file if there is one, which write it and, but in signal delivery, read it for faults; and one
/// that moves its cold end to the remote store if there is one. They run until [`Pager::stop`]. Each
/// holds a reference of the pager, also while it isn't started; in gate delivery for ever, as it may
/// be started again.
pub fn threads(pager: &Arc<Pager>, count: usize) -> Vec<Start> {
    let start = |name, main| Start { name, main, arg: Arc::into_raw(pager.clone()) as usize };
    let mut threads: Vec<Start> = (0..count).map(|_| start(WORKER, work)).collect();
    if pager.recompress.is_some() {
        threads.push(start(RECOMPRESSES, recompress));
    }
    if let Some(swap) = &pager.swap {
        swap.queue().set_writer();
        threads.push(start(c"memfold-swap", write));
        let mut readers = |main| threads.extend((0..READERS).map(|_| start(c"memfold-read", main)));
        match pager.config.delivery {
            Delivery::Thread => {
                pager.expect_readers();
                readers(read);
            }
            Delivery::Gate => readers(run_errands),
            Delivery::Signal => {}
        }
        if swap.set_demoter() {
            threads.push(start(c"memfold-remote", move_out));
        }
    }
    threads
}

/// Does a thread's work with its reference of the pager.
///
/// # Safety
/// - `arg` is that of a [`Start`] of [`threads`], whose `main` calls this, once while the thread
///   lives.
unsafe fn with_pager(arg: usize, work: impl FnOnce(&Pager)) {
    // SAFETY: `threads` made it by `into_raw` for this one thread. One that is started in its place,
    // in a child of fork or after `Pager::stop`, has the reference of the one that is no more: in
    // gate delivery, the only one where that is done, it isn't dropped.
    let pager = unsafe { Arc::from_raw(arg as *const Pager) };
    work(&pager);
    if pager.config.delivery == Delivery::Gate {
        core::mem::forget(pager);
    }
}

fn work(arg: usize) {
    memfold_sys::thread::stand_back();
    // SAFETY: a `main` of `threads`.
    unsafe { with_pager(arg, |pager| while pager.work() {}) }
}

fn recompress(arg: usize) {
    // SAFETY: a `main` of `threads`.
    unsafe { with_pager(arg, Pager::recompress_until_stopped) }
}

fn write(arg: usize) {
    // SAFETY: a `main` of `threads`.
    unsafe { with_pager(arg, |pager| while pager.write_pending(true) {}) }
}

fn read(arg: usize) {
    // SAFETY: a `main` of `threads`.
    unsafe { with_pager(arg, |pager| while pager.read() {}) }
}

fn run_errands(arg: usize) {
    let serve = |pager: &Pager| {
        let errands = pager.errands.as_ref().expect("in gate delivery there are");
        while errands.serve() {}
    };
    // SAFETY: a `main` of `threads`.
    unsafe { with_pager(arg, serve) }
}

fn move_out(arg: usize) {
    // SAFETY: a `main` of `threads`.
    unsafe { with_pager(arg, |pager| while pager.move_out(true) {}) }
}
