//! A codec without pool, handles or checksums.
use super::coder::{CodecError, CodecInput, CodecOutput, Decoder, Encoder};
use super::spec::CodecSpec;
use alloc::boxed::Box;

/// One codec's encoder and decoder. Allocates only at its creation.
pub struct BareCodec {
    encoder: Box<dyn Encoder>,
    decoder: Box<dyn Decoder>,
}

impl BareCodec {
    /// Makes a codec for blocks of at most `block_bytes_max` bytes.
    pub fn new(spec: CodecSpec, block_bytes_max: usize) -> BareCodec {
        let format = spec.format() as usize;
        let decoder =
            super::decoders().into_iter().nth(format).expect("every format has a decoder");
        BareCodec { encoder: spec.encoder(block_bytes_max), decoder }
    }

    /// Compresses `len` bytes at `src` to at most `room` bytes at `dst`. Returns `Ok(None)` if they
    /// don't fit.
    ///
    /// # Errors
    /// The codec's own failure.
    ///
    /// # Safety
    /// - `src` is readable for `len` bytes, at most the `block_bytes_max` of the codec; no thread
    ///   writes there meanwhile.
    /// - `dst` is writable for `room` bytes, does not overlap `src`, and no other thread touches it
    ///   meanwhile.
    pub unsafe fn compress(
        &mut self,
        src: *const u8,
        len: usize,
        dst: *mut u8,
        room: usize,
    ) -> Result<Option<usize>, CodecError> {
        // SAFETY: as the caller says.
        unsafe {
            self.encoder.encode(
                CodecInput { at: src, len },
                CodecOutput { at: dst, len: room },
                None,
            )
        }
    }

    /// Decompresses `len` bytes at `src` to exactly `raw_len` bytes at `dst`.
    ///
    /// # Errors
    /// Bytes that are not this codec's, or another length.
    ///
    /// # Safety
    /// - `src` is readable for `len` bytes, and no thread writes there meanwhile.
    /// - `dst` is writable for `raw_len` bytes, does not overlap `src`, and no other thread touches
    ///   it meanwhile.
    pub unsafe fn decompress(
        &mut self,
        src: *const u8,
        len: usize,
        dst: *mut u8,
        raw_len: usize,
    ) -> Result<(), CodecError> {
        // SAFETY: as the caller says.
        unsafe {
            self.decoder.decode(
                CodecInput { at: src, len },
                CodecOutput { at: dst, len: raw_len },
                None,
            )
        }
    }
}
