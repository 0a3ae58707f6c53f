//! Tests of parts of this folder that have no public door.
mod cluster;
mod expiry;
mod groups;
