//! What the program does on each signal, as it believes.
use crate::frame::Action;
use memfold_sys::sync::StaticMutex;

/// Signals are numbered from 1 to this.
pub const SIGNALS: usize = 64;

/// The bit of a signal in a set.
pub const fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

/// The signals by which the gate works. One that is forced while it is blocked or ignored ends the
/// process, so the kernel never learns that the program blocks or ignores one of these.
pub const PROTECTED: u64 = bit(libc::SIGBUS) | bit(libc::SIGSYS) | bit(libc::SIGSEGV);

/// Never blocked.
pub const UNBLOCKABLE: u64 = bit(libc::SIGKILL) | bit(libc::SIGSTOP);

/// What a process does on each signal. A child that shares the memory, and not the actions, has its
/// own.
pub struct Actions {
    table: StaticMutex<[Action; SIGNALS + 1]>,
}

impl Actions {
    /// All default.
    pub const fn new() -> Actions {
        Actions { table: StaticMutex::new([Action::DEFAULT; SIGNALS + 1]) }
    }

    /// Calls `with` under the lock. It must not touch the program's memory.
    pub fn with<T>(&self, with: impl FnOnce(&mut [Action; SIGNALS + 1]) -> T) -> T {
        with(&mut self.table.lock())
    }

    /// The action of one signal.
    pub fn of(&self, signal: i32) -> Action {
        self.with(|table| table[signal as usize])
    }

    /// Makes them those of `other`.
    pub fn copy_from(&self, other: &Actions) {
        let theirs = other.with(|table| *table);
        self.with(|table| *table = theirs);
    }
}
