//! What /proc tells of this process, kept open: so that it can be asked also from an empty root, or
//! without /proc.
use crate::Errno;
use crate::raw;
use core::ffi::CStr;
use core::sync::atomic::{AtomicBool, Ordering::SeqCst};
use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags};

/// A file of /proc/self, open.
pub struct OwnFile {
    path: &'static CStr,
    access: OFlags,
    fd: OwnedFd,
    /// It is another process's: a child of fork could not open its own.
    is_lost: AtomicBool,
}

/// Opens a file for reading.
pub(super) fn open(path: &CStr) -> Result<OwnedFd, Errno> {
    open_for(path, OFlags::RDONLY)
}

fn open_for(path: &CStr, access: OFlags) -> Result<OwnedFd, Errno> {
    rustix::fs::open(path, access | OFlags::CLOEXEC, Mode::empty())
}

impl OwnFile {
    /// Opens the calling process's.
    ///
    /// # Errors
    /// What `open` says: ENOENT without /proc.
    pub fn open(path: &'static CStr) -> Result<OwnFile, Errno> {
        OwnFile::open_for(path, OFlags::RDONLY)
    }

    /// The same for writing too.
    ///
    /// # Errors
    /// As [`OwnFile::open`].
    pub fn open_to_write(path: &'static CStr) -> Result<OwnFile, Errno> {
        OwnFile::open_for(path, OFlags::RDWR)
    }

    fn open_for(path: &'static CStr, access: OFlags) -> Result<OwnFile, Errno> {
        let fd = open_for(path, access)?;
        Ok(OwnFile { path, access, fd, is_lost: AtomicBool::new(false) })
    }

    /// The same under a number from `least` on.
    ///
    /// # Errors
    /// EMFILE: there is none free.
    pub fn at_least(self, least: i32) -> Result<OwnFile, Errno> {
        Ok(OwnFile { fd: raw::renumber(self.fd, least)?, ..self })
    }

    /// In a child of fork: opens its own in place of its parent's, under the same number.
    ///
    /// # Errors
    /// As [`OwnFile::open`]. Then there is none from now on.
    pub fn reopen(&self) -> Result<(), Errno> {
        let reopened = raw::reopen(&self.fd, || open_for(self.path, self.access));
        self.is_lost.store(reopened.is_err(), SeqCst);
        reopened
    }

    /// The descriptor's number, whatever it leads to.
    pub fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// The file, if there is one.
    pub fn get(&self) -> Option<&OwnedFd> {
        (!self.is_lost.load(SeqCst)).then_some(&self.fd)
    }
}
