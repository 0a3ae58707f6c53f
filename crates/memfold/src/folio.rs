//! Folios: what the index knows of an aligned run of pages.
use crate::fingerprint::Fingerprint;
use crate::slab::Slab;
use core::cell::UnsafeCell;
use memfold_store::Handle;
use memfold_sys::Errno;
use memfold_sys::sync::atomic::{AtomicBool, Ordering::Relaxed};
use memfold_sys::units::{MAX_ORDER, Order};

/// A folio's id in the slab; 0 is none.
pub type FolioId = u32;

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
/// ```
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    /// In the program's page table. A page that is missing there was discarded by the program and is zeros.
    /// A stored copy may be kept; it is only believed after its fingerprint matched.
    Resident,
    /// In the swap cache: the bytes are in the folio's frame, the program can't reach them.
    Cached,
    /// In the swap cache, being compared, compressed and stored. The frame stays authoritative until the store has
    /// succeeded, and may not move meanwhile.
    Saving,
    /// In the swap cache, its frame being filled. The store (or nothing, for zeros) is authoritative until it is mapped.
    Loading,
    /// In the store only.
    Stored,
}

/// How a folio was asked for when it was last loaded from the pool, which decides the size of its blocks (`grain.rs`).
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Touch(u8);

impl Touch {
    /// Not loaded yet, or from the swap file.
    pub const UNKNOWN: Touch = Touch(0);
    /// As a part of a stream.
    pub const STREAM: Touch = Touch(1);
    /// By itself.
    pub const RANDOM: Touch = Touch(2);
    /// Page by page, but all at about the same time, so that its block was joined. Counts from there if it is asked for by itself.
    pub const JOINED: Touch = Touch(128);

    /// How often it was asked for by itself since it last was in another way, at most 127.
    pub fn random_count(self) -> u8 {
        (self.0 & !Touch::JOINED.0).saturating_sub(!self.is_joined() as u8)
    }

    /// Whether its block was joined since it last was part of a stream.
    pub fn is_joined(self) -> bool {
        self.0 >= Touch::JOINED.0
    }

    /// After it was asked for like this; `UNKNOWN` is no news.
    #[must_use]
    pub fn then(self, next: Touch) -> Touch {
        match next {
            Touch::UNKNOWN => self,
            Touch::RANDOM if self.random_count() < 126 => Touch(self.0.max(Touch::STREAM.0) + 1),
            Touch::RANDOM => self,
            next => next,
        }
    }
}

/// One block in the store.
#[derive(Copy, Clone, PartialEq, Eq)]
#[repr(C)]
pub struct Slot {
    /// Its object.
    pub handle: Handle,
    /// Of the block's bytes when it was stored.
    pub fingerprint: Fingerprint,
}

impl Slot {
    /// Nothing stored.
    pub const NONE: Slot = Slot { handle: Handle::NONE, fingerprint: Fingerprint::NONE };
}

/// Guarded by the shard lock of the folio's key, except `wanted`.
pub struct Folio {
    /// First page, in the index's key space.
    pub key: u64,
    /// The block, if the folio is one; otherwise `array` names the slots.
    slot: Slot,
    /// Slots in the slab of their count; 0 for none.
    array: u32,
    /// First page of its frame, while in the swap cache.
    pub frame: u32,
    /// The shadow of its last eviction (`workingset.rs`).
    pub age: u32,
    /// The raw write that is under way of a `Cached` folio, which is on no list meanwhile; 0 for none.
    pub writing: u32,
    /// Pages: `2^order`.
    pub order: Order,
    /// See [`State`].
    pub state: State,
    /// Every block has a stored copy.
    pub has_copy: bool,
    /// The frame is known to equal the stored copy: loaded ahead, and never mapped since.
    pub untouched: bool,
    /// Touched again soon after it was evicted: protect it.
    pub active: bool,
    /// How it was last asked for.
    pub touch: Touch,
    /// `Resident`, or on its way there: when it was last to leave, nothing took it.
    pub refused: bool,
    /// Somebody waits for it: whoever loads or saves it maps it when done. Set under the shard lock, polled without.
    pub wanted: AtomicBool,
}

/// All folios and their block slots.
pub struct Folios {
    folios: Slab<UnsafeCell<Folio>>,
    arrays: [Slab<Slot>; MAX_ORDER as usize + 1],
    block: Order,
}

/// Most folios that can be described: 64 Mi (1 TiB of 16 KiB folios).
const LIMIT: u32 = 1 << 26;

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
        Ok(Folios { folios: Slab::new(LIMIT, 1)?, arrays: arrays.map(|a| a.expect("filled above")), block })
    }

    /// A new folio without a stored copy.
    pub fn create(&self, key: u64, order: Order, state: State) -> FolioId {
        debug_assert!(key.is_multiple_of(order.pages() as u64));
        let id = self.folios.take();
        let folio = Folio {
            key,
            slot: Slot::NONE,
            array: 0,
            frame: 0,
            age: 0,
            writing: 0,
            order,
            state,
            has_copy: false,
            untouched: false,
            active: false,
            touch: Touch::UNKNOWN,
            refused: false,
            wanted: AtomicBool::new(false),
        };
        // SAFETY: the record was just taken, nobody else knows its id, and writing drops nothing.
        unsafe { self.folios.place(id).write(UnsafeCell::new(folio)) };
        id
    }

    /// Forgets a folio. Its stored objects must have been freed or passed on before.
    ///
    /// # Safety
    /// - The id is in no index entry and no list any more, and nobody uses it.
    pub unsafe fn destroy(&self, id: FolioId) {
        // SAFETY: the caller is the last user, so the record may be read out and dropped.
        let mut folio = unsafe { self.folios.place(id).read() };
        self.drop_array(folio.get_mut());
        // SAFETY: as above.
        unsafe { self.folios.give(id) };
    }

    /// The folio behind an id.
    ///
    /// # Safety
    /// - The caller holds the shard lock of the folio's key for as long as it uses the reference, and makes no second
    ///   one to the same folio meanwhile.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn get(&self, id: FolioId) -> &mut Folio {
        // SAFETY: the record was written by `create`; the caller vouches for exclusion.
        unsafe { &mut *(*self.folios.place(id).as_ptr()).get() }
    }

    /// Whether somebody waits for a folio; may be asked without its lock.
    ///
    /// # Safety
    /// - The folio is `Saving` or `Loading` by the caller, so its record stays.
    pub unsafe fn is_wanted(&self, id: FolioId) -> bool {
        // SAFETY: only the atomic field is touched, through a raw place, and the record stays.
        unsafe {
            let folio = (*self.folios.place(id).as_ptr()).get();
            (*folio).wanted.load(Relaxed)
        }
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
    pub fn slots<'a>(&self, folio: &'a mut Folio) -> &'a mut [Slot] {
        let count = self.block_count(folio.order);
        if count == 1 {
            return core::slice::from_mut(&mut folio.slot);
        }
        if folio.array == 0 {
            let slab = &self.arrays[count.trailing_zeros() as usize];
            folio.array = slab.take();
            for i in 0..count {
                // SAFETY: the array was just taken for this folio and has `count` slots.
                unsafe { slab.place(folio.array).add(i).write(Slot::NONE) };
            }
        }
        let slab = &self.arrays[count.trailing_zeros() as usize];
        // SAFETY: the array belongs to this folio alone, whose exclusive borrow the slice keeps; all slots are written.
        unsafe { core::slice::from_raw_parts_mut(slab.place(folio.array).as_ptr(), count) }
    }

    /// Halves a folio's order; `right`, just created with that order, takes over the slots of the second half. Returns
    /// the object of a block that would have been cut in two: the copy is given up, and the caller frees it.
    pub fn split_slots(&self, left: &mut Folio, right: &mut Folio) -> Handle {
        let (count, array, whole) = (self.block_count(left.order), left.array, left.slot);
        let had_copy = left.has_copy;
        left.array = 0;
        left.slot = Slot::NONE;
        left.order = right.order;
        left.has_copy = had_copy && count > 1;
        right.has_copy = left.has_copy;
        if count == 1 {
            return if had_copy { whole.handle } else { Handle::NONE };
        }
        if array != 0 {
            let slab = &self.arrays[count.trailing_zeros() as usize];
            // SAFETY: the array of `count` written slots belonged to `left` alone and now to this call.
            let slots = unsafe { core::slice::from_raw_parts(slab.place(array).as_ptr(), count) };
            self.slots(left).copy_from_slice(&slots[..count / 2]);
            self.slots(right).copy_from_slice(&slots[count / 2..]);
            // SAFETY: nobody names the array any more.
            unsafe { slab.give(array) };
        }
        Handle::NONE
    }

    fn drop_array(&self, folio: &mut Folio) {
        if folio.array != 0 {
            let count = self.block_count(folio.order);
            // SAFETY: the array was taken from this slab for this folio, which forgets it here.
            unsafe { self.arrays[count.trailing_zeros() as usize].give(folio.array) };
            folio.array = 0;
        }
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
