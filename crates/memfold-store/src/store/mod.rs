//! The store: folios in, blocks out.
pub(crate) mod config;
pub(crate) mod error;
pub(crate) mod fault_injection;
pub(crate) mod recent_blocks;
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

use crate::block::dictionaries::Cans;
use crate::codec::CodecSpec;
use crate::dictionary::sampler::Sampler;
use crate::handle::{Handle, INDEX_BITS};
use crate::pool::Pool;
use crate::pool::area::{Area, Table};
use crate::pool::arena::Arena;
use crate::pool::budget::Budget;
use crate::pool::entries::Entries;
use crate::pool::entry::{Entry, SPAN_BITS};
use crate::pool::mark::{Hand, Mark};
use crate::pool::span::Span;
use crate::store::config::{StoreConfig, StoreError};
use crate::store::fault_injection::FaultPlan;
use crate::store::recent_blocks::RecentBlocks;
use crate::store::stats::{ClassStats, Counters, StoreStats};
use crate::store::worker::Worker;
use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use memfold_sys::memory::zone::Zone;
use memfold_sys::sync::Mutex;
use memfold_sys::sync::atomic::{AtomicBool, AtomicU16, AtomicUsize, Ordering::*};
use memfold_sys::units::{Order, PAGE_SIZE};

/// Address space for the spans of all pools together, and of one at most.
const DATA_BYTES: usize = 16 << 40;
const POOL_DATA_MAX: usize = 1 << 40;
/// With less address space than this a pool is not made.
const POOL_DATA_MIN: usize = 64 << 20;

/// Compressed blocks behind handles. All methods may be called from any number of threads at once.
///
/// Held bytes = span bytes of all pools + their metadata. Every object belongs to the one handle
/// that `save` gave for it; the caller keeps these apart: a handle is not freed while it is being
/// loaded, and freed once.
///
/// Nothing here allocates after [`Store::new`] and [`Store::worker`], except [`Store::check`] and
/// errors' texts.
pub struct Store {
    pub(crate) pools: Box<[Pool]>,
    pub(crate) budget: Arc<Budget>,
    pub(crate) block_order: Order,
    pub(crate) verify: AtomicBool,
    pub(crate) refuse_incompressible: AtomicBool,
    pub(crate) faults: FaultPlan,
    pub(crate) recent: RecentBlocks,
    pub(crate) counters: Box<[Counters]>,
    pub(crate) cans: Arc<Cans>,
    pub(crate) sampler: Sampler,
    codec: Mutex<CodecSpec>,
    workers: AtomicUsize,
    /// Turns of [`Store::tidy`]: each begins with another pool.
    tidied: AtomicUsize,
    /// See [`Store::tick`].
    pub(crate) clock: AtomicU16,
    pub(crate) shrinker: Mutex<Hand>,
    pub(crate) recompressor: Mutex<Hand>,
}

/// See [`Store::past_limit`].
pub struct PastLimit<'a>(&'a Budget);

impl Drop for PastLimit<'_> {
    fn drop(&mut self) {
        self.0.lower();
    }
}

impl Store {
    /// An empty store. Reserves address space, takes next to no memory.
    ///
    /// # Errors
    /// A setting out of range, or no address space; nothing stays behind then.
    pub fn new(config: &StoreConfig) -> Result<Store, StoreError> {
        config.check()?;
        let budget = Arc::new(Budget::new(config.pool_bytes_max, config.accept_percent));
        Ok(Store {
            pools: make_pools(config.pools, &budget)?,
            cans: Arc::new(Cans::new(budget.clone())),
            sampler: Sampler::new(config.block_order),
            budget,
            block_order: config.block_order,
            verify: AtomicBool::new(config.verify),
            refuse_incompressible: AtomicBool::new(config.refuse_incompressible),
            faults: FaultPlan::new(),
            recent: RecentBlocks::new(config.recent_blocks, config.block_order),
            counters: stats::groups(),
            codec: Mutex::new(config.codec),
            workers: AtomicUsize::new(0),
            tidied: AtomicUsize::new(0),
            clock: AtomicU16::new(0),
            shrinker: Mutex::new(Hand::default()),
            recompressor: Mutex::new(Hand::default()),
        })
    }

    /// A worker for the store's present codec. Allocates all that the worker will ever need.
    pub fn worker(&self) -> Worker {
        self.worker_for(self.codec())
    }

    /// A worker for another codec, for example to recompress.
    pub fn worker_for(&self, spec: CodecSpec) -> Worker {
        Worker::new(
            spec,
            self.block_order,
            self.workers.fetch_add(1, Relaxed) % stats::GROUPS,
            self.cans.clone(),
        )
    }

    /// The codec of workers made from now on.
    pub fn codec(&self) -> CodecSpec {
        *self.codec.lock()
    }

    /// Changes the codec of workers made from now on. Objects keep theirs. Workers that exist go on
    /// with theirs too, as a save must not allocate: whoever owns one gives it the new codec with
    /// [`Worker::set_codec`].
    pub fn set_codec(&self, spec: CodecSpec) {
        *self.codec.lock() = spec;
    }

    /// Switches verify mode.
    pub fn set_verify(&self, on: bool) {
        self.verify.store(on, Relaxed);
    }

    /// Switches whether folios most of whose blocks don't shrink are refused.
    pub fn set_refuse_incompressible(&self, on: bool) {
        self.refuse_incompressible.store(on, Relaxed);
    }

    /// What [`Store::set_refuse_incompressible`] was told last.
    pub fn refuses_incompressible(&self) -> bool {
        self.refuse_incompressible.load(Relaxed)
    }

    /// Changes the limit for the memory of all pools, in bytes; 0 for none. What is held above it
    /// stays.
    pub fn set_pool_bytes_max(&self, bytes: u64) {
        self.budget.set_max(bytes);
    }

    /// Changes the share of the limit at which saves are taken again after one was refused, in
    /// percent; above 100 is 100.
    pub fn set_accept_percent(&self, percent: u8) {
        self.budget.set_accept(percent.min(100));
    }

    /// The limit for the memory of all pools, in bytes; 0 for none.
    pub fn pool_bytes_max(&self) -> u64 {
        self.budget.max()
    }

    /// Lifts the limit for the memory of the pools while the guard lives, for saves that must not
    /// be refused: those that take the place of what is stored already.
    pub fn past_limit(&self) -> PastLimit<'_> {
        self.budget.lift();
        PastLimit(&self.budget)
    }

    /// Whether saves are refused now because the pools are full (see
    /// [`StoreConfig::accept_percent`]).
    pub fn is_full(&self) -> bool {
        !self.budget.accepts()
    }

    /// The order of the blocks of a folio of order `folio`.
    pub fn block_order(&self, folio: Order) -> Order {
        self.block_order.min(folio)
    }

    /// How many blocks a folio of order `folio` has.
    pub fn blocks(&self, folio: Order) -> usize {
        folio.pages() / self.block_order(folio).pages()
    }

    /// Bytes of memory that the pools hold, metadata included. One atomic load.
    pub fn pool_bytes(&self) -> u64 {
        self.budget.held()
    }

    /// In a child of fork, of which another thread of the parent may have been loading a block when
    /// the copy was made: what that had begun ends, but for its pin, which keeps one span from
    /// being packed.
    ///
    /// # Safety
    /// - The caller is the only thread of this process that uses the store, and the parent changed
    ///   nothing in it.
    pub unsafe fn reset_in_child(&self) {
        // SAFETY: by the caller's promise.
        unsafe { self.recent.reset_in_child() };
    }

    /// Frees a block. `NONE` and `ZERO` are allowed and do nothing.
    pub fn free(&self, handle: Handle) {
        let Some(name) = handle.object() else { return };
        self.recent.forget(handle);
        if let Some(pool) = self.pools.get(name.pool as usize) {
            pool.free(name);
        }
    }

    /// Frees many blocks.
    pub fn free_many(&self, handles: &[Handle]) {
        handles.iter().for_each(|h| self.free(*h));
    }

    /// Gives at least `bytes` bytes of pool memory back to the kernel if that many can be had:
    /// emptied spans that wait for reuse, then sparse spans whose objects fit into others. Returns
    /// the bytes given back. Saves, loads and frees go on meanwhile.
    pub fn compact(&self, bytes: u64) -> u64 {
        let mut released = 0;
        for pool in &self.pools {
            if released >= bytes {
                break;
            }
            released += pool.compact(bytes - released);
        }
        released
    }

    /// One bounded step of compaction, for a background thread with nothing better to do: size
    /// classes with more than an eighth of their slots free are packed. Takes tens of microseconds.
    /// Returns the bytes of the spans emptied; 0: nothing is sparse.
    pub fn tidy(&self) -> u64 {
        let first = self.tidied.fetch_add(1, Relaxed);
        let pools = (0..self.pools.len()).map(|i| &self.pools[(first + i) % self.pools.len()]);
        pools.map(Pool::tidy).find(|emptied| *emptied > 0).unwrap_or(0)
    }

    /// Gives half of the memory that emptied spans may keep for reuse back to the kernel, if more
    /// is kept. For a background thread, to spare the frees that work. Returns the bytes given
    /// back.
    pub fn trim(&self) -> u64 {
        self.pools.iter().map(|pool| pool.arena.trim()).sum()
    }

    /// Gives the memory of all emptied spans back to the kernel. Returns the bytes given back.
    pub(crate) fn release_warm(&self) -> u64 {
        self.pools.iter().map(|pool| pool.arena.trim_to(0)).sum()
    }

    /// Faults on purpose, for tests. None is armed in a new store.
    pub fn faults(&self) -> &FaultPlan {
        &self.faults
    }

    /// Counters and figures.
    pub fn stats(&self) -> StoreStats {
        StoreStats::gather(&self.counters, &self.pools, self.budget.held(), self.budget.peak())
    }

    /// Calls `each` with the figures of every size class in use, smallest first.
    pub fn each_class(&self, each: impl FnMut(ClassStats)) {
        stats::each_class(&self.pools, each);
    }

    /// Verifies every pool: each handle, class list, span, sum, and the checksum of each object.
    /// Holds all locks and reads all payloads, so it is for tests and debug builds. Allocates.
    ///
    /// # Errors
    /// Says what does not hold, and where.
    pub fn check(&self) -> Result<(), String> {
        let frozen: Vec<_> = self.pools.iter().map(Pool::freeze).collect();
        for (number, pool) in frozen.iter().enumerate() {
            pool.check().map_err(|e| format!("pool {number}: {e}"))?;
        }
        let held = frozen.iter().map(|p| p.held()).sum::<u64>() + self.cans.bytes();
        if held != self.budget.held() {
            return Err(format!(
                "pools and dictionaries hold {held} bytes but {} are counted",
                self.budget.held()
            ));
        }
        Ok(())
    }

    /// The pool of a key: always the same one.
    pub(crate) fn pool_of(&self, key: u64) -> &Pool {
        let spread = key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        &self.pools[((spread * self.pools.len() as u64) >> 32) as usize]
    }
}

#[cfg(test)]
impl Store {
    /// The first byte and the length of an object, its owner's note included.
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

    /// Bytes of pool memory that the kernel has given us, as it counts them itself, in all that was
    /// ever used.
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
struct Layout {
    entries: usize,
    marks: usize,
    spans: usize,
    data: usize,
}

impl Layout {
    fn of(data: usize) -> Layout {
        // Room for objects of 256 bytes on average; smaller ones only if they are few.
        let count = (data / 256).min(1 << INDEX_BITS);
        let (entries, marks) = (count * size_of::<Entry>(), count * size_of::<Mark>());
        let spans = (data / PAGE_SIZE).min(1 << SPAN_BITS) * size_of::<Span>();
        Layout { entries, marks, spans, data }
    }

    fn bytes(&self) -> usize {
        self.entries + self.marks + self.spans + self.data
    }
}

/// Reserves one zone for all pools, smaller ones where address space is scarce: at most half of
/// what there is, as others need some.
fn make_pools(count: usize, budget: &Arc<Budget>) -> Result<Box<[Pool]>, StoreError> {
    let mut layout = Layout::of((DATA_BYTES / count.next_power_of_two()).min(POOL_DATA_MAX));
    let zone = loop {
        let len = layout.bytes() * count;
        match Zone::reserve_growing(2 * len, PAGE_SIZE).and_then(|twice| {
            drop(twice);
            Zone::reserve_growing(len, PAGE_SIZE)
        }) {
            Ok(zone) => break Arc::new(zone),
            Err(error) if layout.data / 2 < POOL_DATA_MIN => return Err(StoreError::Memory(error)),
            Err(_) => layout = Layout::of(layout.data / 2),
        }
    };
    let pool = |number: usize| {
        let start = number * layout.bytes();
        let entries = Table::new(Area::new(&zone, start, layout.entries));
        let marks = Table::new(Area::new(&zone, start + layout.entries, layout.marks));
        let start = start + layout.entries + layout.marks;
        let spans = Table::new(Area::new(&zone, start, layout.spans));
        let data = Area::new(&zone, start + layout.spans, layout.data);
        let arena = Arena::new(data, spans, budget.clone(), count);
        Pool::new(number as u8, arena, Entries::new(entries, budget.clone()), marks)
    };
    Ok((0..count).map(pool).collect())
}
