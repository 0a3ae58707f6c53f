//! The table that the processes of a run share with memfold: a memfd with the bounds of the run and a slot of figures for
//! each process.
//!
//! A process claims a slot by exchanging its `pid` from 0 (or from that of a process that has ended) to its own. The
//! memory is memfold's as much as the process's, so the figures outlive a crash.
use crate::failure::Failure;
use memfold::config::Config;
use memfold::stats::{Bounds, LAYOUT_VERSION, Stats};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::atomic::Ordering::Relaxed;

/// Slots in a table. More processes than this share the slots of those that have ended.
pub const SLOTS: usize = 64;

/// A table, mapped here and open for the processes of the run.
pub struct Slots {
    file: File,
    base: *const Bounds,
}

// SAFETY: the table is atomics only, and what else there is in the struct never changes.
unsafe impl Send for Slots {}
// SAFETY: as above.
unsafe impl Sync for Slots {}

impl Slots {
    /// An empty table. Its size is sealed: no process can cut it off under the others.
    ///
    /// # Errors
    /// 125: no memfd, or no memory.
    pub fn new() -> Result<Slots, Failure> {
        let fail = |what: &str| Failure::own(format!("figures: {what}: {}", io::Error::last_os_error()));
        // SAFETY: the name is a C string.
        let fd = unsafe { libc::memfd_create(c"memfold-stats".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
        if fd < 0 {
            return Err(fail("memfd_create"));
        }
        // SAFETY: the kernel has just made this descriptor for us; nobody else owns it.
        let file = unsafe { File::from_raw_fd(fd) };
        file.set_len(Slots::len() as u64).map_err(|_| fail("ftruncate"))?;
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        // SAFETY: F_ADD_SEALS takes an integer.
        if unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, seals) } != 0 {
            return Err(fail("F_ADD_SEALS"));
        }
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), Slots::len(), access, libc::MAP_SHARED, fd, 0) };
        if base == libc::MAP_FAILED {
            return Err(fail("mmap"));
        }
        let slots = Slots { file, base: base.cast() };
        slots.bounds().version.store(LAYOUT_VERSION, Relaxed);
        slots.all().iter().for_each(|slot| slot.version.store(LAYOUT_VERSION, Relaxed));
        Ok(slots)
    }

    /// Where a process of the run opens the table, as long as memfold is there.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())
    }

    /// What the run may use from now on.
    pub fn set_bounds(&self, config: &Config) {
        self.bounds().limit_bytes.store(config.limit_bytes.unwrap_or(u64::MAX), Relaxed);
        self.bounds().resident_bytes.store(config.resident_bytes.unwrap_or(u64::MAX), Relaxed);
    }

    fn bounds(&self) -> &Bounds {
        // SAFETY: as in `all`.
        unsafe { &*self.base }
    }

    /// Every slot, claimed or not.
    pub fn all(&self) -> &[Stats] {
        // SAFETY: the mapping is `len()` bytes long, page-aligned, and lives until `self` is dropped. Both types are
        // atomics only, for which every bit pattern is valid and which other processes may change at any time.
        unsafe { std::slice::from_raw_parts(self.base.add(1).cast(), SLOTS) }
    }

    /// The slots that processes have claimed.
    pub fn claimed(&self) -> impl Iterator<Item = &Stats> {
        self.all().iter().filter(|slot| slot.pid.load(Relaxed) != 0)
    }

    const fn len() -> usize {
        size_of::<Bounds>() + SLOTS * size_of::<Stats>()
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and `all` lends it out only as long as `self` is borrowed.
        unsafe { libc::munmap(self.base.cast_mut().cast(), Slots::len()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_opener_writes_the_same_slots_and_cant_cut_them_off() {
        let slots = Slots::new().unwrap();
        let other = File::options().read(true).write(true).open(slots.path()).unwrap();
        assert_eq!(other.metadata().unwrap().len(), Slots::len() as u64);
        assert!(other.set_len(0).is_err());
        use std::os::unix::fs::FileExt;
        let offset = size_of::<Bounds>() + size_of::<Stats>() + std::mem::offset_of!(Stats, pid);
        other.write_all_at(&77u64.to_ne_bytes(), offset as u64).unwrap();
        assert_eq!(slots.claimed().map(|s| s.pid.load(Relaxed)).collect::<Vec<_>>(), [77]);
    }
}
