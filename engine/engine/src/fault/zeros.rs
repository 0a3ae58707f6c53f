//! First touches of memory that the program never touched before.
//!
//! Where pages can be write-protected at home (inline delivery with a userfaultfd), a program takes
//! no more memory than without memfold:
//! - A **read** maps the kernel's page of zeros, write-protected. That takes no memory, so it has no
//!   folio and counts as nothing. A stream of reads maps whole windows.
//! - A **write** fills its page. In a stream it fills a window of which one page is the probe
//!   (`policy/first_touches.rs`).
//! - A write to a page of zeros ends the protection. The kernel then makes a page in its place.
//!
//! Elsewhere each touch fills the window that the streams of loads advise.
//!
//! Once the program has a userfaultfd of its own, each touch fills its page alone (with page
//! protection, its block): the program expects a fault for each page that it has not touched.
use crate::area::{Area, Areas};
use crate::config::PagingKind;
use crate::fault::load::{LoadOutcome, LoadPurpose, Loads, align};
use crate::fault::readahead::Readahead;
use crate::folio::index::{FolioId, ShardGuard};
use crate::folio::loading::LoadingFolio;
use crate::folio::lru::LruList;
use crate::folio::{FolioState, TouchKind};
use crate::policy::first_touches::unproven_max;
use crate::reclaim::NoFrame;
use crate::residency::copy_in::FaultAccess;
use core::iter::once;
use memfold_os::Errno;
use memfold_os::uffd::Partial;
use memfold_os::units::{Order, PAGE_SIZE};

/// The kind of a first touch.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum FirstTouch {
    /// A read, or unknown.
    Read,
    /// A write to a missing page.
    Write,
    /// A write to a page of zeros that is mapped and protected.
    WriteToZeros,
}

impl Loads<'_> {
    /// Serves the first touch of page `key`, which no folio covers. Takes the guard of its shard.
    pub(crate) fn first_touch(
        &self,
        areas: &Areas,
        area: &Area,
        guard: ShardGuard<'_>,
        key: u64,
        touch: FirstTouch,
    ) -> LoadOutcome {
        let readahead = Readahead::new(self.engine);
        if !self.mapper.drops_clean() {
            let order = self.fill_order(readahead.advise(key).order);
            let load = self.begin_fill(area, &guard, key, order);
            drop(guard);
            let (outcome, start, end) = self.fill_frame(areas, area, load, key, false);
            readahead.note_loaded(key, start, end);
            return outcome;
        }
        if touch == FirstTouch::Read
            && let Some(outcome) = self.map_zeros(areas, area, &guard, key)
        {
            return outcome;
        }
        let table = self.table;
        let touched = table.tally().mapped() + table.tally().folded();
        let most = unproven_max(touched).saturating_sub(table.unproven());
        let advised = readahead.bound_order(self.first_touches.advise(key, most));
        let order = self.fill_order(advised);
        let load = self.begin_fill(area, &guard, key, order);
        drop(guard);
        let by_kernel = load.order() == Order::PAGE || touch == FirstTouch::WriteToZeros;
        let load = match by_kernel {
            true => match self.fill_home(areas, area, load, key, touch) {
                Ok(outcome) => return outcome,
                Err(load) => load,
            },
            false => load,
        };
        self.fill_frame(areas, area, load, key, true).0
    }

    /// Returns the order of the window to fill where streams advise `advised`: the least one if only
    /// what is touched may be filled.
    fn fill_order(&self, advised: Order) -> Order {
        match self.first_touches.is_exact() {
            true if self.config.paging == PagingKind::Protection => self.config.block_order,
            true => Order::PAGE,
            false => advised,
        }
    }

    /// Makes a `Loading` folio of the largest empty window around `key`, at most of order `want`.
    fn begin_fill(
        &self,
        area: &Area,
        guard: &ShardGuard<'_>,
        key: u64,
        want: Order,
    ) -> LoadingFolio {
        let order = self.empty_order(area, guard, key, want);
        self.table.begin_fill(guard, align(key, order), order)
    }

    /// Returns the order of the largest window around `key`, at most `want`, that holds no folio.
    fn empty_order(&self, area: &Area, guard: &ShardGuard<'_>, key: u64, want: Order) -> Order {
        let is_empty = |order: Order| {
            let start = align(key, order);
            start >= area.key
                && start + order.pages() as u64 <= area.key_end()
                && self.table.is_empty(guard, start, order)
        };
        let mut order = want;
        while order > Order::PAGE && !is_empty(order) {
            order = order.smaller().expect("above order 0");
        }
        order
    }

    /// Maps the kernel's page of zeros at the window around `key`, for a read. Returns `None` where
    /// the kernel may have to write to the page while it is protected.
    fn map_zeros(
        &self,
        areas: &Areas,
        area: &Area,
        guard: &ShardGuard<'_>,
        key: u64,
    ) -> Option<LoadOutcome> {
        let readahead = Readahead::new(self.engine);
        let advice = readahead.advise(key);
        let mut order = self.empty_order(area, guard, key, self.fill_order(advice.order));
        loop {
            let (start, pages) = (align(key, order), order.pages());
            // Behind the touched page there may be pages of zeros already.
            let keys = match advice.backward {
                true => start..key + 1,
                false => key..start + pages as u64,
            };
            let range = area.addr_of(keys.start)..area.addr_of(keys.end);
            // Until the pages are protected, a thread that makes a call on one of them waits.
            let leaving = self.holds.mark_leaving(once(range.clone()));
            if areas.is_pinned(keys.start, keys.end) || !leaving.may_evict(range.clone()) {
                if order == Order::PAGE {
                    return None;
                }
                order = Order::PAGE;
                continue;
            }
            // SAFETY: the shard is locked, and no folio covers the range. So what is missing there
            // is zeros.
            let result = unsafe { self.mapper.space().map_zeros(range.start, range.len()) };
            drop(leaving);
            readahead.note_loaded(key, keys.start, keys.end);
            let Err(Partial { done, errno }) = result else { return Some(LoadOutcome::Done) };
            if done > 0 {
                // Some pages aren't protected, so the engine would not notice writes to them.
                let id = self.table.add(guard, start, order, FolioState::Resident);
                self.table.tally().map(pages as u64);
                self.table.list_by_state(guard, id);
                return Some(LoadOutcome::Again);
            }
            match errno {
                Errno::AGAIN | Errno::NOMEM => return Some(LoadOutcome::Again),
                // A page was there, or the window reaches across a border of mappings.
                _ if order > Order::PAGE => order = Order::PAGE,
                _ => {
                    self.mapper.space().wake(range.start, range.len());
                    return Some(LoadOutcome::Done);
                }
            }
        }
    }

    /// Lets the kernel fill a window at home: one page, or pages of zeros whose protection ends.
    ///
    /// # Errors
    /// The load: there is no room, and it goes on.
    fn fill_home(
        &self,
        areas: &Areas,
        area: &Area,
        load: LoadingFolio,
        key: u64,
        touch: FirstTouch,
    ) -> Result<LoadOutcome, LoadingFolio> {
        let (keys, order) = (load.keys(), load.order());
        if !self.make_room(areas, order.pages() as u64) {
            return Err(load);
        }
        let (home, space) = (area.addr_of(keys.start), self.mapper.space());
        let mut guard = self.table.lock(key);
        let unprotect = || space.protect(home, order.bytes(), false);
        let outcome = match touch {
            FirstTouch::WriteToZeros => unprotect(),
            // SAFETY: the shard is locked, and the folio is `Loading` without a copy. So the page is
            // zeros if it is missing.
            _ => match unsafe { space.copy(home, self.mapper.frames().zeros(), PAGE_SIZE, true) } {
                // The page is there: it was read before, or was there before the area was managed.
                Err(Partial { errno: Errno::EXIST, .. }) => unprotect(),
                copied => copied.map_err(|partial| partial.errno),
            },
        };
        if outcome.is_err() {
            drop(guard);
            self.undo(area, load);
            if matches!(outcome, Err(Errno::AGAIN | Errno::NOMEM)) {
                return Ok(LoadOutcome::Again);
            }
            // A thread past the gate may have unmapped the page. The touch finds that.
            space.wake(home, order.bytes());
            return Ok(LoadOutcome::Done);
        }
        let id = load.end();
        let folio = self.table.get(&guard, id);
        folio.wanted.store(false, memfold_os::sync::atomic::Ordering::Relaxed);
        folio.state.set(FolioState::Resident);
        self.table.tally().map(keys.end - keys.start);
        self.table.list_by_state(&guard, id);
        if order == Order::PAGE {
            self.join_filled(areas, area, &mut guard, key);
        }
        self.first_touches.filled(key, keys.start, keys.end, false);
        self.table.notify(&guard);
        Ok(LoadOutcome::Done)
    }

    /// Joins the block of page `key` if all its pages were filled, none is stored, and mremap has
    /// moved none to another area.
    fn join_filled(&self, areas: &Areas, area: &Area, guard: &mut ShardGuard<'_>, key: u64) {
        let block = self.config.block_order;
        let (start, pages) = (align(key, block), block.pages() as u64);
        let fresh = |guard: &ShardGuard<'_>, key: u64| -> Option<FolioId> {
            let id = self.table.find(guard, key)?;
            let folio = self.table.get(guard, id);
            let is_fresh = folio.order() == Order::PAGE
                && folio.state.get() == FolioState::Resident
                && folio.touch.get() == TouchKind::UNKNOWN
                && folio.refused.get() == LruList::None
                && !folio.has_copy.get();
            is_fresh.then_some(id)
        };
        if block == Order::PAGE
            || start < area.key
            || start + pages > area.key_end()
            || areas.is_pinned(start, start + pages)
            || (start..start + pages).any(|key| fresh(guard, key).is_none())
        {
            return;
        }
        for key in start..start + pages {
            let id = fresh(guard, key).expect("it was just found");
            self.table.remove(guard, id, self.backing);
        }
        let id = self.table.add(guard, start, block, FolioState::Resident);
        self.table.list_by_state(guard, id);
    }

    /// Fills a frame with zeros and maps it. `is_sampled`: one of its pages becomes the probe.
    fn fill_frame(
        &self,
        areas: &Areas,
        area: &Area,
        load: LoadingFolio,
        key: u64,
        is_sampled: bool,
    ) -> (LoadOutcome, u64, u64) {
        let (frame, load) = match self.frame_for_loading(areas, area, load, key) {
            Ok(found) => found,
            Err(NoFrame::Again) => return (LoadOutcome::Again, key, key + 1),
        };
        let (id, keys, order) = (load.id(), load.keys(), load.order());
        // SAFETY: the frame is full, of this order, and only this thread has it.
        unsafe {
            core::ptr::write_bytes(self.mapper.frames().addr(frame) as *mut u8, 0, order.bytes())
        };
        let mut guard = self.table.lock(key);
        let access = FaultAccess { touch: TouchKind::UNKNOWN, write: true };
        let mapped_pages = self.finish(&mut guard, area, load, frame, LoadPurpose::Fault(access));
        let is_whole = mapped_pages == order.pages();
        if is_sampled {
            let is_window = is_whole && order > Order::PAGE;
            let is_probed = is_window && self.protect_probe(areas, area, &guard, id, key);
            self.first_touches.filled(key, keys.start, keys.end, is_probed);
        }
        let reached = mapped_pages > (key - keys.start) as usize;
        (if reached { LoadOutcome::Done } else { LoadOutcome::Again }, keys.start, keys.end)
    }

    /// Protects a page of a window that was just filled for page `key`. Returns `false` if the
    /// kernel may write to that page, or refuses.
    fn protect_probe(
        &self,
        areas: &Areas,
        area: &Area,
        guard: &ShardGuard<'_>,
        id: FolioId,
        key: u64,
    ) -> bool {
        let folio = self.table.get(guard, id);
        let probe = self.first_touches.choose_probe(key, folio.key(), folio.pages());
        let page = area.addr_of(probe);
        let leaving = self.holds.mark_leaving(once(page..page + PAGE_SIZE));
        let is_free =
            !areas.is_pinned(probe, probe + 1) && leaving.may_evict(page..page + PAGE_SIZE);
        let is_probed = is_free && self.mapper.space().protect(page, PAGE_SIZE, true).is_ok();
        if is_probed {
            self.table.begin_probe(folio);
        }
        is_probed
    }
}
