//! What a walking child tells its parent: one JSON value a line on its standard output.

use crate::harness::workload::PhaseResult;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::Write;

/// One line from the child.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Message {
    /// The area exists and is untouched; the child waits for a line on its standard input.
    Ready {
        /// The walking process (under `memfold run` not the one that was started).
        pid: i32,
    },
    /// A phase is over.
    Phase(PhaseResult),
    /// Everything is over and verified; the area still exists until standard input ends.
    Done {
        /// Wrong bytes in the last, whole comparison.
        bytes_wrong: u64,
        /// memfold's counters, where it is memfold's area.
        counters: BTreeMap<String, u64>,
    },
}

/// Writes one value as a line to standard output.
pub fn say(what: &impl Serialize) -> anyhow::Result<()> {
    let mut line = serde_json::to_string(what)?;
    line.push('\n');
    let mut out = std::io::stdout().lock();
    out.write_all(line.as_bytes())?;
    Ok(out.flush()?)
}

/// A line from standard input, or its end: both mean "go on".
pub fn wait_for_line() -> anyhow::Result<()> {
    std::io::stdin().read_line(&mut String::new())?;
    Ok(())
}
