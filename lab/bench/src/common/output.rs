//! Flags that every benchmark has, and the end of its run.

use anyhow::Context;
use serde::Serialize;
use std::path::PathBuf;

/// Flags for the report and the exit status.
#[derive(clap::Args, Debug, Clone)]
pub struct Output {
    /// Write everything measured to this file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Exit with status 1 if a row is short of its target
    #[arg(long)]
    pub check: bool,
}

impl Output {
    /// Writes the report to the file of `--json`, and returns the exit status: 1 if the run failed
    /// or, with `--check`, a row is short.
    pub fn finish(
        &self,
        report: &impl Serialize,
        is_wrong: bool,
        is_good: bool,
    ) -> anyhow::Result<i32> {
        if let Some(path) = &self.json {
            let text = serde_json::to_string_pretty(report)?;
            std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))?;
        }
        Ok(i32::from(is_wrong || self.check && !is_good))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_is_written_and_status_follows_the_flags() {
        let path = std::env::temp_dir().join(format!("memfold-output-{}", std::process::id()));
        let output = |check| Output { json: Some(path.clone()), check };
        let status =
            |check, is_wrong, is_good| output(check).finish(&[1, 2], is_wrong, is_good).unwrap();
        assert_eq!(
            (status(false, false, false), status(true, false, false), status(true, false, true)),
            (0, 1, 0)
        );
        assert_eq!(status(false, true, true), 1);
        let record: Vec<u8> =
            serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        std::fs::remove_file(path).unwrap();
        assert_eq!(record, [1, 2]);
    }
}
