//! Bounds of devices, and the words for what their parts hold.
use memfold_store::Handle;

/// Sizes are multiples of so many bytes. Requests need not be.
pub const SECTOR_BYTES: u64 = 512;
/// The largest device: 64 TiB.
pub const SIZE_BYTES_MAX: u64 = 64 << 40;
/// The least limit, in bytes.
pub const LIMIT_BYTES_MIN: u64 = 8 << 20;

/// What a part of a device is. All but `Data` reads as zeros.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Status {
    /// Bytes were written.
    Data,
    /// Zeros were written.
    Zeros,
    /// Nothing was ever written, or it was discarded.
    Hole,
}

/// What zeroed bytes are to be afterwards. Neither holds memory.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Zeros {
    /// [`Status::Hole`] where whole pages are zeroed: a discard.
    Hole,
    /// [`Status::Zeros`].
    Written,
}

impl Zeros {
    /// What a page's slot then says.
    pub(super) fn slot(self) -> Handle {
        if self == Zeros::Hole { Handle::NONE } else { Handle::ZERO }
    }
}
