//! Pauses: a fork makes the engine's threads wait here, so that it copies a quiesced engine.
use memfold_os::sync::{ReadGuard, RwLock, WriteGuard};

/// The two pauses: of background work, and of writes to the swap file.
pub struct ForkPauses {
    background: RwLock<()>,
    writing: RwLock<()>,
}

impl Default for ForkPauses {
    fn default() -> ForkPauses {
        ForkPauses { background: RwLock::new(()), writing: RwLock::new(()) }
    }
}

impl ForkPauses {
    /// Permits background work. Waits while it is paused.
    pub fn background(&self) -> ReadGuard<'_, ()> {
        self.background.read()
    }

    /// Permits the writer to write to the swap file. Waits while writes are paused.
    pub fn writing(&self) -> ReadGuard<'_, ()> {
        self.writing.read()
    }

    /// Waits until no thread writes, and pauses writes until [`ForkPauses::resume_writing`]. Call it
    /// after [`ForkPauses::pause_background`], when no fault is served either: no thread waits for a write any
    /// more.
    pub fn pause_writing(&self) {
        core::mem::forget(self.writing.write());
    }

    /// Ends [`ForkPauses::pause_writing`].
    ///
    /// # Safety
    /// - `pause_writing` has returned, in this process or in the parent that it is a copy of, and
    ///   this is called once for it.
    pub unsafe fn resume_writing(&self) {
        // SAFETY: the guard was forgotten by `pause_writing`, so the lock is held for writing.
        unsafe { self.writing.unlock_write() };
    }

    /// Waits until no thread works in the background, and pauses such work until
    /// [`ForkPauses::resume_background`]. The caller is no engine thread, and must not touch folded memory.
    pub fn pause_background(&self) {
        core::mem::forget(self.paused_background());
    }

    /// Returns whether a thread works or is paused, or has ended meanwhile.
    pub fn are_used(&self) -> bool {
        self.background.is_held() || self.writing.is_held()
    }

    /// Forgets threads that have ended while they waited.
    ///
    /// # Safety
    /// - No living thread uses the pauses, and [`ForkPauses::are_used`] is false.
    pub unsafe fn forget_waiters(&self) {
        // SAFETY: by the caller's promise no living thread holds them or waits for them.
        unsafe {
            self.background.reset();
            self.writing.reset();
        }
    }

    /// Pauses as [`ForkPauses::pause_background`] does, until the guard is dropped.
    pub fn paused_background(&self) -> WriteGuard<'_, ()> {
        self.background.write()
    }

    /// Ends [`ForkPauses::pause_background`].
    ///
    /// # Safety
    /// - `pause_background` has returned, in this process or in the parent that it is a copy of, and this is
    ///   called once for it.
    pub unsafe fn resume_background(&self) {
        // SAFETY: the guard was forgotten by `pause_background`, so the lock is held for writing.
        unsafe { self.background.unlock_write() };
    }
}
