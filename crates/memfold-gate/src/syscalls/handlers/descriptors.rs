//! Serves calls that close descriptors, or ask whether they are open. The engine's own descriptors
//! seem not to be open.
use crate::syscalls::plain::raw;
use crate::syscalls::row::ProgramCall;

const BAD: isize = -(libc::EBADF as isize);

fn is_own(call: &ProgramCall, fd: usize) -> bool {
    call.keeper.owns_descriptor(fd as i32)
}

/// Serves `close`, `dup`, and the commands of `fcntl` on a descriptor.
pub fn of_first(call: &mut ProgramCall) -> isize {
    if is_own(call, call.args[0]) { BAD } else { call.wait() }
}

/// Serves `dup2` and `dup3`.
pub fn of_both(call: &mut ProgramCall) -> isize {
    if call.args[..2].iter().any(|fd| is_own(call, *fd)) { BAD } else { call.wait() }
}

/// Serves `close_range`.
pub fn close_range(call: &mut ProgramCall) -> isize {
    /// No descriptor of the engine is above this.
    const OWN_MAX: usize = 1 << 16;
    let [first, last, flags, ..] = call.args.map(|arg| arg as u32 as usize);
    let mut from = first;
    for fd in (first..=last.min(OWN_MAX)).filter(|fd| is_own(call, *fd)) {
        if fd > from {
            let done = raw(call.nr, &[from, fd - 1, flags, 0, 0, 0]);
            if done < 0 {
                return done;
            }
        }
        from = fd + 1;
    }
    if from > last && from > first { 0 } else { raw(call.nr, &[from, last, flags, 0, 0, 0]) }
}
