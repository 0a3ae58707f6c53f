//! The limit, and how the processes of a run share it.
mod limit;
mod many;
mod overcommit;
mod overshoot;
mod users;
