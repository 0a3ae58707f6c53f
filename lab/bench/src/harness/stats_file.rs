//! The stats file of `memfold run`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Bytes of data per 1000 bytes of the pool, at the pool's peak.
pub const RATIO_PERMILLE: &str = "ratio_permille";

/// A stats file. Dropping it removes the file.
pub struct StatsFile(PathBuf);

impl StatsFile {
    /// Makes a name that no other process uses.
    pub fn new() -> StatsFile {
        StatsFile(std::env::temp_dir().join(format!("memfold-bench-{}.json", std::process::id())))
    }

    /// Returns the file's path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Returns every integer figure, and [`RATIO_PERMILLE`]; none if there is no such file.
    pub fn counters(&self) -> BTreeMap<String, u64> {
        let text = std::fs::read_to_string(&self.0).unwrap_or_default();
        let figures: BTreeMap<String, serde_json::Value> =
            serde_json::from_str(&text).unwrap_or_default();
        let ratio = figures.get("ratio").and_then(|ratio| ratio.as_f64());
        let whole = figures.into_iter().filter_map(|(name, value)| Some((name, value.as_u64()?)));
        whole
            .chain(ratio.map(|ratio| (RATIO_PERMILLE.to_string(), (ratio * 1000.0) as u64)))
            .collect()
    }
}

impl Drop for StatsFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}
