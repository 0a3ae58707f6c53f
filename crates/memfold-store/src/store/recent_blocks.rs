//! Recently decompressed blocks, so that reading a block page by page decompresses it once.
use crate::handle::Handle;
use alloc::boxed::Box;
use memfold_os::page::PageBuffer;
use memfold_os::sync::Mutex;
use memfold_os::sync::atomic::{AtomicU64, Ordering::*};
use memfold_os::units::Order;

/// A few block buffers, each tagged with the handle whose bytes it holds. The least recently used
/// one is replaced.
///
/// A tag is set and its buffer filled only under the buffer's lock; freeing a handle clears its
/// tags without it, which is right because a handle is never freed while it is being loaded.
pub(crate) struct RecentBlocks {
    /// Handle bits; 0 for nothing. Apart from the rest, so that a free looks at few cache lines.
    tags: Box<[AtomicU64]>,
    used: Box<[AtomicU64]>,
    buffers: Box<[Mutex<Recent>]>,
    clock: AtomicU64,
}

struct Recent {
    buffer: PageBuffer,
    /// Order of the block in the buffer.
    order: Order,
}

impl RecentBlocks {
    pub fn new(count: usize, block_order: Order) -> RecentBlocks {
        RecentBlocks {
            tags: (0..count).map(|_| AtomicU64::new(0)).collect(),
            used: (0..count).map(|_| AtomicU64::new(0)).collect(),
            buffers: (0..count)
                .map(|_| {
                    Mutex::new(Recent { buffer: PageBuffer::new(block_order), order: block_order })
                })
                .collect(),
            clock: AtomicU64::new(0),
        }
    }

    /// Runs `copy_out` on the block of `handle` if it is here and has that order. It waits for
    /// nobody.
    pub fn find(&self, handle: Handle, order: Order, copy_out: impl FnOnce(*const u8)) -> bool {
        let Some(at) = self.tags.iter().position(|t| t.load(Relaxed) == handle.to_bits()) else {
            return false;
        };
        let Some(recent) = self.buffers[at].try_lock() else { return false };
        if self.tags[at].load(Acquire) != handle.to_bits() || recent.order != order {
            return false;
        }
        copy_out(recent.buffer.as_ptr());
        self.touch(at);
        true
    }

    /// Lets `decode` write the block of `handle` to a buffer and then `copy_out` read it, unless
    /// all buffers are busy: then nothing happens and the result is `None`. Nothing stays here
    /// after an error.
    pub fn insert_with<E>(
        &self,
        handle: Handle,
        order: Order,
        decode: impl FnOnce(*mut u8) -> Result<(), E>,
        copy_out: impl FnOnce(*const u8),
    ) -> Option<Result<(), E>> {
        let oldest = (0..self.tags.len()).min_by_key(|at| self.used[*at].load(Relaxed))?;
        let others = (0..self.tags.len()).filter(|at| *at != oldest);
        let (at, mut recent) = core::iter::once(oldest)
            .chain(others)
            .find_map(|at| Some((at, self.buffers[at].try_lock()?)))?;
        self.tags[at].store(0, Release);
        if let Err(error) = decode(recent.buffer.as_mut_ptr()) {
            return Some(Err(error));
        }
        recent.order = order;
        copy_out(recent.buffer.as_ptr());
        self.touch(at);
        self.tags[at].store(handle.to_bits(), Release);
        Some(Ok(()))
    }

    /// Forgets the block of `handle`. Costs one load for each buffer.
    #[inline]
    pub fn forget(&self, handle: Handle) {
        for tag in &self.tags {
            if tag.load(Relaxed) == handle.to_bits() {
                let _ = tag.compare_exchange(handle.to_bits(), 0, Release, Relaxed);
            }
        }
    }

    /// In a child of fork: forgets all, as a buffer may have been copied while it was filled, and
    /// makes every buffer free.
    ///
    /// # Safety
    /// - No thread of this process uses a buffer: the caller is its only engine thread.
    pub unsafe fn reset_in_child(&self) {
        self.tags.iter().for_each(|tag| tag.store(0, Relaxed));
        // SAFETY: whoever held a lock in the parent is not there.
        self.buffers.iter().for_each(|buffer| unsafe { buffer.reset() });
    }

    fn touch(&self, at: usize) {
        self.used[at].store(self.clock.fetch_add(1, Relaxed) + 1, Relaxed);
    }
}
