//! Loads from the store into a frame.
use crate::area::lock::AreaLock;
use crate::area::{Area, Areas};
use crate::backing::contexts::CodecContext;
use crate::backing::{Backing, BlockSlot};
use crate::config::Config;
use crate::fault::readahead::Readahead;
use crate::folio::index::ShardGuard;
use crate::folio::loading::LoadingFolio;
use crate::folio::table::FolioTable;
use crate::folio::{Folio, FolioState};
use crate::holds::Holds;
use crate::limits::Limits;
use crate::memory::frames::Frame;
use crate::memory::mapper::Mapper;
use crate::parts::EngineParts;
use crate::policy::first_touches::FirstTouches;
use crate::reclaim::{NoFrame, Reclaim};
use crate::requests::background::LoadWindow;
use crate::residency::Residency;
use crate::residency::copy_in::FaultAccess;
use crate::stats_place::StatsPlace;
use memfold_os::sync::atomic::Ordering::Relaxed;
use memfold_os::units::Order;
use memfold_stats as stats;

/// The purpose of a load.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum LoadPurpose {
    /// A fault: the window is mapped, and its kind of access is recorded.
    Fault(FaultAccess),
    /// Readahead: the window goes to the swap cache, unless a thread wants it by then.
    Ahead,
}

impl LoadPurpose {
    /// Returns the purpose of a load of `folio`. A read of a page that had changed when it was last
    /// evicted counts as a write, because the program will most likely write to it again. That
    /// write is then no fault. If it isn't made, the next eviction finds the bytes unchanged.
    fn expecting(self, folio: &Folio) -> LoadPurpose {
        match self {
            LoadPurpose::Fault(access) => {
                let write = access.write || folio.order() == Order::PAGE && folio.written.get();
                LoadPurpose::Fault(FaultAccess { write, ..access })
            }
            LoadPurpose::Ahead => self,
        }
    }
}

/// The places that a load may take blocks from.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum BlockSource {
    /// The pool and the swap file: the caller may sleep.
    Any,
    /// The pool. The faulting block is there. A window ends before the first block that isn't.
    Pool,
}

/// The result of a load.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum LoadOutcome {
    /// The page is mapped or, in readahead, in the swap cache.
    Done,
    /// The kernel returned EAGAIN. The folio has its earlier state, or is in the swap cache.
    Again,
}

/// Loads folios.
#[derive(Copy, Clone)]
pub(crate) struct Loads<'a> {
    pub(super) config: &'a Config,
    pub(super) stats: &'a StatsPlace,
    pub(super) table: &'a FolioTable,
    pub(super) mapper: &'a Mapper,
    pub(super) backing: &'a Backing,
    pub(super) areas: &'a AreaLock,
    pub(super) first_touches: &'a FirstTouches,
    pub(super) holds: &'static Holds,
    pub(super) engine: &'a EngineParts,
}

impl<'a> Loads<'a> {
    /// Returns the walk over the parts of an engine.
    #[inline]
    pub(crate) fn new(engine: &'a EngineParts) -> Loads<'a> {
        Loads {
            config: &engine.config,
            stats: &engine.stats,
            table: &engine.table,
            mapper: &engine.mapper,
            backing: &engine.backing,
            areas: &engine.areas,
            first_touches: &engine.first_touches,
            holds: engine.holds,
            engine,
        }
    }

    /// Loads the `Stored` folio that covers `key`, or as much of its neighbourhood as `want`
    /// allows. Maps it, except for readahead. A single page or small block may be loaded alone,
    /// also into a `Partial` folio. Takes the guard of the key's shard.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn load(
        &self,
        areas: &Areas,
        area: &Area,
        mut guard: ShardGuard<'_>,
        key: u64,
        want: Order,
        purpose: LoadPurpose,
        from: BlockSource,
    ) -> (LoadOutcome, u64, u64) {
        let forced = purpose != LoadPurpose::Ahead && self.is_forced_small();
        let want = if forced { self.config.block_order } else { want };
        let load = self.form_window(&mut guard, area, key, want, from);
        let purpose = purpose.expecting(self.table.get(&guard, load.id()));
        let outcome = match purpose {
            LoadPurpose::Fault(access) => {
                self.pages_to_copy(self.table.get(&guard, load.id()), key, access, forced)
            }
            LoadPurpose::Ahead => None,
        };
        drop(guard);
        // The prefetch overlaps with the search for a frame.
        self.backing.store().prefetch(load.first_slot().handle);
        let load = match (purpose, outcome) {
            (LoadPurpose::Fault(access), Some(keys)) => {
                match self.load_small(areas, area, load, keys.clone(), access) {
                    Ok(true) => return (LoadOutcome::Done, keys.start, keys.end),
                    Ok(false) => return (LoadOutcome::Again, keys.start, keys.end),
                    Err(load) => load,
                }
            }
            _ => load,
        };
        self.load_into_frame(areas, area, load, key, purpose)
    }

    /// Loads a window into a frame, which is mapped for a fault. Returns the keys of the window, which
    /// is smaller than it was if there was no large frame.
    fn load_into_frame(
        &self,
        areas: &Areas,
        area: &Area,
        load: LoadingFolio,
        key: u64,
        purpose: LoadPurpose,
    ) -> (LoadOutcome, u64, u64) {
        let residency = Residency::new(self.engine);
        let (frame, load) = match self.frame_for_loading(areas, area, load, key) {
            Ok(found) => found,
            Err(NoFrame::Again) => return (LoadOutcome::Again, key, key + 1),
        };
        let (start, order) = (load.key(), load.order());
        let mut context = self.backing.context();
        self.note_slots(&mut context, &load);
        let from_file = self.decompress(&mut context, order, frame);
        drop(context);
        residency.count_load(order, from_file);
        let mut guard = self.table.lock(key);
        let pages = order.pages() as u64;
        match purpose {
            LoadPurpose::Ahead => {
                stats::add(&self.stats.swap_ra, if from_file { pages } else { 0 })
            }
            LoadPurpose::Fault(access) => {
                residency.note_refault(&guard, load.id(), access.touch, from_file)
            }
        }
        self.table.tally().load(pages);
        let awaited = purpose == LoadPurpose::Ahead && self.table.is_wanted(load.id());
        let mapped_pages = self.finish(&mut guard, area, load, frame, purpose);
        if awaited {
            // A thread has caught up with the window, so the stream advances as if it had been
            // loaded in time.
            drop(guard);
            let readahead = Readahead::new(self.engine);
            readahead.advance_stream(area, start, start, start + pages, from_file);
        }
        (
            if mapped_pages > (key - start) as usize {
                LoadOutcome::Done
            } else {
                LoadOutcome::Again
            },
            start,
            start + pages,
        )
    }

    /// Ends a load whose bytes are in the frame. Returns how many pages are in their final place.
    pub(super) fn finish(
        &self,
        guard: &mut ShardGuard<'_>,
        area: &Area,
        load: LoadingFolio,
        frame: Frame,
        purpose: LoadPurpose,
    ) -> usize {
        let id = load.end();
        let folio = self.table.get(guard, id);
        folio.frame.set(frame);
        if purpose == LoadPurpose::Ahead && !folio.wanted.load(Relaxed) {
            folio.state.set(FolioState::Cached);
            folio.untouched.set(folio.has_copy.get());
            self.table.list_by_state(guard, id);
            self.table.notify(guard);
            return folio.order().pages();
        }
        Residency::new(self.engine).map_in(guard, area.addr_of(folio.key()), id).pages
    }

    /// Makes one `Loading` folio of the largest aligned window around `key`. The window is at most
    /// `want`, and is all `Stored` in places that `from` allows. The folio that covers it is split,
    /// or the folios in it are merged. A `Partial` folio is a window of its own.
    fn form_window(
        &self,
        guard: &mut ShardGuard<'_>,
        area: &Area,
        key: u64,
        want: Order,
        from: BlockSource,
    ) -> LoadingFolio {
        let id = self.table.find(guard, key).expect("the caller found a folio here");
        if self.table.get(guard, id).state.get() == FolioState::Partial {
            return self.table.begin_load(guard, id);
        }
        let own = self.table.get(guard, id).order();
        let least = own.min(self.config.block_order);
        let mut order = want.max(least);
        while order > own && !self.all_stored(guard, area, align(key, order), order) {
            order = order.smaller().expect("above another order");
        }
        while order > least
            && from == BlockSource::Pool
            && self.reaches_file(guard, align(key, order), order)
        {
            order = order.smaller().expect("above another order");
        }
        let id = if order <= own {
            self.table.carve(guard, id, align(key, order), order, self.backing)
        } else {
            self.table.merge(guard, align(key, order), order, key)
        };
        self.table.begin_load(guard, id)
    }

    /// Returns whether a block of the `Stored` folios in the window at `start` is in the swap file,
    /// or in the remote store behind it.
    pub(crate) fn reaches_file(&self, guard: &ShardGuard<'_>, start: u64, order: Order) -> bool {
        if self.backing.swap().is_none_or(|swap| swap.objects() == 0) {
            return false;
        }
        let (mut at, end) = (start, start + order.pages() as u64);
        while at < end {
            let Some(id) = self.table.find(guard, at) else { return false };
            let folio = self.table.get(guard, id);
            let block = self.table.block_order(folio.order()).pages() as u64;
            let next = folio.end();
            let (first, last) =
                ((at - folio.key()) / block, (end.min(next) - folio.key()).div_ceil(block));
            let slots = &self.table.slots(folio)[first as usize..last as usize];
            if slots.iter().any(|slot| slot.get().handle.as_foreign().is_some()) {
                return true;
            }
            at = next;
        }
        false
    }

    fn all_stored(&self, guard: &ShardGuard<'_>, area: &Area, start: u64, order: Order) -> bool {
        let end = start + order.pages() as u64;
        if start < area.key || end > area.key_end() {
            return false;
        }
        let mut at = start;
        while at < end {
            let Some(id) = self.table.find(guard, at) else { return false };
            let folio = self.table.get(guard, id);
            if folio.state.get() != FolioState::Stored || folio.order() < self.config.block_order {
                return false;
            }
            at = folio.end();
        }
        true
    }

    /// Returns a frame for a load. Makes the load smaller around `key` if there is no large frame.
    /// If there is no frame at all, the load is undone.
    pub(super) fn frame_for_loading(
        &self,
        areas: &Areas,
        area: &Area,
        mut load: LoadingFolio,
        key: u64,
    ) -> Result<(Frame, LoadingFolio), NoFrame> {
        loop {
            let order = load.order();
            match Reclaim::new(self.engine).frame_for(areas, order) {
                Ok(Some(frame)) => return Ok((frame, load)),
                Ok(None) => {
                    stats::add(&self.stats.frame_alloc_failed, 1);
                    stats::add(&self.stats.swpout_fallback[order.get() as usize], 1);
                    let smaller = order.smaller().expect("there always is a frame of one page");
                    load = self.shrink(area, load, key, smaller);
                }
                Err(NoFrame::Again) => {
                    self.undo(area, load);
                    return Err(NoFrame::Again);
                }
            }
        }
    }

    fn shrink(&self, area: &Area, load: LoadingFolio, key: u64, order: Order) -> LoadingFolio {
        let keys = load.keys();
        let mut guard = self.table.lock(key);
        let is_wanted = self.table.is_wanted(load.id());
        let load = self.table.shrink_load(&mut guard, load, key, order, self.backing);
        if is_wanted {
            // Threads that wait for the folio look again, as some of their pages may no longer be
            // loading.
            Residency::new(self.engine).wake_waiters(&guard, area, keys.start, keys.end);
        }
        load
    }

    pub(super) fn undo(&self, area: &Area, load: LoadingFolio) {
        let keys = load.keys();
        let mut guard = self.table.lock(keys.start);
        self.table.undo_load(&mut guard, load, self.backing);
        Residency::new(self.engine).wake_waiters(&guard, area, keys.start, keys.end);
    }

    /// Records in `context` the slots of the blocks of a load.
    fn note_slots(&self, context: &mut CodecContext, load: &LoadingFolio) {
        let mut note = |i, BlockSlot { handle, fingerprint }| {
            (context.handles[i], context.fingerprints[i]) = (handle, fingerprint);
        };
        note(0, load.first_slot());
        if self.table.block_count(load.order()) > 1 {
            let guard = self.table.lock(load.key());
            let slots = self.table.slots(self.table.get(&guard, load.id()));
            slots.iter().enumerate().for_each(|(i, slot)| note(i, slot.get()));
        }
    }

    /// Decompresses or reads the blocks that `context.handles` names into a frame. Returns whether
    /// the swap file was needed.
    fn decompress(&self, context: &mut CodecContext, order: Order, frame: Frame) -> bool {
        let (block, count) = (self.table.block_order(order), self.table.block_count(order));
        // SAFETY: the frame is full, of this order, and only this thread has it. The folio is
        // `Loading`, so its copy stays.
        unsafe { self.backing.fetch(context, block, count, self.mapper.frames().page(frame)) }
    }

    /// Loads a window ahead of its use, if it still is stored.
    pub(crate) fn load_ahead(&self, window: LoadWindow) {
        let areas = self.areas.read();
        let Some(area) = areas.find_key(window.key).copied() else { return };
        let guard = self.table.lock(window.key);
        let Some(id) = self.table.find(&guard, window.key) else { return };
        let folio = self.table.get(&guard, id);
        // Single pages are mapped by the fault that meets them, in `load_pages_after`.
        if folio.state.get() != FolioState::Stored || folio.order() < self.config.block_order {
            return;
        }
        stats::add(&self.stats.readahead_windows, 1);
        self.load(
            &areas,
            &area,
            guard,
            window.key,
            window.order,
            LoadPurpose::Ahead,
            BlockSource::Any,
        );
        Limits::new(self.engine).ask_past_target();
    }
}

pub(crate) fn align(key: u64, order: Order) -> u64 {
    key & !(order.pages() as u64 - 1)
}
