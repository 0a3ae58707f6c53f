//! Why a benchmark did not start.

use std::fmt;

/// An input or a machine on which the benchmark can't run; the message is one clear line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// An argument that makes no sense.
    Usage(String),
    /// The corpus can't be read, built or is too small.
    Corpus(String),
    /// A peer needs a right or a kernel feature that is not there.
    Machine(String),
}

impl Refusal {
    /// The exit status for this refusal, after sysexits.h: 64 usage, 66 no input, 77 permission or
    /// machine.
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
