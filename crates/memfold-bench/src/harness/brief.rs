//! What the small benchmarks share: the corpus, the report, the exit status.

use crate::common::output::Output;
use crate::common::row::{StoreRow, all_good};
use crate::common::table::layout;
use crate::corpus::file::CorpusFile;
use crate::corpus::find;
use crate::host::guard;
use crate::host::machine::Machine;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Arguments of a small benchmark.
#[derive(clap::Args, Debug, Clone)]
pub struct BriefArgs {
    /// The corpus file; without it the default one is used, and built if it is missing
    #[arg(long, value_name = "FILE")]
    pub corpus: Option<PathBuf>,
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

/// Runs `measure` over the corpus, prints what it found, and returns the exit status: 1 with `--check` if a row is
/// short.
pub fn brief(
    name: &str,
    args: &BriefArgs,
    measure: impl FnOnce(&CorpusFile, &Path, bool) -> anyhow::Result<Found>,
) -> anyhow::Result<i32> {
    guard::install()?;
    let path = find(args.corpus.as_deref())?;
    let corpus = CorpusFile::open(&path)?;
    let found = measure(&corpus, &path, args.quick)?;
    let machine = Machine::read();
    let command = std::env::args().collect::<Vec<_>>().join(" ");
    let mut rows = vec![["it must reach", "figure", "target", "verdict", "from"].map(String::from).to_vec()];
    rows.extend(found.rows.iter().map(StoreRow::cells));
    println!("memfold bench {name}, {}\ncommand: {command}\ncorpus: {}\n", machine.heading(), path.display());
    print!("{}", layout(&rows));
    let mut report = json!({ "machine": machine, "command": command, "rows": found.rows });
    report[found.name] = found.raw.into();
    args.output.finish(&report, false, all_good(&found.rows))
}
