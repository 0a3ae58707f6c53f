//! Memory asked for ahead of its use: MAP_POPULATE and MADV_POPULATE. The kernel would fill it at
//! once, far past the limit.
use crate::calls::real::Real;
use crate::{engine, program};
use core::ffi::{c_int, c_void};
use core::mem::transmute;

type Mmap =
    unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, c_int, libc::off_t) -> *mut c_void;
pub type Madvise = unsafe extern "C" fn(*mut c_void, usize, c_int) -> c_int;

static REAL_MMAP: Real = Real::new(c"mmap");

/// MADV_POPULATE past the room that is left goes on in steps of so many bytes, with a look at the
/// program after each.
const STEP_BYTES: usize = 4 << 20;

/// Looks the real function up: the program's allocator may call it at any time.
pub fn find() {
    REAL_MMAP.get();
}

/// The program's `mmap`: as libc's, but private memory for which there is no room comes when it is
/// touched, as without MAP_POPULATE, which promises nothing.
///
/// # Safety
/// - As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    at: *mut c_void,
    len: usize,
    access: c_int,
    flags: c_int,
    fd: c_int,
    offset: libc::off_t,
) -> *mut c_void {
    let ahead = libc::MAP_POPULATE | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let too_much = flags & ahead == ahead && flags & libc::MAP_LOCKED == 0 && !has_room(len);
    let flags = if too_much { flags & !libc::MAP_POPULATE } else { flags };
    // SAFETY: libc's `mmap` is of this type; the caller's promise.
    unsafe { transmute::<*mut c_void, Mmap>(REAL_MMAP.get())(at, len, access, flags, fd, offset) }
}

/// The program's `mmap64`: the same function where `off_t` has 64 bits.
///
/// # Safety
/// - As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    at: *mut c_void,
    len: usize,
    access: c_int,
    flags: c_int,
    fd: c_int,
    offset: libc::off64_t,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe { mmap(at, len, access, flags, fd, offset) }
}

fn has_room(len: usize) -> bool {
    program::get().is_none_or(|program| program.pager.room_bytes() >= len as u64)
}

/// MADV_POPULATE_READ or _WRITE by the real `madvise`: what the kernel promises, step by step where
/// there is no room for all, so that what comes first can be folded meanwhile.
///
/// # Safety
/// - As libc's `madvise`, which `real` is.
pub unsafe fn populate(real: Madvise, at: *mut c_void, len: usize, advice: c_int) -> c_int {
    if has_room(len) {
        // SAFETY: the caller's promise.
        return unsafe { real(at, len, advice) };
    }
    for offset in (0..len).step_by(STEP_BYTES) {
        // SAFETY: a part of what the caller vouches for.
        let result =
            unsafe { real(at.wrapping_byte_add(offset), STEP_BYTES.min(len - offset), advice) };
        if result != 0 {
            return result;
        }
        // After an errand the engine's first thread looks at the program's size.
        engine::have_done(|| {});
    }
    0
}
