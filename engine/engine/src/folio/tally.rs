//! Counts of pages by the place of their bytes.
use memfold_os::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counts of pages. `invariants.rs` compares them with the folios. Mapped pages are those of
/// `Resident` folios. Clean ones are in memory and have a stored copy. Folded ones are only in the
/// store.
pub(crate) struct PageTally {
    mapped: AtomicU64,
    clean: AtomicU64,
    folded: AtomicU64,
    /// Pages evicted so far: the clock of refault distances (C4).
    evicted: AtomicU64,
}

impl PageTally {
    /// Makes counts of zero.
    pub fn new() -> PageTally {
        PageTally {
            mapped: AtomicU64::new(0),
            clean: AtomicU64::new(0),
            folded: AtomicU64::new(0),
            evicted: AtomicU64::new(0),
        }
    }

    /// Returns the pages of `Resident` folios.
    pub fn mapped(&self) -> u64 {
        self.mapped.load(Relaxed)
    }

    /// Returns the pages in memory that have a stored copy too.
    pub fn clean(&self) -> u64 {
        self.clean.load(Relaxed)
    }

    /// Returns the pages that are only in the store.
    pub fn folded(&self) -> u64 {
        self.folded.load(Relaxed)
    }

    /// Returns the pages evicted so far.
    pub fn clock(&self) -> u64 {
        self.evicted.load(Relaxed)
    }

    /// Counts pages as mapped.
    pub fn map(&self, pages: u64) {
        self.mapped.fetch_add(pages, Relaxed);
    }

    /// Counts pages as not mapped any more.
    pub fn unmap(&self, pages: u64) {
        self.mapped.fetch_sub(pages, Relaxed);
    }

    /// Counts pages as being evicted, and returns the time by the clock before.
    pub fn evict(&self, pages: u64) -> u64 {
        self.evicted.fetch_add(pages, Relaxed)
    }

    /// Counts folded pages as loaded into memory.
    pub fn load(&self, pages: u64) {
        self.folded.fetch_sub(pages, Relaxed);
        self.clean.fetch_add(pages, Relaxed);
    }

    /// Counts pages with a stored copy as evicted, and returns the number that is folded now.
    pub fn fold(&self, pages: u64) -> u64 {
        self.clean.fetch_sub(pages, Relaxed);
        self.store(pages)
    }

    /// Counts pages as being only in the store, and returns the number that is folded now.
    pub fn store(&self, pages: u64) -> u64 {
        self.folded.fetch_add(pages, Relaxed) + pages
    }

    /// Counts pages in memory as having a stored copy.
    pub fn copy(&self, pages: u64) {
        self.clean.fetch_add(pages, Relaxed);
    }

    /// Counts a stored copy as dropped: of pages in memory, or of `folded` ones.
    pub fn drop_copy(&self, pages: u64, folded: bool) {
        let count = if folded { &self.folded } else { &self.clean };
        count.fetch_sub(pages, Relaxed);
    }
}
