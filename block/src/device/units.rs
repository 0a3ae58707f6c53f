//! Bounds of devices, and the states of their parts.
use memfold_store::Handle;

/// Sizes are multiples of this many bytes. Requests may be unaligned.
pub const SECTOR_BYTES: u64 = 512;
/// The largest device: 64 TiB.
pub const SIZE_BYTES_MAX: u64 = 64 << 40;
/// The smallest limit, bytes.
pub const LIMIT_BYTES_MIN: u64 = 8 << 20;

/// The state of a part of a device. All but `Data` reads as zeros.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum RangeStatus {
    /// Bytes were written.
    Data,
    /// Zeros were written.
    Zeros,
    /// Nothing was ever written, or it was discarded.
    Hole,
}

/// The state of zeroed bytes. Neither takes memory.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum ZeroPolicy {
    /// A discard: whole pages become [`RangeStatus::Hole`].
    Hole,
    /// All bytes become [`RangeStatus::Zeros`].
    Written,
}

impl ZeroPolicy {
    /// Returns the slot of a page in this state.
    pub(super) fn slot(self) -> Handle {
        if self == ZeroPolicy::Hole { Handle::NONE } else { Handle::ZERO }
    }
}
