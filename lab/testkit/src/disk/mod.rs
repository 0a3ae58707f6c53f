//! A swap device in memory, with faults on purpose.
//!
//! Faults that the system must survive, without losing a byte or returning a wrong one:
//! - [`DiskTrouble::Full`]: ENOSPC from a write or from growing, nothing done;
//! - [`DiskTrouble::Failed`]: EIO from a write, nothing done; from a read it must end the program
//!   with a message;
//! - [`DiskTrouble::Short`]: a first part is done, then EIO;
//! - [`DiskTrouble::Wrong`]: one read gives a wrong byte: it is read again;
//! - slow transfers, reads that don't end before [`MemoryDisk::release_reads`], and any order of
//!   ending;
//! - [`MemoryDisk::damage`]: bytes that are not what was written: detected, never accepted.
//!
//! It need not survive a device that returns `Ok` for a write that it dropped; that would be found
//! like damage.
pub mod files;

use crate::random::Random;
use memfold_os::Errno;
use memfold_os::sync::{Condvar, Mutex};
use memfold_os::transfer::{Direction, Transfer};
use memfold_swap::disk::Disk;
use std::sync::Arc;

/// A fault of a transfer.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum DiskTrouble {
    /// ENOSPC, nothing done.
    Full,
    /// EIO, nothing done.
    Failed,
    /// Half is done, then EIO.
    Short,
    /// A read gives a wrong byte, and succeeds.
    Wrong,
}

/// A device in memory. Clones share it.
#[derive(Clone)]
pub struct MemoryDisk {
    inner: Arc<Mutex<DiskState>>,
    released: Arc<Condvar>,
}

struct DiskState {
    bytes: Vec<u8>,
    size_max: u64,
    file_system: u64,
    script: Vec<(Direction, u64, DiskTrouble)>,
    growths: u64,
    failing_growth: u64,
    write_odds: u32,
    random: Random,
    delay_us: u64,
    held: bool,
    reads: u64,
    begun: u64,
    write_bytes: Vec<usize>,
    punched: u64,
    punches: u64,
}

impl Default for MemoryDisk {
    fn default() -> Self {
        MemoryDisk::new(1 << 30)
    }
}

impl MemoryDisk {
    /// Makes an empty device that can grow to `size_max` bytes.
    pub fn new(size_max: u64) -> MemoryDisk {
        let inner = DiskState {
            bytes: Vec::new(),
            size_max,
            file_system: u64::MAX,
            script: Vec::new(),
            growths: 0,
            failing_growth: 0,
            write_odds: 0,
            random: Random::new(0),
            delay_us: 0,
            held: false,
            reads: 0,
            begun: 0,
            write_bytes: Vec::new(),
            punched: 0,
            punches: 0,
        };
        MemoryDisk { inner: Arc::new(Mutex::new(inner)), released: Arc::new(Condvar::new()) }
    }

    /// Lets the `nth` transfer of a kind from now (1: the next) meet a trouble.
    pub fn strike(&self, direction: Direction, nth: u64, trouble: DiskTrouble) {
        self.inner.lock().script.push((direction, nth, trouble));
    }

    /// Makes the `nth` growth of the file (1: the first) fail with ENOSPC.
    pub fn fail_growth(&self, nth: u64) {
        self.inner.lock().failing_growth = nth;
    }

    /// Returns the attempted growths.
    pub fn growths(&self) -> u64 {
        self.inner.lock().growths
    }

    /// Makes `per_mille` of 1000 writes fail.
    pub fn fail_writes_at_random(&self, per_mille: u32, seed: u64) {
        let mut inner = self.inner.lock();
        (inner.write_odds, inner.random) = (per_mille, Random::new(seed));
    }

    /// Makes every batch of transfers take this long.
    pub fn set_delay_us(&self, us: u64) {
        self.inner.lock().delay_us = us;
    }

    /// Blocks all reads until [`MemoryDisk::release_reads`].
    pub fn hold_reads(&self) {
        self.inner.lock().held = true;
    }

    /// Ends [`MemoryDisk::hold_reads`].
    pub fn release_reads(&self) {
        self.inner.lock().held = false;
        self.released.notify_all();
    }

    /// Sets the size of the file system, which bounds the file.
    pub fn set_file_system_bytes(&self, bytes: u64) {
        self.inner.lock().file_system = bytes;
    }

    /// Flips a bit of every byte that `which` selects.
    pub fn damage(&self, which: impl Fn(usize) -> bool) {
        self.inner
            .lock()
            .bytes
            .iter_mut()
            .enumerate()
            .filter(|(i, _)| which(*i))
            .for_each(|(_, b)| *b ^= 4);
    }

    /// Exchanges two ranges.
    pub fn exchange(&self, a: usize, b: usize, len: usize) {
        let mut inner = self.inner.lock();
        (0..len).for_each(|i| inner.bytes.swap(a + i, b + i));
    }

    /// Returns a copy of all bytes.
    pub fn bytes(&self) -> Vec<u8> {
        self.inner.lock().bytes.clone()
    }

    /// Returns the transfers that were begun.
    pub fn begun(&self) -> u64 {
        self.inner.lock().begun
    }

    /// Returns the completed reads.
    pub fn reads(&self) -> u64 {
        self.inner.lock().reads
    }

    /// Returns the length of every completed write, in order.
    pub fn writes(&self) -> Vec<usize> {
        self.inner.lock().write_bytes.clone()
    }

    /// Returns the calls that freed bytes.
    pub fn punches(&self) -> u64 {
        self.inner.lock().punches
    }

    /// Returns the bytes freed.
    pub fn punched(&self) -> u64 {
        self.inner.lock().punched
    }
}

impl DiskState {
    fn due(&mut self, direction: Direction) -> Option<DiskTrouble> {
        let mut strike = None;
        for (of, nth, trouble) in self.script.iter_mut().filter(|s| s.0 == direction && s.1 > 0) {
            debug_assert_eq!(*of, direction);
            *nth -= 1;
            strike = if *nth == 0 { Some(*trouble) } else { strike };
        }
        let odds = self.write_odds;
        if strike.is_none() && direction == Direction::Write && self.random.per_mille(odds) {
            strike = Some(self.random.pick(&[
                DiskTrouble::Full,
                DiskTrouble::Failed,
                DiskTrouble::Short,
            ]));
        }
        strike
    }

    /// # Safety
    /// - As for [`Disk::transfer`].
    unsafe fn one(&mut self, transfer: &Transfer) -> Result<(), Errno> {
        let (start, end) = (transfer.offset as usize, transfer.offset as usize + transfer.len);
        let trouble = self.due(transfer.direction);
        let part = match trouble {
            Some(DiskTrouble::Full) => return Err(Errno::NOSPC),
            Some(DiskTrouble::Failed) => return Err(Errno::IO),
            Some(DiskTrouble::Short) => transfer.len / 2,
            Some(DiskTrouble::Wrong) | None => transfer.len,
        };
        if end > self.bytes.len() {
            return Err(Errno::IO);
        }
        // SAFETY: the caller vouches for the memory of the transfer.
        unsafe {
            let device = self.bytes.as_mut_ptr().add(start);
            match transfer.direction {
                Direction::Read => {
                    let to = transfer.at.cast::<u8>();
                    core::ptr::copy_nonoverlapping(device, to, part);
                    if trouble == Some(DiskTrouble::Wrong) {
                        *to.add(part / 2) ^= 1;
                    }
                }
                Direction::Write => {
                    core::ptr::copy_nonoverlapping(transfer.at.cast(), device, part)
                }
            }
        }
        match transfer.direction {
            Direction::Read => self.reads += 1,
            Direction::Write => self.write_bytes.push(transfer.len),
        }
        if part < transfer.len { Err(Errno::IO) } else { Ok(()) }
    }
}

impl Disk for MemoryDisk {
    unsafe fn transfer(&self, transfers: &mut [Transfer]) {
        let delay = {
            let mut inner = self.inner.lock();
            inner.begun += transfers.len() as u64;
            while inner.held && transfers.iter().any(|t| t.direction == Direction::Read) {
                inner = self.released.wait(inner);
            }
            inner.delay_us
        };
        if delay > 0 {
            memfold_os::thread::sleep_ns(delay * 1000);
        }
        // The last one is first, because no order is promised.
        for transfer in transfers.iter_mut().rev() {
            // SAFETY: the caller vouches for the memory of the transfer.
            transfer.result = unsafe { self.inner.lock().one(transfer) };
        }
    }

    fn grow(&self, len: u64) -> Result<(), Errno> {
        let mut inner = self.inner.lock();
        inner.growths += 1;
        if len > inner.size_max || inner.growths == inner.failing_growth {
            return Err(Errno::NOSPC);
        }
        if len as usize > inner.bytes.len() {
            // Zeroed memory costs nothing until it is touched; `resize` would write it all.
            let mut bytes = vec![0; len as usize];
            bytes[..inner.bytes.len()].copy_from_slice(&inner.bytes);
            inner.bytes = bytes;
        }
        Ok(())
    }

    fn stretch(&self, len: u64) -> Result<(), Errno> {
        self.grow(len)
    }

    fn punch(&self, offset: u64, len: u64) -> Result<(), Errno> {
        let mut inner = self.inner.lock();
        inner.bytes[offset as usize..(offset + len) as usize].fill(0xDD);
        inner.punched += len;
        inner.punches += 1;
        Ok(())
    }

    fn free_bytes(&self) -> Result<u64, Errno> {
        let inner = self.inner.lock();
        Ok(inner.file_system.saturating_sub(inner.bytes.len() as u64))
    }

    unsafe fn register(&self, _: *mut u8, _: usize) {}

    fn name(&self) -> &str {
        "memory-disk"
    }
}
