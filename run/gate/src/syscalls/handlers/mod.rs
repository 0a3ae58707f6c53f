//! Serves calls that need more than a hold. There is one function for each row that names one, in
//! files by subject.
//!
//! Each is a [`CallHandler`](crate::syscalls::row::CallHandler), which returns the call's result.
mod namespaces;
mod filter;
pub mod descriptors;
pub mod rights;
pub mod signals;
pub mod threads;
pub mod seccomp;
pub mod commands;
