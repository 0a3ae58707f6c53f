//! Gauges: how much is held, published and reported, and the report that the bounds can't be kept.
//! The owner sets the bounds here.
use crate::backing::Backing;
use crate::config::{Config, OnFull, Size};
use crate::folio::table::FolioTable;
use crate::holds::Holds;
use crate::limits::Limits;
use crate::memory::budget::Budget;
use crate::memory::mapper::Mapper;
use crate::parts::EngineParts;
use crate::policy::slowdown::WorkDone;
use crate::policy::thrash::{FoldingCost, FoldingGain};
use crate::requests::background::RequestQueue;
use crate::stats_place::StatsPlace;
use alloc::format;
use core::fmt;
use core::sync::atomic::AtomicU64;
use memfold_os::sync::atomic::Ordering::Relaxed;
use memfold_os::thread::{bare, now_ns, process_cpu_ns};
use memfold_os::units::PAGE_SHIFT;
use memfold_stats::{self as stats, Stats};
use memfold_swap::Swap;

/// Smaller causes are not reported.
const TOLD_BYTES: u64 = 64 << 10;
/// CPU time that the kernel takes to deliver a fault and to continue after it, nanoseconds. The
/// clocks count it as the program's own. Measured: 230,000 faults of a program that takes 0.15 s
/// took 0.7 s beside the time that the engine counts.
const DELIVERY_NS: u64 = 2_400;
/// The program's own CPU time is taken to be at least this part of its threads', because the estimate of the
/// time in faults is no more precise. A program that spends nearly all time in faults would seem to
/// have done no work.
const OWN_SHARE_MIN: u64 = 100;

/// Counts how much is held, and reports it.
#[derive(Copy, Clone)]
pub struct Gauges<'a> {
    config: &'a Config,
    stats: &'a StatsPlace,
    table: &'a FolioTable,
    mapper: &'a Mapper,
    backing: &'a Backing,
    budget: &'a Budget,
    requests: &'a RequestQueue,
    holds: &'static Holds,
    cpus: usize,
    engine: &'a EngineParts,
}

impl<'a> Gauges<'a> {
    /// Returns the walk over the parts of an engine.
    #[inline]
    pub(crate) fn new(engine: &'a EngineParts) -> Gauges<'a> {
        Gauges {
            config: &engine.config,
            stats: &engine.stats,
            table: &engine.table,
            mapper: &engine.mapper,
            backing: &engine.backing,
            budget: &engine.budget,
            requests: &engine.requests,
            holds: engine.holds,
            cpus: engine.cpus,
            engine,
        }
    }

    fn limits(&self) -> Limits<'_> {
        Limits::new(self.engine)
    }

    /// Returns whether the bounds can't be kept, because all evictable data is folded.
    fn is_out_of_reach(&self) -> bool {
        let limits = self.limits();
        limits.is_below_least() && limits.physical() <= limits.target() && self.has_pages()
    }

    fn has_pages(&self) -> bool {
        self.table.tally().mapped() + self.table.tally().folded() > 0
    }

    /// Judges whether folding costs more than it saves ([`crate::policy::thrash`]). The first
    /// engine thread calls it from time to time. It judges nothing where a swap file makes room, or
    /// where the program is to end instead.
    pub fn judge_cost(&self) {
        let limits = self.limits();
        let may_exceed = self.backing.swap().is_none() && self.config.on_full == OnFull::Grow;
        if !may_exceed || !self.config.pool_counts || limits.limit_bytes().is_none() {
            return;
        }
        let s = self.stats;
        let folded_bytes = self.table.tally().folded() << PAGE_SHIFT;
        let gain = FoldingGain {
            plain: (limits.plain() << PAGE_SHIFT) + self.budget.quota().outside_bytes(),
            folded: folded_bytes,
            stored: folded_bytes + (self.table.tally().clean() << PAGE_SHIFT),
            takes: self.backing.store().pool_bytes() + limits.metadata_bytes(),
            resident: limits.physical() << PAGE_SHIFT,
        };
        self.budget.judge(self.cost(), &gain);
        s.kept_bytes.store(limits.kept_bytes(), Relaxed);
    }

    /// Decides anew how much memory may stay for the slowdown that was asked for, if one was
    /// ([`crate::policy::slowdown`]). The first engine thread calls it from time to time.
    /// `unmanaged_bytes` could be managed. Returns whether memory begins to sink.
    pub fn weigh_slowdown(&self, unmanaged_bytes: u64) -> bool {
        let limits = self.limits();
        let (now_ns, before) = (now_ns(), self.budget.aim_pages());
        let was_idle = self.is_idle();
        let asks_waited = self.budget.asks_waited(now_ns);
        self.budget.weigh(&WorkDone {
            now_ns,
            own_ns: self.stats.own_ns.load(Relaxed),
            folding_ns: self.stats.folding_ns.load(Relaxed) + self.stats.waking_ns.load(Relaxed),
            waited_ns: if asks_waited { bare::others_waited_ns() } else { 0 },
            is_runnable: asks_waited && bare::others_can_run(),
            resident: limits.physical() + (unmanaged_bytes >> PAGE_SHIFT),
            loaded: self.stats.zswpin.load(Relaxed) + self.stats.pswpin.load(Relaxed),
        });
        if self.is_idle() && !was_idle {
            self.requests.recompress();
        }
        limits.ask_past_target();
        let sinks = self.budget.aim_pages() != u64::MAX;
        if !sinks && !limits.is_bounded() {
            // Frames that the folding has left.
            self.mapper.trim_now(u64::MAX);
        }
        sinks && before == u64::MAX
    }

    /// Returns whether the process has been without work for so long that all of its memory is
    /// folded.
    pub fn is_idle(&self) -> bool {
        self.budget.is_idle()
    }

    /// Returns when a process that goes on sleeping is to be weighed again, nanoseconds; `None` if
    /// its sleep changes nothing.
    pub fn idle_due_ns(&self) -> Option<u64> {
        self.budget.idle_due_ns()
    }

    /// Publishes what folding has cost and saved until now. The first engine thread calls it from
    /// time to time.
    pub fn note_cost(&self) {
        let (s, engine_ns) = (self.stats, bare::cpu_ns());
        let spent = (self.in_faults_ns(), engine_ns);
        let note = self.budget.note_cost(now_ns(), spent, self.cpus as u64);
        s.folding_ns.store(note.folding_ns, Relaxed);
        s.waking_ns.store(note.waking_ns, Relaxed);
        let threads_ns = process_cpu_ns().saturating_sub(engine_ns);
        let own_ns = threads_ns.saturating_sub(spent.0).max(threads_ns / OWN_SHARE_MIN);
        s.own_ns.store(own_ns, Relaxed);
        stats::add(&s.idle_ns, if self.budget.is_idle() { note.passed_ns } else { 0 });
        let folded_bytes = self.table.tally().folded() << PAGE_SHIFT;
        let saved_bytes = folded_bytes.saturating_sub(self.own_bytes()) as u128;
        stats::add(
            &s.saved_byte_seconds,
            (saved_bytes * note.passed_ns as u128 / 1_000_000_000) as u64,
        );
    }

    /// Returns the CPU time of the program's threads in faults, nanoseconds.
    fn in_faults_ns(&self) -> u64 {
        self.stats.fault_ns.load(Relaxed) + self.stats.faults.load(Relaxed) * DELIVERY_NS
    }

    /// Returns what folding has cost the program's threads.
    fn cost(&self) -> FoldingCost {
        FoldingCost { fault_ns: self.in_faults_ns(), own_ns: self.stats.own_ns.load(Relaxed) }
    }

    /// Replaces the bounds of the settings, bytes; `u64::MAX` for none. `even_bytes` is the share
    /// of each process of the run if all had equal ones.
    pub fn set_bounds(&self, limit_bytes: u64, resident_bytes: u64, even_bytes: u64) {
        self.budget.quota().set(limit_bytes, resident_bytes, even_bytes);
        self.limits().ask_past_target();
    }

    /// Charges the run with the bytes that this process holds, and those that it can't fold.
    pub(crate) fn settle_charge(&self) {
        let limits = self.limits();
        if let Some(shared) = self.budget.shared_limit() {
            shared.settle(limits.charge_for(limits.physical()));
        }
    }

    /// Brings the gauges up to date.
    pub fn publish(&self) {
        let limits = self.limits();
        let s = self.stats;
        let (pool, index) = (self.backing.store().pool_bytes(), limits.metadata_bytes());
        let (mapped, frames) = (
            self.table.tally().mapped() << PAGE_SHIFT,
            self.mapper.frames().populated() << PAGE_SHIFT,
        );
        s.resident_bytes.store(mapped, Relaxed);
        s.frame_bytes.store(frames, Relaxed);
        s.pool_bytes.store(pool, Relaxed);
        s.index_bytes.store(index, Relaxed);
        s.refused_bytes.store(self.refused_bytes(), Relaxed);
        let [dense, full, pinned, shared] =
            limits.refused_by_list().map(|pages| pages << PAGE_SHIFT);
        s.refused_dense_bytes.store(dense, Relaxed);
        s.refused_full_bytes.store(full, Relaxed);
        s.refused_pinned_bytes.store(pinned, Relaxed);
        s.refused_shared_bytes.store(shared, Relaxed);
        limits.bound_pool();
        self.settle_charge();
        if self.is_out_of_reach() {
            self.past_the_limit();
        }
        if limits.is_retry_due() {
            self.requests.reclaim();
        }
        let folded_bytes = self.table.tally().folded() << PAGE_SHIFT;
        s.folded_bytes.store(folded_bytes, Relaxed);
        s.stored_bytes.store(folded_bytes + (self.table.tally().clean() << PAGE_SHIFT), Relaxed);
        s.folios.store(self.table.count() as u64, Relaxed);
        s.swap_bytes.store(self.backing.swap().map_or(0, Swap::used_bytes), Relaxed);
        s.remote_bytes.store(self.backing.swap().map_or(0, Swap::remote_bytes), Relaxed);
        s.unmanaged_bytes.store(self.budget.quota().outside_bytes(), Relaxed);
        stats::raise(&s.peak_resident_bytes, mapped + frames + self.budget.quota().outside_bytes());
        stats::raise(&s.peak_pool_bytes, pool);
        stats::raise(&s.peak_index_bytes, index);
        stats::raise(
            &s.peak_bytes,
            mapped + frames + pool + index + self.budget.quota().outside_bytes(),
        );
        stats::raise(&s.peak_folded_bytes, folded_bytes);
    }

    /// Records that the bounds could not be kept. Reports it the first time, or ends the program,
    /// as `--on-full` says. If the owner reports it, only a note is made for [`Gauges::take_past`]:
    /// the owner knows whether other processes of the run can fold more.
    pub fn past_the_limit(&self) {
        if self.budget.reports_limit() {
            self.budget.note_past();
            return;
        }
        if self.config.on_full == OnFull::Stop {
            memfold_os::raw::end(&format!(
                "{self}. The program is ended, because of --on-full stop. Give a larger limit{}",
                self.swap_hint()
            ));
        }
        if self.stats.over_limit.fetch_add(1, Relaxed) == 0 {
            self.publish();
            memfold_os::raw::warn(&[
                "memfold: warning: ",
                &format!("{self}. It is exceeded, so that no data is lost{}\n", self.swap_hint()),
            ]);
        }
    }

    /// Returns whether this process's bounds could not be kept since the last call.
    pub fn take_past(&self) -> bool {
        self.budget.take_past()
    }

    /// Returns the end of a message: another remedy.
    pub fn swap_hint(&self) -> &'static str {
        match self.backing.swap() {
            None => ". With --swap DIR, data that does not fit goes to a file",
            Some(_) => "",
        }
    }

    fn refused_bytes(&self) -> u64 {
        self.limits().refused() << PAGE_SHIFT
    }

    /// Returns the least limit that could be kept now, bytes.
    pub fn least_limit_bytes(&self) -> u64 {
        let limits = self.limits();
        let stored_bytes = if limits.is_limited() { limits.stored_bytes() } else { 0 };
        stored_bytes + self.least_resident_bytes()
    }

    /// Returns the uncompressed memory that remains when all else is folded, managed or not, bytes.
    pub fn least_resident_bytes(&self) -> u64 {
        let limits = self.limits();
        let floor = limits.floor_beside(limits.stored_bytes()).max(self.holds.held_bytes());
        let managed_bytes = (self.refused_bytes() + floor).max(limits.kept_bytes());
        self.budget.quota().outside_bytes() + managed_bytes
    }

    /// Counts memory held by the program's system calls as resident. If it is past the bounds,
    /// resident memory is too.
    pub fn note_held(&self) {
        let held_bytes = self.holds.held_bytes();
        if held_bytes > 0 {
            stats::raise(&self.stats.peak_held_bytes, held_bytes);
        }
        if held_bytes > self.limits().bound_bytes() {
            self.past_the_limit();
        }
    }

    /// Sets how much memory of the program is not managed, bytes. It counts against the limit.
    pub fn set_unmanaged_bytes(&self, bytes: u64) {
        self.budget.quota().set_outside(bytes);
        self.limits().ask_past_target();
    }

    /// Returns the resident memory that counts in other processes, because a fork shares it, bytes.
    pub fn others_bytes(&self) -> u64 {
        self.budget.quota().others_bytes()
    }

    /// Sets the resident memory that counts in other processes, as it was measured while it was
    /// `before`, bytes. Copies that were charged since then count here.
    pub fn update_others_bytes(&self, before: u64, bytes: u64) {
        self.budget.quota().update_others(before, bytes);
    }

    /// Returns the last value of [`Gauges::set_unmanaged_bytes`].
    pub fn unmanaged_bytes(&self) -> u64 {
        self.budget.quota().outside_bytes()
    }

    /// Returns the uncompressed memory past the target, bytes.
    pub fn excess_bytes(&self) -> u64 {
        self.limits().excess() << PAGE_SHIFT
    }

    /// Returns the uncompressed memory that may be taken before a folio must be folded, bytes.
    pub fn room_bytes(&self) -> u64 {
        let limits = self.limits();
        limits.target().saturating_sub(limits.physical()) << PAGE_SHIFT
    }

    /// Returns the bytes of the engine's own data: frames, pool, index.
    pub fn own_bytes(&self) -> u64 {
        (self.mapper.frames().populated() << PAGE_SHIFT)
            + self.backing.store().pool_bytes()
            + self.limits().metadata_bytes()
    }

    /// Returns the bytes of frames that hold memory.
    pub fn frame_bytes(&self) -> u64 {
        self.mapper.frames().populated() << PAGE_SHIFT
    }

    /// Returns the managed bytes that are mapped.
    pub fn mapped_bytes(&self) -> u64 {
        self.table.tally().mapped() << PAGE_SHIFT
    }

    /// Returns the bytes that [`crate::fork::Fork::freeze`] would have to load.
    pub fn away_bytes(&self) -> u64 {
        self.table.tally().folded() << PAGE_SHIFT
    }
}

/// Returns how much managed memory of a process stays uncompressed, bytes, for each reason.
pub fn stays(stats: &Stats) -> [(u64, &'static str); 5] {
    let of = |gauge: &AtomicU64| gauge.load(Relaxed);
    [
        (of(&stats.refused_dense_bytes), "does not compress"),
        (of(&stats.refused_full_bytes), "found no room in the pool (--max-pool)"),
        (of(&stats.refused_pinned_bytes), "is pinned by a device"),
        (of(&stats.refused_shared_bytes), "is shared by a fork"),
        (of(&stats.kept_bytes), "would take far more time to fold than it saves memory"),
    ]
}

/// Writes which bound can't be kept, and which data takes the memory.
impl fmt::Display for Gauges<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let limits = self.limits();
        let what = if limits.limit_bytes().is_some() { "limit" } else { "resident limit" };
        write!(f, "The {what} of {} can't be kept", Size(limits.bound_bytes()))?;
        let outside = [(self.budget.quota().outside_bytes(), "is not managed")].into_iter();
        let stored_data = [(limits.stored_bytes(), "is folded data, compressed")];
        let takes = outside.chain(stays(self.stats)).chain(stored_data);
        let causes = takes.filter(|(bytes, _)| *bytes >= TOLD_BYTES).enumerate();
        for (n, (bytes, why)) in causes {
            write!(f, "{} {} {why}", if n == 0 { ":" } else { "," }, Size(bytes))?;
        }
        write!(f, ". The smallest possible limit is now {}", Size(self.least_limit_bytes()))
    }
}
