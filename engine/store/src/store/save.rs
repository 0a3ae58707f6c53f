//! Saving folios: all or nothing.
use crate::block::set::BlockSet;
use crate::block::{self, BlockPacker, EncodedBlock};
use crate::codec::CodecError;
use crate::format;
use crate::handle::Handle;
use crate::pool::{ObjectPayload, Pool, PoolFull};
use crate::store::Store;
use crate::store::error::SaveError;
use crate::store::fault_injection::InjectedFault;
use crate::store::worker::CodecWorker;
use memfold_os::page::Page;
use memfold_os::sync::atomic::Ordering::*;
use memfold_os::units::Order;

/// Memory that a save tries to free when the pool is full.
const RELIEF_BYTES: u64 = 256 << 10;

/// The result of a save.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct SaveReport {
    /// Blocks saved.
    pub blocks: u64,
    /// Their bytes before compression.
    pub bytes: u64,
    /// Their payload bytes, without metadata and unused ends of slots.
    pub stored_bytes: u64,
    /// Their payload bytes for a ratio: no page counts less than its 8-byte pattern, however many
    /// share one, and also for zeros.
    pub counted_bytes: u64,
    /// Blocks of zeros, which hold no memory.
    pub zero_blocks: u64,
    /// Same-filled pages, with those of zero blocks.
    pub same_pages: u64,
    /// Blocks that did not compress enough and were stored raw.
    pub huge_blocks: u64,
}

/// Returns how much a payload of `len` bytes counts for a ratio, so that the ratio of same-filled
/// pages is the same in blocks of any size.
fn counted_bytes(len: usize, order: Order) -> u64 {
    (len as u64).max((order.pages() * size_of::<u64>()) as u64)
}

impl Store {
    /// Saves the blocks of a folio that are in `which` and sets their handles in `out`, by block.
    /// Other handles in `out` are not touched, and no handle in `out` is freed: that is the
    /// caller's task.
    ///
    /// `key` chooses the pool. `cancel` is asked before each block.
    ///
    /// # Errors
    /// All or nothing: on an error nothing of this call stays in the store, and `out` is unchanged.
    ///
    /// # Panics
    /// If `which` has blocks beyond the folio, `out` is shorter than the folio has blocks, `w` is
    /// of another store, or no page begins at `folio`.
    ///
    /// # Safety
    /// - `folio` points to `order.bytes()` readable bytes.
    /// - No thread writes to the blocks in `which` during the call.
    #[allow(clippy::too_many_arguments)]
    pub unsafe fn save(
        &self,
        w: &mut CodecWorker,
        folio: *const u8,
        order: Order,
        key: u64,
        which: &BlockSet,
        cancel: impl Fn() -> bool,
        out: &mut [Handle],
    ) -> Result<SaveReport, SaveError> {
        let block_order = self.block_order(order);
        assert!(
            which.end() <= self.blocks(order)
                && out.len() >= self.blocks(order)
                && Page::begins_at(folio)
        );
        self.admit_save(w)?;
        let pool = self.pool_of(key);
        let mut report = SaveReport::default();
        let mut count = 0;
        for index in which.iter() {
            // SAFETY: block `index` lies in the folio, so the caller vouches for it.
            let outcome = unsafe {
                let src = folio.add(index * block_order.bytes());
                if cancel() {
                    Err(SaveError::Cancelled)
                } else {
                    self.save_block(
                        w,
                        pool,
                        src,
                        block_order,
                        which.count() as u64 / 2,
                        &mut report,
                    )
                }
            };
            match outcome {
                Ok(handle) => w.saved[count] = handle,
                Err(error) => {
                    self.free_many(&w.saved[..count]);
                    self.count_failure(w, error);
                    return Err(error);
                }
            }
            count += 1;
        }
        for (index, handle) in which.iter().zip(&w.saved[..count]) {
            out[index] = *handle;
            self.mark_new(*handle, key + (index * block_order.pages()) as u64);
        }
        self.count_save(w, order, &report);
        Ok(report)
    }

    /// # Safety
    /// - As for [`Store::save`], for the one block at `src`.
    pub(crate) unsafe fn save_block(
        &self,
        w: &mut CodecWorker,
        pool: &Pool,
        src: *const u8,
        order: Order,
        huge_max: u64,
        report: &mut SaveReport,
    ) -> Result<Handle, SaveError> {
        if self.faults.strikes(InjectedFault::Codec) {
            return Err(SaveError::Codec(CodecError(0)));
        }
        w.decoders.sync();
        let dictionary = w.decoders.current(w.spec);
        let (format, shuffle) = (w.spec.format(), w.spec.shuffles());
        let packer = BlockPacker { encoder: &mut *w.encoder, format, dictionary, shuffle };
        // SAFETY: the caller vouches for the block; the worker's buffers have the size of this
        // store's blocks.
        let block_encoded = unsafe {
            self.sampler.offer(src, order);
            block::encode(&mut w.scratch, packer, src, order)
        };
        report.blocks += 1;
        report.bytes += order.bytes() as u64;
        let (format, payload) = match block_encoded.map_err(SaveError::Codec)? {
            EncodedBlock::Zero => {
                report.zero_blocks += 1;
                report.counted_bytes += counted_bytes(0, order);
                report.same_pages += order.pages() as u64;
                return Ok(Handle::ZERO);
            }
            EncodedBlock::Object { format, mixed, head, head_len, body, len, same_pages } => {
                report.same_pages += same_pages as u64;
                report.huge_blocks += (format == format::NONE && same_pages < order.pages()) as u64;
                if report.huge_blocks > huge_max && self.refuse_incompressible.load(Relaxed) {
                    return Err(SaveError::Incompressible);
                }
                let order = order.get();
                (
                    format,
                    ObjectPayload {
                        head,
                        head_len,
                        bytes: body,
                        len: head_len + len,
                        order,
                        format,
                        mixed,
                    },
                )
            }
        };
        if format != format::SAME
            && format != format::NONE
            && self.faults.strikes(InjectedFault::Compressed)
        {
            w.scratch.damage();
        }
        // SAFETY: the bytes lie in the block or in the worker's scratch, and no thread writes to
        // either.
        unsafe { self.store_verified(w, pool, &payload, src, order, report) }
    }

    /// Stores the payload of the block at `src`, and verifies it if requested.
    ///
    /// # Safety
    /// - As for [`Pool::store`], and `src` is a readable block of `order` that no thread writes.
    pub(crate) unsafe fn store_verified(
        &self,
        w: &mut CodecWorker,
        pool: &Pool,
        payload: &ObjectPayload,
        src: *const u8,
        order: Order,
        report: &mut SaveReport,
    ) -> Result<Handle, SaveError> {
        // SAFETY: as the caller says.
        let handle = unsafe { self.store_payload(pool, payload)? };
        report.stored_bytes += payload.len as u64;
        report.counted_bytes += counted_bytes(payload.len, order);
        if self.verify.load(Relaxed) {
            // SAFETY: the caller vouches for the block at `src`.
            unsafe { self.verify_block(w, handle, src, order)? };
        }
        if self.faults.strikes(InjectedFault::Stored) {
            self.damage_payload(handle);
        }
        Ok(handle)
    }

    /// # Safety
    /// - As for [`Pool::store`].
    unsafe fn store_payload(
        &self,
        pool: &Pool,
        payload: &ObjectPayload,
    ) -> Result<Handle, SaveError> {
        if self.faults.strikes(InjectedFault::PoolFull) {
            return Err(SaveError::PoolFull);
        }
        // SAFETY: as the caller says.
        let mut outcome = unsafe { pool.store(payload) };
        if outcome == Err(PoolFull) && self.compact(RELIEF_BYTES) > 0 {
            // SAFETY: as the caller says.
            outcome = unsafe { pool.store(payload) };
        }
        if outcome == Err(PoolFull) {
            self.budget.refuse();
        }
        outcome.map(Handle::of_object).map_err(|PoolFull| SaveError::PoolFull)
    }

    /// Loads the block and compares it; frees it if it differs.
    ///
    /// # Safety
    /// - `src` is a readable block of `order` that no thread writes.
    unsafe fn verify_block(
        &self,
        w: &mut CodecWorker,
        handle: Handle,
        src: *const u8,
        order: Order,
    ) -> Result<(), SaveError> {
        let len = order.bytes();
        assert!(len <= w.spare.len());
        let back = w.spare.as_mut_ptr();
        // SAFETY: the spare buffer has room for the block and is not shared; the caller vouches for
        // `src`.
        let is_same = unsafe {
            self.load_object(&mut w.decoders, handle, order, back).is_ok()
                && core::slice::from_raw_parts(back, len) == core::slice::from_raw_parts(src, len)
        };
        if !is_same {
            self.free(handle);
            return Err(SaveError::Verify);
        }
        Ok(())
    }

    /// Returns whether the limit allows saves now. Counts a refusal.
    pub(crate) fn admit_save(&self, w: &CodecWorker) -> Result<(), SaveError> {
        // Empty spans that wait for reuse count as held, although they need not.
        if self.budget.accepts() || (self.release_warm() > 0 && self.budget.accepts()) {
            return Ok(());
        }
        self.count_failure(w, SaveError::PoolFull);
        Err(SaveError::PoolFull)
    }

    pub(crate) fn count_save(&self, w: &mut CodecWorker, order: Order, report: &SaveReport) {
        let counters = &self.counters[w.counters];
        if report.blocks > 0 {
            counters.saves[order.get() as usize].fetch_add(1, Relaxed);
        }
        for (counter, value) in [
            (&counters.blocks_saved, report.blocks),
            (&counters.bytes_saved, report.bytes),
            (&counters.bytes_stored, report.stored_bytes),
            (&counters.zero_blocks, report.zero_blocks),
            (&counters.same_pages, report.same_pages),
            (&counters.huge_blocks, report.huge_blocks),
            (&counters.dense_blocks, core::mem::take(&mut w.scratch.dense_blocks)),
        ] {
            if value > 0 {
                counter.fetch_add(value, Relaxed);
            }
        }
    }

    pub(crate) fn count_failure(&self, w: &CodecWorker, error: SaveError) {
        let counters = &self.counters[w.counters];
        let counter = match error {
            SaveError::PoolFull => &counters.refused_full,
            SaveError::Incompressible => &counters.refused_incompressible,
            SaveError::Codec(_) => &counters.codec_failures,
            SaveError::Verify => &counters.verify_mismatches,
            SaveError::Cancelled => &counters.cancelled,
        };
        counter.fetch_add(1, Relaxed);
    }
}
