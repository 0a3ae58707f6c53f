//! Why a save or load failed.
use crate::codec::CodecError;
use crate::handle::Handle;
use core::fmt;

/// Why a folio was not saved. No part of it is in the store then.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum SaveError {
    /// The pools hold as much as they may, and compaction gains nothing.
    PoolFull,
    /// Most blocks don't compress, and the store refuses such folios.
    Incompressible,
    /// The codec failed; holds its own code.
    Codec(CodecError),
    /// Verification read other bytes than were saved.
    Verify,
    /// The caller's `cancel` returned true.
    Cancelled,
}

/// A stored block could not be read. The bytes at the destination are undefined.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct LoadError {
    /// The block to load.
    pub handle: Handle,
    /// The problem.
    pub problem: LoadProblem,
}

/// What is wrong with a stored block.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum LoadProblem {
    /// The handle was never returned by a save, or was freed.
    Unknown,
    /// The object's entry or its note of its owner is damaged.
    Entry,
    /// The checksum of header and payload is wrong.
    Checksum {
        /// The checksum at the save.
        expected: u32,
        /// The checksum now.
        found: u32,
    },
    /// The block has another order than the caller expects.
    Order {
        /// The caller's order.
        expected: u8,
        /// The stored order.
        found: u8,
    },
    /// The payload is invalid although its checksum is right.
    Layout,
    /// The payload's codec is unknown; holds its id.
    Format(u8),
    /// The codec failed, or gave another length; holds its own code.
    Codec(CodecError),
}

impl fmt::Display for SaveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SaveError::PoolFull => write!(f, "the compressed pool is full"),
            SaveError::Incompressible => write!(f, "a block does not compress"),
            SaveError::Codec(e) => write!(f, "the codec failed with {}", e.0),
            SaveError::Verify => write!(f, "verification read other bytes back than were saved"),
            SaveError::Cancelled => write!(f, "the save was cancelled"),
        }
    }
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: ", self.handle)?;
        match self.problem {
            LoadProblem::Unknown => write!(f, "no such object"),
            LoadProblem::Entry => write!(f, "the object's entry is damaged"),
            LoadProblem::Checksum { expected, found } => {
                write!(f, "expected checksum {expected:#010x}, found {found:#010x}")
            }
            LoadProblem::Order { expected, found } => {
                write!(f, "expected a block of order {expected}, found {found}")
            }
            LoadProblem::Layout => write!(f, "the payload makes no sense"),
            LoadProblem::Format(id) => write!(f, "no codec has id {id}"),
            LoadProblem::Codec(e) => write!(f, "the codec failed with {}", e.0),
        }
    }
}

impl core::error::Error for SaveError {}
impl core::error::Error for LoadError {}
