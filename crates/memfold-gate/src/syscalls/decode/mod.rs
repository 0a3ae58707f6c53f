//! What the language of the entries can't say: functions that name a call's memory themselves.

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
