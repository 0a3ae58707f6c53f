//! Loads by copy: a block is decompressed into a buffer and mapped by UFFDIO_COPY, which allocates
//! its pages. A folio of one page is always loaded so, as a move would interrupt the program's other
//! CPUs; a larger block as the small-page fallback (M6), where memory for a whole folio can't be
//! had. `--fallback` forces that.
//!
//! Where clean folios are dropped (`reclaim/drop.rs`), of a block that is touched at random **only
//! the page that was touched** is loaded, write-protected if it is to be read. The folio is
//! `Partial` then: it keeps its stored block, from which other touches take further pages, and
//! when it is evicted clean nothing is compressed. Of codecs that can, only the start of the block
//! is decoded, up to the page. Where a page was written to, the others are brought home when it is
//! evicted ([`Pager::complete`]).
use crate::area::lock::Hold;
use crate::area::{Area, Areas};
use crate::fault::load::Loaded;
use crate::folio::frames::Kind;
use crate::folio::index::{FolioId, ShardGuard};
use crate::folio::{Folio, PARTIAL_MAX, State, Touch};
use crate::pager::map::Wake;
use crate::pager::{Pager, bytes};
use crate::reclaim::Progress;
use crate::stats;
use core::ops::Range;
use memfold_sys::Errno;
use memfold_sys::sync::atomic::Ordering::Relaxed;
use memfold_sys::units::{Order, PAGE_SIZE};

/// Pages that are given back to the kernel at once to make room for small pages.
const BATCH_PAGES: u64 = 64;
/// That is at most one part in this many of the memory there is.
const BATCH_SHARE: u64 = 64;
/// Pages that a load evicts at most to make room for one. In the long run one is enough. But when
/// other loads have used up the batch, or the target has fallen, there is a backlog; with two a
/// load works it off, with one every later load would have to give a single page back to the
/// kernel.
const CATCH_UP_PAGES: u64 = 2;

/// The largest block that is copied although it could be moved: beyond that a copy costs more than
/// two moves.
const COPIED_MAX: Order = match Order::new(2) {
    Some(order) => order,
    None => unreachable!(),
};

/// What a load knows of the fault that it is for.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) struct Access {
    /// Who wakes the threads that wait for it.
    pub wake: Wake,
    /// How it was asked for.
    pub touch: Touch,
    /// It was a write.
    pub write: bool,
}

/// How far a copy got.
struct Copied {
    /// Pages that are there now and were not before.
    pages: u64,
    /// Which (`Folio::here`).
    bits: u16,
    /// They are known to equal their stored copy from now on.
    clean: bool,
    /// All that was to be copied is there.
    all: bool,
}

impl Pager {
    /// The keys of the pages of a one-block `Loading` folio that a fault loads by copy; those of
    /// them that are there already stay as they are. `None`: it is loaded into a frame, and moved.
    pub(crate) fn copied(
        &self,
        folio: &Folio,
        key: u64,
        access: Access,
        forced: bool,
    ) -> Option<Range<u64>> {
        let (whole, order) = (folio.key()..folio.end(), folio.order());
        let by_itself = self.drops_clean && access.touch == Touch::RANDOM;
        if folio.here.get() != 0 {
            return Some(if by_itself { key..key + 1 } else { whole });
        }
        if order == Order::PAGE || forced && order <= self.config.block_order {
            return Some(whole);
        }
        if !by_itself || order > self.config.block_order {
            return None;
        }
        // What comes from the file is read there as a whole.
        let is_foreign = self.folios.slots(folio)[0].get().handle.as_foreign().is_some();
        if order <= PARTIAL_MAX && !is_foreign {
            return Some(key..key + 1);
        }
        (order <= COPIED_MAX && !access.write).then_some(whole)
    }

    /// Whether this load is one of those that `--fallback` forces onto the small-page path.
    pub(crate) fn is_forced_small(&self) -> bool {
        let percent = self.config.fallback_percent as u64;
        percent > 0 && self.stats.pgmajfault.load(Relaxed) % 100 < percent
    }

    /// Loads the pages with `keys` of a one-block `Loading` folio by copy, and ends the loading.
    /// `None`: it can't be done now, and the folio still is `Loading`.
    pub(crate) fn load_small(
        &self,
        areas: &Areas,
        area: &Area,
        id: FolioId,
        keys: Range<u64>,
        access: Access,
    ) -> Option<Loaded> {
        let (order, is_partial) = {
            let guard = self.shards.lock(keys.start);
            let folio = self.folios.get(&guard, id);
            (folio.order(), folio.here.get() != 0)
        };
        if order > self.config.block_order {
            return None;
        }
        let has_room = if order == Order::PAGE && !self.drops_clean {
            self.make_room_for_page(areas)
        } else {
            self.make_room(areas, keys.end - keys.start)
        };
        if !has_room && !is_partial {
            return None;
        }
        if !has_room && let Ok(Some(frame)) = self.frame_for(areas, Order::PAGE) {
            // It has done what is done where there is no room, and is itself given back later.
            self.frames.give(frame, Order::PAGE, Kind::Full);
        }
        self.copy_in(areas, area, id, keys, access)
    }

    /// Brings home what is missing of a `Partial` folio, past the target if need be, so that it can
    /// be moved out; it has changed, or may have. Returns with its shard locked, which was not
    /// meanwhile.
    pub(crate) fn complete<'g>(
        &'g self,
        areas: &Areas,
        area: &Area,
        guard: ShardGuard<'g>,
        id: FolioId,
    ) -> ShardGuard<'g> {
        let folio = self.folios.get(&guard, id);
        let keys = folio.key()..folio.end();
        self.begin_loading(&guard, id);
        drop(guard);
        let access = Access { wake: Wake::Now, touch: Touch::UNKNOWN, write: true };
        self.copy_in(areas, area, id, keys.clone(), access);
        self.shards.lock(keys.start)
    }

    /// The second half of [`Pager::load_small`], for which there is room.
    fn copy_in(
        &self,
        areas: &Areas,
        area: &Area,
        id: FolioId,
        keys: Range<u64>,
        access: Access,
    ) -> Option<Loaded> {
        let (start, order, slot) = {
            let guard = self.shards.lock(keys.start);
            let folio = self.folios.get(&guard, id);
            (folio.key(), folio.order(), self.folios.slots(folio)[0].get())
        };
        let mut context = self.contexts.borrow(&self.store);
        let buffer = context.buffer.pages_mut();
        let wanted = (keys.end - start) as usize;
        // SAFETY: the buffer holds a block of the largest order that blocks have here, and is this
        // context's, which is lent to this thread; the folio is `Loading` by it, so that nobody
        // else frees its copy.
        let from_file = unsafe { self.fetch_one(&mut context, slot, order, wanted, buffer) };
        let guard = self.shards.lock(start);
        let folio = self.folios.get(&guard, id);
        let before = folio.here.get();
        let copied = self.copy_home(areas, area, folio, keys, buffer.cast(), access);
        let here = before | copied.bits;
        if !copied.all && !(self.drops_clean && here != 0) {
            // What was mapped is right, and the other path finds it there.
            return None;
        }
        if before == 0 {
            self.note_refault(&guard, id, access.touch, from_file);
        } else {
            folio.touch.set(folio.touch.get().then(access.touch));
        }
        let clean = copied.clean && (before == 0 || self.is_clean(folio));
        folio.clean_in.set(if clean { self.generation() } else { 0 });
        self.tally.map(copied.pages);
        self.tally.load(copied.pages);
        let is_whole = here == folio.bits(start..folio.end());
        folio.here.set(if is_whole { 0 } else { here });
        folio.state.set(if is_whole { State::Resident } else { State::Partial });
        folio.wanted.store(false, Relaxed);
        self.list_by_state(&guard, id);
        if is_whole {
            self.keep_clean_budget(&guard, id);
        }
        self.shards.notify(&guard);
        let in_part = before != 0 || !is_whole;
        stats::add(&self.stats.part_loads, in_part as u64);
        let is_fallback = order > Order::PAGE && !clean && !in_part;
        stats::add(&self.stats.load_fallback, is_fallback as u64);
        if in_part {
            (0..copied.pages).for_each(|_| self.count_load(Order::PAGE, from_file));
        } else {
            self.count_load(order, from_file);
        }
        Some(if copied.all { Loaded::Done } else { Loaded::Again })
    }

    /// Copies those pages with these keys home that are not there, under their shard's lock; `from`
    /// is where the folio's first page is.
    fn copy_home(
        &self,
        areas: &Areas,
        area: &Area,
        folio: &Folio,
        keys: Range<u64>,
        from: *const u8,
        access: Access,
    ) -> Copied {
        let protect = self.drops_clean
            && !access.write
            && access.touch != Touch::STREAM
            && !areas.is_pinned(keys.start, keys.end);
        let mut copied = Copied { pages: 0, bits: 0, clean: protect, all: false };
        let Some(_quiet) = self.changes.quiet() else { return copied };
        let mut at = keys.start;
        while at < keys.end {
            let away = |key: &u64| folio.here.get() & folio.bits(*key..key + 1) == 0;
            let Some(first) = (at..keys.end).find(away) else { break };
            let end = (first..keys.end).find(|key| !away(key)).unwrap_or(keys.end);
            let (home, len) = (area.addr_of(first), bytes((end - first) as usize));
            // SAFETY: the shard is locked, the buffer holds the folio's bytes as far as they are
            // asked for, and `home` is of its own range, and not `here`.
            let result = unsafe {
                let from = from.add(bytes((first - folio.key()) as usize));
                if protect {
                    self.space.copy_protected(home, from, len)
                } else {
                    self.space.copy(home, from, len, access.wake == Wake::Now)
                }
            };
            let mut done = result.map_or_else(|partial| partial.done, |()| len) / PAGE_SIZE;
            match result {
                Err(partial) if partial.errno == Errno::EXIST => {
                    // A page that is there is newer than ours, as in `carry_in`, and the folio must
                    // not be `Loading` any more when the lock is gone: the program may drop it.
                    stats::add(&self.stats.move_exists, 1);
                    self.space.wake(home, len);
                    (done, copied.clean) = (done + 1, false);
                }
                Err(partial) if partial.errno != Errno::AGAIN || done == 0 => {
                    self.space.wake(home, len);
                    copied.bits |= folio.bits(first..first + done as u64);
                    copied.pages += done as u64;
                    return copied;
                }
                _ => {}
            }
            at = first + done as u64;
            copied.bits |= folio.bits(first..at);
            copied.pages += done as u64;
        }
        copied.all = true;
        copied
    }

    /// Makes room for one page that the kernel will allocate. What is evicted for it leaves a full
    /// frame; such frames are given back many at a time, as each time costs interrupts of all CPUs
    /// that the program runs on.
    fn make_room_for_page(&self, areas: &Areas) -> bool {
        let target = self.target();
        let batch = BATCH_PAGES.min(target / BATCH_SHARE);
        let free = self.frames.full_free();
        let lacking = (self.physical() + batch).saturating_sub(target + free).min(CATCH_UP_PAGES);
        if lacking > 0 && self.reclaim(Hold::Read(areas), free + lacking, 0) == Progress::Again {
            return false;
        }
        self.physical() < target || self.frames.trim_now(&*self.space, batch) > 0
    }

    /// Makes room for pages that the kernel will allocate. Where discards are reported, a fault
    /// handler can't wait for one, so there is room or there isn't.
    fn make_room(&self, areas: &Areas, pages: u64) -> bool {
        if self.physical() + pages <= self.target() {
            return true;
        }
        let slack = if self.drops_clean { self.batch_pages() } else { BATCH_PAGES };
        !self.has_events && self.reclaim(Hold::Read(areas), 0, pages.max(slack)) == Progress::Freed
    }
}
