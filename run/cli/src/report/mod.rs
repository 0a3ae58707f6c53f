//! Reports about a run.
pub mod curve;
pub mod figures;
pub mod recent;
pub mod recommended;
pub mod notes;
pub mod json;
pub mod output_file;
pub mod ending;
pub mod summary;
