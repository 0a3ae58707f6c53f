//! Signals as values: they are blocked, and memfold takes them one by one while it waits for its
//! program.
use std::mem::MaybeUninit;
use std::time::Duration;

/// The signals that are passed on to the program, besides the real-time ones: all with which one
/// process tells another something. An image may ask for any of them as its stop signal.
const PASSED_ON: [i32; 10] = [
    libc::SIGINT,
    libc::SIGTERM,
    libc::SIGHUP,
    libc::SIGQUIT,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGALRM,
    libc::SIGWINCH,
    libc::SIGCONT,
    libc::SIGTSTP,
];

/// A signal that arrived.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct CaughtSignal {
    pub number: i32,
    /// Whether the kernel sent it, not a process. For the signals of a terminal (Ctrl-C, Ctrl-Z,
    /// hang-up) this means that the whole process group got it.
    pub from_kernel: bool,
    /// The process that sent it, if a process did.
    pub sender: Option<i32>,
}

/// The signals that memfold passes on, and SIGCHLD, all blocked.
#[derive(Clone)]
pub struct PassedSignals {
    taken: libc::sigset_t,
    before: libc::sigset_t,
    children_ignored: bool,
}

impl PassedSignals {
    /// Blocks these signals. No signal that arrives from now on is lost. The process must have only
    /// one thread.
    pub fn block() -> PassedSignals {
        // SAFETY: the sets are local. sigemptyset and sigprocmask initialise them before they are
        // read.
        unsafe {
            let mut signals = MaybeUninit::uninit();
            let mut before = MaybeUninit::uninit();
            libc::sigemptyset(signals.as_mut_ptr());
            let real_time = libc::SIGRTMIN()..=libc::SIGRTMAX();
            for number in PASSED_ON.into_iter().chain(real_time).chain([libc::SIGCHLD]) {
                libc::sigaddset(signals.as_mut_ptr(), number);
            }
            libc::sigprocmask(libc::SIG_BLOCK, signals.as_ptr(), before.as_mut_ptr());
            // If SIGCHLD stays ignored, the kernel discards the program's exit status.
            let children_ignored = libc::signal(libc::SIGCHLD, libc::SIG_DFL) == libc::SIG_IGN;
            PassedSignals {
                taken: signals.assume_init(),
                before: before.assume_init(),
                children_ignored,
            }
        }
    }

    /// Restores the state that [`PassedSignals::block`] found. Safe to call between fork and exec.
    pub fn restore(&self) {
        // SAFETY: the set is initialised, and both calls are async-signal-safe.
        unsafe {
            if self.children_ignored {
                libc::signal(libc::SIGCHLD, libc::SIG_IGN);
            }
            libc::sigprocmask(libc::SIG_SETMASK, &self.before, std::ptr::null_mut());
        }
    }

    /// Returns the next signal, or `None` after `patience`. Without `patience`, sleeps until one
    /// comes.
    pub fn next(&self, patience: Option<Duration>) -> Option<CaughtSignal> {
        let limit = patience.map(|p| libc::timespec {
            tv_sec: p.as_secs() as libc::time_t,
            tv_nsec: p.subsec_nanos() as libc::c_long,
        });
        let limit = limit.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        let mut info = MaybeUninit::<libc::siginfo_t>::uninit();
        // SAFETY: set and limit are initialised (a null limit means none). The kernel fills `info`
        // on success.
        let number = unsafe { libc::sigtimedwait(&self.taken, info.as_mut_ptr(), limit) };
        if number <= 0 {
            return None;
        }
        // SAFETY: the call succeeded, so `info` is filled. The sender is read only if its field has
        // a meaning for this code.
        let (code, sender) = unsafe {
            let info = info.assume_init();
            let by_process =
                matches!(info.si_code, libc::SI_USER | libc::SI_QUEUE | libc::SI_TKILL);
            (info.si_code, by_process.then(|| info.si_pid()))
        };
        Some(CaughtSignal { number, from_kernel: code == libc::SI_KERNEL, sender })
    }
}

/// Stops this process as Ctrl-Z does, until it is continued, although the signal is blocked. The
/// kernel does not stop a process that no shell could continue.
pub fn stop() {
    // SAFETY: the set is local, and sigemptyset initialises it before it is read. The signal has its
    // default action, which touches no memory.
    unsafe {
        let mut set = MaybeUninit::uninit();
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGTSTP);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, set.as_ptr(), std::ptr::null_mut());
        libc::raise(libc::SIGTSTP);
        libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_from_a_process_is_caught_with_its_origin() {
        let signals = PassedSignals::block();
        // SAFETY: raise sends to this thread only, where the signal is blocked.
        unsafe { libc::raise(libc::SIGUSR1) };
        let sender = Some(std::process::id() as i32);
        assert_eq!(
            signals.next(None),
            Some(CaughtSignal { number: libc::SIGUSR1, from_kernel: false, sender })
        );
        assert_eq!(signals.next(Some(Duration::ZERO)), None);
        signals.restore();
    }
}
