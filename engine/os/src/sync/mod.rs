//! Locks and atomics from one place, so that a model checker can replace them: futex locks in
//! production, shuttle's with the feature `shuttle`. None of them poisons, allocates, or uses
//! thread-local storage.
//!
//! A panic while a lock is held ends the process (the engine is built with `panic = "abort"`), so
//! poisoning has no use.

// Statics use it also under the model checker.
#[cfg_attr(feature = "shuttle", allow(dead_code))]
mod futex;
#[cfg(feature = "shuttle")]
mod model;
mod fork_cell;

pub use fork_cell::ForkCell;
/// The lock for statics: a futex lock also under the model checker, whose own locks live for one
/// run only. While it is held, the thread takes no other lock and doesn't wait.
pub use futex::Mutex as StaticMutex;

#[cfg(not(feature = "shuttle"))]
pub use futex::{Condvar, Mutex, MutexGuard, ReadGuard, RwLock, WriteGuard};
#[cfg(feature = "shuttle")]
pub use model::{Condvar, Mutex, MutexGuard, ReadGuard, RwLock, WriteGuard};

/// Atomics: `core`'s, or shuttle's with the feature `shuttle`.
pub mod atomic {
    #[cfg(not(feature = "shuttle"))]
    pub use core::sync::atomic::*;
    #[cfg(feature = "shuttle")]
    pub use shuttle::sync::atomic::*;
}
