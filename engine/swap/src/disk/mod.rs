//! The swap device as the engine sees it. Tests replace it with a faulty one.
pub mod durable;
pub mod file_disk;

use memfold_os::Errno;
use memfold_os::thread::delegate_queue::Delegated;
use memfold_os::transfer::Transfer;

/// The device for cold data.
///
/// Conditions for an implementation:
/// - `Ok` for a write means that a later read gives these bytes, until the range is written again
///   or punched.
/// - `Ok` is never returned for a transfer that was made in part.
/// - A failed transfer changes no other range.
///
/// Data need not survive the process.
pub trait Disk: Send + Sync {
    /// Makes all transfers, at once if it can, and returns when all have ended. Sets each one's
    /// `result`: `Ok` if all of it was made. After an error, the range or memory holds any bytes.
    ///
    /// # Safety
    /// - No other thread uses memory that is read into until the return. No thread changes memory
    ///   that is written from until then.
    /// - No thread writes to a range of the device that another transfer reads or writes at the
    ///   same time.
    unsafe fn transfer(&self, transfers: &mut [Transfer]);

    /// Makes room for `len` bytes in all. Writes within that should not run out of space.
    ///
    /// # Errors
    /// ENOSPC, EFBIG, EDQUOT: there is no room. Earlier bytes are unchanged.
    fn grow(&self, len: u64) -> Result<(), Errno>;

    /// Makes the device `len` bytes long in all, without taking space for them. Writes there may
    /// run out of space.
    ///
    /// # Errors
    /// EFBIG: the device can't be so long.
    fn stretch(&self, len: u64) -> Result<(), Errno>;

    /// Gives the space of a range back. Its bytes are undefined afterwards.
    ///
    /// # Errors
    /// EOPNOTSUPP: the device can't give space back. This error, like every other one, is harmless.
    fn punch(&self, offset: u64, len: u64) -> Result<(), Errno>;

    /// Returns the number of bytes that may still be stored on the same file system.
    ///
    /// # Errors
    /// The system's error.
    fn free_bytes(&self) -> Result<u64, Errno>;

    /// Registers memory that most transfers will use.
    ///
    /// # Safety
    /// - It stays mapped as long as the device lives.
    unsafe fn register(&self, start: *mut u8, len: usize);

    /// Returns the device's name for messages.
    fn name(&self) -> &str;
}

/// Transfers on their way to another thread.
struct SentTransfers<'a>(&'a mut [Transfer]);
// SAFETY: the contract of `Disk::transfer` reserves the memory for the implementation until the
// return, in whichever thread it works. The other fields of a transfer are plain values.
unsafe impl Send for SentTransfers<'_> {}

impl<D: Disk + ?Sized> Disk for Delegated<D> {
    unsafe fn transfer(&self, transfers: &mut [Transfer]) {
        let cell = SentTransfers(transfers);
        self.with(|disk| {
            let SentTransfers(transfers) = { cell };
            // SAFETY: the caller promises the conditions of `Disk::transfer`, and `with` returns
            // only after this call has ended.
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
        // SAFETY: the caller promises that the memory stays mapped as long as the device lives.
        self.with(|disk| unsafe { disk.register(start as *mut u8, len) });
    }

    fn name(&self) -> &str {
        self.itself().name()
    }
}
