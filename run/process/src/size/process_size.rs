//! This process's size according to /proc, read without allocation.
use memfold_os::Errno;
use memfold_os::maps::own::OwnFile;
use memfold_os::raw::system_call;
use memfold_os::thread::{bare, process_id, read_stat, stat_field};
use memfold_os::units::PAGE_SIZE;
use memfold_run::member;
use rustix::fs::{Mode, OFlags, open};

/// `/proc/self/statm`, open.
pub struct Statm(OwnFile);

impl Statm {
    /// Opens `/proc/self/statm`.
    ///
    /// # Errors
    /// The errors of `open`; ENOENT without /proc.
    pub fn open() -> Result<Statm, Errno> {
        OwnFile::open(c"/proc/self/statm").map(Statm)
    }

    /// Opens the child's own file in a child of fork, in place of its parent's and under the same
    /// number.
    ///
    /// # Errors
    /// The errors of [`Statm::open`]. The file is lost then.
    pub fn reopen(&self) -> Result<(), Errno> {
        self.0.reopen()
    }

    /// Returns whether the file could not be reopened.
    pub fn is_lost(&self) -> bool {
        self.0.get().is_none()
    }

    /// Returns the resident anonymous memory, bytes, or `None` if the file can't be read.
    pub fn anonymous_bytes(&self) -> Option<u64> {
        let mut text = [0u8; 128];
        let n = rustix::io::pread(self.0.get()?, &mut text, 0).ok()?;
        anonymous_in(core::str::from_utf8(&text[..n]).ok()?)
    }
}

/// Returns the resident bytes that belong to no file, from the text of statm.
fn anonymous_in(statm: &str) -> Option<u64> {
    let mut fields = statm.split_ascii_whitespace();
    let resident: u64 = fields.nth(1)?.parse().ok()?;
    let shared_pages: u64 = fields.next()?.parse().ok()?;
    Some(resident.saturating_sub(shared_pages) * PAGE_SIZE as u64)
}

/// Returns the memory that the machine has available, bytes; 0 if unknown.
pub fn available_bytes() -> u64 {
    field(c"/proc/meminfo", "MemAvailable:").unwrap_or(0)
}

/// Returns the most memory that this process has had resident, bytes. Works without /proc.
pub fn peak_bytes() -> u64 {
    usage().map_or(0, |usage| (usage.ru_maxrss as u64) << 10)
}

/// Returns the bytes of all pages for which the kernel has served a fault of this process.
pub fn faulted_bytes() -> u64 {
    usage().map_or(0, |usage| usage.ru_minflt as u64 * PAGE_SIZE as u64)
}

fn usage() -> Result<libc::rusage, Errno> {
    // SAFETY: the struct has only integers, for which zeros are valid.
    let mut usage: libc::rusage = unsafe { core::mem::zeroed() };
    let args = [libc::RUSAGE_SELF as usize, &raw mut usage as usize, 0, 0, 0, 0];
    // SAFETY: the kernel writes one `rusage` to `usage`, which has that type.
    unsafe { system_call(libc::SYS_getrusage, args) }.map(|_| usage)
}

/// Returns whether a seccomp filter may apply to this process's system calls. Without /proc it may:
/// to ask by `prctl` could end a process with a filter. The kernel takes long to write the file, so
/// only the first process of a run reads it, and all others after one has set a filter
/// ([`member::note_filter`]).
pub fn is_filtered() -> bool {
    if member::has_filters() == Some(false) {
        return false;
    }
    let mode = field(c"/proc/self/status", "Seccomp:");
    let is = mode.is_none_or(|kib| kib >> 10 == libc::SECCOMP_MODE_FILTER as u64);
    member::note_filter(is);
    is
}

/// The warning to print if [`merges`] returns `true`.
pub const MERGES: &str = "warning: The program lets the kernel merge equal pages of its memory \
    (PR_SET_MEMORY_MERGE). memfold can't fold such memory";

/// Returns whether the kernel may merge equal pages of all memory of this process.
pub fn merges() -> bool {
    // SAFETY: the call only reads a setting. A kernel that doesn't know it returns EINVAL.
    let answer = unsafe {
        system_call(libc::SYS_prctl, [libc::PR_GET_MEMORY_MERGE as usize, 0, 0, 0, 0, 0])
    };
    answer.is_ok_and(|on| on != 0)
}

/// Resident anonymous memory that other processes share with this one, because of forks.
#[derive(Default)]
pub struct SharedMemory {
    /// All of it, bytes.
    pub bytes: u64,
    /// The part of it that counts in other processes, bytes. A page that `n` processes have counts
    /// with `1/n` in each.
    pub others_bytes: u64,
}

/// `/proc/self/smaps_rollup`, open.
pub struct Rollup(OwnFile);

impl Rollup {
    /// Opens `/proc/self/smaps_rollup`. Returns `None` if it is unavailable.
    pub fn open() -> Option<Rollup> {
        OwnFile::open(c"/proc/self/smaps_rollup").ok().map(Rollup)
    }

    /// Opens the child's own file in a child of fork. If that fails, no shared memory is measured.
    pub fn reopen(&self) {
        let _ = self.0.reopen();
    }

    /// Measures shared memory. The kernel walks the page table for that, which takes 20 ms for each
    /// GiB in single pages.
    pub fn shared_memory(&self) -> SharedMemory {
        let names = ["Anonymous:", "Pss_Anon:", "Shared_Dirty:"];
        let mut text = [0u8; 4096];
        let len = self.0.get().and_then(|file| rustix::io::pread(file, &mut text, 0).ok());
        let text = core::str::from_utf8(&text[..len.unwrap_or(0)]).unwrap_or("");
        let [all, own, bytes] = values_in(text, names);
        let others_bytes = all.saturating_sub(own);
        SharedMemory { bytes: bytes.max(others_bytes), others_bytes }
    }
}

/// Returns the value of a line of a file in bytes, or `None` if it is unknown. The file has it in
/// KiB.
fn field(path: &core::ffi::CStr, name: &str) -> Option<u64> {
    let mut text = [0u8; 4096];
    let fd = open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let n = rustix::io::read(&fd, &mut text).ok()?;
    Some(values_in(core::str::from_utf8(&text[..n]).ok()?, [name])[0])
}

/// Returns the values of the lines of a text that begin with these names.
fn values_in<const N: usize>(text: &str, names: [&str; N]) -> [u64; N] {
    names.map(|name| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let kib: u64 = line
            .and_then(|l| l.split_ascii_whitespace().next())
            .and_then(|n| n.parse().ok())
            .unwrap_or(0);
        kib << 10
    })
}

/// Ends the process if no thread of the program is left, because the engine's threads would
/// continue. The process ends as its first thread has ended. If a filter has killed that thread, it
/// ends as a filter kills the last one.
pub fn end_with_program(has_killed_last: bool) {
    /// A directory has one link for itself, and one for its name.
    const OWN_LINKS: usize = 2;
    let links = rustix::fs::stat(c"/proc/self/task").map_or(0, |about| about.st_nlink as usize);
    let mut stat = [0u8; 1024];
    let len = read_stat(process_id(), &mut stat).unwrap_or(0);
    let field = |number: usize| stat_field(&stat[..len], number).map(str::trim_end);
    // The first thread exists until the process is gone.
    if links != OWN_LINKS + bare::count() + 1 || field(3) != Some("Z") {
        return;
    }
    let status = field(52).and_then(|code| code.parse().ok()).unwrap_or(0usize);
    let (signal, code) = match has_killed_last {
        true => (libc::SIGSYS as usize, 0),
        false => (status & 0x7f, status >> 8 & 0xff),
    };
    if signal != 0 {
        end_by(signal);
    }
    // SAFETY: no thread of the program is left, and the call has no pointers.
    let _ = unsafe { system_call(libc::SYS_exit_group, [code, 0, 0, 0, 0, 0]) };
}

/// Ends the process by a signal. No thread of the program may be left.
pub fn end_by(signal: usize) {
    const BYTES: usize = 8;
    let (default, open) = ([0usize; 4], 1u64 << (signal - 1));
    let unblock = libc::SIG_UNBLOCK as usize;
    let calls = [
        (libc::SYS_rt_sigaction, [signal, default.as_ptr() as usize, 0, BYTES, 0, 0]),
        (libc::SYS_rt_sigprocmask, [unblock, &raw const open as usize, 0, BYTES, 0, 0]),
        (libc::SYS_kill, [process_id() as usize, signal, 0, 0, 0, 0]),
    ];
    for (nr, args) in calls {
        // SAFETY: no thread of the program is left. The pointers lead to locals that live during
        // the calls.
        let _ = unsafe { system_call(nr, args) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anonymous_memory_is_what_is_resident_and_of_no_file() {
        assert_eq!(anonymous_in("900 100 30 5 0 70 0\n"), Some(70 * PAGE_SIZE as u64));
        assert_eq!(anonymous_in("900 30 100 5 0 70 0\n"), Some(0), "each is read by itself");
        assert_eq!([anonymous_in(""), anonymous_in("900 100"), anonymous_in("a b c")], [None; 3]);
    }

    #[test]
    fn lines_are_read_by_their_whole_names() {
        let text = "Pss:  9 kB\nPss_Anon:      7 kB\nAnonymous:\t12 kB\nShared_Dirty: x kB";
        let names = ["Anonymous:", "Pss_Anon:", "Shared_Dirty:", "Pss_File:"];
        assert_eq!(values_in(text, names), [12 << 10, 7 << 10, 0, 0]);
    }

    #[test]
    fn own_size_is_known() {
        let bytes = Statm::open().unwrap().anonymous_bytes();
        assert!(bytes.is_some_and(|bytes| bytes > 0 && bytes < 1 << 40), "{bytes:?}");
        assert!(peak_bytes() > 0 && available_bytes() > 0);
    }
}
