//! Background threads. They load windows ahead of streams, save dirty folios, give memory back, and
//! compress cold blocks again. Others write and read the swap file, and move its cold end on.
use crate::config::{Delivery, DictionarySource};
use crate::fault::load::Loads;
use crate::pager::Pager;
use crate::reclaim::background::Background;
use crate::requests::background::BackgroundRequest;
use crate::requests::device_faults::READERS;
use crate::residency::huge_pages::HugePages;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ffi::CStr;
use memfold_os::Errno;
use memfold_os::thread::{Thread, cpu_ns};
use memfold_stats as stats;

/// Requests after which a thread's CPU time is counted. Asking for it costs a system call.
const COUNTED: u32 = 16;

impl Pager {
    /// Waits for one request to the background threads and serves it. Returns `false` after
    /// [`Pager::stop`].
    pub fn work(&self) -> bool {
        let request = self.0.requests.next();
        let _open = self.0.pauses.background();
        match request {
            BackgroundRequest::Load(window) => Loads::new(&self.0).load_ahead(window),
            BackgroundRequest::Reclaim => {
                if Background::new(&self.0).reclaim_in_background() {
                    self.0.requests.go_on();
                }
                if self.0.config.canned == DictionarySource::On {
                    self.0.backing.store().canned_step();
                }
            }
            BackgroundRequest::Collapse(key) => HugePages::new(&self.0).collapse(key),
            BackgroundRequest::Stop => return false,
        }
        true
    }
}

/// An engine thread that is to be started, by libc or without it.
pub struct EngineThread {
    /// Its name.
    pub name: &'static CStr,
    /// Its function, called once with `arg`. In gate delivery it is called once more where the
    /// thread has ended: after [`Pager::stop`], and in a child of fork.
    pub main: fn(usize),
    /// The argument of `main`.
    pub arg: usize,
}

impl EngineThread {
    /// Starts it as a thread of libc.
    ///
    /// # Errors
    /// EAGAIN: no more threads.
    pub fn by_libc(&self) -> Result<Thread, Errno> {
        Thread::start(self.name, self.main, self.arg)
    }
}

/// Names of the threads that may wait for the others.
const WORKER: &CStr = c"memfold-worker";
const RECOMPRESSES: &CStr = c"memfold-again";

/// Returns whether a thread with this name ends at [`Pager::stop_workers`].
pub fn is_worker(name: &CStr) -> bool {
    name == WORKER || name == RECOMPRESSES
}

/// Returns the background threads of a pager. `count` of them reclaim and read ahead. If there is a
/// swap file, a thread writes it, and others read it for faults, but not in inline delivery. If
/// there is a remote store, one moves the file's cold end there.
///
/// They run until [`Pager::stop`]. Each holds a reference of the pager, also while it isn't
/// started. In gate delivery it holds it for ever, because it may be started again.
pub fn threads(pager: &Arc<Pager>, count: usize) -> Vec<EngineThread> {
    let start =
        |name, main| EngineThread { name, main, arg: Arc::into_raw(pager.clone()) as usize };
    let mut threads: Vec<EngineThread> = (0..count).map(|_| start(WORKER, work)).collect();
    if pager.0.recompress.is_some() {
        threads.push(start(RECOMPRESSES, recompress));
    }
    if let Some(swap) = pager.0.backing.swap() {
        swap.queue().set_writer();
        threads.push(start(c"memfold-swap", write));
        let mut readers = |main| threads.extend((0..READERS).map(|_| start(c"memfold-read", main)));
        match pager.0.config.delivery {
            Delivery::Thread => {
                pager.faults().expect_readers();
                readers(read);
            }
            Delivery::Gate => readers(run_delegated_calls),
            Delivery::Signal => {}
        }
        if swap.set_demoter() {
            threads.push(start(c"memfold-remote", move_out));
        }
    }
    threads
}

/// Runs a thread's work with its reference of the pager.
///
/// # Safety
/// - `arg` is that of a [`EngineThread`] of [`threads`], whose `main` calls this, once while the thread
///   lives.
unsafe fn with_pager(arg: usize, work: impl FnOnce(&Pager)) {
    // SAFETY: `threads` made it by `into_raw` for this one thread. In a child of fork, or after
    // `Pager::stop`, a thread may be started in place of an ended one, and has its reference. That
    // is done in gate delivery only, where the reference isn't dropped.
    let pager = unsafe { Arc::from_raw(arg as *const Pager) };
    work(&pager);
    if pager.0.config.delivery == Delivery::Gate {
        core::mem::forget(pager);
    }
}

fn work(arg: usize) {
    memfold_os::thread::stand_back();
    let until_stopped = |pager: &Pager| {
        let mut last_cpu_ns = cpu_ns();
        while (0..COUNTED).all(|_| pager.work()) {
            let now = cpu_ns();
            stats::add(&pager.0.stats.background_ns, now - last_cpu_ns);
            last_cpu_ns = now;
        }
    };
    // SAFETY: this is a `main` of `threads`, which is called with its `arg`.
    unsafe { with_pager(arg, until_stopped) }
}

fn recompress(arg: usize) {
    // SAFETY: this is a `main` of `threads`, which is called with its `arg`.
    unsafe { with_pager(arg, |pager| pager.recompress().until_stopped()) }
}

fn write(arg: usize) {
    // SAFETY: this is a `main` of `threads`, which is called with its `arg`.
    unsafe { with_pager(arg, |pager| while pager.writeback().write_pending(true) {}) }
}

fn read(arg: usize) {
    // SAFETY: this is a `main` of `threads`, which is called with its `arg`.
    unsafe { with_pager(arg, |pager| while pager.faults().serve_passed() {}) }
}

fn run_delegated_calls(arg: usize) {
    let serve = |pager: &Pager| {
        let queue = pager.0.delegate_queue.as_ref().expect("gate delivery has a delegate queue");
        while queue.serve() {}
    };
    // SAFETY: this is a `main` of `threads`, which is called with its `arg`.
    unsafe { with_pager(arg, serve) }
}

fn move_out(arg: usize) {
    // SAFETY: this is a `main` of `threads`, which is called with its `arg`.
    unsafe { with_pager(arg, |pager| while pager.writeback().move_out(true) {}) }
}
