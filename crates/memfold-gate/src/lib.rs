//! The gate: every system call of a program passes here, so that the memory it names can be kept
//! present until it returns (x86-64 Linux 5.11 or newer).
//!
//! It stands alone: it knows no pager. Who owns the memory is asked through [`Keeper`].
#![cfg_attr(not(test), no_std)]
#![cfg(all(target_arch = "x86_64", target_os = "linux"))]

// Bottom first: a module imports only from modules listed above it.
mod keeper;
pub mod calls;

pub use keeper::{BadAddress, Ending, Hold, Keeper, SPANS_MAX, Span, Spans};
