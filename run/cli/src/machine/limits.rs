//! Limits that can have ended a program (`ulimit`).
use rustix::process::{Resource, getrlimit};
use std::mem::MaybeUninit;
use std::time::Duration;

/// Addresses that a program has without asking for more, bytes. A larger limit is never reached.
const ADDRESSES: u64 = 1 << 47;

/// Returns the limits of address space of this process that can be reached, as `ulimit` names them, in
/// bytes.
pub fn address_limits() -> Vec<(&'static str, u64)> {
    let of = |(flag, limit): (&'static str, Resource)| {
        let bytes = getrlimit(limit).current?;
        (bytes < ADDRESSES).then_some((flag, bytes))
    };
    [("-v", Resource::As), ("-d", Resource::Data)].into_iter().filter_map(of).collect()
}

/// Returns the CPU time at which the kernel sends SIGKILL to a process, seconds. Returns `None` if the
/// process has not used so much. It may have ended, but nothing may have waited for it: then the
/// kernel has forgotten its limit.
pub fn reached_cpu_limit(pid: libc::pid_t) -> Option<u64> {
    let mut limit = MaybeUninit::uninit();
    // SAFETY: without a new limit the call changes none. The kernel writes `limit` on success.
    let code =
        unsafe { libc::prlimit(pid, libc::RLIMIT_CPU, std::ptr::null(), limit.as_mut_ptr()) };
    // SAFETY: the call succeeded, so `limit` is filled.
    let limit = (code == 0).then(|| unsafe { limit.assume_init() })?.rlim_max;
    (cpu_time(pid)? >= Duration::from_secs(limit)).then_some(limit)
}

/// Returns the CPU time of a process that the kernel compares with its limit. The kernel counts it in
/// ticks. `getrusage` returns the time of the scheduler instead, which is often less than the limit.
fn cpu_time(pid: libc::pid_t) -> Option<Duration> {
    // The clock of user and system time is number 0 of a process, in the lowest three bits.
    let clock = !pid << 3;
    let mut now = MaybeUninit::<libc::timespec>::uninit();
    // SAFETY: the kernel writes `now` on success.
    let code = unsafe { libc::clock_gettime(clock, now.as_mut_ptr()) };
    // SAFETY: the call succeeded, so `now` is filled.
    let now = (code == 0).then(|| unsafe { now.assume_init() })?;
    Some(Duration::new(now.tv_sec as u64, now.tv_nsec as u32))
}
