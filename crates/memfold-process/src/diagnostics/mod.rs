//! What a process says goes to `memfold run`, which says it on its own standard error, each thing
//! once: the program's streams are the program's. Without stdio or allocation.
//!
//! If `memfold run` is gone, or there never was a way to it, warnings aren't said; why a process
//! ends is said on its own standard error, as nobody else would.
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

/// From now on what the engine warns of goes the same way.
pub fn listen() {
    set_ender(|why| die(format_args!("{why}")));
    set_warner(|text| {
        let text = text.strip_prefix(PREFIX.as_bytes()).unwrap_or(text);
        leave(false, text.strip_suffix(b"\n").unwrap_or(text));
    });
}

/// Says something of the run, once for all of its processes.
pub fn warn(text: fmt::Arguments<'_>) {
    leave(false, DiagnosticLine::of(text).as_bytes());
}

/// [`warn`], once in a process: so that what happens often fills no mailbox.
macro_rules! warn_once {
    ($text:literal) => {{
        static SAID: core::sync::atomic::AtomicBool = core::sync::atomic::AtomicBool::new(false);
        if !SAID.swap(true, core::sync::atomic::Ordering::Relaxed) {
            $crate::diagnostics::warn(format_args!($text));
        }
    }};
}
pub(crate) use warn_once;

/// Says why this process is about to end.
pub fn last_words(text: fmt::Arguments<'_>) {
    let mut line = DiagnosticLine::of(format_args!("{PREFIX}{text}"));
    if !leave(true, &line.as_bytes()[PREFIX.len()..]) {
        write_stderr(line.line());
    }
}

/// Says why, and ends the process with memfold's own status, 125. No exit handler of the program
/// runs.
pub fn die(text: fmt::Arguments<'_>) -> ! {
    last_words(text);
    loop {
        // SAFETY: ends the process, all threads at once. Not by libc's function, whose system call
        // may be one that passes the gate.
        let _ = unsafe { system_call(libc::SYS_exit_group, [125, 0, 0, 0, 0, 0]) };
    }
}

fn leave(last: bool, text: &[u8]) -> bool {
    member::mailbox().is_some_and(|mailbox| mailbox.leave(member::number(), last, text))
}
