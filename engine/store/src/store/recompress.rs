//! Recompression of cold objects by a stronger codec (M9).
use crate::block;
use crate::handle::Handle;
use crate::pool::ObjectPayload;
use crate::pool::mark::TRIED;
use crate::pool::size_class::of_payload;
use crate::store::Store;
use crate::store::error::LoadError;
use crate::store::worker::CodecWorker;
use memfold_os::sync::atomic::Ordering::*;
use memfold_os::units::Order;

impl Store {
    /// Compresses the object of `handle` again with the codec of `w`. Returns `Ok(Some(new))` if a
    /// smaller object with the same bytes exists now: the caller puts it in the place of the old
    /// one, and frees that. Returns `Ok(None)` if it is not worth it; nothing has changed, and it
    /// is not tried again.
    ///
    /// # Errors
    /// As for [`Store::load`]: the object is damaged.
    ///
    /// # Panics
    /// If `order` is above the store's block order.
    ///
    /// # Safety
    /// - `handle` is not freed during the call.
    pub unsafe fn recompress(
        &self,
        w: &mut CodecWorker,
        handle: Handle,
        order: Order,
    ) -> Result<Option<Handle>, LoadError> {
        assert!(order <= self.block_order);
        let Some(name) = handle.object() else { return Ok(None) };
        let counters = &self.counters[w.counters];
        let old_len = self.stored_len(name);
        let block = w.spare.as_mut_ptr();
        // SAFETY: the spare buffer has room for a block of the store's order; the caller keeps the
        // handle alive.
        unsafe { self.load_object(&mut w.decoders, handle, order, block) }.inspect_err(|_| {
            counters.failed_loads.fetch_add(1, Relaxed);
        })?;
        counters.recompress_tried.fetch_add(1, Relaxed);
        let pool = &self.pools[name.pool as usize];
        let old_mark = pool.marks.get(name.index);
        old_mark.inspect(|mark| mark.set(TRIED));
        let packer = block::BlockPacker {
            encoder: &mut *w.encoder,
            format: w.spec.format(),
            dictionary: None,
            shuffle: w.spec.shuffles(),
        };
        // SAFETY: the spare holds the block, and the scratch is another buffer.
        let block_encoded = unsafe { block::encode(&mut w.scratch, packer, block, order) };
        let Ok(block::EncodedBlock::Object {
            format,
            mixed: mixed_bits,
            head,
            head_len,
            body,
            len,
            ..
        }) = block_encoded
        else {
            return Ok(None);
        };
        let len = head_len + len;
        if of_payload(len) >= of_payload(old_len.max(1)) {
            return Ok(None);
        }
        let payload = ObjectPayload {
            head,
            head_len,
            bytes: body,
            len,
            order: order.get(),
            format,
            mixed: mixed_bits,
        };
        // SAFETY: the payload lies in the worker's scratch and spare buffer, which no thread
        // writes.
        let Ok(new) = (unsafe { pool.store(&payload) }) else { return Ok(None) };
        let new = Handle::of_object(new);
        if self.verify.load(Relaxed) && !self.reads_back(w, new, order) {
            counters.verify_mismatches.fetch_add(1, Relaxed);
            self.free(new);
            return Ok(None);
        }
        counters.recompressed.fetch_add(1, Relaxed);
        counters.recompress_gained.fetch_add((old_len - len) as u64, Relaxed);
        if let (Some(old), Some(mark)) =
            (old_mark, new.object().and_then(|name| pool.marks.get(name.index)))
        {
            mark.begin(old.key(), old.tick(), TRIED);
        }
        Ok(Some(new))
    }

    /// Returns whether `new` decodes to the block in the spare buffer.
    fn reads_back(&self, w: &mut CodecWorker, new: Handle, order: Order) -> bool {
        let back = w.scratch.gathered.as_mut_ptr();
        // SAFETY: the buffer has room for a block of the store's order, page-aligned, and belongs
        // to this worker; no other thread knows the new object.
        let outcome = unsafe { self.load_object(&mut w.decoders, new, order, back) };
        outcome.is_ok()
            && w.scratch.gathered.bytes()[..order.bytes()] == w.spare.bytes()[..order.bytes()]
    }
}
