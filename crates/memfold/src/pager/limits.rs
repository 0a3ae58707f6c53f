//! Bounds and targets: how much memory may be held, how much is, and what is told where it is too
//! much.
use crate::config::{OnFull, WORKABLE_MIN_BYTES};
use crate::folio::lru::List;
use crate::pager::Pager;
use crate::stats;
use crate::swap::Swap;
use memfold_sys::sync::atomic::Ordering::Relaxed;
use memfold_sys::thread::now_ns;
use memfold_sys::units::PAGE_SHIFT;

/// There is always this much room for what faults bring, bytes; of a smaller share of the limit of
/// many processes half, but no less than the least.
const FLOOR_BYTES: u64 = WORKABLE_MIN_BYTES / 2;
const FLOOR_LEAST_BYTES: u64 = 512 << 10;
/// One part in this many of the bounds is kept for that where there is less to be had.
const RESERVE_SHARE: u64 = 8;
/// Folios that could not leave are tried again when none was refused for this long, nanoseconds.
const REST_NS: u64 = 50_000_000;

impl Pager {
    /// Uncompressed memory that the pager holds, in pages.
    pub(crate) fn physical(&self) -> u64 {
        self.tally.mapped() + self.frames.populated()
    }

    /// Uncompressed memory that the pager may hold now, in pages. Where nothing takes so much data
    /// that the bounds can't be kept, the rest still gets some room: fighting over less would cost
    /// more time than it brings memory.
    pub(crate) fn target(&self) -> u64 {
        if self.frozen.load(Relaxed) {
            return u64::MAX >> PAGE_SHIFT;
        }
        let refused = self.lru.pages(List::Refused);
        let least = match refused {
            1.. if self.config.on_full == OnFull::Grow => {
                refused + (self.reserve_bytes() >> PAGE_SHIFT)
            }
            _ => self.floor_bytes() >> PAGE_SHIFT,
        };
        self.bound().max(least)
    }

    /// Asks the background for what is past the target. After each load too: two at once may each
    /// have found the last room, and no later fault might come.
    pub(crate) fn ask_past_target(&self) {
        if self.physical() > self.target() {
            self.queue.reclaim();
        }
    }

    /// As [`Pager::bound`], but never less than there always is.
    pub(crate) fn bound_or_floor(&self) -> u64 {
        self.bound().max(self.floor_bytes() >> PAGE_SHIFT)
    }

    /// Uncompressed memory with which the bounds are kept, in pages: the smaller of `resident`, and
    /// of `limit` less what pool, index and unmanaged memory take.
    pub(crate) fn bound(&self) -> u64 {
        let outside = self.quota.outside_bytes();
        let mut bytes = u64::MAX;
        if let Some(limit) = self.limit_bytes() {
            bytes =
                limit.saturating_sub(self.counted_pool_bytes() + self.metadata_bytes() + outside);
        }
        if let Some(resident) = self.quota.resident_bytes() {
            bytes = bytes.min(resident.saturating_sub(outside));
        }
        bytes >> PAGE_SHIFT
    }

    fn floor_bytes(&self) -> u64 {
        (self.quota.least_bytes() / 2).clamp(FLOOR_LEAST_BYTES, FLOOR_BYTES)
    }

    /// What a pool that counts leaves of the limit, and what data that can leave gets beside data
    /// that can't, bytes.
    fn reserve_bytes(&self) -> u64 {
        let most = self.quota.least_bytes();
        self.floor_bytes().max(most / RESERVE_SHARE)
    }

    /// Tells the store what it may hold now. Where the pool counts against the limit, it leaves
    /// room to work in, and takes nothing that doesn't shrink: that would be no smaller there.
    pub(crate) fn bound_pool(&self) {
        let counts = self.config.pool_counts;
        let mut most = self.config.max_pool_bytes.unwrap_or(u64::MAX);
        if let Some(limit) = self.limit_bytes().filter(|_| counts) {
            let others = self.metadata_bytes() + self.quota.outside_bytes() + self.reserve_bytes();
            most = most.min(limit.saturating_sub(others));
        }
        self.store.set_pool_bytes_max(if most == u64::MAX { 0 } else { most.max(1) });
        let has_better =
            self.swap.as_ref().is_some_and(Swap::accepts) || counts && self.limit_bytes().is_some();
        self.store.set_refuse_incompressible(has_better);
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
        self.lru.pages(List::Refused) > 0
            && now_ns().saturating_sub(self.refused_at.load(Relaxed)) > REST_NS
    }

    /// What may be used now of `--limit`; `None` without one.
    pub(crate) fn limit_bytes(&self) -> Option<u64> {
        self.quota.limit_bytes()
    }

    /// Sets the bounds that hold from now on in place of those of the settings, bytes; `u64::MAX`
    /// for none.
    pub fn set_bounds(&self, limit_bytes: u64, resident_bytes: u64) {
        self.quota.set(limit_bytes, resident_bytes);
        self.ask_past_target();
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
        let refused = self.lru.pages(List::Refused) << PAGE_SHIFT;
        s.refused_bytes.store(refused, Relaxed);
        self.bound_pool();
        let is_crowded = self
            .limit_bytes()
            .is_some_and(|limit| self.counted_pool_bytes() + index + self.floor_bytes() > limit);
        if is_crowded || refused > 0 && refused + self.floor_bytes() > self.bound() << PAGE_SHIFT {
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

    pub(crate) fn past_the_limit(&self) {
        let before = self.stats.over_limit.fetch_add(1, Relaxed);
        let what = if self.config.limit_bytes.is_some() { "limit" } else { "resident limit" };
        if self.config.on_full == OnFull::Stop {
            panic!(
                "memfold: the {what} is reached and nothing more can be folded; stopping (--on-full stop)"
            );
        }
        if before == 0 {
            self.publish();
            memfold_sys::raw::warn(&[
                "memfold: warning: nothing more can be folded within the ",
                what,
                "; going past it so that no data is lost (--on-full stop ends the program instead)\n",
            ]);
        }
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

    /// Memory that must not be folded is past the bounds by itself: told once.
    pub fn unmanaged_past_the_limit(&self) {
        if self.stats.over_limit.fetch_add(1, Relaxed) == 0 {
            self.publish();
            memfold_sys::raw::warn(&[
                "memfold: warning: what the program has locked or keeps from core dumps or children is past the limit, and is \
                 not folded (--dont-dump fold folds what is kept from core dumps)\n",
            ]);
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
        self.physical().saturating_sub(self.target()) << PAGE_SHIFT
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
