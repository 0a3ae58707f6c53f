//! A dictionary prepared for LZ4.
use alloc::boxed::Box;
use alloc::vec;
use core::ffi::{c_char, c_int, c_void};

// lz4-sys links liblz4 but leaves these out.
unsafe extern "C" {
    fn LZ4_sizeofState() -> c_int;
    fn LZ4_initStream(buffer: *mut c_void, size: usize) -> *mut c_void;
    fn LZ4_loadDictSlow(stream: *mut c_void, dictionary: *const c_char, len: c_int) -> c_int;
}

/// A dictionary and liblz4's table of it.
pub(crate) struct Lz4Dictionary {
    pub(super) content: Box<[u8]>,
    /// A stream that the dictionary was loaded into; it refers to `content`. Only read from then
    /// on.
    pub(super) stream: Box<[u64]>,
}

impl Lz4Dictionary {
    pub fn new(content: Box<[u8]>) -> Lz4Dictionary {
        let mut stream = stream();
        // SAFETY: the stream was initialised and belongs to this function. The content is readable,
        // and is moved only as a box, so its bytes stay in place as long as the stream refers to
        // them.
        unsafe {
            LZ4_loadDictSlow(
                stream.as_mut_ptr().cast(),
                content.as_ptr().cast(),
                content.len() as c_int,
            )
        };
        Lz4Dictionary { content, stream }
    }

    /// Returns the bytes of memory besides the content.
    pub fn bytes(&self) -> usize {
        self.stream.len() * 8
    }
}

/// Makes an initialised stream.
pub(super) fn stream() -> Box<[u64]> {
    // SAFETY: takes nothing and only returns a constant of the library.
    let bytes = unsafe { LZ4_sizeofState() } as usize;
    let mut stream = vec![0u64; bytes.div_ceil(8)].into_boxed_slice();
    // SAFETY: the buffer has the stated length, is aligned to 8 as liblz4 requires, and belongs to
    // this function.
    let state = unsafe { LZ4_initStream(stream.as_mut_ptr().cast(), stream.len() * 8) };
    assert!(!state.is_null(), "liblz4 refused a stream of its own size");
    stream
}
