//! Batches: the interface of whatever compresses blocks beside the caller (Z9).
//!
//! [`Compressor`] is one queue pair: jobs go in, results come out in any order, and the caller does
//! other work meanwhile. It is what a hardware queue would implement, for example one work queue of
//! Intel's In-Memory Analytics Accelerator (a job is a descriptor, [`Compressor::submit`] writes
//! descriptors to the portal, [`Compressor::complete`] polls their completion records) or a stream
//! of a GPU (a batch is one launch). [`crate::SoftwarePool`] implements it with threads. There is
//! no executor and no future: a queue never calls back, and nothing here allocates after set-up.
pub(crate) mod software;

use crate::codec::{CodecError, CodecSpec};

/// The most jobs in a batch.
pub const BATCH_MAX: usize = 64;

/// One block to compress.
#[derive(Copy, Clone, Debug)]
pub struct Job {
    /// What its result is known by; any number.
    pub tag: u64,
    /// The block.
    pub src: *const u8,
    /// Its length in bytes.
    pub len: usize,
    /// Where the compressed bytes go.
    pub dst: *mut u8,
    /// The most bytes that may be written there.
    pub room: usize,
}

// SAFETY: a job is numbers; what may be done with its pointers is said where it is submitted.
unsafe impl Send for Job {}

/// What became of a job.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Done {
    /// The job's tag.
    pub tag: u64,
    /// Compressed bytes at `dst`; `None`: more than `room`; an error: the job failed and may be
    /// done elsewhere.
    pub result: Result<Option<usize>, CodecError>,
}

impl Done {
    /// For arrays that results are written to.
    pub const NONE: Done = Done { tag: 0, result: Ok(None) };
}

/// One queue pair of something that compresses blocks. One user at a time; several queues may share
/// a device.
pub trait Compressor: Send {
    /// The codec that it writes.
    fn codec(&self) -> CodecSpec;

    /// Takes jobs from the front of `jobs`, as many as it has room for, and returns how many: none
    /// if the device is busy with other queues' jobs, or broken. Never waits.
    ///
    /// # Safety
    /// Until a job's result was returned by `complete`, or `cancel` has returned:
    /// - `src` is readable for `len` bytes, and nobody writes there.
    /// - `dst` is writable for `room` bytes, overlaps no other memory in use, and nobody else
    ///   touches it.
    unsafe fn submit(&mut self, jobs: &[Job]) -> usize;

    /// Writes results to the front of `done` and returns how many. With none there it waits for
    /// one, up to about `wait_ns` nanoseconds. A result is returned once.
    fn complete(&mut self, done: &mut [Done], wait_ns: u64) -> usize;

    /// Gives up all jobs under way. Afterwards none of their memory is touched and none of their
    /// results is returned.
    fn cancel(&mut self);
}
