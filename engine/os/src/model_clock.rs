//! The clock of the models: simulated time. It passes with each look and each sleep, so a run takes
//! the same time on every machine.
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Time that passes with a look.
const LOOK_NS: u64 = 10_000;

static NOW_NS: AtomicU64 = AtomicU64::new(1_000_000_000);

/// Does nothing: the models ask no processor.
pub fn use_no_counter() {}

/// Lets so many nanoseconds pass.
pub fn pass_ns(ns: u64) {
    NOW_NS.fetch_add(ns, Relaxed);
}

/// Returns the simulated nanoseconds.
pub fn now_ns() -> u64 {
    NOW_NS.fetch_add(LOOK_NS, Relaxed) + LOOK_NS
}

/// Returns the simulated nanoseconds, as if the calling thread had run all the time.
pub fn cpu_ns() -> u64 {
    now_ns()
}

/// Returns the simulated nanoseconds, as if one thread of the process had run all the time.
pub fn process_cpu_ns() -> u64 {
    now_ns()
}

/// Returns 0: the models have no threads of the kernel.
pub fn thread_cpu_ns(_number: u32) -> u64 {
    0
}
