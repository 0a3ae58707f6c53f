//! Files that must survive a power cut, and the directory they lie in: the seam where tests put
//! a disk that forgets, tears and fails.
use alloc::boxed::Box;
use alloc::format;
use alloc::sync::Arc;
use memfold_sys::Errno;
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{AtFlags, CWD, FlockOperation, Mode, OFlags};

/// Where this process finds its open files.
const OWN_FILES: &str = "/proc/self/fd";

/// Device and inode of a file.
pub type FileIdentity = (u64, u64);

/// What a file is opened for.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum FileAccess {
    /// Reading.
    Read,
    /// Reading and writing.
    Write,
}

/// A directory. What is done to its names is on disk after [`Folder::sync`]; before that, any
/// part of it may be.
pub trait Folder: Send + Sync {
    /// Opens the file of a name.
    ///
    /// # Errors
    /// ENOENT: there is none. EMFILE and others.
    fn open(&self, name: &[u8], access: FileAccess) -> Result<Box<dyn File>, Errno>;

    /// Makes an empty file under a name that is free, readable by its owner only.
    ///
    /// # Errors
    /// EEXIST: it isn't free.
    fn create(&self, name: &[u8]) -> Result<Box<dyn File>, Errno>;

    /// Makes an empty file without a name, which goes away with its last descriptor.
    ///
    /// # Errors
    /// EOPNOTSUPP, EISDIR: the file system has none, or they can't be given a name here.
    fn create_nameless(&self) -> Result<Box<dyn File>, Errno>;

    /// Gives the file of one name another one, in one step. A file that has it loses it.
    ///
    /// # Errors
    /// Both names are as they were.
    fn rename(&self, from: &[u8], to: &[u8]) -> Result<(), Errno>;

    /// Takes a name away.
    ///
    /// # Errors
    /// It is as it was.
    fn remove(&self, name: &[u8]) -> Result<(), Errno>;

    /// Says which file has a name.
    ///
    /// # Errors
    /// ENOENT: none has.
    fn identity(&self, name: &[u8]) -> Result<FileIdentity, Errno>;

    /// Returns when all that was done to names is on disk.
    ///
    /// # Errors
    /// Any part of it may be.
    fn sync(&self) -> Result<(), Errno>;
}

/// An open file. What is written is on disk after [`File::sync`]; before that, any part of it may
/// be, in any order.
pub trait File: Send + Sync {
    /// Reads from `at` on, perhaps less than asked for; 0 bytes at the end of the file.
    ///
    /// # Errors
    /// The system's.
    fn read(&self, at: u64, to: &mut [u8]) -> Result<usize, Errno>;

    /// Writes from `at` on, perhaps less than asked for.
    ///
    /// # Errors
    /// The system's. A part may be written.
    fn write(&self, at: u64, from: &[u8]) -> Result<usize, Errno>;

    /// Cuts the file off, or makes it longer by zeros.
    ///
    /// # Errors
    /// It is as it was.
    fn set_len(&self, len: u64) -> Result<(), Errno>;

    /// Returns when all that was written is on disk, and the file's length.
    ///
    /// # Errors
    /// Any part of what was written since the last time may be lost, and a later call says nothing
    /// of it: what is to be on disk must be written again.
    fn sync(&self) -> Result<(), Errno>;

    /// Keeps others from locking the file as long as this descriptor is open.
    ///
    /// # Errors
    /// EWOULDBLOCK: another process has it locked.
    fn lock(&self) -> Result<(), Errno>;

    /// Gives the file a name in its directory.
    ///
    /// # Errors
    /// EEXIST: the name isn't free.
    fn link(&self, name: &[u8]) -> Result<(), Errno>;

    /// Says which file it is.
    ///
    /// # Errors
    /// The system's.
    fn identity(&self) -> Result<FileIdentity, Errno>;
}

/// A real directory, kept open: what is done there later needs no path.
pub struct Directory(Arc<OwnedFd>);

/// A file in a real directory.
struct RealFile {
    fd: OwnedFd,
    folder: Arc<OwnedFd>,
}

impl Directory {
    /// Opens the directory at `path`.
    ///
    /// # Errors
    /// The system's.
    pub fn open(path: &[u8]) -> Result<Directory, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::open(path, flags, Mode::empty()).map(|fd| Directory(Arc::new(fd)))
    }

    fn open_at(&self, name: &[u8], flags: OFlags) -> Result<Box<dyn File>, Errno> {
        let mode = Mode::RUSR | Mode::WUSR;
        let fd = rustix::fs::openat(&*self.0, name, flags | OFlags::CLOEXEC, mode)?;
        Ok(Box::new(RealFile { fd, folder: self.0.clone() }))
    }
}

impl Folder for Directory {
    fn open(&self, name: &[u8], access: FileAccess) -> Result<Box<dyn File>, Errno> {
        let flags = if access == FileAccess::Read { OFlags::RDONLY } else { OFlags::RDWR };
        self.open_at(name, flags)
    }

    fn create(&self, name: &[u8]) -> Result<Box<dyn File>, Errno> {
        self.open_at(name, OFlags::RDWR | OFlags::CREATE | OFlags::EXCL)
    }

    fn create_nameless(&self) -> Result<Box<dyn File>, Errno> {
        // Without it the file could not be given a name.
        rustix::fs::access(OWN_FILES, rustix::fs::Access::EXISTS).map_err(|_| Errno::OPNOTSUPP)?;
        self.open_at(b".", OFlags::RDWR | OFlags::TMPFILE)
    }

    fn rename(&self, from: &[u8], to: &[u8]) -> Result<(), Errno> {
        rustix::fs::renameat(&*self.0, from, &*self.0, to)
    }

    fn remove(&self, name: &[u8]) -> Result<(), Errno> {
        rustix::fs::unlinkat(&*self.0, name, AtFlags::empty())
    }

    fn identity(&self, name: &[u8]) -> Result<FileIdentity, Errno> {
        rustix::fs::statat(&*self.0, name, AtFlags::empty()).map(|s| (s.st_dev, s.st_ino))
    }

    fn sync(&self) -> Result<(), Errno> {
        rustix::fs::fsync(&*self.0)
    }
}

impl File for RealFile {
    fn read(&self, at: u64, to: &mut [u8]) -> Result<usize, Errno> {
        rustix::io::retry_on_intr(|| rustix::io::pread(&self.fd, &mut *to, at))
    }

    fn write(&self, at: u64, from: &[u8]) -> Result<usize, Errno> {
        rustix::io::retry_on_intr(|| rustix::io::pwrite(&self.fd, from, at))
    }

    fn set_len(&self, len: u64) -> Result<(), Errno> {
        rustix::io::retry_on_intr(|| rustix::fs::ftruncate(&self.fd, len))
    }

    fn sync(&self) -> Result<(), Errno> {
        rustix::fs::fdatasync(&self.fd)
    }

    fn lock(&self) -> Result<(), Errno> {
        rustix::fs::flock(&self.fd, FlockOperation::NonBlockingLockExclusive)
    }

    fn link(&self, name: &[u8]) -> Result<(), Errno> {
        // By its descriptor itself only root may.
        let own = format!("{OWN_FILES}/{}", self.fd.as_raw_fd());
        rustix::fs::linkat(CWD, &*own, &*self.folder, name, AtFlags::SYMLINK_FOLLOW)
    }

    fn identity(&self) -> Result<FileIdentity, Errno> {
        rustix::fs::fstat(&self.fd).map(|s| (s.st_dev, s.st_ino))
    }
}
