//! Reasons why a benchmark does not start.

use std::fmt;

/// An input or a machine on which the benchmark can't run. The message is one line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// An invalid argument.
    Usage(String),
    /// The corpus can't be read or built, or is too small.
    Corpus(String),
    /// A peer needs a privilege or a kernel feature that is missing.
    Machine(String),
}

impl Refusal {
    /// Returns the exit status, after sysexits.h: 64 usage, 66 no input, 77 permission or machine.
    pub fn exit_code(&self) -> i32 {
        match self {
            Refusal::Usage(_) => 64,
            Refusal::Corpus(_) => 66,
            Refusal::Machine(_) => 77,
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Usage(text) | Refusal::Corpus(text) | Refusal::Machine(text) => {
                f.write_str(text)
            }
        }
    }
}

impl std::error::Error for Refusal {}
