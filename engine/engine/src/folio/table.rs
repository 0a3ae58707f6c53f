//! The table of all folios. They are found by key, locked by shard, listed by age, and counted by
//! the place of their bytes. The transitions that need no other part are here: a folio is added,
//! split, merged, listed, removed.
use crate::backing::{Backing, BlockSlot};
use crate::folio::index::{FolioId, FolioIndex, ShardGuard, Shards};
use crate::folio::loading::LoadingFolio;
use crate::folio::lru::{Lru, LruList};
use crate::folio::tally::PageTally;
use crate::folio::{Folio, FolioState, Folios};
use crate::stats_place::StatsPlace;
use alloc::sync::Arc;
use core::cell::Cell;
use core::ops::Range;
use memfold_os::Errno;
use memfold_os::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use memfold_os::units::{MAX_PAGES, Order};
use memfold_stats as stats;
use memfold_store::Handle;

/// All folios. Callers pass the guard of the key's shard to every method that reaches a folio.
///
/// Equations, while the engine is quiesced:
/// - Every `Cached` folio is on `Cooling`, `Ahead` or `Dirty`.
/// - Every `Resident` or `Partial` folio is on `Active`, `Inactive` or a list of
///   [`LruList::REFUSED`].
/// - Every other folio is on no list, or on `Folded` where there is a swap file.
/// - The [`PageTally`] and the count of unproven pages are the sums over the folios.
pub struct FolioTable {
    shards: Shards,
    index: FolioIndex,
    folios: Folios,
    lists: Lru,
    tally: PageTally,
    /// Whether `Stored` folios are listed too, because a swap file takes the oldest.
    lists_stored: bool,
    /// Pages of folios that are `is_probed`.
    unproven: AtomicU64,
    /// The generation of this process.
    generation: AtomicU32,
    stats: Arc<StatsPlace>,
}

impl FolioTable {
    /// Makes an empty table for folios made of blocks of order `block`, with shards of
    /// `shard_bytes`.
    ///
    /// # Errors
    /// The errors of reserving address space.
    pub fn new(
        block: Order,
        shard_bytes: u64,
        lists_stored: bool,
        stats: Arc<StatsPlace>,
    ) -> Result<FolioTable, Errno> {
        Ok(FolioTable {
            shards: Shards::new(shard_bytes),
            index: FolioIndex::new()?,
            folios: Folios::new(block)?,
            lists: Lru::new()?,
            tally: PageTally::new(),
            lists_stored,
            unproven: AtomicU64::new(0),
            generation: AtomicU32::new(1),
            stats,
        })
    }

    /// Locks the shard of `key`. A thread holds one shard at most.
    pub fn lock(&self, key: u64) -> ShardGuard<'_> {
        self.shards.lock(key)
    }

    /// Sleeps until a folio of the shard changes its state. The lock is released meanwhile.
    pub fn wait<'a>(&'a self, guard: ShardGuard<'a>) -> ShardGuard<'a> {
        self.shards.wait(guard)
    }

    /// Wakes every thread of the engine that waits for a folio of the shard.
    pub fn notify(&self, guard: &ShardGuard<'_>) {
        self.shards.notify(guard);
    }

    /// Returns the folio that covers `key`.
    pub fn find(&self, guard: &ShardGuard<'_>, key: u64) -> Option<FolioId> {
        self.index.find(guard, key)
    }

    /// Locks the shard of the first folio that covers a page with a key in the range, and returns the
    /// lock, the first such key, and the folio. Locks one shard at a time.
    pub fn lock_next(&self, keys: Range<u64>) -> Option<(ShardGuard<'_>, u64, FolioId)> {
        let mut key = keys.start;
        while key < keys.end {
            let end = ((key / MAX_PAGES as u64 + 1) * MAX_PAGES as u64).min(keys.end);
            let guard = self.lock(key);
            if let Some((at, id)) = self.index.first(&guard, key, end) {
                return Some((guard, at, id));
            }
            key = end;
        }
        None
    }

    /// Returns whether `2^order` pages from `key` hold no folio.
    pub fn is_empty(&self, guard: &ShardGuard<'_>, key: u64, order: Order) -> bool {
        self.index.is_empty(guard, key, order)
    }

    /// Returns whether a thread has the shard of `key` locked, or has ended while it had.
    pub fn is_held(&self, key: u64) -> bool {
        self.shards.is_held(key)
    }

    /// Returns the folio that covers `key` while the engine is quiesced, without a lock.
    ///
    /// # Safety
    /// - No thread changes the table while the reference lives.
    pub unsafe fn at_rest(&self, key: u64) -> Option<&Folio> {
        // SAFETY: by the caller's promise neither the index nor the folio changes.
        unsafe { self.index.peek(key).map(|id| self.folios.at_rest(id)) }
    }

    /// Returns the folio behind an id. See [`Folios::get`] for what must hold.
    ///
    /// # Panics
    /// If it has ended.
    pub fn get<'g>(&'g self, guard: &'g ShardGuard<'_>, id: FolioId) -> &'g Folio {
        self.folios.get(guard, id)
    }

    /// Returns whether a thread waits for a folio; needs no lock.
    pub fn is_wanted(&self, id: FolioId) -> bool {
        self.folios.is_wanted(id)
    }

    /// Returns the order of the blocks of a folio of this order.
    pub fn block_order(&self, order: Order) -> Order {
        self.folios.block_order(order)
    }

    /// Returns how many blocks a folio of this order has.
    pub fn block_count(&self, order: Order) -> usize {
        self.folios.block_count(order)
    }

    /// Returns the slots of a folio, one for each block.
    pub fn slots<'g>(&self, folio: &'g Folio) -> &'g [Cell<BlockSlot>] {
        self.folios.slots(folio)
    }

    /// Returns the objects of a folio's blocks.
    pub fn handles<'g>(
        &self,
        folio: &'g Folio,
    ) -> impl DoubleEndedIterator<Item = Handle> + use<'g> {
        self.folios.handles(folio)
    }

    /// Returns the lists by age.
    pub fn lists(&self) -> &Lru {
        &self.lists
    }

    /// Returns the counts of pages.
    pub fn tally(&self) -> &PageTally {
        &self.tally
    }

    /// Returns how many folios there are.
    pub fn count(&self) -> usize {
        self.folios.count()
    }

    /// Returns the bytes that index, folios, slots and lists take.
    pub fn used_bytes(&self) -> usize {
        self.index.used_bytes() + self.folios.used_bytes() + self.folios.count() * 16
    }

    /// Returns whether nearly all records are in use: see [`Folios::is_crowded`].
    pub fn is_crowded(&self) -> bool {
        self.folios.is_crowded(&self.index)
    }

    /// Sets the number of folios from which on they count as nearly all.
    #[cfg(test)]
    pub fn crowd_at(&self, count: usize) {
        self.folios.crowd_at(count);
    }

    /// Returns the look-ups by one key, and the part of them that found no folio.
    #[cfg(test)]
    pub fn looked(&self) -> [usize; 2] {
        self.index.looked.each_ref().map(|count| count.load(Relaxed))
    }

    /// Returns how often a shard was locked.
    #[cfg(test)]
    pub fn locked(&self) -> usize {
        self.shards.locked.load(Relaxed)
    }

    /// Calls `each` for every folio that covers a page with a key in the range, under its shard's
    /// lock.
    pub fn each(&self, keys: Range<u64>, mut each: impl FnMut(&mut ShardGuard<'_>, FolioId)) {
        let mut key = keys.start;
        while let Some((mut guard, at, id)) = self.lock_next(key..keys.end) {
            key = (at + 1).max(self.get(&guard, id).end());
            each(&mut guard, id);
        }
    }

    /// Adds a folio of `2^order` pages from `key`, which no folio covers. It is on no list and has
    /// no stored copy.
    pub fn add(
        &self,
        guard: &ShardGuard<'_>,
        key: u64,
        order: Order,
        state: FolioState,
    ) -> FolioId {
        let id = self.folios.create(guard, key, order, state);
        self.index.insert(guard, key, order, id);
        id
    }

    /// Replaces the `Stored` folios that make up `2^order` pages from `start` by one folio. Its
    /// shadow is that of the folio that covers `key`.
    pub fn merge(&self, guard: &mut ShardGuard<'_>, start: u64, order: Order, key: u64) -> FolioId {
        let whole = self.folios.create(guard, start, order, FolioState::Stored);
        let block_pages = self.block_order(order).pages();
        let (mut shadow, mut was_huge) = (0, true);
        let mut at = start;
        while at < start + order.pages() as u64 {
            let id = self.find(guard, at).expect("the caller has looked at all of them");
            let part = self.get(guard, id);
            let first = (at - start) as usize / block_pages;
            let slots = self.slots(self.get(guard, whole));
            for (to, from) in slots[first..].iter().zip(self.slots(part)) {
                to.set(from.get());
            }
            if (at..part.end()).contains(&key) {
                shadow = part.age.get();
            }
            was_huge &= part.was_huge.get();
            self.index.erase(guard, at, part.order());
            self.lists.detach(id);
            at = part.end();
            // Its objects belong to `whole` now. A thread that has isolated it will look it up
            // again before using it.
            self.folios.destroy(guard, id);
        }
        let merged = self.get(guard, whole);
        merged.has_copy.set(true);
        merged.age.set(shadow);
        merged.was_huge.set(was_huge);
        self.index.insert(guard, start, order, whole);
        stats::add(&self.stats.merges, 1);
        whole
    }

    /// Makes a `Stored` or `Partial` folio `Loading`, and returns its token to the caller.
    ///
    /// # Panics
    /// If it is neither.
    pub fn begin_load(&self, guard: &ShardGuard<'_>, id: FolioId) -> LoadingFolio {
        let folio = self.get(guard, id);
        assert!(
            matches!(folio.state.get(), FolioState::Stored | FolioState::Partial),
            "only what is stored is loaded"
        );
        self.lists.detach(id);
        folio.state.set(FolioState::Loading);
        self.loading(folio, id)
    }

    /// Adds a folio of `2^order` pages from `key`, which no folio covers, for the caller to fill.
    pub fn begin_fill(&self, guard: &ShardGuard<'_>, key: u64, order: Order) -> LoadingFolio {
        let id = self.add(guard, key, order, FolioState::Loading);
        self.loading(self.get(guard, id), id)
    }

    fn loading(&self, folio: &Folio, id: FolioId) -> LoadingFolio {
        let first = if folio.has_copy.get() { self.slots(folio)[0].get() } else { BlockSlot::NONE };
        LoadingFolio::new(id, folio.key(), folio.order(), first, folio.here.get())
    }

    /// Limits a load to the `2^order` pages around `key`. The others get their earlier state again.
    pub fn shrink_load(
        &self,
        guard: &mut ShardGuard<'_>,
        load: LoadingFolio,
        key: u64,
        order: Order,
        backing: &Backing,
    ) -> LoadingFolio {
        let (keys, start) = (load.keys(), key & !(order.pages() as u64 - 1));
        let rest = self.carve(guard, load.end(), start, order, backing);
        let mut at = keys.start;
        while at < keys.end {
            let piece = self.find(guard, at).expect("a split folio covers what it covered");
            let folio = self.get(guard, piece);
            at = folio.end();
            if piece != rest {
                self.end_unloaded(guard, piece, backing);
            }
        }
        let folio = self.get(guard, rest);
        folio.wanted.store(false, Relaxed);
        self.loading(folio, rest)
    }

    /// Undoes a load: the folio gets its earlier state again.
    pub fn undo_load(&self, guard: &mut ShardGuard<'_>, load: LoadingFolio, backing: &Backing) {
        self.end_unloaded(guard, load.end(), backing);
    }

    fn end_unloaded(&self, guard: &mut ShardGuard<'_>, id: FolioId, backing: &Backing) {
        let folio = self.get(guard, id);
        debug_assert!(folio.here.get() == 0, "its pages that are here would be forgotten");
        folio.wanted.store(false, Relaxed);
        if folio.has_copy.get() {
            folio.state.set(FolioState::Stored);
            self.list_by_state(guard, id);
        } else {
            self.remove(guard, id, backing);
        }
    }

    /// Returns whether the folio that was isolated with this key is alive. Before its shard was
    /// locked, another thread may have settled, listed or merged it, and its record may be used
    /// again.
    pub fn is_still(&self, guard: &ShardGuard<'_>, id: FolioId, key: u64) -> bool {
        self.index.find(guard, key) == Some(id) && self.folios.get(guard, id).key() == key
    }

    /// Returns an error if no more memory may be managed.
    ///
    /// # Errors
    /// ENOMEM: nearly all records are in use.
    pub fn room_for_more(&self) -> Result<(), Errno> {
        if self.folios.is_crowded(&self.index) { Err(Errno::NOMEM) } else { Ok(()) }
    }

    /// Returns the generation of this process: its parent's plus one, in a child of fork.
    pub fn generation(&self) -> u32 {
        self.generation.load(Relaxed)
    }

    /// Begins a generation in a child of fork, before its memory is registered.
    pub fn begin_generation(&self) {
        let before = self.generation.fetch_add(1, Relaxed);
        assert!(before < u32::MAX, "a generation is never used twice");
    }

    /// Returns whether the mapped pages of a folio are known to equal their stored copy, because
    /// all of them are write-protected. A child of fork gets unprotected pages from the kernel. So
    /// folios that were clean in the parent's generation are not clean in the child's.
    pub fn is_clean(&self, folio: &Folio) -> bool {
        folio.clean_in.get() == self.generation()
    }

    /// Returns the pages that were filled without proof that the program touches them.
    pub fn unproven(&self) -> u64 {
        self.unproven.load(Relaxed)
    }

    /// Notes that a page of a folio that was just filled is its probe.
    pub fn begin_probe(&self, folio: &Folio) {
        folio.is_probed.set(true);
        self.unproven.fetch_add(folio.pages(), Relaxed);
    }

    /// Ends the probe of a folio: it was touched, or the folio ends, is split or evicted. Returns
    /// `false` if it had none.
    pub fn settle_probe(&self, folio: &Folio) -> bool {
        let was_probed = folio.is_probed.replace(false);
        if was_probed {
            self.unproven.fetch_sub(folio.pages(), Relaxed);
        }
        was_probed
    }

    /// Ends a folio: no index entry, no stored copy, no list. Its frame must have been freed
    /// before.
    pub fn remove(&self, guard: &mut ShardGuard<'_>, id: FolioId, backing: &Backing) {
        self.drop_copy(guard, id, backing);
        let folio = self.folios.get(guard, id);
        self.settle_probe(folio);
        self.index.erase(guard, folio.key(), folio.order());
        // A thread that has isolated it will look it up again before using it.
        self.lists.detach(id);
        self.folios.destroy(guard, id);
    }

    /// Drops the stored copy of a folio. Its bytes must be authoritative elsewhere (so it isn't
    /// `Partial`), or not needed any more.
    pub fn drop_copy(&self, guard: &ShardGuard<'_>, id: FolioId, backing: &Backing) {
        let folio = self.folios.get(guard, id);
        if !folio.has_copy.replace(false) {
            return;
        }
        folio.untouched.set(false);
        folio.clean_in.set(0);
        let folded_pages = match folio.state.get() {
            FolioState::Stored | FolioState::Loading | FolioState::Partial => {
                folio.pages() - folio.pages_here()
            }
            _ => 0,
        };
        self.tally.drop_copy(folded_pages, true);
        self.tally.drop_copy(folio.pages() - folded_pages, false);
        for slot in self.folios.slots(folio) {
            let BlockSlot { handle, fingerprint } = slot.get();
            if !handle.is_none() {
                backing.free(handle);
            }
            slot.set(BlockSlot { handle: Handle::NONE, fingerprint });
        }
    }

    /// Splits a folio in two halves, and returns the second. A block that would be cut in two loses
    /// its stored copy, so a `Stored` folio may only be split between blocks.
    pub fn split(&self, guard: &mut ShardGuard<'_>, id: FolioId, backing: &Backing) -> FolioId {
        let left = self.folios.get(guard, id);
        left.clean_in.set(0);
        self.settle_probe(left);
        assert!(
            left.state.get() != FolioState::Partial && left.here.get() == 0,
            "a block is in parts"
        );
        let half = left.order().smaller().expect("a page can't be split");
        let cuts_block = half < self.folios.block_order(Order::MAX);
        let is_folded = matches!(left.state.get(), FolioState::Stored | FolioState::Loading);
        assert!(!cuts_block || !is_folded, "a stored block can't be split");
        let right_id =
            self.folios.create(guard, left.key() + half.pages() as u64, half, left.state.get());
        let right = self.folios.get(guard, right_id);
        right.frame.set(left.frame.get() + half.pages() as u32);
        right.age.set(left.age.get());
        right.active.set(left.active.get());
        right.written.set(left.written.get());
        right.was_huge.set(left.was_huge.get());
        right.untouched.set(left.untouched.get());
        right.touch.set(left.touch.get());
        right.refused.set(left.refused.get());
        self.index.erase(guard, left.key(), left.order());
        if cuts_block && left.has_copy.get() {
            self.tally.drop_copy(left.pages(), false);
        }
        let cut = self.folios.split(guard, id, right_id);
        let (left, right) = (self.folios.get(guard, id), self.folios.get(guard, right_id));
        if !cut.is_none() {
            backing.free(cut);
            left.untouched.set(false);
            right.untouched.set(false);
        }
        self.index.insert(guard, left.key(), half, id);
        self.index.insert(guard, right.key(), half, right_id);
        self.lists.resize(id, half.get());
        if left.writing.replace(0) != 0 {
            self.list_by_state(guard, id);
        }
        self.list_by_state(guard, right_id);
        stats::add(&self.stats.splits, 1);
        right_id
    }

    /// Puts a folio on the list for its state.
    pub fn list_by_state(&self, guard: &ShardGuard<'_>, id: FolioId) {
        let folio = self.folios.get(guard, id);
        let list = match folio.state.get() {
            FolioState::Resident | FolioState::Partial => match folio.refused.get() {
                LruList::None if folio.active.get() => LruList::Active,
                LruList::None => LruList::Inactive,
                refused => refused,
            },
            FolioState::Cached if folio.untouched.get() => LruList::Ahead,
            FolioState::Cached if folio.has_copy.get() => LruList::Cooling,
            FolioState::Cached => LruList::Dirty,
            FolioState::Stored if self.lists_stored => LruList::Folded,
            FolioState::Saving | FolioState::Loading | FolioState::Leaving | FolioState::Stored => {
                return;
            }
        };
        self.lists.push(id, folio.key(), folio.order().get(), list);
    }

    /// Splits until one folio is exactly `[key, key + order)`, and returns it.
    pub fn carve(
        &self,
        guard: &mut ShardGuard<'_>,
        mut id: FolioId,
        key: u64,
        order: Order,
        backing: &Backing,
    ) -> FolioId {
        while self.folios.get(guard, id).order() > order {
            let right = self.split(guard, id, backing);
            if key >= self.folios.get(guard, right).key() {
                id = right;
            }
        }
        id
    }

    /// Splits a folio until no piece reaches across its page `at`.
    pub fn split_at(&self, guard: &mut ShardGuard<'_>, id: FolioId, at: usize, backing: &Backing) {
        let pages = self.folios.get(guard, id).order().pages();
        if at == 0 || at >= pages {
            return;
        }
        let right = self.split(guard, id, backing);
        self.split_at(guard, id, at.min(pages / 2), backing);
        self.split_at(guard, right, at.saturating_sub(pages / 2), backing);
    }
}
