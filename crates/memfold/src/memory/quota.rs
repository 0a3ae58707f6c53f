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

/// Bounds in bytes; `u64::MAX` for none. They change while the engine runs.
pub(crate) struct Quota {
    limit_bytes: AtomicU64,
    resident_bytes: AtomicU64,
    /// The share of each process if all had equal ones.
    even_bytes: AtomicU64,
    outside_bytes: AtomicU64,
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
        bound.fetch_min(held_bytes, Relaxed);
    }

    /// Returns the share of each process if all had equal ones. Unlike this process's own share it
    /// doesn't depend on its needs.
    pub fn even_bytes(&self) -> u64 {
        self.even_bytes.load(Relaxed)
    }

    /// Returns the bound of all memory; `None` without one.
    pub fn limit_bytes(&self) -> Option<u64> {
        Some(self.limit_bytes.load(Relaxed)).filter(|limit| *limit != u64::MAX)
    }

    /// Returns the bound of uncompressed memory; `None` without one.
    pub fn resident_bytes(&self) -> Option<u64> {
        Some(self.resident_bytes.load(Relaxed)).filter(|resident| *resident != u64::MAX)
    }

    /// Returns the smaller of the two, `u64::MAX` without any.
    pub fn least_bytes(&self) -> u64 {
        self.limit_bytes.load(Relaxed).min(self.resident_bytes.load(Relaxed))
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
