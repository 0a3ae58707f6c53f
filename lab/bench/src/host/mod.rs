//! The machine: every kernel setting is recorded before it is changed, and restored in all cases.

pub mod machine;
pub mod program;
pub mod journal;
pub mod guard;
pub mod folio;
pub mod zram;
pub mod cgroup;
