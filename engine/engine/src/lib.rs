//! The engine of memfold: compressed memory in user space. The crate `memfold` exports what users may
//! rely on; the rest is no promise to anybody.
//!
//! An engine consists of parts (`parts.rs`), which own their data, and of walks over them: a fault
//! (`fault/`), a reclaim (`reclaim/`), a fork (`fork/`), a change of mappings (`mappings/`).
//! `ARCHITECTURE.md` follows the walks step by step.
#![cfg_attr(not(any(test, feature = "shuttle")), no_std)]
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
pub use region::{Builder, Error, Memory, PinnedRange, Region};
