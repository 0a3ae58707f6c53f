//! The location of an object in the swap file, and its handle.
use memfold_os::units::PAGE_SIZE;
use memfold_store::Handle;

/// Objects start at multiples of this.
pub const UNIT_BYTES: usize = 16;
/// Slots that a location can name: 16 TiB.
pub const SLOTS_MAX: u64 = 1 << 32;

/// The location of an object.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct ObjectLocation {
    /// First slot.
    pub slot: u64,
    /// Offset in that slot, bytes.
    pub offset: usize,
    /// Length with head and padding, bytes.
    pub len: usize,
    /// One block, raw.
    pub is_raw: bool,
}

impl ObjectLocation {
    /// Returns the location that a handle names, or `None` if the object isn't in the swap file.
    pub fn from_handle(handle: Handle) -> Option<ObjectLocation> {
        let bits = handle.as_foreign()?;
        Some(ObjectLocation {
            slot: bits & (SLOTS_MAX - 1),
            offset: (bits >> 32 & 0xff) as usize * UNIT_BYTES,
            len: ((bits >> 40 & 0x1_ffff) as usize + 1) * UNIT_BYTES,
            is_raw: bits >> 57 & 1 != 0,
        })
    }

    /// Returns the handle of this location.
    pub fn handle(self) -> Handle {
        debug_assert!(self.slot < SLOTS_MAX && self.offset < PAGE_SIZE && self.len > 0);
        debug_assert!(
            self.offset.is_multiple_of(UNIT_BYTES) && self.len.is_multiple_of(UNIT_BYTES)
        );
        let (offset, units) = ((self.offset / UNIT_BYTES) as u64, (self.len / UNIT_BYTES) as u64);
        Handle::foreign(self.slot | offset << 32 | (units - 1) << 40 | (self.is_raw as u64) << 57)
    }

    /// Returns the offset of the object's first byte in the file.
    pub fn start(self) -> u64 {
        self.slot * PAGE_SIZE as u64 + self.offset as u64
    }

    /// Returns the offset of the object's end in the file.
    pub fn end(self) -> u64 {
        self.start() + self.len as u64
    }

    /// Returns the number of slots that the object lies in.
    pub fn slots(self) -> usize {
        (self.offset + self.len).div_ceil(PAGE_SIZE)
    }
}
