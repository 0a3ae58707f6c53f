//! Loading blocks, whole or in part.
use crate::block::dictionaries::DecoderSet;
use crate::block::same_filled::fill;
use crate::block::{self, DecodeError};
use crate::format;
use crate::handle::Handle;
use crate::pool::{ObjectDamage, PinnedObject};
use crate::store::Store;
use crate::store::decompressed_blocks::CacheUse;
use crate::store::error::{LoadError, LoadProblem};
use crate::store::worker::CodecWorker;
use core::ops::Range;
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
        assert!(Page::begins_at(dst));
        // SAFETY: as the caller says.
        let outcome = unsafe { self.load_object(&mut w.decoders, handle, order, dst) };
        self.count(w, handle, order, outcome)
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

    /// Writes `pages` pages of the block of `handle`, from page `first_page` of the block, to
    /// `dst`. A block that is read page by page is decompressed once, as long as it is in the cache
    /// of decompressed blocks.
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
    ) -> Result<CacheUse, LoadError> {
        // SAFETY: as the caller says.
        unsafe { self.load_part(w, handle, order, first_page..first_page + pages, None, dst) }
    }

    /// Writes these pages of the block of `handle` to their places in the block at `block`. Where
    /// other pages belong may be anything afterwards. A codec that can decode the pages alone, or stop
    /// after them, does; of others, the block goes to the cache of decompressed blocks, which serves further pages.
    ///
    /// # Errors
    /// As for [`Store::load`].
    ///
    /// # Panics
    /// Also if there are no pages, or not within a block of `order`, or `order` is above the store's
    /// block order.
    ///
    /// # Safety
    /// - As for [`Store::load`].
    pub unsafe fn load_in_place(
        &self,
        w: &mut CodecWorker,
        handle: Handle,
        order: Order,
        pages: Range<usize>,
        block: *mut u8,
    ) -> Result<CacheUse, LoadError> {
        let dst = block.wrapping_add(pages.start * PAGE_SIZE);
        // SAFETY: as the caller says; `dst` is where the first of the pages belongs.
        unsafe { self.load_part(w, handle, order, pages, Some(block), dst) }
    }

    /// Loads pages of a block to `dst`, which may be their place in `block`: there the block may be
    /// decompressed.
    ///
    /// # Safety
    /// - `dst` points to the pages' bytes, `block` to those of the block; both are writable, and
    ///   nobody else accesses them during the call. With `block`, `dst` is the pages' place in it.
    /// - `handle` is not freed during the call.
    unsafe fn load_part(
        &self,
        w: &mut CodecWorker,
        handle: Handle,
        order: Order,
        pages: Range<usize>,
        block: Option<*mut u8>,
        dst: *mut u8,
    ) -> Result<CacheUse, LoadError> {
        let is_whole = pages.len() == order.pages();
        assert!(order <= self.block_order && Page::begins_at(dst));
        assert!(!pages.is_empty() && pages.end <= order.pages());
        let counters = &self.counters[w.counters];
        counters.partial_loads.fetch_add(!is_whole as u64, Relaxed);
        let bytes = pages.len() * PAGE_SIZE;
        let copy_out = |from: *const u8| {
            let from = from.wrapping_add(pages.start * PAGE_SIZE);
            // SAFETY: a block of `order` begins at what is passed; `dst` has room. They may be one.
            unsafe { core::ptr::copy(from, dst, bytes) };
        };
        if order > Order::PAGE && self.cache.find(handle, order, copy_out) {
            self.touch(handle);
            counters.block_cache_hits.fetch_add(1, Relaxed);
            return Ok(CacheUse::Hit);
        }
        if handle.is_zero() {
            // SAFETY: `dst` has room for the pages.
            unsafe { fill(dst, bytes, 0) };
            return Ok(CacheUse::Unused);
        }
        if is_whole {
            // SAFETY: as the caller says.
            return unsafe { self.load(w, handle, order, dst) }.map(|()| CacheUse::Unused);
        }
        let pin = self.pin(handle).map_err(|problem| LoadError { handle, problem });
        let outcome = pin.and_then(|pin| {
            let decoders = &mut w.decoders;
            let stops_early = decoders.stops_early(pin.header.format);
            let mut decode = |pages, to: *mut u8| {
                // SAFETY: `to` is room for a block of `order`, and not shared meanwhile.
                unsafe { decode(decoders, &pin, handle, order, pages, to) }
            };
            let place = match block {
                Some(block) if stops_early => Some(block),
                None if format::loads_alone(pin.header.format) => Some(w.spare.as_mut_ptr()),
                _ => None,
            };
            if let Some(to) = place {
                decode(pages.clone(), to)?;
                if block.is_none() {
                    copy_out(to);
                }
                return Ok(CacheUse::Unused);
            }
            counters.block_cache_misses.fetch_add(1, Relaxed);
            let mut all = |to| decode(0..order.pages(), to);
            let outcome = match self.cache.insert_with(handle, order, &mut all, copy_out) {
                Some(loaded) => loaded,
                None => {
                    let to = block.unwrap_or(w.spare.as_mut_ptr());
                    all(to).map(|()| copy_out(to))
                }
            };
            outcome.map(|()| CacheUse::Miss)
        });
        self.count(w, handle, order, outcome)
    }

    /// Counts a load that decompressed.
    fn count<T>(
        &self,
        w: &CodecWorker,
        handle: Handle,
        order: Order,
        loaded: Result<T, LoadError>,
    ) -> Result<T, LoadError> {
        let counters = &self.counters[w.counters];
        if loaded.is_ok() {
            self.touch(handle);
            counters.loads[order.get() as usize].fetch_add(1, Relaxed);
        } else {
            counters.failed_loads.fetch_add(1, Relaxed);
        }
        loaded
    }

    /// Writes a block to `dst`.
    ///
    /// # Safety
    /// - As for [`Store::load`].
    pub(crate) unsafe fn load_object(
        &self,
        decoders: &mut DecoderSet,
        handle: Handle,
        order: Order,
        dst: *mut u8,
    ) -> Result<(), LoadError> {
        if handle.is_zero() {
            // SAFETY: `dst` has room for the block.
            unsafe { fill(dst, order.bytes(), 0) };
            return Ok(());
        }
        let pin = self.pin(handle).map_err(|problem| LoadError { handle, problem })?;
        // SAFETY: as the caller says.
        unsafe { decode(decoders, &pin, handle, order, 0..order.pages(), dst) }
    }

    /// Flips a bit in the middle of a stored payload: damage, for tests.
    pub(crate) fn damage_payload(&self, handle: Handle) {
        let Ok(pin) = self.pin(handle) else { return };
        let at = pin.payload.wrapping_add(pin.header.len as usize / 2).cast_mut();
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

/// Writes at least `pages` of the pinned block of `handle` to their places in `dst`.
///
/// # Safety
/// - `dst` points to `order.bytes()` writable bytes that nobody else accesses during the call.
unsafe fn decode(
    decoders: &mut DecoderSet,
    pinned: &PinnedObject<'_>,
    handle: Handle,
    order: Order,
    pages: Range<usize>,
    dst: *mut u8,
) -> Result<(), LoadError> {
    let fail = |problem| LoadError { handle, problem };
    let header = pinned.header;
    if header.order != order.get() {
        // Which of the two is wrong?
        pinned.verify().map_err(|d| fail(d.into()))?;
        return Err(fail(LoadProblem::Order { expected: order.get(), found: header.order }));
    }
    // SAFETY: the pinned payload is readable and nobody writes it; the caller vouches for `dst`.
    let outcome = unsafe { block::decode(decoders, header, pinned.payload, dst, order, pages) };
    // Decoders stay within bounds whatever they read, so the checksum can come after them, when the
    // payload is in the cache: before, it would wait for memory, which the decoder does beside its
    // work.
    pinned.verify().map_err(|d| fail(d.into()))?;
    outcome.map_err(|error| {
        fail(match error {
            DecodeError::Layout => LoadProblem::Layout,
            DecodeError::Format => LoadProblem::Format(header.format),
            DecodeError::Codec(code) => LoadProblem::Codec(code),
        })
    })
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
