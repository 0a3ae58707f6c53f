//! memfold-store: compressed blocks behind handles. It knows no address, no fault and no process.
//!
//! A folio is saved block by block: same-filled pages are noted, the rest is compressed by a [`Codec`] and becomes an
//! object in one of several pools; the caller gets a [`Handle`] for each block. Pools cut spans of pages into slots of
//! size classes, find objects through 16-byte entries, and compact themselves behind the handles.
//!
//! The save path, bottom up: `samefilled`, `codec` -> `block` (payload) -> `class`, `span`, `arena`, `entry`, `pool`
//! (place) -> `save`. The load path: `pool::pin` -> checksum -> `block::decode`.
#![cfg_attr(not(test), no_std)]
extern crate alloc;

mod handle;

mod blockset;
mod hash;
mod dictionary;
#[cfg(feature = "trainer")]
mod trainer;
mod codec;
mod bare;
mod batch;
mod software;
mod entropy;
mod samefilled;

mod class;

mod entry;

mod area;
mod budget;
mod mark;
mod span;

mod arena;
mod canned;
mod entries;

mod pool;

mod check;
mod compact;

mod block;
mod worker;

mod config;
mod error;
mod faults;
mod cover;
mod recent;
mod sampler;
mod stats;

mod store;

mod canning;
mod load;
mod export;
mod save;
mod offload;
mod cold;

#[cfg(any(test, fuzzing))]
pub mod fuzz;

#[cfg(test)]
mod tests;

pub use bare::BareCodec;
pub use batch::{BATCH_MAX, Compressor, Done, Job};
pub use block::huge_threshold;
pub use blockset::BlockSet;
pub use canning::{CANNED_MARGIN_PERCENT, CannedError, CannedStep, Comparison, Trial, raw_dictionaries};
pub use codec::{CODECS, Codec, CodecError, CodecSpec, SpecError};
pub use cold::Cold;
pub use config::{RECENT_BLOCKS_MAX, StoreConfig, StoreError};
pub use dictionary::{
    DICTIONARY_BYTES_MAX, DICTIONARY_BYTES_MIN, DICTIONARY_FILE_BYTES_MAX, Dictionary, DictionaryError, DictionaryKind,
};
pub use error::{LoadError, LoadProblem, SaveError};
pub use export::Exported;
pub use faults::{Fault, FaultPlan};
pub use handle::{Handle, POOLS_MAX};
pub use hash::xxh3_128;
pub use offload::{Offload, OffloadStats};
pub use save::SaveReport;
pub use software::{SoftwarePool, SoftwareQueue};
pub use stats::{ClassStats, Events, StoreStats};
pub use store::{PastLimit, Store};
#[cfg(feature = "trainer")]
pub use trainer::trained_dictionaries;
pub use worker::Worker;
