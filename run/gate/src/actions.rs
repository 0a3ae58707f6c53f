//! The actions that the program has set for each signal, and the sent signals that are kept for it.
use crate::frame::{SignalAction, SignalInfo};
use core::mem::forget;
use core::sync::atomic::{AtomicU64, Ordering::SeqCst};
use memfold_os::sync::StaticMutex;

/// The greatest signal number. The smallest is 1.
pub const SIGNALS: usize = 64;

/// Returns the bit of a signal in a set.
pub const fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

/// The signals that the gate itself needs. The kernel ends a process if it forces a signal that is
/// blocked or ignored. So the gate never lets the kernel know that the program blocks or ignores
/// one of these.
pub const PROTECTED: u64 = bit(libc::SIGBUS) | bit(libc::SIGSYS) | bit(libc::SIGSEGV);

/// Signals that can't be blocked.
pub const UNBLOCKABLE: u64 = bit(libc::SIGKILL) | bit(libc::SIGSTOP);

/// The signal actions of a process. A child that shares the memory but not the actions has its own.
pub struct SignalActions {
    locked: StaticMutex<LockedActions>,
    /// The signals of [`PROTECTED`] that were sent to the process while all threads blocked them.
    sent: AtomicU64,
}

struct LockedActions {
    actions: [SignalAction; SIGNALS + 1],
    /// The information of each kept signal.
    sent: [SignalInfo; SENT],
}

/// The length of `sent`: one more than the greatest signal that is kept.
const SENT: usize = libc::SIGSYS as usize + 1;

impl SignalActions {
    /// Returns actions that are all default.
    pub const fn new() -> SignalActions {
        SignalActions {
            locked: StaticMutex::new(LockedActions {
                actions: [SignalAction::DEFAULT; SIGNALS + 1],
                sent: [SignalInfo::NONE; SENT],
            }),
            sent: AtomicU64::new(0),
        }
    }

    /// Calls `with` under the lock. `with` must not touch the program's memory.
    pub fn with<T>(&self, with: impl FnOnce(&mut [SignalAction; SIGNALS + 1]) -> T) -> T {
        with(&mut self.locked.lock().actions)
    }

    /// Returns the action of one signal.
    pub fn of(&self, signal: i32) -> SignalAction {
        self.with(|actions| actions[signal as usize])
    }

    /// Returns the set of signals that are kept for the process.
    pub fn sent(&self) -> u64 {
        self.sent.load(SeqCst)
    }

    /// Keeps a signal, unless one with the same number is kept already.
    pub fn keep_sent(&self, info: &SignalInfo) {
        let mut state = self.locked.lock();
        if self.sent() & bit(info.signal) == 0 {
            state.sent[info.signal as usize] = *info;
            self.sent.fetch_or(bit(info.signal), SeqCst);
        }
    }

    /// Takes the lowest kept signal of `set`, or returns `None` if none of `set` is kept.
    pub fn take_sent(&self, set: u64) -> Option<SignalInfo> {
        if self.sent() & set == 0 {
            return None;
        }
        let state = self.locked.lock();
        let signal = (1..SENT as i32).find(|signal| self.sent() & set & bit(*signal) != 0)?;
        self.sent.fetch_and(!bit(signal), SeqCst);
        Some(state.sent[signal as usize])
    }

    /// Forgets all kept signals. A forked child starts without any.
    pub fn forget_sent(&self) {
        self.sent.store(0, SeqCst);
    }

    /// Locks the actions. The lock stays until [`SignalActions::resume`].
    pub fn stop(&self) {
        forget(self.locked.lock());
    }

    /// Releases the lock of [`SignalActions::stop`].
    ///
    /// # Safety
    /// - `stop` was called in this process, or in the parent that this process is a copy of.
    /// - This is called once for that `stop`.
    pub unsafe fn resume(&self) {
        // SAFETY: by the caller's promise `stop` took this lock, and no call has released it since.
        // `stop` forgot its guard, so the guard doesn't release it.
        unsafe { self.locked.unlock() };
    }

    /// Frees a lock whose owner has ended.
    ///
    /// # Safety
    /// - No living task has the lock.
    pub unsafe fn reset(&self) {
        // SAFETY: the caller promises that no living task has the lock.
        unsafe { self.locked.reset() };
    }

    /// Copies the actions of `other` and forgets the kept signals.
    pub fn copy_from(&self, other: &SignalActions) {
        self.forget_sent();
        let theirs = other.with(|actions| *actions);
        self.with(|actions| *actions = theirs);
    }
}
