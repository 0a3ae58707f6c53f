//! Serves calls that close descriptors, or ask whether they are open. The engine's own descriptors
//! seem not to be open.
use crate::syscalls::plain::raw;
use crate::syscalls::row::{CallingThread, ProgramCall};

const BAD: isize = -(libc::EBADF as isize);

/// Makes a call of which the first `count` arguments are descriptors.
fn unless_own(caller: CallingThread, nr: usize, args: &[usize; 6], count: usize) -> isize {
    match args[..count].iter().any(|fd| caller.keeper.life.owns_descriptor(*fd as i32)) {
        true => BAD,
        false => caller.plain(caller.rows.look_up(nr), nr, args),
    }
}

/// Serves `close`, `dup`, and the commands of `fcntl` on a descriptor.
pub fn of_first(caller: CallingThread, nr: usize, args: &[usize; 6]) -> isize {
    unless_own(caller, nr, args, 1)
}

/// Serves `dup2` and `dup3`.
pub fn of_both(caller: CallingThread, nr: usize, args: &[usize; 6]) -> isize {
    unless_own(caller, nr, args, 2)
}

/// Serves `close_range`.
pub fn close_range(call: &mut ProgramCall) -> isize {
    /// No descriptor of the engine is above this.
    const OWN_MAX: usize = 1 << 16;
    let [first, last, flags, ..] = call.args.map(|arg| arg as u32 as usize);
    let mut from = first;
    for fd in (first..=last.min(OWN_MAX)).filter(|fd| call.keeper.life.owns_descriptor(*fd as i32))
    {
        if fd > from {
            let result = raw(call.nr, &[from, fd - 1, flags, 0, 0, 0]);
            if result < 0 {
                return result;
            }
        }
        from = fd + 1;
    }
    if from > last && from > first { 0 } else { raw(call.nr, &[from, last, flags, 0, 0, 0]) }
}
