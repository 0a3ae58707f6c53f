//! What the small benchmarks share: the corpus, the report, the exit status.

use crate::common::output::Output;
use crate::common::row::StoreRow;
use crate::corpus::Given;
use crate::corpus::file::CorpusFile;
use crate::harness::report::Report;
use crate::host::guard;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Arguments of a small benchmark.
#[derive(clap::Args, Debug, Clone)]
pub struct BriefArgs {
    /// The data
    #[command(flatten)]
    pub corpus: Given,
    /// A short look, some seconds
    #[arg(long)]
    pub quick: bool,
    /// What becomes of the report
    #[command(flatten)]
    pub output: Output,
}

/// What a benchmark found: rows, and a list of raw figures under a name of its own.
pub struct Found {
    /// The rows.
    pub rows: Vec<StoreRow>,
    /// The name.
    pub name: &'static str,
    /// The list, for plots.
    pub raw: Vec<Value>,
}

/// Runs `measure` over the corpus, prints what it found, and returns the exit status: 1 with
/// `--check` if a row is short.
pub fn brief(
    name: &str,
    args: &BriefArgs,
    measure: impl FnOnce(&CorpusFile, &Path, bool) -> anyhow::Result<Found>,
) -> anyhow::Result<i32> {
    guard::install()?;
    let path = args.corpus.find()?;
    let corpus = CorpusFile::open(&path)?;
    let found = measure(&corpus, &path, args.quick)?;
    let mut report = Report::new(BTreeMap::from([(found.name, found.raw)]));
    report.rows = found.rows;
    report.finish(&args.output, name, ("", &format!("corpus: {}\n", path.display())), false)
}
