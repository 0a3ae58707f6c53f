//! Bounds and targets: how much memory may be held, how much is, and what is told where it is too
//! much.
use crate::config::{OnFull, Size, WORKABLE_MIN_BYTES};
use crate::folio::lru::List;
use crate::pager::Pager;
use crate::policy::thrash::{Cost, Gain, Thrash};
use crate::stats::{self, Stats};
use crate::table::Process;
use alloc::format;
use core::fmt;
use core::sync::atomic::AtomicU64;
use memfold_swap::Swap;
use memfold_sys::sync::atomic::Ordering::Relaxed;
use memfold_sys::thread::{cpu_ns, now_ns, process_cpu_ns};
use memfold_sys::units::{Order, PAGE_SHIFT};

/// Resident memory has a floor, bytes: half of an even part of the limit, or one part in
/// [`FLOOR_DATA_SHARE`] of the data, whichever is less; but no more than [`FLOOR_BYTES`] or one part
/// in [`FLOOR_SHARE`] of what can't be lowered, whichever is more, and no less than the least.
/// Without room to work in, the program would fault for each access.
const FLOOR_BYTES: u64 = WORKABLE_MIN_BYTES / 2;
const FLOOR_LEAST_BYTES: u64 = 512 << 10;
const FLOOR_SHARE: u64 = 32;
const FLOOR_DATA_SHARE: u64 = 16;
/// A cause of less is not reported.
const TOLD_BYTES: u64 = 64 << 10;
/// A folio that leaves memory is at most one part in this many of the bounds.
const LEAVING_SHARE: u64 = 64;
/// With a swap file the pool leaves one part in this many of the limit to resident memory: what it
/// refuses goes to the file.
const RESERVE_SHARE: u64 = 8;
/// Folios that could not leave are tried again when none was refused for this long, nanoseconds.
const REST_NS: u64 = 50_000_000;
/// CPU time that the kernel takes to deliver a fault and to go on after it, nanoseconds: the program's
/// own by its clocks. Measured: 230,000 faults of a program that takes 0.15 s took 0.7 s beside what the
/// engine counts.
const DELIVERY_NS: u64 = 2_400;

impl Pager {
    /// Uncompressed memory that the pager holds, in pages.
    pub(crate) fn physical(&self) -> u64 {
        self.tally.mapped() + self.frames.populated()
    }

    /// Uncompressed memory that the pager may hold now, in pages: what the bounds leave, but never
    /// less than what can't be folded and the floor. So a smaller limit never folds less.
    pub(crate) fn target(&self) -> u64 {
        if self.frozen.load(Relaxed) {
            return u64::MAX >> PAGE_SHIFT;
        }
        let stored = self.stored_bytes();
        self.bound_beside(stored).max(self.least_beside(stored))
    }

    /// What pools that count and the index take, bytes.
    pub fn stored_bytes(&self) -> u64 {
        self.counted_pool_bytes() + self.metadata_bytes()
    }

    /// Uncompressed memory that stays whatever the bounds are, in pages. Where the program ends at
    /// once by `--on-full stop`, it does before what can't be folded counts in.
    fn least_beside(&self, stored: u64) -> u64 {
        let refused = match self.config.on_full {
            OnFull::Stop if !self.reports_limit => 0,
            _ => self.refused(),
        };
        let floor = self.floor_beside(stored) >> PAGE_SHIFT;
        refused + floor.max(self.kept_pages.load(Relaxed))
    }

    /// Whether the bounds can't be kept, because all that could be folded is.
    fn is_out_of_reach(&self) -> bool {
        self.is_at_least() && self.physical() <= self.target() && self.has_pages()
    }

    /// Whether the bounds leave less than what stays whatever they are.
    pub(crate) fn is_at_least(&self) -> bool {
        let stored = self.stored_bytes();
        self.bound_beside(stored) < self.least_beside(stored)
    }

    fn has_pages(&self) -> bool {
        self.tally.mapped() + self.tally.folded() > 0
    }

    /// Judges whether folding costs more than it saves ([`crate::policy::thrash`]). Called from time
    /// to time by the first engine thread. Not where a swap file makes room, nor where the program is
    /// to end instead.
    pub fn judge_cost(&self) {
        let may_exceed = self.swap.is_none() && self.config.on_full == OnFull::Grow;
        if !may_exceed || !self.config.pool_counts || self.limit_bytes().is_none() {
            return;
        }
        let s = &self.stats;
        let fault_ns = s.fault_ns.load(Relaxed) + s.faults.load(Relaxed) * DELIVERY_NS;
        let others_ns = fault_ns + s.background_ns.load(Relaxed) + cpu_ns();
        let own_ns = process_cpu_ns().saturating_sub(others_ns);
        let folded = self.tally.folded() << PAGE_SHIFT;
        let resident = self.physical() << PAGE_SHIFT;
        let gain = Gain {
            plain: folded + resident + self.quota.outside_bytes(),
            folded,
            stored: folded + (self.tally.clean() << PAGE_SHIFT),
            takes: self.store.pool_bytes() + self.metadata_bytes(),
            resident,
        };
        let kept = self.thrash.lock().judge(Cost { fault_ns, own_ns }, &gain);
        self.kept_pages.store(kept >> PAGE_SHIFT, Relaxed);
        s.kept_bytes.store(kept, Relaxed);
    }

    /// In a child of fork: its costs are its own.
    pub(crate) fn forget_cost(&self) {
        *self.thrash.lock() = Thrash::default();
        self.kept_pages.store(0, Relaxed);
    }

    /// The largest folio that leaves memory at once. Until it is stored it counts twice, so it is a
    /// small part of the bounds; never less than a block.
    pub(crate) fn leaving_order(&self) -> Order {
        let pages = (self.quota.least_bytes() / LEAVING_SHARE) >> PAGE_SHIFT;
        let order = Order::new(pages.max(1).ilog2() as u8).unwrap_or(Order::MAX);
        order.max(self.config.block_order)
    }

    /// Asks the background for what is past the target, or for a denser pool where it takes more than
    /// is saved. After each load too: two at once may each have found the last room, and no later
    /// fault might come.
    pub(crate) fn ask_past_target(&self) {
        if self.excess() > 0 || self.stored_takes_more() {
            self.queue.reclaim();
        }
    }

    /// As [`Pager::bound_beside`], but never less than there always is.
    pub(crate) fn bound_or_floor(&self) -> u64 {
        let stored = self.stored_bytes();
        self.bound_beside(stored).max(self.floor_beside(stored) >> PAGE_SHIFT)
    }

    /// Uncompressed memory with which the bounds are kept, in pages: the smaller of `resident`, and
    /// of `limit` less what pool, index and unmanaged memory take.
    fn bound_beside(&self, stored: u64) -> u64 {
        let outside = self.quota.outside_bytes();
        let mut bytes = u64::MAX;
        if let Some(limit) = self.limit_bytes() {
            bytes = limit.saturating_sub(stored + outside);
        }
        if let Some(resident) = self.quota.resident_bytes() {
            bytes = bytes.min(resident.saturating_sub(outside));
        }
        bytes >> PAGE_SHIFT
    }

    fn floor_beside(&self, stored: u64) -> u64 {
        let most = FLOOR_BYTES.max((stored + self.quota.outside_bytes()) / FLOOR_SHARE);
        let data = (self.tally.mapped() + self.tally.folded()) << PAGE_SHIFT;
        let room = (self.quota.even_bytes() / 2).min(data / FLOOR_DATA_SHARE);
        room.clamp(FLOOR_LEAST_BYTES, most)
    }

    /// Tells the store what it may hold now. A page that shrinks saves memory whatever the limit is,
    /// so the limit doesn't bound the pool, unless a swap file takes what the pool refuses. Where
    /// the pool counts against the limit, it takes nothing that doesn't shrink.
    pub(crate) fn bound_pool(&self) {
        let limit = self.limit_bytes().filter(|_| self.config.pool_counts);
        let has_swap = self.swap.as_ref().is_some_and(Swap::accepts_writes);
        let mut most = self.config.max_pool_bytes.unwrap_or(u64::MAX);
        if let Some(limit) = limit.filter(|_| has_swap) {
            let floor = self.floor_beside(self.stored_bytes());
            let reserve = floor.max(self.quota.least_bytes() / RESERVE_SHARE);
            let others = self.metadata_bytes() + self.quota.outside_bytes() + reserve;
            most = most.min(limit.saturating_sub(others));
        }
        self.store.set_pool_bytes_max(if most == u64::MAX { 0 } else { most.max(1) });
        self.store.set_refuse_incompressible(has_swap || limit.is_some());
    }

    /// Notes that a folio could not leave.
    pub(crate) fn note_refusal(&self) {
        self.refused_at.store(now_ns(), Relaxed);
    }

    /// Whether there is reason to try folios again that could not leave: the bounds are not kept,
    /// and none was refused for a while.
    pub(crate) fn is_retry_due(&self) -> bool {
        self.physical() > self.bound_or_floor() && self.may_retry()
    }

    /// Whether folios that could not leave may be tried again.
    pub(crate) fn may_retry(&self) -> bool {
        self.refused() > 0 && now_ns().saturating_sub(self.refused_at.load(Relaxed)) > REST_NS
    }

    /// What may be used now of `--limit`; `None` without one.
    pub(crate) fn limit_bytes(&self) -> Option<u64> {
        self.quota.limit_bytes()
    }

    /// Sets the bounds that hold from now on in place of those of the settings, bytes; `u64::MAX`
    /// for none. `even_bytes`: what each process of the run would have if all had the same.
    pub fn set_bounds(&self, limit_bytes: u64, resident_bytes: u64, even_bytes: u64) {
        self.quota.set(limit_bytes, resident_bytes, even_bytes);
        self.ask_past_target();
    }

    /// From now on this engine is that of a process of a run: what it takes is charged there, before
    /// it is taken.
    pub fn set_process(&self, process: Option<&'static Process>) {
        let place =
            process.map_or(core::ptr::null_mut(), |process| (&raw const *process).cast_mut());
        self.process.store(place, Relaxed);
    }

    fn process(&self) -> Option<&'static Process> {
        // SAFETY: the pointer is null or comes from a `&'static`.
        unsafe { self.process.load(Relaxed).as_ref() }
    }

    /// What counts of `pages` of uncompressed memory against the bound of the run, with what the
    /// process holds besides, bytes.
    fn charge_for(&self, pages: u64) -> u64 {
        let stored = if self.is_limited() { self.stored_bytes() } else { 0 };
        let held = (pages << PAGE_SHIFT) + stored + self.quota.outside_bytes();
        held.saturating_sub(self.stats.shared_bytes.load(Relaxed))
    }

    /// Whether uncompressed memory may grow to `pages`: to the target, as long as the run has room.
    /// Where other processes have taken that before this one's share was computed anew, its bound is
    /// what it holds, until then: it folds as much as it takes.
    pub(crate) fn may_hold(&self, pages: u64) -> bool {
        let target = self.target();
        if pages > target {
            return false;
        }
        let Some(process) = self.process() else { return true };
        if process.charge(self.charge_for(pages), self.is_limited()) || self.frozen.load(Relaxed) {
            return true;
        }
        let stored = self.stored_bytes();
        if pages <= self.least_beside(stored) {
            return true;
        }
        let stored = if self.is_limited() { stored } else { 0 };
        self.quota.lower((self.physical() << PAGE_SHIFT) + stored + self.quota.outside_bytes());
        self.queue.reclaim();
        false
    }

    /// Tells the run what this process holds, and what it can't fold.
    fn settle_charge(&self) {
        if let Some(process) = self.process() {
            process.settle(self.charge_for(self.physical()));
        }
    }

    /// Whether copies beside what is in memory are to go, as store and index take more than folding
    /// has freed. Where a limit is kept, that bounds the sum; copies in a swap file take no memory, and
    /// what many share goes nowhere.
    pub(crate) fn stored_takes_more(&self) -> bool {
        let is_bounded = self.limit_bytes().is_some() && !self.is_at_least();
        !is_bounded
            && self.swap.is_none()
            && self.saves_nothing()
            && !self.to_unshare.is_shared_by_many()
    }

    fn saves_nothing(&self) -> bool {
        self.store.pool_bytes() + self.metadata_bytes() > self.tally.folded() << PAGE_SHIFT
    }

    /// Bytes of the pools that count against the limit.
    pub(crate) fn counted_pool_bytes(&self) -> u64 {
        if self.config.pool_counts { self.store.pool_bytes() } else { 0 }
    }

    /// Bytes that index, folios, frames and lists take.
    pub(crate) fn metadata_bytes(&self) -> u64 {
        let bytes = self.index.used_bytes() + self.folios.used_bytes() + self.folios.count() * 16;
        let swap = self.swap.as_ref().map_or(0, Swap::memory_bytes);
        (bytes + self.frames.metadata_bytes()) as u64 + swap
    }

    /// Brings the gauges up to date.
    pub fn publish(&self) {
        let s = &self.stats;
        let (pool, index) = (self.store.pool_bytes(), self.metadata_bytes());
        let (mapped, frames) =
            (self.tally.mapped() << PAGE_SHIFT, self.frames.populated() << PAGE_SHIFT);
        s.resident_bytes.store(mapped, Relaxed);
        s.frame_bytes.store(frames, Relaxed);
        s.pool_bytes.store(pool, Relaxed);
        s.index_bytes.store(index, Relaxed);
        s.refused_bytes.store(self.refused_bytes(), Relaxed);
        let [dense, full, pinned, shared] =
            List::REFUSED.map(|list| self.lru.pages(list) << PAGE_SHIFT);
        s.refused_dense_bytes.store(dense, Relaxed);
        s.refused_full_bytes.store(full, Relaxed);
        s.refused_pinned_bytes.store(pinned, Relaxed);
        s.refused_shared_bytes.store(shared, Relaxed);
        self.bound_pool();
        self.settle_charge();
        if self.is_out_of_reach() {
            self.past_the_limit();
        }
        if self.is_retry_due() {
            self.queue.reclaim();
        }
        let folded = self.tally.folded() << PAGE_SHIFT;
        s.folded_bytes.store(folded, Relaxed);
        s.stored_bytes.store(folded + (self.tally.clean() << PAGE_SHIFT), Relaxed);
        s.folios.store(self.folios.count() as u64, Relaxed);
        s.swap_bytes.store(self.swap.as_ref().map_or(0, Swap::used_bytes), Relaxed);
        s.remote_bytes.store(self.swap.as_ref().map_or(0, Swap::remote_bytes), Relaxed);
        s.unmanaged_bytes.store(self.quota.outside_bytes(), Relaxed);
        stats::raise(&s.peak_resident_bytes, mapped + frames + self.quota.outside_bytes());
        stats::raise(&s.peak_pool_bytes, pool);
        stats::raise(&s.peak_index_bytes, index);
        stats::raise(&s.peak_bytes, mapped + frames + pool + index + self.quota.outside_bytes());
        stats::raise(&s.peak_folded_bytes, folded);
    }

    /// Notes that the bounds could not be kept. Reports it the first time, or ends the program, as
    /// `--on-full` says; or leaves that to the owner, who knows whether other processes of the run
    /// can fold more ([`Pager::take_past`]).
    pub fn past_the_limit(&self) {
        if self.reports_limit {
            self.is_past.store(true, Relaxed);
            return;
        }
        if self.config.on_full == OnFull::Stop {
            memfold_sys::raw::end(&format!(
                "{self}. The program is ended, as --on-full stop asks for; give a larger limit{}",
                self.swap_hint()
            ));
        }
        if self.stats.over_limit.fetch_add(1, Relaxed) == 0 {
            self.publish();
            memfold_sys::raw::warn(&[
                "memfold: warning: ",
                &format!("{self}. It is exceeded, so that no data is lost{}\n", self.swap_hint()),
            ]);
        }
    }

    /// Whether this process's bounds could not be kept since this was asked last.
    pub fn take_past(&self) -> bool {
        self.is_past.swap(false, Relaxed)
    }

    /// What else would do, for the end of a message.
    pub fn swap_hint(&self) -> &'static str {
        match self.swap {
            None => "; with --swap DIR what doesn't fit goes to a file",
            Some(_) => "",
        }
    }

    /// Whether all memory is bounded, not only what is uncompressed.
    pub fn is_limited(&self) -> bool {
        self.limit_bytes().is_some()
    }

    /// Mapped pages that nothing took when they were last to leave.
    pub(crate) fn refused(&self) -> u64 {
        List::REFUSED.iter().map(|list| self.lru.pages(*list)).sum()
    }

    fn refused_bytes(&self) -> u64 {
        self.refused() << PAGE_SHIFT
    }

    /// Uncompressed memory that stays although the bounds can't be kept, bytes: [`Pager::judge_cost`].
    pub fn kept_bytes(&self) -> u64 {
        self.kept_pages.load(Relaxed) << PAGE_SHIFT
    }

    /// The least limit that could be kept now, bytes.
    pub fn least_limit_bytes(&self) -> u64 {
        let stored = if self.is_limited() { self.stored_bytes() } else { 0 };
        stored + self.least_resident_bytes()
    }

    /// Uncompressed memory that stays whatever is folded, managed or not, bytes.
    pub fn least_resident_bytes(&self) -> u64 {
        let kept = self.floor_beside(self.stored_bytes()).max(self.kept_bytes());
        let held = self.holds.held_bytes();
        self.quota.outside_bytes() + self.refused_bytes() + kept.max(held)
    }

    /// A call of the program's holds what it names: if all that is held is past the bounds, so is
    /// what is in memory.
    pub fn note_held(&self) {
        let held = self.holds.held_bytes();
        if held > 0 {
            stats::raise(&self.stats.peak_held_bytes, held);
        }
        if held > self.bound_bytes() {
            self.past_the_limit();
        }
    }

    /// Tells how much memory of the program is not under management, in bytes: it counts against
    /// the limit.
    pub fn set_unmanaged_bytes(&self, bytes: u64) {
        self.quota.set_outside(bytes);
        self.ask_past_target();
    }

    /// What [`Pager::set_unmanaged_bytes`] was told last.
    pub fn unmanaged_bytes(&self) -> u64 {
        self.quota.outside_bytes()
    }

    /// Uncompressed memory past what may be held now, bytes.
    pub fn excess_bytes(&self) -> u64 {
        self.excess() << PAGE_SHIFT
    }

    /// As [`Pager::excess_bytes`], in pages.
    pub(crate) fn excess(&self) -> u64 {
        self.physical().saturating_sub(self.target())
    }

    /// Uncompressed memory that may still be taken before something must be folded, bytes.
    pub fn room_bytes(&self) -> u64 {
        self.target().saturating_sub(self.physical()) << PAGE_SHIFT
    }

    /// Bytes that the engine's own data takes: frames, pool, index.
    pub fn own_bytes(&self) -> u64 {
        (self.frames.populated() << PAGE_SHIFT) + self.store.pool_bytes() + self.metadata_bytes()
    }

    /// Bytes of frames that hold memory.
    pub fn frame_bytes(&self) -> u64 {
        self.frames.populated() << PAGE_SHIFT
    }

    /// The smaller of the bounds that hold now, bytes.
    pub fn bound_bytes(&self) -> u64 {
        self.quota.least_bytes()
    }

    /// Bytes mapped under management.
    pub fn mapped_bytes(&self) -> u64 {
        self.tally.mapped() << PAGE_SHIFT
    }

    /// Bytes that [`Pager::freeze`] would have to bring back.
    pub fn away_bytes(&self) -> u64 {
        self.tally.folded() << PAGE_SHIFT
    }
}

/// What stays uncompressed of the managed memory of a process, bytes, and why.
pub fn stays(stats: &Stats) -> [(u64, &'static str); 5] {
    let of = |gauge: &AtomicU64| gauge.load(Relaxed);
    [
        (of(&stats.refused_dense_bytes), "doesn't shrink"),
        (of(&stats.refused_full_bytes), "found no room in the pool (--max-pool)"),
        (of(&stats.refused_pinned_bytes), "is pinned by a device"),
        (of(&stats.refused_shared_bytes), "is shared by a fork"),
        (of(&stats.kept_bytes), "would take far more time to fold than it saves memory"),
    ]
}

/// Which bound can't be kept, and what takes the memory.
impl fmt::Display for Pager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = if self.limit_bytes().is_some() { "limit" } else { "resident limit" };
        write!(f, "The {what} of {} can't be kept: ", Size(self.bound_bytes()))?;
        let outside = [(self.quota.outside_bytes(), "is not managed")].into_iter();
        let stored = [(self.stored_bytes(), "is what is folded, compressed")];
        let takes = outside.chain(stays(&self.stats)).chain(stored);
        for (bytes, why) in takes.filter(|(bytes, _)| *bytes >= TOLD_BYTES) {
            write!(f, "{} {why}, ", Size(bytes))?;
        }
        write!(f, "and the least that would do now is {}", Size(self.least_limit_bytes()))
    }
}
