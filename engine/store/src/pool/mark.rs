//! Marks: 8 bytes beside each entry with the block's owner and its use. Losing one loses no data.
use crate::pool::area::ZoneRecord;
// Marks live in zone memory, whose zero bytes must be valid marks: `core`'s atomics, never a model
// checker's.
use core::sync::atomic::{AtomicU64, Ordering::*};

/// Bits of a key that fit a mark: those of 4 PiB in pages.
const KEY_BITS: u32 = 40;
const KEY_MASK: u64 = (1 << KEY_BITS) - 1;
const TICK_SHIFT: u32 = KEY_BITS;

/// Loaded or saved since the last look of the shrinker.
pub(crate) const REFERENCED: u64 = 1 << 56;
/// Stored raw: it did not compress.
pub(crate) const HUGE: u64 = 1 << 57;
/// A stronger codec was tried, and the object is its result or did not get smaller.
pub(crate) const TRIED: u64 = 1 << 58;

/// key 40 | tick of the last use 16 | flags 8. Racing updates may lose one of two touches, which is
/// harmless.
#[derive(Default)]
#[repr(transparent)]
pub(crate) struct ObjectMark(AtomicU64);

// SAFETY: one atomic, valid as zero, without destructor, 8-aligned.
unsafe impl ZoneRecord for ObjectMark {}

impl ObjectMark {
    /// Makes the mark of a new object. A key that is too large is cut, and then names no folio of
    /// the caller.
    pub fn begin(&self, key: u64, tick: u16, flags: u64) {
        self.0.store(key & KEY_MASK | (tick as u64) << TICK_SHIFT | flags, Relaxed);
    }

    /// Notes a use. Writes only if that changes something.
    #[inline]
    pub fn touch(&self, tick: u16) {
        let old = self.0.load(Relaxed);
        let new = old & !(0xffff << TICK_SHIFT) | (tick as u64) << TICK_SHIFT | REFERENCED;
        if new != old {
            self.0.store(new, Relaxed);
        }
    }

    pub fn key(&self) -> u64 {
        self.0.load(Relaxed) & KEY_MASK
    }

    /// Returns the ticks since the last use, modulo 65536.
    pub fn idle(&self, now: u16) -> u16 {
        now.wrapping_sub((self.0.load(Relaxed) >> TICK_SHIFT) as u16)
    }

    pub fn has(&self, flag: u64) -> bool {
        self.0.load(Relaxed) & flag != 0
    }

    pub fn set(&self, flag: u64) {
        self.0.fetch_or(flag, Relaxed);
    }

    /// Clears a flag. Returns whether it was set.
    pub fn test_and_clear(&self, flag: u64) -> bool {
        self.has(flag) && self.0.fetch_and(!flag, Relaxed) & flag != 0
    }

    /// Returns the tick of the last use.
    pub fn tick(&self) -> u16 {
        (self.0.load(Relaxed) >> TICK_SHIFT) as u16
    }
}

/// The position of a sweep over all entries of all pools.
#[derive(Copy, Clone, Debug, Default)]
pub(crate) struct SweepHand {
    pub pool: usize,
    pub index: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_keeps_its_parts_apart() {
        let mark = ObjectMark::default();
        mark.begin(0x12_3456_789a, 65000, REFERENCED | HUGE);
        assert_eq!((mark.key(), mark.idle(65010), mark.idle(4)), (0x12_3456_789a, 10, 540));
        assert!(
            mark.test_and_clear(REFERENCED)
                && !mark.test_and_clear(REFERENCED)
                && mark.has(HUGE)
                && !mark.has(TRIED)
        );
        mark.touch(9);
        mark.set(TRIED);
        assert_eq!((mark.key(), mark.tick()), (0x12_3456_789a, 9));
        assert!(mark.has(REFERENCED) && mark.has(HUGE) && mark.has(TRIED));
    }
}
