//! The bounds that hold now, and what counts against them besides the engine's own memory.
use crate::config::Config;
use memfold_sys::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A limit that the engine shares with engines of other processes.
pub trait SharedLimit: Sync {
    /// Charges this process with `bytes` in all, before it takes them, unless it is charged with so
    /// much already. `limit`: they count against the limit, else against the bound of resident
    /// memory. `false`: all processes together would be past that, and nothing was charged.
    fn charge(&self, bytes: u64, limit: bool) -> bool;

    /// Charges this process with what it holds, bytes: no more and no less.
    fn settle(&self, bytes: u64);
}

/// Bounds in bytes; `u64::MAX` for none. They change while the engine runs.
pub(crate) struct Quota {
    limit_bytes: AtomicU64,
    resident_bytes: AtomicU64,
    /// What each process would have of the bounds if all had the same.
    even_bytes: AtomicU64,
    outside_bytes: AtomicU64,
}

impl Quota {
    /// As the settings say; nothing outside.
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

    /// Other bounds from now on; `even_bytes`: what each process would have of them if all had the
    /// same.
    pub fn set(&self, limit_bytes: u64, resident_bytes: u64, even_bytes: u64) {
        self.limit_bytes.store(limit_bytes, Relaxed);
        self.resident_bytes.store(resident_bytes, Relaxed);
        self.even_bytes.store(even_bytes, Relaxed);
    }

    /// Lowers the bound that counts to what is held, until it is set again.
    pub fn lower(&self, held_bytes: u64) {
        let bound =
            if self.limit_bytes().is_some() { &self.limit_bytes } else { &self.resident_bytes };
        bound.fetch_min(held_bytes, Relaxed);
    }

    /// What each process would have of the bounds if all had the same. Unlike its share this doesn't
    /// depend on what it asks for.
    pub fn even_bytes(&self) -> u64 {
        self.even_bytes.load(Relaxed)
    }

    /// What bounds all memory; `None` without a bound.
    pub fn limit_bytes(&self) -> Option<u64> {
        Some(self.limit_bytes.load(Relaxed)).filter(|limit| *limit != u64::MAX)
    }

    /// What bounds uncompressed memory; `None` without a bound.
    pub fn resident_bytes(&self) -> Option<u64> {
        Some(self.resident_bytes.load(Relaxed)).filter(|resident| *resident != u64::MAX)
    }

    /// The smaller of the two, `u64::MAX` without any.
    pub fn least_bytes(&self) -> u64 {
        self.limit_bytes.load(Relaxed).min(self.resident_bytes.load(Relaxed))
    }

    /// Memory of the program that is not under management.
    pub fn outside_bytes(&self) -> u64 {
        self.outside_bytes.load(Relaxed)
    }

    /// So much is not under management.
    pub fn set_outside(&self, bytes: u64) {
        self.outside_bytes.store(bytes, Relaxed);
    }

    /// So much has left management.
    pub fn add_outside(&self, bytes: u64) {
        self.outside_bytes.fetch_add(bytes, Relaxed);
    }

    /// So much has come under management, as far as it was counted.
    pub fn sub_outside(&self, bytes: u64) {
        let less = |outside: u64| Some(outside.saturating_sub(bytes));
        let _ = self.outside_bytes.fetch_update(Relaxed, Relaxed, less);
    }
}
