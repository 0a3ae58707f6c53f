//! What the language of the entries can't say: functions that name a call's memory themselves.

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

use crate::calls::entry::Class;
use memfold_sys::raw;

/// Who makes a call whose command decides; `None`: as its entry says.
pub fn class(number: usize, args: &[usize; 6]) -> Option<Class> {
    match number as i64 {
        libc::SYS_ioctl => ioctl::class(args),
        libc::SYS_prctl => control::prctl_class(args),
        // A filter is inherited by what the gate does, so the core must know.
        libc::SYS_seccomp => Some(Class::Thread),
        _ => None,
    }
}

/// Asks the kernel something on the way; what it points to is the gate's own.
///
/// # Safety
/// - As the call's own conditions say.
unsafe fn ask(number: i64, args: [usize; 6]) -> Option<usize> {
    // SAFETY: the caller's promise.
    unsafe { raw::system_call(number, args) }.ok().map(|v| v as usize)
}
