//! Who brings faults to the pager, and the threads that work in the background.
pub mod background;
pub(crate) mod sigbus;
pub mod program;
pub(crate) mod region;
