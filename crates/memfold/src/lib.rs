//! The engine of memfold and its public Rust API: compressed memory in user space.
//!
//! ```no_run
//! use memfold::{Delivery, Memory};
//! let memory = Memory::builder().resident_bytes(256 << 20).codec("lz4").delivery(Delivery::Signal).build()?;
//! let mut region = memory.region(1 << 30)?;
//! region.as_mut_slice()[12345] = 7;
//! region.pageout(0..region.len());
//! assert_eq!(region.as_slice()[12345], 7);
//! # Ok::<(), memfold::Error>(())
//! ```
//!
//! The two walks: a fault goes `fault::Pager::fault` -> `index` -> swap cache (take, or wait) -> `load` -> `mapping`;
//! reclaim goes `reclaim::Pager::frame_for` -> `lru` -> `mapping` -> save -> store. See `ARCHITECTURE.md`.
#![cfg_attr(not(any(test, shuttle)), no_std)]
extern crate alloc;

mod text;
pub mod keys;
pub mod config;
pub mod stats;
pub mod share;
mod slab;
mod fingerprint;
mod folio;
mod index;
mod parked;
mod area;
mod lands;
pub mod cluster;
mod seal;
pub mod place;
mod outbox;
mod group;
mod tier;
mod mover;
pub mod swap;
mod lru;
mod frames;
mod stream;
mod around;
mod queue;
mod reads;
mod context;
mod workingset;
mod changes;
mod busy;
mod gates;
mod moment;
mod rest;
pub mod pager;
mod check;
mod grain;
mod mapping;
mod swapin;
mod writeback;
mod saving;
mod reclaim;
mod small;
mod load;
mod recompress;
pub mod fault;
mod hint;
mod owner;
pub mod events;
mod leave;
mod copied;
pub mod worker;
mod throttle;
mod waker;
mod keep;
mod contest;
mod duty;
mod handler;
pub mod watch;
mod signal;
mod memory;
#[cfg(test)]
mod tests;

pub use config::{Config, Delivery, OnFull};
pub use memory::{Builder, Error, Memory, Pinned, Region};
pub use stats::Stats;
