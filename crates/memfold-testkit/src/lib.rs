//! What the tests of the engine put in place of the kernel: a fake address space, faults on
//! purpose, a program that touches its memory, and bytes to fill it with.
//!
//! Bottom up: [`random`] -> [`fill`] -> [`fake`] (pages, presence, waiters) -> [`trouble`],
//! [`disk`], [`remote`] (what may go wrong) -> [`program`] (touch, fault, wait). For any test:
//! [`scratch`], [`counting`] (allocations), [`mutations`] (of a fuzzer),
//! [`sharer`] (a child of fork). No fakes are [`redis`],
//! servers to be killed, [`kernel_swap`], swap to be swapped to, and
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
