//! Signals as values: they are blocked, and taken one by one while memfold waits for its program.
use std::mem::MaybeUninit;
use std::time::Duration;

/// The signals that are passed on to the program.
const PASSED_ON: [i32; 8] = [
    libc::SIGINT,
    libc::SIGTERM,
    libc::SIGHUP,
    libc::SIGQUIT,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGCONT,
    libc::SIGTSTP,
];

/// A signal that arrived.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct CaughtSignal {
    /// Its number.
    pub number: i32,
    /// The kernel sent it, not a process. For the signals of a terminal (Ctrl-C, Ctrl-Z, hang-up)
    /// this means that the whole process group got it.
    pub from_kernel: bool,
    /// The process that sent it, if a process did.
    pub sender: Option<i32>,
}

/// The signals that memfold passes on, and SIGCHLD, blocked from here on.
#[derive(Clone)]
pub struct PassedSignals {
    taken: libc::sigset_t,
    before: libc::sigset_t,
    children_ignored: bool,
}

impl PassedSignals {
    /// Blocks them. None that arrives from now on is lost. The process must have only one thread.
    pub fn block() -> PassedSignals {
        // SAFETY: the sets are initialised by sigemptyset and sigprocmask before they are read, and
        // local.
        unsafe {
            let mut taken = MaybeUninit::uninit();
            let mut before = MaybeUninit::uninit();
            libc::sigemptyset(taken.as_mut_ptr());
            for number in PASSED_ON.into_iter().chain([libc::SIGCHLD]) {
                libc::sigaddset(taken.as_mut_ptr(), number);
            }
            libc::sigprocmask(libc::SIG_BLOCK, taken.as_ptr(), before.as_mut_ptr());
            // A caller that ignores SIGCHLD would take the program's exit status from us.
            let children_ignored = libc::signal(libc::SIGCHLD, libc::SIG_DFL) == libc::SIG_IGN;
            PassedSignals {
                taken: taken.assume_init(),
                before: before.assume_init(),
                children_ignored,
            }
        }
    }

    /// Restores what [`PassedSignals::block`] found. Safe to call between fork and exec.
    pub fn restore(&self) {
        // SAFETY: the set is initialised; both calls are async-signal-safe.
        unsafe {
            if self.children_ignored {
                libc::signal(libc::SIGCHLD, libc::SIG_IGN);
            }
            libc::sigprocmask(libc::SIG_SETMASK, &self.before, std::ptr::null_mut());
        }
    }

    /// Returns the next signal; `None` after `patience`. Without `patience` it sleeps until one
    /// comes.
    pub fn next(&self, patience: Option<Duration>) -> Option<CaughtSignal> {
        let limit = patience.map(|p| libc::timespec {
            tv_sec: p.as_secs() as libc::time_t,
            tv_nsec: p.subsec_nanos() as libc::c_long,
        });
        let limit = limit.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        let mut info = MaybeUninit::<libc::siginfo_t>::uninit();
        // SAFETY: set and limit are initialised (a null limit means none); the kernel fills `info`
        // on success.
        let number = unsafe { libc::sigtimedwait(&self.taken, info.as_mut_ptr(), limit) };
        if number <= 0 {
            return None;
        }
        // SAFETY: the call succeeded, so `info` is filled; the sender is read only where its field
        // has a meaning.
        let (code, sender) = unsafe {
            let info = info.assume_init();
            let by_process =
                matches!(info.si_code, libc::SI_USER | libc::SI_QUEUE | libc::SI_TKILL);
            (info.si_code, by_process.then(|| info.si_pid()))
        };
        Some(CaughtSignal { number, from_kernel: code == libc::SI_KERNEL, sender })
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
