//! Tests of parts that have no public door.
mod moment;
mod cluster;
mod expiry;
mod fault;
mod fingerprint;
mod frames;
mod hint;
mod small;
mod swap;
mod writeback;
