//! Makes `/proc/self/exe` lead to the program where the kernel has executed another file, which has
//! loaded the program.
use crate::syscalls::row::CallRow;
use crate::touch::{read_bytes, write_bytes};
use core::ffi::CStr;
use core::sync::atomic::{AtomicPtr, Ordering::SeqCst};
use memfold_os::thread::process_id;

/// The longest path that is looked for, with its final zero, is shorter.
const ASKED_BYTES: usize = 32;

/// The path of the program; null if the kernel's own answer is right.
static PATH: AtomicPtr<u8> = AtomicPtr::new(core::ptr::null_mut());

/// Notes the absolute path of the program, which the kernel doesn't know.
pub fn note_program(path: &'static CStr) {
    PATH.store(path.as_ptr().cast_mut().cast(), SeqCst);
}

/// Returns the path of the program, if the path at an address is `/proc/self/exe` and the kernel's
/// own answer is wrong.
pub fn program_at(at: usize) -> Option<&'static CStr> {
    own_program().filter(|_| names_program(at))
}

/// Returns the path that [`note_program`] was given.
pub fn own_program() -> Option<&'static CStr> {
    let path = PATH.load(SeqCst);
    // SAFETY: `note_program` was given a string that lives as long as the process.
    (!path.is_null()).then(|| unsafe { CStr::from_ptr(path.cast()) })
}

/// Returns the arguments with which a call reaches the program, if it names `/proc/self/exe`.
pub fn followed(row: &CallRow, args: &[usize; 6]) -> Option<[usize; 6]> {
    let at = row.follows? as usize;
    let path = program_at(args[at]).filter(|_| !stays_at_link(row, args))?;
    let mut args = *args;
    args[at] = path.as_ptr() as usize;
    Some(args)
}

/// Returns the result of `readlink` or `readlinkat`, if it asks about `/proc/self/exe`.
pub fn read_link(nr: usize, args: &[usize; 6]) -> Option<isize> {
    let [name, to, room] = match nr as i64 {
        libc::SYS_readlink => [args[0], args[1], args[2]],
        libc::SYS_readlinkat => [args[1], args[2], args[3]],
        _ => return None,
    };
    let path = program_at(name)?.to_bytes();
    if room as i32 <= 0 {
        return Some(-(libc::EINVAL as isize));
    }
    let path = &path[..path.len().min(room)];
    // SAFETY: the program passed this address for the answer.
    let written = unsafe { write_bytes(to, path) };
    Some(written.map_or(-(libc::EFAULT as isize), |()| path.len() as isize))
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

/// Returns whether the path at an address is that of this process's program in /proc.
fn names_program(at: usize) -> bool {
    let mut asked = [0u8; ASKED_BYTES];
    // Bytes that can't be read stay zeros.
    let _ = read_bytes(at, &mut asked);
    is_of_program(&asked, process_id)
}

fn is_of_program(asked: &[u8], process: impl FnOnce() -> u32) -> bool {
    let Some(rest) = asked.strip_prefix(b"/proc/") else { return false };
    let mut parts = rest.splitn(2, |byte| *byte == b'/');
    let (Some(whose), Some(file)) = (parts.next(), parts.next()) else { return false };
    if !file.starts_with(b"exe\0") {
        return false;
    }
    let number = || core::str::from_utf8(whose).ok()?.parse::<u32>().ok();
    matches!(whose, b"self" | b"thread-self") || number() == Some(process())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_own_program_are_told_from_others() {
        let is = |text: &[u8]| is_of_program(text, || 17);
        assert!(
            is(b"/proc/self/exe\0") && is(b"/proc/thread-self/exe\0more") && is(b"/proc/17/exe\0")
        );
        let others: [&[u8]; 8] = [
            b"/proc/18/exe\0",
            b"/proc/self/exe",
            b"/proc/self/exe/\0",
            b"/proc/self/maps\0",
            b"/proc//exe\0",
            b"/proc/exe\0",
            b"proc/self/exe\0",
            b"",
        ];
        assert!(!others.into_iter().any(is));
    }
}
