//! Delivery: how faults reach the pager, and the threads that work in the background.
pub mod background;
pub(crate) mod sigbus;
#[cfg(all(target_arch = "x86_64", not(shuttle)))]
pub mod gate;
#[cfg(not(all(target_arch = "x86_64", not(shuttle))))]
#[path = "no_gate.rs"]
pub mod gate;
pub(crate) mod region;
