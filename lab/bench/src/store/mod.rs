//! `memfold bench store`: the targets of the compressed store, alone and under the engine.

pub mod pool;
mod engine;
mod canned;
mod zram;
mod batch;
mod program_pages;
mod blocks;
mod pools;
mod peers;

use crate::common::output::Output;
use crate::common::row::StoreRow;
use crate::corpus::file::CorpusFile;
use crate::corpus::{Given, describe};
use crate::harness::report::Report;
use crate::host::guard;
use std::collections::BTreeMap;

pub use blocks::blocks;
pub use peers::peers;
pub use pools::pools;

/// Arguments of `memfold bench store`.
#[derive(clap::Args, Debug, Clone)]
pub struct StoreArgs {
    /// The data
    #[command(flatten)]
    pub corpus: Given,
    /// A quick run, under a minute: fewer rounds and objects
    #[arg(long)]
    pub quick: bool,
    /// Only these parts [default: all]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PART")]
    pub part: Vec<Part>,
    /// Where the report goes
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

/// Measures, prints the report, and returns the exit status: 1 with `--check` if a row is short.
pub fn store(args: StoreArgs) -> anyhow::Result<i32> {
    guard::install()?;
    let path = args.corpus.find()?;
    let corpus = CorpusFile::open(&path)?;
    let mut report = Report::new(BTreeMap::from([("corpus", describe(&path)?)]));
    for part in PARTS {
        if args.part.is_empty() || args.part.contains(&part) {
            report.rows.extend(measure(part, &corpus, args.quick)?);
        }
    }
    let body = format!("corpus: {}\n", report.found["corpus"]);
    report.finish(&args.output, "store", ("", &body), false)
}

fn measure(part: Part, corpus: &CorpusFile, quick: bool) -> anyhow::Result<Vec<StoreRow>> {
    let pick = |normal: usize, short: usize| if quick { short } else { normal };
    match part {
        Part::Engine => engine(corpus, quick),
        Part::Canned => canned::rows(corpus, quick),
        Part::Zram => zram::rows(corpus, pick(9, 3)),
        Part::Batch => Ok([batch::rows(corpus, pick(15, 5))?, batches(corpus, quick)?].concat()),
        Part::Overhead => {
            let rows = ["lz4", "zstd"].map(|codec| pool::overhead(corpus, codec, pick(15, 3)));
            rows.into_iter().collect()
        }
        Part::Churn => pool::churn(corpus, pick(1_000_000, 250_000) as u64),
        Part::Pools => pools::store_rows(corpus, pick(4000, 800), pick(9, 5)),
    }
}

fn engine(corpus: &CorpusFile, quick: bool) -> anyhow::Result<Vec<StoreRow>> {
    let (len, rounds) = if quick { (48 << 20, 3) } else { (100 << 20, 100) };
    engine::rows(corpus, len, rounds)
}

fn batches(corpus: &CorpusFile, quick: bool) -> anyhow::Result<Vec<StoreRow>> {
    engine::batches(corpus, 48 << 20, if quick { 3 } else { 15 })
}
