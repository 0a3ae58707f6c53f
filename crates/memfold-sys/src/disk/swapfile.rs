//! The real swap device: a file without a name.
use crate::Errno;
use crate::disk::uring::{BATCH, Ring};
use crate::disk::{Disk, Transfer, Way};
use crate::page::Page;
use crate::sync::Mutex;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{self, FallocateFlags, Mode, OFlags};

/// How transfers may be done.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// io_uring if the kernel lets us; else one system call for each transfer.
    pub uring: bool,
    /// Past the page cache if the file system lets us.
    pub direct: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options { uring: true, direct: true }
    }
}

/// Rings: this many threads can have a batch under way; others use plain system calls.
const RINGS: usize = 4;
const PROBE_BYTES: usize = 4096;
/// Names tried for a file in a directory whose file system has no nameless files.
const NAME_TRIES: usize = 16;

/// A file without a name, readable by this user only. It is gone when the process ends, however it
/// ends.
pub struct FileDisk {
    file: OwnedFd,
    /// Device and inode: a program that closes descriptors it doesn't know must not make us write
    /// to another file.
    identity: (u64, u64),
    name: String,
    rings: Vec<Mutex<Ring>>,
    is_direct: bool,
}

impl FileDisk {
    /// A file in directory `path`, or beside where `path` would be if nothing is there. It never
    /// has that name, so any number of processes may be given the same one at the same time.
    ///
    /// # Errors
    /// One line that says what is wrong and what to do.
    pub fn open(path: &str, options: Options) -> Result<FileDisk, String> {
        let fail = |what: &str, e: Errno| alloc::format!("{path}: {what}: {e}");
        let file = match fs::stat(path) {
            Ok(stat) if fs::FileType::from_raw_mode(stat.st_mode) == fs::FileType::Directory => nameless(path),
            Ok(_) => {
                return Err(alloc::format!(
                    "{path}: exists and is not a directory; give a directory, or the name of a file to be made"
                ));
            }
            Err(Errno::NOENT) => nameless(directory_of(path)),
            Err(e) => Err(e),
        }
        .map_err(|e| fail("no swap file can be made there", e))?;
        let stat = fs::fstat(&file).map_err(|e| fail("fstat", e))?;
        let identity = (stat.st_dev, stat.st_ino);
        let mut disk = FileDisk {
            file,
            identity,
            name: path.to_string(),
            rings: Vec::new(),
            is_direct: false,
        };
        disk.is_direct = options.direct && disk.set_direct(true).is_ok();
        if let Err(e) = disk.probe() {
            if !disk.is_direct {
                return Err(fail("can't be written to", e));
            }
            disk.is_direct = false;
            disk.set_direct(false).map_err(|e| fail("fcntl", e))?;
            disk.probe().map_err(|e| fail("can't be written to", e))?;
        }
        while options.uring && disk.rings.len() < RINGS {
            let Ok(ring) = Ring::new() else { break };
            disk.rings.push(Mutex::new(ring));
        }
        Ok(disk)
    }

    /// Whether transfers go past the page cache.
    pub fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// Whether io_uring is used.
    pub fn has_uring(&self) -> bool {
        !self.rings.is_empty()
    }

    fn set_direct(&self, on: bool) -> Result<(), Errno> {
        let flags = fs::fcntl_getfl(&self.file)?;
        fs::fcntl_setfl(
            &self.file,
            if on { flags | OFlags::DIRECT } else { flags - OFlags::DIRECT },
        )
    }

    /// Writes and reads a page: some file systems accept O_DIRECT and fail with it.
    fn probe(&self) -> Result<(), Errno> {
        let zone = crate::memory::zone::Zone::reserve(PROBE_BYTES, crate::units::PAGE_SIZE)?;
        let at = zone.as_ptr();
        // SAFETY: the zone is ours and a page long.
        unsafe {
            at.write_bytes(0xA5, PROBE_BYTES);
            self.plain(&mut Transfer::new(Way::Write, 0, Page::at(at), PROBE_BYTES))?;
            at.write_bytes(0, PROBE_BYTES);
            self.plain(&mut Transfer::new(Way::Read, 0, Page::at(at), PROBE_BYTES))?;
            if core::slice::from_raw_parts(at, PROBE_BYTES).iter().any(|b| *b != 0xA5) {
                return Err(Errno::IO);
            }
        }
        fs::ftruncate(&self.file, 0)
    }

    fn assert_own(&self) {
        let own = fs::fstat(&self.file).is_ok_and(|s| (s.st_dev, s.st_ino) == self.identity);
        assert!(
            own,
            "memfold: {}: the program has closed the descriptor of the swap file",
            self.name
        );
    }

    /// Does what is left of a transfer by plain system calls.
    ///
    /// # Safety
    /// - As for [`Disk::transfer`].
    unsafe fn plain(&self, transfer: &mut Transfer) -> Result<(), Errno> {
        while transfer.done < transfer.len {
            let (offset, left) =
                (transfer.offset + transfer.done as u64, transfer.len - transfer.done);
            // SAFETY: `done` is less than the length of the memory that the caller vouches for.
            // What is read into is nobody else's during the call; what is written from may be read
            // by others, and is not changed.
            let step = unsafe {
                let at = transfer.at.cast::<u8>().add(transfer.done);
                match transfer.way {
                    Way::Read => rustix::io::pread(
                        &self.file,
                        core::slice::from_raw_parts_mut(at, left),
                        offset,
                    ),
                    Way::Write => rustix::io::pwrite(
                        &self.file,
                        core::slice::from_raw_parts(at, left),
                        offset,
                    ),
                }
            };
            match step {
                // The end of a file that must be longer: somebody has cut it.
                Ok(0) => return Err(Errno::IO),
                Ok(n) => transfer.done += n,
                Err(Errno::INTR) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}

/// Whether an io_uring can be had; without, each transfer is a system call.
///
/// # Errors
/// ENOSYS or EPERM: the kernel has none, or not for us; EOPNOTSUPP: too old a kernel.
pub fn has_uring() -> Result<(), Errno> {
    Ring::new().map(drop)
}

/// The directory in which `path` names something.
fn directory_of(path: &str) -> &str {
    match path.rsplit_once('/') {
        None => ".",
        Some(("", _)) => "/",
        Some((directory, _)) => directory,
    }
}

/// A file without a name in a directory.
fn nameless(dir: &str) -> Result<OwnedFd, Errno> {
    let mode = Mode::RUSR | Mode::WUSR;
    match fs::open(dir, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC | OFlags::EXCL, mode) {
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT) => {}
        other => return other,
    }
    let mut last = Errno::EXIST;
    for _ in 0..NAME_TRIES {
        match named(&alloc::format!("{dir}/.memfold-swap-{:016x}", random_word()?)) {
            Err(e @ Errno::EXIST) => last = e,
            other => return other,
        }
    }
    Err(last)
}

/// A new file that loses its name at once.
fn named(path: &str) -> Result<OwnedFd, Errno> {
    let file = fs::open(
        path,
        OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC,
        Mode::RUSR | Mode::WUSR,
    )?;
    fs::unlink(path)?;
    Ok(file)
}

fn random_word() -> Result<u64, Errno> {
    let mut bytes = [0; 8];
    random(&mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}

/// Fills `bytes` from the kernel's random generator.
///
/// # Errors
/// ENOSYS: no such system call.
pub fn random(bytes: &mut [u8]) -> Result<(), Errno> {
    let mut done = 0;
    while done < bytes.len() {
        match rustix::rand::getrandom(&mut bytes[done..], rustix::rand::GetRandomFlags::empty()) {
            Ok(n) => done += n,
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

impl Disk for FileDisk {
    unsafe fn transfer(&self, transfers: &mut [Transfer]) {
        self.assert_own();
        for batch in transfers.chunks_mut(BATCH) {
            if let Some(mut ring) = self.rings.iter().find_map(|ring| ring.try_lock()) {
                // SAFETY: as the caller says. If the ring fails, nothing was done, and the plain
                // way does it all.
                let _ = unsafe { ring.run(self.file.as_fd(), batch) };
            }
            for transfer in batch.iter_mut().filter(|t| t.result.is_ok() && t.done < t.len) {
                // SAFETY: as the caller says.
                transfer.result = unsafe { self.plain(transfer) };
            }
        }
    }

    fn grow(&self, len: u64) -> Result<(), Errno> {
        self.assert_own();
        loop {
            match fs::fallocate(&self.file, FallocateFlags::empty(), 0, len) {
                Err(Errno::INTR) => {}
                Err(Errno::OPNOTSUPP | Errno::NOSYS) => return fs::ftruncate(&self.file, len),
                other => return other,
            }
        }
    }

    fn stretch(&self, len: u64) -> Result<(), Errno> {
        self.assert_own();
        fs::ftruncate(&self.file, len)
    }

    fn punch(&self, offset: u64, len: u64) -> Result<(), Errno> {
        self.assert_own();
        fs::fallocate(
            &self.file,
            FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            offset,
            len,
        )
    }

    fn free_bytes(&self) -> Result<u64, Errno> {
        let stat = fs::fstatvfs(&self.file)?;
        Ok(stat.f_bavail * stat.f_frsize)
    }

    unsafe fn register(&self, start: *mut u8, len: usize) {
        for ring in &self.rings {
            // SAFETY: as the caller says. Without it (RLIMIT_MEMLOCK) the ring works all the same.
            let _ = unsafe { ring.lock().register(start, len) };
        }
    }

    fn name(&self) -> &str {
        &self.name
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::zone::Zone;
    use crate::units::{MAX_BYTES, PAGE_SIZE};

    /// Directories to try: a disk's, and one in memory.
    fn dirs() -> Vec<String> {
        let tmp = std::env::temp_dir().to_str().unwrap().to_string();
        std::vec![tmp, "/dev/shm".to_string()]
    }

    fn every_way(mut each: impl FnMut(FileDisk)) {
        for dir in dirs() {
            for (uring, direct) in [(false, false), (false, true), (true, false), (true, true)] {
                each(FileDisk::open(&dir, Options { uring, direct }).unwrap());
            }
        }
    }

    #[test]
    fn what_is_written_is_read_in_batches_and_alone_from_registered_memory_and_other() {
        every_way(|disk| {
            let zone = Zone::reserve(4 * MAX_BYTES, PAGE_SIZE).unwrap();
            disk.grow(2 * MAX_BYTES as u64).unwrap();
            // SAFETY: the zone outlives the disk's use; every address lies in it.
            unsafe {
                disk.register(zone.as_ptr(), 3 * MAX_BYTES);
                let source = core::slice::from_raw_parts_mut(zone.as_ptr(), 2 * MAX_BYTES);
                random(source).unwrap();
                let piece = 2 * MAX_BYTES / 64;
                let part = |way, to: usize, n: usize| {
                    Transfer::new(
                        way,
                        (n * piece) as u64,
                        Page::at(zone.as_ptr().add(to + n * piece)),
                        piece,
                    )
                };
                let mut writes: Vec<Transfer> = (0..64).map(|n| part(Way::Write, 0, n)).collect();
                disk.transfer(&mut writes);
                assert!(writes.iter().all(|t| t.result == Ok(())));
                // Half of it into registered memory, half of it not.
                let mut reads: Vec<Transfer> =
                    (0..64).map(|n| part(Way::Read, 2 * MAX_BYTES, n)).collect();
                disk.transfer(&mut reads);
                assert!(reads.iter().all(|t| t.result == Ok(())));
                let read =
                    core::slice::from_raw_parts(zone.as_ptr().add(2 * MAX_BYTES), 2 * MAX_BYTES);
                assert!(read == core::slice::from_raw_parts(zone.as_ptr(), 2 * MAX_BYTES));
            }
            drop(disk);
        });
    }

    /// Makes a system call fail with `errno` from now on, in this thread only, where its third
    /// argument has one of `bits`.
    fn refuse(call: i64, errno: Errno, bits: u32) {
        const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
        let step = |code: u16, jt, jf, k| libc::sock_filter { code, jt, jf, k };
        let test = |code: u32| (libc::BPF_JMP | code | libc::BPF_K) as u16;
        let end = (libc::BPF_RET | libc::BPF_K) as u16;
        // Number at 0; the third argument's low half at 32.
        let mut filter = [
            step(LOAD, 0, 0, 0),
            step(test(libc::BPF_JEQ), 0, 3, call as u32),
            step(LOAD, 0, 0, 32),
            step(test(libc::BPF_JSET), 0, (bits != 0) as u8, bits),
            step(end, 0, 0, libc::SECCOMP_RET_ERRNO | errno.raw_os_error() as u32),
            step(end, 0, 0, libc::SECCOMP_RET_ALLOW),
        ];
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
        // SAFETY: prctl reads the program during the call; it binds this thread only.
        unsafe {
            assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
            assert_eq!(
                libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program),
                0
            );
        }
    }

    /// Writes a page through the disk and reads it back.
    fn assert_works(disk: &FileDisk) {
        let zone = Zone::reserve(2 * PAGE_SIZE, PAGE_SIZE).unwrap();
        disk.grow(8 * PAGE_SIZE as u64).unwrap();
        // SAFETY: the zone has two pages, and outlives the transfers.
        unsafe {
            zone.as_ptr().write_bytes(0x5A, PAGE_SIZE);
            let mut write = [Transfer::new(Way::Write, 4096, Page::at(zone.as_ptr()), PAGE_SIZE)];
            disk.transfer(&mut write);
            let mut read =
                [Transfer::new(Way::Read, 4096, Page::at(zone.as_ptr().add(PAGE_SIZE)), PAGE_SIZE)];
            disk.transfer(&mut read);
            assert_eq!((write[0].result, read[0].result), (Ok(()), Ok(())));
            assert!(
                core::slice::from_raw_parts(zone.as_ptr(), 2 * PAGE_SIZE)
                    .iter()
                    .all(|b| *b == 0x5A)
            );
        }
    }

    #[test]
    fn where_io_uring_is_denied_plain_calls_do_it() {
        for errno in [Errno::PERM, Errno::NOSYS] {
            let denied = move || {
                refuse(libc::SYS_io_uring_setup, errno, 0);
                for dir in dirs() {
                    let disk = FileDisk::open(&dir, Options::default()).unwrap();
                    assert!(!disk.has_uring());
                    assert_works(&disk);
                }
            };
            std::thread::spawn(denied).join().unwrap();
        }
    }

    #[test]
    fn a_ring_that_fails_later_leaves_its_work_to_plain_calls() {
        let denied = || {
            let disk = FileDisk::open(&dirs()[0], Options::default()).unwrap();
            assert!(disk.has_uring());
            refuse(libc::SYS_io_uring_enter, Errno::PERM, 0);
            assert_works(&disk);
        };
        std::thread::spawn(denied).join().unwrap();
    }

    #[test]
    fn where_o_direct_is_refused_the_page_cache_does_it() {
        let denied = || {
            refuse(libc::SYS_fcntl, Errno::INVAL, OFlags::DIRECT.bits());
            for dir in dirs() {
                let disk = FileDisk::open(&dir, Options::default()).unwrap();
                assert!(!disk.is_direct());
                assert_works(&disk);
            }
        };
        std::thread::spawn(denied).join().unwrap();
    }

    #[test]
    fn a_read_past_the_end_is_an_error_not_zeros() {
        every_way(|disk| {
            disk.grow(PAGE_SIZE as u64).unwrap();
            let zone = Zone::reserve(2 * PAGE_SIZE, PAGE_SIZE).unwrap();
            let mut read = [Transfer::new(Way::Read, 0, Page::at(zone.as_ptr()), 2 * PAGE_SIZE)];
            // SAFETY: the zone has two pages.
            unsafe { disk.transfer(&mut read) };
            assert_eq!(read[0].result, Err(Errno::IO));
        });
    }

    #[test]
    fn a_punched_range_takes_no_space() {
        let disk = FileDisk::open("/dev/shm", Options::default()).unwrap();
        disk.grow(8 << 20).unwrap();
        let blocks = || fs::fstat(&disk.file).unwrap().st_blocks as u64 * 512;
        let before = blocks();
        assert!(before >= 8 << 20);
        disk.punch(2 << 20, 4 << 20).unwrap();
        assert_eq!(before - blocks(), 4 << 20);
    }

    /// Opens a disk at a path in each of many threads at the same time, a hundred times; what went
    /// wrong.
    fn open_in_many_threads(path: &str, prepare: fn()) -> Vec<String> {
        let together = std::sync::Barrier::new(16);
        let open = || {
            prepare();
            let each = (0..100).map(|_| {
                together.wait();
                FileDisk::open(path, Options { uring: false, direct: false }).err()
            });
            each.collect::<Vec<_>>().into_iter().flatten()
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..16).map(|_| scope.spawn(open)).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn any_number_that_start_together_with_one_file_name_get_a_file_each() {
        let dir =
            std::env::temp_dir().join(std::format!("memfold-together-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let path = dir.join("file");
        assert_eq!(open_in_many_threads(path.to_str().unwrap(), || {}), [""; 0]);
        // As on a file system that has no nameless files.
        let refuse_nameless = || {
            refuse(
                libc::SYS_openat,
                Errno::OPNOTSUPP,
                libc::O_TMPFILE as u32 & !libc::O_DIRECTORY as u32,
            )
        };
        assert_eq!(open_in_many_threads(path.to_str().unwrap(), refuse_nameless), [""; 0]);
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn the_file_has_no_name_and_is_this_users_only() {
        let dir = std::env::temp_dir().join(std::format!("memfold-disk-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        for path in
            [dir.to_str().unwrap().to_string(), dir.join("file").to_str().unwrap().to_string()]
        {
            let disk = FileDisk::open(&path, Options::default()).unwrap();
            assert_eq!(fs::fstat(&disk.file).unwrap().st_mode & 0o777, 0o600);
            assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
        }
        std::fs::write(dir.join("precious"), "x").unwrap();
        let refused = FileDisk::open(dir.join("precious").to_str().unwrap(), Options::default())
            .err()
            .unwrap();
        assert!(refused.contains("exists"), "{refused}");
        assert_eq!(std::fs::read(dir.join("precious")).unwrap(), b"x");
        std::fs::remove_dir_all(&dir).unwrap();
        let gone =
            FileDisk::open(dir.join("file").to_str().unwrap(), Options::default()).err().unwrap();
        assert!(gone.contains("no swap file can be made"), "{gone}");
    }
}
