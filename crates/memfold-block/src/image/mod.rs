//! Devices in a file: saved at the end, or followed as they change.
//!
//! `format.rs` has the format of an image; `place.rs` its path, and its replacement by a new one;
//! `read.rs` verifies one and puts it into devices; `writer.rs` writes one, group by group;
//! `journal.rs` decides when.

mod format;
mod place;
mod read;
mod writer;
mod journal;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
#[cfg(test)]
mod crash;
#[cfg(test)]
mod tests;

pub use format::{Entry, ImageError};
pub use journal::{Journal, save};
pub use place::Place;
pub use read::Image;
