//! The bytes that all pools of a store hold together.
use memfold_os::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};

/// Held bytes, their peak, and the limit for span memory.
pub(crate) struct PoolBudget {
    held: AtomicU64,
    peak: AtomicU64,
    /// 0: unlimited.
    max: AtomicU64,
    /// After a refused save, percent of `max` that `held` must fall to before saves are accepted
    /// again.
    accept_percent: AtomicU64,
    refusing: AtomicBool,
    /// How many callers hold [`PoolBudget::lift`]: while any does, there is no limit.
    lifted: AtomicU64,
}

impl PoolBudget {
    pub const fn new(max: u64, accept_percent: u8) -> PoolBudget {
        PoolBudget {
            held: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            max: AtomicU64::new(max),
            accept_percent: AtomicU64::new(accept_percent as u64),
            refusing: AtomicBool::new(false),
            lifted: AtomicU64::new(0),
        }
    }

    /// Charges `bytes` if the limit allows it.
    pub fn try_charge(&self, bytes: u64) -> bool {
        let max = self.max.load(Relaxed);
        let before = self.held.fetch_add(bytes, Relaxed);
        if max != 0 && before + bytes > max && self.lifted.load(Relaxed) == 0 {
            self.held.fetch_sub(bytes, Relaxed);
            return false;
        }
        self.peak.fetch_max(before + bytes, Relaxed);
        true
    }

    /// Charges `bytes` whatever the limit: metadata, which is small and must not fail half-way.
    pub fn charge(&self, bytes: u64) {
        let before = self.held.fetch_add(bytes, Relaxed);
        self.peak.fetch_max(before + bytes, Relaxed);
    }

    /// Ends a charge.
    pub fn uncharge(&self, bytes: u64) {
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

    /// Returns whether saves are accepted: always, until one was refused for lack of room; then
    /// again when at most the accepted share of the limit is held. Without that gap a full store
    /// would accept and refuse in turns.
    #[inline]
    pub fn accepts(&self) -> bool {
        !self.refusing.load(Relaxed) || self.lifted.load(Relaxed) > 0 || self.may_accept_again()
    }

    #[cold]
    fn may_accept_again(&self) -> bool {
        let max = self.max.load(Relaxed);
        let accept_bytes = (max as u128 * self.accept_percent.load(Relaxed) as u128 / 100) as u64;
        let accepts = max == 0 || self.held() <= accept_bytes;
        if accepts {
            self.refusing.store(false, Relaxed);
        }
        accepts
    }

    /// Lifts the limit, until [`PoolBudget::lower`].
    pub fn lift(&self) {
        self.lifted.fetch_add(1, Relaxed);
    }

    /// Ends a [`PoolBudget::lift`].
    pub fn lower(&self) {
        self.lifted.fetch_sub(1, Relaxed);
    }

    /// Notes that a save was refused for lack of room.
    pub fn refuse(&self) {
        self.refusing.store(true, Relaxed);
    }

    /// Sets the share, in percent.
    pub fn set_accept(&self, percent: u8) {
        self.accept_percent.store(percent as u64, Relaxed);
    }

    /// Sets the limit, 0 for none. Memory above it stays.
    pub fn set_max(&self, max: u64) {
        self.max.store(max, Relaxed);
    }
}
