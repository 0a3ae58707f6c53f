//! The store: saves folios and returns blocks.
pub(crate) mod config;
pub(crate) mod error;
pub(crate) mod fault_injection;
pub(crate) mod decompressed_blocks;
pub(crate) mod stats;
pub(crate) mod worker;
pub(crate) mod training;
pub(crate) mod cold;
pub(crate) mod load;
pub(crate) mod export;
pub(crate) mod recompress;
pub(crate) mod save;
pub(crate) mod offload;
#[cfg(test)]
pub(crate) mod tests;

use crate::block::dictionaries::DictionarySet;
use crate::codec::CodecSpec;
use crate::dictionary::sampler::Sampler;
use crate::handle::{Handle, INDEX_BITS};
use crate::pool::Pool;
use crate::pool::area::{AreaTable, ZoneArea};
use crate::pool::arena::SpanArena;
use crate::pool::budget::PoolBudget;
use crate::pool::entries::EntryTable;
use crate::pool::entry::{ObjectEntry, SPAN_BITS};
use crate::pool::mark::{ObjectMark, SweepHand};
use crate::pool::span::PoolSpan;
use crate::store::config::{StoreConfig, StoreError};
use crate::store::decompressed_blocks::DecompressedBlocks;
use crate::store::fault_injection::FaultPlan;
use crate::store::stats::{ClassStats, Counters, StoreStats};
use crate::store::worker::CodecWorker;
use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use memfold_os::memory::zone::Zone;
use memfold_os::sync::Mutex;
use memfold_os::sync::atomic::{AtomicBool, AtomicU16, AtomicUsize, Ordering::*};
use memfold_os::units::{Order, PAGE_SIZE};

/// Address space for the spans of all pools together, and the most of one pool.
const DATA_BYTES: usize = 16 << 40;
const POOL_DATA_MAX: usize = 1 << 40;
/// Least address space of a pool.
const POOL_DATA_MIN: usize = 64 << 20;

/// Compressed blocks behind handles. Any number of threads may call all methods at once.
///
/// Held bytes = span bytes of all pools + their metadata. Every object belongs to the one handle
/// that `save` returned for it. The caller never frees a handle while it is being loaded, and frees
/// it once.
///
/// Nothing here allocates after [`Store::new`] and [`Store::worker`], except [`Store::check`] and
/// error texts.
pub struct Store {
    pub(crate) pools: Box<[Pool]>,
    pub(crate) budget: Arc<PoolBudget>,
    pub(crate) block_order: Order,
    pub(crate) verify: AtomicBool,
    pub(crate) refuse_incompressible: AtomicBool,
    pub(crate) faults: FaultPlan,
    pub(crate) cache: DecompressedBlocks,
    pub(crate) counters: Box<[Counters]>,
    pub(crate) cans: Arc<DictionarySet>,
    pub(crate) sampler: Sampler,
    codec: Mutex<CodecSpec>,
    workers: AtomicUsize,
    /// Turns of [`Store::tidy`]: each begins with another pool.
    tidied: AtomicUsize,
    /// The clock of [`Store::tick`].
    pub(crate) clock: AtomicU16,
    pub(crate) shrinker: Mutex<SweepHand>,
    pub(crate) recompressor: Mutex<SweepHand>,
}

/// The guards of [`Store::past_limit`].
pub struct PastLimit<'a>(&'a PoolBudget);

impl Drop for PastLimit<'_> {
    fn drop(&mut self) {
        self.0.lower();
    }
}

impl Store {
    /// Makes an empty store. Reserves address space, takes next to no memory.
    ///
    /// # Errors
    /// A setting out of range, or no address space; nothing stays behind then.
    pub fn new(config: &StoreConfig) -> Result<Store, StoreError> {
        config.check()?;
        let budget = Arc::new(PoolBudget::new(config.pool_bytes_max, config.accept_percent));
        let cache =
            DecompressedBlocks::new(config.cached_blocks, config.block_order, budget.clone());
        Ok(Store {
            pools: make_pools(config.pools, &budget)?,
            cans: Arc::new(DictionarySet::new(budget.clone())),
            sampler: Sampler::new(config.block_order),
            budget,
            block_order: config.block_order,
            verify: AtomicBool::new(config.verify),
            refuse_incompressible: AtomicBool::new(config.refuse_incompressible),
            faults: FaultPlan::new(),
            cache,
            counters: stats::groups(),
            codec: Mutex::new(config.codec),
            workers: AtomicUsize::new(0),
            tidied: AtomicUsize::new(0),
            clock: AtomicU16::new(0),
            shrinker: Mutex::new(SweepHand::default()),
            recompressor: Mutex::new(SweepHand::default()),
        })
    }

    /// Makes a worker for the store's present codec. Allocates everything that the worker will ever
    /// need.
    pub fn worker(&self) -> CodecWorker {
        self.worker_for(self.codec())
    }

    /// Makes a worker for another codec, for example to recompress.
    pub fn worker_for(&self, spec: CodecSpec) -> CodecWorker {
        CodecWorker::new(
            spec,
            self.block_order,
            self.workers.fetch_add(1, Relaxed) % stats::GROUPS,
            self.cans.clone(),
        )
    }

    /// Returns the codec of workers made from now on.
    pub fn codec(&self) -> CodecSpec {
        *self.codec.lock()
    }

    /// Sets the codec of workers made from now on. Objects keep theirs. Existing workers keep
    /// theirs too, because a save must not allocate: their owners change it with
    /// [`CodecWorker::set_codec`].
    pub fn set_codec(&self, spec: CodecSpec) {
        *self.codec.lock() = spec;
    }

    /// Switches verify mode.
    pub fn set_verify(&self, on: bool) {
        self.verify.store(on, Relaxed);
    }

    /// Sets whether folios whose blocks mostly don't compress are refused.
    pub fn set_refuse_incompressible(&self, on: bool) {
        self.refuse_incompressible.store(on, Relaxed);
    }

    /// Returns the value of [`Store::set_refuse_incompressible`].
    pub fn refuses_incompressible(&self) -> bool {
        self.refuse_incompressible.load(Relaxed)
    }

    /// Sets the limit for the memory of all pools, in bytes; 0 for none. Memory above it stays.
    pub fn set_pool_bytes_max(&self, bytes: u64) {
        self.budget.set_max(bytes);
    }

    /// Sets the share of the limit below which saves are accepted again after one was refused, in
    /// percent; above 100 is 100.
    pub fn set_accept_percent(&self, percent: u8) {
        self.budget.set_accept(percent.min(100));
    }

    /// Returns the limit for the memory of all pools, in bytes; 0 for none.
    pub fn pool_bytes_max(&self) -> u64 {
        self.budget.max()
    }

    /// Lifts the limit for the memory of the pools while the guard lives, for saves that must not
    /// be refused: those that replace what is stored already.
    pub fn past_limit(&self) -> PastLimit<'_> {
        self.budget.lift();
        PastLimit(&self.budget)
    }

    /// Returns whether saves are refused now because the pools are full (see
    /// [`StoreConfig::accept_percent`]).
    pub fn is_full(&self) -> bool {
        !self.budget.accepts()
    }

    /// Returns the order of the blocks of a folio of order `folio`.
    pub fn block_order(&self, folio: Order) -> Order {
        self.block_order.min(folio)
    }

    /// Returns the number of blocks of a folio of order `folio`.
    pub fn blocks(&self, folio: Order) -> usize {
        folio.pages() / self.block_order(folio).pages()
    }

    /// Returns the bytes of memory that the pools hold, with metadata. One atomic load.
    pub fn pool_bytes(&self) -> u64 {
        self.budget.held()
    }

    /// Repairs the store in a child of fork. Another thread of the parent may have been loading a
    /// block at the fork. Its load ends, but its pin remains, which keeps one span from being
    /// packed.
    ///
    /// # Safety
    /// - The caller is the only thread of this process that uses the store, and the parent changed
    ///   nothing in it.
    pub unsafe fn reset_in_child(&self) {
        // SAFETY: the caller promises to be the only user of the store.
        unsafe { self.cache.reset_in_child() };
    }

    /// Frees a block. `NONE` and `ZERO` are allowed and do nothing.
    pub fn free(&self, handle: Handle) {
        let Some(name) = handle.object() else { return };
        self.cache.forget(handle);
        if let Some(pool) = self.pools.get(name.pool as usize) {
            pool.free(name);
        }
    }

    /// Frees many blocks.
    pub fn free_many(&self, handles: &[Handle]) {
        handles.iter().for_each(|h| self.free(*h));
    }

    /// Returns at least `bytes` bytes of pool memory to the kernel if possible: empty spans that
    /// wait for reuse, then sparse spans whose objects fit into others. Returns the bytes. Saves,
    /// loads and frees go on meanwhile.
    pub fn compact(&self, bytes: u64) -> u64 {
        let mut bytes_released = 0;
        for pool in &self.pools {
            if bytes_released >= bytes {
                break;
            }
            bytes_released += pool.compact(bytes - bytes_released);
        }
        bytes_released
    }

    /// Does one bounded step of compaction, for an idle background thread: packs size classes with
    /// more than an eighth of their slots free. Takes tens of microseconds. Returns the bytes of
    /// the spans emptied; 0 if nothing is sparse.
    pub fn tidy(&self) -> u64 {
        let first = self.tidied.fetch_add(1, Relaxed);
        let pools = (0..self.pools.len()).map(|i| &self.pools[(first + i) % self.pools.len()]);
        pools.map(Pool::tidy).find(|bytes| *bytes > 0).unwrap_or(0)
    }

    /// Returns half of the memory that empty spans may keep for reuse to the kernel, if more is
    /// kept. For a background thread, to spare the frees that work. Returns the bytes.
    pub fn trim(&self) -> u64 {
        self.pools.iter().map(|pool| pool.arena.trim()).sum()
    }

    /// Returns the memory of all empty spans to the kernel. Returns the bytes.
    pub(crate) fn release_warm(&self) -> u64 {
        self.pools.iter().map(|pool| pool.arena.trim_to(0)).sum()
    }

    /// Returns the faults for tests. None is armed in a new store.
    pub fn faults(&self) -> &FaultPlan {
        &self.faults
    }

    /// Returns the counters.
    pub fn stats(&self) -> StoreStats {
        let (held_bytes, peak) = (self.budget.held(), self.budget.peak());
        let mut stats = StoreStats::gather(&self.counters, &self.pools, held_bytes, peak);
        stats.metadata_bytes += self.cache.held_bytes();
        stats
    }

    /// Calls `each` with the counters of every size class in use, smallest first.
    pub fn each_class(&self, each: impl FnMut(ClassStats)) {
        stats::each_class(&self.pools, each);
    }

    /// Verifies every pool: each handle, class list, span, sum, and the checksum of each object.
    /// Holds all locks and reads all payloads, so it is for tests and debug builds. Allocates.
    ///
    /// # Errors
    /// Says what does not hold, and where.
    pub fn check(&self) -> Result<(), String> {
        let _slots = self.cache.freeze();
        let pools_frozen: Vec<_> = self.pools.iter().map(Pool::freeze).collect();
        for (number, pool) in pools_frozen.iter().enumerate() {
            pool.check().map_err(|e| format!("pool {number}: {e}"))?;
        }
        let pools = pools_frozen.iter().map(|p| p.held()).sum::<u64>();
        let held_bytes = pools + self.cans.bytes() + self.cache.held_bytes();
        if held_bytes != self.budget.held() {
            return Err(format!(
                "pools, dictionaries and cached blocks hold {held_bytes} bytes but {} are counted",
                self.budget.held()
            ));
        }
        Ok(())
    }

    /// Returns the pool of a key: always the same one.
    pub(crate) fn pool_of(&self, key: u64) -> &Pool {
        let spread = key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        &self.pools[((spread * self.pools.len() as u64) >> 32) as usize]
    }
}

#[cfg(test)]
impl Store {
    /// Returns the first byte and the length of an object, with its owner's note.
    pub(crate) fn object_bytes(&self, handle: Handle) -> (*mut u8, usize) {
        let name = handle.object().expect("a pool object");
        let pool = &self.pools[name.pool as usize];
        let place = pool
            .entries
            .get(name.index)
            .expect("used")
            .snapshot(name.index)
            .expect("intact")
            .place();
        let span = pool.arena.span(place.span).expect("in use");
        let class = &crate::pool::size_class::CLASSES[span.class().expect("in use")];
        let len = pool.entries.get(name.index).expect("used").header().len as usize;
        (pool.arena.slot(span, class, place.slot), class.payload_offset() + len)
    }

    /// Returns the resident bytes of pool memory, as the kernel counts them.
    pub(crate) fn resident_bytes(&self) -> u64 {
        use std::os::unix::fs::FileExt;
        let pagemap = std::fs::File::open("/proc/self/pagemap").expect("procfs");
        let mut pages = 0;
        for pool in &self.pools {
            for (start, bytes) in pool.extents() {
                let mut entries = vec![0; bytes / PAGE_SIZE * 8];
                pagemap
                    .read_exact_at(&mut entries, (start / PAGE_SIZE * 8) as u64)
                    .expect("pagemap");
                pages += entries.chunks(8).filter(|e| e[7] & 0x80 != 0).count();
            }
        }
        (pages * PAGE_SIZE) as u64
    }
}

/// Address space of one pool.
#[derive(Copy, Clone)]
struct PoolLayout {
    entries: usize,
    marks: usize,
    spans: usize,
    data: usize,
}

impl PoolLayout {
    fn of(data: usize) -> PoolLayout {
        // Room for objects of 256 bytes on average; smaller ones only if they are few.
        let count = (data / 256).min(1 << INDEX_BITS);
        let (entries, marks) = (count * size_of::<ObjectEntry>(), count * size_of::<ObjectMark>());
        let spans = (data / PAGE_SIZE).min(1 << SPAN_BITS) * size_of::<PoolSpan>();
        PoolLayout { entries, marks, spans, data }
    }

    fn bytes(&self) -> usize {
        self.entries + self.marks + self.spans + self.data
    }
}

/// Reserves one zone for all pools, a smaller one where address space is scarce: at most half of
/// the free space, because others need some.
fn make_pools(count: usize, budget: &Arc<PoolBudget>) -> Result<Box<[Pool]>, StoreError> {
    let mut layout = PoolLayout::of((DATA_BYTES / count.next_power_of_two()).min(POOL_DATA_MAX));
    let zone = loop {
        let len = layout.bytes() * count;
        match Zone::reserve_growing(2 * len, PAGE_SIZE).and_then(|twice| {
            drop(twice);
            Zone::reserve_growing(len, PAGE_SIZE)
        }) {
            Ok(zone) => break Arc::new(zone),
            Err(error) if layout.data / 2 < POOL_DATA_MIN => return Err(StoreError::Memory(error)),
            Err(_) => layout = PoolLayout::of(layout.data / 2),
        }
    };
    let pool = |number: usize| {
        let start = number * layout.bytes();
        let entries = AreaTable::new(ZoneArea::new(&zone, start, layout.entries));
        let marks = AreaTable::new(ZoneArea::new(&zone, start + layout.entries, layout.marks));
        let start = start + layout.entries + layout.marks;
        let spans = AreaTable::new(ZoneArea::new(&zone, start, layout.spans));
        let data = ZoneArea::new(&zone, start + layout.spans, layout.data);
        let arena = SpanArena::new(data, spans, budget.clone(), count);
        Pool::new(number as u8, arena, EntryTable::new(entries, budget.clone()), marks)
    };
    Ok((0..count).map(pool).collect())
}
