//! A small io_uring: a batch of reads and writes of one file, submitted and awaited with one system
//! call.
use crate::Errno;
use crate::transfer::{Direction, Transfer};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicU32, Ordering::*};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::io_uring::{
    IORING_OFF_SQ_RING, IORING_OFF_SQES, IoringEnterFlags, IoringFeatureFlags, IoringOp,
    IoringRegisterOp, io_uring_cqe, io_uring_enter, io_uring_params, io_uring_ptr,
    io_uring_register, io_uring_setup, io_uring_sqe, io_uring_user_data, iovec,
};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Most transfers that one system call submits.
pub const BATCH: usize = 32;
/// Most bytes of one entry.
const LEN_MAX: usize = 1 << 30;

/// A submission and a completion queue. One thread uses it at a time (`&mut`).
pub struct IoRing {
    fd: OwnedFd,
    rings: RingMapping,
    entries: RingMapping,
    params: io_uring_params,
    /// Registered memory: start and length.
    registered: (usize, usize),
}

struct RingMapping {
    at: *mut u8,
    len: usize,
}

// SAFETY: the mappings belong to the ring, which is used only through `&mut`.
unsafe impl Send for IoRing {}

impl RingMapping {
    fn new(fd: BorrowedFd<'_>, len: usize, offset: u64) -> Result<RingMapping, Errno> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing.
        let at = unsafe {
            mmap(null_mut(), len, prot, MapFlags::SHARED | MapFlags::POPULATE, fd, offset)?
        };
        Ok(RingMapping { at: at.cast(), len })
    }

    /// Returns a word that the kernel also reads or writes.
    fn word(&self, offset: u32) -> &AtomicU32 {
        assert!(offset as usize + 4 <= self.len);
        // SAFETY: the word lies in the mapping, aligned as the kernel lays it out, and is accessed
        // only atomically.
        unsafe { &*self.at.add(offset as usize).cast::<AtomicU32>() }
    }
}

impl Drop for RingMapping {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to this struct, and no reference into it is alive.
        let _ = unsafe { munmap(self.at.cast(), self.len) };
    }
}

impl IoRing {
    /// Makes a ring of [`BATCH`] entries.
    ///
    /// # Errors
    /// ENOSYS or EPERM: the kernel has none, or permits none. EOPNOTSUPP: the kernel is too old.
    /// ENOMEM.
    pub fn new() -> Result<IoRing, Errno> {
        let mut params = io_uring_params::default();
        // SAFETY: no memory is passed to the kernel here.
        let fd = unsafe { io_uring_setup(BATCH as u32, &mut params)? };
        if !params.features.contains(IoringFeatureFlags::SINGLE_MMAP | IoringFeatureFlags::NODROP) {
            return Err(Errno::OPNOTSUPP);
        }
        let sq_len = params.sq_off.array as usize + params.sq_entries as usize * 4;
        let cq_len =
            params.cq_off.cqes as usize + params.cq_entries as usize * size_of::<io_uring_cqe>();
        let rings = RingMapping::new(fd.as_fd(), sq_len.max(cq_len), IORING_OFF_SQ_RING)?;
        let entries_len = params.sq_entries as usize * size_of::<io_uring_sqe>();
        let entries = RingMapping::new(fd.as_fd(), entries_len, IORING_OFF_SQES)?;
        Ok(IoRing { fd, rings, entries, params, registered: (0, 0) })
    }

    /// Registers memory, so that the kernel needn't look up its pages for each transfer. All of its
    /// pages are made.
    ///
    /// # Errors
    /// ENOMEM: more than RLIMIT_MEMLOCK permits. The ring also works without it.
    ///
    /// # Safety
    /// - The memory stays mapped as long as the ring lives.
    pub unsafe fn register(&mut self, start: *mut u8, len: usize) -> Result<(), Errno> {
        let buffer = iovec { iov_base: start.cast(), iov_len: len };
        // SAFETY: one iovec, read during the call; the caller vouches for the memory.
        unsafe {
            io_uring_register(
                &self.fd,
                IoringRegisterOp::RegisterBuffers,
                (&raw const buffer).cast(),
                1,
            )?
        };
        self.registered = (start as usize, len);
        Ok(())
    }

    /// Makes up to [`BATCH`] transfers on `file`, whose first byte is byte `first` of the device.
    /// Returns when all have ended. Each one's `done` is its number of bytes, and `result` is the
    /// error, if any. The caller completes short transfers.
    ///
    /// # Errors
    /// The ring itself failed; then no transfer was submitted.
    ///
    /// # Panics
    /// If there are more than [`BATCH`]; if the kernel fails to end transfers that it has begun.
    ///
    /// # Safety
    /// - The conditions of [`Transfer::finish`] hold for each of them; they are all on `file`.
    pub unsafe fn run(
        &mut self,
        file: BorrowedFd<'_>,
        first: u64,
        transfers: &mut [Transfer],
    ) -> Result<(), Errno> {
        assert!(transfers.len() <= BATCH && transfers.len() <= self.params.sq_entries as usize);
        let sq = self.params.sq_off;
        let (mask, tail) =
            (self.rings.word(sq.ring_mask).load(Relaxed), self.rings.word(sq.tail).load(Relaxed));
        for (i, transfer) in transfers.iter().enumerate() {
            let at = tail.wrapping_add(i as u32) & mask;
            // SAFETY: entry `at` lies in the mapping; the kernel has consumed all earlier ones
            // (each call submits all).
            unsafe {
                self.entries
                    .at
                    .cast::<io_uring_sqe>()
                    .add(at as usize)
                    .write(self.entry(file, first, transfer, i as u64))
            };
            self.rings.word(sq.array + at * 4).store(at, Relaxed);
        }
        self.rings.word(sq.tail).store(tail.wrapping_add(transfers.len() as u32), Release);
        let (mut to_submit, mut count_left) = (transfers.len() as u32, transfers.len() as u32);
        while count_left > 0 {
            // SAFETY: the submitted entries are those above, whose buffers the caller vouches for
            // until they end.
            let outcome = unsafe {
                io_uring_enter(&self.fd, to_submit, count_left, IoringEnterFlags::GETEVENTS)
            };
            match outcome {
                Ok(n) => to_submit -= n.min(to_submit),
                Err(Errno::INTR | Errno::AGAIN | Errno::BUSY) => crate::thread::yield_now(),
                Err(e) if to_submit == transfers.len() as u32 => {
                    self.rings.word(sq.tail).store(tail, Release);
                    return Err(e);
                }
                Err(e) => panic!("memfold: io_uring has taken a transfer and failed: {e}"),
            }
            count_left -= self.reap(transfers);
        }
        Ok(())
    }

    fn entry(
        &self,
        file: BorrowedFd<'_>,
        first: u64,
        transfer: &Transfer,
        number: u64,
    ) -> io_uring_sqe {
        let at = transfer.at as usize;
        let is_fixed =
            at >= self.registered.0 && at + transfer.len <= self.registered.0 + self.registered.1;
        let opcode = match (transfer.direction, is_fixed) {
            (Direction::Read, false) => IoringOp::Read,
            (Direction::Read, true) => IoringOp::ReadFixed,
            (Direction::Write, false) => IoringOp::Write,
            (Direction::Write, true) => IoringOp::WriteFixed,
        };
        let user_data = io_uring_user_data::from_u64(number);
        let mut entry =
            io_uring_sqe { opcode, fd: file.as_raw_fd(), user_data, ..Default::default() };
        entry.off_or_addr2.off = transfer.offset - first;
        entry.addr_or_splice_off_in.addr = io_uring_ptr::new(transfer.at.cast());
        entry.len.len = transfer.len.min(LEN_MAX) as u32;
        entry
    }

    /// Takes the present completions, and returns their number.
    fn reap(&self, transfers: &mut [Transfer]) -> u32 {
        let cq = &self.params.cq_off;
        let mask = self.rings.word(cq.ring_mask).load(Relaxed);
        let (mut head, tail) =
            (self.rings.word(cq.head).load(Relaxed), self.rings.word(cq.tail).load(Acquire));
        let mut count = 0;
        while head != tail {
            let offset = cq.cqes as usize + (head & mask) as usize * size_of::<io_uring_cqe>();
            assert!(offset + size_of::<io_uring_cqe>() <= self.rings.len);
            // SAFETY: the entry lies in the mapping, and the kernel wrote it before it raised
            // `tail`.
            let (number, res) = unsafe {
                let entry = self.rings.at.add(offset).cast::<io_uring_cqe>();
                ((*entry).user_data.u64_(), (*entry).res)
            };
            let transfer = &mut transfers[number as usize];
            match res {
                0.. => (transfer.done, transfer.result) = (res as usize, Ok(())),
                _ => transfer.result = Err(Errno::from_raw_os_error(-res)),
            }
            head = head.wrapping_add(1);
            count += 1;
        }
        self.rings.word(cq.head).store(head, Release);
        count
    }
}

/// Returns whether io_uring is available. Without it, each transfer is a system call.
///
/// # Errors
/// ENOSYS or EPERM: the kernel has none, or permits none. EOPNOTSUPP: the kernel is too old.
pub fn has_uring() -> Result<(), Errno> {
    IoRing::new().map(drop)
}
