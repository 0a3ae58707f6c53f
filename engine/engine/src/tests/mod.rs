//! Tests of parts that have no public door.
mod fault;
mod fingerprint;
mod ranges;
mod load_by_copy;
mod writeback;
mod unshare;
mod held;
mod idle;
mod kept;
