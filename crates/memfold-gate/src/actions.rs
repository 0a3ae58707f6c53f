//! What the program does on each signal, as it believes.
use crate::frame::{SignalAction, SignalInfo};
use core::mem::forget;
use core::sync::atomic::{AtomicU64, Ordering::SeqCst};
use memfold_os::sync::StaticMutex;

/// Signals are numbered from 1 to this.
pub const SIGNALS: usize = 64;

/// The bit of a signal in a set.
pub const fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

/// The signals by which the gate works. One that is forced while it is blocked or ignored ends the
/// process, so the kernel never learns that the program blocks or ignores one of these.
pub const PROTECTED: u64 = bit(libc::SIGBUS) | bit(libc::SIGSYS) | bit(libc::SIGSEGV);

/// Signals that can't be blocked.
pub const UNBLOCKABLE: u64 = bit(libc::SIGKILL) | bit(libc::SIGSTOP);

/// The signal actions of a process. A child that shares the memory, and not the actions, has its
/// own.
pub struct SignalActions {
    locked: StaticMutex<LockedActions>,
    /// The signals of [`PROTECTED`] that were sent to the process while all threads had them
    /// blocked.
    sent: AtomicU64,
}

struct LockedActions {
    actions: [SignalAction; SIGNALS + 1],
    /// The information of the kept signals.
    sent: [SignalInfo; SENT],
}

/// One above the greatest signal that is kept.
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

    /// Calls `with` under the lock. It must not touch the program's memory.
    pub fn with<T>(&self, with: impl FnOnce(&mut [SignalAction; SIGNALS + 1]) -> T) -> T {
        with(&mut self.locked.lock().actions)
    }

    /// The action of one signal.
    pub fn of(&self, signal: i32) -> SignalAction {
        self.with(|actions| actions[signal as usize])
    }

    /// Signals that are kept for the process.
    pub fn sent(&self) -> u64 {
        self.sent.load(SeqCst)
    }

    /// Keeps a signal, unless one of its kind is kept.
    pub fn keep_sent(&self, info: &SignalInfo) {
        let mut locked = self.locked.lock();
        if self.sent() & bit(info.signal) == 0 {
            locked.sent[info.signal as usize] = *info;
            self.sent.fetch_or(bit(info.signal), SeqCst);
        }
    }

    /// Takes a kept signal of `set`.
    pub fn take_sent(&self, set: u64) -> Option<SignalInfo> {
        if self.sent() & set == 0 {
            return None;
        }
        let locked = self.locked.lock();
        let signal = (1..SENT as i32).find(|signal| self.sent() & set & bit(*signal) != 0)?;
        self.sent.fetch_and(!bit(signal), SeqCst);
        Some(locked.sent[signal as usize])
    }

    /// Forgets all kept signals: the process is a new one.
    pub fn forget_sent(&self) {
        self.sent.store(0, SeqCst);
    }

    /// Locks the actions until [`SignalActions::resume`].
    pub fn stop(&self) {
        forget(self.locked.lock());
    }

    /// Ends [`SignalActions::stop`].
    ///
    /// # Safety
    /// - That was called, in this process or in the parent that it is a copy of, and this is called once
    ///   for it.
    pub unsafe fn resume(&self) {
        // SAFETY: the guard was forgotten.
        unsafe { self.locked.unlock() };
    }

    /// Releases the lock of a task that is gone.
    ///
    /// # Safety
    /// - No living task has the lock.
    pub unsafe fn reset(&self) {
        // SAFETY: the caller's promise.
        unsafe { self.locked.reset() };
    }

    /// Copies the actions of `other`.
    pub fn copy_from(&self, other: &SignalActions) {
        self.forget_sent();
        let theirs = other.with(|actions| *actions);
        self.with(|actions| *actions = theirs);
    }
}
