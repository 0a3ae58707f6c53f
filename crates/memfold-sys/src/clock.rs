//! Time.
//!
//! Threads of a foreign program ask for it too. One may have the kernel refuse it the processor's counter,
//! which the vDSO reads (`prctl(PR_SET_TSC)`), or the system call (a seccomp filter).
use crate::raw::system_call;
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
use rustix::time::{ClockId, clock_gettime};

/// Whether a thread of the process may be refused the processor's counter.
static NO_COUNTER: AtomicBool = AtomicBool::new(false);

/// A thread of the process is refused the processor's counter: from now on each asks the kernel.
pub fn use_no_counter() {
    NO_COUNTER.store(true, Relaxed);
}

/// Nanoseconds of the monotonic clock.
pub fn now_ns() -> u64 {
    if NO_COUNTER.load(Relaxed) {
        return asked_ns(libc::CLOCK_MONOTONIC);
    }
    let t = clock_gettime(ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// Nanoseconds that the calling thread has run.
pub fn cpu_ns() -> u64 {
    asked_ns(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// Nanoseconds that all threads of the process have run.
pub fn process_cpu_ns() -> u64 {
    asked_ns(libc::CLOCK_PROCESS_CPUTIME_ID)
}

/// What the kernel says of a clock; 0 if it says nothing.
fn asked_ns(clock: libc::clockid_t) -> u64 {
    let mut time = [0u64; 2];
    let args = [clock as usize, &raw mut time as usize, 0, 0, 0, 0];
    // SAFETY: there is room for seconds and nanoseconds.
    let asked = unsafe { system_call(libc::SYS_clock_gettime, args) };
    asked.map_or(0, |_| time[0] * 1_000_000_000 + time[1])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_tells_the_time_of_the_counter() {
        let (before, asked, after) = (now_ns(), asked_ns(libc::CLOCK_MONOTONIC), now_ns());
        assert!((before..=after).contains(&asked), "{before} {asked} {after}");
        let worked = cpu_ns();
        assert!(worked > 0 && process_cpu_ns() >= worked);
    }
}
