//! Why a stored object can't be decoded.
use crate::codec::CodecError;

/// An object's payload does not match its header although its checksum is right.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum DecodeError {
    /// The list of same-filled pages or a length is invalid.
    Layout,
    /// No codec has this id.
    Format,
    Codec(CodecError),
}
