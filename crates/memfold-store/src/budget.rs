//! The bytes that all pools of a store hold together.
use memfold_sys::sync::atomic::{AtomicU64, Ordering::*};

/// Held bytes, their peak, and the limit for span memory.
pub(crate) struct Budget {
    held: AtomicU64,
    peak: AtomicU64,
    /// 0: unlimited.
    max: AtomicU64,
}

impl Budget {
    pub const fn new(max: u64) -> Budget {
        Budget { held: AtomicU64::new(0), peak: AtomicU64::new(0), max: AtomicU64::new(max) }
    }

    /// Takes `bytes` if the limit allows it.
    pub fn try_take(&self, bytes: u64) -> bool {
        let max = self.max.load(Relaxed);
        let before = self.held.fetch_add(bytes, Relaxed);
        if max != 0 && before + bytes > max {
            self.held.fetch_sub(bytes, Relaxed);
            return false;
        }
        self.peak.fetch_max(before + bytes, Relaxed);
        true
    }

    /// Takes `bytes` whatever the limit: metadata, which is small and must not fail half-way.
    pub fn take(&self, bytes: u64) {
        let before = self.held.fetch_add(bytes, Relaxed);
        self.peak.fetch_max(before + bytes, Relaxed);
    }

    pub fn give(&self, bytes: u64) {
        let before = self.held.fetch_sub(bytes, Relaxed);
        debug_assert!(before >= bytes);
    }

    pub fn held(&self) -> u64 {
        self.held.load(Relaxed)
    }

    pub fn peak(&self) -> u64 {
        self.peak.load(Relaxed)
    }

    pub fn max(&self) -> u64 {
        self.max.load(Relaxed)
    }

    /// A new limit, 0 for none. What is held above it stays.
    pub fn set_max(&self, max: u64) {
        self.max.store(max, Relaxed);
    }
}
