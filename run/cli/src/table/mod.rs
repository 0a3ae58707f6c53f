//! The shared memory of a run, as far as it takes sockets and /proc to hand it over and to measure
//! processes.
mod door;
pub mod hand_over;
pub mod processes;
