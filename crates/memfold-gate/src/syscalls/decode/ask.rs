//! Questions to the kernel while a call's memory is named.
use memfold_os::raw;

/// Asks the kernel something; what it points to is the gate's own.
///
/// # Safety
/// - As the call's own conditions say.
pub unsafe fn ask(number: i64, args: [usize; 6]) -> Option<usize> {
    // SAFETY: the caller's promise.
    unsafe { raw::system_call(number, args) }.ok().map(|v| v as usize)
}
