//! What makes threads and processes, and ends them.
//!
//! A new task's dispatch is off, so its first instructions are the gate's. One that shares the
//! memory begins on a slot of its own with a copy of the frame of its parent's call, and leaves the
//! gate as its parent does: a parent that waits for a child of `vfork` keeps its slot untouched. A
//! copy of the process goes on where its parent's call is.
mod behalf;
mod copy;
mod end;
mod exec;
mod spawn;

pub use behalf::{child, hand_over, keep_home, serve_errands};
pub use end::{all_are_gone, exit, first_has_exited, keep_locks, robust_list};
pub use exec::execute;
pub use spawn::clone;
