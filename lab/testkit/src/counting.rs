//! An allocator that counts, for tests of code that must not allocate.
use memfold_os::thread::{is_asleep, process_id, thread_id};
use std::alloc::{GlobalAlloc, Layout, System};
use std::fs;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

static CALLS: AtomicU64 = AtomicU64::new(0);

/// The system's allocator. It counts every call except those of the process's first thread, which
/// is the test harness with work of its own. A test makes it its `#[global_allocator]`.
pub struct Counting;

/// Returns the allocator calls of all other threads so far.
pub fn calls() -> u64 {
    CALLS.load(SeqCst)
}

/// Waits until every other thread sleeps, twice in a row. A server's threads may free their
/// start-up data long after the first answer. The caller has nothing in progress that would wake a
/// thread later.
///
/// # Panics
/// `/proc` is not there.
pub fn wait_until_others_sleep() {
    let mut scans = 0;
    while scans < 2 {
        scans = if others_sleep() { scans + 1 } else { 0 };
        std::thread::yield_now();
    }
}

fn others_sleep() -> bool {
    let tasks = fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().file_name());
    let numbers = tasks.map(|name| name.to_str().unwrap().parse().unwrap());
    numbers.filter(|number| *number != thread_id()).all(is_asleep)
}

fn count() {
    if thread_id() != process_id() {
        CALLS.fetch_add(1, SeqCst);
    }
}

// SAFETY: passes every call on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller upholds the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count();
        // SAFETY: the caller upholds the contract of `dealloc`.
        unsafe { System.dealloc(at, layout) }
    }
}
