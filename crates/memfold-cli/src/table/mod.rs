//! The table that the processes of a run share.
mod door;
pub mod slots;
pub mod seatless;
