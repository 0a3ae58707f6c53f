//! The budget: the bounds of this process, where it is charged, and what is known of how well they are
//! kept. What they come to beside what is held now: `limits/`.
use crate::config::Config;
use crate::memory::quota::{Quota, SharedLimit};
use crate::policy::thrash::{FoldingCost, FoldingGain, ThrashJudge};
use memfold_sys::sync::Mutex;
use memfold_sys::sync::atomic::{
    AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed, Ordering::SeqCst,
};
use memfold_sys::thread::now_ns;
use memfold_sys::units::PAGE_SHIFT;

/// See the module.
pub struct Budget {
    quota: Quota,
    shared_limit: Option<&'static dyn SharedLimit>,
    thrash: Mutex<ThrashJudge>,
    /// What that says must stay uncompressed, pages.
    kept_pages: AtomicU64,
    /// Times that a folio which had been refused was tried again.
    retries: AtomicU32,
    /// When a folio was last refused, nanoseconds.
    refused_at: AtomicU64,
    /// All memory stays where it is.
    frozen: AtomicBool,
    reports_limit: bool,
    /// See [`Budget::take_past`].
    is_past: AtomicBool,
}

impl Budget {
    /// The bounds of the settings. `reports_limit`: the owner asks [`Budget::take_past`] and reports
    /// that the bounds can't be kept, or ends the program.
    pub fn new(
        config: &Config,
        shared_limit: Option<&'static dyn SharedLimit>,
        reports_limit: bool,
    ) -> Budget {
        Budget {
            quota: Quota::new(config),
            shared_limit,
            thrash: Mutex::new(ThrashJudge::default()),
            kept_pages: AtomicU64::new(0),
            retries: AtomicU32::new(0),
            refused_at: AtomicU64::new(0),
            frozen: AtomicBool::new(false),
            reports_limit,
            is_past: AtomicBool::new(false),
        }
    }

    /// The bounds that hold now.
    pub fn quota(&self) -> &Quota {
        &self.quota
    }

    /// What the engine takes is charged there, before it is taken.
    pub fn shared_limit(&self) -> Option<&'static dyn SharedLimit> {
        self.shared_limit
    }

    /// Uncompressed memory that stays although the bounds can't be kept, pages, as folding it would
    /// cost more than it saves.
    pub fn kept_pages(&self) -> u64 {
        self.kept_pages.load(Relaxed)
    }

    /// Judges anew what is to stay; returns it, bytes.
    pub fn judge(&self, cost: FoldingCost, gain: &FoldingGain) -> u64 {
        let kept = self.thrash.lock().judge(cost, gain);
        self.kept_pages.store(kept >> PAGE_SHIFT, Relaxed);
        kept
    }

    /// Forgets the costs so far: in a child of fork.
    pub fn forget_cost(&self) {
        *self.thrash.lock() = ThrashJudge::default();
        self.kept_pages.store(0, Relaxed);
    }

    /// Notes that a folio could not leave.
    pub fn note_refusal(&self) {
        self.refused_at.store(now_ns(), Relaxed);
    }

    /// Nanoseconds since a folio last could not leave.
    pub fn since_refusal_ns(&self) -> u64 {
        now_ns().saturating_sub(self.refused_at.load(Relaxed))
    }

    /// Counts a retry; returns how many there were.
    pub fn next_retry(&self) -> u32 {
        self.retries.fetch_add(1, Relaxed)
    }

    /// Whether the owner reports that the bounds can't be kept.
    pub fn reports_limit(&self) -> bool {
        self.reports_limit
    }

    /// Notes for the owner that the bounds could not be kept.
    pub fn note_past(&self) {
        self.is_past.store(true, Relaxed);
    }

    /// Returns whether the bounds could not be kept since this was asked last.
    pub fn take_past(&self) -> bool {
        self.is_past.swap(false, Relaxed)
    }

    /// Whether all memory stays where it is, for a fork.
    pub fn is_frozen(&self) -> bool {
        self.frozen.load(Relaxed)
    }

    /// Keeps all memory where it is, or no longer.
    pub fn set_frozen(&self, frozen: bool) {
        self.frozen.store(frozen, SeqCst);
    }
}
