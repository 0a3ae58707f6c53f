//! memfold-store: compressed blocks behind handles. It knows no address, no fault and no process.
//!
//! A folio is saved block by block: same-filled pages are noted, the rest is compressed by a
//! [`Codec`] and becomes an object in one of several pools. The caller gets a [`Handle`] for each
//! block. Pools cut spans of pages into slots of size classes, find objects through 16-byte
//! entries, and compact themselves behind the handles.
//!
//! The save path, from the top: `store/save` -> `block` (same-filled pages, the rest by a `codec`)
//! -> `pool` (a slot, an entry). The load path: `store/load` -> `pool` (pin) -> `block` (decode),
//! then the checksum.
#![cfg_attr(not(test), no_std)]
extern crate alloc;

mod handle;
mod hash;
mod format;
mod history;
mod dictionary;
mod codec;
mod batch;
mod pool;
mod block;
mod store;

#[cfg(any(test, fuzzing))]
pub mod fuzz;

pub use batch::software::{SoftwarePool, SoftwareQueue};
pub use batch::{BATCH_MAX, BatchJob, BatchResult, Compressor, CompressorPool};
pub use block::entropy::looks_dense;
pub use block::set::BlockSet;
pub use codec::bare::BareCodec;
pub use codec::{CODECS, Codec, CodecError, CodecSpec, SpecError};
pub use dictionary::trainer::trained_dictionaries;
pub use dictionary::{
    DICTIONARY_BYTES_MAX, DICTIONARY_BYTES_MIN, DICTIONARY_FILE_BYTES_MAX, Dictionary,
    DictionaryError, DictionaryKind,
};
pub use format::huge_threshold;
pub use handle::{Handle, POOLS_MAX};
pub use hash::xxh3_128;
pub use store::cold::ColdObject;
pub use store::config::{CACHED_BLOCKS_MAX, StoreConfig, StoreError};
pub use store::decompressed_blocks::CacheUse;
pub use store::error::{LoadError, LoadProblem, SaveError};
pub use store::export::ExportedObject;
pub use store::fault_injection::{FaultPlan, InjectedFault};
pub use store::offload::{Offload, OffloadStats};
pub use store::save::SaveReport;
pub use store::stats::{ClassStats, Events, StoreStats};
pub use store::training::{
    CANNED_MARGIN_PERCENT, CannedError, CannedStep, DictionaryTrial, SizeComparison,
    raw_dictionaries,
};
pub use store::worker::CodecWorker;
pub use store::{PastLimit, Store};
