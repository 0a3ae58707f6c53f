//! What the processes of a run share with `memfold run`, without an engine: the table with a slot for
//! each process, the run's bounds and how they are shared out, the lines that processes leave, and
//! how a process gets at all of that.
//!
//! Most of it is atomics in shared memory, which another process may change at any time, to anything.
#![cfg_attr(not(test), no_std)]
extern crate alloc;

pub mod fair_share;
pub mod mailbox;
pub mod door;
pub mod request;
pub mod table;
pub mod member;
pub mod users;
pub mod census;
