//! What the processes of a run share with this one, as far as it takes sockets and /proc.
mod door;
pub mod hand_over;
pub mod processes;
