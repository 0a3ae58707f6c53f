//! Reports about a run.
pub mod figures;
pub mod json;
pub mod recommended;
pub mod stats_file;
pub mod summary;
