//! Pages by where their bytes are, counted.
use memfold_sys::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counts of pages. `invariants.rs` holds them against the folios: mapped pages are those of `Resident`
/// folios; clean ones have a stored copy beside what is in memory; folded ones are in the store
/// alone.
pub(crate) struct PageTally {
    mapped: AtomicU64,
    clean: AtomicU64,
    folded: AtomicU64,
    /// Pages that were ever evicted: the clock of refault distances (C4).
    evicted: AtomicU64,
}

impl PageTally {
    /// Nothing yet.
    pub fn new() -> PageTally {
        PageTally {
            mapped: AtomicU64::new(0),
            clean: AtomicU64::new(0),
            folded: AtomicU64::new(0),
            evicted: AtomicU64::new(0),
        }
    }

    /// Pages of `Resident` folios.
    pub fn mapped(&self) -> u64 {
        self.mapped.load(Relaxed)
    }

    /// Pages in memory that have a stored copy too.
    pub fn clean(&self) -> u64 {
        self.clean.load(Relaxed)
    }

    /// Pages that are in the store alone.
    pub fn folded(&self) -> u64 {
        self.folded.load(Relaxed)
    }

    /// Pages evicted so far.
    pub fn clock(&self) -> u64 {
        self.evicted.load(Relaxed)
    }

    /// Pages were mapped.
    pub fn map(&self, pages: u64) {
        self.mapped.fetch_add(pages, Relaxed);
    }

    /// Pages are mapped no more.
    pub fn unmap(&self, pages: u64) {
        self.mapped.fetch_sub(pages, Relaxed);
    }

    /// Pages are being evicted; returns the time by the clock before.
    pub fn evict(&self, pages: u64) -> u64 {
        self.evicted.fetch_add(pages, Relaxed)
    }

    /// What was in the store alone is in memory too.
    pub fn load(&self, pages: u64) {
        self.folded.fetch_sub(pages, Relaxed);
        self.clean.fetch_add(pages, Relaxed);
    }

    /// What had a stored copy has left memory; returns what is folded now.
    pub fn fold(&self, pages: u64) -> u64 {
        self.clean.fetch_sub(pages, Relaxed);
        self.store(pages)
    }

    /// Pages came to be in the store alone; returns what is folded now.
    pub fn store(&self, pages: u64) -> u64 {
        self.folded.fetch_add(pages, Relaxed) + pages
    }

    /// What is in memory has got a stored copy.
    pub fn copy(&self, pages: u64) {
        self.clean.fetch_add(pages, Relaxed);
    }

    /// A stored copy ends: of pages in memory, or of `folded` ones.
    pub fn drop_copy(&self, pages: u64, folded: bool) {
        let count = if folded { &self.folded } else { &self.clean };
        count.fetch_sub(pages, Relaxed);
    }
}
