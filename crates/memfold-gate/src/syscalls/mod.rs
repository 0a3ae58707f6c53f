//! The system calls of Linux 6.18 on x86-64: what each is, and which memory it names.
//!
//! One [`CallRow`](row::CallRow) a call, in `table/`, by field; [`look_up`] is an array index. What the rows'
//! little language (`row.rs`) can't say is said by functions in `decode/`, mostly by the command that
//! an argument gives.
//!
//! Rules:
//! - A span that is not written to must not be: it may be read-only, or write-protected to tell
//!   whether it changes.
//! - Where the kernel reads or writes by what is there (an address that turns out shorter), the span
//!   is the most that it may touch. Longer spans than that are wrong; spans that reach over the end
//!   of a mapping are not, as whoever touches them passes over what isn't there.
//! - A nested struct is a span itself, and so is what it points to. It is read once here and once by
//!   the kernel: a program that changes an iovec while its call is under way may be told EFAULT.
//!   Copies in place of the program's would prevent that, but msghdr and mmsghdr are written back
//!   to, and no program is right that does so; the vectors of calls in pieces are copies anyway.
//! - A pointer that can't be read names nothing more: the kernel will say EFAULT itself, or do what
//!   comes before it first (recvmmsg). All other arguments are named all the same.
//! - Memory that only other threads, devices or later calls touch isn't named.

mod operands;
pub mod row;
mod sizes;
mod decode;
mod pieces;
mod messages;
mod lent;
mod seen;
pub(crate) mod plain;
mod call;
mod handlers;
pub(crate) mod table;

use crate::keeper::{BadAddress, Span};

pub(crate) use handlers::threads::has_no_counter;

/// The row of a call; an unknown one for numbers that x86-64 has no call for.
pub fn look_up(nr: usize) -> &'static row::CallRow {
    table::TABLE.look_up(nr)
}

/// Calls `out` with the ranges that a call names. `read` reads the program's memory where structs
/// have pointers inside.
///
/// # Errors
/// A struct can't be read. `out` then got what is named besides: hold that, and make the call; the
/// kernel will find the same.
pub fn name(
    row: &row::CallRow,
    args: &[usize; 6],
    read: operands::ReadMemory,
    out: &mut dyn FnMut(Span),
) -> Result<(), BadAddress> {
    row.name_memory(args, read, out)
}

#[cfg(test)]
mod tests;
