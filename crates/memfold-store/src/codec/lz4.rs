//! LZ4, with the state owned by the encoder.
use super::{CodecError, Decoder, Encoder};
use alloc::boxed::Box;
use alloc::vec;
use core::ffi::{c_char, c_int, c_void};

// lz4-sys links liblz4 but leaves these two out.
unsafe extern "C" {
    fn LZ4_sizeofState() -> c_int;
    fn LZ4_compress_fast_extState(
        state: *mut c_void,
        src: *const c_char,
        dst: *mut c_char,
        src_size: c_int,
        dst_capacity: c_int,
        acceleration: c_int,
    ) -> c_int;
}

struct Lz4Encoder {
    /// `LZ4_sizeofState()` bytes, aligned to 8 as liblz4 asks.
    state: Box<[u64]>,
    acceleration: c_int,
}

struct Lz4Decoder;

pub(super) fn encoder(level: i32, _block_bytes_max: usize) -> Box<dyn Encoder> {
    // SAFETY: takes nothing and only returns a constant of the library.
    let bytes = unsafe { LZ4_sizeofState() } as usize;
    Box::new(Lz4Encoder { state: vec![0; bytes.div_ceil(8)].into_boxed_slice(), acceleration: level })
}

pub(super) fn decoder() -> Box<dyn Decoder> {
    Box::new(Lz4Decoder)
}

impl Encoder for Lz4Encoder {
    unsafe fn encode(
        &mut self,
        src: *const u8,
        len: usize,
        dst: *mut u8,
        room: usize,
    ) -> Result<Option<usize>, CodecError> {
        // SAFETY: `state` has the size and alignment that the library asked for and is exclusively borrowed; the
        // caller vouches for `len` bytes at `src` and `room` bytes at `dst`, both at most 2 MiB, so they fit a c_int.
        let size = unsafe {
            LZ4_compress_fast_extState(
                self.state.as_mut_ptr().cast(),
                src.cast(),
                dst.cast(),
                len as c_int,
                room as c_int,
                self.acceleration,
            )
        };
        match size {
            0 => Ok(None),
            n if n > 0 && n as usize <= room => Ok(Some(n as usize)),
            n => Err(CodecError(n.into())),
        }
    }
}

impl Decoder for Lz4Decoder {
    unsafe fn decode(&mut self, src: *const u8, len: usize, dst: *mut u8, raw_len: usize) -> Result<(), CodecError> {
        // SAFETY: LZ4_decompress_safe reads only `len` bytes at `src` and writes only `raw_len` bytes at `dst`,
        // whatever the input; the caller vouches for both ranges.
        let size = unsafe { lz4_sys::LZ4_decompress_safe(src.cast(), dst.cast(), len as c_int, raw_len as c_int) };
        if size >= 0 && size as usize == raw_len { Ok(()) } else { Err(CodecError(size.into())) }
    }
}
