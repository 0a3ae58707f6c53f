//! The system calls of Linux 6.18 on x86-64: the memory that each names, and how it is served.
//!
//! The table (`table/`, by field) has one [`CallRow`](row::CallRow) for each call. [`look_up`] is
//! an array index. A row describes in a small language (`row.rs`) the memory to which the call's
//! arguments point. If the language can't describe it, a function of `decode/` does. Most of those
//! look at a command that an argument gives.
//!
//! `plain.rs` makes a call while its memory is held. `pieces.rs` and `messages.rs` make large calls
//! in parts, and `others.rs` calls on the memory of other processes. `lent.rs` makes those that would lend pages to the kernel. `seen.rs` changes what some
//! calls report. `handlers/` has the calls that need more.
//!
//! Rules for what a row names:
//! - A span is for writing only if the kernel writes there. Other memory may be read-only, or
//!   write-protected to detect changes.
//! - A span is as long as the kernel may touch, and not longer. It may reach over the end of a
//!   mapping, because what isn't mapped is skipped.
//! - A nested struct is a span, and so is the memory that it points to. The struct is read once
//!   here and once by the kernel. A program that changes an iovec during its call may get EFAULT. A
//!   copy in place of the struct would prevent that, but the kernel writes back to msghdr and
//!   mmsghdr.
//! - A pointer that can't be read names nothing more. The kernel fails with EFAULT, or first does
//!   what comes before the pointer (recvmmsg). The other arguments are still named.
//! - Memory that only other threads, devices or later calls touch isn't named.

mod operands;
pub mod row;
mod sizes;
mod decode;
mod pieces;
mod others;
mod messages;
mod lent;
mod own_files;
mod seen;
mod own_program;
pub(crate) mod plain;
mod call;
mod handlers;
pub(crate) mod table;

use crate::keeper::{BadAddress, NamedSpan};

pub(crate) use handlers::threads::has_no_counter;
pub use own_program::{note_program, own_program, program_at};

/// Returns the row of a call. If x86-64 has no call with this number, returns the row of unknown
/// calls.
pub fn look_up(nr: usize) -> &'static row::CallRow {
    table::TABLE.look_up(nr)
}

/// Calls `out` with the ranges that a call names. `read` reads the program's memory where structs
/// have pointers inside.
///
/// # Errors
/// A struct can't be read. `out` was called with all other ranges. The caller should hold those and
/// make the call. The kernel will fail at the struct too.
pub fn name(
    row: &row::CallRow,
    args: &[usize; 6],
    read: operands::ReadMemory,
    out: &mut dyn FnMut(NamedSpan),
) -> Result<(), BadAddress> {
    row.name_memory(args, read, out)
}

#[cfg(test)]
mod tests;
