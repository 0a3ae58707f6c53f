//! The engine of memfold and its public Rust API: compressed memory in user space.
//!
//! ```
//! use memfold::{Delivery, Memory};
//!
//! let memory = Memory::builder().resident_bytes(256 << 20).codec("lz4").delivery(Delivery::Signal).build()?;
//! let mut region = memory.region(1 << 30)?;           // 1 GiB of zeros, no memory yet
//! region.as_mut_slice()[12345] = 7;
//! region.pageout(0..region.len());                    // fold it now
//! assert_eq!(region.as_slice()[12345], 7);            // a touch loads it
//! println!("{} bytes in the pool", memory.stats().pool_bytes.load(std::sync::atomic::Ordering::Relaxed));
//! # Ok::<(), memfold::Error>(())
//! ```
//!
//! An engine consists of parts (`parts.rs`), which own their data, and of walks over them: a fault
//! (`fault/`), a reclaim (`reclaim/`), a fork (`fork/`), a change of mappings (`mappings/`).
//! `ARCHITECTURE.md` follows the walks step by step.
#![cfg_attr(not(any(test, shuttle)), no_std)]
extern crate alloc;

pub mod config;
mod stats_place;
mod backing;
mod folio;
mod area;
pub mod policy;
mod memory;
mod requests;
pub mod holds;
pub mod known;
mod parts;
pub mod limits;
mod residency;
mod reclaim;
pub mod fault;
pub mod mappings;
pub mod fork;
mod invariants;
pub mod pager;
pub mod delivery;
mod region;
mod heap;
#[cfg(test)]
mod tests;

pub use config::{Config, Delivery, OnFull};
pub use heap::vec::FoldedVec;
pub use heap::{GRANULE_BYTES, Heap, Hint};
pub use memfold_os::thread::memory_bytes;
pub use memfold_os::uffd::OpenError;
pub use memfold_stats as stats;
pub use region::{Builder, Error, Memory, PinnedRange, Region};
pub use stats::Stats;
