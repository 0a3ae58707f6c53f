//! Saving through a queue: a device compresses blocks in batches beside the caller, which hides the
//! queue's latency.
//!
//! Blocks that the device fails at, or does not finish in time, are compressed by the worker. So a
//! broken device costs only time. A device that failed or hung too often is not used any more.
use crate::batch::{BATCH_MAX, BatchJob, BatchResult, Compressor};
use crate::block::same_filled::pattern_of;
use crate::block::set::BlockSet;
use crate::format::huge_threshold;
use crate::handle::Handle;
use crate::pool::{ObjectPayload, Pool};
use crate::store::Store;
use crate::store::error::SaveError;
use crate::store::save::SaveReport;
use crate::store::worker::CodecWorker;
use alloc::boxed::Box;
use alloc::vec::Vec;
use memfold_os::page::{Page, PageBuffer};
use memfold_os::sync::atomic::Ordering::Relaxed;
use memfold_os::thread::now_ns;
use memfold_os::units::{Order, PAGE_SIZE};

/// Failures and time-outs after which a device is not used any more.
const TROUBLE_MAX: u64 = 16;

/// Counters of an [`Offload`].
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct OffloadStats {
    /// Blocks that the device compressed, or found incompressible.
    pub blocks: u64,
    /// Batches handed over.
    pub batches: u64,
    /// Blocks that the worker compressed itself because the device did not take them, failed, or
    /// hung.
    pub fallbacks: u64,
    /// Jobs that the device failed at.
    pub failures: u64,
    /// Times that the device finished nothing within the time-out.
    pub timeouts: u64,
}

/// One user's access to a [`Compressor`]: output buffers, a time-out, and the device's failures.
///
/// The output of a device is trusted like a codec's: wrong bytes are detected by verification (Z7)
/// or at the load.
pub struct Offload {
    queue: Box<dyn Compressor>,
    buffers: Box<[PageBuffer]>,
    timeout_ns: u64,
    /// Room of the jobs in progress.
    room: usize,
    stats: OffloadStats,
}

/// A folio that is being saved.
struct OffloadSave<'a> {
    /// Blocks that may be incompressible before the folio is refused.
    huge_max: u64,
    pool: &'a Pool,
    folio: *const u8,
    order: Order,
    report: SaveReport,
    /// Handles by their rank in `which`.
    done: usize,
}

impl Offload {
    /// Makes one with batches of up to `batch` blocks (1..=64) of up to `order` through `queue`. A
    /// device that finishes nothing for `timeout_ns` nanoseconds counts as hung.
    ///
    /// # Panics
    /// If `batch` is 0 or above [`BATCH_MAX`].
    pub fn new(queue: Box<dyn Compressor>, batch: usize, order: Order, timeout_ns: u64) -> Offload {
        assert!((1..=BATCH_MAX).contains(&batch));
        let buffers =
            (0..batch).map(|_| PageBuffer::new(order)).collect::<Vec<_>>().into_boxed_slice();
        Offload { queue, buffers, timeout_ns, room: 0, stats: OffloadStats::default() }
    }

    /// Returns the counters.
    pub fn stats(&self) -> OffloadStats {
        self.stats
    }

    /// Returns whether the device is still used.
    pub fn is_trusted(&self) -> bool {
        self.stats.failures + self.stats.timeouts < TROUBLE_MAX
    }
}

impl Drop for Offload {
    fn drop(&mut self) {
        // The buffers must outlive the device's writes to them.
        self.queue.cancel();
    }
}

impl Store {
    /// Saves like [`Store::save`], with blocks compressed in batches by the queue of `offload`,
    /// whose codec may differ from the worker's. The worker encodes blocks with same-filled pages
    /// while the queue works.
    ///
    /// # Errors
    /// As for [`Store::save`]: all or nothing. Trouble of the device is no error: the worker then
    /// does its blocks.
    ///
    /// # Panics
    /// As for [`Store::save`]; also if the offload was made for smaller blocks.
    ///
    /// # Safety
    /// - As for [`Store::save`].
    #[allow(clippy::too_many_arguments)]
    pub unsafe fn save_through(
        &self,
        w: &mut CodecWorker,
        offload: &mut Offload,
        folio: *const u8,
        order: Order,
        key: u64,
        which: &BlockSet,
        cancel: impl Fn() -> bool,
        out: &mut [Handle],
    ) -> Result<SaveReport, SaveError> {
        assert!(
            which.end() <= self.blocks(order)
                && out.len() >= self.blocks(order)
                && Page::begins_at(folio)
        );
        assert!(offload.buffers[0].len() >= self.block_order(order).bytes());
        self.admit_save(w)?;
        let (pool, order_of_blocks) = (self.pool_of(key), self.block_order(order));
        let mut saving = OffloadSave {
            huge_max: which.count() as u64 / 2,
            pool,
            folio,
            order: order_of_blocks,
            report: SaveReport::default(),
            done: 0,
        };
        let mut batch = [(0usize, 0usize); BATCH_MAX];
        let mut result = Ok(());
        let mut blocks = which.iter().enumerate().peekable();
        while result.is_ok() && blocks.peek().is_some() {
            let count = offload.buffers.len();
            let mut batch_len = 0;
            for (place, block) in batch.iter_mut().zip(blocks.by_ref().take(count)) {
                *place = block;
                batch_len += 1;
            }
            result = if cancel() {
                Err(SaveError::Cancelled)
            } else {
                // SAFETY: the caller vouches for the blocks in `which`.
                unsafe { self.save_batch(w, offload, &mut saving, &batch[..batch_len]) }
            };
        }
        if let Err(error) = result {
            // `saved` may have gaps where a batch stopped.
            self.free_many(&w.saved[..saving.done]);
            self.count_failure(w, error);
            return Err(error);
        }
        for (index, handle) in which.iter().zip(&w.saved[..saving.done]) {
            out[index] = *handle;
            self.mark_new(*handle, key + (index * order_of_blocks.pages()) as u64);
        }
        self.count_save(w, order, &saving.report);
        Ok(saving.report)
    }

    /// Saves a batch of (rank, block) pairs. On an error the handles that it made are noted, and no
    /// job is in progress.
    ///
    /// # Safety
    /// - As for [`Store::save`], for these blocks.
    unsafe fn save_batch(
        &self,
        w: &mut CodecWorker,
        offload: &mut Offload,
        saving: &mut OffloadSave<'_>,
        batch: &[(usize, usize)],
    ) -> Result<(), SaveError> {
        let first = saving.done;
        saving.done += batch.len();
        w.saved[first..saving.done].fill(Handle::NONE);
        let (folio, order) = (saving.folio, saving.order);
        let block = |index: usize| folio.wrapping_add(index * order.bytes());
        let mut state = [OffloadTurn::Own; BATCH_MAX];
        // SAFETY: the caller vouches for the blocks.
        unsafe { offload.submit(batch, order, block, &mut state) };
        let mut result = Ok(());
        // The worker's own blocks come first, while the queue works; then the results.
        loop {
            for (at, (rank, index)) in batch.iter().enumerate() {
                if state[at] != OffloadTurn::Own || result.is_err() {
                    continue;
                }
                state[at] = OffloadTurn::Over;
                // SAFETY: the caller vouches for the block.
                let outcome = unsafe {
                    self.save_block(
                        w,
                        saving.pool,
                        block(*index),
                        order,
                        saving.huge_max,
                        &mut saving.report,
                    )
                };
                result = outcome.map(|handle| w.saved[*rank] = handle);
            }
            if result.is_err() {
                offload.queue.cancel();
                return result;
            }
            let Some((at, size)) = offload.await_next(&mut state[..batch.len()]) else {
                if state[..batch.len()].contains(&OffloadTurn::Own) {
                    continue;
                }
                return Ok(());
            };
            let (rank, index) = batch[at];
            let src = block(index);
            // SAFETY: the device has finished with the buffer, which holds `size` bytes; the caller
            // vouches for the block.
            let outcome = unsafe { self.store_offloaded(w, offload, saving, at, src, size) };
            result = outcome.map(|handle| w.saved[rank] = handle);
        }
    }

    /// # Safety
    /// - Buffer `at` holds `size` compressed bytes of the block at `src`, or with `None` that block
    ///   does not shrink; it is readable, and no thread writes there.
    unsafe fn store_offloaded(
        &self,
        w: &mut CodecWorker,
        offload: &Offload,
        saving: &mut OffloadSave<'_>,
        at: usize,
        src: *const u8,
        size: Option<usize>,
    ) -> Result<Handle, SaveError> {
        let order = saving.order;
        let report = &mut saving.report;
        report.blocks += 1;
        report.bytes += order.bytes() as u64;
        report.huge_blocks += size.is_none() as u64;
        if report.huge_blocks > saving.huge_max && self.refuse_incompressible.load(Relaxed) {
            return Err(SaveError::Incompressible);
        }
        let format = size.map_or(crate::format::NONE, |_| offload.queue.codec().format());
        let (bytes, len) =
            size.map_or((src, order.bytes()), |size| (offload.buffers[at].as_ptr(), size));
        let payload = ObjectPayload {
            head: bytes,
            head_len: 0,
            bytes,
            len,
            order: order.get(),
            format,
            mixed: false,
        };
        // SAFETY: as the caller says.
        unsafe { self.store_verified(w, saving.pool, &payload, src, order, report) }
    }
}

/// Who compresses a block of a batch.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum OffloadTurn {
    /// The worker's.
    Own,
    /// The device's.
    Device,
    /// It is done.
    Over,
}

impl Offload {
    /// Submits the blocks without same-filled pages, as many as the device takes.
    ///
    /// # Safety
    /// - The blocks are readable, and no thread writes there until they are back or cancelled.
    ///   Nothing is under way.
    unsafe fn submit(
        &mut self,
        batch: &[(usize, usize)],
        order: Order,
        block: impl Fn(usize) -> *const u8,
        state: &mut [OffloadTurn; BATCH_MAX],
    ) {
        if !self.is_trusted() {
            self.stats.fallbacks += batch.len() as u64;
            return;
        }
        let none = BatchJob {
            tag: 0,
            src: core::ptr::null(),
            len: 0,
            dst: core::ptr::null_mut(),
            room: 0,
        };
        let mut jobs = [none; BATCH_MAX];
        self.room = huge_threshold(order.bytes());
        let mut count = 0;
        for (at, (_, index)) in batch.iter().enumerate() {
            let src = block(*index);
            // SAFETY: the pages lie in the block.
            let is_pattern =
                |page: usize| unsafe { pattern_of(src.add(page * PAGE_SIZE)) }.is_some();
            if !(0..order.pages()).any(is_pattern) {
                let dst = self.buffers[at].as_mut_ptr();
                let (len, room) = (order.bytes(), self.room);
                jobs[count] = BatchJob { tag: at as u64, src, len, dst, room };
                count += 1;
            }
        }
        let count_taken = match count {
            0 => 0,
            // SAFETY: the caller vouches for the blocks; the buffers belong to this offload, one
            // for each job.
            _ => unsafe { self.queue.submit(&jobs[..count]) }.min(count),
        };
        jobs[..count_taken].iter().for_each(|job| state[job.tag as usize] = OffloadTurn::Device);
        self.stats.batches += (count_taken > 0) as u64;
        self.stats.fallbacks += (count - count_taken) as u64;
    }

    /// Waits for the next block that the device has compressed. Returns its place in the batch and
    /// the size; `None` if the device has nothing left. The worker then does the blocks that
    /// failed, or all of them if the device hangs.
    fn await_next(&mut self, state: &mut [OffloadTurn]) -> Option<(usize, Option<usize>)> {
        let mut since = now_ns();
        while state.contains(&OffloadTurn::Device) {
            let mut results = [BatchResult::NONE; 1];
            if self.queue.complete(&mut results, self.timeout_ns) == 0 {
                if now_ns() - since < self.timeout_ns {
                    continue;
                }
                self.queue.cancel();
                self.stats.timeouts += 1;
                for turn in state.iter_mut().filter(|turn| **turn == OffloadTurn::Device) {
                    *turn = OffloadTurn::Own;
                    self.stats.fallbacks += 1;
                }
                return None;
            }
            since = now_ns();
            let at = results[0].tag as usize;
            // An unknown or repeated tag is a failure of the device.
            let Some(turn) = state.get_mut(at).filter(|turn| **turn == OffloadTurn::Device) else {
                self.stats.failures += 1;
                continue;
            };
            match results[0].result {
                Ok(size) if size.is_none_or(|size| size > 0 && size <= self.room) => {
                    *turn = OffloadTurn::Over;
                    self.stats.blocks += 1;
                    return Some((at, size));
                }
                _ => {
                    *turn = OffloadTurn::Own;
                    self.stats.failures += 1;
                    self.stats.fallbacks += 1;
                }
            }
        }
        None
    }
}
