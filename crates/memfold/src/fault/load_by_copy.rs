//! Loads by copy: a block is decompressed into a buffer and mapped by one UFFDIO_COPY, which
//! allocates its pages. A folio of one page is always loaded so, as a move would interrupt the
//! program's other CPUs; a larger block as the small-page fallback (M6), where memory for a whole
//! folio can't be had. `--fallback` forces that.
use crate::area::lock::Hold;
use crate::area::{Area, Areas};
use crate::folio::index::FolioId;
use crate::folio::{State, Touch};
use crate::pager::Pager;
use crate::pager::map::Wake;
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

impl Pager {
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
        wake: Wake,
        touch: Touch,
    ) -> Option<Range<u64>> {
        let (start, order, slot) = {
            let guard = self.shards.lock(key);
            let folio = self.folios.get(&guard, id);
            (folio.key(), folio.order(), self.folios.slots(folio)[0].get())
        };
        let pages = order.pages() as u64;
        let has_room = if order == Order::PAGE {
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
        let home = area.addr_of(start);
        let quiet = self.changes.quiet()?;
        // SAFETY: the shard is locked, the buffer holds the folio's bytes, and `home` is its own
        // range.
        match unsafe { self.space.copy(home, buffer.cast(), order.bytes(), wake == Wake::Now) } {
            Ok(()) => {}
            Err(partial) if partial.errno == Errno::EXIST && order == Order::PAGE => {
                // A page that is there is newer than ours, as in `carry_in`, and the folio must not
                // be `Loading` any more when the lock is gone: the program may drop that page.
                stats::add(&self.stats.move_exists, 1);
                self.space.wake(home, PAGE_SIZE);
            }
            Err(_) => {
                // What was mapped is right, and the other path finds it there.
                self.space.wake(home, order.bytes());
                return None;
            }
        }
        drop(quiet);
        self.note_refault(&guard, id, touch, from_file);
        let folio = self.folios.get(&guard, id);
        folio.wanted.store(false, Relaxed);
        folio.state.set(State::Resident);
        self.tally.map(pages);
        self.tally.load(pages);
        self.list_by_state(&guard, id);
        self.keep_clean_budget(&guard, id);
        self.shards.notify(&guard);
        stats::add(&self.stats.load_fallback, (order > Order::PAGE) as u64);
        self.count_load(order, from_file);
        Some(start..start + pages)
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
        !self.has_events
            && self.reclaim(Hold::Read(areas), 0, pages.max(BATCH_PAGES)) == Progress::Freed
    }
}
