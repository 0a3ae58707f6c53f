//! A timer that counts the CPU time of the process. It never expires while all threads sleep.
use crate::Errno;
use crate::raw::system_call;
use core::mem::zeroed;

/// Blocks every signal but SIGSYS.
pub const ALARM_OPEN: u64 = !(1 << (libc::SIGSYS - 1));

/// A timer of the process's CPU time. Its signal goes to the thread that sets it first.
#[derive(Default)]
pub struct CpuAlarm {
    /// The kernel's number of the timer, once there is one.
    number: Option<i32>,
}

impl CpuAlarm {
    /// Makes the kernel send SIGSYS to the calling thread, once, with the code `SI_TIMER`, when
    /// this process has run for `ns` more. The kernel checks it at each tick of a CPU that runs the
    /// process. Returns `false` if the kernel refuses.
    pub fn set(&mut self, ns: u64) -> bool {
        // The program may have deleted a timer whose number it guessed. Then there is a second try.
        (0..2).any(|_| {
            if self.number.is_none() {
                self.number = create().ok();
            }
            let is_set = self.number.is_some_and(|number| set(number, ns).is_ok());
            if !is_set {
                self.number = None;
            }
            is_set
        })
    }

    /// Takes back [`CpuAlarm::set`].
    pub fn clear(&self) {
        if let Some(number) = self.number {
            let _ = set(number, 0);
        }
    }
}

impl Drop for CpuAlarm {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            // SAFETY: the call has no pointers, and the timer is this value's own.
            let _ =
                unsafe { system_call(libc::SYS_timer_delete, [number as usize, 0, 0, 0, 0, 0]) };
        }
    }
}

fn create() -> Result<i32, Errno> {
    let mut number = 0i32;
    // SAFETY: the struct has only integers and a union of them, for which zeros are valid.
    let mut event: libc::sigevent = unsafe { zeroed() };
    event.sigev_notify = libc::SIGEV_THREAD_ID;
    event.sigev_signo = libc::SIGSYS;
    event.sigev_notify_thread_id = crate::thread::thread_id() as i32;
    let clock = libc::CLOCK_PROCESS_CPUTIME_ID as usize;
    let args = [clock, &raw const event as usize, &raw mut number as usize, 0, 0, 0];
    // SAFETY: the kernel reads one `sigevent` and writes one number. Both are locals that live until
    // the call returns.
    unsafe { system_call(libc::SYS_timer_create, args) }.map(|_| number)
}

/// Sets a timer to expire once in `ns`; 0 for never.
fn set(number: i32, ns: u64) -> Result<i64, Errno> {
    // `struct itimerspec`: the period, and the time until the timer expires.
    let time = [0, 0, ns / 1_000_000_000, ns % 1_000_000_000];
    let args = [number as usize, 0, time.as_ptr() as usize, 0, 0, 0];
    // SAFETY: the kernel reads four words, which live until the call returns.
    unsafe { system_call(libc::SYS_timer_settime, args) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raw::set_signals_blocked;
    use crate::thread::process_cpu_ns;

    /// Returns the code of a pending SIGSYS of the calling thread.
    fn take_signal() -> Option<i32> {
        let (set, mut info, none) = (!ALARM_OPEN, [0i32; 32], [0u64; 2]);
        let args = [&raw const set as usize, info.as_mut_ptr() as usize, none.as_ptr() as usize];
        let args = [args[0], args[1], args[2], 8, 0, 0];
        // SAFETY: the kernel reads the set and the time, and writes one `siginfo_t` of 128 bytes.
        unsafe { system_call(libc::SYS_rt_sigtimedwait, args) }.ok().map(|_| info[2])
    }

    #[test]
    fn alarm_comes_when_the_process_has_run_and_not_before() {
        let before = set_signals_blocked(!0);
        let mut alarm = CpuAlarm::default();
        assert!(alarm.set(10_000_000_000_000), "this process never runs for so long");
        assert_eq!(take_signal(), None);
        let begin = process_cpu_ns();
        assert!(alarm.set(5_000_000));
        let mut code = None;
        while code.is_none() && process_cpu_ns() - begin < 20_000_000_000 {
            code = take_signal();
        }
        assert_eq!(code, Some(libc::SI_TIMER));
        assert!(process_cpu_ns() - begin >= 5_000_000);
        assert!(alarm.set(10_000_000));
        alarm.clear();
        let begin = process_cpu_ns();
        while process_cpu_ns() - begin < 60_000_000 {}
        assert_eq!(take_signal(), None);
        set_signals_blocked(before);
    }

    #[test]
    fn alarm_whose_timer_was_deleted_makes_another() {
        let mut alarm = CpuAlarm::default();
        assert!(alarm.set(10_000_000_000_000));
        let number = alarm.number.unwrap() as usize;
        // SAFETY: the call has no pointers.
        unsafe { system_call(libc::SYS_timer_delete, [number, 0, 0, 0, 0, 0]) }.unwrap();
        assert!(alarm.set(10_000_000_000_000));
    }
}
