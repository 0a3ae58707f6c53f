//! Signals.
use crate::syscalls::row::Arg::{In, Out};
use crate::syscalls::row::Size::{Bytes, Len};
use crate::syscalls::row::plain;
use crate::syscalls::row::{Arg, Class, Entry};
use crate::syscalls::sizes::*;

const MASK: usize = 8;

const fn signal(number: u16, name: &'static str, args: &'static [Arg]) -> Entry {
    Entry::new(Class::Signal, number, name, args)
}

pub(super) const CALLS: &[Entry] = &[
    signal(13, "rt_sigaction", &[In(1, Bytes(SIGACTION)), Out(2, Bytes(SIGACTION))]),
    signal(14, "rt_sigprocmask", &[In(1, Bytes(MASK)), Out(2, Bytes(MASK))]).masked_by(1),
    signal(15, "rt_sigreturn", &[]),
    plain(34, "pause", &[]),
    plain(62, "kill", &[]),
    signal(127, "rt_sigpending", &[Out(0, Len(1))]),
    signal(
        128,
        "rt_sigtimedwait",
        &[In(0, Bytes(MASK)), Out(1, Bytes(SIGINFO)), In(2, Bytes(TIMESPEC))],
    )
    .masked_by(0),
    plain(129, "rt_sigqueueinfo", &[In(2, Bytes(SIGINFO))]),
    signal(130, "rt_sigsuspend", &[In(0, Bytes(MASK))]).masked_by(0),
    signal(131, "sigaltstack", &[In(0, Bytes(STACK)), Out(1, Bytes(STACK))]),
    plain(200, "tkill", &[]),
    // The kernel's own way to go on with a call that a stop interrupted: what that call named is
    // held still.
    plain(219, "restart_syscall", &[]),
    plain(234, "tgkill", &[]),
    signal(282, "signalfd", &[In(1, Bytes(MASK))]).masked_by(1),
    signal(289, "signalfd4", &[In(1, Bytes(MASK))]).masked_by(1),
    plain(297, "rt_tgsigqueueinfo", &[In(3, Bytes(SIGINFO))]),
    plain(424, "pidfd_send_signal", &[In(2, Bytes(SIGINFO))]),
];
