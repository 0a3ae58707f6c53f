//! Files of /proc about this process, kept open. So they can be read also from an empty root, or
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
    /// The file is another process's, because a child of fork could not open its own.
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
    /// Opens the file of the calling process.
    ///
    /// # Errors
    /// The errors of `open`: ENOENT without /proc.
    pub fn open(path: &'static CStr) -> Result<OwnFile, Errno> {
        OwnFile::open_for(path, OFlags::RDONLY)
    }

    /// Opens the file of the calling process for writing too.
    ///
    /// # Errors
    /// The errors of [`OwnFile::open`].
    pub fn open_to_write(path: &'static CStr) -> Result<OwnFile, Errno> {
        OwnFile::open_for(path, OFlags::RDWR)
    }

    fn open_for(path: &'static CStr, access: OFlags) -> Result<OwnFile, Errno> {
        let fd = open_for(path, access)?;
        Ok(OwnFile { path, access, fd, is_lost: AtomicBool::new(false) })
    }

    /// Moves the descriptor to a number from `least` on.
    ///
    /// # Errors
    /// EMFILE: no number is free.
    pub fn at_least(self, least: i32) -> Result<OwnFile, Errno> {
        Ok(OwnFile { fd: raw::renumber(self.fd, least)?, ..self })
    }

    /// Opens its own file in a child of fork, in place of its parent's, under the same number.
    ///
    /// # Errors
    /// The errors of [`OwnFile::open`]. There is none from then on.
    pub fn reopen(&self) -> Result<(), Errno> {
        let outcome = raw::reopen(&self.fd, || open_for(self.path, self.access));
        self.is_lost.store(outcome.is_err(), SeqCst);
        outcome
    }

    /// Returns the descriptor, also if the file is lost.
    pub fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Returns the file, if there is one.
    pub fn get(&self) -> Option<&OwnedFd> {
        (!self.is_lost.load(SeqCst)).then_some(&self.fd)
    }
}
