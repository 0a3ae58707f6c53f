//! Errors of requests, and of making backings and devices.
use super::units::{LIMIT_BYTES_MIN, SECTOR_BYTES, SIZE_BYTES_MAX};
use memfold_store::{LoadError, SaveError, StoreError};
use std::fmt;

/// Why a request failed. A failed write may have changed any of its blocks, but no other byte.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum IoError {
    /// The request reaches beyond the end of the device.
    OutOfRange,
    /// The backing holds as much as it may, or the machine has no free memory.
    NoSpace,
    /// Stored data can't be loaded, because memory was damaged.
    Damaged(LoadError),
    /// Data could not be stored: the codec failed, or verification found other bytes.
    Refused(SaveError),
    /// Data in the file can't be read, or is damaged; see `Spill::error`.
    Unread,
    /// Data could not be made durable; see `Export::flush`.
    NotDurable,
}

impl fmt::Display for IoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            IoError::OutOfRange => write!(f, "The request reaches beyond the end of the device"),
            IoError::NoSpace => {
                write!(f, "The memory limit is reached, or the machine has no free memory")
            }
            IoError::Damaged(e) => write!(f, "{e}"),
            IoError::Refused(e) => write!(f, "{e}"),
            IoError::Unread => write!(f, "Data in the writeback file can't be read"),
            IoError::NotDurable => write!(f, "The image can't be written"),
        }
    }
}

impl std::error::Error for IoError {}

impl From<SaveError> for IoError {
    fn from(error: SaveError) -> IoError {
        if error == SaveError::PoolFull { IoError::NoSpace } else { IoError::Refused(error) }
    }
}

/// Why a backing or a device could not be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceError {
    /// The file for data that does not fit can't be made; holds why.
    Spill(String),
    /// A limit below [`LIMIT_BYTES_MIN`]; holds it.
    Limit(u64),
    /// A size of 0, one that is not whole sectors, or one above the largest; holds it.
    Size(u64),
    /// The table of a device of this size does not fit the limit.
    Table {
        /// Bytes of the device.
        size: u64,
        /// Bytes of the limit.
        limit: u64,
    },
    /// A limit below the size of the devices' tables.
    Tables {
        /// Bytes of the tables.
        tables: u64,
        /// Bytes of the limit.
        limit: u64,
    },
    /// There is no memory for the table of a device of this size; holds it.
    NoMemory(u64),
    /// The store could not be made.
    Store(StoreError),
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceError::Spill(why) => write!(f, "{why}"),
            DeviceError::Limit(n) => {
                write!(
                    f,
                    "a limit of {n} bytes is too small. Give at least {LIMIT_BYTES_MIN} bytes."
                )
            }
            DeviceError::Size(0) => write!(f, "a device can't have 0 bytes. Give a size."),
            DeviceError::Size(n) if !n.is_multiple_of(SECTOR_BYTES) => {
                write!(
                    f,
                    "{n} bytes are not whole sectors. Give a multiple of {} bytes.",
                    SECTOR_BYTES
                )
            }
            DeviceError::Size(n) => {
                write!(f, "{n} bytes are too many. Give at most {} bytes.", SIZE_BYTES_MAX)
            }
            DeviceError::Table { size, limit } => {
                write!(
                    f,
                    "the table of a device of {size} bytes does not fit a limit of {limit} bytes. Raise the limit."
                )
            }
            DeviceError::Tables { tables, limit } => {
                write!(
                    f,
                    "a limit of {limit} bytes is too small, because the tables of the devices take {tables} bytes. Raise the limit."
                )
            }
            DeviceError::NoMemory(n) => {
                write!(
                    f,
                    "the machine has no memory for the table of a device of {n} bytes. Give a smaller size."
                )
            }
            DeviceError::Store(e) => write!(f, "{e}"),
        }
    }
}

impl std::error::Error for DeviceError {}
