//! DEFLATE by libdeflate, the software equivalent of hardware accelerators. It allocates only when
//! a context is made.
use super::coder::{
    CodecError, CodecInput, CodecOutput, DecodeResult, Decoder, EncodeResult, Encoder,
};
use super::dictionary::DigestedDictionary;
use alloc::boxed::Box;
use core::ffi::{c_int, c_void};
use core::ptr::NonNull;

#[repr(C)]
struct RawCompressor {
    _opaque: [u8; 0],
}

#[repr(C)]
struct RawDecompressor {
    _opaque: [u8; 0],
}

// From libdeflate.h; see build.rs for why not from libdeflate-sys.
unsafe extern "C" {
    fn libdeflate_alloc_compressor(level: c_int) -> *mut RawCompressor;
    fn libdeflate_free_compressor(compressor: *mut RawCompressor);
    fn libdeflate_deflate_compress(
        compressor: *mut RawCompressor,
        src: *const c_void,
        src_len: usize,
        dst: *mut c_void,
        dst_room: usize,
    ) -> usize;
    fn libdeflate_alloc_decompressor() -> *mut RawDecompressor;
    fn libdeflate_free_decompressor(decompressor: *mut RawDecompressor);
    fn libdeflate_deflate_decompress_ex(
        decompressor: *mut RawDecompressor,
        src: *const c_void,
        src_len: usize,
        dst: *mut c_void,
        dst_len: usize,
        src_len_used: *mut usize,
        dst_len_written: *mut usize,
    ) -> c_int;
}

/// The input continues after the end of the stream. This is not one of libdeflate's codes, which
/// are positive.
const TRAILING_BYTES: i64 = -1;

struct DeflateEncoder {
    raw: NonNull<RawCompressor>,
}

struct DeflateDecoder {
    raw: NonNull<RawDecompressor>,
}

// SAFETY: a context is plain memory that belongs to its owner and is only used through `&mut self`.
unsafe impl Send for DeflateEncoder {}
// SAFETY: a context is plain memory that belongs to its owner and is only used through `&mut self`.
unsafe impl Send for DeflateDecoder {}

pub(super) fn encoder(level: i32, _block_bytes_max: usize) -> Box<dyn Encoder> {
    // SAFETY: takes a number; a level that it does not have gives null.
    let raw = unsafe { libdeflate_alloc_compressor(level) };
    Box::new(DeflateEncoder {
        raw: NonNull::new(raw).expect("libdeflate has the level, and memory"),
    })
}

pub(super) fn decoder() -> Box<dyn Decoder> {
    // SAFETY: takes nothing.
    let raw = unsafe { libdeflate_alloc_decompressor() };
    Box::new(DeflateDecoder { raw: NonNull::new(raw).expect("memory for a decompressor") })
}

impl Encoder for DeflateEncoder {
    unsafe fn encode(
        &mut self,
        src: CodecInput,
        dst: CodecOutput,
        _dictionary: Option<&DigestedDictionary>,
    ) -> EncodeResult {
        // SAFETY: the context is alive and exclusively borrowed; the caller vouches for both
        // ranges.
        let size = unsafe {
            libdeflate_deflate_compress(
                self.raw.as_ptr(),
                src.at.cast(),
                src.len,
                dst.at.cast(),
                dst.len,
            )
        };
        match size {
            0 => Ok(None),
            size if size <= dst.len => Ok(Some(size)),
            size => Err(CodecError(size as i64)),
        }
    }
}

impl Decoder for DeflateDecoder {
    unsafe fn decode(
        &mut self,
        src: CodecInput,
        dst: CodecOutput,
        _dictionary: Option<&DigestedDictionary>,
    ) -> DecodeResult {
        let (mut input_len, mut output_len) = (0, 0);
        // SAFETY: the context is alive and exclusively borrowed; the caller vouches for both
        // ranges, and libdeflate stays within them whatever the input; the two lengths are written
        // to locals.
        let code = unsafe {
            libdeflate_deflate_decompress_ex(
                self.raw.as_ptr(),
                src.at.cast(),
                src.len,
                dst.at.cast(),
                dst.len,
                &mut input_len,
                &mut output_len,
            )
        };
        match code {
            0 if input_len == src.len && output_len == dst.len => Ok(()),
            0 if input_len != src.len => Err(CodecError(TRAILING_BYTES)),
            0 => Err(CodecError(output_len as i64)),
            code => Err(CodecError(code.into())),
        }
    }
}

impl Drop for DeflateEncoder {
    fn drop(&mut self) {
        // SAFETY: it came from libdeflate and is not used any more.
        unsafe { libdeflate_free_compressor(self.raw.as_ptr()) };
    }
}

impl Drop for DeflateDecoder {
    fn drop(&mut self) {
        // SAFETY: it came from libdeflate and is not used any more.
        unsafe { libdeflate_free_decompressor(self.raw.as_ptr()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::{CODECS, Codec};
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    #[repr(C)]
    struct Options {
        bytes: usize,
        malloc: extern "C" fn(usize) -> *mut c_void,
        free: unsafe extern "C" fn(*mut c_void),
    }

    unsafe extern "C" {
        fn libdeflate_alloc_compressor_ex(
            level: c_int,
            options: *const Options,
        ) -> *mut RawCompressor;
    }

    static ASKED: AtomicUsize = AtomicUsize::new(0);

    extern "C" fn counting_malloc(bytes: usize) -> *mut c_void {
        ASKED.fetch_add(bytes, Relaxed);
        // SAFETY: takes a number.
        unsafe { libc::malloc(bytes) }
    }

    /// Returns the bytes that a compressor of `level` allocates.
    fn compressor_bytes(level: c_int) -> usize {
        let options =
            Options { bytes: size_of::<Options>(), malloc: counting_malloc, free: libc::free };
        let before = ASKED.load(Relaxed);
        // SAFETY: the options are as libdeflate.h has them, with a pair of functions that fit each
        // other.
        unsafe { libdeflate_free_compressor(libdeflate_alloc_compressor_ex(level, &options)) };
        ASKED.load(Relaxed) - before
    }

    #[test]
    fn levels_take_the_memory_that_their_help_says() {
        let kib = |level| compressor_bytes(level).div_ceil(1 << 10);
        let all: Vec<usize> = (1..=12).map(kib).collect();
        println!("KiB by level, from 1: {all:?}");
        let Codec { help, .. } =
            CODECS.iter().find(|codec| codec.format == crate::format::DEFLATE).unwrap();
        let assert_help = |text: &str| assert!(help.contains(text), "{help}: not {text}");
        assert_help(&format!("1 takes {} KiB a thread", all[0]));
        assert_help(&format!("2 to 9 take {} KiB", all[1..9].iter().max().unwrap()));
        assert_help(&format!(
            "10 to 12 {:.1} MiB",
            *all[9..].iter().max().unwrap() as f64 / 1024.0
        ));
    }
}
