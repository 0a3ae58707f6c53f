//! The state that the processes of a run share with `memfold run`, without an engine: the table
//! with a slot for each process, the bounds of the run and their shares, the messages that
//! processes send to `memfold run`, the samples for `memfold record`, and the ways to get at all of these.
//!
//! Most of it is atomics in shared memory. Another process may write any value there at any time.
#![cfg_attr(not(test), no_std)]
extern crate alloc;

pub mod fair_share;
pub mod group;
pub mod mailbox;
pub mod door;
pub mod samples;
pub mod request;
pub mod loaded_program;
pub mod table;
pub mod member;
pub mod users;
pub mod census;
