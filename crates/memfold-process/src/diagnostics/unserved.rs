//! What becomes of a process that can't be served.
use crate::diagnostics;
use core::fmt::Arguments;
use memfold_run::member;

/// Ends the program that `memfold run` was given, with a message, as it has not begun yet. A
/// process that this has started is no worse off than without memfold: it runs on unmanaged, after
/// a message.
pub fn unserved(why: Arguments) {
    if member::is_first() {
        diagnostics::die(why);
    }
    unserved_later(why);
}

/// The same of one that has begun.
pub fn unserved_later(why: Arguments) {
    let number = member::number();
    diagnostics::warn(format_args!(
        "warning: Process {number} runs unmanaged, with all of its memory uncompressed: {why}"
    ));
}
