//! The pager: what fault path and reclaim path share.
pub(crate) mod background_requests;
pub(crate) mod device_faults;
pub(crate) mod codec_context;
pub(crate) mod quota;
pub(crate) mod tally;
mod start;
mod limits;
pub(crate) mod fetch;
mod folios;
pub(crate) mod map;
pub(crate) mod copy_in;

pub use limits::stays;
pub use start::{StartError, open_remote};

use crate::area::lock::AreaLock;
use crate::config::{Config, Delivery};
use crate::folio::Folios;
use crate::folio::fingerprint::Fingerprints;
use crate::folio::frames::Frames;
use crate::folio::index::{Index, Shards};
use crate::folio::lru::Lru;
use crate::holds::Holds;
use crate::pager::background_requests::Queue;
use crate::pager::codec_context::Contexts;
use crate::pager::device_faults::Reads;
use crate::pager::quota::Quota;
use crate::pager::tally::Tally;
use crate::policy::stream_readahead::Streams;
use crate::policy::swap_readahead::SwapReadahead;
use crate::policy::thrash::Thrash;
use crate::quiesce::gate::Gates;
use crate::quiesce::unshare::ToUnshare;
use crate::stats::Stats;
use crate::table::Process;
use alloc::boxed::Box;
use alloc::sync::Arc;
use core::ops::Deref;
use core::sync::atomic::AtomicPtr;
use memfold_store::{CodecSpec, Store};
use memfold_swap::Swap;
use memfold_swap::disk::Disk;
use memfold_swap::remote::Remote;
use memfold_sys::memory::zone::Zone;
use memfold_sys::sync::Mutex;
use memfold_sys::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use memfold_sys::thread::errands::Errands;
use memfold_sys::uffd::space::Space;
use memfold_sys::units::PAGE_SIZE;

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
/// Lock order: `areas` (two locks, see `area/lock.rs`) -> a shard -> the locks inside lru, frames,
/// slabs, store. At most one shard at a time. No lock is held while bytes are compressed or
/// decompressed, except one of `areas` for reading: so who writes both meets no folio that is
/// `Loading` or `Saving`.
///
/// Equations, while nobody works: `mapped + frames.populated` is the uncompressed memory held;
/// every `Cached` folio is on `Cooling` or `Dirty`, every `Resident` one on `Active`, `Inactive` or
/// `Refused`, every other one on no list.
pub struct Pager {
    pub(crate) config: Config,
    pub(crate) store: Store,
    /// Behind the pool; `None` without `--swap`.
    pub(crate) swap: Option<Swap>,
    pub(crate) space: Box<dyn Space>,
    pub(crate) has_move: bool,
    /// What is loaded for a read is protected, and dropped while it is clean (`reclaim/drop.rs`):
    /// where the thread that faults is served by itself, and all discards are known.
    pub(crate) drops_clean: bool,
    /// The start of a block can be had without decompressing all of it.
    pub(crate) stops_early: bool,
    pub(crate) areas: AreaLock,
    pub(crate) shards: Shards,
    pub(crate) index: Index,
    pub(crate) folios: Folios,
    pub(crate) fingerprints: Fingerprints,
    pub(crate) lru: Lru,
    pub(crate) frames: Frames,
    pub(crate) streams: Streams,
    pub(crate) swap_readahead: SwapReadahead,
    pub(crate) contexts: Contexts,
    pub(crate) recompress: Option<CodecSpec>,
    pub(crate) queue: Queue,
    /// Faults that need the swap file or the remote store.
    pub(crate) reads: Reads,
    /// In gate delivery: what threads of the program have the engine's do with file and store.
    pub(crate) errands: Option<Arc<Errands>>,
    pub(crate) tally: Tally,
    pub(crate) quota: Quota,
    /// The seat of the engine's process in the table of a run; null without.
    process: AtomicPtr<Process>,
    thrash: Mutex<Thrash>,
    /// What that says must stay uncompressed, pages.
    kept_pages: AtomicU64,
    /// Times that a folio which had been refused was tried again.
    pub(crate) retries: AtomicU32,
    /// When a folio was last refused, nanoseconds.
    refused_at: AtomicU64,
    /// See [`Pager::generation`].
    generation: AtomicU32,
    pub(crate) frozen: AtomicBool,
    /// Where a fork stops the engine's threads.
    pub(crate) gates: Gates,
    pub(crate) scratch: Zone,
    pub(crate) to_unshare: ToUnshare,
    pub(crate) holds: &'static Holds,
    pub(crate) stats: StatsPlace,
    reports_limit: bool,
    /// See [`Pager::take_past`].
    is_past: AtomicBool,
    cpus: usize,
}

/// What an engine is made of, besides its settings.
pub struct Parts {
    /// The address space.
    pub space: Box<dyn Space>,
    /// It can move pages.
    pub has_move: bool,
    /// The owner reports that the bounds can't be kept, or ends the program ([`Pager::take_past`]).
    pub reports_limit: bool,
    /// Where to count.
    pub stats: StatsPlace,
    /// CPUs that the process may use.
    pub cpus: usize,
    /// The swap device where the settings ask for one; by default a file where they say.
    pub disk: Option<Box<dyn Disk>>,
    /// The remote store behind it where the settings ask for one; by default the service whose
    /// socket they name.
    pub remote: Option<Box<dyn Remote>>,
    /// By whom disk and store are used, where threads of the program can't use them: the given ones
    /// do so themselves ([`memfold_sys::thread::errands::Handed`]).
    pub errands: Option<Arc<Errands>>,
}

impl Pager {
    /// Makes what the engine needs once it manages something.
    pub fn prepare(&self) {
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

    /// Whether areas are to be registered for write protection too.
    pub fn protects(&self) -> bool {
        !self.has_move || self.drops_clean
    }

    /// First address and length of the frames, to be registered with the same userfaultfd as the
    /// areas.
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

    /// Whether a fault is answered by the thread that took it.
    pub(crate) fn is_signal(&self) -> bool {
        self.config.delivery != Delivery::Thread
    }

    /// What system calls of the program hold.
    pub fn holds(&self) -> &'static Holds {
        self.holds
    }

    /// Ends the background threads.
    pub fn stop(&self) {
        self.queue.stop();
        self.reads.stop();
        self.errands.iter().for_each(|errands| errands.stop());
        if let Some(swap) = &self.swap {
            swap.stop();
        }
    }

    /// Ends those of them that may wait for the others: to be called first, and their end awaited,
    /// where all are to be started again.
    pub fn stop_workers(&self) {
        self.queue.stop();
    }

    /// After [`Pager::stop`]: does the errands that wait, by a thread that may. Threads that are to end
    /// may need what those who wait for them have, when the threads that served them are gone.
    pub fn serve_waiting(&self) {
        while self.errands.as_ref().is_some_and(|errands| errands.serve()) {}
    }

    /// After [`Pager::stop`], in gate delivery: the background threads have ended, and are about to be
    /// started again.
    pub fn resume(&self) {
        self.queue.resume();
        self.errands.iter().for_each(|errands| errands.resume());
        if let Some(swap) = &self.swap {
            swap.resume();
        }
    }

    /// The compressed store, for its figures and, in tests, its faults on purpose.
    pub fn store(&self) -> &Store {
        &self.store
    }
}

/// Bytes of `pages` pages.
pub(crate) const fn bytes(pages: usize) -> usize {
    pages * PAGE_SIZE
}
