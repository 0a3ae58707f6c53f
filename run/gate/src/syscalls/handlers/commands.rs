//! Decides how a call with many commands is served, by the command that an argument gives.
use crate::syscalls::decode::{control, ioctl};
use crate::syscalls::handlers::descriptors;
use crate::syscalls::handlers::rights::give_up_rights;
use crate::syscalls::handlers::seccomp::seccomp;
use crate::syscalls::handlers::threads::{PR_SET_TSC, PR_TSC_SIGSEGV, be_traced};
use crate::syscalls::handlers::threads::{refuse_counter, set_dispatch};
use crate::syscalls::row::{CallHandler, DirectHandler, RowHandler, ServedBy};
use crate::user_dispatch::PR_SET_SYSCALL_USER_DISPATCH;

fn special(handler: CallHandler) -> ServedBy {
    ServedBy::Special(RowHandler(handler))
}

/// Returns how `ioctl` is served.
pub fn of_ioctl(args: &[usize; 6]) -> ServedBy {
    if ioctl::gives_memory(args) { ServedBy::Change } else { ServedBy::Plain }
}

/// Returns how `fcntl` is served.
pub fn of_fcntl(args: &[usize; 6]) -> ServedBy {
    match control::asks_for_descriptor(args) {
        true => ServedBy::Direct(DirectHandler(descriptors::of_first)),
        false => ServedBy::Plain,
    }
}

/// Returns how `ptrace` is served.
pub fn of_ptrace(args: &[usize; 6]) -> ServedBy {
    let is_wish = args[0] == libc::PTRACE_TRACEME as usize;
    if is_wish { special(be_traced) } else { ServedBy::Plain }
}

/// Returns how `prctl` is served.
pub fn of_prctl(args: &[usize; 6]) -> ServedBy {
    match args[0] as i32 {
        PR_SET_SYSCALL_USER_DISPATCH => special(set_dispatch),
        libc::PR_SET_SECCOMP => special(seccomp),
        libc::PR_SET_DUMPABLE | libc::PR_SET_NO_NEW_PRIVS => special(give_up_rights),
        _ if args[..2] == [PR_SET_TSC, PR_TSC_SIGSEGV] => special(refuse_counter),
        _ if control::changes_mappings(args) => ServedBy::Change,
        _ => ServedBy::Trapped,
    }
}
