//! Map in, map out: a folio's pages between its frame and its home in the program's page table.
//!
//! Both do as much as the kernel lets them and say how far they got; what they did not do is as it
//! was. They are called under the shard lock, so nobody else moves these pages; the program may
//! touch, discard or unmap them at any time.
use crate::folio::State;
use crate::folio::frames::{Frame, Kind};
use crate::folio::index::{FolioId, ShardGuard};
use crate::folio::lru::List;
use crate::pager::Pager;
use crate::policy::workingset;
use crate::stats;
use memfold_store::BlockSet;
use memfold_swap::Swap;
use memfold_sys::Errno;
use memfold_sys::sync::atomic::Ordering::Relaxed;
use memfold_sys::uffd::Partial;
use memfold_sys::units::{Order, PAGE_SHIFT, PAGE_SIZE};

/// Why a mapping stopped before the end of the folio.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// The kernel refuses for the moment.
    Again,
    /// A page can't leave: shared by fork, pinned, or its area isn't writable any more.
    Busy,
    /// Nothing is mapped at the home any more.
    Gone,
}

/// What a mapping did.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) struct Done {
    /// Pages from the start of the folio that are where they should be.
    pub pages: usize,
    /// Why not all.
    pub stop: Option<Stop>,
}

/// Clean copies may hold one part in this many of `--limit`.
const CLEAN_SHARE: u128 = 8;
/// Where the limit can't be kept, they may hold one part in this many of what is folded.
const LEAST_CLEAN_SHARE: u128 = 64;

/// Dirty single pages for which a background thread is woken, and that as one part in so many of
/// the memory there is.
const DIRTY_BATCH: u64 = 64;
const WAIT_SHARE: u64 = 64;

/// How much to ask for at once. ENOENT means that a page is missing, or, as EINVAL does, that the
/// range reaches across the border of two of the kernel's areas, which no call fills or moves at once;
/// only for a single page does it mean more.
pub(super) struct Span(usize);

impl Span {
    pub(super) fn new(len: usize) -> Span {
        Span(len)
    }

    pub(super) fn limit(&self, left: usize) -> usize {
        self.0.min(left)
    }

    /// Asks for less; `false` if `asked` was a single page.
    pub(super) fn narrow(&mut self, asked: usize) -> bool {
        self.0 = (asked / 2).next_multiple_of(PAGE_SIZE).max(PAGE_SIZE);
        asked > PAGE_SIZE
    }

    pub(super) fn widen(&mut self) {
        self.0 = self.0.saturating_mul(2);
    }
}

impl Pager {
    /// Maps a frame's pages at `home` and gives the frame back, as far as it got. Wakes whoever
    /// waits for them.
    fn carry_in(&self, home: usize, frame: Frame, order: Order) -> Done {
        let (from, len) = (self.frames.addr(frame), order.bytes());
        if self.has_move {
            // SAFETY: the folio's shard is locked and its frame holds its bytes; `home` is its own
            // range.
            match unsafe { self.space.move_pages(home, from, len, true) } {
                Ok(()) => {
                    self.tally.map(order.pages() as u64);
                    self.frames.count_moved(-(order.pages() as i64));
                    self.frames.give(frame, order, Kind::Empty);
                    return Done { pages: order.pages(), stop: None };
                }
                Err(partial) => return self.carry_in_slowly(home, frame, order, partial.done),
            }
        }
        self.carry_in_slowly(home, frame, order, 0)
    }

    /// The rest of [`Pager::carry_in`] after `done` bytes were moved: page runs one error at a
    /// time.
    fn carry_in_slowly(&self, home: usize, frame: Frame, order: Order, mut done: usize) -> Done {
        let (from, len) = (self.frames.addr(frame), order.bytes());
        let mut kept = BlockSet::EMPTY;
        let mut by_copy = !self.has_move;
        let mut moved = done >> PAGE_SHIFT;
        let mut mapped = moved;
        let mut stop = None;
        if done > 0 {
            stats::add(&self.stats.move_partial, 1);
        }
        let mut span = Span::new(len);
        while done < len && stop.is_none() {
            let (at, src, most) = (home + done, from + done, span.limit(len - done));
            let result = self.install(at, src, most, by_copy);
            let step = result.map_or_else(|p| p.done, |()| most) >> PAGE_SHIFT;
            if step > 0 {
                span.widen();
                mapped += step;
                let first = done >> PAGE_SHIFT;
                if by_copy {
                    (first..first + step).for_each(|page| kept.insert(page));
                } else {
                    moved += step;
                }
                done += step << PAGE_SHIFT;
                continue;
            }
            match result.map_or_else(|p| p.errno, |()| Errno::AGAIN) {
                _ if !by_copy && !self.space.is_populated(from + done) => {
                    // It was moved and not counted: see `carry_out`. The kernel has woken nobody
                    // for that page.
                    self.space.wake(home + done, PAGE_SIZE);
                    (moved, mapped, done) = (moved + 1, mapped + 1, done + PAGE_SIZE);
                }
                Errno::EXIST => {
                    // A page that is there is newer than ours: it was there before the area was
                    // managed, or somebody has filled a hole. It counts as mapped.
                    stats::add(&self.stats.move_exists, 1);
                    kept.insert(done >> PAGE_SHIFT);
                    mapped += 1;
                    done += PAGE_SIZE;
                }
                Errno::AGAIN | Errno::NOMEM => stop = Some(Stop::Again),
                Errno::NOENT | Errno::INVAL if span.narrow(most) => {}
                // The frame is pinned for a moment, or the home isn't writable: copying works all
                // the same.
                Errno::BUSY | Errno::INVAL if !by_copy => by_copy = true,
                _ => stop = Some(Stop::Gone),
            }
        }
        let pages = done >> PAGE_SHIFT;
        self.tally.map(mapped as u64);
        self.frames.count_moved(-(moved as i64));
        if stop.is_none() && moved == 0 {
            self.frames.give(frame, order, Kind::Full);
        } else {
            for page in 0..pages {
                let kind = if kept.contains(page) { Kind::Full } else { Kind::Empty };
                self.frames.give(frame + page as u32, Order::PAGE, kind);
            }
        }
        Done { pages, stop }
    }

    fn install(&self, home: usize, from: usize, len: usize, by_copy: bool) -> Result<(), Partial> {
        // SAFETY: the folio's shard is locked, its frame at `from` holds its bytes, and `home` is
        // its own range.
        let result = unsafe {
            if by_copy {
                stats::add(&self.stats.copies, 1);
                self.space.copy(home, from as *const u8, len, true)
            } else {
                self.space.move_pages(home, from, len, true)
            }
        };
        if let Err(partial) = result {
            let counter = match partial.errno {
                Errno::AGAIN if partial.done > 0 => &self.stats.move_partial,
                Errno::AGAIN => &self.stats.move_again,
                Errno::BUSY => &self.stats.move_busy,
                _ => return result,
            };
            stats::add(counter, 1);
        }
        result
    }

    /// Maps a folio that is in the swap cache (`Cached`, or its caller's `Loading` or `Saving`): it
    /// becomes `Resident`. If the kernel stops half-way, the folio is split: what is mapped is
    /// `Resident`, the rest `Cached`.
    pub(crate) fn map_in(&self, guard: &mut ShardGuard<'_>, home: usize, id: FolioId) -> Done {
        let folio = self.folios.get(guard, id);
        let (frame, order) = (folio.frame.get(), folio.order());
        folio.wanted.store(false, Relaxed);
        folio.state.set(State::Cached);
        folio.writing.set(0);
        let done = self.carry_in(home, frame, order);
        if done.stop.is_none() {
            folio.state.set(State::Resident);
            folio.untouched.set(false);
            self.list_by_state(guard, id);
            self.keep_clean_budget(guard, id);
        } else {
            self.lru.detach(id);
            self.split_at(guard, id, done.pages);
            self.settle_pieces(guard, id, done.pages, order, State::Resident, State::Cached);
            // Others may wait in the kernel for this folio: they fault again.
            self.space.wake(home, order.bytes());
        }
        self.shards.notify(guard);
        done
    }

    /// After a split at page `at`: pieces before it become `before`, the others `after`, each on
    /// its list.
    fn settle_pieces(
        &self,
        guard: &ShardGuard<'_>,
        id: FolioId,
        at: usize,
        order: Order,
        before: State,
        after: State,
    ) {
        let start = self.folios.get(guard, id).key();
        let mut key = start;
        while key < start + order.pages() as u64 {
            let piece = self.index.find(guard, key).expect("a split folio covers what it covered");
            let folio = self.folios.get(guard, piece);
            folio.state.set(if key < start + at as u64 { before } else { after });
            folio.untouched.set(folio.untouched.get() && folio.state.get() == State::Cached);
            if folio.state.get() != State::Resident {
                folio.refused.set(List::None);
            }
            key += folio.pages();
            self.list_by_state(guard, piece);
        }
    }

    /// Drops the stored copy of a folio that was just mapped if clean copies take more than their
    /// budget: a share of resident memory, and under `--limit` an eighth of it, unless many share
    /// the copies too, which would go on holding them; or if all that is stored takes more than what
    /// is folded would; or if folding costs more than it saves ([`Pager::kept_bytes`]); or if it takes
    /// room in a swap file that is half full.
    pub(crate) fn keep_clean_budget(&self, guard: &ShardGuard<'_>, id: FolioId) {
        let (clean, folded) = (self.tally.clean(), self.tally.folded());
        let budget = self.target() * self.config.clean_percent as u64 / 100;
        // What clean copies hold of the pool, as if they compressed like the rest.
        let held =
            self.store.pool_bytes() as u128 * clean as u128 / (clean + folded).max(1) as u128;
        let folio = self.folios.get(guard, id);
        let is_crowded = folio.has_copy.get() && self.swap.as_ref().is_some_and(Swap::is_half_full);
        let crowded = is_crowded && self.folios.handles(folio).any(|h| h.as_foreign().is_some());
        let limit = self.limit_bytes().filter(|_| !self.to_unshare.is_shared_by_many());
        // Copies beside what is in memory must not take more than folding saves.
        let folded_bytes = folded << PAGE_SHIFT;
        if crowded
            || clean > budget
            || self.stored_takes_more()
            || self.kept_bytes() > 0
            || limit.is_some_and(|limit| held > limit as u128 / CLEAN_SHARE)
            || limit.is_some()
                && self.swap.is_none()
                && self.is_at_least()
                && held > folded_bytes as u128 / LEAST_CLEAN_SHARE
        {
            stats::add(&self.stats.clean_dropped, 1);
            self.drop_copy(guard, id);
        }
    }

    /// Moves a `Resident` folio from its home into an empty frame: it becomes `Cached`. Pages that
    /// the program had discarded become zeros. If the kernel stops half-way, the folio is split:
    /// what moved is `Cached`, the rest `Resident` and protected. `frame` is given back if nothing
    /// moved.
    pub(crate) fn map_out(
        &self,
        guard: &mut ShardGuard<'_>,
        home: usize,
        id: FolioId,
        frame: Frame,
    ) -> Done {
        let folio = self.folios.get(guard, id);
        let order = folio.order();
        folio.clean_in.set(0);
        let done = if self.has_move {
            self.carry_out(home, frame, order)
        } else {
            self.copy_out(home, frame, order)
        };
        folio
            .age
            .set(workingset::shadow(self.tally.evict(order.pages() as u64), folio.active.get()));
        folio.frame.set(frame);
        if done.stop.is_none() {
            folio.state.set(State::Cached);
            folio.active.set(false);
            folio.refused.set(List::None);
            let needs_saving = !folio.has_copy.get();
            self.list_by_state(guard, id);
            if needs_saving {
                self.ask_to_save(order);
            }
            return done;
        }
        folio.active.set(true);
        folio.refused.set(List::None);
        let start = folio.key();
        self.lru.detach(id);
        self.split_at(guard, id, done.pages);
        if done.stop == Some(Stop::Busy) {
            self.refuse(guard, start + done.pages as u64);
        }
        self.settle_pieces(guard, id, done.pages, order, State::Cached, State::Resident);
        for page in done.pages..order.pages() {
            self.frames.give(
                frame + page as u32,
                Order::PAGE,
                if self.has_move { Kind::Empty } else { Kind::Full },
            );
        }
        done
    }

    /// The page at `key` can't leave. If that is for long, its folio is refused; so is what a fork
    /// shares with many, but for the page's block only, as others of the folio may have been
    /// written to since.
    fn refuse(&self, guard: &mut ShardGuard<'_>, key: u64) {
        let mut id = self.index.find(guard, key).expect("a folio covers what it covered");
        let is_shared = self.to_unshare.is_shared_by_many();
        if is_shared {
            let order = self.folios.get(guard, id).order();
            id = self.carve(guard, id, key, order.min(self.config.block_order));
        } else if self.to_unshare.has_forked_lately() {
            // Soon to be had.
            return;
        }
        let list = if is_shared { List::Shared } else { List::Pinned };
        self.folios.get(guard, id).refused.set(list);
        self.note_refusal();
    }

    /// Asks a background thread to compress, now that a folio of this order has become dirty.
    /// Single pages wait until there are some: a thread to wake for each costs more than
    /// compressing it.
    pub(crate) fn ask_to_save(&self, order: Order) {
        let dirty = self.lru.pages(List::Dirty);
        if order >= self.config.block_order || dirty >= DIRTY_BATCH.min(self.target() / WAIT_SHARE)
        {
            self.queue.reclaim();
        }
    }

    fn carry_out(&self, home: usize, frame: Frame, order: Order) -> Done {
        let (to, len) = (self.frames.addr(frame), order.bytes());
        let (mut done, mut moved, mut stop) = (0usize, 0usize, None);
        let mut holes = 0usize;
        let mut span = Span::new(len);
        while done < len && stop.is_none() {
            let most = span.limit(len - done);
            // SAFETY: the shard is locked, the folio is `Resident`, and its new frame is empty from
            // `done` on.
            let result = unsafe { self.space.move_pages(to + done, home + done, most, false) };
            let step = result.map_or_else(|p| p.done, |()| most);
            // SAFETY: the pages that the move has just brought to a frame of ours.
            unsafe { self.space.keep(to + done, step) };
            moved += step >> PAGE_SHIFT;
            done += step;
            let Err(Partial { done: 0, errno }) = result else {
                span.widen();
                continue;
            };
            match errno {
                _ if self.space.is_populated(to + done) => {
                    // A move that stops early may have moved one page more than it says (Linux
                    // 6.18), or have tried that page again and found its place taken: believing it
                    // would lose the page, and leave it in a frame that is thought to be empty. The
                    // frame was empty, so what is in it came from there. By now something else may
                    // be at the home: an unmap was under way, and another thread has mapped
                    // something there since.
                    stats::add(&self.stats.move_uncounted, 1);
                    // SAFETY: as above.
                    unsafe { self.space.keep(to + done, PAGE_SIZE) };
                    moved += 1;
                    done += PAGE_SIZE;
                }
                Errno::NOENT | Errno::INVAL if span.narrow(most) => {}
                Errno::NOENT => {
                    // SAFETY: the frame's page is empty; `zeros` is readable.
                    match unsafe {
                        self.space.copy(to + done, self.frames.zeros(), PAGE_SIZE, false)
                    } {
                        Ok(()) => {
                            stats::add(&self.stats.move_holes, 1);
                            holes += 1;
                            done += PAGE_SIZE;
                        }
                        Err(_) => stop = Some(Stop::Again),
                    }
                }
                Errno::AGAIN | Errno::NOMEM => {
                    stats::add(&self.stats.move_again, 1);
                    stop = Some(Stop::Again);
                }
                // Memory that may be executed, or not be written, is never moved to a frame.
                Errno::INVAL if self.protects() => {
                    let gone = self.copy_out_rest(home + done, to + done, len - done);
                    holes += gone >> PAGE_SHIFT;
                    done += gone;
                    stop = (done < len).then_some(Stop::Busy);
                }
                Errno::EXIST => panic!(
                    "memfold: page {} of frame {frame} should be empty and isn't (order {}, {moved} moved, {holes} holes)",
                    done >> PAGE_SHIFT,
                    order.get()
                ),
                _ => {
                    stats::add(&self.stats.move_busy, 1);
                    stop = Some(Stop::Busy);
                }
            }
        }
        self.tally.unmap((moved + holes) as u64);
        self.frames.count_moved((moved + holes) as i64);
        Done { pages: done >> PAGE_SHIFT, stop }
    }

    /// Copies the last `len` bytes of a folio out to those of its frame, which are empty. Returns how
    /// many have left; the frame is empty behind them. Only where areas are registered for protection.
    fn copy_out_rest(&self, home: usize, to: usize, len: usize) -> usize {
        // SAFETY: the frame is this thread's, and empty there; `zeros` is readable.
        let filled = unsafe { self.space.copy(to, self.frames.zeros(), len, false) };
        let filled = filled.map_or_else(|partial| partial.done, |()| len);
        if filled == 0 {
            return 0;
        }
        // SAFETY: as in `copy_out`; the frame is full so far.
        let gone = unsafe { self.space.take_by_copy(home, to as *mut u8, filled) };
        self.space.wake(home, gone);
        if gone < filled {
            let left = to + gone..to + filled;
            // SAFETY: the frame's pages hold nothing.
            let emptied = unsafe { self.space.discard_now(core::slice::from_ref(&left)) };
            assert!(emptied == left.len(), "a frame's pages can be given back");
        }
        gone
    }

    /// Without UFFDIO_MOVE. The frame is full.
    fn copy_out(&self, home: usize, frame: Frame, order: Order) -> Done {
        let (to, len) = (self.frames.addr(frame) as *mut u8, order.bytes());
        // SAFETY: the folio is `Resident` and its shard locked, so nobody else maps its pages or
        // serves their faults, and areas don't change; its area is registered for protection
        // (`Pager::protects`). The frame is full and ours.
        let gone = unsafe { self.space.take_by_copy(home, to, len) };
        self.space.wake(home, gone);
        let pages = gone >> PAGE_SHIFT;
        self.tally.unmap(pages as u64);
        Done { pages, stop: (gone < len).then_some(Stop::Busy) }
    }

    /// What is evicted next: the oldest of the mapped folios; from time to time, one that could not
    /// leave before.
    pub(crate) fn isolate_mapped(&self) -> Option<(FolioId, u64)> {
        if self.may_retry() {
            // The lists take turns.
            let first = self.retries.fetch_add(1, Relaxed) as usize;
            let mut lists = (first..first + List::REFUSED.len()).map(|n| List::REFUSED[n % 4]);
            if let Some(found) = lists.find_map(|list| self.lru.isolate(list)) {
                return Some(found);
            }
        }
        self.lru.rebalance();
        self.lru.isolate(List::Inactive).or_else(|| self.lru.isolate(List::Active))
    }
}
