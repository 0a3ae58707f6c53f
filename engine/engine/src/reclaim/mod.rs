//! The reclaim path: target -> isolate -> map out into the swap cache -> save -> frame free again.
pub(crate) mod block_size;
pub(crate) mod writeback;
pub(crate) mod save;
pub(crate) mod recompress;
pub(crate) mod drop;
pub(crate) mod background;

use crate::area::lock::AreasAccess;
use crate::area::{Area, Areas};
use crate::backing::Backing;
use crate::config::{Config, OnFull, Size};
use crate::folio::FolioState;
use crate::folio::index::{FolioId, ShardGuard};
use crate::folio::lru::LruList;
use crate::folio::table::FolioTable;
use crate::holds::{Holds, LeavingPages};
use crate::limits::Limits;
use crate::limits::gauges::Gauges;
use crate::memory::budget::Budget;
use crate::memory::frames::{Frame, FrameKind};
use crate::memory::mapper::{MapStop, Mapper};
use crate::memory::unshare::ToUnshare;
use crate::parts::{EngineParts, bytes};
use crate::policy::eviction;
use crate::policy::eviction::ReclaimStep;
use crate::reclaim::block_size::BlockSize;
use crate::reclaim::drop::DropBatch;
use crate::reclaim::save::Saver;
use crate::reclaim::writeback::Writeback;
use crate::requests::background::RequestQueue;
use crate::residency::Residency;
use crate::residency::huge_pages::HugePages;
use crate::stats_place::StatsPlace;
use core::iter::once;
use core::ops::Range;
use memfold_os::Errno;
use memfold_os::memory::zone::{NoPromise, counts_reservations};
use memfold_os::thread::now_ns;
use memfold_os::uffd::drop::SPANS_MAX;
use memfold_os::units::{MAX_PAGES, Order, PAGE_SHIFT, PAGE_SIZE};
use memfold_stats as stats;

/// Why a frame cannot be had.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum NoFrame {
    /// The kernel returned EAGAIN: an event must be read first.
    Again,
}

/// The result of a round of reclaim.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum ReclaimProgress {
    /// Frames became free, or memory was given back.
    Freed,
    /// No page remains that could be folded.
    Nothing,
    /// The kernel returned EAGAIN: an event must be read first.
    Again,
}

/// The result of a search for a full frame.
enum FrameSearch {
    /// The frame.
    Found(Frame),
    /// Free pages are as many as are needed, but lie apart, and can't be moved together.
    NoRun,
    /// Such free pages were given back to the kernel, so a fresh frame may be had.
    Trimmed,
    /// Memory must be freed first.
    NoMemory,
}

/// Most folios tried in a round.
const TRIES: usize = 256;
/// Most rounds for one frame. Other threads may take the frames that a round has freed, so a few
/// failures don't mean that no memory can be freed.
const ATTEMPTS: usize = 64;
/// Most refused folios of one eviction, because a fault waits meanwhile.
const EVICT_TRIES: usize = 64;
/// How long a fault waits for pages that a fork shares. It waits at most [`ATTEMPTS`] times.
const SHARED_WAIT_NS: u64 = 250_000;
/// Faults reclaim if memory is past the target by more than one part in this many of it. Each fault
/// gains so many times the memory that it takes, but folds at most [`WORK_OFF_MOST`] times as much.
const EXCESS_SHARE: u64 = 128;
const WORK_OFF_TIMES: u64 = 2;
const WORK_OFF_MOST: u64 = 32;

/// Makes room: frames, evictions.
#[derive(Copy, Clone)]
pub(crate) struct Reclaim<'a> {
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

impl<'a> Reclaim<'a> {
    /// Returns the walk over the parts of an engine.
    #[inline]
    pub(crate) fn new(engine: &'a EngineParts) -> Reclaim<'a> {
        Reclaim {
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

    /// Returns a full frame. For an order above the block's it returns `None` if no run of that
    /// size can be had, and the caller asks for less. At or below the block's order it always
    /// returns one: by reclaim, or past the limit as `--on-full` says.
    pub(crate) fn frame_for(&self, areas: &Areas, order: Order) -> Result<Option<Frame>, NoFrame> {
        let limits = Limits::new(self.engine);
        let pages = order.pages() as u64;
        let large = order > self.config.block_order;
        stats::add(&self.stats.frame_alloc, large as u64);
        // A move takes as much memory from the frames as it maps; only copies need more.
        let copies = if self.mapper.has_move() { 0 } else { pages };
        if limits.physical() > limits.target() || limits.is_retry_due() {
            self.requests.reclaim();
        }
        self.work_off_excess(areas, pages);
        let shared_count = self.to_unshare.met();
        for _ in 0..ATTEMPTS {
            match self.find_frame(order, copies)? {
                FrameSearch::Found(frame) => return Ok(Some(frame)),
                FrameSearch::Trimmed => continue,
                FrameSearch::NoRun if large => return Ok(None),
                FrameSearch::NoRun | FrameSearch::NoMemory => {}
            }
            stats::add(&self.stats.direct_reclaims, 1);
            match self.reclaim(AreasAccess::Read(areas), pages, copies) {
                ReclaimProgress::Freed => {}
                ReclaimProgress::Again => return Err(NoFrame::Again),
                // Pages that a fork shares can't be evicted until a background thread has made them
                // private. That is worth a moment's wait, but not more, because that thread may
                // itself be waiting for a fault to be served.
                ReclaimProgress::Nothing
                    if !large
                        && self.to_unshare.met() != shared_count
                        && self.to_unshare.is_shared() =>
                {
                    self.requests.reclaim();
                    memfold_os::thread::sleep_ns(SHARED_WAIT_NS);
                }
                // Folios remain that may be evicted: the program is ended only after all were
                // tried.
                ReclaimProgress::Nothing
                    if self.config.on_full == OnFull::Stop && self.may_evict() => {}
                ReclaimProgress::Nothing => break,
            }
        }
        if let Some(frame) = self.mapper.frames().take(order, FrameKind::Full) {
            return Ok(Some(frame));
        }
        if large { Ok(None) } else { self.frame_past_limit(order).map(Some) }
    }

    /// Looks for a full frame without reclaim: a free one, a fresh one if memory may grow, or free
    /// pages that are moved together. The caller makes so many `copies` of pages.
    fn find_frame(&self, order: Order, copies: u64) -> Result<FrameSearch, NoFrame> {
        let limits = Limits::new(self.engine);
        let pages = order.pages() as u64;
        let has_room = copies == 0 || limits.physical() + copies <= limits.target();
        if has_room && let Some(frame) = self.mapper.frames().take(order, FrameKind::Full) {
            return Ok(FrameSearch::Found(frame));
        }
        // Read once, because other threads take and free memory meanwhile.
        let held_pages = limits.physical() + pages + copies;
        if limits.may_hold(held_pages) {
            if held_pages > limits.bound_or_floor() && limits.refused() > 0 {
                Gauges::new(self.engine).past_the_limit();
            }
            let fresh = self.mapper.populated(order).map_err(|_| NoFrame::Again)?;
            return Ok(fresh.map_or(FrameSearch::NoMemory, FrameSearch::Found));
        }
        if !has_room || self.mapper.frames().full_free() < pages {
            return Ok(FrameSearch::NoMemory);
        }
        match self.mapper.gather(order) {
            Ok(Some(frame)) => Ok(FrameSearch::Found(frame)),
            Err(Errno::AGAIN) => Err(NoFrame::Again),
            // Free single pages that cannot be moved together: giving them back makes room for a
            // fresh run.
            _ if order <= self.config.block_order && self.mapper.trim_now(pages) > 0 => {
                Ok(FrameSearch::Trimmed)
            }
            _ => Ok(FrameSearch::NoRun),
        }
    }

    /// Returns a fresh frame of a block or less although nothing more can be evicted, and reports
    /// that the bounds can't be kept. Ends the process without memory for it.
    fn frame_past_limit(&self, order: Order) -> Result<Frame, NoFrame> {
        match self.mapper.populated(order).map_err(|_| NoFrame::Again)? {
            Some(frame) => {
                Gauges::new(self.engine).past_the_limit();
                Ok(frame)
            }
            None if counts_reservations() => NoPromise::end("Memory for pages"),
            None => panic!(
                "memfold: No frame of order {} is left in {} of frames",
                order.get(),
                Size(self.mapper.frames().zone().len() as u64)
            ),
        }
    }

    /// Reclaims if memory is far past the target: by more than the `pages` that the caller is about
    /// to take. Each stored page lowers the target. So without this, a program that faults faster
    /// than background threads reclaim would grow past the limit.
    fn work_off_excess(&self, areas: &Areas, pages: u64) {
        let limits = Limits::new(self.engine);
        if limits.excess() <= limits.target() / EXCESS_SHARE {
            return;
        }
        // Each folded page takes its part of the pool, so more than one must be folded to gain one.
        let stored_bytes = (self.table.tally().folded() + self.table.tally().clean()) << PAGE_SHIFT;
        let saved_bytes = stored_bytes.saturating_sub(limits.counted_pool_bytes()).max(1);
        let times =
            (WORK_OFF_TIMES * stored_bytes / saved_bytes).clamp(WORK_OFF_TIMES, WORK_OFF_MOST);
        let goal = limits.physical().saturating_sub(times * pages);
        self.reclaim_until(AreasAccess::Read(areas), 0, 1, |limits| {
            limits.excess() == 0 || limits.physical() <= goal
        });
    }

    /// Makes room for `pages` copies that the kernel is going to make of pages that are resident
    /// already, as far as there is memory that can be evicted. The run is charged with the rest too,
    /// so that other processes make room.
    pub(crate) fn make_room_for_copies(&self, areas: &Areas, pages: u64) {
        let limits = Limits::new(self.engine);
        if limits.may_hold(limits.physical()) {
            return;
        }
        let _ = self.reclaim(AreasAccess::Read(areas), 0, pages);
        if !limits.may_hold(limits.physical()) {
            Gauges::new(self.engine).settle_charge();
        }
    }

    /// Makes `pages` full frames free, or brings memory `slack` pages under the target.
    pub(crate) fn reclaim(&self, hold: AreasAccess<'_>, pages: u64, slack: u64) -> ReclaimProgress {
        // A drop frees no frame, but makes room for a fresh one.
        let enough = |limits: Limits<'_>| {
            let has_room = |pages| limits.physical() + pages <= limits.target();
            self.mapper.frames().full_free() >= pages && (slack == 0 || has_room(slack))
                || self.mapper.drops_clean() && has_room(pages + slack)
        };
        self.reclaim_until(hold, pages, slack, enough)
    }

    /// Reclaims until the caller has enough, and notes the time.
    fn reclaim_until(
        &self,
        hold: AreasAccess<'_>,
        pages: u64,
        slack: u64,
        enough: impl Fn(Limits<'_>) -> bool,
    ) -> ReclaimProgress {
        if enough(Limits::new(self.engine)) {
            return ReclaimProgress::Freed;
        }
        let begin = now_ns();
        let progress = self.reclaim_more(hold, pages, slack, enough);
        self.stats.reclaim_time.note(now_ns().saturating_sub(begin));
        progress
    }

    fn reclaim_more(
        &self,
        hold: AreasAccess<'_>,
        pages: u64,
        slack: u64,
        enough: impl Fn(Limits<'_>) -> bool,
    ) -> ReclaimProgress {
        let (limits, saver) = (Limits::new(self.engine), Saver::new(self.engine));
        for round in 0..TRIES + pages as usize {
            if enough(limits) {
                return ReclaimProgress::Freed;
            }
            // Dirty folios can't wait forever: the round must end with a free frame.
            let urgent = round >= TRIES / 2;
            // Gives frames back together, because each call interrupts the program's other CPUs.
            // Copies take more memory until their frames are given back, so these are given back at
            // once.
            let lacking = (limits.physical() + slack).saturating_sub(limits.target());
            let batch = lacking.clamp(1, if self.mapper.has_move() { MAX_PAGES as u64 } else { 1 });
            if slack > 0 && self.mapper.frames().full_free() >= pages + batch {
                self.shrink_frames(slack.max(batch));
                continue;
            }
            let lists = self.table.lists();
            let (ahead, dirty) = (lists.pages(LruList::Ahead), lists.pages(LruList::Dirty));
            if let ReclaimStep::Save { list, compress } =
                eviction::next_step(lists, limits.target(), self.config.block_order, urgent)
            {
                saver.save_next(hold, list, compress);
                continue;
            }
            match hold.with(|areas| self.evict(areas)) {
                ReclaimProgress::Freed => {}
                ReclaimProgress::Nothing
                    if slack > 0 && self.mapper.frames().full_free() > pages =>
                {
                    self.shrink_frames(slack);
                }
                ReclaimProgress::Nothing if dirty > 0 => {
                    saver.save_next(hold, LruList::Dirty, true);
                }
                ReclaimProgress::Nothing if ahead > 0 => {
                    saver.save_next(hold, LruList::Ahead, false);
                }
                ReclaimProgress::Nothing if Writeback::new(self.engine).await_write() => {}
                other => return other,
            }
        }
        if enough(limits) { ReclaimProgress::Freed } else { ReclaimProgress::Nothing }
    }

    /// Gives free full frames back to the kernel.
    fn shrink_frames(&self, pages: u64) {
        if self.mapper.drops_clean() {
            self.mapper.trim_now(pages);
        } else {
            self.mapper.trim(pages);
        }
    }

    /// Returns whether folios remain that were not refused.
    fn may_evict(&self) -> bool {
        use LruList::{Active, Ahead, Cooling, Dirty, Held, Inactive};
        [Inactive, Active, Held, Cooling, Ahead, Dirty]
            .iter()
            .any(|list| self.table.lists().pages(*list) > 0)
            || !self.to_unshare.stays() && self.table.lists().pages(LruList::Shared) > 0
    }

    /// Maps the oldest evictable folio out into the swap cache. If it is clean, many clean folios
    /// are dropped at once, and dirty ones between them are mapped out.
    pub(crate) fn evict(&self, areas: &Areas) -> ReclaimProgress {
        if self.budget.is_frozen() || self.holds.stops_eviction() {
            return ReclaimProgress::Nothing;
        }
        let (mut batch, mut moved, mut last) = (DropBatch::new(), 0, ReclaimProgress::Nothing);
        let most = Limits::new(self.engine).leaving_order();
        for _ in 0..EVICT_TRIES + SPANS_MAX {
            let Some((id, key)) = Residency::new(self.engine).isolate_mapped() else { break };
            let before = batch.count();
            last = self.evict_isolated(areas, id, key, most, &mut batch);
            moved += (last == ReclaimProgress::Freed && batch.count() == before) as usize;
            if last == ReclaimProgress::Again
                || eviction::is_enough(moved, batch.count(), self.is_full(&batch))
            {
                break;
            }
        }
        if self.drop_batch(&mut batch) > 0 || moved > 0 { ReclaimProgress::Freed } else { last }
    }

    /// Maps one isolated folio out, or its first part if it is of an order above `most`. Or takes
    /// it into a batch that isn't full, to be dropped. Returns `Nothing` if it can't be evicted
    /// now, or has ended.
    pub(crate) fn evict_isolated(
        &self,
        areas: &Areas,
        id: FolioId,
        key: u64,
        most: Order,
        batch: &mut DropBatch,
    ) -> ReclaimProgress {
        let mut guard = self.table.lock(key);
        if !self.table.is_still(&guard, id, key) || !self.may_leave(areas, &guard, id) {
            return ReclaimProgress::Nothing;
        }
        let area = areas.find_key(key).expect("a folio lies in an area");
        if self.prepare_eviction(areas, &guard, id, batch) {
            return ReclaimProgress::Freed;
        }
        if self.table.get(&guard, id).state.get() == FolioState::Partial {
            guard = Residency::new(self.engine).load_rest(areas, area, guard, id);
            if !self.table.is_still(&guard, id, key)
                || self.table.get(&guard, id).state.get() != FolioState::Resident
            {
                return ReclaimProgress::Nothing;
            }
        }
        let (id, key) =
            BlockSize::new(self.engine).join_block(areas, &mut guard, id).unwrap_or((id, key));
        HugePages::new(self.engine).mark(&guard, id, area.addr_of(key));
        let id = self.split_leaving(&mut guard, id, key, most);
        match self.frame_for_leaving(&mut guard, id, key) {
            Some((id, frame)) => self.map_out(area, &mut guard, id, frame),
            None => ReclaimProgress::Nothing,
        }
    }

    /// Returns whether an isolated folio may be evicted: it is in memory, and not pinned. Otherwise
    /// lists it again.
    fn may_leave(&self, areas: &Areas, guard: &ShardGuard<'_>, id: FolioId) -> bool {
        let folio = self.table.get(guard, id);
        if folio.refused.get() == LruList::Shared {
            // It may be private by now. The kernel tells.
            folio.refused.set(LruList::None);
        }
        let in_memory = matches!(folio.state.get(), FolioState::Resident | FolioState::Partial);
        if in_memory && !areas.is_pinned(folio.key(), folio.end()) {
            return true;
        }
        folio.active.set(folio.active.get() | in_memory);
        self.table.lists().detach(id);
        self.table.list_by_state(guard, id);
        false
    }

    /// Returns the kind of the frames that folios are moved out to.
    fn leaving_kind(&self) -> FrameKind {
        if self.mapper.has_move() { FrameKind::Empty } else { FrameKind::Full }
    }

    /// Takes a frame that an isolated `Resident` folio can be moved out to. The folio is halved
    /// until there is one of its order. Returns the folio of `key`, which is on no list then, and the
    /// frame. Without a frame the folio is listed again.
    fn frame_for_leaving(
        &self,
        guard: &mut ShardGuard<'_>,
        mut id: FolioId,
        key: u64,
    ) -> Option<(FolioId, Frame)> {
        let kind = self.leaving_kind();
        let frame = loop {
            let order = self.table.get(guard, id).order();
            if let Some(frame) = self.mapper.frames().take(order, kind) {
                break frame;
            }
            if kind == FrameKind::Full
                && let Ok(Some(frame)) = self.mapper.populated(order)
            {
                break frame;
            }
            self.table.lists().detach(id);
            if order == Order::PAGE {
                self.table.list_by_state(guard, id);
                return None;
            }
            stats::add(&self.stats.swpout_fallback[order.get() as usize], 1);
            let half = order.smaller().expect("above order 0");
            id = self.table.carve(guard, id, key, half, self.backing);
            self.table.list_by_state(guard, id);
        };
        self.table.lists().detach(id);
        Some((id, frame))
    }

    /// Maps a `Resident` folio, which is on no list, out to a frame, unless a call holds it. Notes
    /// the pages that the kernel refuses because a fork shares them.
    fn map_out(
        &self,
        area: &Area,
        guard: &mut ShardGuard<'_>,
        id: FolioId,
        frame: Frame,
    ) -> ReclaimProgress {
        let folio = self.table.get(guard, id);
        let (order, home) = (folio.order(), area.addr_of(folio.key()));
        let end = home + order.bytes();
        let leaving = self.holds.mark_leaving(once(home..end));
        if !leaving.may_evict(home..end) {
            self.mapper.frames().give(frame, order, self.leaving_kind());
            self.keep_held_block(guard, id, home, &leaving);
            return ReclaimProgress::Nothing;
        }
        let departure = Residency::new(self.engine).map_out(guard, home, id, frame);
        drop(leaving);
        match departure.stop {
            None => ReclaimProgress::Freed,
            Some(MapStop::Again) => ReclaimProgress::Again,
            Some(_) => {
                if !self.to_unshare.stays() {
                    let bounds = area.addr_of(area.key)..area.addr_of(area.key_end());
                    self.to_unshare.note(home + bytes(departure.pages)..end, bounds);
                    self.requests.reclaim();
                }
                if departure.pages > 0 { ReclaimProgress::Freed } else { ReclaimProgress::Nothing }
            }
        }
    }

    /// Keeps a `Resident` folio that may not be evicted, and is on no list. If a call
    /// holds a part of it, only the first held block becomes active. The rest of a larger folio is
    /// split off and evicted next: otherwise a call with a buffer in every folio would keep all
    /// memory.
    fn keep_held_block(
        &self,
        guard: &mut ShardGuard<'_>,
        id: FolioId,
        home: usize,
        leaving: &LeavingPages<'_>,
    ) {
        let folio = self.table.get(guard, id);
        let (key, end) = (folio.key(), folio.end());
        let mut isolated = None;
        leaving.each_held(home..home + bytes(folio.pages() as usize), |part| {
            isolated = Some(isolated.map_or(part.start, |first: usize| first.min(part.start)));
        });
        let order = match isolated {
            Some(_) => folio.order().min(self.config.block_order),
            // Evictions are stopped.
            None => folio.order(),
        };
        let page = key + isolated.map_or(0, |at| (at - home) / PAGE_SIZE) as u64;
        let id = self.table.carve(guard, id, page, order, self.backing);
        let start = home + bytes((self.table.get(guard, id).key() - key) as usize);
        self.list_held(guard, id, || leaving.is_held(start..start + order.bytes()));
        self.evict_next(guard, key..end);
    }

    /// Lists a mapped folio that could not be evicted, and is on no list: until a hold ends, if a
    /// call holds a part of it.
    pub(crate) fn list_held(
        &self,
        guard: &ShardGuard<'_>,
        id: FolioId,
        is_held: impl FnOnce() -> bool,
    ) {
        let folio = self.table.get(guard, id);
        folio.active.set(true);
        if folio.refused.get() == LruList::None {
            self.table.lists().push(id, folio.key(), folio.order().get(), LruList::Held);
            self.holds.await_ending();
            // A hold that ends from now on is noticed.
            if is_held() {
                return;
            }
        }
        self.table.list_by_state(guard, id);
    }

    /// Splits an isolated folio that is too large to be evicted at once, and returns its first
    /// part. The others are evicted next.
    fn split_leaving(
        &self,
        guard: &mut ShardGuard<'_>,
        id: FolioId,
        key: u64,
        most: Order,
    ) -> FolioId {
        let end = self.table.get(guard, id).end();
        if self.table.get(guard, id).order() <= most {
            return id;
        }
        self.table.lists().detach(id);
        let id = self.table.carve(guard, id, key, most, self.backing);
        self.evict_next(guard, key + most.pages() as u64..end);
        id
    }

    /// Puts the pieces that cover `keys` where they are evicted next, the first piece first, unless
    /// they are active, or isolated by another thread.
    fn evict_next(&self, guard: &ShardGuard<'_>, keys: Range<u64>) {
        let mut at = keys.end;
        while at > keys.start {
            let piece = self.table.find(guard, at - 1).expect("pieces cover what the folio did");
            let folio = self.table.get(guard, piece);
            at = folio.key();
            if self.table.lists().is_on(piece, LruList::None) {
                self.table.list_by_state(guard, piece);
            }
            if self.table.lists().is_on(piece, LruList::Inactive) {
                self.table.lists().push_tail(piece, at, folio.order().get(), LruList::Inactive);
            }
        }
    }
}
