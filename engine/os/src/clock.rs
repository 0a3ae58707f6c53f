//! Clocks.
//!
//! Threads of the program use them too. The kernel may refuse such a thread the processor's
//! counter, which the vDSO reads (`prctl(PR_SET_TSC)`), or the system call (a seccomp filter).
use crate::raw::system_call;
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
use rustix::time::{ClockId, clock_gettime};

/// Whether the kernel may refuse a thread of the process the processor's counter.
static NO_COUNTER: AtomicBool = AtomicBool::new(false);

/// Makes all threads ask the kernel for the time, because one may not read the processor's counter.
pub fn use_no_counter() {
    NO_COUNTER.store(true, Relaxed);
}

/// Returns the nanoseconds of the monotonic clock.
pub fn now_ns() -> u64 {
    if NO_COUNTER.load(Relaxed) {
        return asked_ns(libc::CLOCK_MONOTONIC);
    }
    let t = clock_gettime(ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// Returns the nanoseconds that the calling thread has run.
pub fn cpu_ns() -> u64 {
    asked_ns(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// Returns the nanoseconds that all threads of the process have run.
pub fn process_cpu_ns() -> u64 {
    asked_ns(libc::CLOCK_PROCESS_CPUTIME_ID)
}

/// Returns the nanoseconds that the thread of this process with this number has run; 0 if there is
/// none.
pub fn thread_cpu_ns(number: u32) -> u64 {
    // Linux, `include/linux/posix-timers.h`: the complement of the number, the bit of threads, and
    // the clock of the scheduler.
    const THREAD: i32 = 4;
    const SCHEDULER: i32 = 2;
    asked_ns(!(number as i32) << 3 | THREAD | SCHEDULER)
}

/// Asks the kernel for a clock's nanoseconds; 0 if it refuses.
fn asked_ns(clock: libc::clockid_t) -> u64 {
    let mut time = [0u64; 2];
    let args = [clock as usize, &raw mut time as usize, 0, 0, 0, 0];
    // SAFETY: there is room for seconds and nanoseconds.
    let result = unsafe { system_call(libc::SYS_clock_gettime, args) };
    result.map_or(0, |_| time[0] * 1_000_000_000 + time[1])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_tells_the_time_of_the_counter() {
        let (before, cpu_asked, after) = (now_ns(), asked_ns(libc::CLOCK_MONOTONIC), now_ns());
        assert!((before..=after).contains(&cpu_asked), "{before} {cpu_asked} {after}");
        let cpu_before = cpu_ns();
        assert!(cpu_before > 0 && process_cpu_ns() >= cpu_before);
        let own = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        let cpu_of_thread = thread_cpu_ns(own);
        assert!((cpu_before..=cpu_ns()).contains(&cpu_of_thread), "{cpu_before} {cpu_of_thread}");
        assert_eq!(thread_cpu_ns(i32::MAX as u32 >> 4), 0);
    }
}
