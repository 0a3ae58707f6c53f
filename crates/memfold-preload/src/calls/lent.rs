//! Calls that lend pages of the program to the kernel for a time after they return, and don't pin
//! them: `vmsplice` and MSG_ZEROCOPY. The engine can't see such a page, and would give its memory
//! to other data. So the first copies, and the second is refused when a socket is set up for it;
//! programs must be ready for that on any kernel.
use crate::calls::real::Real;
use crate::gate;
use core::ffi::{c_int, c_uint, c_void};
use core::mem::transmute;
use memfold_sys::Errno;
use memfold_sys::raw::system_call;

type Vmsplice = unsafe extern "C" fn(c_int, *const libc::iovec, usize, c_uint) -> isize;
type Setsockopt =
    unsafe extern "C" fn(c_int, c_int, c_int, *const c_void, libc::socklen_t) -> c_int;

static REAL_VMSPLICE: Real = Real::new(c"vmsplice");
static REAL_SETSOCKOPT: Real = Real::new(c"setsockopt");

/// The program's `vmsplice`: as libc's, but a pipe gets copies of the pages.
///
/// # Safety
/// - As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmsplice(
    fd: c_int,
    parts: *const libc::iovec,
    count: usize,
    flags: c_uint,
) -> isize {
    // SAFETY: both only ask about a descriptor.
    let (size, mode) =
        unsafe { (libc::fcntl(fd, libc::F_GETPIPE_SZ), libc::fcntl(fd, libc::F_GETFL)) };
    let known =
        libc::SPLICE_F_MOVE | libc::SPLICE_F_NONBLOCK | libc::SPLICE_F_MORE | libc::SPLICE_F_GIFT;
    if size < 0
        || mode & libc::O_ACCMODE == libc::O_RDONLY
        || flags & !known != 0
        || crate::program::get().is_none() && !gate::is_on()
    {
        // SAFETY: libc's `vmsplice` is of this type; the caller's promise.
        return unsafe {
            transmute::<*mut c_void, Vmsplice>(REAL_VMSPLICE.get())(fd, parts, count, flags)
        };
    }
    // At no offset (-1), a pipe takes what fits.
    let args =
        [fd as usize, parts as usize, count, usize::MAX, usize::MAX, libc::RWF_NOWAIT as usize];
    loop {
        let done = if gate::is_on() {
            // SAFETY: the caller's promise. By libc, so that the gate sees it.
            match unsafe { libc::pwritev2(fd, parts, count as c_int, -1, libc::RWF_NOWAIT) } {
                // SAFETY: the caller is a thread of the program's, which has an `errno`.
                -1 => Err(Errno::from_raw_os_error(unsafe { *libc::__errno_location() })),
                done => Ok(done as i64),
            }
        } else {
            // SAFETY: the caller's promise.
            unsafe { system_call(libc::SYS_pwritev2, args) }
        };
        match done {
            Ok(done) => return done as isize,
            // Like vmsplice, it waits only while nothing fits.
            Err(Errno::AGAIN) if flags & libc::SPLICE_F_NONBLOCK == 0 => {}
            Err(_) => {
                // Once more by libc, which sets errno.
                // SAFETY: the caller's promise.
                return unsafe { libc::pwritev2(fd, parts, count as c_int, -1, libc::RWF_NOWAIT) };
            }
        }
        let mut room = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
        // SAFETY: one descriptor, local.
        if unsafe { libc::poll(&raw mut room, 1, -1) } < 0 {
            return -1;
        }
    }
}

/// The program's `setsockopt`: as libc's, but SO_ZEROCOPY is refused.
///
/// # Safety
/// - As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: libc::socklen_t,
) -> c_int {
    let refused = level == libc::SOL_SOCKET
        && name == libc::SO_ZEROCOPY
        && (crate::program::get().is_some() || gate::is_on());
    // SAFETY: libc's `setsockopt` is of this type; the caller's promise. No option is no bytes
    // long: EINVAL.
    unsafe {
        let real = transmute::<*mut c_void, Setsockopt>(REAL_SETSOCKOPT.get());
        real(fd, level, name, value, if refused { 0 } else { len })
    }
}
