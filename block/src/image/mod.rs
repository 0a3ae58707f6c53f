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

pub use format::{DeviceEntry, ImageError};
pub use journal::{ImageJournal, save};
pub use place::ImagePlace;
pub use read::VerifiedImage;
