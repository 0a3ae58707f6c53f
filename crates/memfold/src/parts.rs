//! The parts of an engine, and what a walk is.
//!
//! A part owns its data: its fields are private, and it knows no walk. A walk (a fault, a reclaim, a
//! fork) is a type that holds nothing but a reference to the parts. Its methods can be called only by
//! who has imported it, and imports go down only: so calls do.
use crate::area::lock::AreaLock;
use crate::backing::Backing;
use crate::config::{Config, Delivery};
use crate::folio::table::FolioTable;
use crate::holds::Holds;
use crate::memory::budget::Budget;
use crate::memory::mapper::Mapper;
use crate::memory::unshare::ToUnshare;
use crate::policy::stream_readahead::Streams;
use crate::policy::swap_readahead::SwapReadahead;
use crate::requests::background::RequestQueue;
use crate::requests::device_faults::DeviceFaults;
use crate::requests::pause::PauseGates;
use crate::stats_place::StatsPlace;
use alloc::sync::Arc;
use memfold_store::CodecSpec;
use memfold_sys::memory::zone::Zone;
use memfold_sys::thread::errands::DelegateQueue;
use memfold_sys::units::PAGE_SIZE;

/// What an engine consists of.
///
/// Lock order: the gates of background work -> `areas` (two locks, see `area/lock.rs`) -> a context ->
/// a shard -> the locks inside lists, frames, slabs, store. At most one shard and one context at a time.
/// No lock is held while bytes are compressed or decompressed, except a context, and one of `areas` for
/// reading: so who writes both meets no folio that is `Loading` or `Saving`.
///
/// Equation, while nobody works: `mapped + frames.populated` is the uncompressed memory held.
pub struct EngineParts {
    pub(crate) config: Config,
    pub(crate) stats: Arc<StatsPlace>,
    pub(crate) table: FolioTable,
    pub(crate) mapper: Mapper,
    pub(crate) backing: Backing,
    pub(crate) budget: Budget,
    pub(crate) areas: AreaLock,
    pub(crate) streams: Streams,
    pub(crate) swap_readahead: SwapReadahead,
    /// What background threads are asked for.
    pub(crate) requests: RequestQueue,
    /// Faults that need the swap file or the remote store.
    pub(crate) reads: DeviceFaults,
    /// In gate delivery: what threads of the program have the engine's do with file and store.
    pub(crate) errands: Option<Arc<DelegateQueue>>,
    /// Where a fork stops the engine's threads.
    pub(crate) gates: PauseGates,
    pub(crate) to_unshare: ToUnshare,
    pub(crate) holds: &'static Holds,
    /// Room for the largest block, of who has the areas to itself.
    pub(crate) scratch: Zone,
    /// What cold blocks are compressed by again.
    pub(crate) recompress: Option<CodecSpec>,
    pub(crate) cpus: usize,
}

impl EngineParts {
    /// Whether a fault is answered by the thread that took it.
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

/// Bytes of `pages` pages.
pub(crate) const fn bytes(pages: usize) -> usize {
    pages * PAGE_SIZE
}
