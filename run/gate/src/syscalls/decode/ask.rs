//! Asks the kernel questions while a call's memory is named.
use memfold_os::raw;

/// Makes a system call that asks the kernel something. Returns `None` if the call fails.
///
/// # Safety
/// - The conditions of the system call hold. What its arguments point to is the gate's own.
pub unsafe fn ask(number: i64, args: [usize; 6]) -> Option<usize> {
    // SAFETY: the caller promises that the conditions of the system call hold.
    unsafe { raw::system_call(number, args) }.ok().map(|v| v as usize)
}
