//! What the program is about to execute: where memfold can't be in it, that is said, once by name.
//! A program that the run is given is refused in that case (`memfold-cli/src/program`).
//!
//! A filter of system calls may end whoever makes one that it doesn't know. So where it can't be
//! without one (`no_new_privs`), nothing is called but what the dynamic linker of the new program will
//! call anyway: open, look at, read, close.
use crate::say;
use core::ffi::CStr;
use memfold_gate::read_bytes;
use rustix::fd::{BorrowedFd, OwnedFd, RawFd};
use rustix::fs::{CWD, FileType, Mode, OFlags, StatVfsMountFlags};
use rustix::fs::{fgetxattr, fstat, fstatvfs, openat};
use rustix::io::pread;
use rustix::process::{getgid, getuid};
use rustix::thread::no_new_privs;

const PATH_BYTES: usize = 4096;
/// The first line of a script that the kernel reads; scripts that name scripts.
const LINE_BYTES: usize = 256;
const SCRIPTS_MAX: usize = 5;
/// More variables aren't looked at.
const VARIABLES_MAX: usize = 1 << 16;

const HEADER_BYTES: usize = 64;
const ENTRY_BYTES: usize = 56;
const PT_INTERP: u32 = 3;
const X86_64: u16 = 62;
/// The dynamic linker that loads the library.
const LINKER: &[u8] = b"ld-linux-x86-64.so.2";

/// By these a program is told what to do.
const VARIABLES: [&[u8]; 2] = [b"MEMFOLD_RUN=", b"LD_PRELOAD="];
const DISABLE: &[u8] = b"MEMFOLD_DISABLE=";

/// `execve` or `execveat` is about to be made.
pub fn see(nr: usize, args: &[usize; 6]) {
    let by_fd = nr as i64 == libc::SYS_execveat;
    let (path, environment) = if by_fd { (args[1], args[3]) } else { (args[0], args[2]) };
    let mut name = [0u8; PATH_BYTES];
    let Some(len) = read_name(path, &mut name) else { return };
    let from = if by_fd { args[0] as RawFd } else { libc::AT_FDCWD };
    if len == 0 {
        // What it is executed by isn't a name.
        let numbered = Numbered::new(from);
        name[..numbered.0.len()].copy_from_slice(&numbered.0);
    }
    let from = if len == 0 { libc::AT_FDCWD } else { from };
    if let Some(why) = unserved(from, &mut name).or_else(|| lacks_order(environment)) {
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
        say::warn(format_args!(
            "warning: {} can't be managed, so all of it is in memory: {why}",
            name[..end].escape_ascii()
        ));
    }
}

/// The name of what a descriptor leads to.
struct Numbered([u8; 32]);

impl Numbered {
    fn new(fd: RawFd) -> Numbered {
        const START: &[u8] = b"/proc/self/fd/";
        let mut path = [0u8; 32];
        path[..START.len()].copy_from_slice(START);
        let digits = fd.unsigned_abs().checked_ilog10().unwrap_or(0) as usize + 1;
        let mut left = fd.unsigned_abs();
        for at in (0..digits).rev() {
            path[START.len() + at] = b'0' + (left % 10) as u8;
            left /= 10;
        }
        Numbered(path)
    }
}

fn read_name(at: usize, to: &mut [u8; PATH_BYTES]) -> Option<usize> {
    // What can't be read stays zeros: the kernel will refuse the same.
    let _ = read_bytes(at, to);
    to.iter().position(|byte| *byte == 0)
}

/// Why memfold can't be in what is executed by this name. A script's is replaced by that of its
/// interpreter.
fn unserved(from: RawFd, name: &mut [u8; PATH_BYTES]) -> Option<&'static str> {
    let mut from = from;
    for _ in 0..=SCRIPTS_MAX {
        let file = open(from, CStr::from_bytes_until_nul(name).ok()?)?;
        let mut start = [0u8; LINE_BYTES];
        let len = pread(&file, &mut start, 0).ok()?;
        let Some(line) = start[..len].strip_prefix(b"#!") else {
            return gains_privileges(&file).or_else(|| unsuitable(&file, &start, len, name));
        };
        let line = line.split(|byte| *byte == b'\n').next()?;
        let mut words = line.split(|byte| matches!(byte, b' ' | b'\t' | 0));
        let word = words.find(|word| !word.is_empty())?;
        name.fill(0);
        name[..word.len()].copy_from_slice(word);
        from = libc::AT_FDCWD;
    }
    None
}

/// The file, if somebody can execute it.
fn open(from: RawFd, name: &CStr) -> Option<OwnedFd> {
    let from = match from {
        libc::AT_FDCWD => CWD,
        // SAFETY: borrowed for this call, as the program names it in its own.
        0.. => unsafe { BorrowedFd::borrow_raw(from) },
        _ => return None,
    };
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = openat(from, name, flags, Mode::empty()).ok()?;
    let mode = fstat(&file).ok()?.st_mode;
    let is_file = FileType::from_raw_mode(mode) == FileType::RegularFile;
    (is_file && mode & (libc::S_IXUSR | libc::S_IXGRP | libc::S_IXOTH) != 0).then_some(file)
}

/// The linker ignores the library then.
fn gains_privileges(file: &OwnedFd) -> Option<&'static str> {
    if no_new_privs().unwrap_or(false)
        || fstatvfs(file).ok()?.f_flag.contains(StatVfsMountFlags::NOSUID)
    {
        return None;
    }
    let about = fstat(file).ok()?;
    let has = |bits: u32| about.st_mode & bits == bits;
    if has(libc::S_ISUID) && about.st_uid != getuid().as_raw() {
        return Some("it is a set-user-ID program");
    }
    if has(libc::S_ISGID | libc::S_IXGRP) && about.st_gid != getgid().as_raw() {
        return Some("it is a set-group-ID program");
    }
    let capable = fgetxattr(file, c"security.capability", &mut [0u8; 64]).is_ok_and(|len| len > 0);
    (capable && !getuid().is_root()).then_some("it has file capabilities")
}

fn word<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    core::array::from_fn(|n| bytes[at + n])
}

/// What an ELF file says of itself; what isn't one is somebody else's to execute.
fn unsuitable(
    file: &OwnedFd,
    start: &[u8; LINE_BYTES],
    len: usize,
    name: &[u8],
) -> Option<&'static str> {
    if len < HEADER_BYTES || !start.starts_with(b"\x7fELF") {
        return None;
    }
    let is_ours = start[4] == 2 && start[5] == 1 && u16::from_le_bytes(word(start, 18)) == X86_64;
    if !is_ours {
        return Some("it is a program for another machine");
    }
    let offset = u64::from_le_bytes(word(start, 32));
    let count = u64::from(u16::from_le_bytes(word(start, 56)));
    for n in 0..count {
        let mut entry = [0u8; ENTRY_BYTES];
        let at = offset.checked_add(n * ENTRY_BYTES as u64)?;
        if pread(file, &mut entry, at).ok()? < ENTRY_BYTES {
            return None;
        }
        if u32::from_le_bytes(word(&entry, 0)) == PT_INTERP {
            let mut linker = [0u8; LINE_BYTES];
            pread(file, &mut linker, u64::from_le_bytes(word(&entry, 8))).ok()?;
            return (!is_linker(&linker)).then_some("it uses another C library");
        }
    }
    // The linker itself, which is told what to execute, loads the library.
    (!is_linker(name)).then_some("it is statically linked")
}

/// Whether a path ends in the name of the linker.
fn is_linker(path: &[u8]) -> bool {
    let path = path.split(|byte| *byte == 0).next().unwrap_or_default();
    path.rsplit(|byte| *byte == b'/').next() == Some(LINKER)
}

/// Nothing tells the new program to be managed.
fn lacks_order(environment: usize) -> Option<&'static str> {
    let mut found = [false; VARIABLES.len()];
    for n in 0..VARIABLES_MAX {
        let mut text = [0u8; 8];
        if read_bytes(environment + n * 8, &mut text).is_err() {
            break;
        }
        let at = usize::from_ne_bytes(text);
        if at == 0 {
            break;
        }
        let mut begins = [0u8; DISABLE.len()];
        let _ = read_bytes(at, &mut begins);
        if begins == *DISABLE {
            return None;
        }
        for (found, name) in found.iter_mut().zip(VARIABLES) {
            *found |= begins.starts_with(name);
        }
    }
    found.contains(&false).then_some("MEMFOLD_RUN or LD_PRELOAD isn't in its environment")
}
