//! The calls that change mappings, discard memory, or give it away.
pub mod call;
pub mod advice;
pub mod given;
pub mod zero_device;
mod locks;
mod remap;
pub mod change;
#[cfg(test)]
mod tests;
