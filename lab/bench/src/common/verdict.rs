//! How a figure compares with its target.

use serde::{Deserialize, Serialize};

/// The verdict on a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verdict {
    /// The target is reached.
    Pass,
    /// The target is not reached.
    Short,
    /// The target is not reached, and can't be: an external bound of the figure is itself short of
    /// it.
    Bound,
    /// One of the two sides was not run.
    NotRun,
    /// memfold kept more in memory than allowed, so its figure is not valid.
    Void,
}

impl Verdict {
    /// The name in reports.
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
