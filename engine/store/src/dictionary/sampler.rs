//! Copies some blocks while they are saved, as samples for dictionaries.
use alloc::vec::Vec;
use memfold_os::sync::Mutex;
use memfold_os::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};
use memfold_os::units::Order;

/// Bytes of blocks that are sampled: three of four train, every fourth judges.
const SAMPLE_BYTES: usize = 2 << 20;
/// One block in this many is sampled.
const EVERY: u32 = 4;
/// Blocks saved before the first sampling, and the factor from one sampling to the next.
const FIRST_BLOCKS: u64 = 256;
const FACTOR: u64 = 4;

const OFF: u32 = u32::MAX;

/// Sampled blocks, all of one order.
pub(crate) struct BlockSamples {
    pub order: Order,
    pub bytes: Vec<u8>,
}

/// Counts saves and copies some. Costs one load per save while it is off or waits.
pub(crate) struct Sampler {
    /// Saves until the next sample; `OFF` while none is taken.
    left: AtomicU32,
    buffer: Mutex<SampleBuffer>,
    /// Blocks saved at which sampling starts; `u64::MAX` while off.
    start_at: AtomicU64,
    order: Order,
    room: usize,
}

struct SampleBuffer {
    bytes: Vec<u8>,
}

impl Sampler {
    /// Makes one for blocks of `order`; smaller ones are not sampled.
    pub fn new(order: Order) -> Sampler {
        let room = SAMPLE_BYTES.max(16 * order.bytes());
        let buffer = Mutex::new(SampleBuffer { bytes: Vec::new() });
        Sampler {
            left: AtomicU32::new(OFF),
            buffer,
            start_at: AtomicU64::new(u64::MAX),
            order,
            room,
        }
    }

    pub fn set_on(&self, on: bool) {
        let mut buffer = self.buffer.lock();
        self.left.store(OFF, Relaxed);
        self.start_at.store(if on { FIRST_BLOCKS } else { u64::MAX }, Relaxed);
        buffer.bytes = Vec::new();
    }

    /// Offers a block that is being saved.
    ///
    /// # Safety
    /// - `block` is readable for `order.bytes()` bytes, and no thread writes there meanwhile.
    #[inline]
    pub unsafe fn offer(&self, block: *const u8, order: Order) {
        let budget = self.left.load(Relaxed);
        if budget == OFF || order != self.order {
            return;
        }
        // A count that races lose does no harm.
        self.left.store(if budget == 0 { EVERY - 1 } else { budget - 1 }, Relaxed);
        if budget == 0 {
            // SAFETY: as the caller says.
            unsafe { self.copy(block) };
        }
    }

    /// # Safety
    /// - As for [`Sampler::offer`], for a block of the sampler's order.
    #[cold]
    unsafe fn copy(&self, block: *const u8) {
        let Some(mut buffer) = self.buffer.try_lock() else { return };
        // This stays within the capacity, so nothing is allocated.
        if buffer.bytes.len() + self.order.bytes() > self.room.min(buffer.bytes.capacity()) {
            self.left.store(OFF, Relaxed);
            return;
        }
        // SAFETY: as the caller says.
        buffer
            .bytes
            .extend_from_slice(unsafe { core::slice::from_raw_parts(block, self.order.bytes()) });
    }

    /// Returns the samples, if there are enough. Otherwise starts sampling when it is time, with
    /// `saved` blocks saved so far.
    pub fn collect(&self, saved: u64) -> Option<BlockSamples> {
        if saved < self.start_at.load(Relaxed) {
            return None;
        }
        let mut buffer = self.buffer.lock();
        if buffer.bytes.capacity() == 0 {
            buffer.bytes.reserve_exact(self.room);
            self.left.store(0, Relaxed);
            return None;
        }
        if buffer.bytes.len() + self.order.bytes() <= self.room {
            return None;
        }
        self.left.store(OFF, Relaxed);
        self.start_at.store(saved.saturating_mul(FACTOR), Relaxed);
        Some(BlockSamples { order: self.order, bytes: core::mem::take(&mut buffer.bytes) })
    }
}
