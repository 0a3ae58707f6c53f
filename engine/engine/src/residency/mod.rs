//! Residency: how a folio enters and leaves the program's page table.
pub(crate) mod huge_pages;
pub mod copy_in;

use crate::area::Area;
use crate::backing::Backing;
use crate::config::Config;
use crate::folio::index::{FolioId, ShardGuard};
use crate::folio::lru::LruList;
use crate::folio::table::FolioTable;
use crate::folio::{Folio, FolioState, TouchKind};
use crate::holds::Holds;
use crate::limits::Limits;
use crate::memory::budget::Budget;
use crate::memory::frames::{Frame, FrameKind};
use crate::memory::mapper::{MapProgress, MapStop, Mapper};
use crate::memory::unshare::ToUnshare;
use crate::parts::{EngineParts, bytes};
use crate::policy::{eviction, workingset};
use crate::requests::background::RequestQueue;
use crate::residency::huge_pages::HugePages;
use crate::stats_place::StatsPlace;
use memfold_os::sync::atomic::Ordering::Relaxed;
use memfold_os::units::{Order, PAGE_SHIFT};
use memfold_stats::{self as stats, LimitBucket};
use memfold_swap::Swap;

/// Clean copies may take one part in this many of `--limit`.
const CLEAN_SHARE: u128 = 8;
/// Without any limit, they may take one part in this many of what is mapped.
const UNBOUNDED_CLEAN_SHARE: u64 = 8;
/// Where the limit can't be kept, they may take one part in this many of what is folded.
const LEAST_CLEAN_SHARE: u128 = 64;

/// Maps folios into the program's page table, and out of it.
#[derive(Copy, Clone)]
pub(crate) struct Residency<'a> {
    config: &'a Config,
    stats: &'a StatsPlace,
    table: &'a FolioTable,
    mapper: &'a Mapper,
    backing: &'a Backing,
    budget: &'a Budget,
    requests: &'a RequestQueue,
    to_unshare: &'a ToUnshare,
    holds: &'static Holds,
    engine: &'a EngineParts,
}

impl<'a> Residency<'a> {
    /// Returns the walk over the parts of an engine.
    #[inline]
    pub(crate) fn new(engine: &'a EngineParts) -> Residency<'a> {
        Residency {
            config: &engine.config,
            stats: &engine.stats,
            table: &engine.table,
            mapper: &engine.mapper,
            backing: &engine.backing,
            budget: &engine.budget,
            requests: &engine.requests,
            to_unshare: &engine.to_unshare,
            holds: engine.holds,
            engine,
        }
    }

    /// Maps a folio that is in the swap cache (`Cached`, or its caller's `Loading` or `Saving`): it
    /// becomes `Resident`. If the kernel stops half-way, the folio is split: the mapped part is
    /// `Resident`, the rest `Cached`.
    pub(crate) fn map_in(
        &self,
        guard: &mut ShardGuard<'_>,
        home: usize,
        id: FolioId,
    ) -> MapProgress {
        let folio = self.table.get(guard, id);
        let (frame, order) = (folio.frame.get(), folio.order());
        folio.wanted.store(false, Relaxed);
        folio.state.set(FolioState::Cached);
        folio.writing.set(0);
        let arrival = self.mapper.carry_in(home, frame, order, self.table.tally());
        if arrival.stop.is_none() {
            folio.state.set(FolioState::Resident);
            self.note_load_time(folio);
            folio.untouched.set(false);
            self.table.list_by_state(guard, id);
            self.keep_clean_budget(guard, id);
            HugePages::new(self.engine).note_load(guard, id);
        } else {
            self.table.lists().detach(id);
            self.table.split_at(guard, id, arrival.pages, self.backing);
            self.settle_pieces(
                guard,
                id,
                arrival.pages,
                order,
                FolioState::Resident,
                FolioState::Cached,
            );
            // Other threads may wait in the kernel for this folio: they fault again.
            self.mapper.space().wake(home, order.bytes());
        }
        self.table.notify(guard);
        arrival
    }

    /// Sets the states after a split at page `at`: pieces before it become `before`, the others
    /// `after`, each on its list.
    fn settle_pieces(
        &self,
        guard: &ShardGuard<'_>,
        id: FolioId,
        at: usize,
        order: Order,
        before: FolioState,
        after: FolioState,
    ) {
        let start = self.table.get(guard, id).key();
        let mut key = start;
        while key < start + order.pages() as u64 {
            let piece = self.table.find(guard, key).expect("a split folio covers what it covered");
            let folio = self.table.get(guard, piece);
            folio.state.set(if key < start + at as u64 { before } else { after });
            folio.untouched.set(folio.untouched.get() && folio.state.get() == FolioState::Cached);
            if folio.state.get() != FolioState::Resident {
                folio.refused.set(LruList::None);
            }
            key += folio.pages();
            self.table.list_by_state(guard, piece);
        }
    }

    /// Drops the stored copy of a folio that was just mapped, if one of these holds:
    /// - Clean copies take more than their budget. That is a share of resident memory, and under
    ///   `--limit` an eighth of it. It is not checked if many processes share the copies, which
    ///   would keep them.
    /// - All copies take more than the folded data would.
    /// - Folding costs more than it saves ([`Limits::kept_bytes`]).
    /// - The copy takes room in a swap file that is half full.
    pub(crate) fn keep_clean_budget(&self, guard: &ShardGuard<'_>, id: FolioId) {
        let limits = Limits::new(self.engine);
        let (clean, folded) = (self.table.tally().clean(), self.table.tally().folded());
        let bound = match limits.is_bounded() {
            true => limits.target(),
            false => self.table.tally().mapped() / UNBOUNDED_CLEAN_SHARE,
        };
        let budget = bound * self.config.clean_percent as u64 / 100;
        // The pool's part of clean copies, as if they compressed like the rest.
        let copy_bytes = self.backing.store().pool_bytes() as u128 * clean as u128
            / (clean + folded).max(1) as u128;
        let folio = self.table.get(guard, id);
        let is_crowded =
            folio.has_copy.get() && self.backing.swap().is_some_and(Swap::is_half_full);
        let crowded = is_crowded && self.table.handles(folio).any(|h| h.as_foreign().is_some());
        let limit = limits.limit_bytes().filter(|_| !self.to_unshare.stays());
        // Copies of mapped pages must not take more than folding saves.
        let folded_bytes = folded << PAGE_SHIFT;
        if crowded
            || clean > budget
            || limits.stored_takes_more()
            || limits.kept_bytes() > 0
            || limit.is_some_and(|limit| copy_bytes > limit as u128 / CLEAN_SHARE)
            || limit.is_some()
                && self.backing.swap().is_none()
                && limits.is_below_least()
                && copy_bytes > folded_bytes as u128 / LEAST_CLEAN_SHARE
        {
            stats::add(&self.stats.clean_dropped, 1);
            self.table.drop_copy(guard, id, self.backing);
        }
    }

    /// Moves a `Resident` folio from its home into an empty frame: it becomes `Cached`. Pages that
    /// the program had discarded become zeros. If the kernel stops half-way, the folio is split:
    /// the moved part is `Cached`, the rest `Resident` and protected. `frame` is freed if no page
    /// moved.
    pub(crate) fn map_out(
        &self,
        guard: &mut ShardGuard<'_>,
        home: usize,
        id: FolioId,
        frame: Frame,
    ) -> MapProgress {
        let folio = self.table.get(guard, id);
        let order = folio.order();
        folio.clean_in.set(0);
        self.table.settle_probe(folio);
        // A folio with a copy had all of its pages in a frame since it came under management.
        let has_copy = folio.has_copy.get();
        let departure = self.mapper.carry_out(home, frame, order, has_copy, self.table.tally());
        folio.age.set(workingset::shadow(
            self.table.tally().evict(order.pages() as u64),
            folio.active.get(),
        ));
        folio.frame.set(frame);
        if departure.stop.is_none() {
            folio.state.set(FolioState::Cached);
            folio.active.set(false);
            folio.refused.set(LruList::None);
            let needs_saving = !folio.has_copy.get();
            self.table.list_by_state(guard, id);
            if needs_saving {
                self.ask_to_save(order);
            }
            return departure;
        }
        folio.active.set(true);
        folio.refused.set(LruList::None);
        let start = folio.key();
        self.table.lists().detach(id);
        self.table.split_at(guard, id, departure.pages, self.backing);
        if departure.stop == Some(MapStop::Busy) {
            self.refuse(guard, start + departure.pages as u64);
        }
        self.settle_pieces(
            guard,
            id,
            departure.pages,
            order,
            FolioState::Cached,
            FolioState::Resident,
        );
        for page in departure.pages..order.pages() {
            self.mapper.frames().give(
                frame + page as u32,
                Order::PAGE,
                if self.mapper.has_move() { FrameKind::Empty } else { FrameKind::Full },
            );
        }
        departure
    }

    /// Records that the page at `key` can't be evicted. If that is lasting, its folio is refused.
    /// If a fork shares the page with many processes, or is new, only the page's block is refused.
    /// The program may have written to other blocks of the folio since.
    fn refuse(&self, guard: &mut ShardGuard<'_>, key: u64) {
        let mut id = self.table.find(guard, key).expect("a folio covers what it covered");
        // Pages of a new fork are tried again once more is known of it.
        let stays = self.to_unshare.stays();
        if stays {
            let order = self.table.get(guard, id).order();
            id = self.table.carve(guard, id, key, order.min(self.config.block_order), self.backing);
        } else if self.to_unshare.is_shared() {
            // The cause is short-lived.
            return;
        }
        let list = if stays { LruList::Shared } else { LruList::Pinned };
        self.table.get(guard, id).refused.set(list);
        self.budget.note_refusal();
    }

    /// Asks a background thread to compress, after a folio of this order has become dirty, if it is
    /// larger than a block. Dirty blocks and pages wait until they take a part of the target
    /// (`eviction::next_step`), and are compressed by the thread that evicts. To wake another thread
    /// for a block takes longer than to compress it, and each move of a page interrupts that thread.
    /// Woken for 64 dirty pages, or for a block, it made PHP, luajit 1.2 times as slow.
    pub(crate) fn ask_to_save(&self, order: Order) {
        if order > self.config.block_order {
            self.requests.reclaim();
        }
    }

    /// Isolates the next folio to evict: one that was refused because it was shared, if shared
    /// pages may be folded again, or the oldest of the mapped folios. From time to time it is
    /// another one that was refused before.
    pub(crate) fn isolate_mapped(&self) -> Option<(FolioId, u64)> {
        if !self.to_unshare.stays()
            && let Some(found) = self.table.lists().isolate(LruList::Shared)
        {
            return Some(found);
        }
        if Limits::new(self.engine).may_retry() {
            // The lists take turns.
            let first = self.budget.next_retry() as usize;
            let mut lists =
                (first..first + LruList::REFUSED.len()).map(|n| LruList::REFUSED[n % 4]);
            if let Some(found) = lists.find_map(|list| self.table.lists().isolate(list)) {
                return Some(found);
            }
        }
        self.table.lists().relist_held(self.holds.endings());
        eviction::next_victim(self.table.lists())
    }

    /// Frees the frame of a folio in the swap cache whose stored copy equals it. The folio becomes
    /// `Stored`.
    pub(crate) fn release_frame(&self, guard: &ShardGuard<'_>, id: FolioId) {
        let folio = self.table.get(guard, id);
        assert!(folio.has_copy.get(), "a folio without a copy can't leave memory");
        let pages = folio.pages();
        folio.state.set(FolioState::Stored);
        folio.untouched.set(false);
        let folded_pages = self.table.tally().fold(pages);
        stats::raise(&self.stats.peak_folded_bytes, folded_pages << PAGE_SHIFT);
        self.mapper.frames().give(folio.frame.get(), folio.order(), FrameKind::Full);
        self.table.list_by_state(guard, id);
        self.table.notify(guard);
    }

    /// Decides from the shadow of a loaded folio whether it belongs to the working set (C4), and
    /// records its kind of access.
    pub(crate) fn note_refault(
        &self,
        guard: &ShardGuard<'_>,
        id: FolioId,
        touch: TouchKind,
        from_file: bool,
    ) {
        let folio = self.table.get(guard, id);
        folio.touch.set(folio.touch.get().then(if from_file { TouchKind::UNKNOWN } else { touch }));
        let pages = folio.pages();
        let distance = workingset::distance(self.table.tally().clock(), folio.age.get());
        stats::add(&self.stats.workingset_refault, pages);
        self.note_limit(pages, distance);
        let is_workingset =
            workingset::is_workingset(distance, self.table.tally().mapped(), folio.order());
        folio.active.set(self.config.workingset && is_workingset);
        if folio.active.get() {
            stats::add(&self.stats.workingset_activate, pages);
            stats::add(
                &self.stats.workingset_restore,
                if workingset::was_active(folio.age.get()) { pages } else { 0 },
            );
        }
    }

    /// Records which limit would have kept pages in memory that were loaded at this distance. Each
    /// page more takes as much, less what its stored copy takes now. An idle process loads its
    /// memory whatever the limit is.
    fn note_limit(&self, pages: u64, distance: u64) {
        if self.budget.is_idle() || self.budget.is_waking() {
            return;
        }
        let limits = Limits::new(self.engine);
        let (folded, stored) = (self.table.tally().folded() << PAGE_SHIFT, limits.stored_bytes());
        let gain = folded.saturating_sub(stored);
        let more = (u128::from(distance << PAGE_SHIFT) * u128::from(gain)
            / u128::from(folded.max(1))) as u64;
        let unmanaged = self.stats.unmanaged_bytes.load(Relaxed);
        let held_bytes = (limits.physical() << PAGE_SHIFT) + unmanaged + stored;
        // It held its bound when the pages were evicted, unless it never did, as a child of fork.
        let bound = limits.bound_bytes().min(self.stats.peak_bytes.load(Relaxed));
        let held_bytes = held_bytes.max(bound);
        // With so much more nothing would be folded.
        let bucket = LimitBucket::of(held_bytes + more.min(gain));
        stats::add(&self.stats.refaults_by_limit[bucket.0], pages);
    }

    /// Records when a folio came into memory, which `reclaim/block_size.rs` asks about.
    pub(crate) fn note_load_time(&self, folio: &Folio) {
        folio.age.set(workingset::shadow(self.table.tally().clock(), false));
    }

    /// Counts a load. It counts as one from the swap file if any part of it was.
    pub(crate) fn count_load(&self, order: Order, from_file: bool) {
        let s = self.stats;
        let (folios, pages) =
            if from_file { (&s.swpin_folio, &s.pswpin) } else { (&s.zswpin_folio, &s.zswpin) };
        stats::add(&folios[order.get() as usize], 1);
        stats::add(pages, order.pages() as u64);
    }

    /// Wakes all threads that wait for pages with keys `[start, end)`, in the kernel and in the
    /// engine. They look again.
    pub(crate) fn wake_waiters(&self, guard: &ShardGuard<'_>, area: &Area, start: u64, end: u64) {
        self.table.notify(guard);
        self.mapper.space().wake(area.addr_of(start), bytes((end - start) as usize));
    }
}
