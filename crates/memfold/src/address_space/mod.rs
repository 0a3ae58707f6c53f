//! What changes ranges of the address space: hints of its owner, adoption, a fork.
pub(crate) mod ranges;
pub(crate) mod advice;
pub mod events;
pub(crate) mod release;
pub mod calls;
pub(crate) mod fork;
