//! Devices in a file: saved at the end, or followed as they change.
//!
//! `format.rs` says what an image is made of; `read.rs` verifies one and puts it into devices;
//! `journal.rs` writes one, at once or group by group.

mod format;
mod read;
mod journal;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
#[cfg(test)]
mod tests;

pub use format::{Entry, ImageError};
pub use journal::{Journal, save};
pub use read::{Extent, read_head, restore, scan};
