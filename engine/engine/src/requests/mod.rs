//! Requests to the engine's own threads, and where a fork pauses them.
pub mod background;
pub mod device_faults;
pub mod pause;
