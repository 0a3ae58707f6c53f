//! Spans: runs of pages that are cut into slots of one size class.
use crate::pool::area::ZoneRecord;
use crate::pool::size_class::{SLOTS_MAX, SizeClass};
// Spans live in zone memory, whose zero bytes must be valid spans: `core`'s atomics, never a model
// checker's.
use core::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering::*};

/// Describes one span. Its pages never change; its class changes with each use.
///
/// All fields but `pins` are guarded by the lock of its class, or by the arena's lock while it has
/// no class. They are atomics (relaxed, so plain moves) only so that a shared reference may change
/// them.
#[derive(Default)]
#[repr(C, align(64))]
pub(crate) struct PoolSpan {
    /// Readers and writers that are active in the span. Compaction leaves a pinned span alone.
    pins: AtomicU32,
    first_page: AtomicU32,
    pages: AtomicU16,
    /// Class + 1, or 0 without one.
    class: AtomicU16,
    in_use: AtomicU16,
    prev: AtomicU32,
    next: AtomicU32,
    /// The entry of the object in a span of one slot.
    owner: AtomicU32,
    used: [AtomicU64; SLOTS_MAX / 64],
}

// SAFETY: only atomics, valid as zeros, without destructor, 64-aligned.
unsafe impl ZoneRecord for PoolSpan {}

macro_rules! field {
    ($get:ident, $set:ident, $field:ident, $type:ty) => {
        pub fn $get(&self) -> $type {
            self.$field.load(Relaxed)
        }
        pub fn $set(&self, value: $type) {
            self.$field.store(value, Relaxed);
        }
    };
}

impl PoolSpan {
    field!(first_page, set_first_page, first_page, u32);
    field!(pages, set_pages, pages, u16);
    field!(in_use, set_in_use, in_use, u16);
    field!(prev, set_prev, prev, u32);
    field!(next, set_next, next, u32);
    field!(owner, set_owner, owner, u32);

    /// Returns the class of the span, if it has one.
    pub fn class(&self) -> Option<usize> {
        (self.class.load(Relaxed) as usize).checked_sub(1)
    }

    pub fn set_class(&self, class: Option<usize>) {
        self.class.store(class.map_or(0, |c| c as u16 + 1), Relaxed);
    }

    /// Keeps compaction away from the span. SeqCst, for the protocol in [`crate::pool`], "reading
    /// beside compaction".
    #[inline]
    pub fn pin(&self) {
        self.pins.fetch_add(1, SeqCst);
    }

    #[inline]
    pub fn unpin(&self) {
        let before = self.pins.fetch_sub(1, SeqCst);
        debug_assert!(before > 0);
    }

    pub fn is_pinned(&self) -> bool {
        self.pins.load(SeqCst) != 0
    }

    /// Marks a free slot used and returns it.
    ///
    /// # Panics
    /// If all slots of the class are used.
    pub fn allocate_slot(&self, class: &SizeClass) -> u8 {
        for (i, word) in self.used.iter().enumerate() {
            let bits = word.load(Relaxed);
            if bits != u64::MAX {
                let slot = i * 64 + bits.trailing_ones() as usize;
                assert!(slot < class.slots as usize, "a full span was listed as having room");
                word.store(bits | 1 << (slot % 64), Relaxed);
                self.set_in_use(self.in_use() + 1);
                return slot as u8;
            }
        }
        panic!("a full span was listed as having room");
    }

    /// Marks a used slot free.
    pub fn free_slot(&self, slot: u8) {
        let word = &self.used[slot as usize / 64];
        let bits = word.load(Relaxed);
        debug_assert!(bits & 1 << (slot % 64) != 0);
        word.store(bits & !(1 << (slot % 64)), Relaxed);
        self.set_in_use(self.in_use() - 1);
    }

    /// Marks every slot free.
    pub fn clear(&self) {
        self.used.iter().for_each(|w| w.store(0, Relaxed));
        self.set_in_use(0);
    }

    pub fn is_used(&self, slot: u8) -> bool {
        (slot as usize) < SLOTS_MAX
            && self.used[slot as usize / 64].load(Relaxed) & 1 << (slot % 64) != 0
    }

    /// Returns the used slots in ascending order.
    pub fn used_slots(&self) -> impl Iterator<Item = u8> + '_ {
        (0..SLOTS_MAX as u8).filter(|s| self.is_used(*s))
    }
}

const _: () = assert!(size_of::<PoolSpan>() == 64);
