//! The mapper: carries pages between the engine's frames and the program's page table.
//!
//! Each verb does as much as the kernel lets it, and returns how far it got. The rest is unchanged.
//! All are called under the lock of the folio's shard, so no other thread moves these pages. The
//! program may touch, discard or unmap them at any time.
use crate::folio::tally::PageTally;
use crate::memory::frames::{Frame, FrameKind, Frames};
use crate::stats_place::StatsPlace;
use alloc::boxed::Box;
use alloc::sync::Arc;
use memfold_os::Errno;
use memfold_os::uffd::Partial;
use memfold_os::uffd::space::Space;
use memfold_os::units::{Order, PAGE_SHIFT, PAGE_SIZE};
use memfold_stats as stats;
use memfold_store::BlockSet;

/// Why a mapping stopped before the end of the folio.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum MapStop {
    /// The kernel returned EAGAIN, or has no memory now.
    Again,
    /// A page can't be evicted: it is shared by fork or pinned, or its area isn't writable any
    /// more.
    Busy,
    /// There is no mapping at the home any more, or the kernel refuses it for another reason.
    Gone,
}

/// The result of a mapping.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct MapProgress {
    /// Pages from the start of the folio that are in their final place.
    pub pages: usize,
    /// Why it stopped early.
    pub stop: Option<MapStop>,
}

/// How much to ask for at once. ENOENT means that a page is missing. ENOENT and EINVAL can also
/// mean that the range crosses the border of two of the kernel's areas, which no call fills or
/// moves at once. Only for a single page do they have other causes.
pub struct StepSize(usize);

impl StepSize {
    pub fn new(len: usize) -> StepSize {
        StepSize(len)
    }

    pub fn limit(&self, left: usize) -> usize {
        self.0.min(left)
    }

    /// Halves the step, and returns `false` if `asked` was a single page.
    pub fn narrow(&mut self, asked: usize) -> bool {
        self.0 = (asked / 2).next_multiple_of(PAGE_SIZE).max(PAGE_SIZE);
        asked > PAGE_SIZE
    }

    pub fn widen(&mut self) {
        self.0 = self.0.saturating_mul(2);
    }
}

/// The program's address space, and the frames through which folios leave and enter it.
pub struct Mapper {
    space: Box<dyn Space>,
    frames: Frames,
    has_move: bool,
    drops_clean: bool,
    stats: Arc<StatsPlace>,
}

impl Mapper {
    /// Makes frames over an address space. `has_move`: it moves pages. `drops_clean`: see
    /// [`Mapper::drops_clean`].
    pub fn new(
        space: Box<dyn Space>,
        frames: Frames,
        has_move: bool,
        drops_clean: bool,
        stats: Arc<StatsPlace>,
    ) -> Mapper {
        Mapper { space, frames, has_move, drops_clean, stats }
    }

    /// Returns the program's address space.
    pub fn space(&self) -> &dyn Space {
        &*self.space
    }

    /// Returns the engine's own pages.
    pub fn frames(&self) -> &Frames {
        &self.frames
    }

    /// Returns whether pages are moved, not copied.
    pub fn has_move(&self) -> bool {
        self.has_move
    }

    /// Returns whether pages loaded for a read are protected, and dropped while they are clean
    /// (`reclaim/drop.rs`). That is so in inline delivery, where all discards are known.
    pub fn drops_clean(&self) -> bool {
        self.drops_clean
    }

    /// Returns whether areas are registered for write protection too.
    pub fn protects(&self) -> bool {
        !self.has_move || self.drops_clean
    }

    /// Returns the first address and the length of the frames.
    pub fn frames_zone(&self) -> (usize, usize) {
        (self.frames.zone().start(), self.frames.zone().len())
    }

    /// Takes an empty frame and fills it with zeros. Returns `None` if there is no run of this
    /// order.
    ///
    /// # Errors
    /// EAGAIN for the moment, ENOMEM.
    pub fn populated(&self, order: Order) -> Result<Option<Frame>, Errno> {
        let Some(frame) = self.frames.take(order, FrameKind::Empty) else { return Ok(None) };
        self.frames.populate(&*self.space, frame, order).map(|()| Some(frame))
    }

    /// Makes one full frame out of smaller ones: see [`Frames::gather`]. Returns `None` where pages
    /// aren't moved.
    ///
    /// # Errors
    /// EAGAIN for the moment.
    pub fn gather(&self, order: Order) -> Result<Option<Frame>, Errno> {
        if self.has_move { self.frames.gather(&*self.space, order) } else { Ok(None) }
    }

    /// Gives up to `pages` free full pages back to the kernel: see [`Frames::trim`]. Returns their
    /// number.
    pub fn trim(&self, pages: u64) -> u64 {
        self.frames.trim(&*self.space, pages)
    }

    /// Gives pages back without waiting for a handler of discards: see [`Frames::trim_now`].
    pub fn trim_now(&self, pages: u64) -> u64 {
        self.frames.trim_now(&*self.space, pages)
    }

    /// Maps a frame's pages at `home` and frees the frame, as far as it got. Wakes the threads that
    /// wait for them.
    pub fn carry_in(
        &self,
        home: usize,
        frame: Frame,
        order: Order,
        tally: &PageTally,
    ) -> MapProgress {
        let (from, len) = (self.frames.addr(frame), order.bytes());
        let first = self.install(home, from, len, !self.has_move);
        if first.is_err() || !self.has_move {
            return self.carry_in_slowly(home, frame, order, first, tally);
        }
        tally.map(order.pages() as u64);
        self.frames.count_moved(-(order.pages() as i64));
        self.frames.give(frame, order, FrameKind::Empty);
        MapProgress { pages: order.pages(), stop: None }
    }

    /// Maps a folio whose pages were asked for at once, with the result `first`. It makes progress
    /// page by page, where calls fail. No result is passed over: after EEXIST, a second call could
    /// return EAGAIN, and the folio would be taken for missing where a page is there.
    fn carry_in_slowly(
        &self,
        home: usize,
        frame: Frame,
        order: Order,
        first: Result<(), Partial>,
        tally: &PageTally,
    ) -> MapProgress {
        let (from, len) = (self.frames.addr(frame), order.bytes());
        let mut kept_blocks = BlockSet::EMPTY;
        let mut by_copy = !self.has_move;
        let (mut done, mut moved, mut mapped) = (0, 0, 0);
        let mut stop = None;
        let mut span = StepSize::new(len);
        let mut first = Some(first);
        while done < len && stop.is_none() {
            let (at, src, most) = (home + done, from + done, span.limit(len - done));
            let is_first = first.is_some();
            let result = first.take().unwrap_or_else(|| self.install(at, src, most, by_copy));
            let step = result.map_or_else(|p| p.done, |()| most) >> PAGE_SHIFT;
            if step > 0 {
                span.widen();
                mapped += step;
                let page = done >> PAGE_SHIFT;
                if by_copy {
                    (page..page + step).for_each(|each| kept_blocks.insert(each));
                } else {
                    moved += step;
                }
                done += step << PAGE_SHIFT;
                continue;
            }
            match result.map_or_else(|p| p.errno, |()| Errno::AGAIN) {
                _ if !by_copy && !self.space.is_populated(from + done) => {
                    // The page was moved and not counted: see `carry_out`. The kernel has woken no
                    // thread for it.
                    self.space.wake(home + done, PAGE_SIZE);
                    (moved, mapped, done) = (moved + 1, mapped + 1, done + PAGE_SIZE);
                }
                Errno::EXIST => {
                    // The page that is mapped there is newer than the folio's. It was there before
                    // the area was managed, or the program has filled a hole. It counts as mapped.
                    stats::add(&self.stats.move_exists, 1);
                    kept_blocks.insert(done >> PAGE_SHIFT);
                    mapped += 1;
                    done += PAGE_SIZE;
                }
                // Another thread of the kernel may have held the page for a moment.
                Errno::AGAIN | Errno::NOMEM | Errno::BUSY if is_first => {}
                Errno::AGAIN | Errno::NOMEM => stop = Some(MapStop::Again),
                Errno::NOENT | Errno::INVAL if span.narrow(most) => {}
                // The frame is pinned for a moment, or the home isn't writable. A copy works in
                // both cases.
                Errno::BUSY | Errno::INVAL if !by_copy => by_copy = true,
                _ => stop = Some(MapStop::Gone),
            }
        }
        let pages = done >> PAGE_SHIFT;
        tally.map(mapped as u64);
        self.frames.count_moved(-(moved as i64));
        if stop.is_none() && moved == 0 {
            self.frames.give(frame, order, FrameKind::Full);
        } else {
            for page in 0..pages {
                let kind =
                    if kept_blocks.contains(page) { FrameKind::Full } else { FrameKind::Empty };
                self.frames.give(frame + page as u32, Order::PAGE, kind);
            }
        }
        MapProgress { pages, stop }
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

    /// Moves a folio's pages from `home` to its frame, or copies them where pages can't be moved.
    /// Pages that the program has discarded become zeros. The frame is empty, or full where pages
    /// are copied. `loaded` is whether all its pages were in a frame before, so that they need no
    /// [`Space::keep`].
    pub fn carry_out(
        &self,
        home: usize,
        frame: Frame,
        order: Order,
        loaded: bool,
        tally: &PageTally,
    ) -> MapProgress {
        if self.has_move {
            self.move_out(home, frame, order, loaded, tally)
        } else {
            self.copy_out(home, frame, order, tally)
        }
    }

    fn move_out(
        &self,
        home: usize,
        frame: Frame,
        order: Order,
        loaded: bool,
        tally: &PageTally,
    ) -> MapProgress {
        let (to, len) = (self.frames.addr(frame), order.bytes());
        let (mut done, mut moved, mut stop) = (0usize, 0usize, None);
        let mut holes = 0usize;
        let keep = |arrived: usize, len: usize| {
            if !loaded {
                // SAFETY: a move has just brought these pages to an empty frame of the engine, whose
                // folio's shard the caller has locked. So the range is registered, and no other
                // thread uses it.
                unsafe { self.space.keep(arrived, len) };
            }
        };
        let mut span = StepSize::new(len);
        while done < len && stop.is_none() {
            let most = span.limit(len - done);
            stats::add(&self.stats.moves_out, 1);
            // SAFETY: the shard is locked, the folio is `Resident`, and its new frame is empty from
            // `done` on.
            let result = unsafe { self.space.move_pages(to + done, home + done, most, false) };
            let step = result.map_or_else(|p| p.done, |()| most);
            keep(to + done, step);
            moved += step >> PAGE_SHIFT;
            done += step;
            let Err(Partial { done: 0, errno }) = result else {
                span.widen();
                continue;
            };
            match errno {
                _ if self.space.is_populated(to + done) => {
                    // A move that stops early may have moved more pages than it reports: Linux 6.18
                    // moves up to a page table's worth of them at once, and doesn't count them if an
                    // earlier try had failed. It then tries them again, and finds their places taken.
                    // Each turn of this loop finds one of them. Without this, the page would be lost,
                    // in a frame that is believed to be empty. The frame was empty, so the page came
                    // from the home. By now there may be another page at the home: an unmap was in
                    // progress, and another thread has mapped memory there since.
                    stats::add(&self.stats.move_uncounted, 1);
                    keep(to + done, PAGE_SIZE);
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
                        Err(_) => stop = Some(MapStop::Again),
                    }
                }
                Errno::AGAIN | Errno::NOMEM => {
                    stats::add(&self.stats.move_again, 1);
                    stop = Some(MapStop::Again);
                }
                // Memory that is executable or read-only is never moved to a frame.
                Errno::INVAL if self.protects() => {
                    let copied_bytes = self.copy_out_rest(home + done, to + done, len - done);
                    holes += copied_bytes >> PAGE_SHIFT;
                    done += copied_bytes;
                    stop = (done < len).then_some(MapStop::Busy);
                }
                Errno::EXIST => panic!(
                    "memfold: Page {} of frame {frame} must be empty and is not (order {}, {moved} moved, {holes} holes)",
                    done >> PAGE_SHIFT,
                    order.get()
                ),
                _ => {
                    stats::add(&self.stats.move_busy, 1);
                    stop = Some(MapStop::Busy);
                }
            }
        }
        tally.unmap((moved + holes) as u64);
        self.frames.count_moved((moved + holes) as i64);
        MapProgress { pages: done >> PAGE_SHIFT, stop }
    }

    /// Copies the last `len` bytes of a folio to those of its frame, which are empty. Returns how
    /// many bytes were evicted; the frame is empty behind them. Used only where areas are
    /// registered for protection.
    fn copy_out_rest(&self, home: usize, to: usize, len: usize) -> usize {
        // SAFETY: the frame is this thread's, and empty there; `zeros` is readable.
        let outcome = unsafe { self.space.copy(to, self.frames.zeros(), len, false) };
        let filled_bytes = outcome.map_or_else(|partial| partial.done, |()| len);
        if filled_bytes == 0 {
            return 0;
        }
        // SAFETY: the folio is `Resident` and its shard locked, so no other thread maps its pages
        // or serves their faults, and areas don't change. Its area is registered for protection.
        // The frame is full up to `filled_bytes`.
        let evicted_bytes = unsafe { self.space.take_by_copy(home, to as *mut u8, filled_bytes) };
        self.space.wake(home, evicted_bytes);
        if evicted_bytes < filled_bytes {
            let rest = to + evicted_bytes..to + filled_bytes;
            // SAFETY: the frame's pages hold no data.
            let emptied = unsafe { self.space.discard_now(core::slice::from_ref(&rest)) };
            assert!(emptied == rest.len(), "a frame's pages can be given back");
        }
        evicted_bytes
    }

    /// Copies a folio out, where pages can't be moved. The frame is full.
    fn copy_out(&self, home: usize, frame: Frame, order: Order, tally: &PageTally) -> MapProgress {
        let (to, len) = (self.frames.addr(frame) as *mut u8, order.bytes());
        // SAFETY: the folio is `Resident` and its shard locked, so no other thread maps its pages
        // or serves their faults, and areas don't change. Its area is registered for protection
        // (`Mapper::protects`). The frame is full, and belongs to this thread.
        let evicted_bytes = unsafe { self.space.take_by_copy(home, to, len) };
        self.space.wake(home, evicted_bytes);
        let pages = evicted_bytes >> PAGE_SHIFT;
        tally.unmap(pages as u64);
        MapProgress { pages, stop: (evicted_bytes < len).then_some(MapStop::Busy) }
    }
}
