//! The kernel seam of memfold: page units, private address-space zones, userfaultfd, page-map scans
//! and engine threads. A model checker can replace its locks and atomics, and tests replace its
//! trait [`uffd::space::Space`].
//!
//! Nearly all raw unsafe code of the project is here. No function of this crate calls the host's
//! `malloc`, or touches thread-local storage or `errno`. So every function may be called from a
//! signal handler and from an engine thread.
#![cfg_attr(not(any(test, feature = "shuttle")), no_std)]
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
compile_error!("memfold needs Linux on x86-64");

extern crate alloc;

pub mod units;
pub mod page;
pub mod text;
pub mod raw;
#[cfg(not(feature = "shuttle"))]
mod clock;
#[cfg(feature = "shuttle")]
#[path = "model_clock.rs"]
mod clock;
pub mod vectors;
pub mod sync;
pub mod file;
pub mod file_lock;
pub mod random;
pub mod memory;
pub mod maps;
pub mod thread;
pub mod uffd;
pub mod protection;
pub mod transfer;
pub mod probe;

pub use rustix::io::Errno;

/// Locked by tests that fork, and by tests whose pages no fork may share meanwhile.
#[cfg(test)]
static FORKS: sync::Mutex<()> = sync::Mutex::new(());
