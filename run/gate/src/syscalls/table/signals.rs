//! Rows of calls on signals.
use crate::syscalls::handlers::signals;
use crate::syscalls::row::Arg::{In, Out};
use crate::syscalls::row::OperandSize::{Bytes, Len};
use crate::syscalls::row::{Arg, CallRow};
use crate::syscalls::row::{ContextHandler, MaskUse, ServedBy, direct, plain, special};
use crate::syscalls::sizes::*;

const MASK: usize = 8;

/// Returns the row of a call that takes a set of signals.
const fn masked(
    how: (u8, MaskUse),
    number: u16,
    name: &'static str,
    operands: &'static [Arg],
) -> CallRow {
    CallRow::new(ServedBy::Masked(how.0, how.1), number, name, operands)
}

pub(super) const CALLS: &[CallRow] = &[
    direct(
        13,
        "rt_sigaction",
        &[In(1, Bytes(SIGACTION)), Out(2, Bytes(SIGACTION))],
        signals::set_action,
    ),
    special(14, "rt_sigprocmask", &[In(1, Bytes(MASK)), Out(2, Bytes(MASK))], signals::set_mask),
    CallRow::new(ServedBy::InContext(ContextHandler(signals::resume)), 15, "rt_sigreturn", &[]),
    plain(34, "pause", &[]),
    special(62, "kill", &[], signals::kill),
    special(127, "rt_sigpending", &[Out(0, Len(1))], signals::pending),
    masked(
        (0, MaskUse::Awaited),
        128,
        "rt_sigtimedwait",
        &[In(0, Bytes(MASK)), Out(1, Bytes(SIGINFO)), In(2, Bytes(TIMESPEC))],
    ),
    special(129, "rt_sigqueueinfo", &[In(2, Bytes(SIGINFO))], signals::queue),
    masked((0, MaskUse::Blocked), 130, "rt_sigsuspend", &[In(0, Bytes(MASK))]),
    special(
        131,
        "sigaltstack",
        &[In(0, Bytes(STACK)), Out(1, Bytes(STACK))],
        signals::set_alternate,
    ),
    plain(200, "tkill", &[]),
    // The kernel continues a call by this after a stop interrupted it. What that call named is
    // still held.
    plain(219, "restart_syscall", &[]),
    plain(234, "tgkill", &[]),
    masked((1, MaskUse::Read), 282, "signalfd", &[In(1, Bytes(MASK))]),
    masked((1, MaskUse::Read), 289, "signalfd4", &[In(1, Bytes(MASK))]),
    special(297, "rt_tgsigqueueinfo", &[In(3, Bytes(SIGINFO))], signals::queue_for_thread),
    special(424, "pidfd_send_signal", &[In(2, Bytes(SIGINFO))], signals::queue),
];
