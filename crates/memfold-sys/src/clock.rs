//! Time.
use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of the monotonic clock.
pub fn now_ns() -> u64 {
    ns_of(ClockId::Monotonic)
}

/// Nanoseconds that the calling thread has run.
pub fn cpu_ns() -> u64 {
    ns_of(ClockId::ThreadCPUTime)
}

/// Nanoseconds that all threads of the process have run.
pub fn process_cpu_ns() -> u64 {
    ns_of(ClockId::ProcessCPUTime)
}

fn ns_of(clock: ClockId) -> u64 {
    let t = clock_gettime(clock);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}
