//! Thread stacks: they hold TLS and what the kernel writes at a thread's end, so they are never
//! folded.
use crate::calls::real::next;
use crate::gate;
use crate::program::{self, Program};
use alloc::boxed::Box;
use core::ffi::{c_int, c_void};
use core::mem::{MaybeUninit, transmute};

type Main = extern "C" fn(*mut c_void) -> *mut c_void;
type Create = unsafe extern "C" fn(
    *mut libc::pthread_t,
    *const libc::pthread_attr_t,
    Main,
    *mut c_void,
) -> c_int;

struct Start {
    main: Main,
    arg: *mut c_void,
    /// Paused, if there is one: the new thread ends the pause.
    program: Option<&'static Program>,
}

/// The program's `pthread_create`: as libc's, and the new thread's stack is kept out of management.
///
/// # Safety
/// - As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_create(
    thread: *mut libc::pthread_t,
    attr: *const libc::pthread_attr_t,
    main: Main,
    arg: *mut c_void,
) -> c_int {
    // SAFETY: the next definition after this library's is libc's, whose type this is.
    let real = unsafe { transmute::<*mut c_void, Create>(next(c"pthread_create")) };
    if gate::is_on() {
        // SAFETY: the caller's arguments are passed on.
        return unsafe { real(thread, attr, main, arg) };
    }
    // No adoption from before the stack is mapped until the new thread has excluded it.
    let program = program::get();
    if let Some(program) = program {
        program.pause();
    }
    let start = Box::into_raw(Box::new(Start { main, arg, program }));
    // SAFETY: the caller's arguments are passed on; the new thread takes over `start`.
    let result = unsafe { real(thread, attr, entry, start.cast()) };
    if result != 0 {
        // SAFETY: no thread was made, so nobody else has the box.
        drop(unsafe { Box::from_raw(start) });
        if let Some(program) = program {
            // SAFETY: paused above, and the thread that would have ended it was not made.
            unsafe { program.resume() };
        }
    }
    result
}

extern "C" fn entry(start: *mut c_void) -> *mut c_void {
    // SAFETY: `pthread_create` gave this thread the box.
    let Start { main, arg, program } = *unsafe { Box::from_raw(start.cast::<Start>()) };
    if let Some(program) = program {
        let (at, len) = own_stack();
        program.exclude(at, at + len);
        // SAFETY: paused by the thread that made this one, which leaves it to this one to resume.
        unsafe { program.resume() };
    }
    main(arg)
}

fn own_stack() -> (usize, usize) {
    let mut attr = MaybeUninit::<libc::pthread_attr_t>::uninit();
    let (mut at, mut len) = (core::ptr::null_mut(), 0);
    // SAFETY: `attr` is filled by the first call, read by the second and destroyed by the third,
    // only if the first succeeds.
    unsafe {
        if libc::pthread_getattr_np(libc::pthread_self(), attr.as_mut_ptr()) != 0 {
            return (0, 0);
        }
        libc::pthread_attr_getstack(attr.as_ptr(), &mut at, &mut len);
        libc::pthread_attr_destroy(attr.as_mut_ptr());
    }
    (at as usize, len)
}
