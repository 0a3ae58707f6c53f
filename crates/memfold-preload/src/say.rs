//! One line to standard error, by one system call, without stdio or allocation.
use core::fmt::{self, Write};
use memfold_sys::raw::write_stderr;

/// Longer lines are cut off.
const LINE_LEN_MAX: usize = 1024;

/// Writes `memfold: TEXT` and a line end to standard error.
pub fn say(text: fmt::Arguments<'_>) {
    let mut line = Line { bytes: [0; LINE_LEN_MAX], len: 0 };
    let _ = write!(line, "memfold: {text}");
    line.bytes[line.len] = b'\n';
    write_stderr(&line.bytes[..=line.len]);
}

/// Writes `memfold: TEXT` and ends the process with memfold's own status, 125. No exit handler of the program runs.
pub fn die(text: fmt::Arguments<'_>) -> ! {
    say(text);
    // SAFETY: ends the process, all threads at once; never returns.
    unsafe { libc::_exit(125) }
}

struct Line {
    bytes: [u8; LINE_LEN_MAX],
    /// Always less than the capacity: the line end has its place.
    len: usize,
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = LINE_LEN_MAX - 1 - self.len;
        let taken = &text.as_bytes()[..text.len().min(room)];
        self.bytes[self.len..self.len + taken.len()].copy_from_slice(taken);
        self.len += taken.len();
        Ok(())
    }
}
