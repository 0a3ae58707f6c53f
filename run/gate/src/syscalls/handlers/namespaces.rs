//! Makes new namespaces for a program whose keeper has threads.
use crate::keeper::ThreadKeeper;

/// Makes `unshare` or `setns` for the program's only thread, and returns the result. The kernel
/// refuses some namespaces to a process of several threads. It also refuses a new thread to a
/// process whose children will be in other namespaces than itself. So the keeper's threads must run
/// again before such a namespace is made. A second call makes it.
pub fn alone(
    threads: &dyn ThreadKeeper,
    nr: usize,
    args: &[usize; 6],
    raw: fn(usize, &[usize; 6]) -> isize,
) -> isize {
    // With `setns` the time namespace becomes the caller's own too.
    let (place, of_children) = match nr as i64 {
        libc::SYS_unshare => (0, libc::CLONE_NEWPID | libc::CLONE_NEWTIME),
        _ => (1, libc::CLONE_NEWPID),
    };
    let (later, first) = (args[place] & of_children as usize, args[place] & !of_children as usize);
    let probe = [args[0], 0, 0, 0, 0, 0];
    // The descriptor of one namespace allows one flag only, or the kernel refuses it.
    let has_several =
        place == 0 || raw(libc::SYS_pidfd_send_signal as usize, &probe) != -(libc::EBADF as isize);
    if later == 0 || first == 0 || !has_several {
        return threads.alone(&mut || raw(nr, args));
    }
    let with = |flags: usize| {
        let mut args = *args;
        args[place] = flags;
        raw(nr, &args)
    };
    let result = with(args[place]);
    if ![libc::EINVAL, libc::EUSERS].contains(&(-result as i32)) {
        return result;
    }
    match threads.alone(&mut || with(first)) {
        0 => with(later),
        result => result,
    }
}
