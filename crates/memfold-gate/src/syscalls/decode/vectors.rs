//! Arrays of pointers: iovec, msghdr, mmsghdr, arguments of programs.
use super::ask::ask;
use crate::syscalls::operands::{Operands, PARTS_MAX};
use crate::syscalls::sizes::*;
use core::mem::size_of;

/// Longest text of an argument or of the environment.
const ARGUMENT_MAX: usize = 128 << 10;

/// Most arguments that are looked at: the kernel allows stack/4 bytes of them, of 6 MiB at most.
const ARGUMENTS_MAX: usize = (6 << 20) / size_of::<usize>();

/// The pointers of a vector are taken so many at a time.
const AT_ONCE: usize = 8;

/// An array of iovec, and what it points to.
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
            // The first of them may be there.
            return one_by_one(n, at, write);
        };
        for k in 0..AT_ONCE {
            put(n, parts.word(k * IOVEC), parts.word(k * IOVEC + 8), write);
        }
        i += AT_ONCE;
    }
}

/// Names the parts that can be read. Where the kernel reads the whole array first this has no
/// effect, but no caller has to know that.
fn one_by_one(n: &mut Operands, array: usize, write: bool) {
    for i in 0..AT_ONCE {
        let Some(part) = n.get::<IOVEC>(array.wrapping_add(i * IOVEC)) else { return };
        put(n, part.word(0), part.word(8), write);
    }
}

fn put(n: &mut Operands, start: usize, len: usize, write: bool) {
    // A negative length is an error.
    if len <= isize::MAX as usize {
        n.touches(start, len, write);
    }
}

/// `readv` and its like: argument 1 and 2, to be filled.
pub fn filled(n: &mut Operands) {
    vector(n, n.arg(1), n.arg(2), true);
}

/// `writev` and its like.
pub fn taken(n: &mut Operands) {
    vector(n, n.arg(1), n.arg(2), false);
}

/// Fills from a pipe or takes for it, as the descriptor is open for reading or for writing.
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

/// Messages out; the kernel writes how long each was.
pub fn sendmmsg(n: &mut Operands) {
    messages(n, true);
}

/// Messages in; what is left of the time is written back.
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

/// Arguments and environment.
pub fn execve(n: &mut Operands) {
    strings(n, n.arg(1));
    strings(n, n.arg(2));
}

/// Names arguments and environment of `execveat`, one argument further.
pub fn execveat(n: &mut Operands) {
    strings(n, n.arg(2));
    strings(n, n.arg(3));
}

fn is_self(pid: u32) -> bool {
    // SAFETY: neither touches memory; signal 0 is not sent, it asks whether the thread is ours.
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

/// From another process, or from one's own.
pub fn process_vm_readv(n: &mut Operands) {
    process_vm(n, true);
}

/// To another process, or to one's own.
pub fn process_vm_writev(n: &mut Operands) {
    process_vm(n, false);
}

/// Names a program of the classic packet filter.
pub fn filter(n: &mut Operands, at: usize) {
    if let Some(program) = n.take::<SOCK_FPROG>(at) {
        n.reads(program.word(8), program.short(0) * SOCK_FILTER);
    }
}
