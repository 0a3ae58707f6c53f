//! Limits: how much memory may be held now, and how much is held.
pub mod gauges;

use crate::backing::Backing;
use crate::config::{Config, OnFull, WORKABLE_MIN_BYTES};
use crate::folio::lru::LruList;
use crate::folio::table::FolioTable;
use crate::memory::budget::Budget;
use crate::memory::mapper::Mapper;
use crate::memory::unshare::ToUnshare;
use crate::parts::EngineParts;
use crate::requests::background::RequestQueue;
use memfold_os::units::{Order, PAGE_SHIFT};
use memfold_swap::Swap;

/// Resident memory has a floor, bytes. It is half of an even part of the limit, or one part in
/// [`FLOOR_DATA_SHARE`] of the data, whichever is less. It is at most [`FLOOR_BYTES`], or one part
/// in [`FLOOR_SHARE`] of the memory that can't be lowered, whichever is more. It is never below
/// [`FLOOR_LEAST_BYTES`]. Without room to work in, the program would fault at each access.
const FLOOR_BYTES: u64 = WORKABLE_MIN_BYTES / 2;
const FLOOR_LEAST_BYTES: u64 = 512 << 10;
const FLOOR_SHARE: u64 = 32;
const FLOOR_DATA_SHARE: u64 = 16;
/// An evicted folio is at most one part in this many of the bounds.
const LEAVING_SHARE: u64 = 64;
/// With a swap file the pool leaves one part in this many of the limit to resident memory. Data
/// that the pool refuses goes to the file.
const RESERVE_SHARE: u64 = 8;
/// Refused folios are tried again when no folio was refused for this long, nanoseconds.
const REST_NS: u64 = 50_000_000;
/// Memory that stays because folding it costs too much may take so much more than the program would
/// without memfold: so many bytes, or one part in so many, whichever is more.
const MORE_BYTES: u64 = 1 << 20;
const MORE_SHARE: u64 = 50;

/// Compares the bounds with the memory that is held now.
#[derive(Copy, Clone)]
pub struct Limits<'a> {
    config: &'a Config,
    table: &'a FolioTable,
    mapper: &'a Mapper,
    backing: &'a Backing,
    budget: &'a Budget,
    requests: &'a RequestQueue,
    to_unshare: &'a ToUnshare,
    /// Whether a stronger codec compresses cold blocks again.
    has_recompression: bool,
}

impl<'a> Limits<'a> {
    /// Returns the walk over the parts of an engine.
    #[inline]
    pub(crate) fn new(engine: &'a EngineParts) -> Limits<'a> {
        Limits {
            config: &engine.config,
            table: &engine.table,
            mapper: &engine.mapper,
            backing: &engine.backing,
            budget: &engine.budget,
            requests: &engine.requests,
            to_unshare: &engine.to_unshare,
            has_recompression: engine.recompress.is_some(),
        }
    }

    /// Returns the uncompressed memory that the engine holds, in pages.
    pub(crate) fn physical(&self) -> u64 {
        self.table.tally().mapped() + self.mapper.frames().populated()
    }

    /// Returns the uncompressed memory that the engine may hold now, in pages. It is the bounds
    /// less other memory, or what `--slowdown` leaves, but at least the memory that can't be folded,
    /// and the floor. So a smaller limit never folds less.
    pub(crate) fn target(&self) -> u64 {
        if self.budget.is_frozen() {
            return u64::MAX >> PAGE_SHIFT;
        }
        let stored_bytes = self.stored_bytes();
        self.bound_beside(stored_bytes)
            .min(self.budget.aim_pages())
            .max(self.least_beside(stored_bytes))
    }

    /// Returns the bytes of counted pools and the index.
    pub fn stored_bytes(&self) -> u64 {
        self.counted_pool_bytes() + self.metadata_bytes()
    }

    /// Returns the uncompressed memory that remains whatever the bounds are, in pages. With
    /// `--on-full stop` memory that can't be folded isn't part of it, because the program ends
    /// before it counts.
    fn least_beside(&self, stored: u64) -> u64 {
        let refused = match self.config.on_full {
            OnFull::Stop if !self.budget.reports_limit() => 0,
            _ => self.refused(),
        };
        let floor = self.floor_beside(stored) >> PAGE_SHIFT;
        (refused + floor).max(self.kept_beside(stored))
    }

    /// Returns the managed memory of the program as it would be without folding, in pages.
    pub(super) fn plain(&self) -> u64 {
        let frames = self.mapper.frames();
        let cached = frames.populated().saturating_sub(frames.full_free());
        self.table.tally().mapped() + self.table.tally().folded() + cached
    }

    /// Returns the uncompressed memory that stays although the bounds can't be kept, in pages
    /// ([`gauges::Gauges::judge_cost`]). With it and `stored` bytes the program takes at most as much
    /// as without memfold, and [`MORE_BYTES`] or one part in [`MORE_SHARE`].
    fn kept_beside(&self, stored: u64) -> u64 {
        let plain = self.plain() << PAGE_SHIFT;
        let most = (plain + MORE_BYTES.max(plain / MORE_SHARE)).saturating_sub(stored);
        self.budget.kept_pages().min(most >> PAGE_SHIFT)
    }

    /// Returns whether the bounds leave less than the memory that remains whatever they are. Then they
    /// can't be kept.
    pub(crate) fn is_below_least(&self) -> bool {
        let stored_bytes = self.stored_bytes();
        self.bound_beside(stored_bytes) < self.least_beside(stored_bytes)
    }

    /// Returns the order of the largest folio that is evicted at once. Until a folio is stored it
    /// counts twice, so this is a small part of the bounds; never less than a block.
    pub(crate) fn leaving_order(&self) -> Order {
        let pages = (self.budget.quota().bound_bytes() / LEAVING_SHARE) >> PAGE_SHIFT;
        let order = Order::new(pages.max(1).ilog2() as u8).unwrap_or(Order::MAX);
        order.max(self.config.block_order)
    }

    /// Asks background threads to reclaim down to the target, or to make the pool denser if it
    /// takes more than folding saves. It is called after each load too: two loads at once may each
    /// have found the last room, and no later fault might come.
    pub(crate) fn ask_past_target(&self) {
        if self.excess() > 0 || self.stored_takes_more() {
            self.requests.reclaim();
        }
    }

    /// Returns [`Limits::bound_beside`] for the present pools, but at least the floor.
    pub(crate) fn bound_or_floor(&self) -> u64 {
        let stored_bytes = self.stored_bytes();
        self.bound_beside(stored_bytes).max(self.floor_beside(stored_bytes) >> PAGE_SHIFT)
    }

    /// Returns the uncompressed memory with which the bounds are kept, in pages. It is the smaller
    /// of `resident`, and of `limit` less the memory of pool, index and unmanaged data.
    fn bound_beside(&self, stored: u64) -> u64 {
        let outside = self.budget.quota().outside_bytes();
        let mut bytes = u64::MAX;
        if let Some(limit) = self.limit_bytes() {
            bytes = limit.saturating_sub(stored + outside);
        }
        if let Some(resident) = self.budget.quota().resident_bytes() {
            bytes = bytes.min(resident.saturating_sub(outside));
        }
        bytes >> PAGE_SHIFT
    }

    pub(super) fn floor_beside(&self, stored: u64) -> u64 {
        let most = FLOOR_BYTES.max((stored + self.budget.quota().outside_bytes()) / FLOOR_SHARE);
        let data = (self.table.tally().mapped() + self.table.tally().folded()) << PAGE_SHIFT;
        let room = (self.budget.quota().even_bytes() / 2).min(data / FLOOR_DATA_SHARE);
        room.clamp(FLOOR_LEAST_BYTES, most)
    }

    /// Sets how much the store may hold now. A page that compresses saves memory whatever the limit
    /// is. So the limit doesn't bound the pool, unless a swap file takes what the pool refuses.
    /// Where the pool counts against the limit, it refuses data that does not compress.
    pub(crate) fn bound_pool(&self) {
        let limit = self.limit_bytes().filter(|_| self.config.pool_counts);
        let has_swap = self.backing.swap().is_some_and(Swap::accepts_writes);
        let mut most = self.config.max_pool_bytes.unwrap_or(u64::MAX);
        if let Some(limit) = limit.filter(|_| has_swap) {
            let floor = self.floor_beside(self.stored_bytes());
            let reserve = floor.max(self.budget.quota().bound_bytes() / RESERVE_SHARE);
            let others = self.metadata_bytes() + self.budget.quota().outside_bytes() + reserve;
            most = most.min(limit.saturating_sub(others));
        }
        self.backing.store().set_pool_bytes_max(if most == u64::MAX { 0 } else { most.max(1) });
        let is_bounded = has_swap || limit.is_some() || self.config.slowdown > 0;
        // What the first codec can't compress, the stronger one may.
        let is_tried_again = self.budget.is_idle() && self.has_recompression;
        self.backing.store().set_refuse_incompressible(is_bounded && !is_tried_again);
    }

    /// Returns whether refused folios should be tried again: the bounds are not kept, and no folio
    /// was refused for a while.
    pub(crate) fn is_retry_due(&self) -> bool {
        self.physical() > self.bound_or_floor() && self.may_retry()
    }

    /// Returns whether refused folios may be tried again.
    pub(crate) fn may_retry(&self) -> bool {
        self.refused() > 0 && self.budget.since_refusal_ns() > REST_NS
    }

    /// Returns how much of `--limit` may be used now; `None` without one.
    pub(crate) fn limit_bytes(&self) -> Option<u64> {
        self.budget.quota().limit_bytes()
    }

    /// Returns the charge, bytes, for `pages` of uncompressed memory and the other memory of the
    /// process that counts against the bound of the run.
    pub(super) fn charge_for(&self, pages: u64) -> u64 {
        let stored_bytes = if self.is_limited() { self.stored_bytes() } else { 0 };
        let held_bytes = (pages << PAGE_SHIFT) + stored_bytes + self.budget.quota().outside_bytes();
        held_bytes.saturating_sub(self.budget.quota().others_bytes())
    }

    /// Returns whether uncompressed memory may grow to `pages`: to the target, as long as the run
    /// has room. Other processes may have taken that room before this one's share is computed anew.
    /// Until then its bound is the memory that it holds: it folds as much as it takes.
    pub(crate) fn may_hold(&self, pages: u64) -> bool {
        let target = self.target();
        if pages > target {
            return false;
        }
        let Some(shared) = self.budget.shared_limit() else { return true };
        if shared.charge(self.charge_for(pages), self.is_limited()) || self.budget.is_frozen() {
            return true;
        }
        let stored_bytes = self.stored_bytes();
        if pages <= self.least_beside(stored_bytes) {
            return true;
        }
        let counted_bytes = if self.is_limited() { stored_bytes } else { 0 };
        self.budget.quota().lower(
            (self.physical() << PAGE_SHIFT) + counted_bytes + self.budget.quota().outside_bytes(),
        );
        self.requests.reclaim();
        false
    }

    /// Returns whether stored copies of mapped pages are to be dropped, because store and index
    /// take more than folding has freed. A limit bounds the sum anyway. Copies in a swap file take
    /// no memory, and pages that many processes share stay.
    pub(crate) fn stored_takes_more(&self) -> bool {
        let is_bounded = self.limit_bytes().is_some() && !self.is_below_least();
        !is_bounded
            && self.backing.swap().is_none()
            && self.saves_nothing()
            && !self.to_unshare.stays()
    }

    fn saves_nothing(&self) -> bool {
        self.backing.store().pool_bytes() + self.metadata_bytes()
            > self.table.tally().folded() << PAGE_SHIFT
    }

    /// Returns the bytes of the pools that count against the limit.
    pub(crate) fn counted_pool_bytes(&self) -> u64 {
        if self.config.pool_counts { self.backing.store().pool_bytes() } else { 0 }
    }

    /// Returns the bytes of index, folios, frames and lists.
    pub(crate) fn metadata_bytes(&self) -> u64 {
        let bytes = self.table.used_bytes();
        let swap = self.backing.swap().map_or(0, Swap::memory_bytes);
        (bytes + self.mapper.frames().metadata_bytes()) as u64 + swap
    }

    /// Returns whether all memory is bounded, not only uncompressed memory.
    pub fn is_limited(&self) -> bool {
        self.limit_bytes().is_some()
    }

    /// Returns whether there is any bound but that of a slowdown.
    pub fn is_bounded(&self) -> bool {
        self.bound_bytes() != u64::MAX
    }

    /// Returns the mapped pages that were refused at their last eviction, without those that were
    /// shared then and may be folded now.
    pub(crate) fn refused(&self) -> u64 {
        self.refused_by_list().iter().sum()
    }

    /// Returns the pages of [`Limits::refused`] in each of [`LruList::REFUSED`].
    pub(crate) fn refused_by_list(&self) -> [u64; LruList::REFUSED.len()] {
        LruList::REFUSED.map(|list| match list {
            LruList::Shared if !self.to_unshare.stays() => 0,
            list => self.table.lists().pages(list),
        })
    }

    /// Returns the uncompressed memory that stays although the bounds can't be kept, bytes: see
    /// [`gauges::Gauges::judge_cost`].
    pub fn kept_bytes(&self) -> u64 {
        self.kept_beside(self.stored_bytes()) << PAGE_SHIFT
    }

    /// Returns the uncompressed memory past the target, in pages.
    pub(crate) fn excess(&self) -> u64 {
        self.physical().saturating_sub(self.target())
    }

    /// Returns the smaller of the present bounds, bytes.
    pub fn bound_bytes(&self) -> u64 {
        self.budget.quota().bound_bytes()
    }
}
