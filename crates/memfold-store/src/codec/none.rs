//! No compression: the encoder always reports "does not fit", so that the block is stored raw.
use super::canned::Canned;
use super::coder::{CodecError, DecodeResult, Decoder, EncodeResult, Encoder, Input, Output};
use alloc::boxed::Box;

struct None_;

pub(super) fn encoder(_level: i32, _block_bytes_max: usize) -> Box<dyn Encoder> {
    Box::new(None_)
}

pub(super) fn decoder() -> Box<dyn Decoder> {
    Box::new(None_)
}

impl Encoder for None_ {
    unsafe fn encode(
        &mut self,
        _src: Input,
        _dst: Output,
        _canned: Option<&Canned>,
    ) -> EncodeResult {
        Ok(None)
    }
}

impl Decoder for None_ {
    unsafe fn decode(&mut self, src: Input, dst: Output, _canned: Option<&Canned>) -> DecodeResult {
        if src.len != dst.len {
            return Err(CodecError(src.len as i64));
        }
        // SAFETY: `src` is readable and `dst` writable for the same number of bytes, and they do
        // not overlap.
        unsafe { core::ptr::copy_nonoverlapping(src.at, dst.at, dst.len) };
        Ok(())
    }
}
