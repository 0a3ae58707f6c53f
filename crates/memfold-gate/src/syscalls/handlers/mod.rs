//! Calls that need more than to be made: by subject, one function for each row that names one.
//!
//! Each is a [`CallHandler`](crate::syscalls::row::Handler): it returns the call's result.
mod namespaces;
mod filter;
pub mod descriptors;
pub mod rights;
pub mod signals;
pub mod threads;
pub mod seccomp;
pub mod commands;
