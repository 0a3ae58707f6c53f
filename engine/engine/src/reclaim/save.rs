//! Saving: a folio in the swap cache is stored, and its frame freed. If its bytes equal its stored
//! copy, they are not compressed again. A wanted or refused folio is mapped back.
use crate::area::Areas;
use crate::area::lock::AreasAccess;
use crate::backing::contexts::CodecContext;
use crate::backing::{Backing, BlockSlot};
use crate::folio::index::{FolioId, ShardGuard};
use crate::folio::lru::LruList;
use crate::folio::table::FolioTable;
use crate::folio::{FolioState, TouchKind};
use crate::limits::Limits;
use crate::memory::budget::Budget;
use crate::memory::frames::Frame;
use crate::memory::mapper::Mapper;
use crate::parts::{EngineParts, bytes};
use crate::reclaim::block_size::BlockSize;
use crate::reclaim::writeback::{RefusedFolio, WriteOutcome, Writeback};
use crate::residency::Residency;
use crate::stats_place::StatsPlace;
use memfold_os::sync::atomic::Ordering::Relaxed;
use memfold_os::units::Order;
use memfold_stats as stats;
use memfold_store::{BlockSet, SaveError, SaveReport};

/// A folio that this thread is saving.
struct SavingFolio {
    id: FolioId,
    key: u64,
    order: Order,
    frame: Frame,
    had_copy: bool,
    touch: TouchKind,
}

/// A folio in the swap cache that is to be mapped back.
struct ReturningFolio {
    id: FolioId,
    key: u64,
    order: Order,
}

/// The result for the oldest folio of a list.
enum SaveOutcome {
    /// The list is empty.
    None,
    /// It was stored, or is on another list.
    Settled,
    /// It is `Cached`, and the caller maps it back.
    Home(ReturningFolio),
}

/// Stores folios of the swap cache.
#[derive(Copy, Clone)]
pub(crate) struct Saver<'a> {
    stats: &'a StatsPlace,
    table: &'a FolioTable,
    mapper: &'a Mapper,
    backing: &'a Backing,
    budget: &'a Budget,
    engine: &'a EngineParts,
}

impl<'a> Saver<'a> {
    /// Returns the walk over the parts of an engine.
    #[inline]
    pub(crate) fn new(engine: &'a EngineParts) -> Saver<'a> {
        Saver {
            stats: &engine.stats,
            table: &engine.table,
            mapper: &engine.mapper,
            backing: &engine.backing,
            budget: &engine.budget,
            engine,
        }
    }

    /// Saves the oldest folio of a swap-cache list. Without `compress`, a dirty folio goes to
    /// `Dirty` instead, and a background thread is asked to compress it. Returns whether there was
    /// a folio.
    pub(crate) fn save_next(&self, hold: AreasAccess<'_>, list: LruList, compress: bool) -> bool {
        match self.save_oldest(list, compress) {
            SaveOutcome::None => return false,
            SaveOutcome::Settled => {}
            // `hold` requires that this thread holds no lock, and has no `Saving` folio.
            SaveOutcome::Home(home) => hold.with(|areas| self.map_back(areas, &home)),
        }
        true
    }

    fn save_oldest(&self, list: LruList, compress: bool) -> SaveOutcome {
        let residency = Residency::new(self.engine);
        if self.budget.is_frozen() {
            return SaveOutcome::None;
        }
        let mut context = self.backing.context();
        let Some((id, key)) = self.table.lists().isolate(list) else { return SaveOutcome::None };
        let mut guard = self.table.lock(key);
        if !self.table.is_still(&guard, id, key) {
            return SaveOutcome::Settled;
        }
        let folio = self.table.get(&guard, id);
        self.table.lists().detach(id);
        if folio.state.get() != FolioState::Cached {
            self.table.list_by_state(&guard, id);
            return SaveOutcome::Settled;
        }
        if folio.untouched.get() {
            stats::add(&self.stats.readahead_wasted, folio.pages());
            residency.release_frame(&guard, id);
            return SaveOutcome::Settled;
        }
        if !folio.has_copy.get() && !compress {
            let order = folio.order();
            self.table.lists().push(id, folio.key(), order.get(), LruList::Dirty);
            residency.ask_to_save(order);
            return SaveOutcome::Settled;
        }
        if !folio.has_copy.get()
            && BlockSize::new(self.engine).is_to_be_cut(folio.order(), folio.touch.get(), true)
        {
            BlockSize::new(self.engine).cut_into_pages(&mut guard, id);
            return SaveOutcome::Settled;
        }
        folio.state.set(FolioState::Saving);
        let (order, frame, touch) = (folio.order(), folio.frame.get(), folio.touch.get());
        let work = SavingFolio { id, key, order, frame, had_copy: folio.has_copy.get(), touch };
        if work.had_copy {
            for (to, slot) in context.fingerprints.iter_mut().zip(self.table.slots(folio)) {
                *to = slot.get().fingerprint;
            }
        }
        drop(guard);
        self.save(&mut context, &work, compress)
    }

    /// Stores a `Saving` folio: the blocks whose fingerprint is not that of their stored copy are
    /// compressed, if the caller may and the folio is not to be cut.
    fn save(&self, context: &mut CodecContext, work: &SavingFolio, compress: bool) -> SaveOutcome {
        let SavingFolio { id, key, order, had_copy, .. } = *work;
        let changed_blocks = self.changed_blocks(context, work);
        let is_cut = had_copy
            && BlockSize::new(self.engine).is_to_be_cut(
                order,
                work.touch,
                !changed_blocks.is_empty(),
            );
        let result = if changed_blocks.is_empty() && !is_cut {
            Ok(SaveReport::default())
        } else if !compress || is_cut {
            Err(SaveError::Cancelled)
        } else {
            self.store_changed(context, work, &changed_blocks)
        };
        if matches!(result, Err(SaveError::PoolFull | SaveError::Incompressible)) {
            let frame = self.mapper.frames().addr(work.frame) as *const u8;
            let refused = RefusedFolio { id, key, order, frame };
            if Writeback::new(self.engine).write_out(context, &refused) == WriteOutcome::Leaving {
                return SaveOutcome::Settled;
            }
        }
        let mut guard = self.table.lock(key);
        let is_wanted = self.table.get(&guard, id).wanted.load(Relaxed);
        match result {
            Ok(report) => {
                stats::add(&self.stats.saved_bytes, report.bytes);
                stats::add(&self.stats.payload_bytes, report.counted_bytes);
                self.accept(context, &guard, id, &changed_blocks, had_copy);
                if !is_wanted {
                    Residency::new(self.engine).release_frame(&guard, id);
                    return SaveOutcome::Settled;
                }
            }
            Err(SaveError::Cancelled) if is_wanted => {}
            Err(SaveError::Cancelled) => {
                self.put_off(&mut guard, id, is_cut);
                return SaveOutcome::Settled;
            }
            Err(error) => self.note_refused(&guard, id, error),
        }
        // It is in the swap cache until the caller has mapped it. The first thread that wants it
        // may take it from there.
        let folio = self.table.get(&guard, id);
        folio.state.set(FolioState::Cached);
        folio.wanted.store(false, Relaxed);
        self.table.list_by_state(&guard, id);
        self.table.notify(&guard);
        SaveOutcome::Home(ReturningFolio { id, key, order })
    }

    /// Compresses and stores the changed blocks of a `Saving` folio, after making room in the pool.
    /// Ends early if a thread wants the folio.
    fn store_changed(
        &self,
        context: &mut CodecContext,
        work: &SavingFolio,
        changed: &BlockSet,
    ) -> Result<SaveReport, SaveError> {
        Writeback::new(self.engine).relieve_pool();
        Limits::new(self.engine).bound_pool();
        let SavingFolio { id, key, order, .. } = *work;
        let frame = self.mapper.frames().addr(work.frame) as *const u8;
        let is_wanted = || self.table.is_wanted(id);
        let handles = &mut context.handles[..self.table.block_count(order)];
        let (store, worker) = (self.backing.store(), &mut context.worker);
        // SAFETY: the frame has the folio's size and holds its bytes. It stays full and unmoved as
        // long as the folio is `Saving`.
        unsafe {
            match &mut context.offload {
                Some(queue) if changed.count() > 1 => store
                    .save_through(worker, queue, frame, order, key, changed, is_wanted, handles),
                _ => store.save(worker, frame, order, key, changed, is_wanted, handles),
            }
        }
    }

    /// Puts a dirty folio, which was `Saving` and is not wanted, on `Dirty` again. With `is_cut`,
    /// its pages are listed there.
    fn put_off(&self, guard: &mut ShardGuard<'_>, id: FolioId, is_cut: bool) {
        let folio = self.table.get(guard, id);
        let order = folio.order();
        folio.state.set(FolioState::Cached);
        if is_cut {
            BlockSize::new(self.engine).cut_into_pages(guard, id);
        } else {
            self.table.lists().push(id, folio.key(), order.get(), LruList::Dirty);
        }
        Residency::new(self.engine).ask_to_save(order);
        self.table.notify(guard);
    }

    /// Notes that the store has refused a folio, and keeps no part of it. The folio's old copy is
    /// invalid at every offset (Z3). Without a swap file it stays in memory, marked active (Z4).
    fn note_refused(&self, guard: &ShardGuard<'_>, id: FolioId, error: SaveError) {
        let count = match error {
            SaveError::Verify => &self.stats.verify_mismatch,
            _ => &self.stats.save_refused,
        };
        stats::add(count, 1);
        let folio = self.table.get(guard, id);
        folio.state.set(FolioState::Cached);
        self.table.drop_copy(guard, id, self.backing);
        folio.active.set(true);
        let list = if error == SaveError::PoolFull { LruList::Full } else { LruList::Dense };
        folio.refused.set(list);
        self.budget.note_refusal();
    }

    /// Returns the blocks whose bytes differ from their stored copy. `context.fingerprints` has the
    /// old ones before, the new ones after.
    fn changed_blocks(&self, context: &mut CodecContext, work: &SavingFolio) -> BlockSet {
        let frame = self.mapper.frames().addr(work.frame) as *const u8;
        let block_bytes = self.table.block_order(work.order).bytes();
        let mut changed_blocks = BlockSet::EMPTY;
        for (i, old) in
            context.fingerprints.iter_mut().enumerate().take(self.table.block_count(work.order))
        {
            // SAFETY: block `i` lies in the frame, which is full, and no thread writes to it while
            // the folio is `Saving`.
            let block =
                unsafe { core::slice::from_raw_parts(frame.add(i * block_bytes), block_bytes) };
            let new = self.backing.fingerprint(block);
            if !work.had_copy || *old != new {
                changed_blocks.insert(i);
            }
            *old = new;
        }
        changed_blocks
    }

    /// Records the new objects of a folio whose save succeeded.
    fn accept(
        &self,
        context: &CodecContext,
        guard: &ShardGuard<'_>,
        id: FolioId,
        changed: &BlockSet,
        had_copy: bool,
    ) {
        let folio = self.table.get(guard, id);
        let (order, pages) = (folio.order(), folio.pages());
        let slots = self.table.slots(folio);
        let (count, saved) = (slots.len(), changed.count());
        for i in changed.iter() {
            let new =
                BlockSlot { handle: context.handles[i], fingerprint: context.fingerprints[i] };
            let old = slots[i].replace(new);
            if had_copy {
                self.backing.free(old.handle);
            }
        }
        folio.has_copy.set(true);
        folio.written.set(saved > 0);
        if !had_copy {
            self.table.tally().copy(pages);
        }
        let s = self.stats;
        stats::add(&s.blocks_saved, saved as u64);
        stats::add(&s.blocks_clean, (count - saved) as u64);
        if saved == 0 {
            stats::add(&s.clean_evictions, 1);
        } else {
            stats::add(&s.zswpout_folio[order.get() as usize], 1);
            stats::add(&s.zswpout, pages);
        }
    }

    /// Maps a folio back that is wanted, or that the store refused, unless another thread has taken
    /// it meanwhile.
    fn map_back(&self, areas: &Areas, home: &ReturningFolio) {
        let &ReturningFolio { id, key, order } = home;
        // No thread waits for an area that has ended.
        let Some(area) = areas.find_key(key) else { return };
        let mut guard = self.table.lock(key);
        let mut mapped_pages = 0;
        if self.table.is_still(&guard, id, key)
            && self.table.get(&guard, id).state.get() == FolioState::Cached
        {
            mapped_pages =
                Residency::new(self.engine).map_in(&mut guard, area.addr_of(key), id).pages;
        }
        if mapped_pages < order.pages() {
            // A thread that waits for a page that could not be mapped faults again.
            self.mapper.space().wake(area.addr_of(key), bytes(order.pages()));
        }
    }
}
