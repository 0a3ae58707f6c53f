//! What becomes of a process that can't be served.
use crate::{say, slots};
use core::fmt::Arguments;

/// Ends the program that `memfold run` was given, with a message, as it has not begun yet. A process that this has started is
/// no worse off than without memfold: it runs on unmanaged, after a message.
pub fn unserved(why: Arguments) {
    if slots::is_first() {
        say::die(why);
    }
    let pid = rustix::process::getpid().as_raw_nonzero();
    say::say(format_args!("warning: process {pid} runs unmanaged, all of it in memory: {why}"));
}
