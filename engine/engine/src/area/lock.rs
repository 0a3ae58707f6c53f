//! The lock of the areas. It has two parts, so that memory can be adopted while background threads
//! compress.
//!
//! The program has priority over background threads ([`memfold_os::thread::stand_back`]). On a
//! busy machine a background thread may wait for a CPU in the middle of a block, for tens of
//! milliseconds. A thread that wants exclusive areas would wait with it, and a program that grows
//! fast would pass its limit meanwhile. So a thread that saves folios in the background holds
//! `work` for reading, and locks the areas only for look-ups.
use crate::area::Areas;
use core::ops::{Deref, DerefMut};
use memfold_os::sync::{ReadGuard, RwLock, WriteGuard};

/// Work on a folio ends within this time if a CPU is free.
const PATIENCE_NS: u64 = 1_000_000;

/// The areas and their locks.
pub(crate) struct AreaLock {
    /// Locked before `areas`.
    work: RwLock<()>,
    areas: RwLock<Areas>,
}

/// Exclusive access, for changes of any kind: no folio of any area is `Loading` or `Saving`.
pub(crate) struct ExclusiveAreas<'a> {
    areas: WriteGuard<'a, Areas>,
    _work: WriteGuard<'a, ()>,
}

/// Permission to save folios in the background: see [`AreaLock::work`].
pub(crate) struct BackgroundAccess<'a> {
    lands: &'a AreaLock,
    _work: ReadGuard<'a, ()>,
}

/// How a thread that reclaims holds the areas.
#[derive(Copy, Clone)]
pub(crate) enum AreasAccess<'a> {
    /// For all of its work.
    Read(&'a Areas),
    /// For moments.
    Work(&'a BackgroundAccess<'a>),
}

impl AreaLock {
    /// Makes an empty set of areas.
    pub fn new() -> AreaLock {
        AreaLock { work: RwLock::new(()), areas: RwLock::new(Areas::default()) }
    }

    /// Locks the areas for work on folios: no area is added, removed or changed meanwhile. Must not
    /// be called by a thread that holds them already.
    pub fn read(&self) -> ReadGuard<'_, Areas> {
        self.areas.read()
    }

    /// Returns the areas while the engine is quiesced.
    ///
    /// # Safety
    /// - No thread changes areas while the reference lives.
    pub unsafe fn peek(&self) -> &Areas {
        // SAFETY: by the caller's promise no thread changes the areas.
        unsafe { self.areas.peek() }
    }

    /// Locks the areas for changes that need all work on folios to have ended.
    pub fn write(&self) -> ExclusiveAreas<'_> {
        let work = self.work.write();
        ExclusiveAreas { areas: self.areas.write(), _work: work }
    }

    /// Locks like [`AreaLock::write`], and keeps the locks until [`AreaLock::open`].
    pub fn close(&self) {
        core::mem::forget(self.write());
    }

    /// Ends [`AreaLock::close`].
    ///
    /// # Safety
    /// - `close` has returned, in this process or in the parent that it is a copy of, and this is
    ///   called once for it.
    pub unsafe fn open(&self) {
        // SAFETY: both guards were forgotten.
        unsafe {
            self.areas.unlock_write();
            self.work.unlock_write();
        }
    }

    /// Returns whether a thread has the areas locked, or has ended while it had.
    pub fn is_held(&self) -> bool {
        self.work.is_held() || self.areas.is_held()
    }

    /// Returns whether a thread changes the areas, or has ended while it did.
    pub fn are_changing(&self) -> bool {
        self.areas.is_written()
    }

    /// Forgets threads that have ended while they waited.
    ///
    /// # Safety
    /// - No living thread uses the areas, and [`AreaLock::is_held`] is false.
    pub unsafe fn forget_waiters(&self) {
        // SAFETY: by the caller's promise no living thread holds them or waits for them.
        unsafe {
            self.work.reset();
            self.areas.reset();
        }
    }

    /// Locks the areas for adding one. Background threads may continue to save folios of the
    /// others. Returns `None` if other threads held the areas for longer than [`PATIENCE_NS`].
    pub fn grow(&self) -> Option<WriteGuard<'_, Areas>> {
        self.areas.write_within(PATIENCE_NS)
    }

    /// Permits a background thread to save folios. It may then read the areas for a moment, while
    /// it holds no shard, no context, and no folio that is `Saving`. A thread that reads the areas
    /// may be waiting for one of these.
    pub fn work(&self) -> BackgroundAccess<'_> {
        BackgroundAccess { lands: self, _work: self.work.read() }
    }
}

impl AreasAccess<'_> {
    /// Calls `read` with the areas, locking them for that if needed. The conditions of
    /// [`AreaLock::work`] hold.
    pub fn with<R>(self, read: impl FnOnce(&Areas) -> R) -> R {
        match self {
            AreasAccess::Read(areas) => read(areas),
            AreasAccess::Work(work) => read(&work.lands.areas.read()),
        }
    }
}

impl Deref for ExclusiveAreas<'_> {
    type Target = Areas;
    fn deref(&self) -> &Areas {
        &self.areas
    }
}

impl DerefMut for ExclusiveAreas<'_> {
    fn deref_mut(&mut self) -> &mut Areas {
        &mut self.areas
    }
}
