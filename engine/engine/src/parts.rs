//! The parts of an engine. Walks work on them.
//!
//! A part owns its data: its fields are private, and it knows no walk.
//!
//! A walk (a fault, a reclaim, a fork) is a struct that names the parts it uses. It owns nothing.
//! `new` takes the references from an [`EngineParts`], and is inlined, so fields that a caller
//! doesn't need cost nothing. A walk that begins other walks keeps the [`EngineParts`] too, in its
//! field `engine`, and passes it to their `new` only. So the struct lists all parts that the walk
//! itself uses.
//!
//! Only code that imports a walk's type can call its methods, and imports go down only: so calls do.
use crate::area::lock::AreaLock;
use crate::backing::Backing;
use crate::config::Config;
use crate::folio::table::FolioTable;
use crate::holds::Holds;
use crate::memory::budget::Budget;
use crate::memory::mapper::Mapper;
use crate::memory::unshare::ToUnshare;
use crate::policy::first_touches::FirstTouches;
use crate::policy::stream_readahead::Streams;
use crate::policy::swap_readahead::SwapReadahead;
use crate::requests::background::RequestQueue;
use crate::requests::device_faults::DeviceFaults;
use crate::requests::pause::ForkPauses;
use crate::stats_place::StatsPlace;
use alloc::sync::Arc;
use memfold_os::memory::zone::Zone;
use memfold_os::thread::delegate_queue::DelegateQueue;
use memfold_os::units::PAGE_SIZE;
use memfold_store::CodecSpec;

/// The parts of an engine.
///
/// Lock order: the pauses of background work -> `areas` (two locks, see `area/lock.rs`) -> a
/// context -> a shard -> the locks inside lists, frames, slabs, store. A thread holds at most one
/// shard and one context. No lock is held while bytes are compressed or decompressed, except a
/// context, and one of `areas` for reading. So a thread that writes both meets no folio that is
/// `Loading` or `Saving`.
///
/// Equation, while no thread works: `mapped + frames.populated` is the uncompressed memory held.
pub struct EngineParts {
    pub(crate) config: Config,
    pub(crate) stats: Arc<StatsPlace>,
    pub(crate) table: FolioTable,
    pub(crate) mapper: Mapper,
    pub(crate) backing: Backing,
    pub(crate) budget: Budget,
    pub(crate) areas: AreaLock,
    pub(crate) streams: Streams,
    pub(crate) first_touches: FirstTouches,
    pub(crate) swap_readahead: SwapReadahead,
    /// Requests to background threads.
    pub(crate) requests: RequestQueue,
    /// Faults that need the swap file or the remote store.
    pub(crate) reads: DeviceFaults,
    /// In gate delivery: calls on file and store that the engine's threads make for the program's.
    pub(crate) delegate_queue: Option<Arc<DelegateQueue>>,
    /// Where a fork pauses the engine's threads.
    pub(crate) pauses: ForkPauses,
    pub(crate) to_unshare: ToUnshare,
    pub(crate) holds: &'static Holds,
    /// Room for the largest block, for the thread that has exclusive areas.
    pub(crate) scratch: Zone,
    /// The codec that compresses cold blocks again.
    pub(crate) recompress: Option<CodecSpec>,
    pub(crate) cpus: usize,
}

/// Returns the bytes of `pages` pages.
pub(crate) const fn bytes(pages: usize) -> usize {
    pages * PAGE_SIZE
}
