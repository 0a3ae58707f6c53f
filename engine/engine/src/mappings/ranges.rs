//! Operations on ranges of keys, as the owner requests or the kernel reports them: page out, cold,
//! will need, pin, discard.
use crate::area::lock::AreasAccess;
use crate::area::{Area, Areas};
use crate::backing::{Backing, BlockSlot};
use crate::config::Config;
use crate::fault::load::BlockSource;
use crate::fault::{FaultOutcome, Faults, PageFault};
use crate::folio::FolioState;
use crate::folio::index::{FolioId, ShardGuard};
use crate::folio::lru::LruList;
use crate::folio::table::FolioTable;
use crate::memory::budget::Budget;
use crate::memory::frames::FrameKind;
use crate::memory::mapper::Mapper;
use crate::parts::{EngineParts, bytes};
use crate::reclaim::drop::DropBatch;
use crate::reclaim::save::Saver;
use crate::reclaim::writeback::Writeback;
use crate::reclaim::{Reclaim, ReclaimProgress};
use crate::requests::background::RequestQueue;
use crate::stats_place::StatsPlace;
use alloc::vec::Vec;
use core::ops::Range;
use memfold_os::Errno;
use memfold_os::memory::zone::Zone;
use memfold_os::page::Page;
use memfold_os::units::{MAX_PAGES, Order, PAGE_SHIFT, PAGE_SIZE};
use memfold_stats as stats;
use memfold_store::{BlockSet, Handle};

/// Evicts, discards and loads ranges of keys.
#[derive(Copy, Clone)]
pub(crate) struct KeyRanges<'a> {
    config: &'a Config,
    stats: &'a StatsPlace,
    table: &'a FolioTable,
    mapper: &'a Mapper,
    backing: &'a Backing,
    budget: &'a Budget,
    requests: &'a RequestQueue,
    scratch: &'a Zone,
    engine: &'a EngineParts,
}

impl<'a> KeyRanges<'a> {
    /// Returns the walk over the parts of an engine.
    #[inline]
    pub(crate) fn new(engine: &'a EngineParts) -> KeyRanges<'a> {
        KeyRanges {
            config: &engine.config,
            stats: &engine.stats,
            table: &engine.table,
            mapper: &engine.mapper,
            backing: &engine.backing,
            budget: &engine.budget,
            requests: &engine.requests,
            scratch: &engine.scratch,
            engine,
        }
    }

    /// Splits the folio that reaches across `key`, if it is in memory, so that none does (S5).
    fn cut_at(&self, guard: &mut ShardGuard<'_>, key: u64) {
        let Some(id) = self.table.find(guard, key) else { return };
        let folio = self.table.get(guard, id);
        if matches!(folio.state.get(), FolioState::Resident | FolioState::Cached) {
            self.table.split_at(guard, id, (key - folio.key()) as usize, self.backing);
        }
    }

    fn cut_edges(&self, keys: &Range<u64>) {
        for edge in [keys.start, keys.end] {
            if !edge.is_multiple_of(MAX_PAGES as u64) {
                self.cut_at(&mut self.table.lock(edge), edge);
            }
        }
    }

    /// Folds the mapped folios of a range now. A folio that reaches across an edge is split first.
    /// Returns the number of evicted pages.
    pub(crate) fn page_out(&self, areas: &Areas, keys: Range<u64>) -> u64 {
        let reclaim = Reclaim::new(self.engine);
        self.cut_edges(&keys);
        let before = self.table.tally().folded();
        let mut batch = DropBatch::new();
        let mut key = keys.start;
        while let Some((guard, at, id)) = self.table.lock_next(key..keys.end) {
            let folio = self.table.get(&guard, id);
            key = at.max(folio.end() - 1) + 1;
            let in_memory = matches!(folio.state.get(), FolioState::Resident | FolioState::Partial);
            let evictable = in_memory && self.table.lists().isolate_this(id);
            let start = folio.key();
            drop(guard);
            if evictable
                && reclaim.evict_isolated(areas, id, start, Order::MAX, &mut batch)
                    == ReclaimProgress::Again
            {
                break;
            }
            // Threads that touch a folio of the batch wait, so it is dropped soon.
            if reclaim.is_full(&batch) || key.is_multiple_of(MAX_PAGES as u64) {
                reclaim.drop_batch(&mut batch);
            }
        }
        reclaim.drop_batch(&mut batch);
        // The swap cache is saved oldest first, with this range among it.
        let saver = Saver::new(self.engine);
        for list in [LruList::Ahead, LruList::Cooling, LruList::Dirty] {
            while saver.save_next(AreasAccess::Read(areas), list, true) {}
        }
        Writeback::new(self.engine).drain_writes();
        self.table.tally().folded().saturating_sub(before)
    }

    /// Makes the mapped folios of a range the next to be evicted.
    pub(crate) fn cool(&self, keys: Range<u64>) {
        self.cut_edges(&keys);
        self.table.each(keys, |guard, id| {
            let folio = self.table.get(guard, id);
            if matches!(folio.state.get(), FolioState::Resident | FolioState::Partial) {
                folio.active.set(false);
                folio.refused.set(LruList::None);
                self.table.lists().push_tail(
                    id,
                    folio.key(),
                    folio.order().get(),
                    LruList::Inactive,
                );
            }
        });
    }

    /// Makes the pages of a pinned range writable, because the owner may pass them to the kernel to
    /// write to. Pages of zeros that were only read get folios, because no write to them is noticed
    /// any more. The caller holds `areas` for writing.
    pub(crate) fn unprotect(&self, area: &Area, keys: Range<u64>) {
        if !self.mapper.drops_clean() {
            return;
        }
        let (mut at, mut untouched) = (keys.start, Vec::new());
        self.table.each(keys.clone(), |guard, id| {
            let folio = self.table.get(guard, id);
            folio.clean_in.set(0);
            self.table.settle_probe(folio);
            untouched.push(at..folio.key().max(at));
            at = folio.end();
        });
        untouched.push(at..keys.end.max(at));
        let space = self.mapper.space();
        for key in untouched.into_iter().flatten() {
            if space.is_populated(area.addr_of(key)) {
                self.note_resident(key, key + 1);
            }
        }
        let len = bytes((keys.end - keys.start) as usize);
        while self.mapper.space().protect(area.addr_of(keys.start), len, false) == Err(Errno::AGAIN)
        {
            memfold_os::thread::yield_now();
        }
    }

    /// Drops the contents of a range: it reads as zeros afterwards. With `zap`, the pages are still
    /// in the page table, and are dropped from there. (Where the kernel reported the discard, it
    /// has dropped them.)
    ///
    /// The caller holds `areas` for writing, so no folio is being loaded or saved.
    pub(crate) fn discard_keys(&self, area: &Area, keys: Range<u64>, zap: bool) {
        let keys = keys.start.max(area.key)..keys.end.min(area.key_end());
        if keys.is_empty() {
            return;
        }
        for edge in [keys.start, keys.end] {
            self.unfold_across(edge);
        }
        if zap {
            // The whole range, because a load by copy that was undone may have mapped pages of a
            // folio that is stored.
            // SAFETY: the owner gives up the bytes.
            let outcome = unsafe {
                self.mapper
                    .space()
                    .discard(area.addr_of(keys.start), bytes((keys.end - keys.start) as usize))
            };
            outcome.expect("memfold: Dropping managed pages failed");
        }
        let mut dropped_pages = 0;
        self.table.each(keys.clone(), |guard, id| {
            let folio = self.table.get(guard, id);
            let (start, order) = (folio.key(), folio.order());
            debug_assert!(start >= keys.start && start + order.pages() as u64 <= keys.end);
            match folio.state.get() {
                FolioState::Resident | FolioState::Partial => {
                    self.table.tally().unmap(folio.pages_here())
                }
                FolioState::Cached => {
                    self.mapper.frames().give(folio.frame.get(), order, FrameKind::Full)
                }
                FolioState::Stored => {}
                FolioState::Loading | FolioState::Saving | FolioState::Leaving => {
                    unreachable!("a thread works on a folio while areas are written")
                }
            }
            dropped_pages += order.pages() as u64;
            self.table.remove(guard, id, self.backing);
        });
        stats::add(&self.stats.discarded_pages, dropped_pages);
        if dropped_pages > 0 {
            // Freed objects may leave the pool sparse: a background thread compacts it.
            self.requests.reclaim();
        }
    }

    /// Makes sure that no folio reaches across `edge`. A folio in memory is split. A stored block
    /// that would be cut in two is loaded first, page by page.
    pub(crate) fn unfold_across(&self, edge: u64) {
        if edge.is_multiple_of(MAX_PAGES as u64) {
            return;
        }
        let mut guard = self.table.lock(edge);
        let Some(id) = self.table.find(&guard, edge) else { return };
        let folio = self.table.get(&guard, id);
        if folio.key() == edge {
            return;
        }
        if !matches!(folio.state.get(), FolioState::Stored | FolioState::Partial) {
            let at = (edge - folio.key()) as usize;
            self.table.split_at(&mut guard, id, at, self.backing);
            return;
        }
        let block = self.table.block_order(folio.order());
        let start = crate::fault::load::align(edge, block);
        let id = self.table.carve(&mut guard, id, start, block, self.backing);
        if start == edge {
            return;
        }
        if !self.store_by_page(&mut guard, id) {
            self.unfold_block(&mut guard, id, edge);
        }
    }

    /// Stores single pages in place of a one-block `Stored` or `Partial` folio, except for pages
    /// that are `here`. Returns `false`, and changes nothing, if the store refused.
    ///
    /// The caller holds `areas` for writing, so no other thread uses the scratch.
    fn store_by_page(&self, guard: &mut ShardGuard<'_>, id: FolioId) -> bool {
        let folio = self.table.get(guard, id);
        let (key, order, slot) = (folio.key(), folio.order(), self.table.slots(folio)[0].get());
        let mut context = self.backing.context();
        let context = &mut *context;
        // SAFETY: the scratch holds the largest block, and belongs to this thread while it holds
        // `areas` for writing. A thread that frees a `Stored` folio's copy holds its shard, as this
        // thread does.
        unsafe {
            let to = Page::at(self.scratch.as_ptr());
            self.backing.fetch_pages(context, slot, order, 0..order.pages(), to)
        };
        let one = BlockSet::first(1);
        // These pages replace the block. So a full pool, or pages that don't compress, are no
        // reason to refuse. A thread that saves a folio sets the switch anew, and no thread saves
        // while `areas` is written.
        let _past = self.backing.store().past_limit();
        self.backing.store().set_refuse_incompressible(false);
        context.handles[..order.pages()].fill(Handle::NONE);
        let missing_pages: Vec<usize> =
            (0..order.pages()).filter(|page| !folio.is_here(key + *page as u64)).collect();
        for &page in &missing_pages {
            // SAFETY: this thread holds `areas` for writing, so no other thread writes to the
            // scratch. Page `page` of the block lies in the scratch.
            let outcome = unsafe {
                let from = self.scratch.as_ptr().add(page * PAGE_SIZE);
                context.fingerprints[page] =
                    self.backing.fingerprint(core::slice::from_raw_parts(from, PAGE_SIZE));
                let out = &mut context.handles[page..page + 1];
                self.backing.store().save(
                    &mut context.worker,
                    from,
                    Order::PAGE,
                    key + page as u64,
                    &one,
                    || false,
                    out,
                )
            };
            if outcome.is_err() {
                self.backing.store().free_many(&context.handles[..page]);
                return false;
            }
        }
        self.table.remove(guard, id, self.backing);
        for page in 0..order.pages() {
            let at = key + page as u64;
            let id = self.table.add(guard, at, Order::PAGE, FolioState::Resident);
            let folio = self.table.get(guard, id);
            if missing_pages.contains(&page) {
                let slot = BlockSlot {
                    handle: context.handles[page],
                    fingerprint: context.fingerprints[page],
                };
                self.table.slots(folio)[0].set(slot);
                folio.has_copy.set(true);
                folio.state.set(FolioState::Stored);
            }
            self.table.list_by_state(guard, id);
        }
        self.table.tally().store(missing_pages.len() as u64);
        stats::add(&self.stats.partial_writes, 1);
        true
    }

    /// Makes a one-block `Stored` or `Partial` folio `Cached`, except for pages that are `here`,
    /// and splits it at `edge`. Exceeds the target if it must, because no data may be lost.
    fn unfold_block(&self, guard: &mut ShardGuard<'_>, id: FolioId, edge: u64) {
        let folio = self.table.get(guard, id);
        let (key, order) = (folio.key(), folio.order());
        let slot = self.table.slots(folio)[0].get();
        let frame = self
            .mapper
            .frames()
            .take(order, FrameKind::Full)
            .or_else(|| self.mapper.gather(order).ok()?);
        let frame = frame.unwrap_or_else(|| {
            loop {
                let frame = self
                    .mapper
                    .frames()
                    .take(order, FrameKind::Empty)
                    .expect("memfold: No address space is left for a frame");
                // A frame that could not be filled has been freed.
                match self.mapper.frames().populate(self.mapper.space(), frame, order) {
                    Ok(()) => break frame,
                    Err(_) => memfold_os::thread::sleep_ns(100_000),
                }
            }
        });
        let mut context = self.backing.context();
        // SAFETY: the frame is full, of the block's order, and this thread's. A thread that frees
        // the folio's copy holds its shard, as this thread does.
        unsafe {
            let to = self.mapper.frames().page(frame);
            self.backing.fetch_pages(&mut context, slot, order, 0..order.pages(), to)
        };
        drop(context);
        self.table.tally().load(folio.pages() - folio.pages_here());
        folio.frame.set(frame);
        let resident_keys: Vec<u64> =
            (key..folio.end()).filter(|key| folio.is_here(*key)).collect();
        folio.here.set(0);
        folio.state.set(FolioState::Cached);
        self.table.lists().detach(id);
        self.table.list_by_state(guard, id);
        for page in resident_keys {
            let id = self.table.find(guard, page).expect("a split folio covers what it covered");
            let id = self.table.carve(guard, id, page, Order::PAGE, self.backing);
            let folio = self.table.get(guard, id);
            // A page that is `here` is newer than that in the frame.
            self.mapper.frames().give(folio.frame.get(), Order::PAGE, FrameKind::Full);
            folio.state.set(FolioState::Resident);
            self.table.lists().detach(id);
            self.table.list_by_state(guard, id);
        }
        if let Some(id) = self.table.find(guard, edge) {
            let at = (edge - self.table.get(guard, id).key()) as usize;
            self.table.split_at(guard, id, at, self.backing);
        }
    }

    /// Loads and maps every folded page of a range.
    ///
    /// # Errors
    /// The address of the first page that was not loaded, because the kernel returned EAGAIN.
    /// Unlock `areas` and continue there.
    pub(crate) fn need(&self, areas: &Areas, area: &Area, keys: Range<u64>) -> Result<(), usize> {
        let faults = Faults::new(self.engine);
        let (mut key, last) = (keys.start.max(area.key), keys.end.min(area.key_end()));
        while let Some((guard, at, id)) = self.table.lock_next(key..last) {
            let folio = self.table.get(&guard, id);
            let missing_key = (at..folio.end().min(last)).find(|key| !folio.is_here(*key));
            key = missing_key.unwrap_or(folio.end());
            if missing_key.is_none() {
                continue;
            }
            drop(guard);
            let fault = PageFault { addr: area.addr_of(key), ..PageFault::default() };
            if faults.serve(areas, area, fault, BlockSource::Any) == FaultOutcome::Again {
                return Err(fault.addr);
            }
            // In thread delivery another thread may still be loading it; look again.
            memfold_os::thread::yield_now();
        }
        Ok(())
    }

    /// Ends the management of areas in `[start, end)` (addresses): their folios are dropped. The
    /// caller holds `areas` for writing.
    pub(crate) fn forget(&self, areas: &mut Areas, start: usize, end: usize, zap: bool) {
        let first = (start / PAGE_SIZE) as u64;
        let last = (end / PAGE_SIZE) as u64;
        for (area, keys) in areas.parts(&(first..last)) {
            self.discard_keys(&area, keys, zap);
        }
        areas.remove(first, last);
    }

    /// Splits folios until none reaches across either end of `[start, end)` (page numbers).
    pub(crate) fn cut(&self, areas: &Areas, start: u64, end: u64) {
        for page in [start, end] {
            if let Some(area) = areas.find((page as usize) << PAGE_SHIFT) {
                self.unfold_across(page - area.start + area.key);
            }
        }
    }

    pub(crate) fn note_resident(&self, mut key: u64, end: u64) {
        while key < end {
            let order = largest_aligned(key, end, self.config.folio_order);
            let guard = self.table.lock(key);
            let id = self.table.add(&guard, key, order, FolioState::Resident);
            self.table.tally().map(order.pages() as u64);
            // It was counted as unmanaged until now.
            self.budget.quota().sub_outside(order.bytes() as u64);
            self.table.list_by_state(&guard, id);
            drop(guard);
            key += order.pages() as u64;
        }
    }

    /// Returns whether every folio of a range of keys is in the page table.
    pub(crate) fn is_home(&self, start: u64, end: u64) -> bool {
        let mut is_resident = true;
        self.table.each(start..end, |guard, id| {
            is_resident &= self.table.get(guard, id).state.get() == FolioState::Resident;
        });
        is_resident
    }
}

/// Returns the largest order, at most `most`, of an aligned run that starts at `key` and ends by
/// `end`.
pub(crate) fn largest_aligned(key: u64, end: u64, most: Order) -> Order {
    let mut order = most;
    while order > Order::PAGE
        && (!key.is_multiple_of(order.pages() as u64) || key + order.pages() as u64 > end)
    {
        order = order.smaller().expect("above order 0");
    }
    order
}
