//! Locks on bytes of a file that belong to an open file description (`F_OFD_SETLK` in fcntl(2)). The
//! kernel releases them when the last descriptor of it is closed, so also when a process is killed.
use crate::Errno;
use crate::raw::system_call;
use core::ops::Range;
use rustix::fd::{AsFd, AsRawFd};

/// Locks a range for `file`'s description, if no other one has it. Returns whether it is locked now.
///
/// # Errors
/// The errors of `fcntl`: EBADF if `file` isn't open for writing.
pub fn try_lock(file: impl AsFd, range: Range<u64>) -> Result<bool, Errno> {
    match ask(file, libc::F_OFD_SETLK, libc::F_WRLCK, range) {
        Ok(_) => Ok(true),
        Err(Errno::AGAIN | Errno::ACCESS) => Ok(false),
        Err(e) => Err(e),
    }
}

/// Releases a range.
///
/// # Errors
/// The errors of `fcntl`.
pub fn unlock(file: impl AsFd, range: Range<u64>) -> Result<(), Errno> {
    ask(file, libc::F_OFD_SETLK, libc::F_UNLCK, range).map(drop)
}

/// Returns whether another description has a lock in a range.
///
/// # Errors
/// The errors of `fcntl`.
pub fn is_locked(file: impl AsFd, range: Range<u64>) -> Result<bool, Errno> {
    ask(file, libc::F_OFD_GETLK, libc::F_WRLCK, range).map(|lock| lock != libc::F_UNLCK)
}

/// Makes a request about a lock on a range. Returns the type of lock that the kernel has answered.
fn ask(file: impl AsFd, request: i32, lock: i32, range: Range<u64>) -> Result<i32, Errno> {
    // SAFETY: the struct has only integers, for which zeros are valid.
    let mut about: libc::flock = unsafe { core::mem::zeroed() };
    (about.l_type, about.l_whence) = (lock as i16, libc::SEEK_SET as i16);
    (about.l_start, about.l_len) = (range.start as i64, (range.end - range.start) as i64);
    let args = [file.as_fd().as_raw_fd() as usize, request as usize, &raw mut about as usize];
    // SAFETY: all callers pass F_OFD_SETLK or F_OFD_GETLK. The kernel then reads and writes one
    // `flock` at `about`, which is local. The descriptor is borrowed, so it is open.
    unsafe { system_call(libc::SYS_fcntl, [args[0], args[1], args[2], 0, 0, 0]) }?;
    Ok(about.l_type.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fd::OwnedFd;
    use rustix::fs::{Mode, OFlags};

    #[test]
    fn a_range_is_locked_until_its_description_is_closed() {
        let path = std::env::temp_dir().join(format!("memfold-lock-{}", std::process::id()));
        let open = |access| {
            let flags = access | OFlags::CREATE | OFlags::CLOEXEC;
            rustix::fs::open(path.to_str().unwrap(), flags, Mode::RUSR).unwrap()
        };
        let [one, other] = [0, 1].map(|_| open(OFlags::WRONLY));
        assert_eq!(try_lock(&one, 64..128), Ok(true));
        assert_eq!(try_lock(&one, 64..128), Ok(true), "its own lock");
        assert_eq!(try_lock(&other, 0..65), Ok(false));
        assert_eq!(try_lock(&other, 128..192), Ok(true));
        let locks = |file: &OwnedFd| [0, 64, 128].map(|at| is_locked(file, at..at + 64).unwrap());
        assert_eq!((locks(&one), locks(&other)), ([false, false, true], [false, true, false]));
        unlock(&other, 128..192).unwrap();
        assert_eq!(locks(&one), [false; 3]);
        drop(one);
        // Children that other tests have forked meanwhile share the description until they end.
        for _ in 0..1000 {
            if locks(&other) == [false; 3] {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        assert_eq!(locks(&other), [false; 3]);
        assert_eq!(try_lock(open(OFlags::RDONLY), 0..1), Err(Errno::BADF));
        std::fs::remove_file(path).unwrap();
    }
}
