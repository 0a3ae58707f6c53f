//! The size of the process, and its share of the limit.
pub mod pace;
pub mod sharing;
pub mod process_size;
pub mod share;
