//! Decompressed blocks: a small cache, so that pages of one block that are asked for one after
//! another cost one decompression.
use crate::handle::Handle;
use crate::pool::budget::PoolBudget;
use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use memfold_os::page::PageBuffer;
use memfold_os::sync::atomic::{AtomicU64, Ordering::*};
use memfold_os::sync::{Mutex, MutexGuard};
use memfold_os::units::Order;

/// What a load of pages had to do with the cache of decompressed blocks.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum CacheUse {
    /// The block was in the cache: nothing was decompressed.
    Hit,
    /// The block was decompressed as a whole for a part of it.
    Miss,
    /// The cache has no use for such a load: all of the block was asked for, its codec stopped
    /// after the pages, or it is zeros.
    Unused,
}

/// A few slots, each with the bytes of one block and a tag: the handle that the bytes belong to.
/// The least recently used slot is replaced.
///
/// # Why no stale byte is read
/// - A tag holds all bits of a handle, with its generation. Compaction moves objects behind their
///   handles; recompression makes another handle.
/// - A slot is filled, and bytes are copied out of it, under its lock only. Its tag is cleared
///   before it is filled and set afterwards; who copies looks at the tag again under the lock.
/// - A free clears the tags of its handle without the lock. No thread fills or copies that block
///   meanwhile, because a handle is never freed while it is being loaded.
/// - In a child of fork all tags are cleared, as a slot may have been copied while it was filled.
///
/// # Locks
/// Nobody waits for a slot: a thread that finds one taken uses another, or decompresses for itself.
/// So the thread that has a slot may decompress into it.
///
/// # Memory
/// A slot takes memory when it is filled for the first time, and counts as held from then on.
pub(crate) struct DecompressedBlocks {
    /// Handle bits; 0 for nothing. Apart from the rest, so that a free looks at few cache lines.
    tags: Box<[AtomicU64]>,
    used: Box<[AtomicU64]>,
    slots: Box<[Mutex<Slot>]>,
    clock: AtomicU64,
    charged_slots: AtomicU64,
    budget: Arc<PoolBudget>,
    block_order: Order,
}

pub(crate) struct Slot {
    buffer: PageBuffer,
    /// Order of the block in the buffer.
    order: Order,
    /// Its memory counts as held.
    is_charged: bool,
}

impl DecompressedBlocks {
    /// Makes `count` empty slots for blocks of up to `block_order`.
    pub fn new(count: usize, block_order: Order, budget: Arc<PoolBudget>) -> DecompressedBlocks {
        let slot = |_| {
            let buffer = PageBuffer::new(block_order);
            Mutex::new(Slot { buffer, order: block_order, is_charged: false })
        };
        DecompressedBlocks {
            tags: (0..count).map(|_| AtomicU64::new(0)).collect(),
            used: (0..count).map(|_| AtomicU64::new(0)).collect(),
            slots: (0..count).map(slot).collect(),
            clock: AtomicU64::new(0),
            charged_slots: AtomicU64::new(0),
            budget,
            block_order,
        }
    }

    /// Returns the bytes that it holds.
    pub fn held_bytes(&self) -> u64 {
        self.charged_slots.load(Relaxed) * self.block_order.bytes() as u64
    }

    /// Waits for all slots. While the guards live, nothing is filled or charged.
    pub fn freeze(&self) -> Vec<MutexGuard<'_, Slot>> {
        self.slots.iter().map(Mutex::lock).collect()
    }

    /// Runs `copy_out` on the block of `handle` if it is here and has that order. Waits for nobody.
    #[inline]
    pub fn find(&self, handle: Handle, order: Order, copy_out: impl FnOnce(*const u8)) -> bool {
        let is_here = |tag: &AtomicU64| tag.load(Relaxed) == handle.to_bits();
        // An empty slot has the tag of no handle.
        let Some(at) = self.tags.iter().position(is_here).filter(|_| !handle.is_none()) else {
            return false;
        };
        let Some(slot) = self.slots[at].try_lock() else { return false };
        if self.tags[at].load(Acquire) != handle.to_bits() || slot.order != order {
            return false;
        }
        copy_out(slot.buffer.as_ptr());
        self.touch(at);
        true
    }

    /// Lets `decode` write the block of `handle` to a slot and then `copy_out` read it, unless all
    /// slots are taken: then nothing happens and the result is `None`. Nothing stays here after an
    /// error.
    pub fn insert_with<E>(
        &self,
        handle: Handle,
        order: Order,
        decode: impl FnOnce(*mut u8) -> Result<(), E>,
        copy_out: impl FnOnce(*const u8),
    ) -> Option<Result<(), E>> {
        let oldest = (0..self.tags.len()).min_by_key(|at| self.used[*at].load(Relaxed))?;
        let others = (0..self.tags.len()).filter(|at| *at != oldest);
        let (at, mut slot) = core::iter::once(oldest)
            .chain(others)
            .find_map(|at| Some((at, self.slots[at].try_lock()?)))?;
        self.tags[at].store(0, Release);
        if !slot.is_charged {
            slot.is_charged = true;
            self.charged_slots.fetch_add(1, Relaxed);
            self.budget.charge(self.block_order.bytes() as u64);
        }
        if let Err(error) = decode(slot.buffer.as_mut_ptr()) {
            return Some(Err(error));
        }
        slot.order = order;
        copy_out(slot.buffer.as_ptr());
        self.touch(at);
        self.tags[at].store(handle.to_bits(), Release);
        Some(Ok(()))
    }

    /// Forgets the block of `handle`. Costs one load for each slot.
    #[inline]
    pub fn forget(&self, handle: Handle) {
        for tag in &self.tags {
            if tag.load(Relaxed) == handle.to_bits() {
                let _ = tag.compare_exchange(handle.to_bits(), 0, Release, Relaxed);
            }
        }
    }

    /// In a child of fork: forgets all, as a slot may have been copied while it was filled, and
    /// frees every slot's lock.
    ///
    /// # Safety
    /// - No thread of this process uses a slot: the caller is its only engine thread.
    pub unsafe fn reset_in_child(&self) {
        self.tags.iter().for_each(|tag| tag.store(0, Relaxed));
        // SAFETY: whoever held a lock in the parent is not there.
        self.slots.iter().for_each(|slot| unsafe { slot.reset() });
    }

    fn touch(&self, at: usize) {
        self.used[at].store(self.clock.fetch_add(1, Relaxed) + 1, Relaxed);
    }
}
