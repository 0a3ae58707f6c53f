//! Gates: where the engine's threads can be kept from working, so that a fork copies an engine at
//! rest.
use memfold_sys::sync::{ReadGuard, RwLock};

/// See the module.
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
    /// Permission to do background work; waits while the gate is closed.
    pub fn background(&self) -> ReadGuard<'_, ()> {
        self.background.read()
    }

    /// Permission to write to the swap file, for the thread that does; waits while the gate is
    /// closed.
    pub fn writing(&self) -> ReadGuard<'_, ()> {
        self.writing.read()
    }

    /// Waits until nobody writes, and keeps it so until [`PauseGates::open_writing`]. After
    /// [`PauseGates::close`], and when no fault is served either: nobody waits for a write any more.
    pub fn close_writing(&self) {
        core::mem::forget(self.writing.write());
    }

    /// Ends [`PauseGates::close_writing`].
    ///
    /// # Safety
    /// - `close_writing` has returned, in this process or in the parent that it is a copy of, and
    ///   this is called once for it.
    pub unsafe fn open_writing(&self) {
        // SAFETY: the guard was forgotten.
        unsafe { self.writing.unlock_write() };
    }

    /// Waits until nobody works in the background, and keeps it so until [`PauseGates::open`]. The caller is no engine
    /// thread, and must not touch anything that is folded.
    pub fn close(&self) {
        core::mem::forget(self.background.write());
    }

    /// Ends [`PauseGates::close`].
    ///
    /// # Safety
    /// - `close` has returned, in this process or in the parent that it is a copy of, and this is
    ///   called once for it.
    pub unsafe fn open(&self) {
        // SAFETY: the guard was forgotten.
        unsafe { self.background.unlock_write() };
    }
}
