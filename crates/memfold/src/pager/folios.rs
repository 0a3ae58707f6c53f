//! Folio transitions that both walks make: a folio ends, is split, listed, let go of; what is
//! counted and who is woken.
use crate::area::Area;
use crate::folio::frames::Kind;
use crate::folio::index::{FolioId, ShardGuard};
use crate::folio::lru::List;
use crate::folio::{Folio, Slot, State, Touch};
use crate::pager::{Pager, bytes};
use crate::policy::workingset;
use crate::stats;
use memfold_store::Handle;
use memfold_sys::Errno;
use memfold_sys::sync::atomic::Ordering::Relaxed;
use memfold_sys::units::{Order, PAGE_SHIFT};

impl Pager {
    /// Whether the folio that was isolated with this key is alive: it may have been settled,
    /// listed, merged and its record used again before its shard was locked.
    pub(crate) fn is_still(&self, guard: &ShardGuard<'_>, id: FolioId, key: u64) -> bool {
        self.index.find(guard, key) == Some(id) && self.folios.get(guard, id).key() == key
    }

    /// More memory may be managed.
    ///
    /// # Errors
    /// ENOMEM: nearly all that can be described is.
    pub(crate) fn room_for_more(&self) -> Result<(), Errno> {
        if self.folios.is_crowded(&self.index) { Err(Errno::NOMEM) } else { Ok(()) }
    }

    /// The generation of this process: one more than its parent's, in a child of fork.
    pub(crate) fn generation(&self) -> u32 {
        self.generation.load(Relaxed)
    }

    /// In a child of fork, before its memory is registered.
    pub(crate) fn begin_generation(&self) {
        let before = self.generation.fetch_add(1, Relaxed);
        assert!(before < u32::MAX, "a generation is never used twice");
    }

    /// Whether the pages of a folio that are in the program's page table are known to equal their
    /// stored copy: all of them are write-protected. The kernel protects nothing in the copy that a child of fork gets, so what
    /// was clean in the parent's generation isn't in the child's.
    pub(crate) fn is_clean(&self, folio: &Folio) -> bool {
        folio.clean_in.get() == self.generation()
    }

    /// Ends a folio: no index entry, no stored copy, no list. Its frame must have been given back.
    pub(crate) fn remove_folio(&self, guard: &mut ShardGuard<'_>, id: FolioId) {
        self.drop_copy(guard, id);
        let folio = self.folios.get(guard, id);
        self.index.erase(guard, folio.key(), folio.order());
        // Who has isolated it will look it up again before using it.
        self.lru.detach(id);
        self.folios.destroy(guard, id);
    }

    /// Lets go of the stored copy of a folio. The bytes must be authoritative elsewhere (so it isn't
    /// `Partial`), or needed no longer.
    pub(crate) fn drop_copy(&self, guard: &ShardGuard<'_>, id: FolioId) {
        let folio = self.folios.get(guard, id);
        if !folio.has_copy.replace(false) {
            return;
        }
        folio.untouched.set(false);
        folio.clean_in.set(0);
        let folded = match folio.state.get() {
            State::Stored | State::Loading | State::Partial => folio.pages() - folio.pages_here(),
            _ => 0,
        };
        self.tally.drop_copy(folded, true);
        self.tally.drop_copy(folio.pages() - folded, false);
        for slot in self.folios.slots(folio) {
            let Slot { handle, fingerprint } = slot.get();
            if !handle.is_none() {
                self.free_copy(handle);
            }
            slot.set(Slot { handle: Handle::NONE, fingerprint });
        }
    }

    /// Splits a folio in two halves; returns the second. A block that would be cut in two loses its
    /// stored copy, so a `Stored` folio may only be split between blocks.
    pub(crate) fn split_folio(&self, guard: &mut ShardGuard<'_>, id: FolioId) -> FolioId {
        let left = self.folios.get(guard, id);
        left.clean_in.set(0);
        assert!(left.state.get() != State::Partial && left.here.get() == 0, "a block is in parts");
        let half = left.order().smaller().expect("a page can't be split");
        let cuts_block = half < self.config.block_order;
        let is_folded = matches!(left.state.get(), State::Stored | State::Loading);
        assert!(!cuts_block || !is_folded, "a stored block can't be split");
        let right_id =
            self.folios.create(guard, left.key() + half.pages() as u64, half, left.state.get());
        let right = self.folios.get(guard, right_id);
        right.frame.set(left.frame.get() + half.pages() as u32);
        right.age.set(left.age.get());
        right.active.set(left.active.get());
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
            self.free_copy(cut);
            left.untouched.set(false);
            right.untouched.set(false);
        }
        self.index.insert(guard, left.key(), half, id);
        self.index.insert(guard, right.key(), half, right_id);
        self.lru.resize(id, half.get());
        if left.writing.replace(0) != 0 {
            self.list_by_state(guard, id);
        }
        self.list_by_state(guard, right_id);
        stats::add(&self.stats.splits, 1);
        right_id
    }

    /// Puts a folio on the list that its state asks for.
    pub(crate) fn list_by_state(&self, guard: &ShardGuard<'_>, id: FolioId) {
        let folio = self.folios.get(guard, id);
        let list = match folio.state.get() {
            State::Resident | State::Partial => match folio.refused.get() {
                List::None if folio.active.get() => List::Active,
                List::None => List::Inactive,
                refused => refused,
            },
            State::Cached if folio.untouched.get() => List::Ahead,
            State::Cached if folio.has_copy.get() => List::Cooling,
            State::Cached => List::Dirty,
            State::Stored if self.swap.is_some() => List::Folded,
            State::Saving | State::Loading | State::Leaving | State::Stored => return,
        };
        self.lru.push(id, folio.key(), folio.order().get(), list);
    }

    /// Splits until one folio is exactly `[key, key + order)`; returns it.
    pub(crate) fn carve(
        &self,
        guard: &mut ShardGuard<'_>,
        mut id: FolioId,
        key: u64,
        order: Order,
    ) -> FolioId {
        while self.folios.get(guard, id).order() > order {
            let right = self.split_folio(guard, id);
            if key >= self.folios.get(guard, right).key() {
                id = right;
            }
        }
        id
    }

    /// Splits a folio so that no piece reaches across its page `at`.
    pub(crate) fn split_at(&self, guard: &mut ShardGuard<'_>, id: FolioId, at: usize) {
        let pages = self.folios.get(guard, id).order().pages();
        if at == 0 || at >= pages {
            return;
        }
        let right = self.split_folio(guard, id);
        self.split_at(guard, id, at.min(pages / 2));
        self.split_at(guard, right, at.saturating_sub(pages / 2));
    }

    /// A folio in the swap cache whose stored copy is true leaves memory: it becomes `Stored`, its
    /// frame is free.
    pub(crate) fn let_go(&self, guard: &ShardGuard<'_>, id: FolioId) {
        let folio = self.folios.get(guard, id);
        assert!(folio.has_copy.get(), "a folio without a copy can't leave memory");
        let pages = folio.pages();
        folio.state.set(State::Stored);
        folio.untouched.set(false);
        let folded = self.tally.fold(pages);
        stats::raise(&self.stats.peak_folded_bytes, folded << PAGE_SHIFT);
        self.frames.give(folio.frame.get(), folio.order(), Kind::Full);
        self.list_by_state(guard, id);
        self.shards.notify(guard);
    }

    /// Tells from the shadow of a folio that comes back whether it belongs to the working set (C4),
    /// and notes how it was asked for.
    pub(crate) fn note_refault(
        &self,
        guard: &ShardGuard<'_>,
        id: FolioId,
        touch: Touch,
        from_file: bool,
    ) {
        let folio = self.folios.get(guard, id);
        folio.touch.set(folio.touch.get().then(if from_file { Touch::UNKNOWN } else { touch }));
        let pages = folio.pages();
        let distance = workingset::distance(self.tally.clock(), folio.age.get());
        stats::add(&self.stats.workingset_refault, pages);
        let is_workingset = workingset::is_workingset(distance, self.tally.mapped(), folio.order());
        folio.active.set(self.config.workingset && is_workingset);
        if folio.active.get() {
            stats::add(&self.stats.workingset_activate, pages);
            stats::add(
                &self.stats.workingset_restore,
                if workingset::was_active(folio.age.get()) { pages } else { 0 },
            );
        }
    }

    /// Counts a load; one that needed the swap file, for a part at least, counts as from there.
    pub(crate) fn count_load(&self, order: Order, from_file: bool) {
        let s = &self.stats;
        let (folios, pages) =
            if from_file { (&s.swpin_folio, &s.pswpin) } else { (&s.zswpin_folio, &s.zswpin) };
        stats::add(&folios[order.get() as usize], 1);
        stats::add(pages, order.pages() as u64);
    }

    /// Makes everybody who waits for pages with keys `[start, end)` look again, in the kernel and
    /// in the engine.
    pub(crate) fn wake_waiters(&self, guard: &ShardGuard<'_>, area: &Area, start: u64, end: u64) {
        self.shards.notify(guard);
        self.space.wake(area.addr_of(start), bytes((end - start) as usize));
    }
}
