//! A userfaultfd of the program's own. A mapping has one at most: what the program registers comes
//! home and leaves management first. What it has registered is never taken
//! ([`memfold::delivery::program::Watcher::adopt`]).
use crate::calls::real::Real;
use crate::engine;
use crate::program;
use core::ffi::{c_int, c_ulong, c_void};
use core::mem::transmute;
use memfold_sys::uffd::registration;

type Ioctl = unsafe extern "C" fn(c_int, c_ulong, *mut c_void) -> c_int;

static REAL_IOCTL: Real = Real::new(c"ioctl");

/// Looks the real function up.
pub fn find() {
    REAL_IOCTL.get();
}

/// The program's `ioctl`: as libc's. libc's is variadic; on the machines that memfold runs on, an
/// argument goes the same way.
///
/// # Safety
/// - As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, arg: *mut c_void) -> c_int {
    // SAFETY: libc's `ioctl` takes these; the caller's promise.
    let call = || unsafe { transmute::<*mut c_void, Ioctl>(REAL_IOCTL.get())(fd, request, arg) };
    // SAFETY: the caller's promise: the argument is that of the request.
    let Some((start, end)) = (unsafe { registration(request, arg) }) else { return call() };
    let Some(program) = program::get() else { return call() };
    program.paused(|| {
        engine::have_done(|| program.release(start, end, true));
        let result = call();
        // If it was refused, the next look takes the memory again.
        program.note_unmarked();
        result
    })
}
