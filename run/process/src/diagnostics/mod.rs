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
use core::sync::atomic::{AtomicU64, Ordering::SeqCst};
use memfold_os::raw::{set_ender, set_warner, system_call, write_stderr};
use memfold_os::text::TextBuffer;
use memfold_os::thread::{sleep_ns, thread_id};
use memfold_run::mailbox::LINE_BYTES_MAX;
use memfold_run::member;
use rustix::process::getpid;

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
fn last_words(text: fmt::Arguments<'_>) {
    let mut line = DiagnosticLine::of(format_args!("{PREFIX}{text}"));
    if !leave(true, &line.as_bytes()[PREFIX.len()..]) {
        write_stderr(line.line());
    }
}

/// The process and thread that ends first, as [`own_identity`] gives it; 0 for none.
static FIRST: AtomicU64 = AtomicU64::new(0);
/// The last value of [`FIRST`] whose thread has reported why.
static REPORTED: AtomicU64 = AtomicU64::new(0);
/// How often another thread looks whether the first one has reported, and the time between.
const LOOKS: usize = 1000;
const PACE_NS: u64 = 1_000_000;

/// Reports why, and ends the process with memfold's own status, 125. The program's exit handlers do
/// not run. Threads often end for the same reason at the same time, so only the first one reports.
pub fn die(text: fmt::Arguments<'_>) -> ! {
    let own = own_identity();
    // A child of fork or vfork finds what its parent has written.
    let is_other_process = |first: u64| (first >> 32 != own >> 32).then_some(own);
    match FIRST.fetch_update(SeqCst, SeqCst, is_other_process) {
        Ok(_) => {
            last_words(text);
            REPORTED.store(own, SeqCst);
        }
        // Reporting has failed in its turn.
        Err(first) if first == own => {}
        Err(first) => {
            let mut looks = (0..LOOKS).take_while(|_| REPORTED.load(SeqCst) != first);
            looks.by_ref().for_each(|_| sleep_ns(PACE_NS));
        }
    }
    loop {
        // SAFETY: the call has no pointers and ends the process with all threads. libc's function
        // is not used, because its system call may be one that passes the gate.
        let _ = unsafe { system_call(libc::SYS_exit_group, [125, 0, 0, 0, 0, 0]) };
    }
}

/// Returns the number of the process, and below it that of the thread.
fn own_identity() -> u64 {
    (getpid().as_raw_nonzero().get() as u64) << 32 | thread_id() as u64
}

fn leave(last: bool, text: &[u8]) -> bool {
    member::mailbox().is_some_and(|mailbox| mailbox.leave(member::number(), last, text))
}
