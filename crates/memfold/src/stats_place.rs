//! Where an engine's figures are.
use alloc::boxed::Box;
use core::ops::Deref;
use core::sync::atomic::{AtomicPtr, Ordering::Relaxed};
use memfold_stats::Stats;

/// Figures of an engine: its own, or in memory that others read.
pub enum StatsPlace {
    /// The engine's own.
    Own(Box<Stats>),
    /// Shared with whoever made the place.
    Shared(AtomicPtr<Stats>),
}

impl StatsPlace {
    /// Figures that live in memory that others read.
    pub fn shared(stats: &'static Stats) -> StatsPlace {
        StatsPlace::Shared(AtomicPtr::new(stats as *const Stats as *mut Stats))
    }
}

impl Deref for StatsPlace {
    type Target = Stats;
    fn deref(&self) -> &Stats {
        match self {
            StatsPlace::Own(stats) => stats,
            // SAFETY: it comes from a `&'static`.
            StatsPlace::Shared(stats) => unsafe { &*stats.load(Relaxed) },
        }
    }
}
