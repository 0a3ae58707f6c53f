//! Handles: the store's names of saved blocks.
use core::fmt;

/// Bits of an entry's index within its pool.
pub(crate) const INDEX_BITS: u32 = 28;
/// Bits of the generation that distinguishes a reused entry from its predecessor.
pub(crate) const GENERATION_BITS: u32 = 14;
/// Bits of the pool's number.
pub(crate) const POOL_BITS: u32 = 6;
/// Most pools of a store.
pub const POOLS_MAX: usize = 1 << POOL_BITS;

const POOL_SHIFT: u32 = INDEX_BITS + GENERATION_BITS;
const USED_BITS: u64 = (1 << (POOL_SHIFT + POOL_BITS)) - 1;
const OBJECT: u64 = 1 << 63;
const FOREIGN: u64 = 1 << 62;

/// Names one stored block. A plain number without a destructor: the holder must pass it to
/// [`crate::Store::free`].
///
/// A handle stays valid while compaction moves the object behind it. After `free` it is dead.
/// Loading it then is an error and never returns another object's bytes, until the entry was reused
/// 2^14 times. The holder of a handle that may be dead calls [`crate::Store::is_still`].
#[derive(Copy, Clone, PartialEq, Eq, Hash)]
pub struct Handle(u64);

/// The parts of a pool object's handle.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) struct ObjectName {
    pub pool: u8,
    pub index: u32,
    pub generation: u16,
}

impl Handle {
    /// Nothing is stored.
    pub const NONE: Handle = Handle(0);
    /// An all-zero block of any size. Holds no memory.
    pub const ZERO: Handle = Handle(1);

    /// Returns the handle as a number, for an atomic. `NONE` is 0.
    pub const fn to_bits(self) -> u64 {
        self.0
    }

    /// Makes a handle from the number of [`Handle::to_bits`]. Any other number is an unknown
    /// handle, which loads refuse.
    pub const fn from_bits(bits: u64) -> Handle {
        Handle(bits)
    }

    /// Returns whether nothing is stored.
    pub const fn is_none(self) -> bool {
        self.0 == 0
    }

    /// Returns whether this is the all-zero block.
    pub const fn is_zero(self) -> bool {
        self.0 == 1
    }

    /// Makes a handle of something outside the store: it carries `bits` for its maker. The store
    /// does not know it: loads refuse it, and freeing it does nothing.
    ///
    /// # Panics
    /// If `bits` takes more than 62 bits.
    pub const fn foreign(bits: u64) -> Handle {
        assert!(bits < FOREIGN);
        Handle(FOREIGN | bits)
    }

    /// Returns the bits of a handle that [`Handle::foreign`] made.
    pub const fn as_foreign(self) -> Option<u64> {
        if self.0 >> 62 == 1 { Some(self.0 & (FOREIGN - 1)) } else { None }
    }

    pub(crate) const fn of_object(name: ObjectName) -> Handle {
        Handle(
            OBJECT
                | (name.pool as u64) << POOL_SHIFT
                | (name.generation as u64) << INDEX_BITS
                | name.index as u64,
        )
    }

    /// Returns the parts of an object's handle, or `None` for `NONE`, `ZERO` and invalid numbers.
    pub(crate) const fn object(self) -> Option<ObjectName> {
        if self.0 & OBJECT == 0 || self.0 & !(OBJECT | USED_BITS) != 0 {
            return None;
        }
        Some(ObjectName {
            pool: ((self.0 >> POOL_SHIFT) & ((1 << POOL_BITS) - 1)) as u8,
            index: (self.0 & ((1 << INDEX_BITS) - 1)) as u32,
            generation: ((self.0 >> INDEX_BITS) & ((1 << GENERATION_BITS) - 1)) as u16,
        })
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.object(), self.0) {
            (Some(o), _) => {
                write!(f, "Handle(pool {}, object {}.{})", o.pool, o.index, o.generation)
            }
            (None, 0) => write!(f, "Handle::NONE"),
            (None, 1) => write!(f, "Handle::ZERO"),
            (None, bits) => write!(f, "Handle(unknown {bits:#x})"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_come_back() {
        for name in [
            ObjectName { pool: 0, index: 0, generation: 0 },
            ObjectName {
                pool: 63,
                index: (1 << INDEX_BITS) - 1,
                generation: (1 << GENERATION_BITS) - 1,
            },
            ObjectName { pool: 5, index: 77, generation: 9 },
        ] {
            let handle = Handle::of_object(name);
            assert_eq!(handle.object(), Some(name));
            assert!(!handle.is_none() && !handle.is_zero());
            assert_eq!(Handle::from_bits(handle.to_bits()), handle);
        }
        let foreign = Handle::foreign((1 << 62) - 1);
        assert_eq!((foreign.as_foreign(), foreign.object()), (Some((1 << 62) - 1), None));
        assert_eq!(
            Handle::of_object(ObjectName { pool: 63, index: 1, generation: 1 }).as_foreign(),
            None
        );
        assert!(Handle::ZERO.as_foreign().is_none() && Handle::NONE.as_foreign().is_none());
        assert_eq!(Handle::NONE.object(), None);
        assert_eq!(Handle::ZERO.object(), None);
        assert_eq!(Handle::from_bits(OBJECT | 1 << 60).object(), None);
    }
}
