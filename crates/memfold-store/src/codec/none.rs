//! No compression: the encoder always says "does not fit", so that the block is stored raw.
use super::{Canned, CodecError, Decoder, Encoder};
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
        _src: *const u8,
        _len: usize,
        _dst: *mut u8,
        _room: usize,
        _canned: Option<&Canned>,
    ) -> Result<Option<usize>, CodecError> {
        Ok(None)
    }
}

impl Decoder for None_ {
    unsafe fn decode(
        &mut self,
        src: *const u8,
        len: usize,
        dst: *mut u8,
        raw_len: usize,
        _canned: Option<&Canned>,
    ) -> Result<(), CodecError> {
        if len != raw_len {
            return Err(CodecError(len as i64));
        }
        // SAFETY: `src` is readable and `dst` writable for `len == raw_len` bytes, and they do not overlap.
        unsafe { core::ptr::copy_nonoverlapping(src, dst, raw_len) };
        Ok(())
    }
}
