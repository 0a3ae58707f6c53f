//! Recognizes files of /proc about this process, by the files themselves. The program may have them
//! open where no path leads to them: in an empty root, in another mount namespace, or by /proc of
//! an outer PID namespace.
use crate::threads::child;
use crate::touch::read_bytes;
use core::ffi::CStr;
use core::mem::zeroed;
use core::ptr::{read_volatile, write_volatile};
use memfold_os::Errno;
use memfold_os::raw::system_call;
use memfold_os::text::{TextBuffer, path_of};
use memfold_os::thread::process_id;

/// The descriptor that stands for the working directory.
pub const HERE: usize = libc::AT_FDCWD as usize;
/// Bytes of a path with its final zero (PATH_MAX).
const PATH_BYTES: usize = 4096;
/// The way from the list of a process's threads to that of this process, with its final zero.
const TO_OWN_LIST: &[u8] = b"/../../self/task\0";
/// The way from there to the link that has this process's number.
const TO_OWN_LINK: &CStr = c"../../self";

fn status_of(directory: usize, path: usize) -> Option<libc::stat> {
    // SAFETY: all fields of `stat` are integers, for which zeros are valid.
    let mut about: libc::stat = unsafe { zeroed() };
    let args = [directory, path, &raw mut about as usize, libc::AT_EMPTY_PATH as usize, 0, 0];
    // SAFETY: the path is the program's, whose memory is held, or ends with a null byte. `about` has
    // room for the struct that the kernel writes.
    unsafe { system_call(libc::SYS_newfstatat, args) }.ok()?;
    Some(about)
}

/// Returns whether both are the same file.
fn are_same(one: &libc::stat, other: &libc::stat) -> bool {
    (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)
}

/// Returns the inode of the directory to which `directory` and the path at `path` lead, if it is
/// the list of this process's threads. Without a path it is `directory` itself.
pub fn is_own_list(directory: usize, path: usize) -> Option<usize> {
    let mut way = [0u8; PATH_BYTES];
    if path != 0 {
        // Bytes behind the path may not be readable, and stay zeros.
        let _ = read_bytes(path, &mut way);
    }
    let len = way.iter().position(|byte| *byte == 0)?;
    way[len..].fill(0);
    if len + TO_OWN_LIST.len() > PATH_BYTES {
        return None;
    }
    let status = status_of(directory, way.as_ptr() as usize)?;
    // Relative to a descriptor the way begins without a slash.
    let rest = if len == 0 { &TO_OWN_LIST[1..] } else { TO_OWN_LIST };
    way[len..len + rest.len()].copy_from_slice(rest);
    let own = status_of(directory, way.as_ptr() as usize)?;
    are_same(&status, &own).then_some(own.st_ino as usize)
}

/// The open list of this process's threads.
pub struct OwnList {
    fd: usize,
    /// Whether its numbers are those of this process's own PID namespace.
    is_of_own_namespace: bool,
}

/// Returns the directory `fd` as the list of this process's threads, if it is that. For a child that
/// shares the memory, any directory of /proc may list the threads that serve it.
pub fn own_list(fd: usize) -> Option<OwnList> {
    if !is_in_proc(fd) {
        return None;
    }
    if child().is_none() {
        is_own_list(fd, 0)?;
    }
    let mut text = [0u8; 16];
    let args = [fd, TO_OWN_LINK.as_ptr() as usize, text.as_mut_ptr() as usize, text.len(), 0, 0];
    // SAFETY: the path ends with a null byte, and `text` has room for the bytes that the kernel
    // writes.
    let len = unsafe { system_call(libc::SYS_readlinkat, args) }.ok()? as usize;
    let own: TextBuffer<16> = TextBuffer::of(format_args!("{}", process_id()));
    Some(OwnList { fd, is_of_own_namespace: text[..len] == *own.as_bytes() })
}

impl OwnList {
    /// Returns the number that the thread with the number `listed` has in this process's own PID
    /// namespace, or 0 if that is unknown.
    pub fn number_here(&self, listed: u32) -> u32 {
        match self.is_of_own_namespace {
            true => listed,
            false => self.innermost(listed).unwrap_or(0),
        }
    }

    fn innermost(&self, listed: u32) -> Option<u32> {
        let path: TextBuffer<24> = TextBuffer::of(format_args!("{listed}/status"));
        let flags = libc::O_RDONLY | libc::O_CLOEXEC;
        let args = [self.fd, path.as_c_str().ok()?.as_ptr() as usize, flags as usize, 0, 0, 0];
        // SAFETY: the path ends with a null byte.
        let file = unsafe { system_call(libc::SYS_openat, args) }.ok()? as usize;
        let mut text = [0u8; 2048];
        let args = [file, text.as_mut_ptr() as usize, text.len(), 0, 0, 0];
        // SAFETY: `text` has room for the bytes that the kernel writes. The descriptor was opened
        // above, and isn't used after it is closed.
        let result = unsafe {
            let result = system_call(libc::SYS_pread64, args);
            let _ = system_call(libc::SYS_close, [file, 0, 0, 0, 0, 0]);
            result
        };
        let text = core::str::from_utf8(&text[..result.ok()? as usize]).ok()?;
        let all = text.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
        all.split_ascii_whitespace().next_back()?.parse().ok()
    }
}

/// Returns whether a file is of /proc.
pub fn is_in_proc(fd: usize) -> bool {
    // SAFETY: all fields of `statfs` are integers, for which zeros are valid.
    let mut about: libc::statfs = unsafe { zeroed() };
    let args = [fd, &raw mut about as usize, 0, 0, 0, 0];
    // SAFETY: `about` has room for the struct that the kernel writes.
    let known = unsafe { system_call(libc::SYS_fstatfs, args) }.is_ok();
    known && about.f_type == libc::PROC_SUPER_MAGIC
}

/// Returns the target of a file's entry in /proc, in `to`, if /proc can be seen.
fn target_of(fd: usize, to: &mut [u8; 64]) -> Option<&[u8]> {
    let path = path_of(fd as i32);
    let args =
        [path.as_c_str().ok()?.as_ptr() as usize, to.as_mut_ptr() as usize, to.len(), 0, 0, 0];
    // SAFETY: the path ends with a null byte, and `to` has room for the bytes that the kernel
    // writes.
    let len = unsafe { system_call(libc::SYS_readlink, args) }.ok()?;
    Some(&to[..len as usize])
}

/// Returns whether a file of /proc belongs to this process. Returns `false` if no path leads to
/// /proc.
pub fn is_of_this_process(fd: usize) -> bool {
    let own: TextBuffer<32> = TextBuffer::of(format_args!("/proc/{}/", process_id()));
    target_of(fd, &mut [0; 64]).is_some_and(|target| target.starts_with(own.as_bytes()))
}

/// Returns whether a file is the memory of this process, or of a thread of it.
pub fn is_own_memory(fd: usize) -> bool {
    /// The mode of `/proc/PID/mem`. Few other files of /proc have it.
    const MODE: u32 = libc::S_IFREG | libc::S_IRUSR | libc::S_IWUSR;
    let is_candidate =
        is_in_proc(fd) && status_of(fd, c"".as_ptr() as usize).is_some_and(|it| it.st_mode == MODE);
    if !is_candidate {
        return false;
    }
    // The file is this memory if it shows each change of it.
    let mut word = 0u64;
    for value in [0x6d65_6d66_6f6c_6431, !0x6d65_6d66_6f6c_6431] {
        // SAFETY: `word` is local, and no other code uses it.
        unsafe { write_volatile(&raw mut word, value) };
        let mut entry = 0u64;
        let args = [fd, &raw mut entry as usize, size_of::<u64>(), &raw mut word as usize, 0, 0];
        // SAFETY: `entry` has room for the bytes that the kernel writes.
        match unsafe { system_call(libc::SYS_pread64, args) } {
            // The file is open for writing only. A write would change the memory of another process
            // if the file is that.
            Err(Errno::BADF) => {
                return is_of_this_process(fd)
                    && target_of(fd, &mut [0; 64]).is_some_and(|it| it.ends_with(b"/mem"));
            }
            // SAFETY: both are local.
            Ok(8) if unsafe { read_volatile(&raw const entry) } == value => {}
            _ => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{File, OpenOptions};
    use std::os::fd::AsRawFd;

    #[test]
    fn own_memory_is_recognized_by_its_bytes() {
        let is_own = |file: &File| is_own_memory(file.as_raw_fd() as usize);
        let thread = memfold_os::thread::thread_id();
        let own = ["/proc/self/mem".into(), format!("/proc/self/task/{thread}/mem")];
        for path in own {
            assert!(is_own(&File::open(&path).unwrap()), "{path}");
            assert!(is_own(&OpenOptions::new().write(true).open(&path).unwrap()), "{path}");
        }
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let other = format!("/proc/{}/mem", child.id());
        let others = [other.as_str(), "/proc/self/status", "/proc/self/maps", "/etc/passwd"];
        let answers = others.map(|path| is_own(&File::open(path).unwrap()));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(answers, [false; 4]);
    }

    #[test]
    fn own_list_of_threads_is_recognized_by_its_place() {
        let number = |path: &CStr| is_own_list(HERE, path.as_ptr() as usize);
        let own = number(c"/proc/self/task");
        assert!(own.is_some() && number(c"/proc/self/task/") == own);
        let others = [c"/proc/1/task", c"/proc/self/fd", c"/proc/self", c"/tmp", c"/no/file"];
        assert_eq!(others.map(number), [None; 5]);
        let open = |path: &str| File::open(path).unwrap();
        let list = open("/proc/self/task");
        let fd = list.as_raw_fd() as usize;
        assert_eq!(is_own_list(fd, 0), own);
        assert_eq!(is_own_list(fd, c"".as_ptr() as usize), own);
        let thread = memfold_os::thread::thread_id();
        let list = own_list(fd).unwrap();
        assert_eq!((list.number_here(thread), list.innermost(thread)), (thread, Some(thread)));
        assert!(own_list(open("/proc/self/fd").as_raw_fd() as usize).is_none());
        assert!(own_list(open("/tmp").as_raw_fd() as usize).is_none());
    }
}
