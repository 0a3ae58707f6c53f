//! What the calls mean that change mappings, discard, or give memory away.
mod call;
pub mod advice;
pub mod given;
mod locks;
pub mod change;
#[cfg(test)]
mod tests;
