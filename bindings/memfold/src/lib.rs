//! Compressed memory for Linux programs, in user space.
//!
//! A [`Memory`] is an engine with settings of its own. It gives [`Region`]s, which are plain
//! addresses of any length. Memory of a region that isn't used is *folded*: taken out of the page
//! table, compressed, and kept in a pool. A touch loads it. So a program can use more memory than
//! its limit.
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
//! - [`Heap`] is an allocator over regions, and [`FoldedVec`] a vector in it.
//! - [`Builder::set`] takes each key of `memfold run --help`, such as `swap` for an encrypted file.
//! - [`Stats`] has the counters of docs/counters.md.
//!
//! # Platforms
//! Linux on x86-64 with userfaultfd (5.11 or later; 6.8 or later folds without copying). A process
//! needs permission to open a userfaultfd: [`Error::Userfaultfd`] says how to get it.
//!
//! # Versions
//! What this crate exports changes only as semantic versioning allows; `api.txt` lists all of it. The
//! other `memfold-*` crates promise nothing. The crate is built and tested with the Rust version in its
//! `Cargo.toml`; a later one is required only by a new minor version.
#![no_std]

#[doc(inline)]
pub use memfold_engine::{
    Builder, Delivery, Error, FoldedVec, GRANULE_BYTES, Heap, Hint, Memory, PinnedRange, Region,
};
#[doc(inline)]
pub use memfold_os::uffd::OpenError;
#[doc(inline)]
pub use memfold_stats::Stats;
