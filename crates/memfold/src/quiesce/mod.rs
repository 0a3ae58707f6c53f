//! The engine at rest around a fork: its threads are stopped, and what happens meanwhile is written down.
pub mod unshare;
pub mod gate;
pub mod copy_moment;
pub mod journal;
#[cfg(test)]
mod tests;
