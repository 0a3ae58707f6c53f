//! Folios: what the index knows of an aligned run of pages.
//!
//! # A folio's states
//! `State` in here; the shard lock guards every change.
//!
//! | state | the authoritative bytes | may there be a stored copy? |
//! |---|---|---|
//! | `Resident` | the program's page table; a missing page is zeros | yes, believed only after its fingerprint matched, or while it is `clean` |
//! | `Partial` | of the pages that are `here` as of a `Resident` one; of the others the store | always |
//! | `Leaving` | both: the page table's pages are protected, and equal the stored copy | always |
//! | `Cached` | the frame | yes, likewise; certainly true if `untouched` |
//! | `Saving` | the frame, which may not move | yes, until replaced |
//! | `Loading` | the store; zeros if there is no copy; of pages that are `here` as of a `Partial` one | yes, unless it is a first touch |
//! | `Stored` | the store | always |
//!
//! | from -> to | by | what is asserted |
//! |---|---|---|
//! | none -> `Loading` | `fault/load.rs` `zero_fill` | the window is empty and inside its area |
//! | none -> `Resident` | `mappings/ranges.rs` `note_resident` (adoption) | `Areas::add`: it overlaps no area |
//! | none -> `Stored` | `mappings/ranges.rs` `store_by_page` (a block cut by a discard) | every page was saved, or nothing changes |
//! | `Stored` -> `Loading` | `fault/load.rs` `form_window` | all in the window is `Stored` (`all_stored`); a block is never cut (`split_folio`) |
//! | `Cached`, one block -> `Cached`, pages | `reclaim/block_size.rs` `cut_into_pages` | the frame holds all of it; the block's copy ends |
//! | `Resident`, pages -> `Resident`, one block | `reclaim/block_size.rs` `join_block` | every page is `Resident` and none is pinned; their copies end |
//! | `Stored` -> `Loading` -> `Stored` | `reclaim/recompress.rs` `recompress_block` | the handle is still the block's |
//! | `Stored` -> `Cached` | `mappings/ranges.rs` `unfold_block` | |
//! | `Partial` -> pages, `Resident` and `Stored` or `Cached` | `mappings/ranges.rs` `store_by_page`, `unfold_block` | every page that isn't `here` was saved, or lies in the frame |
//! | `Partial` -> `Loading` -> `Partial`, `Resident` | `residency/copy_in.rs` `copy_in` | nothing that is `here` is copied |
//! | `Loading` -> `Partial` | `residency/copy_in.rs` `copy_in`: some of its pages were asked for | |
//! | `Loading` -> `Resident` | `residency/mod.rs` `map_in` | |
//! | `Loading` -> `Cached` | `fault/load.rs` `finish`, ahead of use and not wanted; `map_in` for what the kernel didn't take | |
//! | `Loading` -> `Stored` or none | `folio/table.rs` `end_unloaded`: no frame, as the kernel refuses for the moment, or only a smaller frame | |
//! | `Resident` -> `Cached` | `residency/mod.rs` `map_out` | the frame was empty: EEXIST is a panic (`carry_out`) |
//! | `Resident`, `Partial` -> `Leaving` | `reclaim/drop.rs` `prepare_eviction` | it is `clean`, and not pinned |
//! | `Leaving` -> `Stored` | `reclaim/drop.rs` `settle`: its pages were dropped | there is a copy |
//! | `Leaving` -> `Resident`, `Partial` | `reclaim/drop.rs` `settle`: the kernel has refused, for some pages at least | |
//! | `Resident` -> none | `mappings/release.rs` `leave_at_home` (locked, or marked) | every folio of the part is `Resident` (`is_home`) |
//! | `Cached` -> `Resident` | `fault/mod.rs` `rescue` -> `map_in` | |
//! | `Cached` -> `Saving` | `reclaim/save.rs` `save_next` | the index still names the isolated folio |
//! | `Cached` -> `Stored` | `save_next`, `untouched` -> `release_frame` | there is a copy (`release_frame`) |
//! | `Saving` -> `Stored` | `save` -> `accept` -> `release_frame` | there is a copy (`release_frame`) |
//! | `Saving` -> `Cached` | `save`: changed, and the caller may not compress; goes to `Dirty` | |
//! | `Saving` -> `Cached` -> `Resident` | `save`, `map_back`: wanted, or refused by the store | still `Cached` (`map_back`) |
//! | `Saving` -> `Cached` with a ticket | `reclaim/writeback.rs` `write_out`: a raw write is under way; on no list | not wanted |
//! | `Cached` with a ticket -> `Stored` | `end_raw` -> `release_frame` | the ticket is the write's |
//! | at rest -> none | `folio/table.rs` `remove` (discard, unmap) | never `Loading` or `Saving` (`discard_keys`) |
//!
//! A move may stop half-way. The folio is then split at that page: what moved has the new state,
//! the rest the old one (`settle_pieces`). `Pager::check` verifies every folio, list and sum while
//! nobody works; tests call it after each round.
pub mod slab;
pub mod index;
pub mod lru;
pub mod tally;
pub mod loading;
pub mod table;

use crate::backing::BlockSlot;
use crate::folio::index::{FolioId, FolioIndex, ShardGuard};
use crate::folio::lru::LruList;
use crate::folio::slab::Slab;
use core::cell::Cell;
use core::ops::Range;
use memfold_store::Handle;
use memfold_sys::Errno;
use memfold_sys::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use memfold_sys::units::{MAX_ORDER, Order};

/// Where the one authoritative copy of a folio's bytes is, and who may change that.
///
/// ```text
///            zero-fill, load                map in
///   (none) ------------------> Loading -----------------> Resident <----------+
///                                 |                          |  map out       | rescue
///                                 | read-ahead               v                |
///   Stored <---------------------------------------------- Cached -----------+
///     |  saved, or clean         Saving <------------------- |
///     +------ Loading               +-- wanted: back to Resident
///
///   Resident and clean -- dropped, with others: Leaving --> Stored
///
///   Stored --- some pages of a block: Loading --> Partial --- the others --> Resident
/// ```
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FolioState {
    /// In the program's page table. A page that is missing there was discarded by the program and
    /// is zeros. A stored copy may be kept; it is only believed after its fingerprint matched.
    Resident,
    /// One block of which some pages are in the program's page table (`here`): what is true of those
    /// of a `Resident` folio is true of them, and what is true of a `Stored` one of the others.
    Partial,
    /// In the program's page table, write-protected and equal to the stored copy, and on its way out
    /// of there: it becomes `Stored`. Whoever touches it waits for that.
    Leaving,
    /// In the swap cache: the bytes are in the folio's frame, the program can't reach them.
    Cached,
    /// In the swap cache, being compared, compressed and stored. The frame stays authoritative
    /// until the store has succeeded, and may not move meanwhile.
    Saving,
    /// In the swap cache, its frame being filled. The store (or nothing, for zeros) is
    /// authoritative until it is mapped.
    Loading,
    /// In the store only.
    Stored,
}

/// How a folio was asked for when it was last loaded from the pool, which decides the size of its
/// blocks (`reclaim/block_size.rs`).
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct TouchKind(u8);

impl TouchKind {
    /// Not loaded yet, or from the swap file.
    pub const UNKNOWN: TouchKind = TouchKind(0);
    /// As a part of a stream.
    pub const STREAM: TouchKind = TouchKind(1);
    /// By itself.
    pub const RANDOM: TouchKind = TouchKind(2);
    /// Page by page, but all at about the same time, so that its block was joined. Counts from
    /// there if it is asked for by itself.
    pub const JOINED: TouchKind = TouchKind(128);

    /// How often it was asked for by itself since it last was in another way, at most 127.
    pub fn random_count(self) -> u8 {
        (self.0 & !TouchKind::JOINED.0).saturating_sub(!self.is_joined() as u8)
    }

    /// Whether its block was joined since it last was part of a stream.
    pub fn is_joined(self) -> bool {
        self.0 >= TouchKind::JOINED.0
    }

    /// What is known of the folio after one more access of the kind `next`. Random accesses are
    /// counted up to 126 times, any other kind replaces what was known, and `UNKNOWN` changes
    /// nothing.
    #[must_use]
    pub fn then(self, next: TouchKind) -> TouchKind {
        match next {
            TouchKind::UNKNOWN => self,
            TouchKind::RANDOM if self.random_count() < 126 => {
                TouchKind(self.0.max(TouchKind::STREAM.0) + 1)
            }
            TouchKind::RANDOM => self,
            next => next,
        }
    }
}

/// What is known of a run of pages. Whoever has a reference has borrowed the guard of the shard of
/// the folio's key, so no other thread has one; only `key` and `wanted` may be asked without.
///
/// A record of zeros is valid, and is no folio: `number` is 0.
#[repr(C)]
pub struct Folio {
    /// Slots in the slab of their count; 0 for none. First, as the slab links free records by their
    /// first 4 bytes.
    array: Cell<u32>,
    /// First page of its frame, while in the swap cache.
    pub frame: Cell<u32>,
    /// One more than its key, the first page in the index's key space; 0 for no folio.
    number: AtomicU64,
    /// The block, if the folio is one; otherwise `array` names the slots.
    slot: Cell<BlockSlot>,
    /// The shadow of its last eviction (`policy/workingset.rs`).
    pub age: Cell<u32>,
    /// The raw write that is under way of a `Cached` folio, which is on no list meanwhile; 0 for
    /// none.
    pub writing: Cell<u32>,
    /// `Resident`, `Partial` or `Leaving`: the generation of the process (`folio/table.rs`) in which
    /// its pages equal their stored copy and all are write-protected, so that this stays so until a
    /// fault says otherwise; 0 for none. Cleared under the shard lock before the protection goes.
    pub clean_in: Cell<u32>,
    /// `Partial`, or `Loading` or `Leaving` from there: which of its pages are in the program's page
    /// table, a bit for each; not all. 0 for every other folio.
    pub here: Cell<u16>,
    /// Pages: `2^order`. `array` has the slots of a folio of this order, so nobody else may change
    /// it.
    order: Cell<Order>,
    /// See [`FolioState`].
    pub state: Cell<FolioState>,
    /// Every block has a stored copy.
    pub has_copy: Cell<bool>,
    /// The frame is known to equal the stored copy: loaded ahead, and never mapped since.
    pub untouched: Cell<bool>,
    /// Touched again soon after it was evicted: protect it.
    pub active: Cell<bool>,
    /// How it was last asked for.
    pub touch: Cell<TouchKind>,
    /// `Resident`, or on its way there: the list of [`List::REFUSED`] for it if nothing took it when it
    /// was last to leave, else `None`.
    pub refused: Cell<LruList>,
    /// Somebody waits for it: whoever loads or saves it maps it when done. Set under the shard
    /// lock, polled without.
    pub wanted: AtomicBool,
}

const _: () =
    assert!(core::mem::offset_of!(Folio, array) == 0, "a slab writes there when a record is free");

impl Folio {
    /// Its first page, in the index's key space.
    pub fn key(&self) -> u64 {
        self.number.load(Relaxed).wrapping_sub(1)
    }

    /// Pages: `2^order`.
    pub fn order(&self) -> Order {
        self.order.get()
    }

    /// Pages.
    pub fn pages(&self) -> u64 {
        self.order().pages() as u64
    }

    /// Past its last page, in the index's key space.
    pub fn end(&self) -> u64 {
        self.key() + self.pages()
    }

    /// Whether the page with a key is in the program's page table, or is zeros, and isn't leaving.
    pub fn is_here(&self, key: u64) -> bool {
        debug_assert!((self.key()..self.end()).contains(&key));
        match self.state.get() {
            FolioState::Resident => true,
            FolioState::Partial | FolioState::Loading => {
                self.here.get() & self.bits(key..key + 1) != 0
            }
            _ => false,
        }
    }

    /// How many of its pages are in the program's page table, as it is counted.
    pub fn pages_here(&self) -> u64 {
        match (self.state.get(), self.here.get()) {
            (FolioState::Resident, _) | (FolioState::Leaving, 0) => self.pages(),
            (_, here) => here.count_ones() as u64,
        }
    }

    /// The bits in `here` of the pages with some of its keys; 0 if it is too large for that.
    pub fn bits(&self, keys: Range<u64>) -> u16 {
        if self.order() > PARTIAL_MAX {
            return 0;
        }
        let below = |key: u64| (1u32 << (key - self.key())) - 1;
        (below(keys.end) & !below(keys.start)) as u16
    }
}

/// The largest block of which some pages may be loaded alone.
pub const PARTIAL_MAX: Order = match Order::new(4) {
    Some(order) => order,
    None => unreachable!(),
};
const _: () =
    assert!(PARTIAL_MAX.pages() == u16::BITS as usize, "`Folio::here` has a bit for each");

/// All folios and their block slots.
pub struct Folios {
    folios: Slab<Folio>,
    arrays: [Slab<BlockSlot>; MAX_ORDER as usize + 1],
    block: Order,
    /// From so many folios on the engine makes no more of them than it must.
    crowded: AtomicUsize,
    told_crowded: AtomicBool,
}

/// Most folios that can be described: 64 Mi (1 TiB of 16 KiB folios).
const LIMIT: u32 = 1 << 26;
const CROWDED: usize = (LIMIT / 8 * 7) as usize;

impl Folios {
    /// Room for folios made of blocks of order `block`.
    ///
    /// # Errors
    /// What reserving address space says.
    pub fn new(block: Order) -> Result<Folios, Errno> {
        let mut arrays = [const { None }; MAX_ORDER as usize + 1];
        for (order, place) in arrays.iter_mut().enumerate() {
            *place = Some(Slab::new(LIMIT >> order, 1 << order)?);
        }
        Ok(Folios {
            folios: Slab::new(LIMIT, 1)?,
            arrays: arrays.map(|a| a.expect("filled above")),
            block,
            crowded: AtomicUsize::new(CROWDED),
            told_crowded: AtomicBool::new(false),
        })
    }

    /// A new folio without a stored copy. The guard is that of the shard of `key`.
    pub fn create(
        &self,
        guard: &ShardGuard<'_>,
        key: u64,
        order: Order,
        state: FolioState,
    ) -> FolioId {
        assert!(guard.covers(key), "a folio is made under the lock of its shard");
        debug_assert!(key.is_multiple_of(order.pages() as u64));
        let id = self.folios.take();
        let folio = self.record(id);
        folio.array.set(0);
        folio.frame.set(0);
        folio.slot.set(BlockSlot::NONE);
        folio.age.set(0);
        folio.writing.set(0);
        folio.order.set(order);
        folio.state.set(state);
        folio.has_copy.set(false);
        folio.untouched.set(false);
        folio.clean_in.set(0);
        folio.here.set(0);
        folio.active.set(false);
        folio.touch.set(TouchKind::UNKNOWN);
        folio.refused.set(LruList::None);
        folio.wanted.store(false, Relaxed);
        // Last: until now it was no folio to whoever has kept the id of an ended one.
        folio.number.store(key + 1, Relaxed);
        id
    }

    /// Forgets a folio, which no index entry and no list names any more. Its stored objects must
    /// have been freed or passed on before.
    ///
    /// # Panics
    /// As [`Folios::get`].
    pub fn destroy(&self, guard: &mut ShardGuard<'_>, id: FolioId) {
        let folio = self.get(guard, id);
        self.drop_array(folio);
        folio.number.store(0, Relaxed);
        // SAFETY: the id was taken by `create`; it is given once, as it was a folio until just now,
        // under the lock of its shard. `guard` is borrowed for this call alone, so nobody has a
        // reference to the folio or its slots.
        unsafe { self.folios.give(id) };
    }

    /// The folio behind an id.
    ///
    /// # Panics
    /// If there is none in the shard that is locked: the id is of one that has ended. (If its
    /// record is another's by now, in the same shard, that one is returned: ids that were kept
    /// while the lock was free must be looked up again.)
    pub fn get<'g>(&'g self, guard: &'g ShardGuard<'_>, id: FolioId) -> &'g Folio {
        let folio = self.record(id);
        assert!(guard.covers(folio.key()), "folio {id} has ended, or another shard is locked");
        folio
    }

    /// The folio behind an id, while nobody works.
    ///
    /// # Safety
    /// - It has not ended, and no other thread uses it while the reference lives.
    pub unsafe fn at_rest(&self, id: FolioId) -> &Folio {
        self.record(id)
    }

    /// Whether somebody waits for a folio; may be asked without its lock.
    pub fn is_wanted(&self, id: FolioId) -> bool {
        self.record(id).wanted.load(Relaxed)
    }

    /// Any record, of a folio or not. Of one that is no folio of a locked shard, others may be
    /// changing all but the atomic fields.
    fn record(&self, id: FolioId) -> &Folio {
        // SAFETY: the record was taken once, so the slab has memory for it as long as it lives,
        // zeros at first, which are a valid `Folio`, as is all that is written there: only by
        // `Cell`s and atomics, and by the slab into `array`, any bits of which are valid. A `Cell`
        // is touched by `create`, whose id nobody else has been given, and by who has the guard of
        // the folio's shard: `get` asks for it.
        unsafe { self.folios.place(id).as_ref() }
    }

    /// Blocks of a folio of this order.
    pub fn block_count(&self, order: Order) -> usize {
        order.pages() >> self.block.get().min(order.get())
    }

    /// The order of the blocks of a folio of this order.
    pub fn block_order(&self, order: Order) -> Order {
        self.block.min(order)
    }

    /// The slots of a folio, one for each block.
    pub fn slots<'g>(&self, folio: &'g Folio) -> &'g [Cell<BlockSlot>] {
        let count = self.block_count(folio.order());
        if count == 1 {
            return core::slice::from_ref(&folio.slot);
        }
        let slab = &self.arrays[count.trailing_zeros() as usize];
        if folio.array.get() == 0 {
            folio.array.set(slab.take());
            for i in 0..count {
                // SAFETY: the array was just taken for this folio and has `count` slots.
                unsafe { slab.place(folio.array.get()).add(i).write(BlockSlot::NONE) };
            }
        }
        // SAFETY: the array has `count` slots, all written, and belongs to this folio alone, whose
        // shard the caller has locked: `folio` borrows the guard, and whoever gives the array back
        // (`destroy`, `split`) needs that borrow to have ended.
        unsafe { core::slice::from_raw_parts(slab.place(folio.array.get()).as_ptr().cast(), count) }
    }

    /// The objects of a folio's blocks.
    pub fn handles<'g>(
        &self,
        folio: &'g Folio,
    ) -> impl DoubleEndedIterator<Item = Handle> + use<'g> {
        self.slots(folio).iter().map(|slot| slot.get().handle)
    }

    /// Halves the order of `left`; `right`, just created with that order, takes over the slots of
    /// the second half. Returns the object of a block that would have been cut in two: the copy is
    /// given up, and the caller frees it.
    pub fn split(&self, guard: &mut ShardGuard<'_>, left: FolioId, right: FolioId) -> Handle {
        let (left, right) = (self.get(guard, left), self.get(guard, right));
        assert!(
            left.order().smaller() == Some(right.order()),
            "the right half has the order of a half"
        );
        let (count, whole, had_copy) =
            (self.block_count(left.order()), left.slot.get(), left.has_copy.get());
        let array = left.array.replace(0);
        left.slot.set(BlockSlot::NONE);
        left.order.set(right.order());
        left.has_copy.set(had_copy && count > 1);
        right.has_copy.set(had_copy && count > 1);
        if count == 1 {
            return if had_copy { whole.handle } else { Handle::NONE };
        }
        if array != 0 {
            let slab = &self.arrays[count.trailing_zeros() as usize];
            let slots = self.slots(left).iter().chain(self.slots(right));
            for (i, slot) in slots.enumerate() {
                // SAFETY: the array of `count` written slots belonged to `left` alone and now to
                // this call; the halves have as many.
                slot.set(unsafe { slab.place(array).add(i).read() });
            }
            // SAFETY: nobody names the array any more, and `guard` is borrowed for this call alone,
            // so nobody has a reference to it.
            unsafe { slab.give(array) };
        }
        Handle::NONE
    }

    fn drop_array(&self, folio: &Folio) {
        let array = folio.array.replace(0);
        if array != 0 {
            let count = self.block_count(folio.order());
            // SAFETY: the array was taken from this slab for this folio, which forgets it here.
            // `destroy` alone calls this, to which the guard is lent for itself alone, so nobody
            // has a reference to the slots.
            unsafe { self.arrays[count.trailing_zeros() as usize].give(array) };
        }
    }

    /// Whether nearly all folios that can be described are there, or blocks, or entries of the index
    /// that finds them: what the engine can do without is refused then, as it would need the last
    /// ones. Reports it the first time.
    pub fn is_crowded(&self, index: &FolioIndex) -> bool {
        let is_crowded = self.count() >= self.crowded.load(Relaxed)
            || self.arrays.iter().any(Slab::is_crowded)
            || index.is_crowded();
        if is_crowded && !self.told_crowded.swap(true, Relaxed) {
            memfold_sys::raw::warn(&[
                "memfold: warning: 7 of 8 of all pieces of folded memory that can be described are in \
                 use. Blocks are no longer cut into pages, so random access is slower, and no more \
                 memory is managed: what is new stays unfolded, and a new region is refused. A larger \
                 --block needs fewer\n",
            ]);
        }
        is_crowded
    }

    /// As if so few could be described.
    #[cfg(test)]
    pub fn crowd_at(&self, count: usize) {
        self.crowded.store(count, Relaxed);
    }

    /// Folios there are.
    pub fn count(&self) -> usize {
        self.folios.used()
    }

    /// Bytes that folios and slots take.
    pub fn used_bytes(&self) -> usize {
        self.folios.used_bytes() + self.arrays.iter().map(Slab::used_bytes).sum::<usize>()
    }
}
