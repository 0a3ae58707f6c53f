//! What the calls mean that change mappings, discard, or give memory away.
pub mod advice;
pub mod given;
pub mod change;
#[cfg(test)]
mod tests;
