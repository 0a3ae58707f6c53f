//! Messages of a process. They go to `memfold run`, which prints each of them once on its own
//! standard error, because the program's streams belong to the program. This module uses neither
//! stdio nor allocation.
//!
//! If `memfold run` is gone or can't be reached, warnings are dropped. The reason why a process
//! ends is then printed on the process's own standard error, because no other process would print
//! it.
pub mod addresses;
pub mod limit;
pub mod unserved;

use core::fmt;
use memfold_os::raw::{set_ender, set_warner, system_call, write_stderr};
use memfold_os::text::TextBuffer;
use memfold_run::mailbox::LINE_BYTES_MAX;
use memfold_run::member;

const PREFIX: &str = "memfold: ";
type DiagnosticLine = TextBuffer<{ PREFIX.len() + LINE_BYTES_MAX + 1 }>;

/// Sends the engine's warnings to `memfold run` from now on.
pub fn listen() {
    set_ender(|why| die(format_args!("{why}")));
    set_warner(|text| {
        let text = text.strip_prefix(PREFIX.as_bytes()).unwrap_or(text);
        leave(false, text.strip_suffix(b"\n").unwrap_or(text));
    });
}

/// Prints a warning once for all processes of the run.
pub fn warn(text: fmt::Arguments<'_>) {
    leave(false, DiagnosticLine::of(text).as_bytes());
}

/// Calls [`warn`] once in a process, so that a frequent event doesn't fill the mailbox.
macro_rules! warn_once {
    ($text:literal) => {{
        static SAID: core::sync::atomic::AtomicBool = core::sync::atomic::AtomicBool::new(false);
        if !SAID.swap(true, core::sync::atomic::Ordering::Relaxed) {
            $crate::diagnostics::warn(format_args!($text));
        }
    }};
}
pub(crate) use warn_once;

/// Reports why this process is about to end.
pub fn last_words(text: fmt::Arguments<'_>) {
    let mut line = DiagnosticLine::of(format_args!("{PREFIX}{text}"));
    if !leave(true, &line.as_bytes()[PREFIX.len()..]) {
        write_stderr(line.line());
    }
}

/// Reports why, and ends the process with memfold's own status, 125. The program's exit handlers do
/// not run.
pub fn die(text: fmt::Arguments<'_>) -> ! {
    last_words(text);
    loop {
        // SAFETY: the call has no pointers and ends the process with all threads. libc's function
        // is not used, because its system call may be one that passes the gate.
        let _ = unsafe { system_call(libc::SYS_exit_group, [125, 0, 0, 0, 0, 0]) };
    }
}

fn leave(last: bool, text: &[u8]) -> bool {
    member::mailbox().is_some_and(|mailbox| mailbox.leave(member::number(), last, text))
}
