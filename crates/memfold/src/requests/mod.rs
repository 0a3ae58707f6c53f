//! What is asked of the engine's own threads, and where a fork stops them.
pub mod background;
pub mod device_faults;
pub mod pause;
