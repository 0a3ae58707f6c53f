//! What the processes of a run and `memfold run` say to each other.
pub mod mailbox;
pub mod door;
