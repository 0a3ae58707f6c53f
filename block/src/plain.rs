//! Errors as people read them.
use std::fmt::Display;

/// An error's text without Rust's `(os error 2)`.
pub fn plain(error: impl Display) -> String {
    let mut text = error.to_string();
    if let Some(end) = text.find(" (os error") {
        text.truncate(end);
    }
    text
}
