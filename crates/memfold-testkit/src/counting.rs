//! An allocator that counts, for tests of what must not allocate.
use memfold_sys::thread::{is_asleep, process_id, thread_id};
use std::alloc::{GlobalAlloc, Layout, System};
use std::fs;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

static CALLS: AtomicU64 = AtomicU64::new(0);

/// The system's allocator, with every call counted but those of the process's first thread: that is
/// the test harness, which has work of its own to do while a test runs. A test makes it its
/// `#[global_allocator]`.
pub struct Counting;

/// Calls of the allocator by all other threads so far.
pub fn calls() -> u64 {
    CALLS.load(SeqCst)
}

/// Waits until every other thread sleeps, twice in a row: a server's threads may still be putting
/// away what made them, long after the first answer came. Whoever calls it has nothing under way
/// that would wake one of them later.
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
        // SAFETY: as the caller says.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count();
        // SAFETY: as the caller says.
        unsafe { System.dealloc(at, layout) }
    }
}
