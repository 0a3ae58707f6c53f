//! `mremap` that leaves an empty mapping where it takes the pages from (MREMAP_DONTUNMAP). A child
//! of fork could not tell by its own map whether that had happened when it was made
//! (`memfold/src/quiesce/copy_moment.rs`), so it happens before a fork or after.
use crate::calls::real::Real;
use crate::program;
use core::ffi::{c_int, c_void};
use core::mem::transmute;

type Mremap = unsafe extern "C" fn(*mut c_void, usize, usize, c_int, *mut c_void) -> *mut c_void;

static REAL_MREMAP: Real = Real::new(c"mremap");

/// Looks the real function up: the program's allocator may call it at any time.
pub fn find() {
    REAL_MREMAP.get();
}

/// The program's `mremap`: as libc's. Its last parameter is optional, and of the class that
/// variable arguments have too.
///
/// # Safety
/// - As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mremap(
    at: *mut c_void,
    len: usize,
    new_len: usize,
    flags: c_int,
    to: *mut c_void,
) -> *mut c_void {
    // SAFETY: libc's `mremap` is of this type as far as the machine's calling convention goes; the
    // caller's promise.
    let real = || unsafe {
        transmute::<*mut c_void, Mremap>(REAL_MREMAP.get())(at, len, new_len, flags, to)
    };
    match program::get() {
        Some(program) if flags & libc::MREMAP_DONTUNMAP != 0 => program.paused(real),
        _ => real(),
    }
}
