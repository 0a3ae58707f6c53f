//! Batches: the interface to devices that compress blocks beside the caller (Z9).
//!
//! [`Compressor`] is one queue pair: jobs go in, results come out in any order, and the caller does
//! other work meanwhile. A hardware queue would implement it, for example one work queue of Intel's
//! In-Memory Analytics Accelerator (a job is a descriptor, [`Compressor::submit`] writes
//! descriptors to the portal, [`Compressor::complete`] polls their completion records) or a stream
//! of a GPU (a batch is one launch). [`crate::SoftwarePool`] implements it with threads. There is
//! no executor and no future: a queue never calls back, and nothing here allocates after set-up.
pub(crate) mod software;

use crate::codec::{CodecError, CodecSpec};
use alloc::boxed::Box;

/// Most jobs of a batch.
pub const BATCH_MAX: usize = 64;

/// One block to compress.
#[derive(Copy, Clone, Debug)]
pub struct BatchJob {
    /// Identifies its result; any number.
    pub tag: u64,
    /// The block.
    pub src: *const u8,
    /// Its length in bytes.
    pub len: usize,
    /// Destination of the compressed bytes.
    pub dst: *mut u8,
    /// Most bytes that may be written there.
    pub room: usize,
}

// SAFETY: a job is numbers. What may be done with its pointers is stated where it is submitted.
unsafe impl Send for BatchJob {}

/// The result of a job.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct BatchResult {
    /// The job's tag.
    pub tag: u64,
    /// Compressed bytes at `dst`; `None`: more than `room`; an error: the job failed and may be
    /// done elsewhere.
    pub result: Result<Option<usize>, CodecError>,
}

impl BatchResult {
    /// Initial value for arrays of results.
    pub const NONE: BatchResult = BatchResult { tag: 0, result: Ok(None) };
}

/// One queue pair of a device that compresses blocks. It has one user at a time; several queues may
/// share a device.
pub trait Compressor: Send {
    /// Returns the codec that it writes.
    fn codec(&self) -> CodecSpec;

    /// Takes as many jobs from the front of `jobs` as it has room for, and returns their number: 0
    /// if the device is busy with other queues' jobs, or broken. Never waits.
    ///
    /// # Safety
    /// Until a job's result was returned by `complete`, or `cancel` has returned:
    /// - `src` is readable for `len` bytes, and no thread writes there.
    /// - `dst` is writable for `room` bytes, overlaps no other memory in use, and no other thread
    ///   touches it.
    unsafe fn submit(&mut self, jobs: &[BatchJob]) -> usize;

    /// Writes results to the front of `done` and returns their number. If there is none, it waits
    /// for one, up to about `wait_ns` nanoseconds. A result is returned once.
    fn complete(&mut self, done: &mut [BatchResult], wait_ns: u64) -> usize;

    /// Cancels all jobs in progress. Afterwards none of their memory is touched and none of their
    /// results is returned.
    fn cancel(&mut self);
}

/// A device that compresses blocks. Dropping it ends its work.
pub trait CompressorPool: Send + Sync {
    /// Makes a queue. It allocates everything that it will ever need.
    fn queue(&self) -> Box<dyn Compressor>;
}
