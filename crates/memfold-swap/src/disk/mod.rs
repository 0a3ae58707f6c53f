//! The swap device as the engine sees it: the seam where tests put a faulty one.
pub mod durable;
pub mod file_disk;

use memfold_sys::Errno;
use memfold_sys::thread::errands::Delegated;
use memfold_sys::transfer::Transfer;

/// Where cold data goes when memory is full.
///
/// What an implementation must keep: `Ok` for a write means that a later read gives these bytes,
/// until the range is written again or punched; `Ok` is never said of a transfer that was done in
/// part. What fails leaves other ranges alone. It need not survive the process.
pub trait Disk: Send + Sync {
    /// Does all transfers, at once if it can, and returns when all have ended. Sets each one's
    /// `result`: `Ok` if all of it was done. After an error, what was to be read or written holds
    /// any bytes.
    ///
    /// # Safety
    /// - Memory that is read into is nobody else's until the return; memory that is written from is
    ///   not changed until then.
    /// - Nobody writes to a range of the device that another transfer reads or writes at the same
    ///   time.
    unsafe fn transfer(&self, transfers: &mut [Transfer]);

    /// Makes room for `len` bytes in all; writes within that should not run out of space.
    ///
    /// # Errors
    /// ENOSPC, EFBIG, EDQUOT: no room; what was there stays.
    fn grow(&self, len: u64) -> Result<(), Errno>;

    /// Makes the device `len` bytes long in all, without taking space for them: writes there may
    /// run out of it.
    ///
    /// # Errors
    /// EFBIG: it can't be so long.
    fn stretch(&self, len: u64) -> Result<(), Errno>;

    /// Gives the space of a range back. Its bytes are anything afterwards.
    ///
    /// # Errors
    /// EOPNOTSUPP: the device can't. Harmless, as every other error.
    fn punch(&self, offset: u64, len: u64) -> Result<(), Errno>;

    /// Bytes that others may still store on the same file system.
    ///
    /// # Errors
    /// What the system says.
    fn free_bytes(&self) -> Result<u64, Errno>;

    /// Tells of memory that most transfers will use.
    ///
    /// # Safety
    /// - It stays mapped as long as the device lives.
    unsafe fn register(&self, start: *mut u8, len: usize);

    /// What to call it in messages.
    fn name(&self) -> &str;
}

/// Transfers on their way to another thread.
struct SentTransfers<'a>(&'a mut [Transfer]);
// SAFETY: by the contract of `Disk::transfer` the memory is the implementation's until the return, in
// whatever thread it works.
unsafe impl Send for SentTransfers<'_> {}

impl<D: Disk + ?Sized> Disk for Delegated<D> {
    unsafe fn transfer(&self, transfers: &mut [Transfer]) {
        let sent = SentTransfers(transfers);
        self.with(|disk| {
            let SentTransfers(transfers) = { sent };
            // SAFETY: as the caller says, who waits until this has ended.
            unsafe { disk.transfer(transfers) }
        });
    }

    fn grow(&self, len: u64) -> Result<(), Errno> {
        self.with(|disk| disk.grow(len))
    }

    fn stretch(&self, len: u64) -> Result<(), Errno> {
        self.with(|disk| disk.stretch(len))
    }

    fn punch(&self, offset: u64, len: u64) -> Result<(), Errno> {
        self.with(|disk| disk.punch(offset, len))
    }

    fn free_bytes(&self) -> Result<u64, Errno> {
        self.with(|disk| disk.free_bytes())
    }

    unsafe fn register(&self, start: *mut u8, len: usize) {
        let start = start as usize;
        // SAFETY: as the caller says.
        self.with(|disk| unsafe { disk.register(start as *mut u8, len) });
    }

    fn name(&self) -> &str {
        self.itself().name()
    }
}
