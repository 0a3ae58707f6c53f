//! Load: from the store (or from nothing) into a frame.
use crate::area::{Area, Areas};
use crate::folio::frames::Frame;
use crate::folio::index::{FolioId, ShardGuard};
use crate::folio::{Slot, State, Touch};
use crate::pager::Pager;
use crate::pager::background_requests::Window;
use crate::pager::codec_context::Context;
use crate::pager::copy_in::Access;
use crate::reclaim::NoFrame;
use crate::stats;
use memfold_sys::sync::atomic::Ordering::Relaxed;
use memfold_sys::units::Order;

/// What a load is for.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A fault: what is loaded is mapped, and how it was asked for is noted.
    Fault(Access),
    /// To be there when it is needed: it goes to the swap cache, unless somebody wants it by then.
    Ahead,
}

/// Where a load may take blocks from.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// From wherever they are: the caller may sleep.
    Any,
    /// From the pool. The block that is asked for is there; a window ends before the first that
    /// isn't.
    Pool,
}

/// How a load ended.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum Loaded {
    /// The page that was asked for is mapped (or, ahead of use, in the swap cache).
    Done,
    /// The kernel refuses for the moment; the folio is as it was, or waits in the swap cache.
    Again,
}

impl Pager {
    /// Loads the `Stored` folio that covers `key`, or as much of its neighbourhood as `want`
    /// allows, and maps it unless it is loaded ahead of use; or some pages of its block, or of the
    /// `Partial` folio that it is already. Takes the guard of the key's shard.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn load(
        &self,
        areas: &Areas,
        area: &Area,
        mut guard: ShardGuard<'_>,
        key: u64,
        want: Order,
        purpose: Purpose,
        from: Source,
    ) -> (Loaded, u64, u64) {
        let forced = purpose != Purpose::Ahead && self.is_forced_small();
        let want = if forced { self.config.block_order } else { want };
        let id = self.form_window(&mut guard, area, key, want, from);
        let folio = self.folios.get(&guard, id);
        let copied = match purpose {
            Purpose::Fault(access) => self.copied(folio, key, access, forced),
            Purpose::Ahead => None,
        };
        let first = self.folios.slots(folio)[0].get().handle;
        drop(guard);
        // While a frame is made free.
        self.store.prefetch(first);
        if let (Purpose::Fault(access), Some(keys)) = (purpose, copied)
            && let Some(all) = self.load_small(areas, area, id, keys.clone(), access)
        {
            let loaded = if all { Loaded::Done } else { Loaded::Again };
            return (loaded, keys.start, keys.end);
        }
        let (frame, id) = match self.frame_for_loading(areas, area, id, key) {
            Ok(found) => found,
            Err(NoFrame::Again) => return (Loaded::Again, key, key + 1),
        };
        let mut context = self.contexts.borrow(&self.store);
        let (start, order) = {
            let guard = self.shards.lock(key);
            let folio = self.folios.get(&guard, id);
            for (i, slot) in self.folios.slots(folio).iter().enumerate() {
                let Slot { handle, fingerprint } = slot.get();
                (context.handles[i], context.fingerprints[i]) = (handle, fingerprint);
            }
            (folio.key(), folio.order())
        };
        let from_file = self.decompress(&mut context, order, frame);
        drop(context);
        self.count_load(order, from_file);
        let mut guard = self.shards.lock(key);
        let pages = order.pages() as u64;
        match purpose {
            Purpose::Ahead => stats::add(&self.stats.swap_ra, if from_file { pages } else { 0 }),
            Purpose::Fault(access) => self.note_refault(&guard, id, access.touch, from_file),
        }
        self.tally.load(pages);
        let awaited = purpose == Purpose::Ahead && self.folios.is_wanted(id);
        let done = self.finish(&mut guard, area, id, frame, purpose);
        if awaited {
            // Somebody has caught up with the window: the stream goes on as if it had been there in
            // time.
            drop(guard);
            self.went_on(area, start, start, start + pages, from_file);
        }
        (
            if done > (key - start) as usize { Loaded::Done } else { Loaded::Again },
            start,
            start + pages,
        )
    }

    /// Fills the empty window around `key` with zeros and maps it. Takes the guard of the key's
    /// shard.
    pub(crate) fn zero_fill(
        &self,
        areas: &Areas,
        area: &Area,
        guard: ShardGuard<'_>,
        key: u64,
        want: Order,
    ) -> (Loaded, u64, u64) {
        let mut order = want;
        let mut start = align(key, order);
        while order > Order::PAGE
            && (start < area.key
                || start + order.pages() as u64 > area.key_end()
                || !self.index.is_empty(&guard, start, order))
        {
            order = order.smaller().expect("above order 0");
            start = align(key, order);
        }
        let id = self.folios.create(&guard, start, order, State::Loading);
        self.index.insert(&guard, start, order, id);
        drop(guard);
        let (frame, id) = match self.frame_for_loading(areas, area, id, key) {
            Ok(found) => found,
            Err(NoFrame::Again) => return (Loaded::Again, key, key + 1),
        };
        let guard = self.shards.lock(key);
        let folio = self.folios.get(&guard, id);
        let (start, order) = (folio.key(), folio.order());
        drop(guard);
        // SAFETY: the frame is full, of this order, and this thread's alone.
        unsafe { core::ptr::write_bytes(self.frames.addr(frame) as *mut u8, 0, order.bytes()) };
        let mut guard = self.shards.lock(key);
        let access = Access { touch: Touch::UNKNOWN, write: true };
        let done = self.finish(&mut guard, area, id, frame, Purpose::Fault(access));
        let reached = if done > (key - start) as usize { Loaded::Done } else { Loaded::Again };
        (reached, start, start + order.pages() as u64)
    }

    /// Ends a load: the frame holds the bytes. Returns how many pages are where they should be.
    fn finish(
        &self,
        guard: &mut ShardGuard<'_>,
        area: &Area,
        id: FolioId,
        frame: Frame,
        purpose: Purpose,
    ) -> usize {
        let folio = self.folios.get(guard, id);
        folio.frame.set(frame);
        if purpose == Purpose::Ahead && !folio.wanted.load(Relaxed) {
            folio.state.set(State::Cached);
            folio.untouched.set(folio.has_copy.get());
            self.list_by_state(guard, id);
            self.shards.notify(guard);
            return folio.order().pages();
        }
        self.map_in(guard, area.addr_of(folio.key()), id).pages
    }

    /// Makes one `Loading` folio of the largest aligned window around `key`, at most `want`, in
    /// which everything is `Stored` where `from` says: by splitting the folio that covers it, or by
    /// merging those that lie in it. A `Partial` folio is a window by itself.
    fn form_window(
        &self,
        guard: &mut ShardGuard<'_>,
        area: &Area,
        key: u64,
        want: Order,
        from: Source,
    ) -> FolioId {
        let id = self.index.find(guard, key).expect("the caller found a folio here");
        if self.folios.get(guard, id).state.get() == State::Partial {
            self.begin_loading(guard, id);
            return id;
        }
        let own = self.folios.get(guard, id).order();
        let least = own.min(self.config.block_order);
        let mut order = want.max(least);
        while order > own && !self.all_stored(guard, area, align(key, order), order) {
            order = order.smaller().expect("above another order");
        }
        while order > least
            && from == Source::Pool
            && self.reaches_file(guard, align(key, order), order)
        {
            order = order.smaller().expect("above another order");
        }
        let id = if order <= own {
            self.carve(guard, id, align(key, order), order)
        } else {
            self.merge(guard, key, order)
        };
        self.begin_loading(guard, id);
        id
    }

    /// Whether the swap file, or the remote store behind it, has a block of the `Stored` folios in
    /// the window at `start`.
    pub(crate) fn reaches_file(&self, guard: &ShardGuard<'_>, start: u64, order: Order) -> bool {
        if self.swap.as_ref().is_none_or(|swap| swap.objects() == 0) {
            return false;
        }
        let (mut at, end) = (start, start + order.pages() as u64);
        while at < end {
            let Some(id) = self.index.find(guard, at) else { return false };
            let folio = self.folios.get(guard, id);
            let block = self.folios.block_order(folio.order()).pages() as u64;
            let next = folio.end();
            let (first, last) =
                ((at - folio.key()) / block, (end.min(next) - folio.key()).div_ceil(block));
            let slots = &self.folios.slots(folio)[first as usize..last as usize];
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
            let Some(id) = self.index.find(guard, at) else { return false };
            let folio = self.folios.get(guard, id);
            if folio.state.get() != State::Stored || folio.order() < self.config.block_order {
                return false;
            }
            at = folio.end();
        }
        true
    }

    /// One folio in place of the `Stored` ones in the window of `order` around `key`.
    fn merge(&self, guard: &mut ShardGuard<'_>, key: u64, order: Order) -> FolioId {
        let start = align(key, order);
        let whole = self.folios.create(guard, start, order, State::Stored);
        let mut shadow = 0;
        let mut at = start;
        while at < start + order.pages() as u64 {
            let id = self.index.find(guard, at).expect("the window was checked");
            let part = self.folios.get(guard, id);
            let first = (at - start) as usize / self.config.block_order.pages();
            let slots = self.folios.slots(self.folios.get(guard, whole));
            for (to, from) in slots[first..].iter().zip(self.folios.slots(part)) {
                to.set(from.get());
            }
            if (at..part.end()).contains(&key) {
                shadow = part.age.get();
            }
            self.index.erase(guard, at, part.order());
            self.lru.detach(id);
            at = part.end();
            // Its objects belong to `whole` now. Who has isolated it will look it up again before
            // using it.
            self.folios.destroy(guard, id);
        }
        let merged = self.folios.get(guard, whole);
        merged.has_copy.set(true);
        merged.age.set(shadow);
        self.index.insert(guard, start, order, whole);
        stats::add(&self.stats.merges, 1);
        whole
    }

    /// A frame for a `Loading` folio; makes the folio smaller around `key` where a large frame
    /// can't be had.
    fn frame_for_loading(
        &self,
        areas: &Areas,
        area: &Area,
        mut id: FolioId,
        key: u64,
    ) -> Result<(Frame, FolioId), NoFrame> {
        loop {
            let guard = self.shards.lock(key);
            let order = self.folios.get(&guard, id).order();
            drop(guard);
            match self.frame_for(areas, order) {
                Ok(Some(frame)) => return Ok((frame, id)),
                Ok(None) => {
                    stats::add(&self.stats.frame_alloc_failed, 1);
                    stats::add(&self.stats.swpout_fallback[order.get() as usize], 1);
                    let smaller = Order::new(order.get() - 1).expect("below an order");
                    id = self.shrink_loading(area, id, key, smaller);
                }
                Err(NoFrame::Again) => {
                    self.undo_loading(area, id, key);
                    return Err(NoFrame::Again);
                }
            }
        }
    }

    /// Keeps the part of a `Loading` folio around `key`; the others are as before.
    fn shrink_loading(&self, area: &Area, id: FolioId, key: u64, order: Order) -> FolioId {
        let mut guard = self.shards.lock(key);
        let (start, end, wanted) = {
            let folio = self.folios.get(&guard, id);
            (folio.key(), folio.end(), folio.wanted.load(Relaxed))
        };
        let kept = self.carve(&mut guard, id, align(key, order), order);
        let mut at = start;
        while at < end {
            let piece = self.index.find(&guard, at).expect("a split folio covers what it covered");
            let folio = self.folios.get(&guard, piece);
            at += folio.pages();
            folio.wanted.store(false, Relaxed);
            if piece != kept {
                self.undo_locked(&mut guard, piece);
            }
        }
        if wanted {
            // Whoever waits for the folio looks again; some may find their part no longer loading.
            self.wake_waiters(&guard, area, start, end);
        }
        kept
    }

    fn undo_loading(&self, area: &Area, id: FolioId, key: u64) {
        let mut guard = self.shards.lock(key);
        let (start, end) = {
            let folio = self.folios.get(&guard, id);
            folio.wanted.store(false, Relaxed);
            (folio.key(), folio.end())
        };
        self.undo_locked(&mut guard, id);
        self.wake_waiters(&guard, area, start, end);
    }

    fn undo_locked(&self, guard: &mut ShardGuard<'_>, id: FolioId) {
        let folio = self.folios.get(guard, id);
        debug_assert!(folio.here.get() == 0, "its pages that are here would be forgotten");
        if folio.has_copy.get() {
            folio.state.set(State::Stored);
            self.list_by_state(guard, id);
        } else {
            self.remove_folio(guard, id);
        }
    }

    /// Decompresses or reads the blocks that `context.handles` names into a frame. Returns whether
    /// the swap file was needed.
    fn decompress(&self, context: &mut Context, order: Order, frame: Frame) -> bool {
        let (block, count) = (self.folios.block_order(order), self.folios.block_count(order));
        // SAFETY: the frame is full, of this order, and this thread's alone; the folio is
        // `Loading`, so its copy stays.
        unsafe { self.fetch(context, block, count, self.frames.page(frame)) }
    }

    /// Loads a window ahead of its use, if it still is stored.
    pub(crate) fn load_ahead(&self, window: Window) {
        let areas = self.areas.read();
        let Some(area) = areas.find_key(window.key).copied() else { return };
        let guard = self.shards.lock(window.key);
        let Some(id) = self.index.find(&guard, window.key) else { return };
        let folio = self.folios.get(&guard, id);
        // Single pages are mapped by the fault that meets them: `load_pages_after`.
        if folio.state.get() != State::Stored || folio.order() < self.config.block_order {
            return;
        }
        stats::add(&self.stats.readahead_windows, 1);
        self.load(&areas, &area, guard, window.key, window.order, Purpose::Ahead, Source::Any);
        self.ask_past_target();
    }
}

pub(crate) fn align(key: u64, order: Order) -> u64 {
    key & !(order.pages() as u64 - 1)
}
