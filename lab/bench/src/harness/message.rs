//! Messages of a walking child to its parent: one JSON value per line on its standard output.

use crate::harness::workload::PhaseResult;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::Write;

/// A message.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Message {
    /// The area exists and is untouched; the child waits for a line on its standard input.
    Ready {
        /// The walking process. Under `memfold run` it is not the process that was started.
        pid: i32,
    },
    /// A phase has ended.
    Phase(PhaseResult),
    /// All phases have ended and the area is verified. The area exists until standard input ends.
    Done {
        /// Wrong bytes in the final, full comparison.
        bytes_wrong: u64,
        /// memfold's counters, if the area is memfold's.
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

/// Waits for a line from standard input, or its end. Both mean "continue".
pub fn wait_for_line() -> anyhow::Result<()> {
    std::io::stdin().read_line(&mut String::new())?;
    Ok(())
}
