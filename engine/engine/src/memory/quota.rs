//! The present bounds, and the memory that counts against them besides the engine's own.
use crate::config::Config;
use memfold_os::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A limit that the engine shares with engines of other processes.
pub trait SharedLimit: Sync {
    /// Charges this process with `bytes` in all, before it takes them, unless its charge is that
    /// high already. With `limit` they count against the limit, otherwise against the bound of
    /// resident memory. Returns `false`, and charges nothing, if all processes together would be
    /// past it.
    fn charge(&self, bytes: u64, limit: bool) -> bool;

    /// Charges this process with exactly the bytes that it holds.
    fn settle(&self, bytes: u64);
}

/// This process's shares of the bounds in bytes; `u64::MAX` for none. They change while the engine
/// runs.
pub(crate) struct Quota {
    limit_bytes: AtomicU64,
    resident_bytes: AtomicU64,
    /// The share of each process if all had equal ones.
    even_bytes: AtomicU64,
    outside_bytes: AtomicU64,
    /// Resident memory that counts in other processes, bytes. The bounds are higher by as much.
    others_bytes: AtomicU64,
}

impl Quota {
    /// Takes the bounds of the settings, with no unmanaged memory.
    pub fn new(config: &Config) -> Quota {
        let limit = config.limit_bytes.unwrap_or(u64::MAX);
        let resident = config.resident_bytes.unwrap_or(u64::MAX);
        Quota {
            limit_bytes: AtomicU64::new(limit),
            resident_bytes: AtomicU64::new(resident),
            even_bytes: AtomicU64::new(limit.min(resident)),
            outside_bytes: AtomicU64::new(0),
            others_bytes: AtomicU64::new(0),
        }
    }

    /// Sets other bounds. `even_bytes` is the share of each process if all had equal ones.
    pub fn set(&self, limit_bytes: u64, resident_bytes: u64, even_bytes: u64) {
        self.limit_bytes.store(limit_bytes, Relaxed);
        self.resident_bytes.store(resident_bytes, Relaxed);
        self.even_bytes.store(even_bytes, Relaxed);
    }

    /// Lowers the bound that counts to the memory that is held, until it is set again.
    pub fn lower(&self, held_bytes: u64) {
        let bound =
            if self.limit_bytes().is_some() { &self.limit_bytes } else { &self.resident_bytes };
        bound.fetch_min(held_bytes.saturating_sub(self.others_bytes()), Relaxed);
    }

    /// Returns the resident memory that counts in other processes, because a fork shares it.
    pub fn others_bytes(&self) -> u64 {
        self.others_bytes.load(Relaxed)
    }

    /// Sets the resident memory that counts in other processes, as it was measured while it was
    /// `before`. What was subtracted since then isn't part of it.
    pub fn update_others(&self, before: u64, bytes: u64) {
        let since = |now: u64| Some(bytes.saturating_sub(before.saturating_sub(now)));
        let _ = self.others_bytes.fetch_update(Relaxed, Relaxed, since);
    }

    /// Subtracts memory that counts in this process from now on, as far as it was counted in others.
    pub fn sub_others(&self, bytes: u64) {
        let less = |others: u64| Some(others.saturating_sub(bytes));
        let _ = self.others_bytes.fetch_update(Relaxed, Relaxed, less);
    }

    /// Returns the share of each process if all had equal ones. Unlike this process's own share it
    /// doesn't depend on its needs.
    pub fn even_bytes(&self) -> u64 {
        self.even_bytes.load(Relaxed)
    }

    /// Returns the bound of all memory; `None` without one.
    pub fn limit_bytes(&self) -> Option<u64> {
        self.bound(&self.limit_bytes)
    }

    /// Returns the bound of uncompressed memory; `None` without one.
    pub fn resident_bytes(&self) -> Option<u64> {
        self.bound(&self.resident_bytes)
    }

    fn bound(&self, share: &AtomicU64) -> Option<u64> {
        let own = Some(share.load(Relaxed)).filter(|share| *share != u64::MAX)?;
        Some(own.saturating_add(self.others_bytes()))
    }

    /// Returns the smaller of the two, `u64::MAX` without any.
    pub fn bound_bytes(&self) -> u64 {
        let bounds = [self.limit_bytes(), self.resident_bytes()];
        bounds.into_iter().flatten().min().unwrap_or(u64::MAX)
    }

    /// Returns the program's memory that is not managed.
    pub fn outside_bytes(&self) -> u64 {
        self.outside_bytes.load(Relaxed)
    }

    /// Sets the program's memory that is not managed.
    pub fn set_outside(&self, bytes: u64) {
        self.outside_bytes.store(bytes, Relaxed);
    }

    /// Adds memory that is not managed any more.
    pub fn add_outside(&self, bytes: u64) {
        self.outside_bytes.fetch_add(bytes, Relaxed);
    }

    /// Subtracts memory that is managed from now on, as far as it was counted.
    pub fn sub_outside(&self, bytes: u64) {
        let less = |outside: u64| Some(outside.saturating_sub(bytes));
        let _ = self.outside_bytes.fetch_update(Relaxed, Relaxed, less);
    }
}
