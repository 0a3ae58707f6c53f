//! Makes `/proc/self/exe` and `/proc/PID/exe` lead to the program where the kernel has executed this
//! library, which has loaded the program.
use crate::image::FILE_NAME;
use crate::syscalls::row::CallRow;
use crate::touch::{read_bytes, write_bytes};
use core::ffi::CStr;
use core::sync::atomic::{AtomicPtr, Ordering::SeqCst};
use memfold_os::maps::program::path_of_program;
use memfold_os::raw::system_call;
use memfold_os::text::TextBuffer;
use memfold_os::thread::process_id;

/// The longest path that is looked for, with its final zero, is shorter.
const ASKED_BYTES: usize = 32;
/// Bytes of a path with its final zero (PATH_MAX).
pub const PATH_BYTES: usize = 4096;

/// The path of the program; null if the kernel's own answer is right.
static PATH: AtomicPtr<u8> = AtomicPtr::new(core::ptr::null_mut());

/// Notes the absolute path of the program, which the kernel doesn't know.
pub fn note_program(path: &'static CStr) {
    PATH.store(path.as_ptr().cast_mut().cast(), SeqCst);
}

/// Returns the path that [`note_program`] was given.
pub fn own_program() -> Option<&'static CStr> {
    let path = PATH.load(SeqCst);
    // SAFETY: `note_program` was given a string that lives as long as the process.
    (!path.is_null()).then(|| unsafe { CStr::from_ptr(path.cast()) })
}

/// Returns the path of the program that the path at an address leads to, if that is `/proc/self/exe`
/// or `/proc/PID/exe` and the kernel's own answer is wrong. `room` may hold the answer.
pub fn program_at(at: usize, room: &mut [u8; PATH_BYTES]) -> Option<&CStr> {
    match asked_at(at)? {
        Whose::Own => own_program(),
        Whose::Process(process) => other_program(process, room),
    }
}

/// Returns whether [`program_at`] may find a program.
pub fn may_name_program(at: usize) -> bool {
    asked_at(at).is_some()
}

fn asked_at(at: usize) -> Option<Whose> {
    let mut path = [0u8; ASKED_BYTES];
    // Bytes that can't be read stay zeros.
    let _ = read_bytes(at, &mut path);
    whose(&path, process_id)
}

/// Returns the path of the program of another process, if this library has loaded it.
fn other_program(process: u32, room: &mut [u8; PATH_BYTES]) -> Option<&CStr> {
    let link = TextBuffer::<32>::of(format_args!("/proc/{process}/exe"));
    let args = [
        link.as_c_str().ok()?.as_ptr() as usize,
        room.as_mut_ptr() as usize,
        room.len() - 1,
        0,
        0,
        0,
    ];
    // SAFETY: the path ends with a null byte, and `room` has room for the bytes that the kernel
    // writes.
    let len = unsafe { system_call(libc::SYS_readlink, args) }.ok()? as usize;
    if room[..len].rsplit(|byte| *byte == b'/').next() != Some(FILE_NAME) {
        return None;
    }
    let len = path_of_program(process, &mut room[..PATH_BYTES - 1]).ok()?;
    room[len] = 0;
    CStr::from_bytes_until_nul(room).ok()
}

/// Returns the number of the argument of a call that is a path whose last link is read or followed.
pub fn asks_by(row: &CallRow, args: &[usize; 6]) -> Option<usize> {
    match i64::from(row.number) {
        libc::SYS_readlink => Some(0),
        libc::SYS_readlinkat => Some(1),
        _ => row.follows.map(usize::from).filter(|_| !stays_at_link(row, args)),
    }
}

/// Makes a call whose argument `at` leads to the program `path`. `make` makes it with other arguments.
pub fn answer(
    row: &CallRow,
    args: &[usize; 6],
    (at, path): (usize, &CStr),
    make: impl FnOnce(&[usize; 6]) -> isize,
) -> isize {
    if row.follows.is_some() {
        let mut args = *args;
        args[at] = path.as_ptr() as usize;
        return make(&args);
    }
    let (to, room) = (args[at + 1], args[at + 2]);
    if room as i32 <= 0 {
        return -(libc::EINVAL as isize);
    }
    let path = path.to_bytes();
    let path = &path[..path.len().min(room)];
    // SAFETY: the program passed this address for the answer.
    let outcome = unsafe { write_bytes(to, path) };
    outcome.map_or(-(libc::EFAULT as isize), |()| path.len() as isize)
}

/// Returns whether a call is about the link itself.
fn stays_at_link(row: &CallRow, args: &[usize; 6]) -> bool {
    let (flags, stays) = match i64::from(row.number) {
        libc::SYS_open => (args[1], libc::O_NOFOLLOW),
        libc::SYS_openat => (args[2], libc::O_NOFOLLOW),
        libc::SYS_newfstatat => (args[3], libc::AT_SYMLINK_NOFOLLOW),
        libc::SYS_statx => (args[2], libc::AT_SYMLINK_NOFOLLOW),
        libc::SYS_faccessat2 => (args[3], libc::AT_SYMLINK_NOFOLLOW),
        _ => return false,
    };
    flags as i32 & stays != 0
}

/// The process whose program a path names.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum Whose {
    Own,
    Process(u32),
}

/// Returns whose program a path names. `process` returns the number of this process.
fn whose(asked: &[u8], process: impl FnOnce() -> u32) -> Option<Whose> {
    let rest = asked.strip_prefix(b"/proc/")?;
    let mut parts = rest.splitn(2, |byte| *byte == b'/');
    let (whose, file) = (parts.next()?, parts.next()?);
    if !file.starts_with(b"exe\0") {
        return None;
    }
    if matches!(whose, b"self" | b"thread-self") {
        return Some(Whose::Own);
    }
    if whose.iter().any(|byte| !byte.is_ascii_digit()) {
        return None;
    }
    let number = core::str::from_utf8(whose).ok()?.parse::<u32>().ok()?;
    Some(if number == process() { Whose::Own } else { Whose::Process(number) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_own_program_are_told_from_others() {
        let whose = |text: &[u8]| whose(text, || 17);
        for own in [&b"/proc/self/exe\0"[..], b"/proc/thread-self/exe\0more", b"/proc/17/exe\0"] {
            assert_eq!(whose(own), Some(Whose::Own));
        }
        assert_eq!(whose(b"/proc/18/exe\0"), Some(Whose::Process(18)));
        let others: [&[u8]; 9] = [
            b"/proc/self/exe",
            b"/proc/self/exe/\0",
            b"/proc/self/maps\0",
            b"/proc/+18/exe\0",
            b"/proc/99999999999/exe\0",
            b"/proc//exe\0",
            b"/proc/exe\0",
            b"proc/self/exe\0",
            b"",
        ];
        assert!(others.into_iter().all(|text| whose(text).is_none()));
    }
}
