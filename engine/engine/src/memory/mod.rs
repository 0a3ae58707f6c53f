//! Memory: the engine's frames, the program's page table, and how much of both may be held.
pub mod frames;
pub mod mapper;
pub mod quota;
pub mod budget;
pub mod unshare;
#[cfg(test)]
mod tests;
