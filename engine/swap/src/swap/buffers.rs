//! Buffers. Some are written from, and others are read into, so that a read never waits for a
//! write.
use crate::disk::Disk;
use crate::write_queue::WRITES_MAX;
use core::ops::Range;
use memfold_os::Errno;
use memfold_os::memory::zone::Zone;
use memfold_os::sync::atomic::{AtomicBool, Ordering::Relaxed};
use memfold_os::sync::{Condvar, Mutex};
use memfold_os::units::{Order, PAGE_SIZE};

const WRITE_BUFFERS: usize = WRITES_MAX;
const READ_BUFFERS: usize = 2;
const BUFFERS: usize = WRITE_BUFFERS + READ_BUFFERS;
/// All buffers of a kind take at most one part in this many of the limit.
const LIMIT_SHARE: u64 = 64;
const BUFFER_MIN_BYTES: usize = 64 << 10;
/// Packed objects are best written this many bytes at a time. So buffers have at least this size,
/// even if raw objects are small.
const PACK_BYTES: usize = 512 << 10;

/// The purpose of a buffer.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum BufferPurpose {
    /// To be written from.
    Write,
    /// To be read into.
    Read,
}

impl BufferPurpose {
    fn buffers(self) -> Range<usize> {
        match self {
            BufferPurpose::Write => 0..WRITE_BUFFERS,
            BufferPurpose::Read => WRITE_BUFFERS..BUFFERS,
        }
    }
}

/// All buffers of a swap file. Each has one user at a time, and is named by its number.
pub struct Buffers {
    memory: Zone,
    buffer_bytes: usize,
    is_free: Mutex<[bool; BUFFERS]>,
    freed: Condvar,
    /// Whether the buffers are registered with the disk. They hold memory then.
    registered: AtomicBool,
}

impl Buffers {
    /// Makes the buffers, all free. The engine may hold `limit_bytes`; no object is larger than
    /// `largest`.
    ///
    /// # Errors
    /// No address space.
    pub fn new(limit_bytes: u64, largest: Order) -> Result<Buffers, Errno> {
        let share = (limit_bytes / LIMIT_SHARE).max(1).ilog2();
        let buffer_bytes =
            (1usize << share).clamp(BUFFER_MIN_BYTES, largest.bytes().max(PACK_BYTES));
        Ok(Buffers {
            memory: Zone::reserve(buffer_bytes * BUFFERS, PAGE_SIZE)?,
            buffer_bytes,
            is_free: Mutex::new([true; BUFFERS]),
            freed: Condvar::new(),
            registered: AtomicBool::new(false),
        })
    }

    /// Takes a buffer and returns its number. The first call registers the buffers with the disk.
    /// If none is free, sleeps with `wait`, and otherwise returns `None`.
    ///
    /// # Safety
    /// - The disk is dropped before the buffers, and is the same each time.
    pub unsafe fn take(
        &self,
        disk: &dyn Disk,
        purpose: BufferPurpose,
        wait: bool,
    ) -> Option<usize> {
        let mut is_free = self.is_free.lock();
        if !self.registered.swap(true, Relaxed) {
            // Buffers are registered at the first use, because most processes of a run never write.
            // SAFETY: the memory is mapped as long as the buffers live, and the caller promises
            // that the disk is dropped before them.
            unsafe { disk.register(self.memory.as_ptr(), self.memory.len()) };
        }
        loop {
            if let Some(buffer) = purpose.buffers().find(|buffer| is_free[*buffer]) {
                is_free[buffer] = false;
                return Some(buffer);
            }
            if !wait {
                return None;
            }
            is_free = self.freed.wait(is_free);
        }
    }

    /// Gives a buffer back.
    pub fn give_back(&self, buffer: usize) {
        self.is_free.lock()[buffer] = true;
        self.freed.notify_all();
    }

    /// Returns where a buffer starts.
    pub fn start_of(&self, buffer: usize) -> *mut u8 {
        assert!(buffer < BUFFERS);
        // SAFETY: `buffer` is less than `BUFFERS`, so the start lies in the zone.
        unsafe { self.memory.as_ptr().add(buffer * self.buffer_bytes) }
    }

    /// Returns the bytes of one buffer.
    pub fn buffer_bytes(&self) -> usize {
        self.buffer_bytes
    }

    /// Returns the bytes of all buffers.
    pub fn bytes_max(&self) -> u64 {
        self.memory.len() as u64
    }

    /// Returns the bytes of memory that the buffers take; 0 before the first is taken.
    pub fn memory_bytes(&self) -> u64 {
        if self.registered.load(Relaxed) { self.bytes_max() } else { 0 }
    }
}
