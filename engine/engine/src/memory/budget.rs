//! The budget: the bounds of this process, the limit that it is charged to, and the record of how
//! well they are kept. `limits/` compares the bounds with the memory that is held.
use crate::config::Config;
use crate::memory::quota::{Quota, SharedLimit};
use crate::policy::slowdown::{SlowdownController, SlowdownGoal, WorkDone};
use crate::policy::thrash::{FoldingCost, FoldingGain, ThrashJudge};
use memfold_os::sync::Mutex;
use memfold_os::sync::atomic::{
    AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed, Ordering::SeqCst,
};
use memfold_os::thread::now_ns;
use memfold_os::units::PAGE_SHIFT;

/// CPU time that folding has taken from the program until a moment, nanoseconds.
#[derive(Copy, Clone, Default)]
pub struct CostNote {
    /// The moment.
    at_ns: u64,
    /// That of all faults.
    faults_ns: u64,
    /// That of engine threads.
    engine_ns: u64,
    /// What was taken while the process worked.
    pub folding_ns: u64,
    /// What was taken by waking it from idleness.
    pub waking_ns: u64,
    /// The time since the note before this.
    pub passed_ns: u64,
}

/// The bounds of an engine, and how well they are kept.
pub struct Budget {
    quota: Quota,
    shared_limit: Option<&'static dyn SharedLimit>,
    thrash: Mutex<ThrashJudge>,
    /// Pages that must stay uncompressed, as the judge has decided.
    kept_pages: AtomicU64,
    /// The slowdown that was asked for, if one was, and its controller from the first decision on.
    goal: Option<SlowdownGoal>,
    slowdown: Mutex<Option<SlowdownController>>,
    /// Pages that may stay uncompressed, as the controller has decided; `u64::MAX` for all.
    aim_pages: AtomicU64,
    /// The number of loaded pages at which an idle process works again; `u64::MAX` for one that
    /// isn't idle.
    wakes_at: AtomicU64,
    /// Whether it was idle until some seconds ago.
    is_waking: AtomicBool,
    /// What folding had cost and saved when that was last noted.
    noted: Mutex<Option<CostNote>>,
    /// Counts the retries of refused folios.
    retries: AtomicU32,
    /// Time of the last refusal, nanoseconds.
    refused_at: AtomicU64,
    /// Whether evictions are stopped.
    frozen: AtomicBool,
    reports_limit: bool,
    /// Whether the bounds could not be kept since the last [`Budget::take_past`].
    is_past: AtomicBool,
}

impl Budget {
    /// Takes the bounds of the settings. `reports_limit`: the owner calls [`Budget::take_past`],
    /// and reports that the bounds can't be kept, or ends the program.
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
            goal: (config.slowdown > 0).then(|| SlowdownGoal {
                share: config.slowdown,
                idle_ns: config.idle_s as u64 * 1_000_000_000,
            }),
            slowdown: Mutex::new(None),
            aim_pages: AtomicU64::new(u64::MAX),
            wakes_at: AtomicU64::new(u64::MAX),
            is_waking: AtomicBool::new(false),
            noted: Mutex::new(None),
            retries: AtomicU32::new(0),
            refused_at: AtomicU64::new(0),
            frozen: AtomicBool::new(false),
            reports_limit,
            is_past: AtomicBool::new(false),
        }
    }

    /// Returns the present bounds.
    pub fn quota(&self) -> &Quota {
        &self.quota
    }

    /// Returns the limit that is charged before the engine takes memory.
    pub fn shared_limit(&self) -> Option<&'static dyn SharedLimit> {
        self.shared_limit
    }

    /// Returns the uncompressed memory that stays although the bounds can't be kept, pages, because
    /// folding it would cost more than it saves.
    pub fn kept_pages(&self) -> u64 {
        self.kept_pages.load(Relaxed)
    }

    /// Judges anew how much is to stay.
    pub fn judge(&self, cost: FoldingCost, gain: &FoldingGain) {
        let floor = self.thrash.lock().judge(cost, gain);
        self.kept_pages.store(floor >> PAGE_SHIFT, Relaxed);
    }

    /// Returns the uncompressed memory that may stay because of the slowdown that was asked for,
    /// pages; `u64::MAX` for all.
    pub fn aim_pages(&self) -> u64 {
        self.aim_pages.load(Relaxed)
    }

    /// Returns whether the next decision depends on how long the program's threads have waited for a
    /// CPU.
    pub fn asks_waited(&self, now_ns: u64) -> bool {
        self.slowdown.lock().as_ref().is_some_and(|control| control.asks_waited(now_ns))
    }

    /// Decides anew how much may stay, if a slowdown was asked for and a decision is due.
    pub fn weigh(&self, work: &WorkDone) {
        let Some(goal) = self.goal else { return };
        let mut control = self.slowdown.lock();
        match &mut *control {
            Some(control) if !control.is_due(work.now_ns) => {}
            Some(control) => {
                self.aim_pages.store(control.aim(*work), Relaxed);
                self.wakes_at.store(control.wakes_at(), Relaxed);
                self.is_waking.store(control.is_waking(), Relaxed);
            }
            None => *control = Some(SlowdownController::new(goal, *work)),
        }
    }

    /// Notes the CPU time of faults and of engine threads, nanoseconds. Engine threads take a CPU
    /// from the program only if it would use all `cpus`, and nothing from an idle one.
    pub fn note_cost(
        &self,
        now_ns: u64,
        (faults_ns, engine_ns): (u64, u64),
        cpus: u64,
    ) -> CostNote {
        let mut least = self.noted.lock();
        let last = least.unwrap_or(CostNote { at_ns: now_ns, ..CostNote::default() });
        let faults = faults_ns.saturating_sub(last.faults_ns);
        let engine = engine_ns.saturating_sub(last.engine_ns) / cpus;
        let (folding_ns, waking_ns) = match (self.is_idle(), self.is_waking()) {
            (true, _) => (0, faults),
            (false, true) => (0, faults + engine),
            (false, false) => (faults + engine, 0),
        };
        let note = CostNote {
            at_ns: now_ns,
            faults_ns,
            engine_ns,
            folding_ns: last.folding_ns + folding_ns,
            waking_ns: last.waking_ns + waking_ns,
            passed_ns: now_ns.saturating_sub(last.at_ns),
        };
        *least = Some(note);
        note
    }

    /// Returns whether the process is idle, so that all of it is folded.
    pub fn is_idle(&self) -> bool {
        self.wakes_at.load(Relaxed) != u64::MAX
    }

    /// Returns when a process that goes on sleeping is to be weighed again, nanoseconds.
    pub fn idle_due_ns(&self) -> Option<u64> {
        self.slowdown.lock().as_ref().and_then(SlowdownController::idle_due_ns)
    }

    /// Returns whether the process works again after it was idle, and most of its memory may still
    /// be folded.
    pub fn is_waking(&self) -> bool {
        self.is_waking.load(Relaxed)
    }

    /// Notes how many pages this process has loaded. An idle process that loads many works again:
    /// its memory may grow at once.
    pub fn note_loaded(&self, pages: u64) {
        if pages >= self.wakes_at.load(Relaxed) {
            self.be_awake();
            self.is_waking.store(true, Relaxed);
        }
    }

    fn be_awake(&self) {
        self.wakes_at.store(u64::MAX, Relaxed);
        self.aim_pages.store(u64::MAX, Relaxed);
    }

    /// Clears the record of costs, in a child of fork.
    pub fn forget_cost(&self) {
        *self.thrash.lock() = ThrashJudge::default();
        self.kept_pages.store(0, Relaxed);
        *self.slowdown.lock() = None;
        self.be_awake();
        self.is_waking.store(false, Relaxed);
        *self.noted.lock() = None;
    }

    /// Records that a folio could not be evicted.
    pub fn note_refusal(&self) {
        self.refused_at.store(now_ns(), Relaxed);
    }

    /// Returns the nanoseconds since a folio last was refused.
    pub fn since_refusal_ns(&self) -> u64 {
        now_ns().saturating_sub(self.refused_at.load(Relaxed))
    }

    /// Counts a retry, and returns how many there were.
    pub fn next_retry(&self) -> u32 {
        self.retries.fetch_add(1, Relaxed)
    }

    /// Returns whether the owner reports that the bounds can't be kept.
    pub fn reports_limit(&self) -> bool {
        self.reports_limit
    }

    /// Records for the owner that the bounds could not be kept.
    pub fn note_past(&self) {
        self.is_past.store(true, Relaxed);
    }

    /// Returns whether the bounds could not be kept since the last call.
    pub fn take_past(&self) -> bool {
        self.is_past.swap(false, Relaxed)
    }

    /// Returns whether evictions are stopped, for a fork.
    pub fn is_frozen(&self) -> bool {
        self.frozen.load(Relaxed)
    }

    /// Stops or allows evictions.
    pub fn set_frozen(&self, frozen: bool) {
        self.frozen.store(frozen, SeqCst);
    }
}
