//! The swap file of memfold: sealed objects in slots of a device, and a remote store for the
//! coldest of them. It knows no folio, no area and no fault. A [`Handle`](memfold_store::Handle)
//! names an object, and holds its [`ObjectLocation`].
//!
//! There are two kinds of objects. A **raw** object is one uncompressed block. It fills its slots,
//! and its seal is kept in memory. A **packed** object is a compressed block as the store had it.
//! It lies among others in a run of slots, behind a head:
//!
//! ```text
//! number 8 | fields 4 | length 4 | tag 16 | payload, padded to 16
//! ```
//!
//! # Guarantees
//! - **An object is written before its handle is returned.** The caller allocates slots, seals the
//!   bytes in a buffer, writes them, and only then calls [`Swap::insert`] for each object. Until
//!   then the copy in memory is the authoritative one, so a write that fails changes nothing. After
//!   a failure no write is tried for 100 ms.
//! - **A slot is free when its last user releases it.** Users are the objects in it, a write in
//!   progress, and children of fork that read it.
//! - **A crash loses the file.** The file has no name and the key is in memory only. When the
//!   process ends, however it ends, the kernel frees the file. With encryption, data that remains
//!   on the device can't be decrypted. No later process reads the file, so it is never synced.
//! - **A seal proves that an object was sealed for this place in the file under its number.**
//!   Damaged bytes, and bytes of another place, number or key, are refused. The [`ReadError`] names
//!   file and slot. An older state of the same place under its own number passes for packed
//!   objects. So the caller must compare a fingerprint that it keeps in memory. Without encryption
//!   a seal is a checksum, which finds damage and no forgery.
//! - **The remote store is not trusted.** It gets sealed bytes only, and its data is opened by the
//!   same seals. A slot's bytes are in the file or in the store, never in both. They change over
//!   when the store has acknowledged them, and only then the file's space is freed.
//! - **A child of fork reads its parent's file and writes to its own.** The parent keeps all slots
//!   that the child may read until the child has ended (`swap/fork.rs`).
//!
//! # Where it makes system calls
//! Raw reads, writes and io_uring are in `memfold_os::transfer`: that is nearly all the unsafe
//! code below a [`Disk`](disk::Disk). This crate chooses between them, and makes the safe calls
//! that make, grow and punch a file. So the traits that tests replace, [`Disk`](disk::Disk) and
//! [`Remote`](remote::Remote), are beside their users, and only `memfold-os` fills a submission
//! queue.
//!
//! # Modules, bottom first
//! - [`disk`]: the device as a trait, the file that it is, and files that survive a power cut
//! - [`remote`]: the remote store as a trait, the messages to its service, and their client
//! - [`location`]: the location of an object, and its handle
//! - [`cluster`]: slots in clusters
//! - `seal`: encryption with authentication, or a checksum
//! - `lent`: slots that children of fork read
//! - [`write_queue`]: work for the thread that writes
//! - `tier`: which slots are in the remote store, and how they move there
//! - `swap`: [`Swap`], over all of these
//!
//! From `memfold-store` it uses [`Handle`](memfold_store::Handle) (`location.rs`) and XXH3
//! (`seal.rs`).
#![cfg_attr(not(any(test, feature = "shuttle")), no_std)]
extern crate alloc;

pub mod disk;
pub mod remote;
pub mod location;
pub mod cluster;
mod seal;
mod lent;
pub mod write_queue;
mod tier;
mod swap;
#[cfg(test)]
mod tests;

pub use lent::ANCESTORS_MAX;
pub use location::{ObjectLocation, UNIT_BYTES};
pub use swap::{HEAD_BYTES, PackedObjects, ReadError, Swap, SwapBounds};
pub use tier::RemoteCounts;
