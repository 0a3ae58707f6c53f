//! Substitutes for the kernel in tests of the engine: a fake address space, deliberate faults, a
//! program that touches its memory, and contents for pages.
//!
//! Bottom up: [`random`] -> [`fill`] -> [`fake`] (pages, presence, waiters) -> [`trouble`],
//! [`disk`], [`remote`] (faults) -> [`program`] (touch, fault, wait). For any test: [`scratch`],
//! [`counting`] (allocations), [`mutations`] (for fuzz targets), [`sharer`] (a child of fork). Not
//! fakes: [`redis`], servers that tests kill; [`kernel_swap`], swap of the kernel; and
//! [`unthreaded`], an engine over real page tables.

pub mod random;
pub mod scratch;
pub mod counting;
pub mod mutations;
pub mod sharer;
pub mod fill;
pub mod fake;
pub mod trouble;
pub mod disk;
pub mod remote;
pub mod program;
pub mod redis;
pub mod kernel_swap;
pub mod unthreaded;
