//! memfold-block: compressed block devices, blocks over `memfold-store`.
//!
//! A [`DeviceMemory`] is the memory of one or more [`Device`]s: a store, and one limit for all that they
//! hold. A thread that reads or writes has a [`DeviceIo`] of its own.
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use memfold_block::{Device, DeviceMemory, MemorySettings};
//!
//! let memory = DeviceMemory::new(&MemorySettings::default())?;
//! let device = Device::new(&memory, 8 << 30)?;
//! let mut io = device.io();
//! device.write(&mut io, 1000, b"any alignment")?;
//! let mut bytes = [0; 13];
//! device.read(&mut io, 1000, &mut bytes)?;
//! assert_eq!(&bytes, b"any alignment");
//! # Ok(())
//! # }
//! ```
//!
//! A device is in memory and ends with its process. What it spills to a file ([`SpillSettings`]) is of
//! use to that process only. [`image`] saves devices to a file and loads them again.

mod plain;
mod device;
pub mod image;
mod export;
pub mod nbd;
pub mod vhost;
pub mod ctl;

pub use device::{
    BackingStats, Device, DeviceError, DeviceIo, DeviceMemory, DeviceStats, IoError,
    LIMIT_BYTES_MIN, MemorySettings, ObjectPick, ObjectState, RangeStatus, RecompressResult,
    SECTOR_BYTES, SIZE_BYTES_MAX, SpillSettings, SpillStats, ZeroPolicy,
};
pub use export::{Export, NAME_BYTES_MAX};
