//! Sets of addresses, and what is known of the memory there.
pub mod ranges;
pub mod statics;
pub mod state;
