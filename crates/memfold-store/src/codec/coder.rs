//! What a codec is to the store: an encoder and a decoder.
use super::canned::Canned;

/// A codec said something impossible; the number is its own code.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct CodecError(pub i64);

/// Bytes that a codec reads.
#[derive(Copy, Clone)]
pub(crate) struct Input {
    pub at: *const u8,
    pub len: usize,
}

/// Bytes that a codec may write.
#[derive(Copy, Clone)]
pub(crate) struct Output {
    pub at: *mut u8,
    pub len: usize,
}

impl Output {
    /// All of `bytes`, which are borrowed for no longer than this call: the caller keeps them.
    pub fn of(bytes: &mut [u8]) -> Output {
        Output { at: bytes.as_mut_ptr(), len: bytes.len() }
    }
}

/// Length of what was written, or `None` if it does not fit.
pub(crate) type EncodeResult = Result<Option<usize>, CodecError>;
pub(crate) type DecodeResult = Result<(), CodecError>;

/// Compresses one block at a time. All memory it needs was taken when it was made.
pub(crate) trait Encoder: Send {
    /// Compresses `src` to the front of `dst`. `Ok(None)`: it does not fit.
    ///
    /// A `canned` dictionary was made for this codec at this level; a codec without dictionaries is
    /// never given one.
    ///
    /// # Safety
    /// - `src` is readable, and nobody writes there during the call.
    /// - `dst` is writable, does not overlap `src`, and nobody else touches it during the call.
    /// - `src.len` is not above the `block_bytes_max` that the encoder was made with.
    unsafe fn encode(&mut self, src: Input, dst: Output, canned: Option<&Canned>) -> EncodeResult;

    /// Whether it gives up on a block that does not shrink as fast as a look at the block would
    /// tell.
    fn gives_up_fast(&self) -> bool {
        false
    }
}

/// Decompresses one block at a time. All memory it needs was taken when it was made.
pub(crate) trait Decoder: Send {
    /// Decompresses `src` to exactly the bytes of `dst`; any other length is an error.
    ///
    /// `canned` is the dictionary that it was compressed with. Any bytes at `src` are allowed: at
    /// worst the result is an error or wrong bytes within `dst`.
    ///
    /// # Safety
    /// - `src` is readable, and nobody writes there during the call.
    /// - `dst` is writable, does not overlap `src`, and nobody else touches it during the call.
    unsafe fn decode(&mut self, src: Input, dst: Output, canned: Option<&Canned>) -> DecodeResult;

    /// As [`Decoder::decode`], but only the first `len` bytes of `dst` are wanted, at least one and
    /// not all: what comes after them may be anything, and what of `src` they don't need is not
    /// looked at. Codecs that can't stop there do all of it.
    ///
    /// # Safety
    /// - As for [`Decoder::decode`].
    unsafe fn decode_start(
        &mut self,
        src: Input,
        dst: Output,
        len: usize,
        canned: Option<&Canned>,
    ) -> DecodeResult {
        debug_assert!(len > 0 && len < dst.len);
        // SAFETY: as the caller says.
        unsafe { self.decode(src, dst, canned) }
    }
}
