//! `malloc` and `free` for the C code inside this library (zstd's fall-backs): from its own arena,
//! never the program's.
//!
//! The names are hidden, so they bind here and are not seen by the program. Codecs are given all
//! their memory beforehand; these make sure that a path which isn't can't reach a heap that may be
//! folded.
use alloc::alloc::{Layout, alloc, dealloc};
use core::ffi::c_void;
use core::ptr::null_mut;

/// In front of each block: its whole length. Also the alignment of blocks, which is what `malloc`
/// promises.
const HEADER_BYTES: usize = 16;

extern "C" fn c_malloc(size: usize) -> *mut c_void {
    let Some(len) = size.checked_add(HEADER_BYTES) else { return null_mut() };
    let Ok(layout) = Layout::from_size_align(len, HEADER_BYTES) else { return null_mut() };
    // SAFETY: the layout is at least a header long; the header is written into a block just
    // allocated for it.
    unsafe {
        let at = alloc(layout);
        if at.is_null() {
            return null_mut();
        }
        at.cast::<usize>().write(len);
        at.add(HEADER_BYTES).cast()
    }
}

/// # Safety
/// - `at` is null, or came from `c_malloc` and is given back once.
unsafe extern "C" fn c_free(at: *mut c_void) {
    if at.is_null() {
        return;
    }
    // SAFETY: by the caller's promise a header of ours lies in front, and the layout is the one it
    // was allocated with.
    unsafe {
        let start = at.cast::<u8>().sub(HEADER_BYTES);
        let len = start.cast::<usize>().read();
        dealloc(start, Layout::from_size_align_unchecked(len, HEADER_BYTES));
    }
}

core::arch::global_asm!(
    ".hidden malloc", ".globl malloc", "malloc:", "jmp {malloc}",
    ".hidden free", ".globl free", "free:", "jmp {free}",
    malloc = sym c_malloc, free = sym c_free,
);
