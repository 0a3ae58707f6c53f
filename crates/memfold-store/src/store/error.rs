//! Why a save or load failed.
use crate::codec::CodecError;
use crate::handle::Handle;
use core::fmt;

/// Why a folio was not saved. Nothing of it is in the store then.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum SaveError {
    /// The pools hold as much as they may, and compaction gains nothing.
    PoolFull,
    /// Most blocks do not shrink, and the store was told to refuse such folios.
    Incompressible,
    /// The codec failed; holds its own code.
    Codec(CodecError),
    /// Verify mode read other bytes back than were saved.
    Verify,
    /// The caller's `cancel` said so.
    Cancelled,
}

/// A stored block could not be read. What was written to the destination is undefined.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct LoadError {
    /// What was to be loaded.
    pub handle: Handle,
    /// What is wrong with it.
    pub problem: LoadProblem,
}

/// What is wrong with a stored block.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum LoadProblem {
    /// The handle was never given out, or was freed.
    Unknown,
    /// The object's entry or its note of its owner is damaged.
    Entry,
    /// The checksum of header and payload is another than the one kept.
    Checksum {
        /// The one that was kept at the save.
        expected: u32,
        /// The one of what is there now.
        found: u32,
    },
    /// The block has another order than the caller says.
    Order {
        /// What the caller asked for.
        expected: u8,
        /// What is stored.
        found: u8,
    },
    /// The payload makes no sense although its checksum fits.
    Layout,
    /// The payload's codec is not known; holds its id.
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
