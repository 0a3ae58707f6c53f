//! Private mappings of `/dev/zero`, an old way to get memory. The kernel makes them anonymous, but
//! remembers the file, beyond whose end a userfaultfd puts no page (`mfill_file_over_size` in
//! `mm/userfaultfd.c`). So they are mapped without the file.
use memfold_gate::child;
use memfold_os::Errno;
use rustix::fd::BorrowedFd;
use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat, major, minor};

/// The device number of `/dev/zero`, major and minor.
const ZERO: (u32, u32) = (1, 5);
/// The part of the flags of `mmap` that is the type.
const TYPE: usize = libc::MAP_TYPE as usize;
const PRIVATE: usize = libc::MAP_PRIVATE as usize;
const ANONYMOUS: usize = libc::MAP_ANONYMOUS as usize;

/// Returns the arguments with which a call is made: a call that maps `/dev/zero` privately maps the
/// same memory without a file. A call that the kernel may refuse because of the file stays as it is.
pub fn without_file(nr: usize, args: &[usize; 6]) -> [usize; 6] {
    let [start, len, access, flags, file, offset] = *args;
    let maps_file =
        nr as i64 == libc::SYS_mmap && flags & TYPE == PRIVATE && flags & ANONYMOUS == 0;
    let may_be_refused = access as i32 & libc::PROT_EXEC != 0 || child().is_some();
    if maps_file && !may_be_refused && is_readable_zero(file as i32) == Ok(true) {
        return [start, len, access, flags | ANONYMOUS, usize::MAX, offset];
    }
    *args
}

fn is_readable_zero(number: i32) -> Result<bool, Errno> {
    if number < 0 {
        return Ok(false);
    }
    // SAFETY: the number is not -1. If the descriptor isn't open, or is closed meanwhile, the calls
    // fail or tell about another file, as the call of the program would.
    let file = unsafe { BorrowedFd::borrow_raw(number) };
    let about = fstat(file)?;
    let is_device = FileType::from_raw_mode(about.st_mode) == FileType::CharacterDevice;
    if !is_device || (major(about.st_rdev), minor(about.st_rdev)) != ZERO {
        return Ok(false);
    }
    Ok(fcntl_getfl(file)? & OFlags::ACCMODE != OFlags::WRONLY)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsRawFd;

    fn mapped(file: &File, access: i32, flags: i32) -> [usize; 6] {
        let file = file.as_raw_fd() as usize;
        let args = [0, 0x5000, access as usize, flags as usize, file, 0x1000];
        let result = without_file(libc::SYS_mmap as usize, &args);
        assert!(result == args || result[..3] == args[..3] && result[5] == args[5]);
        assert_eq!(without_file(libc::SYS_munmap as usize, &args), args);
        result
    }

    #[test]
    fn only_readable_private_mappings_of_the_device_lose_their_file() {
        const PLAIN: i32 = libc::PROT_READ | libc::PROT_WRITE;
        let (zero, program) =
            (File::open("/dev/zero").unwrap(), File::open("/proc/self/exe").unwrap());
        let file = File::options().write(true).open("/dev/zero").unwrap();
        let is_anonymous = |made: [usize; 6]| made[3] & ANONYMOUS != 0 && made[4] == usize::MAX;
        assert!(is_anonymous(mapped(&zero, PLAIN, libc::MAP_PRIVATE)));
        assert!(is_anonymous(mapped(&zero, 0, libc::MAP_PRIVATE | libc::MAP_FIXED)));
        assert!(!is_anonymous(mapped(&zero, PLAIN, libc::MAP_SHARED)));
        assert!(!is_anonymous(mapped(&zero, PLAIN, libc::MAP_SHARED_VALIDATE)));
        assert!(!is_anonymous(mapped(&zero, PLAIN | libc::PROT_EXEC, libc::MAP_PRIVATE)));
        assert!(!is_anonymous(mapped(&file, PLAIN, libc::MAP_PRIVATE)), "EACCES");
        assert!(!is_anonymous(mapped(&program, PLAIN, libc::MAP_PRIVATE)));
    }
}
