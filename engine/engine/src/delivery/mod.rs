//! Delivery: how faults reach the pager, and the threads that work in the background.
pub mod background;
pub(crate) mod sigbus;
#[cfg(not(feature = "shuttle"))]
pub mod gate;
#[cfg(feature = "shuttle")]
#[path = "no_gate.rs"]
pub mod gate;
pub(crate) mod region;
