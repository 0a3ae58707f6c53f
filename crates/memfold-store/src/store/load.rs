//! Loading blocks, whole or in part.
use crate::block::dictionaries::DecoderSet;
use crate::block::same_filled::fill;
use crate::block::{self, DecodeError};
use crate::format;
use crate::handle::Handle;
use crate::pool::{ObjectDamage, PinnedObject};
use crate::store::Store;
use crate::store::error::{LoadError, LoadProblem};
use crate::store::worker::CodecWorker;
use memfold_os::page::Page;
use memfold_os::sync::atomic::Ordering::*;
use memfold_os::units::{Order, PAGE_SIZE};

impl Store {
    /// Writes the block of `handle`, which was saved as a block of `order`, to `dst`.
    ///
    /// Takes no lock: any number of threads load at once, also beside compaction.
    ///
    /// # Errors
    /// Says what was expected and what was found. `dst` holds any bytes then, never ones taken for
    /// right.
    ///
    /// # Panics
    /// If no page begins at `dst`.
    ///
    /// # Safety
    /// - `dst` points to `order.bytes()` writable bytes that nobody else accesses during the call.
    /// - `handle` is not freed during the call.
    pub unsafe fn load(
        &self,
        w: &mut CodecWorker,
        handle: Handle,
        order: Order,
        dst: *mut u8,
    ) -> Result<(), LoadError> {
        // SAFETY: as the caller says.
        unsafe { self.load_start(w, handle, order, order.pages(), dst) }
    }

    /// As [`Store::load`], but only the first `pages` pages of the block are wanted: what is behind
    /// them at `dst` may be anything afterwards. Codecs that can stop there do.
    ///
    /// # Errors
    /// As for [`Store::load`].
    ///
    /// # Panics
    /// Also if these pages are none, or not within a block of `order`.
    ///
    /// # Safety
    /// - As for [`Store::load`].
    pub unsafe fn load_start(
        &self,
        w: &mut CodecWorker,
        handle: Handle,
        order: Order,
        pages: usize,
        dst: *mut u8,
    ) -> Result<(), LoadError> {
        assert!(Page::begins_at(dst) && pages > 0 && pages <= order.pages());
        // SAFETY: as the caller says.
        let loaded = unsafe { self.load_object(&mut w.decoders, handle, order, pages, dst) };
        let counters = &self.counters[w.counters];
        match loaded {
            Ok(()) => {
                self.touch(handle);
                counters.loads[order.get() as usize].fetch_add(1, Relaxed)
            }
            Err(_) => counters.failed_loads.fetch_add(1, Relaxed),
        };
        loaded
    }

    /// Asks the processor for what [`Store::load`] of `handle` will read, to be called some
    /// microseconds before. Any handle may be given.
    pub fn prefetch(&self, handle: Handle) {
        if let Some(name) = handle.object()
            && let Some(pool) = self.pools.get(name.pool as usize)
        {
            pool.prefetch(name);
        }
    }

    /// Whether a block is stored as planes of bytes, from which it is put together as fast as it
    /// could be copied, or nearly.
    pub fn is_in_planes(&self, handle: Handle) -> bool {
        self.pin(handle).is_ok_and(|pinned| format::shuffled(pinned.header.format).is_some())
    }

    /// Writes `pages` pages of the block of `handle`, from page `first_page` of the block, to
    /// `dst`. A block that is read page by page is decompressed once, as long as it is among the
    /// recent ones. Returns whether it was.
    ///
    /// # Errors
    /// As for [`Store::load`].
    ///
    /// # Panics
    /// If the pages are not within a block of `order`, or `order` is above the store's block order,
    /// or no page begins at `dst`.
    ///
    /// # Safety
    /// - `dst` points to `pages` writable pages that nobody else accesses during the call.
    /// - `handle` is not freed during the call.
    pub unsafe fn load_pages(
        &self,
        w: &mut CodecWorker,
        handle: Handle,
        order: Order,
        first_page: usize,
        pages: usize,
        dst: *mut u8,
    ) -> Result<bool, LoadError> {
        assert!(
            order <= self.block_order
                && first_page + pages <= order.pages()
                && Page::begins_at(dst)
        );
        let counters = &self.counters[w.counters];
        let whole = pages == order.pages();
        if !whole {
            counters.partial_loads.fetch_add(1, Relaxed);
        }
        if handle.is_zero() {
            // SAFETY: `dst` has room for the pages.
            unsafe { fill(dst, pages * PAGE_SIZE, 0) };
            return Ok(false);
        }
        let copy_out = |block: *const u8| {
            // SAFETY: `block` is a whole block of `order`, in a buffer of the store's or worker's
            // own; `dst` has room.
            unsafe {
                core::ptr::copy_nonoverlapping(
                    block.add(first_page * PAGE_SIZE),
                    dst,
                    pages * PAGE_SIZE,
                )
            };
        };
        self.touch(handle);
        if self.recent.find(handle, order, copy_out) {
            counters.recent_hits.fetch_add(1, Relaxed);
            return Ok(true);
        }
        counters.recent_misses.fetch_add(1, Relaxed);
        if whole {
            // SAFETY: as the caller says.
            return unsafe { self.load(w, handle, order, dst) }.map(|()| false);
        }
        // SAFETY: `to` is a buffer for a block of the store's order, not shared during the call.
        let decode = |to: *mut u8| unsafe {
            self.load_object(&mut w.decoders, handle, order, order.pages(), to)
        };
        let loaded = match self.recent.insert_with(handle, order, decode, copy_out) {
            Some(loaded) => loaded,
            None => {
                let to = w.spare.as_mut_ptr();
                // SAFETY: the spare buffer has room for a block of the store's order.
                let loaded =
                    unsafe { self.load_object(&mut w.decoders, handle, order, order.pages(), to) };
                loaded.inspect(|()| copy_out(to))
            }
        };
        if loaded.is_err() {
            counters.failed_loads.fetch_add(1, Relaxed);
        }
        loaded.map(|()| false)
    }

    /// # Safety
    /// - As for [`Store::load_start`].
    pub(crate) unsafe fn load_object(
        &self,
        decoders: &mut DecoderSet,
        handle: Handle,
        order: Order,
        pages: usize,
        dst: *mut u8,
    ) -> Result<(), LoadError> {
        if handle.is_zero() {
            // SAFETY: `dst` has room for the block.
            unsafe { fill(dst, pages * PAGE_SIZE, 0) };
            return Ok(());
        }
        let fail = |problem| LoadError { handle, problem };
        let pinned = self.pin(handle).map_err(fail)?;
        let header = pinned.header;
        if header.order != order.get() {
            // Which of the two is wrong?
            pinned.verify().map_err(|d| fail(d.into()))?;
            return Err(fail(LoadProblem::Order { expected: order.get(), found: header.order }));
        }
        // SAFETY: the pinned payload is readable and nobody writes it; the caller vouches for
        // `dst`.
        let decoded = unsafe { block::decode(decoders, header, pinned.payload, dst, order, pages) };
        // Decoders stay within bounds whatever they read, so the checksum can come after them, when
        // the payload is in the cache: before, it would wait for memory, which the decoder does
        // beside its work.
        pinned.verify().map_err(|d| fail(d.into()))?;
        decoded.map_err(|error| {
            fail(match error {
                DecodeError::Layout => LoadProblem::Layout,
                DecodeError::Format => LoadProblem::Format(header.format),
                DecodeError::Codec(code) => LoadProblem::Codec(code),
            })
        })
    }

    /// Flips a bit in the middle of a stored payload: damage, for tests.
    pub(crate) fn damage_payload(&self, handle: Handle) {
        let Ok(pinned) = self.pin(handle) else { return };
        let at = pinned.payload.wrapping_add(pinned.header.len as usize / 2).cast_mut();
        // SAFETY: the byte lies in the pinned payload; the handle was not given out yet, so nobody
        // else reads it.
        unsafe { at.write(at.read() ^ 0x10) };
    }

    fn pin(&self, handle: Handle) -> Result<PinnedObject<'_>, LoadProblem> {
        let name = handle.object().ok_or(LoadProblem::Unknown)?;
        let pool = self.pools.get(name.pool as usize).ok_or(LoadProblem::Unknown)?;
        pool.pin(name).map_err(LoadProblem::from)
    }
}

impl From<ObjectDamage> for LoadProblem {
    fn from(damage: ObjectDamage) -> LoadProblem {
        match damage {
            ObjectDamage::Unknown => LoadProblem::Unknown,
            ObjectDamage::Entry => LoadProblem::Entry,
            ObjectDamage::Checksum { expected, found } => LoadProblem::Checksum { expected, found },
        }
    }
}
