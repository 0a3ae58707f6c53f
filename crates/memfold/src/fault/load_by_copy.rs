//! Loads by copy: a block is decompressed into a buffer and mapped by one UFFDIO_COPY, which
//! allocates its pages. A folio of one page is always loaded so, as a move would interrupt the
//! program's other CPUs; a larger block as the small-page fallback (M6), where memory for a whole
//! folio can't be had. `--fallback` forces that.
//!
//! Where clean folios are dropped (`reclaim/drop.rs`), a small block that is asked for by itself is
//! loaded so too, and write-protected if it is to be read.
use crate::area::lock::Hold;
use crate::area::{Area, Areas};
use crate::folio::index::FolioId;
use crate::folio::{State, Touch};
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

impl Pager {
    /// Whether a folio of this order is loaded by copy.
    pub(crate) fn is_by_copy(&self, order: Order, access: Access) -> bool {
        order == Order::PAGE
            || self.drops_clean
                && order <= COPIED_MAX
                && order <= self.config.block_order
                && access.touch == Touch::RANDOM
                && !access.write
    }

    /// Whether this load is one of those that `--fallback` forces onto the small-page path.
    pub(crate) fn is_forced_small(&self) -> bool {
        let percent = self.config.fallback_percent as u64;
        percent > 0 && self.stats.pgmajfault.load(Relaxed) % 100 < percent
    }

    /// Loads a one-block `Loading` folio by the small-page path; returns its keys. `None`: it can't
    /// be done now, and nothing has changed.
    pub(crate) fn load_small(
        &self,
        areas: &Areas,
        area: &Area,
        id: FolioId,
        key: u64,
        access: Access,
    ) -> Option<Range<u64>> {
        let (start, order, slot) = {
            let guard = self.shards.lock(key);
            let folio = self.folios.get(&guard, id);
            (folio.key(), folio.order(), self.folios.slots(folio)[0].get())
        };
        let pages = order.pages() as u64;
        let has_room = if order == Order::PAGE && !self.drops_clean {
            self.make_room_for_page(areas)
        } else {
            self.make_room(areas, pages)
        };
        if order > self.config.block_order || !has_room {
            return None;
        }
        let mut context = self.contexts.borrow(&self.store);
        let buffer = context.buffer.pages_mut();
        // SAFETY: the buffer holds a block of the largest order that blocks have here, and is this
        // context's, which is lent to this thread; the folio is `Loading` by it, so that nobody
        // else frees its copy.
        let from_file = unsafe { self.fetch_one(&mut context, slot, order, buffer) };
        let guard = self.shards.lock(key);
        let clean = self.copy_home(areas, area, start..start + pages, buffer.cast(), access)?;
        self.note_refault(&guard, id, access.touch, from_file);
        let folio = self.folios.get(&guard, id);
        folio.wanted.store(false, Relaxed);
        folio.state.set(State::Resident);
        folio.clean_in.set(if clean { self.generation() } else { 0 });
        self.tally.map(pages);
        self.tally.load(pages);
        self.list_by_state(&guard, id);
        self.keep_clean_budget(&guard, id);
        self.shards.notify(&guard);
        stats::add(&self.stats.load_fallback, (order > Order::PAGE && !clean) as u64);
        self.count_load(order, from_file);
        Some(start..start + pages)
    }

    /// Copies the pages with these keys home, under their shard's lock. Returns whether they are
    /// known to equal their stored copy from now on. `None`: not all could be had.
    fn copy_home(
        &self,
        areas: &Areas,
        area: &Area,
        keys: Range<u64>,
        from: *const u8,
        access: Access,
    ) -> Option<bool> {
        let (home, len) = (area.addr_of(keys.start), bytes((keys.end - keys.start) as usize));
        let protect = self.drops_clean
            && !access.write
            && access.touch != Touch::STREAM
            && !areas.is_pinned(keys.start, keys.end);
        let _quiet = self.changes.quiet()?;
        // SAFETY: the shard is locked, the buffer holds the folio's bytes, and `home` is its own
        // range.
        let result = unsafe {
            if protect {
                self.space.copy_protected(home, from, len)
            } else {
                self.space.copy(home, from, len, access.wake == Wake::Now)
            }
        };
        match result {
            Ok(()) => Some(protect),
            Err(partial) if partial.errno == Errno::EXIST && len == PAGE_SIZE => {
                // A page that is there is newer than ours, as in `carry_in`, and the folio must not
                // be `Loading` any more when the lock is gone: the program may drop that page.
                stats::add(&self.stats.move_exists, 1);
                self.space.wake(home, len);
                Some(false)
            }
            Err(_) => {
                // What was mapped is right, and the other path finds it there.
                self.space.wake(home, len);
                None
            }
        }
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
