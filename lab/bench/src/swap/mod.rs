//! `memfold bench swap`: the targets of the swap file.

mod load;
mod index;
mod read;
mod wait;
mod remote;

use crate::common::output::Output;
use crate::common::refusal::Refusal;
use crate::common::row::StoreRow;
use crate::corpus::file::CorpusFile;
use crate::corpus::{Given, describe};
use crate::harness::file_run::zswap_history;
use crate::harness::report::Report;
use crate::host::guard;
use crate::swap::load::{Load, folio_rows, kernel_rows};
use anyhow::Context;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Arguments of `memfold bench swap`.
#[derive(clap::Args, Debug, Clone)]
pub struct SwapArgs {
    /// Directory on the disk to be measured; swap files are made there, and nowhere else
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    pub dir: PathBuf,
    /// The data
    #[command(flatten)]
    pub corpus: Given,
    /// A quick run, under 90 seconds: less data, one run of each
    #[arg(long)]
    pub quick: bool,
    /// Only these parts [default: all]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PART")]
    pub part: Vec<SwapPart>,
    /// Also against zswap, last of all: until the next boot the kernel then swaps large folios in
    /// page by page
    #[arg(long)]
    pub zswap: bool,
    /// Where the report goes
    #[command(flatten)]
    pub output: Output,
}

/// A part of the benchmark.
#[derive(clap::ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum SwapPart {
    /// Large folios against single pages, nothing compressed
    Folios,
    /// Memory of the index, and a sparse terabyte
    Index,
    /// Reading the file in order, against fio
    Read,
    /// Many threads that wait for one folio
    Wait,
    /// The remote store behind it, a redis-server on loopback
    Remote,
    /// Hot pages beside a scan, with and without refault distance
    Hot,
    /// Slots after 100 rounds of mixed orders
    Ageing,
    /// The span of one lock of the index
    Shards,
    /// The kernel's swap to a file (as root), zswap last
    Kernel,
}

const PARTS: [SwapPart; 9] = [
    SwapPart::Folios,
    SwapPart::Index,
    SwapPart::Read,
    SwapPart::Wait,
    SwapPart::Remote,
    SwapPart::Hot,
    SwapPart::Ageing,
    SwapPart::Shards,
    SwapPart::Kernel,
];

/// The conditions of the measurement.
#[derive(Serialize)]
struct SwapFindings {
    corpus: String,
    dir: String,
    /// zswap's state before the benchmark.
    zswap: &'static str,
}

/// Measures, prints the report, and returns the exit status: 1 with `--check` if a row is short.
/// Every kernel setting is restored, as by `bench walk`.
pub fn swap(args: SwapArgs) -> anyhow::Result<i32> {
    guard::install()?;
    if !args.dir.is_dir() {
        return Err(Refusal::Usage(format!("--dir {}: not a directory", args.dir.display())).into());
    }
    let path = args.corpus.find()?;
    let corpus = CorpusFile::open(&path)?;
    let dir = args.dir.display().to_string();
    let mut report =
        Report::new(SwapFindings { corpus: describe(&path)?, dir, zswap: zswap_history() });
    for part in PARTS {
        if args.part.is_empty() || args.part.contains(&part) {
            report
                .rows
                .extend(measure(part, &args, &path, &corpus).with_context(|| format!("{part:?}"))?);
        }
    }
    let SwapFindings { corpus, dir, zswap } = &report.found;
    let (note, body) =
        (format!("; zswap {zswap}"), format!("corpus: {corpus}\nswap files in {dir}\n"));
    report.finish(&args.output, "swap", (&note, &body), false)
}

fn measure(
    part: SwapPart,
    args: &SwapArgs,
    path: &Path,
    corpus: &CorpusFile,
) -> anyhow::Result<Vec<StoreRow>> {
    let mib = |normal: u64, short: u64| if args.quick { short << 20 } else { normal << 20 };
    let load = Load {
        corpus: path,
        dir: &args.dir,
        size: mib(1024, 512),
        limit: mib(256, 128),
        threads: 4,
        runs: if args.quick { 1 } else { 3 },
    };
    match part {
        SwapPart::Folios => folio_rows(&load),
        SwapPart::Kernel => kernel_rows(&load, args.zswap),
        _ => engine(part, args, &load, corpus),
    }
}

fn engine(
    part: SwapPart,
    args: &SwapArgs,
    load: &Load<'_>,
    corpus: &CorpusFile,
) -> anyhow::Result<Vec<StoreRow>> {
    match part {
        SwapPart::Index => index::rows(args.quick),
        SwapPart::Read => read::rows(corpus, &args.dir, args.quick),
        SwapPart::Wait => wait::wait_rows(corpus, &args.dir, args.quick),
        SwapPart::Remote => remote::rows(load, corpus),
        SwapPart::Hot => wait::hot_rows(corpus, args.quick),
        SwapPart::Ageing => Ok(wait::ageing_rows()),
        SwapPart::Shards => wait::shard_rows(corpus, args.quick),
        SwapPart::Folios | SwapPart::Kernel => Ok(Vec::new()),
    }
}
