//! Names arrays of pointers: iovec, msghdr, mmsghdr, arguments of programs.
use super::ask::ask;
use crate::syscalls::operands::{Operands, PARTS_MAX};
use crate::syscalls::sizes::*;
use core::mem::size_of;

/// The longest text of an argument or of the environment, in bytes.
const ARGUMENT_MAX: usize = 128 << 10;

/// The most arguments that are named. The kernel allows a quarter of the stack's limit in bytes,
/// and 6 MiB at most.
const ARGUMENTS_MAX: usize = (6 << 20) / size_of::<usize>();

/// The number of parts of a vector that are read at a time.
const AT_ONCE: usize = 8;

/// Names an array of iovec, and the memory that it points to.
pub fn vector(n: &mut Operands, array: usize, count: usize, write: bool) {
    if count > PARTS_MAX {
        return;
    }
    n.reads(array, count * IOVEC);
    let mut i = 0;
    while i < count {
        let at = array.wrapping_add(i * IOVEC);
        if count - i < AT_ONCE {
            let Some(part) = n.get::<IOVEC>(at) else { return };
            put(n, part.word(0), part.word(8), write);
            i += 1;
            continue;
        }
        let Some(parts) = n.get::<{ AT_ONCE * IOVEC }>(at) else {
            // The first parts may be readable.
            return one_by_one(n, at, write);
        };
        for k in 0..AT_ONCE {
            put(n, parts.word(k * IOVEC), parts.word(k * IOVEC + 8), write);
        }
        i += AT_ONCE;
    }
}

/// Names the parts that can be read. This has no effect where the kernel reads the whole array
/// first, but callers need not know that.
fn one_by_one(n: &mut Operands, array: usize, write: bool) {
    for i in 0..AT_ONCE {
        let Some(part) = n.get::<IOVEC>(array.wrapping_add(i * IOVEC)) else { return };
        put(n, part.word(0), part.word(8), write);
    }
}

fn put(n: &mut Operands, start: usize, len: usize, write: bool) {
    // The kernel refuses a negative length.
    if len <= isize::MAX as usize {
        n.touches(start, len, write);
    }
}

/// Names the vector that `readv` and similar calls fill: arguments 1 and 2.
pub fn filled(n: &mut Operands) {
    vector(n, n.arg(1), n.arg(2), true);
}

/// Names the vector that `writev` and similar calls take: arguments 1 and 2.
pub fn taken(n: &mut Operands) {
    vector(n, n.arg(1), n.arg(2), false);
}

/// Names the vector of `vmsplice`. A pipe that is open for reading fills it, and any other pipe
/// takes it.
pub fn vmsplice(n: &mut Operands) {
    // SAFETY: F_GETFL touches no memory.
    let flags = unsafe { ask(libc::SYS_fcntl, [n.arg(0), libc::F_GETFL as usize, 0, 0, 0, 0]) };
    let write = flags.is_some_and(|f| f as i32 & libc::O_ACCMODE == libc::O_RDONLY);
    vector(n, n.arg(1), n.arg(2), write);
}

fn message(n: &mut Operands, at: usize, sent: bool) {
    let Some(header) = n.get::<MSGHDR>(at) else { return };
    let name_len = usize::try_from(header.half(8) as i32).unwrap_or(0).min(128);
    n.touches(header.word(0), name_len, !sent);
    if header.word(24) <= PARTS_MAX {
        vector(n, header.word(16), header.word(24), !sent);
    }
    n.touches(header.word(32), header.word(40), !sent);
}

/// Names a message that is sent.
pub fn sendmsg(n: &mut Operands) {
    n.reads(n.arg(1), MSGHDR);
    message(n, n.arg(1), true);
}

/// Names room for a message. The kernel writes to the header.
pub fn recvmsg(n: &mut Operands) {
    n.writes(n.arg(1), MSGHDR);
    message(n, n.arg(1), false);
}

fn messages(n: &mut Operands, sent: bool) {
    let count = (n.int(2) as usize).min(PARTS_MAX);
    n.writes(n.arg(1), count * MMSGHDR);
    for i in 0..count {
        message(n, n.arg(1).wrapping_add(i * MMSGHDR), sent);
    }
}

/// Names messages that are sent. The kernel writes the length of each.
pub fn sendmmsg(n: &mut Operands) {
    messages(n, true);
}

/// Names buffers for messages, and the timeout: the kernel overwrites it with the remaining time.
pub fn recvmmsg(n: &mut Operands) {
    n.writes(n.arg(4), TIMESPEC);
    messages(n, false);
}

fn strings(n: &mut Operands, array: usize) {
    if array == 0 {
        return;
    }
    let mut count = 0;
    while count < ARGUMENTS_MAX {
        let Some(text) = n.word(array.wrapping_add(count * 8)) else { break };
        count += 1;
        if text == 0 {
            break;
        }
        n.text(text, ARGUMENT_MAX);
    }
    n.reads(array, count * 8);
}

/// Names arguments and environment.
pub fn execve(n: &mut Operands) {
    strings(n, n.arg(1));
    strings(n, n.arg(2));
}

/// Names arguments and environment, which are one argument further in `execveat`.
pub fn execveat(n: &mut Operands) {
    strings(n, n.arg(2));
    strings(n, n.arg(3));
}

/// Returns whether a number is that of this process, or of one of its threads.
pub fn is_self(pid: u32) -> bool {
    // SAFETY: neither call touches memory. Signal 0 isn't sent. It only asks whether the thread is
    // one of this process.
    unsafe {
        ask(libc::SYS_getpid, [0; 6]).is_some_and(|own| {
            own == pid as usize || ask(libc::SYS_tgkill, [own, pid as usize, 0, 0, 0, 0]).is_some()
        })
    }
}

fn process_vm(n: &mut Operands, to_local: bool) {
    vector(n, n.arg(1), n.arg(2), to_local);
    let (remote, count) = (n.arg(3), n.arg(4));
    if is_self(n.int(0)) {
        vector(n, remote, count, !to_local);
    } else if count <= PARTS_MAX {
        n.reads(remote, count * IOVEC);
    }
}

/// Names the memory of a read from another process, or from the caller's own.
pub fn process_vm_readv(n: &mut Operands) {
    process_vm(n, true);
}

/// Names the memory of a write to another process, or to the caller's own.
pub fn process_vm_writev(n: &mut Operands) {
    process_vm(n, false);
}

/// Names a program of the classic packet filter.
pub fn filter(n: &mut Operands, at: usize) {
    if let Some(program) = n.take::<SOCK_FPROG>(at) {
        n.reads(program.word(8), program.short(0) * SOCK_FILTER);
    }
}
