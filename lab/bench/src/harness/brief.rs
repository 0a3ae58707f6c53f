//! Shared by the small benchmarks: the corpus, the report, the exit status.

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
    /// A quick run of some seconds
    #[arg(long)]
    pub quick: bool,
    /// Where the report goes
    #[command(flatten)]
    pub output: Output,
}

/// The results of a benchmark: rows, and a named list of raw figures.
pub struct BriefFindings {
    /// The rows.
    pub rows: Vec<StoreRow>,
    /// The name of the list.
    pub name: &'static str,
    /// The list, for plots.
    pub raw: Vec<Value>,
}

/// Runs `measure` over the corpus, prints the results, and returns the exit status: 1 with
/// `--check` if a row is short.
pub fn brief(
    name: &str,
    args: &BriefArgs,
    measure: impl FnOnce(&CorpusFile, &Path, bool) -> anyhow::Result<BriefFindings>,
) -> anyhow::Result<i32> {
    guard::install()?;
    let path = args.corpus.find()?;
    let corpus = CorpusFile::open(&path)?;
    let findings = measure(&corpus, &path, args.quick)?;
    let mut report = Report::new(BTreeMap::from([(findings.name, findings.raw)]));
    report.rows = findings.rows;
    report.finish(&args.output, name, ("", &format!("corpus: {}\n", path.display())), false)
}
