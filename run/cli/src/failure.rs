//! The reason why memfold did not run a program: one line and an exit status.
use std::fmt;
use std::io::{self, ErrorKind, Write};

/// Status for memfold's own failures, as with `env` and `timeout`.
pub const OWN: u8 = 125;
/// Status for a command that was found but can't be executed.
pub const NOT_EXECUTABLE: u8 = 126;
/// Status for a command that was not found.
pub const NOT_FOUND: u8 = 127;

/// A refusal. `main` prints it as `memfold: TEXT` and exits with its status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandFailure {
    pub status: u8,
    /// One line, without the prefix `memfold: `. It may quote any text: `main` escapes control characters.
    pub text: String,
}

impl CommandFailure {
    /// Makes a failure of memfold itself, or of its arguments: status 125.
    pub fn own(text: impl fmt::Display) -> CommandFailure {
        CommandFailure { status: OWN, text: text.to_string() }
    }

    /// Makes a failure of a command that exists but can't be executed: status 126.
    pub fn not_executable(text: impl fmt::Display) -> CommandFailure {
        CommandFailure { status: NOT_EXECUTABLE, text: text.to_string() }
    }

    /// Makes a failure of a command that does not exist: status 127.
    pub fn not_found(text: impl fmt::Display) -> CommandFailure {
        CommandFailure { status: NOT_FOUND, text: text.to_string() }
    }
}

/// Prints a line to stdout. If stdout is a pipe without a reader, prints nothing.
///
/// # Errors
/// 125: stdout can't be written.
pub fn print(line: fmt::Arguments<'_>) -> Result<(), CommandFailure> {
    match writeln!(io::stdout(), "{line}") {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => {
            let text = e.to_string();
            let why = text.split(" (os error").next().unwrap_or_default();
            Err(CommandFailure::own(format!("Writing to stdout failed: {why}")))
        }
        _ => Ok(()),
    }
}

/// Prints a line to stdout as [`print`] does, and returns its error from the function.
macro_rules! say {
    ($($part:tt)*) => { $crate::failure::print(format_args!($($part)*))? };
}
