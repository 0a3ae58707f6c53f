//! Sets of addresses, and what is known of the memory in them.
pub mod ranges;
pub mod state;
