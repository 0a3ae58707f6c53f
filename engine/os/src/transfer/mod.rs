//! Reads and writes of files, from and to memory that the caller vouches for. They are made one by
//! one by plain system calls, or many at once by io_uring ([`uring::IoRing`]).
pub mod uring;

use crate::Errno;
use crate::page::Page;
use rustix::fd::BorrowedFd;

/// The direction of a transfer.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the device to memory.
    Read,
    /// From memory to the device.
    Write,
}

/// One read or write. Offset and length are multiples of the page size.
#[derive(Copy, Clone, Debug)]
pub struct Transfer {
    /// Its direction.
    pub direction: Direction,
    /// Its place on the device, bytes.
    pub offset: u64,
    /// Its place in memory.
    pub at: *mut Page,
    /// Its length, bytes.
    pub len: usize,
    /// Bytes transferred so far; for implementations.
    pub done: usize,
    /// Its result.
    pub result: Result<(), Errno>,
}

impl Transfer {
    /// Makes a transfer that has not begun.
    pub fn new(direction: Direction, offset: u64, at: *mut Page, len: usize) -> Transfer {
        Transfer { direction, offset, at, len, done: 0, result: Ok(()) }
    }

    /// Makes the rest of it by plain system calls on `file`, whose first byte is byte `first` of
    /// the device.
    ///
    /// # Errors
    /// The kernel's; EIO where the file ends too early.
    ///
    /// # Safety
    /// - No other thread uses memory that is read into until the return. No thread changes memory
    ///   that is written from until then.
    pub unsafe fn finish(&mut self, file: BorrowedFd<'_>, first: u64) -> Result<(), Errno> {
        while self.done < self.len {
            let (offset, rest) = (self.offset + self.done as u64 - first, self.len - self.done);
            // SAFETY: `done` is less than the length of the memory that the caller vouches for. No
            // other thread uses memory that is read into during the call. Memory that is written
            // from may be read by other threads, and is not changed.
            let step = unsafe {
                let at = self.at.cast::<u8>().add(self.done);
                match self.direction {
                    Direction::Read => {
                        rustix::io::pread(file, core::slice::from_raw_parts_mut(at, rest), offset)
                    }
                    Direction::Write => {
                        rustix::io::pwrite(file, core::slice::from_raw_parts(at, rest), offset)
                    }
                }
            };
            match step {
                // The end of a file that must be longer: it was truncated.
                Ok(0) => return Err(Errno::IO),
                Ok(n) => self.done += n,
                Err(Errno::INTR) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}
