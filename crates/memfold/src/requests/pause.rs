//! Pauses: a fork makes the engine's threads wait here, so that it copies a quiesced engine.
use memfold_os::sync::{ReadGuard, RwLock};

/// The two pauses: of background work, and of writes to the swap file.
pub struct PauseGates {
    background: RwLock<()>,
    writing: RwLock<()>,
}

impl Default for PauseGates {
    fn default() -> PauseGates {
        PauseGates { background: RwLock::new(()), writing: RwLock::new(()) }
    }
}

impl PauseGates {
    /// Permits background work. Waits while it is paused.
    pub fn background(&self) -> ReadGuard<'_, ()> {
        self.background.read()
    }

    /// Permits the writer to write to the swap file. Waits while writes are paused.
    pub fn writing(&self) -> ReadGuard<'_, ()> {
        self.writing.read()
    }

    /// Waits until no thread writes, and pauses writes until [`PauseGates::open_writing`]. Call it
    /// after [`PauseGates::close`], when no fault is served either: no thread waits for a write any
    /// more.
    pub fn close_writing(&self) {
        core::mem::forget(self.writing.write());
    }

    /// Ends [`PauseGates::close_writing`].
    ///
    /// # Safety
    /// - `close_writing` has returned, in this process or in the parent that it is a copy of, and
    ///   this is called once for it.
    pub unsafe fn open_writing(&self) {
        // SAFETY: the guard was forgotten by `close_writing`, so the lock is held for writing.
        unsafe { self.writing.unlock_write() };
    }

    /// Waits until no thread works in the background, and pauses such work until
    /// [`PauseGates::open`]. The caller is no engine thread, and must not touch folded memory.
    pub fn close(&self) {
        core::mem::forget(self.background.write());
    }

    /// Ends [`PauseGates::close`].
    ///
    /// # Safety
    /// - `close` has returned, in this process or in the parent that it is a copy of, and this is
    ///   called once for it.
    pub unsafe fn open(&self) {
        // SAFETY: the guard was forgotten by `close`, so the lock is held for writing.
        unsafe { self.background.unlock_write() };
    }
}
