//! Makes threads and processes, and ends them.
//!
//! A new task is unarmed, so its first instructions must be the gate's. A task that shares the memory
//! begins on a slot of its own, with a copy of the frame of its parent's call, and leaves the gate by it.
//! A parent that waits for a child of `vfork` so keeps its slot untouched. A copy of the process goes on
//! inside its parent's call.
mod behalf;
mod copy;
mod end;
mod exec;
mod spawn;

pub use behalf::{child, hand_over, keep_home, serve_errands};
pub use end::{all_are_gone, exit, first_has_exited, keep_locks, robust_list};
pub use exec::execute;
pub use spawn::clone;
