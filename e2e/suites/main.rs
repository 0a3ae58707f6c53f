//! End-to-end tests of the command: real processes under the built `memfold`. They are one program,
//! so that all CPUs are busy until the end. `cargo test -p memfold-e2e fork::` runs one
//! file.
mod block;
mod common;
mod limits;
mod managed;
mod reports;
mod storage;
