//! How a figure compares with its target.

use serde::{Deserialize, Serialize};

/// How a row came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verdict {
    /// Reached.
    Pass,
    /// Not reached.
    Short,
    /// Not reached, nor could it be: what bounds the figure from outside is short of the target by
    /// itself.
    Bound,
    /// One of the two sides was not run.
    NotRun,
    /// The form of memfold kept more in memory than it was allowed: its figure says nothing.
    Void,
}

impl Verdict {
    /// As printed.
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Pass => "pass",
            Verdict::Short => "SHORT",
            Verdict::Bound => "can't",
            Verdict::NotRun => "not run",
            Verdict::Void => "VOID",
        }
    }
}
