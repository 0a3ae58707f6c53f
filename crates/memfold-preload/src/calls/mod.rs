//! Calls of libc that the library stands in front of.
pub mod real;
mod clone;
pub mod ahead;
pub mod marks;
pub mod lent;
pub mod moved;
pub mod userfault;
mod syscall;
mod threads;
