//! LZ4, with the state owned by the encoder.
use super::coder::{
    CodecError, CodecInput, CodecOutput, DecodeResult, Decoder, EncodeResult, Encoder,
};
use super::dictionary::{CodecDigest, DigestedDictionary};
use super::lz4_dictionary::stream;
use alloc::boxed::Box;
use alloc::vec;
use core::ffi::{c_char, c_int, c_void};
use core::ops::Range;

// lz4-sys links liblz4 but leaves these out.
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
    fn LZ4_resetStream_fast(stream: *mut c_void);
    fn LZ4_attach_dictionary(stream: *mut c_void, dictionary: *const c_void);
    fn LZ4_compress_fast_continue(
        stream: *mut c_void,
        src: *const c_char,
        dst: *mut c_char,
        src_size: c_int,
        dst_capacity: c_int,
        acceleration: c_int,
    ) -> c_int;
    fn LZ4_decompress_safe_usingDict(
        src: *const c_char,
        dst: *mut c_char,
        src_size: c_int,
        dst_capacity: c_int,
        dictionary: *const c_char,
        dictionary_len: c_int,
    ) -> c_int;
    fn LZ4_decompress_safe_partial(
        src: *const c_char,
        dst: *mut c_char,
        src_size: c_int,
        target_size: c_int,
        dst_capacity: c_int,
    ) -> c_int;
    fn LZ4_decompress_safe_partial_usingDict(
        src: *const c_char,
        dst: *mut c_char,
        src_size: c_int,
        target_size: c_int,
        dst_capacity: c_int,
        dictionary: *const c_char,
        dictionary_len: c_int,
    ) -> c_int;
}

struct Lz4Encoder {
    /// `LZ4_sizeofState()` bytes, aligned to 8 as liblz4 requires.
    state: Box<[u64]>,
    /// A stream for use with dictionaries: always initialised.
    stream: Box<[u64]>,
    acceleration: c_int,
}

struct Lz4Decoder;

pub(super) fn encoder(level: i32, _block_bytes_max: usize) -> Box<dyn Encoder> {
    // SAFETY: takes nothing and only returns a constant of the library.
    let bytes = unsafe { LZ4_sizeofState() } as usize;
    Box::new(Lz4Encoder {
        state: vec![0; bytes.div_ceil(8)].into_boxed_slice(),
        stream: stream(),
        acceleration: level,
    })
}

pub(super) fn decoder() -> Box<dyn Decoder> {
    Box::new(Lz4Decoder)
}

impl Encoder for Lz4Encoder {
    unsafe fn encode(
        &mut self,
        src: CodecInput,
        dst: CodecOutput,
        dictionary: Option<&DigestedDictionary>,
    ) -> EncodeResult {
        let size = match dictionary.map(|c| &c.digest) {
            // SAFETY: `stream` is initialised and exclusively borrowed; the dictionary lives longer
            // than this call, at the end of which it is detached; the caller vouches for both
            // ranges, which fit a c_int.
            Some(CodecDigest::Lz4(dictionary)) => unsafe {
                let stream = self.stream.as_mut_ptr().cast();
                LZ4_resetStream_fast(stream);
                LZ4_attach_dictionary(stream, dictionary.stream.as_ptr().cast());
                let (len, room) = (src.len as c_int, dst.len as c_int);
                LZ4_compress_fast_continue(
                    stream,
                    src.at.cast(),
                    dst.at.cast(),
                    len,
                    room,
                    self.acceleration,
                )
            },
            // SAFETY: `state` has the size and alignment that the library asked for and is
            // exclusively borrowed; the caller vouches for both ranges, both at most 2 MiB, so they
            // fit a c_int.
            _ => unsafe {
                let (len, room) = (src.len as c_int, dst.len as c_int);
                let state = self.state.as_mut_ptr().cast();
                LZ4_compress_fast_extState(
                    state,
                    src.at.cast(),
                    dst.at.cast(),
                    len,
                    room,
                    self.acceleration,
                )
            },
        };
        packed(size, dst.len)
    }

    // The longer it finds nothing, the faster it skips ahead.
    fn gives_up_fast(&self) -> bool {
        true
    }
}

/// Returns the output length that liblz4 reports.
pub(super) fn packed(size: c_int, room: usize) -> EncodeResult {
    match size {
        0 => Ok(None),
        n if n > 0 && n as usize <= room => Ok(Some(n as usize)),
        n => Err(CodecError(n.into())),
    }
}

impl Decoder for Lz4Decoder {
    unsafe fn decode(
        &mut self,
        src: CodecInput,
        dst: CodecOutput,
        dictionary: Option<&DigestedDictionary>,
    ) -> DecodeResult {
        let (from, to, len, room) =
            (src.at.cast(), dst.at.cast(), src.len as c_int, dst.len as c_int);
        // SAFETY: both read only `src` and the dictionary, and write only to `dst`, whatever the
        // input; the caller vouches for both ranges.
        let size = unsafe {
            match dictionary.map(|c| &c.digest) {
                Some(CodecDigest::Lz4(dictionary)) => LZ4_decompress_safe_usingDict(
                    from,
                    to,
                    len,
                    room,
                    dictionary.content.as_ptr().cast(),
                    dictionary.content.len() as c_int,
                ),
                _ => lz4_sys::LZ4_decompress_safe(from, to, len, room),
            }
        };
        if size >= 0 && size as usize == dst.len { Ok(()) } else { Err(CodecError(size.into())) }
    }

    unsafe fn decode_part(
        &mut self,
        src: CodecInput,
        dst: CodecOutput,
        part: Range<usize>,
        dictionary: Option<&DigestedDictionary>,
    ) -> DecodeResult {
        let (from, to, src_len) = (src.at.cast(), dst.at.cast(), src.len as c_int);
        let (target, room) = (part.end as c_int, dst.len as c_int);
        // SAFETY: both read only `src` and the dictionary, and write no further than `target` and
        // `room` allow, whatever the input; the caller vouches for both ranges.
        let size = unsafe {
            match dictionary.map(|c| &c.digest) {
                Some(CodecDigest::Lz4(dictionary)) => LZ4_decompress_safe_partial_usingDict(
                    from,
                    to,
                    src_len,
                    target,
                    room,
                    dictionary.content.as_ptr().cast(),
                    dictionary.content.len() as c_int,
                ),
                _ => LZ4_decompress_safe_partial(from, to, src_len, target, room),
            }
        };
        if size == target { Ok(()) } else { Err(CodecError(size.into())) }
    }
}
