//! Why a request was not done, or nothing to do it with could be made.
use super::units::{LIMIT_BYTES_MIN, SECTOR_BYTES, SIZE_BYTES_MAX};
use memfold_store::{LoadError, SaveError, StoreError};
use std::fmt;

/// Why a request was not done. Of a write that failed, any part may have been done, block by block;
/// no other byte has changed.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum IoError {
    /// It goes beyond the end of the device.
    OutOfRange,
    /// The backing holds as much as it may, or there is no memory for more.
    NoSpace,
    /// What is stored can't be read back: memory was damaged.
    Damaged(LoadError),
    /// What was to be stored could not be: the codec failed, or verification read other bytes back.
    Refused(SaveError),
    /// What was written back could not be read, or is not what was written; see `Spill::error`.
    Unread,
    /// It could not be made durable; see `Export::flush`.
    NotDurable,
}

impl fmt::Display for IoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            IoError::OutOfRange => write!(f, "beyond the end of the device"),
            IoError::NoSpace => {
                write!(f, "the memory limit is reached, or there is no more memory")
            }
            IoError::Damaged(e) => write!(f, "{e}"),
            IoError::Refused(e) => write!(f, "{e}"),
            IoError::Unread => write!(f, "what was written back could not be read"),
            IoError::NotDurable => write!(f, "the image could not be written"),
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
    /// The file for what does not fit can't be made; holds why.
    Spill(String),
    /// A limit below [`LIMIT_BYTES_MIN`]; holds it.
    Limit(u64),
    /// A size of 0, not of whole sectors, or above the most; holds it.
    Size(u64),
    /// The table of a device of this size does not fit the limit.
    Table {
        /// Bytes of the device.
        size: u64,
        /// Bytes of the limit.
        limit: u64,
    },
    /// A limit below what the tables of the devices take.
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
                write!(f, "a limit of {n} bytes is too small: at least {LIMIT_BYTES_MIN}")
            }
            DeviceError::Size(0) => write!(f, "a device of 0 bytes: give it a size"),
            DeviceError::Size(n) if !n.is_multiple_of(SECTOR_BYTES) => {
                write!(
                    f,
                    "{n} bytes are no whole sectors: the size must be a multiple of {}",
                    SECTOR_BYTES
                )
            }
            DeviceError::Size(n) => write!(f, "{n} bytes are too many: at most {}", SIZE_BYTES_MAX),
            DeviceError::Table { size, limit } => {
                write!(
                    f,
                    "a device of {size} bytes leaves nothing of a limit of {limit} bytes: raise the limit"
                )
            }
            DeviceError::Tables { tables, limit } => {
                write!(
                    f,
                    "a limit of {limit} bytes is too small: the devices' tables alone take {tables}"
                )
            }
            DeviceError::NoMemory(n) => {
                write!(f, "no memory for the table of a device of {n} bytes")
            }
            DeviceError::Store(e) => write!(f, "{e}"),
        }
    }
}

impl std::error::Error for DeviceError {}
