//! The swap file of memfold: slots in clusters, sealed objects, the device that they lie on, and
//! the remote store that the coldest of them move to. It knows no folio, no area and no fault.
#![cfg_attr(not(any(test, shuttle)), no_std)]
extern crate alloc;

pub mod disk;
pub mod remote;
pub mod location;
pub mod cluster;
mod seal;
mod lent;
pub mod write_queue;
pub mod tier;
mod swap;
#[cfg(test)]
mod tests;

pub use lent::OLDER_MAX;
pub use location::{Place, UNIT_BYTES};
pub use swap::{Bounds, HEAD_BYTES, Packed, ReadError, Swap};
