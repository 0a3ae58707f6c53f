//! Ways to copy the process that pass by `pthread_atfork`: `_Fork`, `clone` and (in `syscall.rs`)
//! `syscall`, which take the same steps here. What makes the system call itself gets no managed
//! memory in its child: see [`memfold_sys::memory::zone::set_inherited`].
use crate::calls::real::next;
use crate::fork::Copying;
use core::ffi::{c_int, c_void};

type Fork = unsafe extern "C" fn() -> libc::pid_t;
type Main = unsafe extern "C" fn(*mut c_void) -> c_int;
type Clone = unsafe extern "C" fn(
    Main,
    *mut c_void,
    c_int,
    *mut c_void,
    *mut c_void,
    *mut c_void,
    *mut c_void,
) -> c_int;

/// The program's `_Fork`: as libc's.
///
/// # Safety
/// - As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _Fork() -> libc::pid_t {
    // SAFETY: libc's `_Fork` is of this type.
    let real = unsafe { core::mem::transmute::<*mut c_void, Fork>(next(c"_Fork")) };
    let copying = Copying::begin();
    // SAFETY: the caller's promise.
    let pid = unsafe { real() };
    copying.end(pid == 0);
    pid
}

struct Start {
    main: Main,
    arg: *mut c_void,
    copying: Copying,
}

/// The program's `clone`: as libc's.
///
/// # Safety
/// - As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clone(
    main: Main,
    stack: *mut c_void,
    flags: c_int,
    arg: *mut c_void,
    parent_tid: *mut c_void,
    tls: *mut c_void,
    child_tid: *mut c_void,
) -> c_int {
    // SAFETY: libc's `clone` is of this type, its last three parameters being optional ones of the
    // same class.
    let real = unsafe { core::mem::transmute::<*mut c_void, Clone>(next(c"clone")) };
    if flags & libc::CLONE_VM != 0 {
        // SAFETY: the caller's promise.
        return unsafe { real(main, stack, flags, arg, parent_tid, tls, child_tid) };
    }
    let mut start = Start { main, arg, copying: Copying::begin() };
    // SAFETY: the caller's promise. The child has a copy of this frame, which ends only after
    // `real` has returned here.
    let pid =
        unsafe { real(entry, stack, flags, (&raw mut start).cast(), parent_tid, tls, child_tid) };
    start.copying.end(false);
    pid
}

unsafe extern "C" fn entry(start: *mut c_void) -> c_int {
    // SAFETY: the child's copy of the frame of `clone`, which nothing else in this process uses.
    let Start { main, arg, copying } = unsafe { start.cast::<Start>().read() };
    copying.end(true);
    // SAFETY: as the caller of `clone` promised. libc would end the calling thread only, and the
    // engine's would go on.
    unsafe { libc::_exit(main(arg)) }
}
