//! The real swap device: a file without a name.
use crate::disk::Disk;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use memfold_os::Errno;
use memfold_os::page::Page;
use memfold_os::random;
use memfold_os::raw::renumber;
use memfold_os::sync::{ForkCell, Mutex};
use memfold_os::transfer::uring::{BATCH, IoRing};
use memfold_os::transfer::{Direction, Transfer};
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::fs::{self, FallocateFlags, Mode, OFlags};

/// How transfers are made.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct FileDiskOptions {
    /// Use io_uring if the kernel permits it; otherwise one system call for each transfer.
    pub uring: bool,
    /// Bypass the page cache if the file system permits it.
    pub direct: bool,
    /// The least number of the file's descriptor.
    pub number: i32,
}

impl Default for FileDiskOptions {
    fn default() -> FileDiskOptions {
        FileDiskOptions { uring: true, direct: true, number: 0 }
    }
}

/// Number of rings: so many threads can have a batch in progress; others use plain system calls.
const RINGS: usize = 4;
const PROBE_BYTES: usize = 4096;
/// Names tried for a file in a directory whose file system has no nameless files.
const NAME_TRIES: usize = 16;

/// A file without a name, readable by this user only. It is gone when the process ends, however it
/// ends.
///
/// A child of fork may continue to read the files of its parent and of the parent's ancestors. It
/// changes nothing in them. Later bytes are in a file of its own.
pub struct FileDisk {
    files: ForkCell<DiskFiles>,
    name: String,
    rings: [Mutex<Option<IoRing>>; RINGS],
    options: FileDiskOptions,
}

/// The files of a disk: each has the bytes from its first on, up to that of the next.
struct DiskFiles {
    /// Files of ancestors, in this order.
    older: Vec<DiskFile>,
    /// `None` if the file could not be made, so nothing can be written.
    own: Option<DiskFile>,
    /// The first byte of the own file.
    base: u64,
}

struct DiskFile {
    file: OwnedFd,
    first: u64,
    /// Device and inode. They are checked, because a program may close descriptors that it doesn't
    /// know, and open another file under the number.
    identity: (u64, u64),
    is_direct: bool,
}

/// Returns the meaning of an error for the user who chose the directory.
fn reason(e: Errno) -> Option<&'static str> {
    match e {
        Errno::ACCESS | Errno::PERM => Some("this user may not write there"),
        Errno::ROFS => Some("its file system is read-only"),
        Errno::NOSPC | Errno::DQUOT => {
            Some("there is no space left; free some, or give another directory")
        }
        _ => None,
    }
}

impl DiskFile {
    /// Opens a file as [`FileDisk::open`] does. `known` is whether the directory's file system
    /// takes O_DIRECT, if that was tried.
    fn open(
        path: &str,
        options: FileDiskOptions,
        first: u64,
        known: Option<bool>,
    ) -> Result<DiskFile, String> {
        let fail = |what: &str, e: Errno| match reason(e) {
            Some(why) => alloc::format!("{path}: {what}: {why}"),
            None => alloc::format!("{path}: {what}: {e}"),
        };
        let file = match fs::stat(path) {
            Ok(stat) if fs::FileType::from_raw_mode(stat.st_mode) == fs::FileType::Directory => {
                nameless(path)
            }
            Ok(_) => {
                return Err(alloc::format!(
                    "{path}: exists and is not a directory; give the directory for the file, which has no name"
                ));
            }
            Err(Errno::NOENT) => {
                return Err(alloc::format!(
                    "{path}: no swap file can be made there: there is no such directory. Make it, or give another; the file \
                     itself has no name"
                ));
            }
            Err(e) => Err(e),
        }
        .map_err(|e| fail("no swap file can be made there", e))?;
        let file = match options.number {
            0 => file,
            number => {
                renumber(file, number).map_err(|e| fail("numbering its descriptor failed", e))?
            }
        };
        let stat = fs::fstat(&file).map_err(|e| fail("fstat", e))?;
        let identity = (stat.st_dev, stat.st_ino);
        let mut file = DiskFile { file, first, identity, is_direct: false };
        let may = options.direct && known != Some(false);
        file.is_direct = may && file.set_direct(true).is_ok();
        if known == Some(file.is_direct) {
            return Ok(file);
        }
        if let Err(e) = file.probe() {
            if !file.is_direct {
                return Err(fail("can't be written to", e));
            }
            file.is_direct = false;
            file.set_direct(false).map_err(|e| fail("fcntl", e))?;
            file.probe().map_err(|e| fail("can't be written to", e))?;
        }
        Ok(file)
    }

    fn set_direct(&self, on: bool) -> Result<(), Errno> {
        let flags = fs::fcntl_getfl(&self.file)?;
        fs::fcntl_setfl(
            &self.file,
            if on { flags | OFlags::DIRECT } else { flags - OFlags::DIRECT },
        )
    }

    /// Writes and reads a page, because some file systems accept O_DIRECT and fail with it.
    fn probe(&self) -> Result<(), Errno> {
        let zone =
            memfold_os::memory::zone::Zone::reserve(PROBE_BYTES, memfold_os::units::PAGE_SIZE)?;
        let (at, first) = (zone.as_ptr(), self.first);
        // SAFETY: the zone belongs to this function and is a page long. No other thread uses it or
        // the file during the transfers.
        unsafe {
            at.write_bytes(0xA5, PROBE_BYTES);
            Transfer::new(Direction::Write, first, Page::at(at), PROBE_BYTES)
                .finish(self.file.as_fd(), first)?;
            at.write_bytes(0, PROBE_BYTES);
            Transfer::new(Direction::Read, first, Page::at(at), PROBE_BYTES)
                .finish(self.file.as_fd(), first)?;
            if core::slice::from_raw_parts(at, PROBE_BYTES).iter().any(|b| *b != 0xA5) {
                return Err(Errno::IO);
            }
        }
        fs::ftruncate(&self.file, 0)
    }

    fn is_itself(&self) -> bool {
        fs::fstat(&self.file).is_ok_and(|s| (s.st_dev, s.st_ino) == self.identity)
    }
}

impl FileDisk {
    /// Opens a file without a name in the directory `path`. Any number of processes may be given the
    /// same directory at the same time.
    ///
    /// # Errors
    /// One line that says what is wrong and what to do.
    pub fn open(path: &str, options: FileDiskOptions) -> Result<FileDisk, String> {
        let own = DiskFile::open(path, options, 0, None)?;
        let disk = FileDisk {
            files: ForkCell::new(DiskFiles { older: Vec::new(), own: Some(own), base: 0 }),
            name: path.to_string(),
            rings: [const { Mutex::new(None) }; RINGS],
            options,
        };
        if options.uring {
            disk.make_rings();
        }
        Ok(disk)
    }

    /// Makes transfers use io_uring, if the kernel permits it. The rings' descriptors are in the
    /// descriptor table of the calling thread. Threads that make transfers from now on must share
    /// that table.
    pub fn make_rings(&self) {
        for place in &self.rings {
            let Ok(ring) = IoRing::new() else { break };
            *place.lock() = Some(ring);
        }
    }

    /// Begins a file of its own in a child of fork, for the bytes from `base` on. Bytes before
    /// `base` are read from the parent's files. If `base` is 0, these are not needed any more. If
    /// no file can be made, nothing can be written.
    ///
    /// # Errors
    /// The errors of [`FileDisk::open`].
    ///
    /// # Safety
    /// - [`FileDisk::leave_rings`] was called, and the caller is the only thread of the process.
    /// - No transfer is in progress here, and the parent never writes below `base`.
    pub unsafe fn begin_in_child(&self, base: u64) -> Result<(), String> {
        // SAFETY: the caller promises that it is the only thread, so no other thread uses the
        // files.
        let files = unsafe { self.files.change() };
        let known = files.own.as_ref().map(|own| own.is_direct);
        files.older.extend(files.own.take());
        if base == 0 {
            files.older.clear();
        }
        files.base = base;
        files.own = Some(DiskFile::open(&self.name, self.options, base, known)?);
        Ok(())
    }

    /// Drops the rings. From now on each transfer is a system call. Called in a child of fork
    /// before its first transfer, or when the threads that made transfers have ended, because the
    /// rings are theirs.
    ///
    /// # Safety
    /// - No other thread uses the file.
    pub unsafe fn leave_rings(&self) {
        for place in &self.rings {
            // SAFETY: the caller promises that no other thread uses the rings. Their descriptors
            // aren't in this process, and their memory is shared with the parent, so they are only
            // forgotten.
            unsafe {
                place.reset();
                core::mem::forget(place.peek_mut().take());
            }
        }
    }

    /// Returns the number of ancestors' files that are read.
    pub fn older(&self) -> usize {
        self.files.older.len()
    }

    /// Calls `each` with the numbers of the files' descriptors.
    pub fn each_number(&self, each: impl FnMut(i32)) {
        self.files.older.iter().chain(&self.files.own).map(|f| f.file.as_raw_fd()).for_each(each);
    }

    /// Returns whether transfers bypass the page cache.
    pub fn is_direct(&self) -> bool {
        self.files.own.as_ref().is_some_and(|own| own.is_direct)
    }

    /// Returns whether io_uring is used.
    pub fn has_uring(&self) -> bool {
        self.rings[0].lock().is_some()
    }

    /// Returns this process's own file.
    ///
    /// # Errors
    /// EBADF: it has none.
    fn own(&self) -> Result<&DiskFile, Errno> {
        let own = self.files.own.as_ref().ok_or(Errno::BADF)?;
        self.assert_itself(own);
        Ok(own)
    }

    fn assert_itself(&self, file: &DiskFile) {
        assert!(
            file.is_itself(),
            "memfold: The program has closed the descriptor of the swap file {}, so its data is lost",
            self.name
        );
    }

    /// Returns the file that has the byte at `offset`, and the end of that file's bytes.
    ///
    /// # Errors
    /// EBADF: no file has it, because this process has none of its own.
    fn file_at(&self, offset: u64) -> Result<(&DiskFile, u64), Errno> {
        let DiskFiles { older, base, .. } = &*self.files;
        if offset >= *base {
            return Ok((self.own()?, u64::MAX));
        }
        let after = older.partition_point(|file| file.first <= offset);
        let end = older.get(after).map_or(*base, |file| file.first);
        self.assert_itself(&older[after - 1]);
        Ok((&older[after - 1], end))
    }

    /// Makes a transfer whose bytes before `end` are in one file, and the others in later ones.
    ///
    /// # Safety
    /// - The conditions of [`Disk::transfer`].
    unsafe fn transfer_parts(&self, whole: &mut Transfer, end: u64) {
        let len = (end - whole.offset) as usize;
        let second = whole.at.wrapping_add(len / PROBE_BYTES);
        let mut parts = [
            Transfer::new(whole.direction, whole.offset, whole.at, len),
            Transfer::new(whole.direction, whole.offset + len as u64, second, whole.len - len),
        ];
        // SAFETY: the caller promises the conditions for the whole transfer. These are disjoint
        // parts of it.
        unsafe { self.transfer(&mut parts) };
        whole.done = parts[0].done + parts[1].done;
        whole.result = parts[0].result.and(parts[1].result);
    }

    /// Makes transfers that go to one file.
    ///
    /// # Safety
    /// - The conditions of [`Disk::transfer`].
    unsafe fn transfer_by(&self, file: &DiskFile, transfers: &mut [Transfer]) {
        for batch in transfers.chunks_mut(BATCH) {
            let mut free = self.rings.iter().filter_map(|ring| ring.try_lock());
            if let Some(ring) = free.find(|ring| ring.is_some()).as_deref_mut()
                && let Some(ring) = ring
            {
                // SAFETY: the caller promises the conditions of `Disk::transfer`. If the ring
                // fails, no transfer was made, and the system calls below make all.
                let _ = unsafe { ring.run(file.file.as_fd(), file.first, batch) };
            }
            for transfer in batch.iter_mut().filter(|t| t.result.is_ok() && t.done < t.len) {
                // SAFETY: the caller promises the conditions of `Disk::transfer`.
                transfer.result = unsafe { transfer.finish(file.file.as_fd(), file.first) };
            }
        }
    }
}

/// Makes a file without a name in a directory.
fn nameless(dir: &str) -> Result<OwnedFd, Errno> {
    let mode = Mode::RUSR | Mode::WUSR;
    match fs::open(dir, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC | OFlags::EXCL, mode) {
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT) => {}
        other => return other,
    }
    let mut last = Errno::EXIST;
    for _ in 0..NAME_TRIES {
        match named(&alloc::format!("{dir}/.memfold-swap-{:016x}", random::word()?)) {
            Err(e @ Errno::EXIST) => last = e,
            other => return other,
        }
    }
    Err(last)
}

/// Makes a file, and removes its name at once.
fn named(path: &str) -> Result<OwnedFd, Errno> {
    let file = fs::open(
        path,
        OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC,
        Mode::RUSR | Mode::WUSR,
    )?;
    fs::unlink(path)?;
    Ok(file)
}

impl Disk for FileDisk {
    unsafe fn transfer(&self, mut transfers: &mut [Transfer]) {
        while let Some(first) = transfers.first_mut() {
            let (file, end) = match self.file_at(first.offset) {
                Ok(found) => found,
                Err(e) => {
                    first.result = Err(e);
                    transfers = &mut transfers[1..];
                    continue;
                }
            };
            let is_here = |t: &Transfer| {
                t.offset >= file.first && t.len as u64 <= end.saturating_sub(t.offset)
            };
            let count = transfers.iter().take_while(|t| is_here(t)).count();
            let (turn, rest) = transfers.split_at_mut(count.max(1));
            // SAFETY: the caller promises the conditions of `Disk::transfer`.
            unsafe {
                match count {
                    0 => self.transfer_parts(&mut turn[0], end),
                    _ => self.transfer_by(file, turn),
                }
            }
            transfers = rest;
        }
    }

    fn grow(&self, len: u64) -> Result<(), Errno> {
        let own = self.own()?;
        let len = len - own.first;
        loop {
            match fs::fallocate(&own.file, FallocateFlags::empty(), 0, len) {
                Err(Errno::INTR) => {}
                Err(Errno::OPNOTSUPP | Errno::NOSYS) => return fs::ftruncate(&own.file, len),
                other => return other,
            }
        }
    }

    fn stretch(&self, len: u64) -> Result<(), Errno> {
        let own = self.own()?;
        fs::ftruncate(&own.file, len - own.first)
    }

    fn punch(&self, offset: u64, len: u64) -> Result<(), Errno> {
        let own = self.own()?;
        fs::fallocate(
            &own.file,
            FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            offset - own.first,
            len,
        )
    }

    fn free_bytes(&self) -> Result<u64, Errno> {
        let stat = fs::fstatvfs(&self.own()?.file)?;
        Ok(stat.f_bavail * stat.f_frsize)
    }

    unsafe fn register(&self, start: *mut u8, len: usize) {
        for ring in &self.rings {
            // SAFETY: the caller promises that the memory stays mapped as long as the disk lives.
            // The ring also works without registered memory (RLIMIT_MEMLOCK), so a failure is
            // ignored.
            let _ = ring.lock().as_mut().map(|ring| unsafe { ring.register(start, len) });
        }
    }

    fn name(&self) -> &str {
        &self.name
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_os::memory::zone::Zone;
    use memfold_os::units::{MAX_BYTES, PAGE_SIZE};

    /// Returns directories to try: a disk's, and one in memory.
    fn dirs() -> Vec<String> {
        let tmp = std::env::temp_dir().to_str().unwrap().to_string();
        std::vec![tmp, "/dev/shm".to_string()]
    }

    fn every_way(mut each: impl FnMut(FileDisk)) {
        for dir in dirs() {
            for (uring, direct) in [(false, false), (false, true), (true, false), (true, true)] {
                each(FileDisk::open(&dir, FileDiskOptions { uring, direct, number: 0 }).unwrap());
            }
        }
    }

    #[test]
    fn reads_return_written_bytes_in_batches_and_alone() {
        every_way(|disk| {
            let zone = Zone::reserve(4 * MAX_BYTES, PAGE_SIZE).unwrap();
            disk.grow(2 * MAX_BYTES as u64).unwrap();
            // SAFETY: the zone outlives the disk's use, and every address lies in it. Only this
            // thread uses the zone and the disk, and transfers of one call don't overlap.
            unsafe {
                disk.register(zone.as_ptr(), 3 * MAX_BYTES);
                let source = core::slice::from_raw_parts_mut(zone.as_ptr(), 2 * MAX_BYTES);
                random::fill(source).unwrap();
                let piece = 2 * MAX_BYTES / 64;
                let part = |direction, to: usize, n: usize| {
                    Transfer::new(
                        direction,
                        (n * piece) as u64,
                        Page::at(zone.as_ptr().add(to + n * piece)),
                        piece,
                    )
                };
                let mut writes: Vec<Transfer> =
                    (0..64).map(|n| part(Direction::Write, 0, n)).collect();
                disk.transfer(&mut writes);
                assert!(writes.iter().all(|t| t.result == Ok(())));
                // Half of the bytes are read into registered memory, the other half into memory
                // that is not registered.
                let mut reads: Vec<Transfer> =
                    (0..64).map(|n| part(Direction::Read, 2 * MAX_BYTES, n)).collect();
                disk.transfer(&mut reads);
                assert!(reads.iter().all(|t| t.result == Ok(())));
                let bytes_read =
                    core::slice::from_raw_parts(zone.as_ptr().add(2 * MAX_BYTES), 2 * MAX_BYTES);
                assert!(bytes_read == core::slice::from_raw_parts(zone.as_ptr(), 2 * MAX_BYTES));
            }
            drop(disk);
        });
    }

    /// Makes a system call fail with `errno` from now on, in this thread only, if its third
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
        // SAFETY: prctl reads the program only during the call, and `program` and `filter` live
        // until then. The filter binds this thread only.
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
        // SAFETY: the zone has two pages and outlives the transfers. Only this thread uses the zone
        // and the disk.
        unsafe {
            zone.as_ptr().write_bytes(0x5A, PAGE_SIZE);
            let mut write =
                [Transfer::new(Direction::Write, 4096, Page::at(zone.as_ptr()), PAGE_SIZE)];
            disk.transfer(&mut write);
            let mut transfers = [Transfer::new(
                Direction::Read,
                4096,
                Page::at(zone.as_ptr().add(PAGE_SIZE)),
                PAGE_SIZE,
            )];
            disk.transfer(&mut transfers);
            assert_eq!((write[0].result, transfers[0].result), (Ok(()), Ok(())));
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
            let run_denied = move || {
                refuse(libc::SYS_io_uring_setup, errno, 0);
                for dir in dirs() {
                    let disk = FileDisk::open(&dir, FileDiskOptions::default()).unwrap();
                    assert!(!disk.has_uring());
                    assert_works(&disk);
                }
            };
            std::thread::spawn(run_denied).join().unwrap();
        }
    }

    #[test]
    fn a_ring_that_fails_later_leaves_its_work_to_plain_calls() {
        let run_denied = || {
            let disk = FileDisk::open(&dirs()[0], FileDiskOptions::default()).unwrap();
            assert!(disk.has_uring());
            refuse(libc::SYS_io_uring_enter, Errno::PERM, 0);
            assert_works(&disk);
        };
        std::thread::spawn(run_denied).join().unwrap();
    }

    #[test]
    fn where_o_direct_is_refused_the_page_cache_does_it() {
        let run_denied = || {
            refuse(libc::SYS_fcntl, Errno::INVAL, OFlags::DIRECT.bits());
            for dir in dirs() {
                let disk = FileDisk::open(&dir, FileDiskOptions::default()).unwrap();
                assert!(!disk.is_direct());
                assert_works(&disk);
            }
        };
        std::thread::spawn(run_denied).join().unwrap();
    }

    /// Writes a page of `byte`s to `offset`, or reads one from there. Returns the first byte of the
    /// page.
    fn moved(disk: &FileDisk, direction: Direction, offset: u64, byte: u8) -> Result<u8, Errno> {
        let zone = Zone::reserve(PAGE_SIZE, PAGE_SIZE).unwrap();
        let mut all = [Transfer::new(direction, offset, Page::at(zone.as_ptr()), PAGE_SIZE)];
        // SAFETY: the zone has a page and outlives the transfer. Only this thread uses the zone and
        // the disk.
        unsafe {
            zone.as_ptr().write_bytes(byte, PAGE_SIZE);
            disk.transfer(&mut all);
            all[0].result.map(|()| zone.as_ptr().read())
        }
    }

    fn begin_in_child(disk: &FileDisk, base: u64) -> Result<(), String> {
        // SAFETY: no other thread uses the disk, as in a child, and no transfer is in progress.
        // `leave_rings` is called first.
        unsafe {
            disk.leave_rings();
            disk.begin_in_child(base)
        }
    }

    #[test]
    fn child_reads_older_generations_and_writes_behind_them() {
        const BASE: u64 = 4 * PAGE_SIZE as u64;
        every_way(|disk| {
            for n in 0..4u64 {
                disk.grow((n + 1) * BASE).unwrap();
                assert_eq!(
                    moved(&disk, Direction::Write, n * BASE + 8192, n as u8 + 1),
                    Ok(n as u8 + 1)
                );
                for n in 0..=n {
                    assert_eq!(moved(&disk, Direction::Read, n * BASE + 8192, 0), Ok(n as u8 + 1));
                }
                assert_eq!(disk.older() as u64, n);
                let own = &disk.own().unwrap().file;
                assert_eq!(fs::fstat(own).unwrap().st_size as u64, BASE, "no more than its own");
                begin_in_child(&disk, (n + 1) * BASE).unwrap();
                // In turn without and with rings. A child gets some when its threads start again.
                if n % 2 == 0 && disk.options.uring {
                    disk.make_rings();
                    assert!(disk.has_uring());
                }
            }
            assert_eq!(moved(&disk, Direction::Write, 4 * BASE, 5), Ok(5));
            let zone = Zone::reserve(2 * PAGE_SIZE, PAGE_SIZE).unwrap();
            let at = Page::at(zone.as_ptr());
            let mut across = Transfer::new(Direction::Read, 4 * BASE - 4096, at, 8192);
            // SAFETY: the zone has two pages and outlives the transfer. Only this thread uses the
            // zone and the disk.
            let outcome = unsafe {
                disk.transfer(core::slice::from_mut(&mut across));
                (zone.as_ptr().read(), zone.as_ptr().add(4096).read())
            };
            assert_eq!((across.result, across.done, outcome), (Ok(()), 8192, (0, 5)));
            let mut numbers = 0;
            disk.each_number(|_| numbers += 1);
            assert_eq!(numbers, 5);
            begin_in_child(&disk, 0).unwrap();
            assert_eq!(disk.older(), 0);
            disk.grow(BASE).unwrap();
            assert_eq!(moved(&disk, Direction::Write, 0, 9), Ok(9));
        });
    }

    #[test]
    fn a_child_that_can_make_no_file_reads_on() {
        let dir = std::env::temp_dir().join(std::format!("memfold-gone-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let disk = FileDisk::open(dir.to_str().unwrap(), FileDiskOptions::default()).unwrap();
        disk.grow(8192).unwrap();
        assert_eq!(moved(&disk, Direction::Write, 4096, 7), Ok(7));
        std::fs::remove_dir(&dir).unwrap();
        std::fs::write(&dir, "in the way").unwrap();
        assert!(begin_in_child(&disk, 8192).is_err());
        std::fs::remove_file(&dir).unwrap();
        assert_eq!(moved(&disk, Direction::Read, 4096, 0), Ok(7));
        assert!(disk.grow(16384).is_err() && disk.free_bytes().is_err());
        assert!(moved(&disk, Direction::Write, 8192, 1).is_err());
    }

    #[test]
    fn a_read_past_the_end_is_an_error_not_zeros() {
        every_way(|disk| {
            disk.grow(PAGE_SIZE as u64).unwrap();
            let zone = Zone::reserve(2 * PAGE_SIZE, PAGE_SIZE).unwrap();
            let mut transfers =
                [Transfer::new(Direction::Read, 0, Page::at(zone.as_ptr()), 2 * PAGE_SIZE)];
            // SAFETY: the zone has two pages and outlives the transfer. Only this thread uses the
            // zone and the disk.
            unsafe { disk.transfer(&mut transfers) };
            assert_eq!(transfers[0].result, Err(Errno::IO));
        });
    }

    #[test]
    fn a_punched_range_takes_no_space() {
        let disk = FileDisk::open("/dev/shm", FileDiskOptions::default()).unwrap();
        disk.grow(8 << 20).unwrap();
        let blocks = || fs::fstat(&disk.own().unwrap().file).unwrap().st_blocks as u64 * 512;
        let before = blocks();
        assert!(before >= 8 << 20);
        disk.punch(2 << 20, 4 << 20).unwrap();
        assert_eq!(before - blocks(), 4 << 20);
    }

    /// Opens a disk at a path in each of many threads at the same time, a hundred times. Returns
    /// the failures.
    fn open_in_many_threads(path: &str, prepare: fn()) -> Vec<String> {
        let together = std::sync::Barrier::new(16);
        let open = || {
            prepare();
            let each = (0..100).map(|_| {
                together.wait();
                FileDisk::open(path, FileDiskOptions { uring: false, direct: false, number: 0 })
                    .err()
            });
            each.collect::<Vec<_>>().into_iter().flatten()
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..16).map(|_| scope.spawn(open)).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn disks_opened_together_at_one_path_get_a_file_each() {
        let dir =
            std::env::temp_dir().join(std::format!("memfold-together-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let path = dir.clone();
        assert_eq!(open_in_many_threads(path.to_str().unwrap(), || {}), [""; 0]);
        // Imitates a file system that has no nameless files.
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
        let disk = FileDisk::open(dir.to_str().unwrap(), FileDiskOptions::default()).unwrap();
        assert_eq!(fs::fstat(&disk.own().unwrap().file).unwrap().st_mode & 0o777, 0o600);
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
        let open = |name: &str| {
            FileDisk::open(dir.join(name).to_str().unwrap(), FileDiskOptions::default())
        };
        let outcome = open("missing").err().unwrap();
        assert!(outcome.contains("there is no such directory. Make it"), "{outcome}");
        std::fs::write(dir.join("precious"), "x").unwrap();
        let refusal = open("precious").err().unwrap();
        assert!(refusal.contains("exists"), "{refusal}");
        assert_eq!(std::fs::read(dir.join("precious")).unwrap(), b"x");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
