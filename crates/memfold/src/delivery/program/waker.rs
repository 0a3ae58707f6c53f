//! Wakes a thread whose fault was served so that it stays on its CPU.
//!
//! The kernel wakes a thread on the CPU that it slept on if that one is idle or runs SCHED_IDLE
//! threads only, and else on an idle one (`select_idle_sibling` in Linux kernel/sched/fair.c). A
//! handler works on the CPU of the thread that it serves; a thread that it wakes itself goes to
//! another CPU, which must first be interrupted and come out of its idle state, and the next fault
//! costs the same again: 70 us a fault in place of 20 on a quiet virtual machine with two CPUs. So
//! the handler leaves the waking to a SCHED_IDLE thread on its own CPU, and goes to sleep.
//!
//! On a busy CPU such a thread may wait for long. So the handler looks after [`PATIENCE_NS`]
//! whether it was done, and does it itself if not ([`Waker::settle`]). Waking twice is harmless:
//! who is woken for nothing faults again.
use alloc::sync::Arc;
use memfold_sys::sync::Gate;
use memfold_sys::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::SeqCst};
use memfold_sys::thread::{pin_other, set_idle, thread_id, yield_now};
use memfold_sys::uffd::Uffd;

/// How long a handler waits before it looks whether the waker has woken. Longer than a scheduler
/// tick, so that the kernel need not set its clock for it: on a virtual machine that costs more
/// than all the rest of a wake.
pub const PATIENCE_NS: u64 = 10_000_000;

const FREE: u32 = 0;
const POSTED: u32 = 1;
const END: u32 = 2;

/// The thread and its one order.
pub(crate) struct Waker {
    uffd: Arc<Uffd>,
    order: Gate,
    start: AtomicUsize,
    len: AtomicUsize,
    thread: AtomicU32,
    is_idle: AtomicBool,
}

impl Waker {
    /// A waker whose thread is yet to be started, by calling [`Waker::thread`].
    pub fn new(uffd: &Arc<Uffd>) -> Arc<Waker> {
        Arc::new(Waker {
            uffd: uffd.clone(),
            order: Gate::new(FREE),
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            thread: AtomicU32::new(0),
            is_idle: AtomicBool::new(false),
        })
    }

    /// What the waker's thread is to run, and with what. It ends at [`Waker::end`].
    pub fn thread(self: &Arc<Waker>) -> (fn(usize), usize) {
        (run, Arc::into_raw(self.clone()) as usize)
    }

    /// Asks for the waiters of `[start, start + len)` to be woken. Only one thread may call it and
    /// [`Waker::settle`]. `false`: the thread can't do it, the caller must.
    pub fn post(&self, start: usize, len: usize) -> bool {
        if !self.is_idle.load(SeqCst) || self.order.get() != FREE {
            return false;
        }
        self.start.store(start, SeqCst);
        self.len.store(len, SeqCst);
        self.order.replace(FREE, POSTED)
    }

    /// Makes sure that what was posted last is done. `false` if it had not been begun.
    pub fn finish(&self) -> bool {
        let begun = !self.order.replace(POSTED, FREE);
        // Begun is not done: it may have been interrupted before the call.
        self.uffd.wake(self.start.load(SeqCst), self.len.load(SeqCst));
        begun
    }

    /// Moves the thread to a CPU.
    pub fn follow(&self, cpu: usize) {
        pin_other(self.thread.load(SeqCst), cpu);
    }

    /// Ends the thread, with an order that it will never see.
    #[cfg(test)]
    pub fn stop_for_test(&self, start: usize, len: usize) {
        self.order.set(END);
        memfold_sys::thread::sleep_ns(20_000_000);
        self.start.store(start, SeqCst);
        self.len.store(len, SeqCst);
        self.order.set(POSTED);
    }

    /// Ends the thread. Nothing may be posted any more.
    pub fn end(&self) {
        self.order.set(END);
    }
}

fn run(waker: usize) {
    // SAFETY: `thread` gave this thread one reference of the Arc. (In a child of fork the thread is
    // started anew, with the child's copy of that reference, as it never ended in the parent.)
    let waker = unsafe { Arc::from_raw(waker as *const Waker) };
    waker.thread.store(thread_id(), SeqCst);
    waker.is_idle.store(set_idle(), SeqCst);
    loop {
        match waker.order.get() {
            FREE => waker.order.wait_while(FREE),
            POSTED => {
                let (start, len) = (waker.start.load(SeqCst), waker.len.load(SeqCst));
                if waker.order.replace(POSTED, FREE) {
                    // A handler that has just gone to sleep may still count as running (delayed
                    // dequeue, Linux 6.12) until the next time that the kernel chooses what to run
                    // here.
                    yield_now();
                    waker.uffd.wake(start, len);
                }
            }
            _ => return,
        }
    }
}
