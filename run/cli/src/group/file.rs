//! The file of a group, in the directory of this user's runs: the limit, and a record for each run
//! ([`memfold_run::group`]).
//!
//! A run holds a lock on its record as long as it lives. Each reader and writer of the file holds a
//! lock on its head. The kernel releases both when `memfold run` ends, for whatever reason.
use crate::failure::CommandFailure;
use crate::group::{GROUP, checked_name};
use crate::program::plain;
use crate::sockets;
use crate::table::hand_over::file_bytes_max;
use memfold_engine::config::Size;
use memfold_os::{Errno, file_lock};
use memfold_run::group::{GroupRun, RECORD_BYTES};
use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags};
use std::ffi::CString;
use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The suffix of a group's file. The group's name is in front of it.
const SUFFIX: &str = ".group";
/// The first bytes of the file. The last one is the version of its layout.
const MAGIC: [u8; 8] = *b"memfold\x01";
/// Runs of a group, at most.
pub const RUNS: usize = 64;
const HEAD: Range<u64> = 0..RECORD_BYTES as u64;
const FILE_BYTES: u64 = (RECORD_BYTES * (RUNS + 1)) as u64;
/// Longest wait for a lock on the head, which is held for microseconds.
const PATIENCE: Duration = Duration::from_secs(2);
/// Time between two tries to lock the head.
const RETRY: Duration = Duration::from_millis(1);

/// A group: its file.
pub struct GroupFile {
    name: String,
    path: PathBuf,
    file: OwnedFd,
}

/// The contents of a group's file, whose head is locked until this is dropped.
pub struct LockedGroup<'a> {
    group: &'a GroupFile,
    /// The limit, bytes.
    pub limit_bytes: u64,
    /// The live runs, each with the number of its record.
    pub runs: Vec<(usize, GroupRun)>,
}

fn place(record: usize) -> Range<u64> {
    let start = ((record + 1) * RECORD_BYTES) as u64;
    start..start + RECORD_BYTES as u64
}

fn io_error(e: Errno) -> io::Error {
    io::Error::from_raw_os_error(e.raw_os_error())
}

impl GroupFile {
    /// Opens the group with this name; `None` if there is none.
    ///
    /// # Errors
    /// 125: the name can't be one, the file can't be opened, or is no file of a group.
    pub fn find(name: &str) -> Result<Option<GroupFile>, CommandFailure> {
        let name = &checked_name(GROUP, name)?;
        if file_bytes_max() < FILE_BYTES {
            return Err(CommandFailure::own(format!(
                "--group: `ulimit -f` allows no file of {FILE_BYTES} bytes. Raise it."
            )));
        }
        let mut has_own = false;
        for directory in sockets::directories() {
            match sockets::is_own(&directory) {
                true => has_own = true,
                false if has_own || directory.symlink_metadata().is_err() => continue,
                // Another group of this name may be in it.
                false => return Err(failure(&directory, sockets::NOT_OWN)),
            }
            let path = directory.join(format!("{name}{SUFFIX}"));
            match open(&path, OFlags::empty()) {
                Ok(file) => return GroupFile::of(name, path, file).map(Some),
                Err(Errno::NOENT) => {}
                Err(e @ (Errno::LOOP | Errno::ISDIR)) => {
                    let why = format!("{}. Remove it: it is no group.", plain(&io_error(e)));
                    return Err(failure(&path, &why));
                }
                Err(e) => return Err(failure(&path, &plain(&io_error(e)))),
            }
        }
        Ok(None)
    }

    /// Opens the group with this name.
    ///
    /// # Errors
    /// 125: there is none, or [`GroupFile::find`] fails.
    pub fn known(name: &str) -> Result<GroupFile, CommandFailure> {
        GroupFile::find(name)?.ok_or_else(|| {
            CommandFailure::own(format!(
                "--group: there is no group {name} in {}. Make it by memfold set --group {name} --limit SIZE.",
                sockets::directories()[0].display()
            ))
        })
    }

    /// Makes the group with this name and limit, or opens it and sets the limit.
    ///
    /// # Errors
    /// 125: as [`GroupFile::find`]; the file can't be made; the group is busy.
    pub fn make(name: &str, limit_bytes: u64) -> Result<GroupFile, CommandFailure> {
        let group = match GroupFile::find(name)? {
            Some(group) => group,
            None => {
                let path = sockets::path_of(&format!("{name}{SUFFIX}"))
                    .map_err(|e| CommandFailure::own(format!("--group: {e}")))?;
                create(&path, limit_bytes).map_err(|e| failure(&path, &plain(&e)))?;
                GroupFile::known(name)?
            }
        };
        group.lock()?.set_limit(limit_bytes)?;
        Ok(group)
    }

    fn of(name: &str, path: PathBuf, file: OwnedFd) -> Result<GroupFile, CommandFailure> {
        let mut magic = [0; MAGIC.len()];
        let is_whole = rustix::fs::fstat(&file).is_ok_and(|of| of.st_size as u64 == FILE_BYTES);
        if !is_whole || rustix::io::pread(&file, &mut magic, 0) != Ok(magic.len()) || magic != MAGIC
        {
            let why =
                "this is no group of this version of memfold. End its runs and remove the file.";
            return Err(failure(&path, why));
        }
        Ok(GroupFile { name: name.to_string(), path, file })
    }

    /// Returns every group of this user.
    pub fn all() -> Vec<GroupFile> {
        let mut names: Vec<String> = Vec::new();
        for directory in sockets::directories().into_iter().filter(|path| sockets::is_own(path)) {
            let entries = fs::read_dir(directory).into_iter().flatten().flatten();
            let name = |entry: fs::DirEntry| {
                Some(entry.file_name().to_str()?.strip_suffix(SUFFIX)?.to_string())
            };
            names.extend(entries.filter_map(name));
        }
        names.sort();
        names.dedup();
        names.iter().filter_map(|name| GroupFile::find(name).ok().flatten()).collect()
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Locks the head, and reads the file.
    ///
    /// # Errors
    /// 125: another process has had the lock for seconds, or the file can't be read.
    pub fn lock(&self) -> Result<LockedGroup<'_>, CommandFailure> {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(group) = self.try_lock().map_err(|e| self.failure(&plain(&e)))? {
                return Ok(group);
            }
            if Instant::now() > end {
                return Err(self.failure("one of its runs is stopped. Continue it, or end it."));
            }
            sleep(RETRY);
        }
    }

    /// Locks the head and reads the file, unless another process has the lock at this moment.
    ///
    /// # Errors
    /// The file can't be locked or read.
    pub fn try_lock(&self) -> io::Result<Option<LockedGroup<'_>>> {
        if !file_lock::try_lock(&self.file, HEAD).map_err(io_error)? {
            return Ok(None);
        }
        let mut group = LockedGroup { group: self, limit_bytes: 0, runs: Vec::new() };
        let mut bytes = [0; FILE_BYTES as usize];
        let len = rustix::io::pread(&self.file, &mut bytes, 0).map_err(io_error)?;
        if len < bytes.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let (head, records) = bytes.split_at(RECORD_BYTES);
        let limit = head[MAGIC.len()..].first_chunk().expect("a head is long enough");
        group.limit_bytes = u64::from_le_bytes(*limit);
        for (n, record) in records.as_chunks().0.iter().enumerate() {
            let run = GroupRun::decode(record);
            if run.pid != 0 && file_lock::is_locked(&self.file, place(n)).map_err(io_error)? {
                group.runs.push((n, run));
            }
        }
        Ok(Some(group))
    }

    /// Returns an error about this group.
    pub fn failure(&self, why: &str) -> CommandFailure {
        CommandFailure::own(format!("Group {}: {why}", self.name))
    }
}

impl LockedGroup<'_> {
    /// Takes an unused record for this process, and writes `run` to it. Returns `None` if the group has as many
    /// runs as it can have.
    ///
    /// # Errors
    /// 125: the group was removed meanwhile, or the file can't be locked.
    pub fn take_record(&self, run: &GroupRun) -> Result<Option<usize>, CommandFailure> {
        let file = &self.group.file;
        let fail = |e| self.group.failure(&plain(&io_error(e)));
        if rustix::fs::fstat(file).map_err(fail)?.st_nlink == 0 {
            return Err(self.group.failure("it was removed just now."));
        }
        for record in 0..RUNS {
            if file_lock::try_lock(file, place(record)).map_err(fail)? {
                self.write(record, run).map_err(|e| self.group.failure(&plain(&e)))?;
                return Ok(Some(record));
            }
        }
        Ok(None)
    }

    /// Writes a record. This process must have taken it.
    ///
    /// # Errors
    /// The errors of `pwrite`.
    pub fn write(&self, record: usize, run: &GroupRun) -> io::Result<()> {
        self.write_at(place(record).start, &run.encode())
    }

    /// Sets the limit.
    ///
    /// # Errors
    /// 125: the file can't be written.
    pub fn set_limit(&self, bytes: u64) -> Result<(), CommandFailure> {
        self.write_at(MAGIC.len() as u64, &bytes.to_le_bytes())
            .map_err(|e| self.group.failure(&plain(&e)))
    }

    fn write_at(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        match rustix::io::pwrite(&self.group.file, bytes, at).map_err(io_error)? {
            len if len == bytes.len() => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }

    /// Removes the group.
    ///
    /// # Errors
    /// 125: a run is in it, or the file can't be removed.
    pub fn remove(self) -> Result<(), CommandFailure> {
        match self.runs.len() {
            0 => fs::remove_file(&self.group.path).map_err(|e| self.group.failure(&plain(&e))),
            1 => Err(self.group.failure("a run is in it. End it first, or give a limit.")),
            count => Err(self
                .group
                .failure(&format!("{count} runs are in it. End them first, or give a limit."))),
        }
    }

    /// Returns the memory that its runs hold, in bytes.
    pub fn held_bytes(&self) -> u64 {
        self.runs.iter().fold(0, |sum: u64, (_, run)| sum.saturating_add(run.held_bytes))
    }

    /// Returns a line about the group.
    pub fn line(&self) -> String {
        let runs = match self.runs.len() {
            1 => "1 run".to_string(),
            count => format!("{count} runs"),
        };
        format!(
            "group {}: limit {}, {runs}, {} used",
            self.group.name,
            Size(self.limit_bytes),
            Size(self.held_bytes())
        )
    }
}

impl Drop for LockedGroup<'_> {
    fn drop(&mut self) {
        // It can't fail for a lock that is held.
        let _ = file_lock::unlock(&self.group.file, HEAD);
    }
}

fn failure(path: &Path, why: &str) -> CommandFailure {
    CommandFailure::own(format!("--group: {}: {why}", path.display()))
}

fn open(path: &Path, more: OFlags) -> Result<OwnedFd, Errno> {
    let name = CString::new(path.as_os_str().as_bytes()).map_err(|_| Errno::INVAL)?;
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | more;
    rustix::fs::open(&*name, flags, Mode::RUSR | Mode::WUSR)
}

/// Makes the file of a group, without runs. It gets its name only once it is complete. If another
/// process has just made it, that one stays.
fn create(path: &Path, limit_bytes: u64) -> io::Result<()> {
    let draft = path.with_extension(format!("{}.new", std::process::id()));
    let _ = fs::remove_file(&draft);
    let file = open(&draft, OFlags::CREATE | OFlags::EXCL).map_err(io_error)?;
    let head = [MAGIC, limit_bytes.to_le_bytes()].concat();
    let outcome = rustix::fs::ftruncate(&file, FILE_BYTES)
        .and_then(|()| rustix::io::pwrite(&file, &head, 0))
        .map_err(io_error)
        .and_then(|_| match fs::hard_link(&draft, path) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(e),
            _ => Ok(()),
        });
    let _ = fs::remove_file(&draft);
    outcome
}
