//! The lock of the areas, in two parts, so that memory can be taken under management while
//! background threads compress.
//!
//! A background thread stands back behind the program ([`memfold_sys::thread::stand_back`]). On a
//! busy machine it may wait for a CPU in the middle of a block, for tens of milliseconds, and
//! whoever wants the areas to itself would wait with it. A program that grows fast passes its limit
//! meanwhile. So a thread that saves folios in the background holds `work` for reading, and the
//! areas only to look something up.
use crate::area::Areas;
use core::ops::{Deref, DerefMut};
use memfold_sys::sync::{ReadGuard, RwLock, WriteGuard};

/// Work on a folio ends within this time on a CPU that is free.
const PATIENCE_NS: u64 = 1_000_000;

/// The areas, and who may use them for what.
pub(crate) struct AreaLock {
    /// Locked before `areas`.
    work: RwLock<()>,
    areas: RwLock<Areas>,
}

/// The areas alone, for changes of any kind: no folio of any area is `Loading` or `Saving`.
pub(crate) struct ExclusiveAreas<'a> {
    areas: WriteGuard<'a, Areas>,
    _work: WriteGuard<'a, ()>,
}

/// Saves folios in the background: see [`AreaLock::work`].
pub(crate) struct BackgroundAccess<'a> {
    lands: &'a AreaLock,
    _work: ReadGuard<'a, ()>,
}

/// How a thread that makes room holds the areas.
#[derive(Copy, Clone)]
pub(crate) enum AreasAccess<'a> {
    /// For all of its work.
    Read(&'a Areas),
    /// For moments.
    Work(&'a BackgroundAccess<'a>),
}

impl AreaLock {
    /// No areas.
    pub fn new() -> AreaLock {
        AreaLock { work: RwLock::new(()), areas: RwLock::new(Areas::default()) }
    }

    /// For whoever works on folios: no area comes, goes or changes meanwhile. Must not be called by
    /// a thread that holds them already.
    pub fn read(&self) -> ReadGuard<'_, Areas> {
        self.areas.read()
    }

    /// While the engine is at rest.
    ///
    /// # Safety
    /// - Nobody changes areas while the reference lives.
    pub unsafe fn peek(&self) -> &Areas {
        // SAFETY: by the caller's promise.
        unsafe { self.areas.peek() }
    }

    /// For whoever changes areas, or what can't be changed while somebody works on a folio.
    pub fn write(&self) -> ExclusiveAreas<'_> {
        let work = self.work.write();
        ExclusiveAreas { areas: self.areas.write(), _work: work }
    }

    /// Waits as [`AreaLock::write`], and keeps them until [`AreaLock::open`].
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

    /// For whoever only adds an area. Background threads may go on saving folios of the others.
    /// `None`: they were held for longer than [`PATIENCE_NS`].
    pub fn grow(&self) -> Option<WriteGuard<'_, Areas>> {
        self.areas.write_within(PATIENCE_NS)
    }

    /// For a background thread that saves folios. With it, it may read the areas for a moment,
    /// while it holds no shard, no context, and no folio that is `Saving`: somebody who has them
    /// read may be waiting for one of these.
    pub fn work(&self) -> BackgroundAccess<'_> {
        BackgroundAccess { lands: self, _work: self.work.read() }
    }
}

impl AreasAccess<'_> {
    /// Reads the areas, for a moment if they aren't held. The conditions of [`AreaLock::work`].
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
