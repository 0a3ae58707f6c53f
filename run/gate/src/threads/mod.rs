//! Makes threads and processes, and ends them.
//!
//! The kernel starts a new task unarmed, so its first instructions must be the gate's. A task that
//! shares the memory begins on a slot of its own. The slot has a copy of the frame of the parent's
//! call, by which the task leaves the gate. So the slot of a parent that waits for a child of
//! `vfork` stays untouched. A copy of the process continues inside its parent's call.
mod behalf;
mod copy;
mod end;
mod retire;
mod exec;
mod spawn;

pub use behalf::{child, hand_over, is_at_rest, keep_home, serve_errands, succeed};
pub use end::{all_are_gone, exit, first_has_exited, keep_locks, robust_list};
pub use exec::execute;
pub use retire::{leave_for_good, retire};
pub use spawn::clone;
