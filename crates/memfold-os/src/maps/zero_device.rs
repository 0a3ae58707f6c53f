//! Private mappings of `/dev/zero`. The kernel makes them anonymous memory (`mmap_zero` in
//! `drivers/char/mem.c`), but its map shows them with that file.
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use rustix::fs::{FileType, major, minor, stat};

/// The device number of `/dev/zero`, major and minor.
const ZERO: [u32; 2] = [1, 5];

/// The inode of `/dev/zero`, and the number of the file system's device. 0 if they are unknown.
static INODE: AtomicU64 = AtomicU64::new(0);
static DEVICE: AtomicU64 = AtomicU64::new(0);

/// Finds the inode of `/dev/zero`. Mappings of other inodes of that device stay mappings of a file.
pub fn note() {
    let Ok(about) = stat(c"/dev/zero") else { return };
    let is_device = FileType::from_raw_mode(about.st_mode) == FileType::CharacterDevice;
    if is_device && [major(about.st_rdev), minor(about.st_rdev)] == ZERO {
        DEVICE.store(about.st_dev, Relaxed);
        INODE.store(about.st_ino, Relaxed);
    }
}

/// Returns whether a private mapping with this inode is anonymous memory.
pub(super) fn is_no_file(device: [u32; 2], inode: u64) -> bool {
    let is_zeros = || {
        let of = DEVICE.load(Relaxed);
        INODE.load(Relaxed) == inode && [major(of), minor(of)] == device
    };
    inode == 0 || is_zeros()
}
