//! Loads stored blocks from the pool, and from the swap file behind it.
//!
//! Only the requested blocks are decompressed. A packed object's payload is opened and decoded by
//! itself, and a raw object needs no decoding. A block from the file must also have the fingerprint
//! that was computed when it was stored. So an older state of the same slot is detected.
mod polyval;
pub mod fingerprint;
pub mod contexts;

use crate::backing::contexts::{BorrowedContext, CodecContext, ContextPool};
use crate::backing::fingerprint::{Fingerprint, Fingerprints};
use crate::stats_place::StatsPlace;
use alloc::format;
use alloc::sync::Arc;
use core::ops::Range;
use memfold_os::page::Page;
use memfold_os::raw::{end, warn};
use memfold_os::units::{Order, PAGE_SIZE};
use memfold_stats as stats;
use memfold_store::{CacheUse, Handle, LoadError, Store};
use memfold_swap::location::ObjectLocation;
use memfold_swap::{ReadError, Swap};

/// One block in the store.
#[derive(Copy, Clone, PartialEq, Eq)]
#[repr(C)]
pub struct BlockSlot {
    /// Its object.
    pub handle: Handle,
    /// The fingerprint of the block's bytes when it was stored.
    pub fingerprint: Fingerprint,
}

impl BlockSlot {
    /// No block.
    pub const NONE: BlockSlot = BlockSlot { handle: Handle::NONE, fingerprint: Fingerprint::NONE };
}

/// The stores of folded data: the pool, and the swap file behind it. Also the state that loads need.
pub struct Backing {
    store: Store,
    /// `None` without `--swap`.
    swap: Option<Swap>,
    contexts: ContextPool,
    fingerprints: Fingerprints,
    stats: Arc<StatsPlace>,
}

impl Backing {
    /// A store without a swap file.
    pub fn new(
        store: Store,
        contexts: ContextPool,
        fingerprints: Fingerprints,
        stats: Arc<StatsPlace>,
    ) -> Backing {
        Backing { store, swap: None, contexts, fingerprints, stats }
    }

    /// Puts a swap file behind the store. Call it before anything is folded.
    pub fn set_swap(&mut self, swap: Swap) {
        self.swap = Some(swap);
    }

    /// The compressed store.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// The swap file, if there is one.
    pub fn swap(&self) -> Option<&Swap> {
        self.swap.as_ref()
    }

    /// Makes the context that [`Backing::context_at_rest`] returns.
    pub fn prepare(&self) {
        self.contexts.prepare(&self.store);
    }

    /// Borrows codec state and buffers for one thread. Waits if all are lent.
    pub fn context(&self) -> BorrowedContext<'_> {
        self.contexts.borrow(&self.store)
    }

    /// Returns a context for the thread that serves while the engine is quiesced.
    ///
    /// # Safety
    /// - As for [`ContextPool::at_rest`].
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn context_at_rest(&self) -> &mut CodecContext {
        // SAFETY: by the caller's promise.
        unsafe { self.contexts.at_rest() }
    }

    /// Returns whether the codec can decompress only the start of a block.
    pub fn stops_early(&self) -> bool {
        self.store.codec().stops_early()
    }

    /// Returns the fingerprint of a block's bytes.
    pub fn fingerprint(&self, bytes: &[u8]) -> Fingerprint {
        self.fingerprints.of(bytes)
    }

    /// Frees a stored block, wherever it lies.
    pub fn free(&self, handle: Handle) {
        match &self.swap {
            Some(swap) if handle.as_foreign().is_some() => swap.free(handle),
            _ => self.store.free(handle),
        }
    }

    /// Writes these pages of a stored block to their places in the block at `to`. The bytes of its
    /// other pages are undefined afterwards. Ends the program if the block is damaged. Returns
    /// whether it came from the swap file.
    ///
    /// # Safety
    /// - `to` has room for a block of `order` that nothing else touches; the block is not freed
    ///   meanwhile.
    pub unsafe fn fetch_pages(
        &self,
        context: &mut CodecContext,
        slot: BlockSlot,
        order: Order,
        pages: Range<usize>,
        to: *mut Page,
    ) -> bool {
        if slot.handle.as_foreign().is_none() {
            let worker = &mut context.worker;
            // SAFETY: as the caller says.
            let outcome =
                unsafe { self.store.load_in_place(worker, slot.handle, order, pages, to.cast()) };
            self.count_part(outcome.unwrap_or_else(|e| end_damaged(&e)));
            return false;
        }
        (context.handles[0], context.fingerprints[0]) = (slot.handle, slot.fingerprint);
        // SAFETY: as the caller says.
        unsafe { self.fetch(context, order, 1, to) }
    }

    /// Writes the `count` stored blocks of `context.handles`, whose fingerprints are in
    /// `context.fingerprints`, to `to`. Ends the program if one is damaged. Returns whether any
    /// came from the swap file.
    ///
    /// # Safety
    /// - `to` has room for all of them that nothing else touches; none is freed meanwhile.
    pub unsafe fn fetch(
        &self,
        context: &mut CodecContext,
        block: Order,
        count: usize,
        to: *mut Page,
    ) -> bool {
        let mut from_file = false;
        let mut i = 0;
        while i < count {
            // SAFETY: block `i` lies within what the caller vouches for.
            let at = unsafe { to.add(i * block.pages()) };
            let handle = context.handles[i];
            i += match (&self.swap, ObjectLocation::from_handle(handle)) {
                (Some(swap), Some(place)) => {
                    from_file = true;
                    // SAFETY: as the caller says.
                    let mut read =
                        || unsafe { self.fetch_run(swap, context, i, count, place, block, at) };
                    read().or_else(|e| second_read(e, read)).unwrap_or_else(|e| {
                        end(&format!(
                            "Loading folded memory failed: {e}. The process can't continue without this \
                             data and is ended before it reads a wrong byte. {}",
                            e.remedy()
                        ))
                    })
                }
                _ => {
                    // SAFETY: as the caller says.
                    unsafe { self.store.load(&mut context.worker, handle, block, at.cast()) }
                        .unwrap_or_else(|e| end_damaged(&e));
                    1
                }
            };
        }
        stats::add(&self.stats.blocks_loaded, count as u64);
        if from_file {
            self.note_remote();
        }
        from_file
    }

    /// Writes one page of a block in the pool to `to`, for the thread that serves while the engine
    /// is quiesced. Ends the program if it is damaged.
    ///
    /// # Safety
    /// - As for [`Backing::context_at_rest`]; `to` has room for a page that nothing else touches.
    pub unsafe fn fetch_at_rest(&self, handle: Handle, order: Order, page: usize, to: *mut u8) {
        // SAFETY: by the caller's promise. Nothing is freed while the engine is quiesced.
        let outcome = unsafe {
            let worker = &mut self.context_at_rest().worker;
            self.store.load_pages(worker, handle, order, page, 1, to)
        };
        self.count_part(outcome.unwrap_or_else(|e| end_damaged(&e)));
        stats::add(&self.stats.fork_page_loads, 1);
    }

    fn count_part(&self, cache: CacheUse) {
        let s = &self.stats;
        stats::add(&s.block_cache_hits, (cache == CacheUse::Hit) as u64);
        stats::add(&s.block_cache_misses, (cache == CacheUse::Miss) as u64);
        stats::add(&s.blocks_loaded, (cache != CacheUse::Hit) as u64);
    }

    /// Counts the pages moved to the remote store, and loaded from it.
    pub fn note_remote(&self) {
        let Some(swap) = &self.swap else { return };
        let (from, to) = (swap.take_remote_counts(), &self.stats);
        for (count, to) in [
            (from.pages_out, &to.remote_out),
            (from.pages_in, &to.remote_in),
            (from.failed, &to.remote_failed),
        ] {
            if count > 0 {
                stats::add(to, count);
            }
        }
    }

    /// Reads the blocks from number `first` on that lie one behind the other in the file, with one
    /// read. Returns how many.
    ///
    /// # Safety
    /// - As for [`Backing::fetch`]; `to` is where block `first` goes.
    #[allow(clippy::too_many_arguments)]
    unsafe fn fetch_run(
        &self,
        swap: &Swap,
        context: &mut CodecContext,
        first: usize,
        count: usize,
        place: ObjectLocation,
        block: Order,
        to: *mut Page,
    ) -> Result<usize, ReadError> {
        let mut last = place;
        let mut run = 1;
        while first + run < count
            && let Some(next) = ObjectLocation::from_handle(context.handles[first + run])
            && next.is_raw == place.is_raw
            && next.start() == last.end()
            && (place.is_raw
                || ((next.slot - place.slot) as usize + next.slots()) * PAGE_SIZE
                    <= swap.packed_bytes_max())
        {
            last = next;
            run += 1;
        }
        if place.is_raw {
            // SAFETY: as the caller says.
            unsafe { swap.read_raw(place, run, block, to)? };
        } else {
            let CodecContext { worker, handles, .. } = context;
            swap.read_packed(place, last, |packed| {
                for i in 0..run {
                    let place =
                        ObjectLocation::from_handle(handles[first + i]).expect("it was one above");
                    let (fields, payload) = packed.open(place)?;
                    // SAFETY: as the caller says.
                    let decoded = unsafe {
                        self.store.import(
                            worker,
                            fields,
                            payload,
                            block,
                            to.add(i * block.pages()).cast(),
                        )
                    };
                    decoded.map_err(|_| swap.damage_at(place.slot, false))?;
                }
                Ok(())
            })?;
        }
        for i in 0..run {
            // SAFETY: the block was just written, and only this thread uses it.
            let bytes = unsafe {
                core::slice::from_raw_parts(to.add(i * block.pages()).cast(), block.bytes())
            };
            if self.fingerprint(bytes) != context.fingerprints[first + i] {
                let slot =
                    ObjectLocation::from_handle(context.handles[first + i]).map_or(0, |p| p.slot);
                return Err(swap.damage_at(slot, false));
            }
        }
        Ok(run)
    }
}

/// Reads again what was read wrongly, because a device or a file system may err once. The seal and
/// the fingerprint decide whether it is right.
#[cold]
fn second_read(
    first: ReadError,
    read: impl FnOnce() -> Result<usize, ReadError>,
) -> Result<usize, ReadError> {
    if !first.is_damage() {
        return Err(first);
    }
    let outcome = read();
    if outcome.is_ok() {
        warn(&[
            "memfold: warning: A second read found the right bytes after this: ",
            &format!("{first}"),
            ". No data is lost. Check the disk of --swap and the memory of this machine\n",
        ]);
    }
    outcome
}

/// Ends the program, because its data is damaged.
pub fn end_damaged(error: &LoadError) -> ! {
    end(&format!(
        "Stored data is damaged: {error}. The process is ended before it reads a wrong byte. Test the \
         memory of this machine; if this happens again, report it"
    ))
}
