//! The interface of a codec to the store: an encoder and a decoder.
use super::dictionary::DigestedDictionary;
use core::ops::Range;

/// A codec failed; the number is its own code.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct CodecError(pub i64);

/// Bytes that a codec reads.
#[derive(Copy, Clone)]
pub(crate) struct CodecInput {
    pub at: *const u8,
    pub len: usize,
}

/// Bytes that a codec may write.
#[derive(Copy, Clone)]
pub(crate) struct CodecOutput {
    pub at: *mut u8,
    pub len: usize,
}

impl CodecOutput {
    /// Describes all of `bytes`, which are borrowed only for this call: the caller keeps them.
    pub fn of(bytes: &mut [u8]) -> CodecOutput {
        CodecOutput { at: bytes.as_mut_ptr(), len: bytes.len() }
    }
}

/// Length of the output, or `None` if it does not fit.
pub(crate) type EncodeResult = Result<Option<usize>, CodecError>;
pub(crate) type DecodeResult = Result<(), CodecError>;

/// Compresses one block at a time. All memory is allocated at its creation.
pub(crate) trait Encoder: Send {
    /// Compresses `src` to the front of `dst`. Returns `Ok(None)` if it does not fit.
    ///
    /// A `dictionary` was made for this codec at this level. A codec without dictionaries
    /// never gets one.
    ///
    /// # Safety
    /// - `src` is readable, and no thread writes there during the call.
    /// - `dst` is writable, does not overlap `src`, and no other thread touches it during the call.
    /// - `src.len` is not above the `block_bytes_max` that the encoder was made with.
    unsafe fn encode(
        &mut self,
        src: CodecInput,
        dst: CodecOutput,
        dictionary: Option<&DigestedDictionary>,
    ) -> EncodeResult;

    /// Returns whether it gives up on an incompressible block as fast as the entropy estimate
    /// would.
    fn gives_up_fast(&self) -> bool {
        false
    }
}

/// Decompresses one block at a time. All memory is allocated at its creation.
pub(crate) trait Decoder: Send {
    /// Decompresses `src` to exactly the bytes of `dst`; any other length is an error.
    ///
    /// `dictionary` is the dictionary that it was compressed with. Any bytes at `src` are allowed: at
    /// worst the result is an error or wrong bytes within `dst`.
    ///
    /// # Safety
    /// - `src` is readable, and no thread writes there during the call.
    /// - `dst` is writable, does not overlap `src`, and no other thread touches it during the call.
    unsafe fn decode(
        &mut self,
        src: CodecInput,
        dst: CodecOutput,
        dictionary: Option<&DigestedDictionary>,
    ) -> DecodeResult;

    /// Decompresses at least the bytes of `part` to their places in `dst`: at least one and not all.
    /// Other bytes are undefined, and parts of `src` that are not needed are not read. Most codecs
    /// begin at the start; those that can't stop decompress everything.
    ///
    /// # Safety
    /// - As for [`Decoder::decode`].
    unsafe fn decode_part(
        &mut self,
        src: CodecInput,
        dst: CodecOutput,
        part: Range<usize>,
        dictionary: Option<&DigestedDictionary>,
    ) -> DecodeResult {
        debug_assert!(!part.is_empty() && part.len() < dst.len && part.end <= dst.len);
        // SAFETY: as the caller says.
        unsafe { self.decode(src, dst, dictionary) }
    }
}
