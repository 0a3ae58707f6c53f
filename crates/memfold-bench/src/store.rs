//! `memfold bench store`: what the compressed store must reach, by itself and under the engine.

use crate::corpus::{find, hash};
use crate::corpus_file::CorpusFile;
use crate::guard;
use crate::machine::Machine;
use crate::output::Output;
use crate::size::show_size;
use crate::store_row::{StoreRow, all_good};
use crate::table::layout;
use crate::{store_batch, store_canned, store_kernel, store_many, store_pool};
use anyhow::Context;
use serde::Serialize;
use std::path::PathBuf;

/// Arguments of `memfold bench store`.
#[derive(clap::Args, Debug, Clone)]
pub struct StoreArgs {
    /// The corpus file; without it the default one is used, and built if it is missing
    #[arg(long, value_name = "FILE")]
    pub corpus: Option<PathBuf>,
    /// A short look, under a minute: fewer rounds and objects
    #[arg(long)]
    pub quick: bool,
    /// Only these parts [default: all]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PART")]
    pub part: Vec<Part>,
    /// What becomes of the report
    #[command(flatten)]
    pub output: Output,
}

/// A part of the benchmark.
#[derive(clap::ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// zstd with 16K and 4K blocks under the engine, and the small-page fallback
    Engine,
    /// Dictionaries, on against off
    Canned,
    /// The whole corpus against zram lz4 (as root)
    Zram,
    /// Batches of blocks on several cores
    Batch,
    /// Save and load against the bare codec
    Overhead,
    /// Memory held after churn
    Churn,
    /// One pool against many
    Pools,
}

const PARTS: [Part; 7] =
    [Part::Engine, Part::Canned, Part::Zram, Part::Batch, Part::Overhead, Part::Churn, Part::Pools];

/// Everything that was measured.
#[derive(Serialize)]
struct Report {
    machine: Machine,
    command: String,
    corpus: String,
    rows: Vec<StoreRow>,
}

/// Measures, prints the report, and returns the exit status: 1 with `--check` if a row is short.
pub fn store(args: StoreArgs) -> anyhow::Result<i32> {
    guard::install()?;
    let path = find(args.corpus.as_deref())?;
    let corpus = CorpusFile::open(&path)?;
    let bytes = std::fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
    let corpus_text = format!("{}, {}, xxh3 {:016x}", path.display(), show_size(bytes.len() as u64), hash(&bytes));
    drop(bytes);
    let mut report = Report {
        machine: Machine::read(),
        command: std::env::args().collect::<Vec<_>>().join(" "),
        corpus: corpus_text,
        rows: Vec::new(),
    };
    for part in PARTS {
        if args.part.is_empty() || args.part.contains(&part) {
            report.rows.extend(measure(part, &corpus, args.quick)?);
        }
    }
    print!("{}", report.text());
    args.output.finish(&report, false, all_good(&report.rows))
}

fn measure(part: Part, corpus: &CorpusFile, quick: bool) -> anyhow::Result<Vec<StoreRow>> {
    let pick = |normal: usize, short: usize| if quick { short } else { normal };
    match part {
        Part::Engine => engine(corpus, quick),
        Part::Canned => store_canned::rows(corpus, quick),
        Part::Zram => store_kernel::rows(corpus, pick(9, 3)),
        Part::Batch => Ok([store_batch::rows(corpus, pick(15, 5))?, batches(corpus, quick)?].concat()),
        Part::Overhead => {
            let rows = ["lz4", "zstd"].map(|codec| store_pool::overhead(corpus, codec, pick(15, 3)));
            rows.into_iter().collect()
        }
        Part::Churn => store_pool::churn(corpus, pick(1_000_000, 250_000) as u64),
        Part::Pools => store_many::rows(corpus, pick(4000, 800), pick(9, 5)),
    }
}

fn engine(corpus: &CorpusFile, quick: bool) -> anyhow::Result<Vec<StoreRow>> {
    let (len, rounds) = if quick { (48 << 20, 3) } else { (100 << 20, 100) };
    crate::store_engine::rows(corpus, len, rounds)
}

fn batches(corpus: &CorpusFile, quick: bool) -> anyhow::Result<Vec<StoreRow>> {
    crate::store_engine::batches(corpus, 48 << 20, if quick { 3 } else { 15 })
}

impl Report {
    fn text(&self) -> String {
        let mut text = format!(
            "memfold bench store, {}\ncommand: {}\ncorpus: {}\n\n",
            self.machine.heading(),
            self.command,
            self.corpus,
        );
        let mut rows = vec![["it must reach", "figure", "target", "verdict", "from"].map(String::from).to_vec()];
        rows.extend(self.rows.iter().map(StoreRow::cells));
        text += &layout(&rows);
        text
    }
}
