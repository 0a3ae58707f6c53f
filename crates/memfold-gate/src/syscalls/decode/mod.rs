//! What the language of the entries can't say: functions that name a call's memory themselves.

mod ask;
pub mod vectors;
pub mod events;
mod requests;
mod ioctl;
pub mod control;
pub mod ipc;
pub mod process;
pub mod system;
pub mod keys;
pub mod bpf;

use crate::syscalls::row::Class;

/// Who makes a call whose command decides; `None`: as its entry says.
pub fn class(number: usize, args: &[usize; 6]) -> Option<Class> {
    match number as i64 {
        libc::SYS_ioctl => ioctl::class(args),
        libc::SYS_fcntl => control::fcntl_class(args),
        libc::SYS_prctl => control::prctl_class(args),
        // A filter is inherited by what the gate does, so the core must know.
        libc::SYS_seccomp => Some(Class::Thread),
        _ => None,
    }
}
