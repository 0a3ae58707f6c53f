//! How a process continues without an engine.
use crate::diagnostics;
use core::fmt::Arguments;
use memfold_run::member;

/// Ends the program that `memfold run` was given, with a message, if it has not begun yet. A
/// process that this program has started runs on unmanaged after a message, as it would without
/// memfold.
pub fn unserved(why: Arguments) {
    if member::is_first() {
        diagnostics::die(why);
    }
    unserved_later(why);
}

/// Warns that a process that has already begun runs unmanaged. Its calls don't pass the gate, so it
/// may come to have a filter that no process of the run notes.
pub fn unserved_later(why: Arguments) {
    member::note_filter(true);
    let number = member::number();
    diagnostics::warn(format_args!(
        "warning: Process {number} runs unmanaged, with all of its memory uncompressed: {why}"
    ));
}
