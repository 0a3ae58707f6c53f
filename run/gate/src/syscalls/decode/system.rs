//! Names the memory of calls of administrators: mounts, quotas, modules, tracing.
use crate::syscalls::operands::{Operands, TEXT_MAX};
use crate::syscalls::sizes::*;
use memfold_os::units::PAGE_SIZE;

/// Names the options of a mount. The kernel takes a page of them, or as much of it as there is.
pub fn mount_data(n: &mut Operands) {
    n.reads(n.arg(4), PAGE_SIZE);
}

const HANDLE_MAX: usize = 128;

fn handle(n: &mut Operands, at: usize, write: bool) {
    let Some(bytes) = n.half(at) else { return n.touches(at, 8, write) };
    n.touches(at, 8 + (bytes as usize).min(HANDLE_MAX), write);
}

/// Names room for a file's handle and the number of its mount.
pub fn name_to_handle(n: &mut Operands) {
    const UNIQUE: u32 = 1;
    handle(n, n.arg(2), true);
    n.writes(n.arg(3), if n.int(4) & UNIQUE != 0 { 8 } else { 4 });
}

/// Names a file's handle.
pub fn open_by_handle(n: &mut Operands) {
    handle(n, n.arg(1), false);
}

/// Names a key, and a value that is a text, bytes or a path, by command.
pub fn fsconfig(n: &mut Operands) {
    n.text(n.arg(2), 256);
    match n.int(1) {
        1 => n.text(n.arg(3), 256),
        2 => n.reads(n.arg(3), n.int(4) as usize),
        3 | 4 => n.text(n.arg(3), TEXT_MAX),
        _ => {}
    }
}

/// Names a struct that begins with its size.
pub fn mount_request(n: &mut Operands) {
    match n.half(n.arg(0)) {
        Some(size) => n.reads(n.arg(0), (size as usize).clamp(4, PAGE_SIZE)),
        None => n.reads(n.arg(0), 4),
    }
}

fn xattr(n: &mut Operands, write: bool) {
    let (at, size) = (n.arg(4), n.arg(5));
    n.reads(at, size.min(PAGE_SIZE));
    if let Some(args) = n.get::<16>(at) {
        n.touches(args.word(0), args.len(8), write);
    }
}

/// Names a value that a struct points to, for reading.
pub fn xattr_taken(n: &mut Operands) {
    xattr(n, false);
}

/// Names a value that a struct points to, for writing.
pub fn xattr_given(n: &mut Operands) {
    xattr(n, true);
}

/// Names the memory for the kernel's log, by action.
pub fn syslog(n: &mut Operands) {
    if matches!(n.int(0), 2..=4) {
        n.writes(n.arg(1), usize::try_from(n.int(2) as i32).unwrap_or(0));
    }
}

/// Names the name of a file system: one that the kernel looks up, or room for one.
pub fn sysfs(n: &mut Operands) {
    match n.int(0) {
        1 => n.text(n.arg(1), TEXT_MAX),
        // The caller can't pass a length. No name is longer than this.
        2 => n.writes(n.arg(2), 32),
        _ => {}
    }
}

/// Names the text of a restart.
pub fn reboot(n: &mut Operands) {
    if n.int(2) == libc::LINUX_REBOOT_CMD_RESTART2 as u32 {
        n.text(n.arg(3), 256);
    }
}

/// Names the arguments of a module. The kernel has no bound for them.
pub fn module_arguments(n: &mut Operands) {
    n.text(n.arg(2), 1 << 20);
}

/// Names the arguments of a module that is a file.
pub fn finit_arguments(n: &mut Operands) {
    n.text(n.arg(1), 1 << 20);
}

fn quota(n: &mut Operands, command: u32, at: usize) {
    const X: u32 = (b'X' as u32) << 8;
    match command >> 8 {
        // Q_QUOTAON
        0x800002 => n.text(at, TEXT_MAX),
        // Q_GETFMT, Q_GETINFO, Q_SETINFO, Q_GETQUOTA, Q_SETQUOTA, Q_GETNEXTQUOTA
        0x800004 => n.writes(at, 4),
        0x800005 => n.writes(at, DQINFO),
        0x800006 => n.reads(at, DQINFO),
        0x800007 => n.writes(at, DQBLK),
        0x800008 => n.reads(at, DQBLK),
        0x800009 => n.writes(at, NEXT_DQBLK),
        c => match c.wrapping_sub(X) {
            // Q_XQUOTAON, Q_XQUOTAOFF, Q_XQUOTARM
            1 | 2 | 6 => n.reads(at, 4),
            // Q_XGETQUOTA, Q_XGETNEXTQUOTA
            3 | 9 => n.writes(at, FS_DISK_QUOTA),
            4 => n.reads(at, FS_DISK_QUOTA),
            5 => n.writes(at, FS_QUOTA_STAT),
            8 => n.writes(at, FS_QUOTA_STATV),
            _ => {}
        },
    }
}

/// Names the memory of quotas of a device.
pub fn quotactl(n: &mut Operands) {
    n.text(n.arg(1), TEXT_MAX);
    quota(n, n.int(0), n.arg(3));
}

/// Names the memory of quotas of an open file's file system.
pub fn quotactl_fd(n: &mut Operands) {
    quota(n, n.int(1), n.arg(3));
}

/// Names the segments of a kernel.
pub fn kexec_load(n: &mut Operands) {
    let count = n.arg(1).min(16);
    n.reads(n.arg(2), count * KEXEC_SEGMENT);
    for i in 0..count {
        let at = n.arg(2).wrapping_add(i * KEXEC_SEGMENT);
        let Some(segment) = n.get::<KEXEC_SEGMENT>(at) else { return };
        n.reads(segment.word(0), segment.word(8));
    }
}

/// Names a struct with its size at byte 4. The kernel writes its own size over a larger one.
pub fn perf_event_open(n: &mut Operands) {
    const FIRST_SIZE: usize = 64;
    let Some(head) = n.get::<8>(n.arg(0)) else { return n.reads(n.arg(0), 8) };
    let size = if head.half(4) == 0 { FIRST_SIZE } else { head.len(4) };
    n.reads(n.arg(0), size.min(PAGE_SIZE));
    n.writes(n.arg(0).wrapping_add(4), 4);
}
