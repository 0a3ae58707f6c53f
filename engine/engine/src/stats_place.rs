//! The place of an engine's counters.
use alloc::boxed::Box;
use core::ops::Deref;
use core::sync::atomic::{AtomicPtr, Ordering::Relaxed};
use memfold_stats::Stats;

/// The counters of an engine: its own, or in memory that others read.
pub enum StatsPlace {
    /// Counters of the engine's own.
    Own(Box<Stats>),
    /// Counters shared with the owner of the place.
    Shared(AtomicPtr<Stats>),
}

impl StatsPlace {
    /// Makes counters in memory that other processes or threads read.
    pub fn shared(stats: &'static Stats) -> StatsPlace {
        StatsPlace::Shared(AtomicPtr::new(stats as *const Stats as *mut Stats))
    }
}

impl Deref for StatsPlace {
    type Target = Stats;
    fn deref(&self) -> &Stats {
        match self {
            StatsPlace::Own(stats) => stats,
            // SAFETY: the pointer comes from a `&'static`.
            StatsPlace::Shared(stats) => unsafe { &*stats.load(Relaxed) },
        }
    }
}
