//! The machine: every kernel setting is noted before it is changed, and restored whatever happens.

pub mod machine;
pub mod program;
pub mod journal;
pub mod guard;
pub mod folio;
pub mod zram;
pub mod cgroup;
