//! The engine of memfold and its public Rust API: compressed memory in user space.
//!
//! ```
//! use memfold::{Delivery, Memory};
//!
//! let memory = Memory::builder().resident_bytes(256 << 20).codec("lz4").delivery(Delivery::Signal).build()?;
//! let mut region = memory.region(1 << 30)?;           // 1 GiB of zeros, no memory yet
//! region.as_mut_slice()[12345] = 7;
//! region.pageout(0..region.len());                    // fold it now
//! assert_eq!(region.as_slice()[12345], 7);            // and it is back
//! println!("{} bytes in the pool", memory.stats().pool_bytes.load(std::sync::atomic::Ordering::Relaxed));
//! # Ok::<(), memfold::Error>(())
//! ```
//!
//! The two walks: a fault goes `fault::Pager::fault` -> `index` -> swap cache (take, or wait) ->
//! `load` -> `mapping`; reclaim goes `reclaim::Pager::frame_for` -> `lru` -> `mapping` -> save ->
//! store. See `ARCHITECTURE.md`.
#![cfg_attr(not(any(test, shuttle)), no_std)]
extern crate alloc;

pub mod config;
mod folio;
mod area;
pub mod policy;
pub mod swap;
mod quiesce;
pub mod holds;
pub mod known;
pub mod pager;
mod reclaim;
mod check;
pub mod fault;
pub mod address_space;
pub mod delivery;
mod memory;
mod heap;
#[cfg(test)]
mod tests;

pub use config::{Config, Delivery, OnFull};
pub use heap::vec::FoldedVec;
pub use heap::{GRANULE_BYTES, Heap, Hint};
pub use memfold_stats as stats;
pub use memfold_sys::thread::memory_bytes;
pub use memfold_sys::uffd::OpenError;
pub use memory::{Builder, Error, Memory, Pinned, Region};
pub use stats::Stats;
