//! The limit, and how the processes of a run share it.
mod groups;
mod limit;
mod many;
mod overcommit;
mod overshoot;
mod sleeping;
mod sparse;
mod users;
