//! The parts of an engine, and the definition of a walk.
//!
//! A part owns its data: its fields are private, and it knows no walk. A walk (a fault, a reclaim,
//! a fork) is a type that holds only a reference to the parts. Only code that imports its type can
//! call its methods, and imports go down only: so calls do.
use crate::area::lock::AreaLock;
use crate::backing::Backing;
use crate::config::{Config, Delivery};
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

impl EngineParts {
    /// Returns whether the faulting thread serves its fault itself.
    pub(crate) fn is_inline(&self) -> bool {
        self.config.delivery != Delivery::Thread
    }
}

/// Defines a walk: a type that holds a reference to the parts.
macro_rules! walk {
    ($(#[$doc:meta])* $vis:vis struct $name:ident) => {
        $(#[$doc])*
        #[derive(Copy, Clone)]
        $vis struct $name<'a>(pub(crate) &'a crate::parts::EngineParts);

        impl core::ops::Deref for $name<'_> {
            type Target = crate::parts::EngineParts;
            fn deref(&self) -> &crate::parts::EngineParts {
                self.0
            }
        }
    };
}
pub(crate) use walk;

/// Returns the bytes of `pages` pages.
pub(crate) const fn bytes(pages: usize) -> usize {
    pages * PAGE_SIZE
}
