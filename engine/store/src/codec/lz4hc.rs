//! LZ4HC: slower than LZ4, with smaller output in the same stored format, read by LZ4's decoder.
use super::coder::{CodecInput, CodecOutput, EncodeResult, Encoder};
use super::dictionary::DigestedDictionary;
use super::lz4::packed;
use alloc::boxed::Box;
use alloc::vec;
use core::ffi::{c_char, c_int, c_void};

// lz4-sys links liblz4 but leaves these out.
unsafe extern "C" {
    fn LZ4_sizeofStateHC() -> c_int;
    fn LZ4_initStreamHC(buffer: *mut c_void, size: usize) -> *mut c_void;
    fn LZ4_compress_HC_extStateHC_fastReset(
        state: *mut c_void,
        src: *const c_char,
        dst: *mut c_char,
        src_size: c_int,
        dst_capacity: c_int,
        level: c_int,
    ) -> c_int;
}

struct Lz4HcEncoder {
    /// `LZ4_sizeofStateHC()` bytes, aligned to 8 as liblz4 requires.
    state: Box<[u64]>,
    level: c_int,
}

pub(super) fn encoder(level: i32, _block_bytes_max: usize) -> Box<dyn Encoder> {
    // SAFETY: takes nothing and only returns a constant of the library.
    let bytes = unsafe { LZ4_sizeofStateHC() } as usize;
    let mut state = vec![0u64; bytes.div_ceil(8)].into_boxed_slice();
    // SAFETY: the buffer has the stated length and alignment, and belongs to this function.
    let stream = unsafe { LZ4_initStreamHC(state.as_mut_ptr().cast(), state.len() * 8) };
    assert!(!stream.is_null(), "liblz4 refused a state of its own size");
    Box::new(Lz4HcEncoder { state, level })
}

impl Encoder for Lz4HcEncoder {
    unsafe fn encode(
        &mut self,
        src: CodecInput,
        dst: CodecOutput,
        _dictionary: Option<&DigestedDictionary>,
    ) -> EncodeResult {
        // SAFETY: `state` was initialised by the library and is exclusively borrowed; the caller
        // vouches for both ranges, both at most 2 MiB and a little, so they fit a c_int. Levels up
        // to 9 allocate nothing.
        let size = unsafe {
            LZ4_compress_HC_extStateHC_fastReset(
                self.state.as_mut_ptr().cast(),
                src.at.cast(),
                dst.at.cast(),
                src.len as c_int,
                dst.len as c_int,
                self.level,
            )
        };
        packed(size, dst.len)
    }
}
