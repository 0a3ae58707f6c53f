//! Why a request was not done.
use memfold_store::{LoadError, SaveError};
use std::fmt;

/// Why a request was not done. Of a write that failed, any part may have been done, block by block; no other byte has
/// changed.
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
            IoError::NoSpace => write!(f, "the memory limit is reached, or there is no more memory"),
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
