//! Tests of private parts of this crate.
mod cluster;
mod expiry;
mod groups;
