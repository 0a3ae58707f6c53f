//! Restores what Rust's runtime changes in a process before `main`, so that the program inherits
//! what memfold inherited.
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::Relaxed};

/// Whether SIGPIPE was ignored at the start. The runtime always ignores it.
static PIPE_IGNORED: AtomicBool = AtomicBool::new(false);
/// Bit n is set if descriptor n, of 0 to 2, was closed. The runtime opens /dev/null in its place.
static CLOSED: AtomicU8 = AtomicU8::new(0);

#[used]
#[unsafe(link_section = ".init_array")]
static REMEMBER: extern "C" fn() = remember;

/// Runs before the runtime's own start.
extern "C" fn remember() {
    let mut pipe = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: the call only reads the disposition. The kernel fills `pipe` on success, and it is
    // read only then.
    let is_ignored = unsafe {
        libc::sigaction(libc::SIGPIPE, std::ptr::null(), pipe.as_mut_ptr()) == 0
            && pipe.assume_init().sa_sigaction == libc::SIG_IGN
    };
    PIPE_IGNORED.store(is_ignored, Relaxed);
    // SAFETY: F_GETFD only reads flags, has no pointers, and fails for a closed descriptor.
    let closed_bits = (0..3)
        .filter(|&fd| unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0)
        .fold(0, |bits, fd| bits | 1 << fd);
    CLOSED.store(closed_bits, Relaxed);
}

/// Restores the state, in the process that is about to execute the program. Async-signal-safe.
pub fn restore() {
    let disposition = if PIPE_IGNORED.load(Relaxed) { libc::SIG_IGN } else { libc::SIG_DFL };
    // SAFETY: neither disposition runs a handler.
    unsafe { libc::signal(libc::SIGPIPE, disposition) };
    let closed_bits = CLOSED.load(Relaxed);
    for fd in (0..3).filter(|fd| closed_bits & 1 << fd != 0) {
        // SAFETY: nothing in this process uses the descriptor that the runtime opened. The process
        // executes another program next.
        unsafe { libc::close(fd) };
    }
}
