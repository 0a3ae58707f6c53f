//! Folios: the engine's record of an aligned run of pages.
//!
//! # A folio's states
//! These are the values of [`FolioState`]. The shard lock guards every change.
//!
//! | state | the authoritative bytes | may there be a stored copy? |
//! |---|---|---|
//! | `Resident` | the program's page table; a missing page is zeros | yes, used only after its fingerprint matched, or while it is `clean` |
//! | `Partial` | pages that are `here`: the page table; the others: the store | always |
//! | `Leaving` | both: the page table's pages are protected, and equal the stored copy | always |
//! | `Cached` | the frame | yes, used only after its fingerprint matched; equal if `untouched` |
//! | `Saving` | the frame, which may not move | yes, until replaced |
//! | `Loading` | the store, or zeros if there is no copy; pages that are `here`: the page table | yes, unless it is a first touch |
//! | `Stored` | the store | always |
//!
//! | from -> to | by | what is asserted |
//! |---|---|---|
//! | none -> `Loading` | `fault/zeros.rs` `begin_fill` | the window is empty and inside its area |
//! | none -> `Resident` | `fault/zeros.rs` `map_zeros` (not protected); `mappings/ranges.rs` `note_resident` (adoption) | `Areas::add`: it overlaps no area |
//! | none -> `Stored` | `mappings/ranges.rs` `store_by_page` (a block cut by a discard) | every page was saved, or nothing changes |
//! | `Stored` -> `Loading` | `fault/load.rs` `form_window` | the whole window is `Stored` (`all_stored`); a block is never cut (`FolioTable::split`) |
//! | `Cached`, one block -> `Cached`, pages | `reclaim/block_size.rs` `cut_into_pages` | the frame holds all of it; the block's copy ends |
//! | `Resident`, pages -> `Resident`, one block | `reclaim/block_size.rs` `join_block` | every page is `Resident` and none is pinned; their copies end |
//! | `Stored` -> `Loading` -> `Stored` | `reclaim/recompress.rs` `recompress_block` | the handle is still the block's |
//! | `Stored` -> `Cached` | `mappings/ranges.rs` `unfold_block` | |
//! | `Partial` -> pages, `Resident` and `Stored` or `Cached` | `mappings/ranges.rs` `store_by_page`, `unfold_block` | every page that isn't `here` was saved, or lies in the frame |
//! | `Partial` -> `Loading` -> `Partial`, `Resident` | `residency/copy_in.rs` `copy_in` | no page that is `here` is copied |
//! | `Loading` -> `Partial` | `residency/copy_in.rs` `copy_in`: only some of its pages were wanted | |
//! | `Loading` -> `Resident` | `residency/mod.rs` `map_in`; `fault/zeros.rs` `fill_home` | |
//! | `Resident`, pages -> `Resident`, one block | `fault/zeros.rs` `join_filled` | every page is `Resident` without a copy, and none is pinned |
//! | `Loading` -> `Cached` | `fault/load.rs` `finish`: loaded ahead and not wanted; `map_in`: pages that the kernel did not take | |
//! | `Loading` -> `Stored` or none | `folio/table.rs` `end_unloaded`: no frame, because of EAGAIN, or only a smaller frame | |
//! | `Resident` -> `Cached` | `residency/mod.rs` `map_out` | the frame was empty: EEXIST is a panic (`carry_out`) |
//! | `Resident`, `Partial` -> `Leaving` | `reclaim/drop.rs` `prepare_eviction` | it is `clean`, and not pinned |
//! | `Leaving` -> `Stored` | `reclaim/drop.rs` `settle`: its pages were dropped | there is a copy |
//! | `Leaving` -> `Resident`, `Partial` | `reclaim/drop.rs` `settle`: the kernel refused, for some pages at least | |
//! | `Resident` -> none | `mappings/release.rs` `leave_at_home` (locked, or marked) | every folio of the part is `Resident` (`is_home`) |
//! | `Cached` -> `Resident` | `fault/mod.rs` `rescue` -> `map_in` | |
//! | `Cached` -> `Saving` | `reclaim/save.rs` `save_next` | the index still names the isolated folio |
//! | `Cached` -> `Stored` | `save_next`, `untouched` -> `release_frame` | there is a copy (`release_frame`) |
//! | `Saving` -> `Stored` | `save` -> `accept` -> `release_frame` | there is a copy (`release_frame`) |
//! | `Saving` -> `Cached` | `save` -> `put_off`: dirty, and the caller may not compress; goes to `Dirty` | |
//! | `Saving` -> `Cached` -> `Resident` | `save`, `map_back`: wanted, or refused by the store | still `Cached` (`map_back`) |
//! | `Saving` -> `Cached` with a ticket | `reclaim/writeback.rs` `write_out`: a raw write is in progress; on no list | not wanted |
//! | `Cached` with a ticket -> `Stored` | `end_raw` -> `release_frame` | the ticket is the write's |
//! | any other -> none | `folio/table.rs` `remove` (discard, unmap) | never `Loading` or `Saving` (`discard_keys`) |
//!
//! A move may stop half-way. The folio is then split at that page: the moved part has the new
//! state, the rest the old one (`settle_pieces`). `Pager::check` verifies every folio, list and sum
//! while no other thread works. Tests call it after each round.
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
use memfold_os::Errno;
use memfold_os::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use memfold_os::units::{MAX_ORDER, Order};
use memfold_store::Handle;

/// A folio's state: where the one authoritative copy of its bytes is, and which thread may change
/// it.
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
    /// In the program's page table. If a page is missing there, the program has discarded it, and
    /// it is zeros. A stored copy may be kept. It is used only after its fingerprint matched.
    Resident,
    /// One block of which some pages are in the program's page table (`here`). These are like pages
    /// of a `Resident` folio, the others like pages of a `Stored` one.
    Partial,
    /// In the program's page table, write-protected and equal to the stored copy, while its pages
    /// are dropped: it becomes `Stored`. A thread that touches it waits for that.
    Leaving,
    /// In the swap cache: the bytes are in the folio's frame, and the program cannot reach them.
    Cached,
    /// In the swap cache, being compared, compressed and stored. The frame stays authoritative
    /// until the store has succeeded, and may not move meanwhile.
    Saving,
    /// In the swap cache, while its frame is filled. The store (or zeros, without a copy) is
    /// authoritative until it is mapped.
    Loading,
    /// In the store only.
    Stored,
}

/// The kind of access that last loaded a folio from the pool. It decides the size of the folio's
/// blocks (`reclaim/block_size.rs`).
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct TouchKind(u8);

impl TouchKind {
    /// Not loaded yet, or from the swap file.
    pub const UNKNOWN: TouchKind = TouchKind(0);
    /// Loaded as a part of a stream.
    pub const STREAM: TouchKind = TouchKind(1);
    /// Loaded alone.
    pub const RANDOM: TouchKind = TouchKind(2);
    /// Loaded page by page, but all pages at about the same time, so that its block was joined.
    /// Counts from there if it is loaded alone.
    pub const JOINED: TouchKind = TouchKind(128);

    /// Returns how often it was loaded alone since the last access of another kind, at most 127.
    pub fn random_count(self) -> u8 {
        (self.0 & !TouchKind::JOINED.0).saturating_sub(!self.is_joined() as u8)
    }

    /// Returns whether its block was joined since it last was part of a stream.
    pub fn is_joined(self) -> bool {
        self.0 >= TouchKind::JOINED.0
    }

    /// Returns the record after one more access of the kind `next`. Random accesses are counted up
    /// to 126 times. Any other kind replaces the record, and `UNKNOWN` changes nothing.
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

/// The record of a run of pages. A reference to it borrows the guard of the shard of the folio's
/// key, so no other thread has one. Only `key` and `wanted` may be read without the guard.
///
/// A record of zeros is valid, and is no folio: `number` is 0.
#[repr(C)]
pub struct Folio {
    /// Slots in the slab of their count; 0 for none. It is the first field, because the slab links
    /// free records by their first 4 bytes.
    array: Cell<u32>,
    /// First page of its frame, while in the swap cache.
    pub frame: Cell<u32>,
    /// Its key plus one; 0 for no folio. The key is the first page in the index's key space.
    number: AtomicU64,
    /// The slot of the block, if the folio is one; otherwise `array` names the slots.
    slot: Cell<BlockSlot>,
    /// While it is folded, the shadow of its eviction (`policy/workingset.rs`). From its load on, the
    /// clock at its load, in the same form.
    pub age: Cell<u32>,
    /// The ticket of the raw write of a `Cached` folio, which is on no list meanwhile; 0 for none.
    pub writing: Cell<u32>,
    /// In `Resident`, `Partial` or `Leaving`: the generation of the process (`folio/table.rs`) in
    /// which its pages equal their stored copy; 0 for none. All of them are write-protected, so
    /// they stay equal until a fault clears this. It is cleared under the shard lock before the
    /// protection ends.
    pub clean_in: Cell<u32>,
    /// In `Partial`, or `Loading` or `Leaving` from there: the set of its pages that are in the
    /// program's page table, a bit for each. Never all of them. 0 in every other state.
    pub here: Cell<u16>,
    /// Pages: `2^order`. Only this module may change it, because `array` has the slots of a folio
    /// of this order.
    order: Cell<Order>,
    /// Its state.
    pub state: Cell<FolioState>,
    /// Every block has a stored copy.
    pub has_copy: Cell<bool>,
    /// The frame is known to equal the stored copy: it was loaded ahead, and never mapped since.
    pub untouched: Cell<bool>,
    /// It was refaulted, so it goes to the active list.
    pub active: Cell<bool>,
    /// It was filled with zeros, and its probe was not touched yet (`policy/first_touches.rs`).
    /// [`FolioTable::settle_probe`](table::FolioTable::settle_probe) clears this.
    pub is_probed: Cell<bool>,
    /// It had changed when it was last evicted.
    pub written: Cell<bool>,
    /// It was a huge page, or a part of one, when it was last evicted (`residency/huge_pages.rs`).
    pub was_huge: Cell<bool>,
    /// The kind of its last access.
    pub touch: Cell<TouchKind>,
    /// In `Resident`, or on its way there: the list of [`LruList::REFUSED`] for it if its last eviction
    /// was refused, else `None`.
    pub refused: Cell<LruList>,
    /// A thread waits for it: the thread that loads or saves it maps it when done. Set under the
    /// shard lock, polled without.
    pub wanted: AtomicBool,
}

const _: () =
    assert!(core::mem::offset_of!(Folio, array) == 0, "a slab writes there when a record is free");

impl Folio {
    /// Makes a folio without a stored copy of a record that was just taken. All fields are named, so
    /// the compiler refuses one that keeps the value of the folio before. They are set one by one:
    /// another thread that kept an id may read the atomic ones meanwhile.
    fn begin(&self, key: u64, order: Order, state: FolioState) {
        let Folio {
            array,
            frame,
            number,
            slot,
            age,
            writing,
            clean_in,
            here,
            order: order_place,
            state: state_place,
            has_copy,
            untouched,
            active,
            is_probed,
            written,
            was_huge,
            touch,
            refused,
            wanted,
        } = self;
        [array, frame, age, writing, clean_in].into_iter().for_each(|place| place.set(0));
        here.set(0);
        slot.set(BlockSlot::NONE);
        order_place.set(order);
        state_place.set(state);
        [has_copy, untouched, active, is_probed, written, was_huge]
            .into_iter()
            .for_each(|flag| flag.set(false));
        touch.set(TouchKind::UNKNOWN);
        refused.set(LruList::None);
        wanted.store(false, Relaxed);
        // Last, because until now it must be no folio to threads that kept the id of an ended one.
        number.store(key + 1, Relaxed);
    }

    /// Returns its first page, in the index's key space.
    pub fn key(&self) -> u64 {
        self.number.load(Relaxed).wrapping_sub(1)
    }

    /// Returns its order: it has `2^order` pages.
    pub fn order(&self) -> Order {
        self.order.get()
    }

    /// Returns its number of pages.
    pub fn pages(&self) -> u64 {
        self.order().pages() as u64
    }

    /// Returns the key after its last page.
    pub fn end(&self) -> u64 {
        self.key() + self.pages()
    }

    /// Returns whether the page of `key` is in the program's page table, or is zeros, and the folio
    /// is not `Leaving`.
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

    /// Returns how many of its pages [`PageTally`](tally::PageTally) counts as mapped.
    pub fn pages_here(&self) -> u64 {
        match (self.state.get(), self.here.get()) {
            (FolioState::Resident, _) | (FolioState::Leaving, 0) => self.pages(),
            (_, here) => here.count_ones() as u64,
        }
    }

    /// Returns the bits in `here` of the pages in `keys`. A folio above [`PARTIAL_MAX`] has none.
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
    /// From this many folios on, the engine makes only folios that it must make.
    crowded: AtomicUsize,
    told_crowded: AtomicBool,
}

/// Most folios that can be described: 64 Mi (1 TiB of 16 KiB folios).
const LIMIT: u32 = 1 << 26;
const CROWDED: usize = (LIMIT / 8 * 7) as usize;

impl Folios {
    /// Makes room for folios of blocks of order `block`.
    ///
    /// # Errors
    /// The errors of reserving address space.
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

    /// Makes a folio without a stored copy. The guard is that of the shard of `key`.
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
        self.record(id).begin(key, order, state);
        id
    }

    /// Ends a folio that no index entry and no list names any more. Its stored objects must have
    /// been freed or passed on before.
    ///
    /// # Panics
    /// If the shard that is locked has no folio with this id.
    pub fn destroy(&self, guard: &mut ShardGuard<'_>, id: FolioId) {
        let folio = self.get(guard, id);
        self.drop_array(folio);
        folio.number.store(0, Relaxed);
        // SAFETY: the id was taken by `create`. It is given once, because it was a folio until just
        // now, under the lock of its shard. `guard` is borrowed for this call alone, so no thread
        // has a reference to the folio or its slots.
        unsafe { self.folios.give(id) };
    }

    /// Returns the folio behind an id.
    ///
    /// # Panics
    /// If the shard that is locked has no such folio, because the folio has ended. The record may
    /// be used again by now for another folio of the same shard, which is returned then. So ids
    /// that were kept while the lock was free must be looked up again.
    pub fn get<'g>(&'g self, guard: &'g ShardGuard<'_>, id: FolioId) -> &'g Folio {
        let folio = self.record(id);
        assert!(guard.covers(folio.key()), "folio {id} has ended, or another shard is locked");
        folio
    }

    /// Returns the folio behind an id while the engine is quiesced.
    ///
    /// # Safety
    /// - It has not ended, and no other thread uses it while the reference lives.
    pub unsafe fn at_rest(&self, id: FolioId) -> &Folio {
        self.record(id)
    }

    /// Returns whether a thread waits for a folio. It may be called without its lock.
    pub fn is_wanted(&self, id: FolioId) -> bool {
        self.record(id).wanted.load(Relaxed)
    }

    /// Returns any record, of a folio or not. Unless it is a folio of a locked shard, other threads
    /// may change all fields but the atomic ones.
    fn record(&self, id: FolioId) -> &Folio {
        // SAFETY: `place` panics unless the record was taken once, so the slab has memory for it as
        // long as it lives. The memory is zeros at first, which are a valid `Folio`. Later writes
        // are valid too: they are made through `Cell`s and atomics, and by the slab into `array`,
        // any bits of which are valid. Two kinds of code touch `Cell`s. `create` does, whose id no
        // other thread has yet. The holder of the guard of the folio's shard does, which `get` asks
        // for.
        unsafe { self.folios.place(id).as_ref() }
    }

    /// Returns the number of blocks of a folio of this order.
    pub fn block_count(&self, order: Order) -> usize {
        order.pages() >> self.block.get().min(order.get())
    }

    /// Returns the order of the blocks of a folio of this order.
    pub fn block_order(&self, order: Order) -> Order {
        self.block.min(order)
    }

    /// Returns the slots of a folio, one for each block.
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
        // SAFETY: the array has `count` slots, all written, and belongs to this folio alone. The
        // caller has locked the folio's shard: `folio` borrows the guard. `destroy` and `split`,
        // which free the array, need that borrow to have ended.
        unsafe { core::slice::from_raw_parts(slab.place(folio.array.get()).as_ptr().cast(), count) }
    }

    /// Returns the objects of a folio's blocks.
    pub fn handles<'g>(
        &self,
        folio: &'g Folio,
    ) -> impl DoubleEndedIterator<Item = Handle> + use<'g> {
        self.slots(folio).iter().map(|slot| slot.get().handle)
    }

    /// Halves the order of `left`. `right`, just created with that order, takes over the slots of
    /// the second half. A block that would be cut in two loses its copy: its object is returned,
    /// and the caller frees it.
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
            // SAFETY: no folio names the array any more, and `guard` is borrowed for this call
            // alone, so no thread has a reference to it.
            unsafe { slab.give(array) };
        }
        Handle::NONE
    }

    fn drop_array(&self, folio: &Folio) {
        let array = folio.array.replace(0);
        if array != 0 {
            let count = self.block_count(folio.order());
            // SAFETY: the array was taken from this slab for this folio, which drops its name here.
            // Only `destroy` calls this, and it alone borrows the guard, so no thread has a
            // reference to the slots.
            unsafe { self.arrays[count.trailing_zeros() as usize].give(array) };
        }
    }

    /// Returns whether nearly all folios, blocks, or entries of the index are in use. The engine
    /// then refuses all work that would take more of them and is not necessary. Reports it the
    /// first time.
    pub fn is_crowded(&self, index: &FolioIndex) -> bool {
        let is_crowded = self.count() >= self.crowded.load(Relaxed)
            || self.arrays.iter().any(Slab::is_crowded)
            || index.is_crowded();
        if is_crowded && !self.told_crowded.swap(true, Relaxed) {
            memfold_os::raw::warn(&[
                "memfold: warning: 7 of 8 records of folded memory are in use. So blocks are no longer \
                 cut into pages, which makes random access slower. New memory is not managed and \
                 stays uncompressed, and new regions are refused. A larger --block needs fewer \
                 records\n",
            ]);
        }
        is_crowded
    }

    /// Sets the number of folios from which on they count as nearly all.
    #[cfg(test)]
    pub fn crowd_at(&self, count: usize) {
        self.crowded.store(count, Relaxed);
    }

    /// Returns the number of folios.
    pub fn count(&self) -> usize {
        self.folios.used()
    }

    /// Returns the bytes of folios and slots.
    pub fn used_bytes(&self) -> usize {
        self.folios.used_bytes() + self.arrays.iter().map(Slab::used_bytes).sum::<usize>()
    }
}
