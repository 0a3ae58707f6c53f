//! No compression: the encoder always reports "does not fit", so that the block is stored raw.
use super::coder::{
    CodecError, CodecInput, CodecOutput, DecodeResult, Decoder, EncodeResult, Encoder,
};
use super::dictionary::DigestedDictionary;
use alloc::boxed::Box;

struct PlainCodec;

pub(super) fn encoder(_level: i32, _block_bytes_max: usize) -> Box<dyn Encoder> {
    Box::new(PlainCodec)
}

pub(super) fn decoder() -> Box<dyn Decoder> {
    Box::new(PlainCodec)
}

impl Encoder for PlainCodec {
    unsafe fn encode(
        &mut self,
        _src: CodecInput,
        _dst: CodecOutput,
        _dictionary: Option<&DigestedDictionary>,
    ) -> EncodeResult {
        Ok(None)
    }
}

impl Decoder for PlainCodec {
    unsafe fn decode(
        &mut self,
        src: CodecInput,
        dst: CodecOutput,
        _dictionary: Option<&DigestedDictionary>,
    ) -> DecodeResult {
        if src.len != dst.len {
            return Err(CodecError(src.len as i64));
        }
        // SAFETY: `src` is readable and `dst` writable for the same number of bytes, and they do
        // not overlap.
        unsafe { core::ptr::copy_nonoverlapping(src.at, dst.at, dst.len) };
        Ok(())
    }
}
