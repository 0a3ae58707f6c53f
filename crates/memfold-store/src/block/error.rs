//! Why a stored object can't be read.
use crate::codec::CodecError;

/// An object's payload does not fit its header although its checksum does.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum DecodeError {
    /// The list of same-filled pages or a length makes no sense.
    Layout,
    /// No codec has this id.
    Format,
    Codec(CodecError),
}
