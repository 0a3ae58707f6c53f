//! Frames: the engine's own pages, through which folios leave and enter the program's page table.
//!
//! A frame is *full* (it has memory; a folio can be decompressed into it) or *empty* (a hole, into which
//! a folio can be moved). A move out fills an empty frame, and a move in empties a full one. So a steady
//! state allocates nothing, except for single pages (`fault/load_by_copy.rs`).
//!
//! Equation: `populated = full free + full in use`; `populated + mapped` is the memory that the engine
//! holds.
//!
//! - Two buddy allocators share one zone, one for each kind. Runs join with free neighbours of their
//!   own kind only. Four empty runs of 2 MiB are kept for large folios (M8).
//! - `gather` makes a large full run out of small ones by moving their pages together. `trim` returns
//!   full frames to the kernel; `trim_now` does so for a thread that waits for memory.
//! - After a fork free full frames may be shared too. Such a page doesn't move, so `gather` and
//!   `trim_now` make it private first.
//! - Single pages are evicted side by side, each CPU's into a 2 MiB run of its own (`STRIPS`). They
//!   become free as long runs, and are returned in few moves and one `madvise`, because each call
//!   interrupts every CPU.
//!
//! Invariants:
//! - **An empty frame has no page.** If there is a page in one, the present move has brought it,
//!   whether the kernel counted it or not.
//! - **A page in the kernel's swap counts as present.** Only the page map shows it
//!   ([`Space::is_populated`]); `mincore` would report swapped frames as empty.
//! - Memory to which the program has applied MADV_FREE arrives as a page that the kernel may drop
//!   until it is written to, also from a frame. So each page is written to when it first arrives. The
//!   call changes no byte and doesn't wait if the page is gone ([`Space::keep`]). Later arrivals need
//!   no write, because MADV_FREE discards managed memory at once.
use core::ops::Range;
use memfold_os::Errno;
use memfold_os::memory::zone::{Zone, ZoneEdge};
use memfold_os::page::Page;
use memfold_os::sync::Mutex;
use memfold_os::sync::atomic::{AtomicU64, Ordering::Relaxed};
use memfold_os::thread::current_cpu;
use memfold_os::uffd::space::Space;
use memfold_os::units::{MAX_BYTES, MAX_ORDER, MAX_PAGES, Order, PAGE_SHIFT, PAGE_SIZE};

/// First page of a frame, counted from the start of the zone.
pub type Frame = u32;

/// Whether free frames hold memory.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameKind {
    /// Holds memory.
    Full = 0,
    /// A hole.
    Empty = 1,
}

const ORDERS: usize = MAX_ORDER as usize + 1;
const NONE: u32 = u32::MAX;
/// Most bytes that a [`Frame`] can name, nearly 16 TiB.
const BYTES_MAX: usize = (u32::MAX as usize + 1 - MAX_PAGES) << PAGE_SHIFT;

#[repr(C)]
#[derive(Copy, Clone)]
struct FrameRun {
    prev: u32,
    next: u32,
    /// 0: not the head of a free run; otherwise 1 + kind * 16 + order.
    mark: u8,
}

/// All frames of an engine.
pub struct Frames {
    zone: Zone,
    zeros: Zone,
    runs: Zone,
    /// Edges of the zone and of `runs`.
    edges: [ZoneEdge; 2],
    pages: u32,
    free: Mutex<FreeLists>,
    populated: AtomicU64,
    full_free: AtomicU64,
}

struct FreeLists {
    heads: [[u32; ORDERS]; 2],
    /// Free runs of the largest order that are kept for large folios (M8).
    reserve: u32,
    whole: [u32; 2],
    /// No run from this page on was ever taken. These are empty runs of the largest order that are
    /// in no list, and have no records yet. Records would be 6 MiB for 24 GiB of frames, in each
    /// process that starts.
    fresh: u32,
    /// The rest of the runs that single empty pages are taken from, in order.
    strips: [Range<u32>; STRIPS],
}

/// Strips of empty pages, one for each CPU. Further CPUs share them. Evicted pages lie side by side
/// there, so one call gives them back. Each strip has a page table of its own. So CPUs that evict
/// at the same time don't wait for each other: a move holds the table's lock while it interrupts
/// other CPUs.
const STRIPS: usize = 8;
/// Most free runs that are given back at once.
const RUNS: usize = 64;

impl Frames {
    /// Reserves address space for `bytes` of frames, all of them empty. `reserve` runs of 2 MiB are
    /// kept for large folios.
    ///
    /// # Errors
    /// The errors of reserving address space.
    pub fn new(bytes: usize, reserve: u32) -> Result<Frames, Errno> {
        let bytes = bytes.min(BYTES_MAX).next_multiple_of(MAX_BYTES);
        let zone = Zone::reserve_growing(bytes, MAX_BYTES)?;
        let pages = (zone.len() >> PAGE_SHIFT) as u32;
        let runs_len = (pages as usize * size_of::<FrameRun>()).next_multiple_of(PAGE_SIZE);
        Ok(Frames {
            // No thread ever writes there.
            zeros: Zone::reserve_growing(MAX_BYTES, PAGE_SIZE)?,
            runs: Zone::reserve_growing(runs_len, PAGE_SIZE)?,
            edges: Default::default(),
            pages,
            free: Mutex::new(FreeLists {
                heads: [[NONE; ORDERS]; 2],
                reserve,
                whole: [0; 2],
                fresh: 0,
                strips: [const { 0..0 }; STRIPS],
            }),
            populated: AtomicU64::new(0),
            full_free: AtomicU64::new(0),
            zone,
        })
    }

    /// Returns the zone, to be registered.
    pub fn zone(&self) -> &Zone {
        &self.zone
    }

    /// Returns the address of a frame.
    pub fn addr(&self, frame: Frame) -> usize {
        self.zone.start() + ((frame as usize) << PAGE_SHIFT)
    }

    /// Returns the first page of a frame.
    pub fn page(&self, frame: Frame) -> *mut Page {
        Page::at(self.addr(frame) as *mut u8)
    }

    /// Returns 2 MiB of zeros.
    pub fn zeros(&self) -> *const u8 {
        self.zeros.as_ptr()
    }

    /// Returns how many pages of frames hold memory, free or in use.
    pub fn populated(&self) -> u64 {
        self.populated.load(Relaxed)
    }

    /// Returns the pages of free full frames.
    pub fn full_free(&self) -> u64 {
        self.full_free.load(Relaxed)
    }

    /// Counts pages that a move carried into frames (positive) or out of them (negative).
    pub fn count_moved(&self, pages: i64) {
        self.populated.fetch_add(pages as u64, Relaxed);
    }

    /// Returns the bytes of metadata in use, at most: one record for each page that ever was in a
    /// frame.
    pub fn metadata_bytes(&self) -> usize {
        self.populated() as usize * size_of::<FrameRun>()
    }

    /// Takes a free frame.
    pub fn take(&self, order: Order, kind: FrameKind) -> Option<Frame> {
        let mut free = self.free.lock();
        if kind == FrameKind::Empty && order == Order::PAGE {
            return self.take_single(&mut free);
        }
        self.take_run(&mut free, order, kind)
    }

    /// Takes an empty page: the next of this CPU's strip.
    fn take_single(&self, free: &mut FreeLists) -> Option<Frame> {
        let cpu = current_cpu() % STRIPS;
        if free.strips[cpu].is_empty()
            && self.empty_whole(free) > free.reserve
            && let Some(run) = self.take_run(free, Order::MAX, FrameKind::Empty)
        {
            free.strips[cpu] = run..run + MAX_PAGES as u32;
        }
        let own = free.strips[cpu].next();
        own.or_else(|| self.take_run(free, Order::PAGE, FrameKind::Empty))
            .or_else(|| free.strips.iter_mut().find_map(Iterator::next))
    }

    /// Returns the number of empty runs of the largest order.
    fn empty_whole(&self, free: &FreeLists) -> u32 {
        free.whole[FrameKind::Empty as usize] + (self.pages - free.fresh) / MAX_PAGES as u32
    }

    /// Gets memory for the records of a run that was never taken. Returns `false` if there is none.
    fn need_run(&self, run: u32) -> bool {
        let pages = run as usize + MAX_PAGES;
        let need = |zone: &Zone, edge: &ZoneEdge, end: usize| {
            zone.need(edge, 0, zone.len(), end.min(zone.len()))
        };
        let runs = need(&self.runs, &self.edges[1], pages * size_of::<FrameRun>());
        runs.and_then(|()| need(&self.zone, &self.edges[0], pages << PAGE_SHIFT)).is_ok()
    }

    fn take_run(&self, free: &mut FreeLists, order: Order, kind: FrameKind) -> Option<Frame> {
        if free.heads[FrameKind::Empty as usize][MAX_ORDER as usize] == NONE
            && free.fresh < self.pages
            && self.need_run(free.fresh)
        {
            let run = free.fresh;
            free.fresh += MAX_PAGES as u32;
            self.enter(free, run, MAX_ORDER, FrameKind::Empty);
        }
        let whole = self.empty_whole(free);
        let from = (order.get()..=MAX_ORDER).find(|&o| {
            free.heads[kind as usize][o as usize] != NONE
                && (o < MAX_ORDER
                    || order == Order::MAX
                    || kind == FrameKind::Full
                    || whole > free.reserve)
        })?;
        let run = free.heads[kind as usize][from as usize];
        self.remove(free, run, from, kind);
        for half in (order.get()..from).rev() {
            self.enter(free, run + (1 << half), half, kind);
        }
        // Under the lock, because threads that read the count must find as many pages.
        if kind == FrameKind::Full {
            self.full_free.fetch_sub(order.pages() as u64, Relaxed);
        }
        Some(run)
    }

    /// Frees a frame, as one of `kind`.
    pub fn give(&self, frame: Frame, order: Order, kind: FrameKind) {
        let mut free = self.free.lock();
        if kind == FrameKind::Full {
            self.full_free.fetch_add(order.pages() as u64, Relaxed);
        }
        let (mut run, mut order) = (frame, order.get());
        while order < MAX_ORDER {
            let buddy = run ^ (1 << order);
            if self.run(buddy).mark != mark(kind, order) {
                break;
            }
            self.remove(&mut free, buddy, order, kind);
            run &= !(1 << order);
            order += 1;
        }
        self.enter(&mut free, run, order, kind);
    }

    /// Makes an empty frame full of zeros.
    ///
    /// # Errors
    /// The errors of the copy: EAGAIN for the moment, ENOMEM. The frame has been freed then.
    pub fn populate(&self, space: &dyn Space, frame: Frame, order: Order) -> Result<(), Errno> {
        let (at, len) = (self.addr(frame), order.bytes());
        let mut returned_pages = 0;
        while returned_pages < len {
            // SAFETY: the frame is the caller's and empty from `done` on; `zeros` is readable for 2
            // MiB.
            match unsafe {
                space.copy(at + returned_pages, self.zeros(), len - returned_pages, false)
            } {
                Ok(()) => break,
                Err(partial) if partial.done > 0 => returned_pages += partial.done,
                Err(partial) => {
                    self.populated.fetch_add((returned_pages >> PAGE_SHIFT) as u64, Relaxed);
                    self.give_mixed(frame, order, |page| {
                        (page as usize) < returned_pages >> PAGE_SHIFT
                    });
                    return Err(partial.errno);
                }
            }
        }
        self.populated.fetch_add(order.pages() as u64, Relaxed);
        Ok(())
    }

    /// Frees a frame page by page; `full(i)` returns which of its pages hold memory.
    pub fn give_mixed(&self, frame: Frame, order: Order, full: impl Fn(u32) -> bool) {
        for page in 0..order.pages() as u32 {
            self.give(
                frame + page,
                Order::PAGE,
                if full(page) { FrameKind::Full } else { FrameKind::Empty },
            );
        }
    }

    /// Makes one full frame of `order` out of smaller free ones by moving their pages together.
    /// Returns `None` if free full pages or an empty run are lacking; no page is lost then.
    ///
    /// # Errors
    /// The error of a failed move: EAGAIN for the moment. No page is lost.
    pub fn gather(&self, space: &dyn Space, order: Order) -> Result<Option<Frame>, Errno> {
        let Some(run) = self.take(order, FrameKind::Empty) else { return Ok(None) };
        let (mut done, mut result) = (0u32, Ok(()));
        while result.is_ok() && (done as usize) < order.pages() {
            let piece = (0..order.get())
                .rev()
                .filter_map(Order::new)
                .filter(|o| done as usize + o.pages() <= order.pages())
                .find_map(|o| self.take(o, FrameKind::Full).map(|piece| (piece, o)));
            let Some((piece, size)) = piece else { break };
            let pages;
            (pages, result) = self.move_free(space, run + done, piece, size);
            done += pages;
            self.give_mixed_run(piece, size, pages);
        }
        if done as usize == order.pages() {
            return Ok(Some(run));
        }
        self.give_mixed(run, order, |page| page < done);
        result.map(|()| None)
    }

    /// Moves the memory of `piece` to the empty run `to`, both of this size and the caller's.
    /// Returns the number of moved pages.
    fn move_free(
        &self,
        space: &dyn Space,
        to: Frame,
        piece: Frame,
        size: Order,
    ) -> (u32, Result<(), Errno>) {
        let (mut done, mut tried) = (0, false);
        loop {
            let (from, left) = (self.addr(piece + done), size.pages() as u32 - done);
            // SAFETY: both runs are the caller's: `piece` is full and free, `to` is empty, from
            // `done` on.
            let Err(e) = (unsafe {
                space.move_pages(self.addr(to + done), from, (left as usize) << PAGE_SHIFT, false)
            }) else {
                return (size.pages() as u32, Ok(()));
            };
            done += (e.done >> PAGE_SHIFT) as u32;
            // More pages were moved than the kernel reported: see `Mapper::carry_out`.
            while (done as usize) < size.pages() && !space.is_populated(self.addr(piece + done)) {
                done += 1;
            }
            if done as usize == size.pages() {
                return (done, Ok(()));
            }
            // A page that a fork shares can't be moved. The page of a full frame is present, so
            // making it private causes no fault that a handler would serve.
            let rest = (size.pages() - done as usize) << PAGE_SHIFT;
            if tried
                || e.errno != Errno::BUSY
                || space.unshare(self.addr(piece + done), rest).is_err()
            {
                return (done, Err(e.errno));
            }
            tried = true;
        }
    }

    /// Frees a full piece, after its first `moved` pages were moved away.
    fn give_mixed_run(&self, piece: Frame, order: Order, moved: u32) {
        if moved as usize == order.pages() {
            self.give(piece, order, FrameKind::Empty);
        } else {
            self.give_mixed(piece, order, |page| page >= moved);
        }
    }

    /// Gives memory of up to `pages` free full pages back to the kernel, and returns their number.
    pub fn trim(&self, space: &dyn Space, pages: u64) -> u64 {
        // SAFETY: `give_back` passes ranges of free frames, so no thread needs their bytes.
        let is_gone =
            |range: &&Range<usize>| unsafe { space.discard(range.start, range.len()) }.is_ok();
        self.give_back(pages, |ranges| ranges.iter().take_while(is_gone).map(Range::len).sum())
    }

    /// Gives memory back as [`Frames::trim`] does, for handlers of discards: see
    /// [`Space::discard_now`].
    pub fn trim_now(&self, space: &dyn Space, pages: u64) -> u64 {
        // SAFETY: `give_back` passes ranges of free frames, so no thread needs their bytes; the
        // pages are full.
        self.give_back(pages, |ranges| unsafe { space.discard_now(ranges) })
    }

    /// Gives up to `pages` back by `discard`, at most 2 MiB at a time. `discard` returns how many
    /// bytes are gone, counted from the first range on.
    fn give_back(&self, pages: u64, discard: impl Fn(&[Range<usize>]) -> usize) -> u64 {
        let mut returned_pages = 0;
        while returned_pages < pages {
            let (mut runs, mut ranges) = ([(0, Order::PAGE); RUNS], [const { 0..0 }; RUNS]);
            let runs = self.take_full((pages - returned_pages).min(MAX_PAGES as u64), &mut runs);
            if runs.is_empty() {
                break;
            }
            let mut count = 0;
            for &(frame, order) in runs.iter() {
                let start = self.addr(frame);
                // Neighbours are given back in one call.
                if count > 0 && ranges[count - 1].end == start {
                    ranges[count - 1].end += order.bytes();
                } else {
                    ranges[count] = start..start + order.bytes();
                    count += 1;
                }
            }
            // The frames are free: no thread needs their bytes.
            let mut discarded_pages = (discard(&ranges[..count]) >> PAGE_SHIFT) as u64;
            self.populated.fetch_sub(discarded_pages, Relaxed);
            returned_pages += discarded_pages;
            let mut all_gone = true;
            for &(frame, order) in runs.iter() {
                let part = discarded_pages.min(order.pages() as u64);
                discarded_pages -= part;
                all_gone &= part == order.pages() as u64;
                self.give_mixed_run(frame, order, part as u32);
            }
            if !all_gone {
                break;
            }
        }
        returned_pages
    }

    /// Takes free full runs of `pages` together, or fewer, the largest first. Returns them by
    /// address.
    fn take_full<'a>(
        &self,
        pages: u64,
        runs: &'a mut [(Frame, Order); RUNS],
    ) -> &'a [(Frame, Order)] {
        let (mut count, mut left) = (0, pages);
        while count < RUNS && left > 0 {
            let largest = (63 - left.leading_zeros()).min(MAX_ORDER as u32) as u8;
            let frame = (0..=largest).rev().find_map(|o| {
                let order = Order::new(o)?;
                self.take(order, FrameKind::Full).map(|run| (run, order))
            });
            let Some((run, order)) = frame else { break };
            runs[count] = (run, order);
            (count, left) = (count + 1, left - order.pages() as u64);
        }
        runs[..count].sort_unstable_by_key(|(frame, _)| *frame);
        &runs[..count]
    }

    #[allow(clippy::mut_from_ref)]
    fn run(&self, page: u32) -> &mut FrameRun {
        assert!(page < self.pages);
        // SAFETY: the zone has a record for each page, and zeros are valid. The caller holds the
        // lock of the free lists, and drops the reference before it asks for the next one.
        unsafe { &mut *self.runs.as_ptr().cast::<FrameRun>().add(page as usize) }
    }

    fn enter(&self, free: &mut FreeLists, run: u32, order: u8, kind: FrameKind) {
        let head = &mut free.heads[kind as usize][order as usize];
        let next = *head;
        *head = run;
        *self.run(run) = FrameRun { prev: NONE, next, mark: mark(kind, order) };
        if next != NONE {
            self.run(next).prev = run;
        }
        free.whole[kind as usize] += (order == MAX_ORDER) as u32;
    }

    fn remove(&self, free: &mut FreeLists, run: u32, order: u8, kind: FrameKind) {
        let FrameRun { prev, next, mark: found } = *self.run(run);
        debug_assert_eq!(found, mark(kind, order));
        match prev {
            NONE => free.heads[kind as usize][order as usize] = next,
            prev => self.run(prev).next = next,
        }
        if next != NONE {
            self.run(next).prev = prev;
        }
        self.run(run).mark = 0;
        free.whole[kind as usize] -= (order == MAX_ORDER) as u32;
    }

    /// Verifies the free lists: every run is marked, aligned and linked both ways, runs don't
    /// overlap, the sums hold, full runs have memory and empty ones none.
    ///
    /// # Errors
    /// The first condition that does not hold.
    pub fn check(&self, space: &dyn Space) -> Result<(), &'static str> {
        let free = self.free.lock();
        let mut full = 0u64;
        let mut listed = 0u64;
        for kind in [FrameKind::Full, FrameKind::Empty] {
            for order in 0..=MAX_ORDER {
                let (mut run, mut before) = (free.heads[kind as usize][order as usize], NONE);
                while run != NONE {
                    let record = *self.run(run);
                    if record.mark != mark(kind, order)
                        || record.prev != before
                        || run % (1 << order) != 0
                    {
                        return Err("a free run is mislinked");
                    }
                    let has_memory =
                        |page| space.is_populated(self.addr(page)) == (kind == FrameKind::Full);
                    if !(run..run + (1 << order)).all(has_memory) {
                        return Err(
                            "a free page has memory and should have none, or the other way round",
                        );
                    }
                    listed += 1 << order;
                    full += if kind == FrameKind::Full { 1 << order } else { 0 };
                    (before, run) = (run, record.next);
                    if listed > self.pages as u64 {
                        return Err("free runs overlap");
                    }
                }
            }
        }
        if full != self.full_free() {
            return Err("the count of free full pages is off");
        }
        if full > self.populated() {
            return Err("more full pages are free than there are");
        }
        Ok(())
    }
}

fn mark(kind: FrameKind, order: u8) -> u8 {
    1 + kind as u8 * 16 + order
}
