//! Locks and atomics from one place, so that a model checker can replace them: futex locks in
//! production, shuttle's under `--cfg shuttle`. None of them poisons, allocates, or uses
//! thread-local storage.
//!
//! A panic while a lock is held ends the process (the engine is built with `panic = "abort"`), so
//! poisoning has no use.

// Statics use it also under the model checker.
#[cfg_attr(shuttle, allow(dead_code))]
mod futex;
#[cfg(shuttle)]
mod model;
mod fork_cell;

pub use fork_cell::ForkCell;
/// The lock for statics: a futex lock also under the model checker, whose own locks live for one
/// run only. While it is held, the thread takes no other lock and doesn't wait.
pub use futex::Mutex as StaticMutex;

#[cfg(not(shuttle))]
pub use futex::{Condvar, Mutex, MutexGuard, ReadGuard, RwLock, WriteGuard};
#[cfg(shuttle)]
pub use model::{Condvar, Mutex, MutexGuard, ReadGuard, RwLock, WriteGuard};

/// Atomics: `core`'s, or shuttle's under `--cfg shuttle`.
pub mod atomic {
    #[cfg(not(shuttle))]
    pub use core::sync::atomic::*;
    #[cfg(shuttle)]
    pub use shuttle::sync::atomic::*;
}
