//! The pager: what fault path and reclaim path share.
use crate::around::Around;
use crate::busy::Busy;
use crate::changes::Changes;
use crate::config::{Canned, Config, Delivery, OnFull, WORKABLE_MIN_BYTES};
use crate::context::Contexts;
use crate::fingerprint::Fingerprints;
use crate::folio::{FolioId, Folios, State};
use crate::frames::Frames;
use crate::gates::Gates;
use crate::index::{Index, ShardGuard, Shards};
use crate::lands::Lands;
use crate::lru::{List, Lru};
use crate::queue::Queue;
use crate::reads::{READERS, Reads};
use crate::rest::Rest;
use crate::stats::{self, Stats};
use crate::stream::Streams;
use crate::swap::{Bounds, Swap};
use alloc::boxed::Box;
use alloc::string::{String, ToString};
use core::ops::Deref;
use core::sync::atomic::AtomicPtr;
use core::time::Duration;
use memfold_store::{CodecSpec, DICTIONARY_FILE_BYTES_MAX, Dictionary, Handle, SoftwarePool, Store, StoreConfig};
use memfold_sys::disk::Disk;
use memfold_sys::remote::{Remote, SocketRemote};
use memfold_sys::space::Space;
use memfold_sys::swapfile::{FileDisk, Options};
use memfold_sys::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use memfold_sys::thread::now_ns;
use memfold_sys::units::{MAX_BYTES, Order, PAGE_SHIFT, PAGE_SIZE};
use memfold_sys::zone::Zone;

/// There is always this much room for what faults bring, bytes; of a smaller share of the limit of many processes half, but no less
/// than the least.
const FLOOR_BYTES: u64 = WORKABLE_MIN_BYTES / 2;
const FLOOR_LEAST_BYTES: u64 = 512 << 10;
/// One part in this many of the bounds is kept for that where there is less to be had.
const RESERVE_SHARE: u64 = 8;
/// Folios that could not leave are tried again when none was refused for this long, nanoseconds.
const REST_NS: u64 = 50_000_000;
/// Blocks that stay decompressed while single pages are asked for: see `copied.rs`.
const RECENT_BLOCKS: usize = 4;

/// Figures of an engine: its own, or in memory that others read.
pub enum StatsPlace {
    /// The engine's own.
    Own(Box<Stats>),
    /// Shared with whoever made the place.
    Shared(AtomicPtr<Stats>),
}

impl StatsPlace {
    /// Figures that live in memory that others read.
    pub fn shared(stats: &'static Stats) -> StatsPlace {
        StatsPlace::Shared(AtomicPtr::new(stats as *const Stats as *mut Stats))
    }
}

impl Deref for StatsPlace {
    type Target = Stats;
    fn deref(&self) -> &Stats {
        match self {
            StatsPlace::Own(stats) => stats,
            // SAFETY: it comes from a `&'static`.
            StatsPlace::Shared(stats) => unsafe { &*stats.load(Relaxed) },
        }
    }
}

/// One engine.
///
/// Lock order: `areas` (two locks, see `lands.rs`) -> a shard -> the locks inside lru, frames, slabs, store. At most one shard
/// at a time. No lock is held while bytes are compressed or decompressed, except one of `areas` for reading: so who writes
/// both meets no folio that is `Loading` or `Saving`.
///
/// Equations, while nobody works: `mapped + frames.populated` is the uncompressed memory held; every `Cached` folio is on
/// `Cooling` or `Dirty`, every `Resident` one on `Active`, `Inactive` or `Refused`, every other one on no list.
pub struct Pager {
    pub(crate) config: Config,
    pub(crate) store: Store,
    /// Behind the pool; `None` without `--swap`.
    pub(crate) swap: Option<Swap>,
    pub(crate) space: Box<dyn Space>,
    pub(crate) has_move: bool,
    pub(crate) has_events: bool,
    pub(crate) areas: Lands,
    pub(crate) shards: Shards,
    pub(crate) index: Index,
    pub(crate) folios: Folios,
    pub(crate) fingerprints: Fingerprints,
    pub(crate) lru: Lru,
    pub(crate) frames: Frames,
    pub(crate) streams: Streams,
    pub(crate) around: Around,
    pub(crate) contexts: Contexts,
    pub(crate) recompress: Option<CodecSpec>,
    pub(crate) queue: Queue,
    /// Faults that need the swap file or the remote store.
    pub(crate) reads: Reads,
    pub(crate) mapped: AtomicU64,
    pub(crate) clean_pages: AtomicU64,
    pub(crate) folded_pages: AtomicU64,
    pub(crate) clock: AtomicU64,
    pub(crate) outside_bytes: AtomicU64,
    pub(crate) limit_now: AtomicU64,
    pub(crate) resident_now: AtomicU64,
    /// When a folio was last refused, nanoseconds.
    refused_at: AtomicU64,
    pub(crate) frozen: AtomicBool,
    /// Children of fork get what is under management.
    pub(crate) inherited: AtomicBool,
    pub(crate) changes: Changes,
    /// Where a fork stops the engine's threads.
    pub(crate) gates: Gates,
    pub(crate) rest: Rest,
    pub(crate) scratch: Zone,
    pub(crate) busy: Busy,
    pub(crate) stats: StatsPlace,
    cpus: usize,
}

/// What an engine is made of, besides its settings.
pub struct Parts {
    /// The address space.
    pub space: Box<dyn Space>,
    /// It can move pages.
    pub has_move: bool,
    /// Its own discards are reported as events, so only background threads may make them.
    pub has_events: bool,
    /// Where to count.
    pub stats: StatsPlace,
    /// CPUs that the process may use.
    pub cpus: usize,
    /// The swap device where the settings ask for one; by default a file where they say.
    pub disk: Option<Box<dyn Disk>>,
    /// The remote store behind it where the settings ask for one; by default the service whose socket they name.
    pub remote: Option<Box<dyn Remote>>,
}

fn open_disk(path: &str) -> Result<Box<dyn Disk>, String> {
    let disk = FileDisk::open(path, Options::default()).map_err(|e| alloc::format!("--swap: {e}"))?;
    Ok(Box::new(disk))
}

fn open_remote(config: &Config) -> Result<Option<Box<dyn Remote>>, String> {
    let Some(url) = &config.remote else { return Ok(None) };
    let no_service = || "--remote: no service: a library starts one (memfold_remote::Service)".to_string();
    let socket = config.remote_socket.as_deref().ok_or_else(no_service)?;
    let timeout = Duration::from_secs(config.remote_timeout_s as u64);
    let remote = SocketRemote::new(socket, url, timeout).map_err(|e| alloc::format!("--remote: {e}"))?;
    Ok(Some(Box::new(remote)))
}

impl Pager {
    /// An engine without areas. The caller registers the frames' zone ([`Pager::frames_zone`]) and starts threads.
    ///
    /// # Errors
    /// Settings that don't fit together, an unknown codec, or no address space: one line that says which.
    pub fn new(config: Config, parts: Parts) -> Result<Pager, String> {
        config.check().map_err(|e| e.to_string())?;
        let sc = StoreConfig {
            codec: memfold_store::CodecSpec::parse(&config.codec).map_err(|e| e.to_string())?,
            block_order: config.block_order,
            pools: config.pool_count(parts.cpus),
            pool_bytes_max: config.max_pool_bytes.unwrap_or(0),
            accept_percent: config.accept_percent as u8,
            verify: config.verify,
            recent_blocks: RECENT_BLOCKS,
            ..StoreConfig::default()
        };
        let store = Store::new(&sc).map_err(|e| e.to_string())?;
        set_up_dictionaries(&store, &config.canned)?;
        let space_err = |e| alloc::format!("no address space for the engine: {e}");
        let frame_bytes = 2 * config.resident_max_bytes() as usize + (64 << 20);
        let readers = if config.swap.is_some() { READERS } else { 0 };
        let count = config.worker_count(parts.cpus) + 2 * parts.cpus + readers + 4;
        let codecs = match config.batch {
            0 | 1 => None,
            _ => {
                let threads = (parts.cpus - 1).clamp(1, 63);
                let pool = SoftwarePool::start(sc.codec, config.block_order.bytes(), threads);
                Some(pool.map_err(|e| alloc::format!("starting threads that compress: {e}"))?)
            }
        };
        let contexts = Contexts::new(count, config.block_order, codecs, config.batch);
        let recompress = config.recompress.as_deref().map(memfold_store::CodecSpec::parse).transpose();
        let recompress = recompress.map_err(|e| alloc::format!("--recompress: {e}"))?;
        let mut pager = Pager {
            store,
            swap: None,
            has_move: parts.has_move && config.use_move,
            has_events: parts.has_events,
            space: parts.space,
            areas: Lands::new(),
            shards: Shards::new(config.shard_bytes),
            index: Index::new().map_err(space_err)?,
            folios: Folios::new(config.block_order).map_err(space_err)?,
            fingerprints: Fingerprints::new().map_err(|e| alloc::format!("no random bytes from the kernel: {e}"))?,
            lru: Lru::new().map_err(space_err)?,
            frames: Frames::new(frame_bytes, 4).map_err(space_err)?,
            streams: Streams::new(
                config.block_order,
                if config.readahead { config.folio_order } else { config.block_order },
            ),
            around: Around::new(config.block_order),
            contexts,
            recompress,
            queue: Queue::new(),
            reads: Reads::default(),
            mapped: AtomicU64::new(0),
            clean_pages: AtomicU64::new(0),
            folded_pages: AtomicU64::new(0),
            clock: AtomicU64::new(0),
            outside_bytes: AtomicU64::new(0),
            limit_now: AtomicU64::new(config.limit_bytes.unwrap_or(u64::MAX)),
            resident_now: AtomicU64::new(config.resident_bytes.unwrap_or(u64::MAX)),
            refused_at: AtomicU64::new(0),
            frozen: AtomicBool::new(false),
            inherited: AtomicBool::new(false),
            changes: Changes::new(),
            gates: Gates::default(),
            rest: Rest::default(),
            busy: Busy::new(),
            scratch: Zone::reserve(MAX_BYTES, PAGE_SIZE).map_err(space_err)?,
            stats: parts.stats,
            cpus: parts.cpus,
            config,
        };
        if let Some(path) = &pager.config.swap {
            let disk = parts.disk.map_or_else(|| open_disk(path), Ok)?;
            let remote = match parts.remote {
                Some(remote) => Some(remote),
                None => open_remote(&pager.config)?,
            };
            pager.swap = Some(pager.make_swap(disk, remote)?);
        }
        Ok(pager)
    }

    /// Makes what the engine needs once it manages something.
    pub(crate) fn prepare(&self) {
        self.contexts.prepare(&self.store);
    }

    /// CPUs that the process might use at the start.
    pub fn cpus(&self) -> usize {
        self.cpus
    }

    /// Whether there is a swap device.
    pub fn has_swap(&self) -> bool {
        self.swap.is_some()
    }

    fn make_swap(&self, disk: Box<dyn Disk>, remote: Option<Box<dyn Remote>>) -> Result<Swap, String> {
        let bounds = Bounds {
            size_bytes: self.config.swap_bytes,
            keep_free_bytes: self.config.swap_keep_free_bytes,
            remote_bytes: self.config.remote_bytes,
            mark_percent: self.config.remote_percent as u64,
            limit_bytes: self.config.resident_max_bytes(),
            folio: self.config.folio_order,
        };
        Swap::new(disk, remote, self.config.swap_encrypt, bounds).map_err(|e| alloc::format!("no swap file: {e}"))
    }

    /// First address and length of the frames, to be registered with the same userfaultfd as the areas.
    pub fn frames_zone(&self) -> (usize, usize) {
        (self.frames.zone().start(), self.frames.zone().len())
    }

    /// 2 MiB of zeros that nobody writes to.
    pub fn zeros(&self) -> *const u8 {
        self.frames.zeros()
    }

    /// Figures.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Settings.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Uncompressed memory that the pager holds, in pages.
    pub(crate) fn physical(&self) -> u64 {
        self.mapped.load(Relaxed) + self.frames.populated()
    }

    /// Uncompressed memory that the pager may hold now, in pages. Where nothing takes so much data that the bounds can't be
    /// kept, the rest still gets some room: fighting over less would cost more time than it brings memory.
    pub(crate) fn target(&self) -> u64 {
        if self.frozen.load(Relaxed) {
            return u64::MAX >> PAGE_SHIFT;
        }
        let refused = self.lru.pages(List::Refused);
        let least = match refused {
            1.. if self.config.on_full == OnFull::Grow => refused + (self.reserve_bytes() >> PAGE_SHIFT),
            _ => self.floor_bytes() >> PAGE_SHIFT,
        };
        self.bound().max(least)
    }

    /// As [`Pager::bound`], but never less than there always is.
    pub(crate) fn bound_or_floor(&self) -> u64 {
        self.bound().max(self.floor_bytes() >> PAGE_SHIFT)
    }

    /// Uncompressed memory with which the bounds are kept, in pages: the smaller of `resident`, and of `limit` less what
    /// pool, index and unmanaged memory take.
    pub(crate) fn bound(&self) -> u64 {
        let outside = self.outside_bytes.load(Relaxed);
        let mut bytes = u64::MAX;
        if let Some(limit) = self.limit_bytes() {
            bytes = limit.saturating_sub(self.counted_pool_bytes() + self.metadata_bytes() + outside);
        }
        let resident = self.resident_now.load(Relaxed);
        if resident != u64::MAX {
            bytes = bytes.min(resident.saturating_sub(outside));
        }
        bytes >> PAGE_SHIFT
    }

    fn floor_bytes(&self) -> u64 {
        let share = self.limit_now.load(Relaxed).min(self.resident_now.load(Relaxed));
        (share / 2).clamp(FLOOR_LEAST_BYTES, FLOOR_BYTES)
    }

    /// What a pool that counts leaves of the limit, and what data that can leave gets beside data that can't, bytes.
    fn reserve_bytes(&self) -> u64 {
        let most = self.limit_now.load(Relaxed).min(self.resident_now.load(Relaxed));
        self.floor_bytes().max(most / RESERVE_SHARE)
    }

    /// Tells the store what it may hold now. Where the pool counts against the limit, it leaves room to work in, and takes
    /// nothing that doesn't shrink: that would be no smaller there.
    pub(crate) fn bound_pool(&self) {
        let counts = self.config.pool_counts;
        let mut most = self.config.max_pool_bytes.unwrap_or(u64::MAX);
        if let Some(limit) = self.limit_bytes().filter(|_| counts) {
            let others = self.metadata_bytes() + self.outside_bytes.load(Relaxed) + self.reserve_bytes();
            most = most.min(limit.saturating_sub(others));
        }
        self.store.set_pool_bytes_max(if most == u64::MAX { 0 } else { most.max(1) });
        let has_better = self.swap.as_ref().is_some_and(Swap::accepts) || counts && self.limit_bytes().is_some();
        self.store.set_refuse_incompressible(has_better);
    }

    /// Notes that a folio could not leave.
    pub(crate) fn note_refusal(&self) {
        self.refused_at.store(now_ns(), Relaxed);
    }

    /// Whether there is reason to try folios again that could not leave: the bounds are not kept, and none was refused for a
    /// while.
    pub(crate) fn is_retry_due(&self) -> bool {
        self.physical() > self.bound_or_floor() && self.may_retry()
    }

    /// Whether folios that could not leave may be tried again.
    pub(crate) fn may_retry(&self) -> bool {
        self.lru.pages(List::Refused) > 0 && now_ns().saturating_sub(self.refused_at.load(Relaxed)) > REST_NS
    }

    /// What may be used now of `--limit`; `None` without one.
    pub(crate) fn limit_bytes(&self) -> Option<u64> {
        Some(self.limit_now.load(Relaxed)).filter(|limit| *limit != u64::MAX)
    }

    /// Sets the bounds that hold from now on in place of those of the settings, bytes; `u64::MAX` for none.
    pub fn set_bounds(&self, limit_bytes: u64, resident_bytes: u64) {
        self.limit_now.store(limit_bytes, Relaxed);
        self.resident_now.store(resident_bytes, Relaxed);
        if self.physical() > self.target() {
            self.queue.reclaim();
        }
    }

    /// Bytes of the pools that count against the limit.
    pub(crate) fn counted_pool_bytes(&self) -> u64 {
        if self.config.pool_counts { self.store.pool_bytes() } else { 0 }
    }

    /// Bytes that index, folios, frames and lists take.
    pub(crate) fn metadata_bytes(&self) -> u64 {
        let bytes = self.index.used_bytes() + self.folios.used_bytes() + self.folios.count() * 16;
        let swap = self.swap.as_ref().map_or(0, Swap::memory_bytes);
        (bytes + self.frames.metadata_bytes()) as u64 + swap
    }

    /// Whether a fault is answered by the thread that took it.
    pub(crate) fn is_signal(&self) -> bool {
        self.config.delivery == Delivery::Signal
    }

    /// Brings the gauges up to date.
    pub fn publish(&self) {
        let s = &self.stats;
        let (pool, index) = (self.store.pool_bytes(), self.metadata_bytes());
        let (mapped, frames) = (self.mapped.load(Relaxed) << PAGE_SHIFT, self.frames.populated() << PAGE_SHIFT);
        s.resident_bytes.store(mapped, Relaxed);
        s.frame_bytes.store(frames, Relaxed);
        s.pool_bytes.store(pool, Relaxed);
        s.index_bytes.store(index, Relaxed);
        let refused = self.lru.pages(List::Refused) << PAGE_SHIFT;
        s.refused_bytes.store(refused, Relaxed);
        self.bound_pool();
        let is_crowded =
            self.limit_bytes().is_some_and(|limit| self.counted_pool_bytes() + index + self.floor_bytes() > limit);
        if is_crowded || refused > 0 && refused + self.floor_bytes() > self.bound() << PAGE_SHIFT {
            self.past_the_limit();
        }
        if self.is_retry_due() {
            self.queue.reclaim();
        }
        let folded = self.folded_pages.load(Relaxed) << PAGE_SHIFT;
        s.folded_bytes.store(folded, Relaxed);
        s.stored_bytes.store(folded + (self.clean_pages.load(Relaxed) << PAGE_SHIFT), Relaxed);
        s.folios.store(self.folios.count() as u64, Relaxed);
        s.swap_bytes.store(self.swap.as_ref().map_or(0, Swap::used_bytes), Relaxed);
        s.remote_bytes.store(self.swap.as_ref().map_or(0, Swap::remote_bytes), Relaxed);
        s.unmanaged_bytes.store(self.outside_bytes.load(Relaxed), Relaxed);
        stats::raise(&s.peak_resident_bytes, mapped + frames + self.outside_bytes.load(Relaxed));
        stats::raise(&s.peak_pool_bytes, pool);
        stats::raise(&s.peak_index_bytes, index);
        stats::raise(&s.peak_bytes, mapped + frames + pool + index + self.outside_bytes.load(Relaxed));
        stats::raise(&s.peak_folded_bytes, folded);
    }

    /// Ends a folio: no index entry, no stored copy, no list. Its frame must have been given back.
    pub(crate) fn remove_folio(&self, guard: &ShardGuard<'_>, id: FolioId) {
        self.drop_copy(guard, id);
        // SAFETY: the guard is that of the folio's shard.
        let (key, order) = unsafe { (self.folios.get(id).key, self.folios.get(id).order) };
        self.index.erase(guard, key, order);
        self.lru.settle(id);
        // SAFETY: the index and the lists no longer name it, the guard kept everybody else from looking it up, and who
        // has isolated it will look it up again before using it.
        unsafe { self.folios.destroy(id) };
    }

    /// Lets go of the stored copy of a folio. The bytes must be authoritative elsewhere, or needed no longer.
    pub(crate) fn drop_copy(&self, _: &ShardGuard<'_>, id: FolioId) {
        // SAFETY: the guard is that of the folio's shard.
        let folio = unsafe { self.folios.get(id) };
        if !folio.has_copy {
            return;
        }
        folio.has_copy = false;
        folio.untouched = false;
        let pages = folio.order.pages() as u64;
        if folio.state == State::Stored || folio.state == State::Loading {
            self.folded_pages.fetch_sub(pages, Relaxed);
        } else {
            self.clean_pages.fetch_sub(pages, Relaxed);
        }
        for slot in self.folios.slots(folio) {
            if !slot.handle.is_none() {
                self.free_copy(slot.handle);
            }
            slot.handle = Handle::NONE;
        }
    }

    /// Splits a folio in two halves; returns the second. A block that would be cut in two loses its stored copy, so a
    /// `Stored` folio may only be split between blocks.
    pub(crate) fn split_folio(&self, guard: &ShardGuard<'_>, id: FolioId) -> FolioId {
        // SAFETY: the guard is that of the folio's shard; `right` below is another folio.
        let left = unsafe { self.folios.get(id) };
        let half = left.order.smaller().expect("a page can't be split");
        let cuts_block = half < self.config.block_order;
        assert!(!cuts_block || !matches!(left.state, State::Stored | State::Loading), "a stored block can't be split");
        let right_id = self.folios.create(left.key + half.pages() as u64, half, left.state);
        // SAFETY: just created, so distinct from `left`, and its key lies in the same chunk, hence shard.
        let right = unsafe { self.folios.get(right_id) };
        right.frame = left.frame + half.pages() as u32;
        (right.age, right.active, right.untouched) = (left.age, left.active, left.untouched);
        (right.touch, right.refused) = (left.touch, left.refused);
        self.index.erase(guard, left.key, left.order);
        if cuts_block && left.has_copy {
            self.clean_pages.fetch_sub(left.order.pages() as u64, Relaxed);
        }
        let cut = self.folios.split_slots(left, right);
        if !cut.is_none() {
            self.free_copy(cut);
            (left.untouched, right.untouched) = (false, false);
        }
        self.index.insert(guard, left.key, half, id);
        self.index.insert(guard, right.key, half, right_id);
        self.lru.resize(id, half.get());
        if left.writing != 0 {
            left.writing = 0;
            self.list_by_state(guard, id);
        }
        self.list_by_state(guard, right_id);
        stats::add(&self.stats.splits, 1);
        right_id
    }

    /// Puts a folio on the list that its state asks for.
    pub(crate) fn list_by_state(&self, _: &ShardGuard<'_>, id: FolioId) {
        // SAFETY: the guard is that of the folio's shard.
        let folio = unsafe { self.folios.get(id) };
        let list = match folio.state {
            State::Resident if folio.refused => List::Refused,
            State::Resident if folio.active => List::Active,
            State::Resident => List::Inactive,
            State::Cached if folio.untouched => List::Ahead,
            State::Cached if folio.has_copy => List::Cooling,
            State::Cached => List::Dirty,
            State::Stored if self.swap.is_some() => List::Folded,
            State::Saving | State::Loading | State::Stored => return,
        };
        self.lru.push(id, folio.key, folio.order.get(), list);
    }

    /// Splits until one folio is exactly `[key, key + order)`; returns it.
    pub(crate) fn carve(&self, guard: &ShardGuard<'_>, mut id: FolioId, key: u64, order: Order) -> FolioId {
        loop {
            // SAFETY: the guard is that of the folio's shard.
            let folio = unsafe { self.folios.get(id) };
            if folio.order <= order {
                return id;
            }
            let right = self.split_folio(guard, id);
            // SAFETY: as above.
            if key >= unsafe { self.folios.get(right).key } {
                id = right;
            }
        }
    }

    /// Splits a folio so that no piece reaches across its page `at`.
    pub(crate) fn split_at(&self, guard: &ShardGuard<'_>, id: FolioId, at: usize) {
        // SAFETY: the guard is that of the folio's shard.
        let pages = unsafe { self.folios.get(id).order.pages() };
        if at == 0 || at >= pages {
            return;
        }
        let right = self.split_folio(guard, id);
        self.split_at(guard, id, at.min(pages / 2));
        self.split_at(guard, right, at.saturating_sub(pages / 2));
    }
}

/// Bytes of `pages` pages.
pub(crate) const fn bytes(pages: usize) -> usize {
    pages * PAGE_SIZE
}

/// Lets the store make dictionaries, or gives it the one of a file.
fn set_up_dictionaries(store: &Store, canned: &Canned) -> Result<(), String> {
    if *canned == Canned::Off {
        return Ok(());
    }
    let codec = store.codec();
    if !codec.takes_dictionaries() {
        return Err(alloc::format!("--canned: codec {codec} takes no dictionaries; use lz4 or zstd"));
    }
    let Canned::File(path) = canned else {
        store.set_canned(true);
        return Ok(());
    };
    let fail = |e: &dyn core::fmt::Display| alloc::format!("--canned: {path}: {e}");
    let bytes = memfold_sys::file::read(path, DICTIONARY_FILE_BYTES_MAX).map_err(|e| match e {
        memfold_sys::Errno::FBIG => fail(&"longer than any dictionary"),
        e => fail(&e),
    })?;
    let dictionary = Dictionary::from_file(&bytes).map_err(|e| fail(&e))?;
    store.install_dictionary(&dictionary).map_err(|e| fail(&e))
}
