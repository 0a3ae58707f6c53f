//! What a run came to.
pub mod figures;
pub mod json;
pub mod stats_file;
pub mod summary;
