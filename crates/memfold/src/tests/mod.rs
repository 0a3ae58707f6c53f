//! Tests of parts that have no public door.
mod cluster;
mod swap;
