//! The reclaim path: target -> isolate -> map out into the swap cache -> save -> frame free again.
pub(crate) mod block_size;
pub(crate) mod drop;
pub(crate) mod writeback;
pub(crate) mod save;
pub(crate) mod recompress;

use crate::area::Areas;
use crate::area::lock::Hold;
use crate::config::{OnFull, Size};
use crate::folio::State;
use crate::folio::frames::{Frame, Kind};
use crate::folio::index::{FolioId, ShardGuard};
use crate::folio::lru::List;
use crate::pager::map::Stop;
use crate::pager::{Pager, bytes};
use crate::reclaim::drop::Batch;
use crate::stats;
use core::iter::once;
use memfold_store::looks_dense;
use memfold_swap::Swap;
use memfold_sys::Errno;
use memfold_sys::memory::zone::{NoPromise, counts_reservations};
use memfold_sys::raw::read_if_there;
use memfold_sys::sync::atomic::Ordering::Relaxed;
use memfold_sys::uffd::drop::SPANS_MAX;
use memfold_sys::units::{MAX_PAGES, Order, PAGE_SHIFT, PAGE_SIZE};

/// Why there is no frame at all.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum NoFrame {
    /// The kernel wants an event read first.
    Again,
}

/// What a round of reclaim brought.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// Free full frames, or memory given up.
    Freed,
    /// Nothing is left that could be folded.
    Nothing,
    /// The kernel wants an event read first.
    Again,
}

/// Folios tried in one round before it is given up.
const TRIES: usize = 256;
/// Rounds for one frame. Others may take what a round has freed, so a few don't mean that nothing
/// can be freed.
const ATTEMPTS: usize = 64;
/// Folios that can't leave before an eviction is given up: a fault waits meanwhile.
const EVICT_TRIES: usize = 64;
/// Folios that are moved out beside those that are dropped together.
const MOVES_MAX: usize = 16;
/// How long a fault waits for pages that a fork shares, at most [`ATTEMPTS`] times.
const SHARED_WAIT_NS: u64 = 250_000;
/// Frames that dirty folios may hold while background threads compress them: one part in this many
/// of the target.
const DIRTY_SHARE: u64 = 8;
/// Faults work off what is past the target by more than one part in this many of it. Each gains so
/// many times what it takes, but folds no more than [`WORK_OFF_MOST`] times as much for that.
const EXCESS_SHARE: u64 = 128;
const WORK_OFF_TIMES: u64 = 2;
const WORK_OFF_MOST: u64 = 32;
/// What was read ahead and not used yet may hold one part in this many of the target: four of the
/// largest windows.
const AHEAD_SHARE: u64 = 8;

impl Pager {
    /// A full frame. `None` for an order above the block's: a run of that size can't be had, ask
    /// for less. At or below the block's order there always is one: by reclaim, or past the limit
    /// as `--on-full` says.
    pub(crate) fn frame_for(&self, areas: &Areas, order: Order) -> Result<Option<Frame>, NoFrame> {
        let pages = order.pages() as u64;
        let large = order > self.config.block_order;
        stats::add(&self.stats.frame_alloc, large as u64);
        let copies = if self.has_move { 0 } else { pages };
        if self.physical() > self.target() || self.is_retry_due() {
            self.queue.reclaim();
        }
        self.work_off_excess(areas, pages);
        let met = self.to_unshare.met();
        for _ in 0..ATTEMPTS {
            // A move takes as much memory away from the frames as it maps; only copies need room of
            // their own.
            let room = copies == 0 || self.physical() + copies <= self.target();
            if room && let Some(frame) = self.frames.take(order, Kind::Full) {
                return Ok(Some(frame));
            }
            // Read once: other threads take and give memory meanwhile.
            let held = self.physical() + pages + copies;
            if self.may_hold(held) {
                if held > self.bound_or_floor() && self.refused() > 0 {
                    self.past_the_limit();
                }
                if let Some(frame) = self.populated(order)? {
                    return Ok(Some(frame));
                }
            } else if room && self.frames.full_free() >= pages {
                match self.gather(order) {
                    Ok(Some(frame)) => return Ok(Some(frame)),
                    Err(Errno::AGAIN) => return Err(NoFrame::Again),
                    _ if large => return Ok(None),
                    // Single pages that can't be moved together: given back, they make room for a
                    // fresh run.
                    _ if self.frames.trim_now(&*self.space, pages) > 0 => continue,
                    _ => {}
                }
            }
            stats::add(&self.stats.direct_reclaims, 1);
            match self.reclaim(Hold::Read(areas), pages, copies) {
                Progress::Freed => {}
                Progress::Again => return Err(NoFrame::Again),
                // What the two processes share can't leave until a background thread has made it
                // private: worth a moment's wait, but not more, as that thread may itself be
                // waiting for a fault to be served.
                Progress::Nothing
                    if !large
                        && self.to_unshare.met() != met
                        && self.to_unshare.has_forked_lately() =>
                {
                    self.queue.reclaim();
                    memfold_sys::thread::sleep_ns(SHARED_WAIT_NS);
                }
                // What is left may still leave: the program is not ended before all was tried.
                Progress::Nothing if self.config.on_full == OnFull::Stop && self.may_evict() => {}
                Progress::Nothing => break,
            }
        }
        if let Some(frame) = self.frames.take(order, Kind::Full) {
            return Ok(Some(frame));
        }
        if large {
            return Ok(None);
        }
        match self.populated(order)? {
            Some(frame) => {
                self.past_the_limit();
                Ok(Some(frame))
            }
            None if counts_reservations() => NoPromise::end("memory for pages"),
            None => panic!(
                "memfold: no frame of order {} in {} of frames",
                order.get(),
                Size(self.frames.zone().len() as u64)
            ),
        }
    }

    /// Brings memory down where it is far past the target: by more than the `pages` that the caller
    /// is about to take, as what is stored for them lowers the target. A program that faults faster
    /// than background threads reclaim would grow past the limit otherwise.
    fn work_off_excess(&self, areas: &Areas, pages: u64) {
        if self.excess() <= self.target() / EXCESS_SHARE {
            return;
        }
        // To gain one page, so many must be folded: each takes its part of the pool.
        let stored = (self.tally.folded() + self.tally.clean()) << PAGE_SHIFT;
        let saved = stored.saturating_sub(self.counted_pool_bytes()).max(1);
        let times = (WORK_OFF_TIMES * stored / saved).clamp(WORK_OFF_TIMES, WORK_OFF_MOST);
        let goal = self.physical().saturating_sub(times * pages);
        self.reclaim_until(Hold::Read(areas), 0, 1, |p| p.excess() == 0 || p.physical() <= goal);
    }

    /// As [`crate::frames::Frames::gather`]; without UFFDIO_MOVE there is nothing to gather with.
    pub(crate) fn gather(&self, order: Order) -> Result<Option<Frame>, Errno> {
        if self.has_move { self.frames.gather(&*self.space, order) } else { Ok(None) }
    }

    fn populated(&self, order: Order) -> Result<Option<Frame>, NoFrame> {
        let Some(frame) = self.frames.take(order, Kind::Empty) else { return Ok(None) };
        match self.frames.populate(&*self.space, frame, order) {
            Ok(()) => Ok(Some(frame)),
            Err(_) => Err(NoFrame::Again),
        }
    }

    /// Makes `pages` full frames free, or brings memory `slack` pages under the target.
    pub(crate) fn reclaim(&self, hold: Hold<'_>, pages: u64, slack: u64) -> Progress {
        // What is dropped leaves no frame, but room for a fresh one.
        let enough = |p: &Pager| {
            let has_room = |pages| p.physical() + pages <= p.target();
            p.frames.full_free() >= pages && (slack == 0 || has_room(slack))
                || p.drops_clean && has_room(pages + slack)
        };
        self.reclaim_until(hold, pages, slack, enough)
    }

    /// [`Pager::reclaim`] until the caller has enough.
    fn reclaim_until(
        &self,
        hold: Hold<'_>,
        pages: u64,
        slack: u64,
        enough: impl Fn(&Pager) -> bool,
    ) -> Progress {
        for tried in 0..TRIES + pages as usize {
            if enough(self) {
                return Progress::Freed;
            }
            // Small dirty folios are not left to the background for ever: the round must end with a
            // free frame.
            let urgent = tried >= TRIES / 2;
            // Together, as each call interrupts the program's other CPUs. What is copied out takes
            // more memory until its frames are given back, so they are at once.
            let lacking = (self.physical() + slack).saturating_sub(self.target());
            let batch = lacking.clamp(1, if self.has_move { MAX_PAGES as u64 } else { 1 });
            if slack > 0 && self.frames.full_free() >= pages + batch {
                self.shrink_frames(slack.max(batch));
                continue;
            }
            // What was read ahead is about to be used: it goes last, but for what nobody came for.
            let ahead = self.lru.pages(List::Ahead);
            if ahead > self.target() / AHEAD_SHARE || ahead > 0 && urgent {
                self.save_next(hold, List::Ahead, false);
                continue;
            }
            let dirty = self.lru.pages(List::Dirty);
            if self.lru.pages(List::Cooling) > 0 {
                let compress = urgent || dirty > self.target() / DIRTY_SHARE;
                self.save_next(hold, List::Cooling, compress);
                continue;
            }
            if dirty > 0 && (urgent || dirty > self.target() / DIRTY_SHARE) {
                self.save_next(hold, List::Dirty, true);
                continue;
            }
            match hold.with(|areas| self.evict(areas)) {
                Progress::Freed => {}
                Progress::Nothing if slack > 0 && self.frames.full_free() > pages => {
                    self.shrink_frames(slack);
                }
                Progress::Nothing if dirty > 0 => {
                    self.save_next(hold, List::Dirty, true);
                }
                Progress::Nothing if ahead > 0 => {
                    self.save_next(hold, List::Ahead, false);
                }
                Progress::Nothing if self.await_write() => {}
                other => return other,
            }
        }
        if enough(self) { Progress::Freed } else { Progress::Nothing }
    }

    /// Gives free full frames back to the kernel.
    fn shrink_frames(&self, pages: u64) {
        if self.drops_clean {
            self.frames.trim_now(&*self.space, pages);
        } else {
            self.frames.trim(&*self.space, pages);
        }
    }

    /// Whether folios are left that were not refused.
    fn may_evict(&self) -> bool {
        [List::Inactive, List::Active, List::Cooling, List::Ahead, List::Dirty]
            .iter()
            .any(|list| self.lru.pages(*list) > 0)
    }

    /// Maps the oldest evictable folio out into the swap cache. Of the clean ones, many are dropped
    /// at once, and what is met between them is mapped out.
    pub(crate) fn evict(&self, areas: &Areas) -> Progress {
        if self.frozen.load(Relaxed) {
            return Progress::Nothing;
        }
        let (mut batch, mut moved, mut last) = (Batch::new(), 0, Progress::Nothing);
        let most = self.leaving_order();
        for _ in 0..EVICT_TRIES + SPANS_MAX {
            let Some((id, key)) = self.isolate_mapped() else { break };
            let before = batch.count();
            last = self.evict_isolated(areas, id, key, most, &mut batch);
            moved += (last == Progress::Freed && batch.count() == before) as usize;
            if last == Progress::Again
                || moved > 0 && (batch.count() == 0 || moved == MOVES_MAX)
                || batch.count() > 0 && self.is_full(&batch)
            {
                break;
            }
        }
        if self.drop_batch(&mut batch) > 0 || moved > 0 { Progress::Freed } else { last }
    }

    /// Maps one isolated folio out, or its first part where it is of an order above `most`; or takes it
    /// into a batch, which isn't full, to be dropped.
    /// `Nothing`: it can't leave now, or died.
    pub(crate) fn evict_isolated(
        &self,
        areas: &Areas,
        id: FolioId,
        key: u64,
        most: Order,
        batch: &mut Batch,
    ) -> Progress {
        let mut guard = self.shards.lock(key);
        if !self.is_still(&guard, id, key) {
            return Progress::Nothing;
        }
        let folio = self.folios.get(&guard, id);
        let area = areas.find_key(key).expect("a folio lies in an area");
        let in_memory = matches!(folio.state.get(), State::Resident | State::Partial);
        if !in_memory || areas.is_pinned(key, key + folio.pages()) {
            folio.active.set(folio.active.get() | in_memory);
            self.lru.detach(id);
            self.list_by_state(&guard, id);
            return Progress::Nothing;
        }
        if self.may_leave(areas, &guard, id, batch) {
            return Progress::Freed;
        }
        if folio.state.get() == State::Partial {
            guard = self.complete(areas, area, guard, id);
            if !self.is_still(&guard, id, key)
                || self.folios.get(&guard, id).state.get() != State::Resident
            {
                return Progress::Nothing;
            }
        }
        let kind = if self.has_move { Kind::Empty } else { Kind::Full };
        let (id, key) = self.join_block(areas, &mut guard, id).unwrap_or((id, key));
        let mut id = self.split_leaving(&mut guard, id, key, most);
        let frame = loop {
            let order = self.folios.get(&guard, id).order();
            if let Some(frame) = self.frames.take(order, kind) {
                break frame;
            }
            if kind == Kind::Full
                && let Ok(Some(frame)) = self.populated(order)
            {
                break frame;
            }
            if order == Order::PAGE {
                self.lru.detach(id);
                self.list_by_state(&guard, id);
                return Progress::Nothing;
            }
            stats::add(&self.stats.swpout_fallback[order.get() as usize], 1);
            self.lru.detach(id);
            let half = order.smaller().expect("above order 0");
            id = self.carve(&mut guard, id, key, half);
            self.list_by_state(&guard, id);
        };
        self.lru.detach(id);
        let home = area.addr_of(key);
        let (order, pages) = {
            let folio = self.folios.get(&guard, id);
            (folio.order(), folio.order().pages())
        };
        let leaving = self.holds.leave(once(home..home + bytes(pages)));
        if !leaving.may_evict(home..home + bytes(pages)) {
            self.frames.give(frame, order, kind);
            self.folios.get(&guard, id).active.set(true);
            self.list_by_state(&guard, id);
            return Progress::Nothing;
        }
        let done = self.map_out(&mut guard, home, id, frame);
        drop(leaving);
        match done.stop {
            None => Progress::Freed,
            Some(Stop::Again) => Progress::Again,
            Some(_) => {
                if !self.to_unshare.is_shared_by_many() {
                    let (start, end) = (area.addr_of(area.key), area.addr_of(area.key_end()));
                    self.to_unshare.note(home + bytes(done.pages)..home + bytes(pages), start..end);
                    self.queue.reclaim();
                }
                if done.pages > 0 { Progress::Freed } else { Progress::Nothing }
            }
        }
    }

    /// Splits an isolated folio that is too large to leave at once; returns its first part. The
    /// others leave next.
    fn split_leaving(
        &self,
        guard: &mut ShardGuard<'_>,
        id: FolioId,
        key: u64,
        most: Order,
    ) -> FolioId {
        let end = self.folios.get(guard, id).end();
        if self.folios.get(guard, id).order() <= most {
            return id;
        }
        self.lru.detach(id);
        let id = self.carve(guard, id, key, most);
        let mut at = end;
        while at > key + most.pages() as u64 {
            let part =
                self.index.find(guard, at - 1).expect("a split folio covers what it covered");
            let folio = self.folios.get(guard, part);
            at = folio.key();
            if self.lru.is_on(part, List::Inactive) {
                self.lru.push_tail(part, at, folio.order().get(), List::Inactive);
            }
        }
        id
    }

    /// One background round: saves a dirty folio, or gives back memory past the target. Returns
    /// whether more may be due.
    pub fn reclaim_in_background(&self) -> bool {
        self.unshare();
        let saved = self.save_next(Hold::Work(&self.areas.work()), List::Dirty, true);
        let over = self.excess();
        // Where the bounds can't be kept, or folding saves nothing, a denser pool is worth the time.
        let dense = if self.is_at_least() || self.stored_takes_more() {
            self.store.tidy() + self.store.trim()
        } else {
            0
        };
        if over > 0 && self.trim(over) == 0 {
            let (frames, slack) = if self.drops_clean { (0, 1) } else { (over.min(512), 0) };
            let progress = self.reclaim(Hold::Work(&self.areas.work()), frames, slack);
            if self.drops_clean {
                return progress == Progress::Freed || saved;
            }
            return (progress == Progress::Freed && self.trim(over) > 0) || saved;
        }
        if over == 0 && self.is_retry_due() {
            return self.evict(&self.areas.read()) == Progress::Freed || saved;
        }
        // With nothing else to do, one step of compaction at a time: whoever needs a window gets it
        // in between.
        let tidied = if over == 0 && !saved && dense == 0 { self.store.tidy() } else { dense };
        stats::add(&self.stats.compacted_bytes, tidied);
        self.publish();
        over > 0 || saved || tidied > 0
    }

    /// Makes private what could not leave because a fork shares it. What is missing by now is folded,
    /// or was never there: it must not be brought here for this. A range that has gone, or that a
    /// device has pinned, stays as it is.
    fn unshare(&self) {
        for page in self.to_unshare.take() {
            if self.is_signal() {
                self.unshare_managed(page);
            } else if self.space.is_populated(page) {
                // With no lock held: if the page goes missing now, this waits for a handler.
                let _ = self.space.unshare(page, PAGE_SIZE);
            }
        }
    }

    /// Nobody waits for a fault here. The shard is locked lest the page be folded meanwhile: while
    /// mremap moves it, it isn't registered, and zeros would come in its place. What no store would
    /// take stays shared.
    fn unshare_managed(&self, page: usize) {
        let areas = self.areas.read();
        let Some(area) = areas.find(page) else { return };
        let key = area.key_of(page);
        let mut guard = self.shards.lock(key);
        let found = self.index.find(&guard, key);
        let Some(id) = found.filter(|id| self.folios.get(&guard, *id).is_here(key)) else { return };
        if !self.space.is_populated(page) {
            return;
        }
        if self.is_private_in_vain(page) {
            let order = self.folios.get(&guard, id).order().min(self.config.block_order);
            let id = self.carve(&mut guard, id, key, order);
            self.folios.get(&guard, id).refused.set(List::Shared);
            self.list_by_state(&guard, id);
            self.note_refusal();
        } else {
            let _ = self.space.unshare(page, PAGE_SIZE);
        }
    }

    /// Whether a page that is there, shared by a fork, would be refused once it was private: a copy
    /// of it would have been made for nothing, in each of the processes that share it.
    fn is_private_in_vain(&self, page: usize) -> bool {
        if !self.store.refuses_incompressible()
            || self.swap.as_ref().is_some_and(Swap::accepts_writes)
        {
            return false;
        }
        let mut bytes = [0; PAGE_SIZE];
        // SAFETY: `bytes` is as long, and this function's own.
        let read = unsafe { read_if_there(page, bytes.as_mut_ptr(), PAGE_SIZE) };
        read == Ok(PAGE_SIZE) && looks_dense(&bytes)
    }

    /// Gives free frames back to the kernel. `areas` must not be locked: where discards are
    /// reported, this waits until a handler has read the report, and that handler may be waiting to
    /// apply another one.
    fn trim(&self, pages: u64) -> u64 {
        self.frames.trim(&*self.space, pages)
    }
}
