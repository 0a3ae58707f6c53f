//! Names the memory of calls on threads and processes.
use super::ask::ask;
use crate::syscalls::operands::Operands;
use crate::syscalls::sizes::*;
use memfold_os::units::PAGE_SIZE;

/// Names the places where the kernel puts the numbers of the new task, by flag.
pub fn clone(n: &mut Operands) {
    let flags = n.arg(0) as i32;
    if flags & (libc::CLONE_PARENT_SETTID | libc::CLONE_PIDFD) != 0 {
        n.writes(n.arg(2), 4);
    }
    if flags & (libc::CLONE_CHILD_SETTID | libc::CLONE_CHILD_CLEARTID) != 0 {
        n.writes(n.arg(3), 4);
    }
}

/// Names the memory of `clone3`, whose flags lie in a struct.
pub fn clone3(n: &mut Operands) {
    let (at, size) = (n.arg(0), n.arg(1));
    if !(64..=PAGE_SIZE).contains(&size) {
        return;
    }
    n.reads(at, size);
    let Some(args) = n.get::<64>(at) else { return };
    let flags = args.word(0) as i32;
    for (flag, place) in [
        (libc::CLONE_PIDFD, 8),
        (libc::CLONE_CHILD_SETTID | libc::CLONE_CHILD_CLEARTID, 16),
        (libc::CLONE_PARENT_SETTID, 24),
    ] {
        if flags & flag != 0 {
            n.writes(args.word(place), 4);
        }
    }
    if size >= 80
        && let Some(operation) = n.get::<16>(at.wrapping_add(64))
        && operation.word(8) <= 32
    {
        n.reads(operation.word(0), operation.word(8) * 4);
    }
}

/// Names one byte for each page.
pub fn mincore(n: &mut Operands) {
    n.writes(n.arg(2), n.arg(1).div_ceil(PAGE_SIZE));
}

/// Names the address whose policy is asked for. The kernel can tell the node of an address only if
/// its page is resident.
pub fn policy_of(n: &mut Operands) {
    const NODE_OF_ADDRESS: usize = 1 | 2;
    if n.arg(4) & NODE_OF_ADDRESS == NODE_OF_ADDRESS {
        n.reads(n.arg(3), 1);
    }
}

const VERSION_1: u32 = 0x1998_0330;

/// Returns the length of the sets that follow a header. The first version has 32 bits of each set.
fn capabilities(version: u32) -> usize {
    if version == VERSION_1 { CAP_DATA } else { 2 * CAP_DATA }
}

/// Names a header and returns the length of the sets. The kernel writes its own version over one
/// that it doesn't know.
fn header(n: &mut Operands) -> Option<usize> {
    const KNOWN: [u32; 3] = [VERSION_1, 0x2007_1026, 0x2008_0522];
    n.reads(n.arg(0), CAP_HEADER);
    let version = n.half(n.arg(0))?;
    if !KNOWN.contains(&version) {
        n.writes(n.arg(0), 4);
    }
    Some(capabilities(version))
}

/// Names the sets that the kernel writes.
pub fn capget(n: &mut Operands) {
    if let Some(bytes) = header(n) {
        n.writes(n.arg(1), bytes);
    }
}

/// Names the sets that the kernel reads.
pub fn capset(n: &mut Operands) {
    if let Some(bytes) = header(n) {
        n.reads(n.arg(1), bytes);
    }
}

/// Names the memory of `modify_ldt`, by function.
pub fn modify_ldt(n: &mut Operands) {
    match n.int(0) {
        0 | 2 => n.writes(n.arg(1), n.arg(2)),
        1 | 0x11 => n.reads(n.arg(1), n.arg(2)),
        _ => {}
    }
}

/// Names a struct that begins with its size. The kernel writes its own size over a larger one.
pub fn sched_setattr(n: &mut Operands) {
    const FIRST_SIZE: usize = 48;
    let Some(size) = n.half(n.arg(1)) else { return };
    let size = if size == 0 { FIRST_SIZE } else { size as usize };
    n.reads(n.arg(1), size.min(PAGE_SIZE));
    if !matches!(size, FIRST_SIZE | 56) {
        n.writes(n.arg(1), 4);
    }
}

/// Names the memory of a rule, by its kind: files beneath a path, or a port.
pub fn landlock_add_rule(n: &mut Operands) {
    match n.int(1) {
        1 => n.reads(n.arg(2), 12),
        2 => n.reads(n.arg(2), 16),
        _ => {}
    }
}

/// Returns the number of CPUs that there may be.
pub fn cpus_possible() -> usize {
    let mut mask = [0u64; 1024 / 8];
    let len = size_of_val(&mask);
    // SAFETY: the kernel writes at most `len` bytes, the size of `mask`, and returns how many.
    let bytes =
        unsafe { ask(libc::SYS_sched_getaffinity, [0, len, &raw mut mask as usize, 0, 0, 0]) };
    // One bit for each CPU, in whole words.
    bytes.map_or(8192, |b| b * 8)
}
