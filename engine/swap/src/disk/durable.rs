//! Files that must survive a power cut, and their directory. Tests replace them with a disk that
//! loses, tears and refuses writes.
use alloc::boxed::Box;
use alloc::format;
use alloc::sync::Arc;
use memfold_os::Errno;
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{AtFlags, CWD, FlockOperation, Mode, OFlags};

/// The directory of this process's open files.
const OWN_FILES: &str = "/proc/self/fd";

/// Device and inode of a file.
pub type FileIdentity = (u64, u64);

/// The purpose of opening a file.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum FileAccess {
    /// Reading.
    Read,
    /// Reading and writing.
    Write,
}

/// A directory. Changes of its names are on disk after [`Folder::sync`]. Before that, any part of
/// them may be.
pub trait Folder: Send + Sync {
    /// Opens the file of a name.
    ///
    /// # Errors
    /// ENOENT: no file has the name. Others, such as EMFILE.
    fn open(&self, name: &[u8], access: FileAccess) -> Result<Box<dyn File>, Errno>;

    /// Makes an empty file under a free name, readable by its owner only.
    ///
    /// # Errors
    /// EEXIST: the name isn't free.
    fn create(&self, name: &[u8]) -> Result<Box<dyn File>, Errno>;

    /// Makes an empty file without a name. It is gone when its last descriptor is closed.
    ///
    /// # Errors
    /// EOPNOTSUPP, EISDIR: the file system has no such files, or they can't be given a name here.
    fn create_nameless(&self) -> Result<Box<dyn File>, Errno>;

    /// Renames a file, in one step. A file that had the new name loses it.
    ///
    /// # Errors
    /// The system's error. Both names are unchanged then.
    fn rename(&self, from: &[u8], to: &[u8]) -> Result<(), Errno>;

    /// Removes a name.
    ///
    /// # Errors
    /// The system's error. The name is unchanged then.
    fn remove(&self, name: &[u8]) -> Result<(), Errno>;

    /// Returns the device and inode of the file that has a name.
    ///
    /// # Errors
    /// ENOENT: no file has it.
    fn identity(&self, name: &[u8]) -> Result<FileIdentity, Errno>;

    /// Returns once all changes of names are on disk.
    ///
    /// # Errors
    /// The system's error. Any part of the changes may be on disk then.
    fn sync(&self) -> Result<(), Errno>;
}

/// An open file. Written data is on disk after [`File::sync`]. Before that, any part of it may be,
/// in any order.
pub trait File: Send + Sync {
    /// Reads from `at` on, perhaps less than asked for. Returns the number of bytes read; 0 at the
    /// end of the file.
    ///
    /// # Errors
    /// The system's error.
    fn read(&self, at: u64, to: &mut [u8]) -> Result<usize, Errno>;

    /// Writes from `at` on, perhaps less than asked for. Returns the number of bytes written.
    ///
    /// # Errors
    /// The system's error. A part may be written then.
    fn write(&self, at: u64, from: &[u8]) -> Result<usize, Errno>;

    /// Truncates the file, or extends it by zeros.
    ///
    /// # Errors
    /// The system's error. The file is unchanged then.
    fn set_len(&self, len: u64) -> Result<(), Errno>;

    /// Returns once all written data and the file's length are on disk.
    ///
    /// # Errors
    /// Any part of the data written since the last call may be lost, and a later call doesn't
    /// report that. Data that must be on disk must be written again.
    fn sync(&self) -> Result<(), Errno>;

    /// Keeps other processes from locking the file as long as this descriptor is open.
    ///
    /// # Errors
    /// EWOULDBLOCK: another process has it locked.
    fn lock(&self) -> Result<(), Errno>;

    /// Gives the file a name in its directory.
    ///
    /// # Errors
    /// EEXIST: the name isn't free.
    fn link(&self, name: &[u8]) -> Result<(), Errno>;

    /// Returns the file's device and inode.
    ///
    /// # Errors
    /// The system's error.
    fn identity(&self) -> Result<FileIdentity, Errno>;
}

/// A real directory, kept open, so that later calls need no path.
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
    /// The system's error.
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
        // Without this directory the file could not be given a name.
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
        // Only root may link a file by its descriptor itself.
        let own = format!("{OWN_FILES}/{}", self.fd.as_raw_fd());
        rustix::fs::linkat(CWD, &*own, &*self.folder, name, AtFlags::SYMLINK_FOLLOW)
    }

    fn identity(&self) -> Result<FileIdentity, Errno> {
        rustix::fs::fstat(&self.fd).map(|s| (s.st_dev, s.st_ino))
    }
}
