//! LZ4, with the state owned by the encoder.
use super::{Canned, CodecError, Decoder, Digest as AnyDigest, Encoder};
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
    fn LZ4_initStream(buffer: *mut c_void, size: usize) -> *mut c_void;
    fn LZ4_resetStream_fast(stream: *mut c_void);
    fn LZ4_loadDictSlow(stream: *mut c_void, dictionary: *const c_char, len: c_int) -> c_int;
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
}

/// A dictionary and liblz4's table of it.
pub(crate) struct Digest {
    content: Box<[u8]>,
    /// A stream that the dictionary was loaded into; it refers to `content`. Only read from then on.
    stream: Box<[u64]>,
}

impl Digest {
    pub fn new(content: Box<[u8]>) -> Digest {
        let mut stream = stream();
        // SAFETY: the stream was initialised and is ours; the content is readable, and is moved only as a box, so its
        // bytes stay in place as long as the stream refers to them.
        unsafe { LZ4_loadDictSlow(stream.as_mut_ptr().cast(), content.as_ptr().cast(), content.len() as c_int) };
        Digest { content, stream }
    }

    /// Bytes of memory besides the content.
    pub fn bytes(&self) -> usize {
        self.stream.len() * 8
    }
}

/// An initialised stream.
fn stream() -> Box<[u64]> {
    // SAFETY: takes nothing and only returns a constant of the library.
    let bytes = unsafe { LZ4_sizeofState() } as usize;
    let mut stream = vec![0u64; bytes.div_ceil(8)].into_boxed_slice();
    // SAFETY: the buffer is as long as said, aligned to 8 as liblz4 asks, and ours.
    let made = unsafe { LZ4_initStream(stream.as_mut_ptr().cast(), stream.len() * 8) };
    assert!(!made.is_null(), "liblz4 refused a stream of its own size");
    stream
}

struct Lz4Encoder {
    /// `LZ4_sizeofState()` bytes, aligned to 8 as liblz4 asks.
    state: Box<[u64]>,
    /// A stream for use with dictionaries: always initialised.
    stream: Box<[u64]>,
    acceleration: c_int,
}

struct Lz4Decoder;

pub(super) fn encoder(level: i32, _block_bytes_max: usize) -> Box<dyn Encoder> {
    // SAFETY: takes nothing and only returns a constant of the library.
    let bytes = unsafe { LZ4_sizeofState() } as usize;
    Box::new(Lz4Encoder { state: vec![0; bytes.div_ceil(8)].into_boxed_slice(), stream: stream(), acceleration: level })
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
        canned: Option<&Canned>,
    ) -> Result<Option<usize>, CodecError> {
        let size = match canned.map(|c| &c.digest) {
            // SAFETY: `stream` is initialised and exclusively borrowed; the digest lives longer than this call, at the end
            // of which it is detached; the caller vouches for both ranges, which fit a c_int.
            Some(AnyDigest::Lz4(digest)) => unsafe {
                let stream = self.stream.as_mut_ptr().cast();
                LZ4_resetStream_fast(stream);
                LZ4_attach_dictionary(stream, digest.stream.as_ptr().cast());
                let (len, room) = (len as c_int, room as c_int);
                LZ4_compress_fast_continue(stream, src.cast(), dst.cast(), len, room, self.acceleration)
            },
            // SAFETY: `state` has the size and alignment that the library asked for and is exclusively borrowed; the
            // caller vouches for `len` bytes at `src` and `room` bytes at `dst`, both at most 2 MiB, so they fit a c_int.
            _ => unsafe {
                let (len, room) = (len as c_int, room as c_int);
                let state = self.state.as_mut_ptr().cast();
                LZ4_compress_fast_extState(state, src.cast(), dst.cast(), len, room, self.acceleration)
            },
        };
        match size {
            0 => Ok(None),
            n if n > 0 && n as usize <= room => Ok(Some(n as usize)),
            n => Err(CodecError(n.into())),
        }
    }

    // It skips ahead faster the longer it finds nothing.
    fn gives_up_fast(&self) -> bool {
        true
    }
}

impl Decoder for Lz4Decoder {
    unsafe fn decode(
        &mut self,
        src: *const u8,
        len: usize,
        dst: *mut u8,
        raw_len: usize,
        canned: Option<&Canned>,
    ) -> Result<(), CodecError> {
        // SAFETY: both read only `len` bytes at `src` and the dictionary, and write only `raw_len` bytes at `dst`, whatever
        // the input; the caller vouches for both ranges.
        let size = unsafe {
            match canned.map(|c| &c.digest) {
                Some(AnyDigest::Lz4(digest)) => LZ4_decompress_safe_usingDict(
                    src.cast(),
                    dst.cast(),
                    len as c_int,
                    raw_len as c_int,
                    digest.content.as_ptr().cast(),
                    digest.content.len() as c_int,
                ),
                _ => lz4_sys::LZ4_decompress_safe(src.cast(), dst.cast(), len as c_int, raw_len as c_int),
            }
        };
        if size >= 0 && size as usize == raw_len { Ok(()) } else { Err(CodecError(size.into())) }
    }
}
