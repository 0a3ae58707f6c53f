//! Names the memory of calls that the rows' language can't describe.

mod ask;
pub mod vectors;
pub mod events;
mod requests;
pub mod ioctl;
pub mod control;
pub mod ipc;
pub mod process;
pub mod system;
pub mod keys;
pub mod bpf;
