//! How large the process is, and what it may have.
pub mod process_size;
pub mod share;
