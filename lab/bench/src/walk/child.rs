//! `memfold bench walk-child`: one run of the walk in a separate process.

use crate::common::size::parse_size;
use crate::corpus::file::{CorpusFile, PAGE};
use crate::harness::message::{Message, say, wait_for_line};
use crate::harness::plain::PlainArea;
use crate::harness::workload::{Bounds, Phase, Workload, corpus_sums};
use crate::host::folio::FolioKib;
use anyhow::Context;
use clap::ValueEnum;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// The kind of memory that the child walks over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum AreaKind {
    /// Ordinary anonymous memory
    Plain,
    /// The same with MADV_HUGEPAGE, so that the kernel uses the folio size it is set to
    Huge,
    /// A region of memfold's library, faults served by the faulting thread
    Signal,
    /// A region of memfold's library, faults served by handler threads
    Thread,
}

/// Arguments of `memfold bench walk-child`, which only `memfold bench walk` calls.
#[derive(clap::Args, Debug, Clone)]
pub struct WalkChildArgs {
    /// The memory to walk over
    #[arg(long, value_enum)]
    pub area: AreaKind,
    /// The corpus file
    #[arg(long)]
    pub corpus: PathBuf,
    /// Size of the area
    #[arg(long, value_parser = parse_size)]
    pub size: u64,
    /// How much of a library region may be resident
    #[arg(long, value_parser = parse_size)]
    pub resident: u64,
    /// Codec of a library region
    #[arg(long)]
    pub codec: String,
    /// Further settings of a library region, NAME=VALUE
    #[arg(long)]
    pub set: Vec<String>,
    /// Threads of the walk
    #[arg(long)]
    pub threads: usize,
    /// Phases, in the order of the walk
    #[arg(long, value_enum, value_delimiter = ',')]
    pub phases: Vec<Phase>,
    /// Accesses of each random phase
    #[arg(long)]
    pub random_reads: u64,
    /// Most seconds of each random phase
    #[arg(long)]
    pub random_seconds: u64,
    /// Seconds of a final phase that detects growth; 0 for none
    #[arg(long)]
    pub soak: u64,
    /// Seed of the random phases
    #[arg(long)]
    pub seed: u64,
}

/// Runs the walk and writes one `Message` per line to standard output. Waits for a line on standard
/// input before the first phase, and for its end after the last.
pub fn walk_child(args: WalkChildArgs) -> anyhow::Result<()> {
    // SAFETY: PR_SET_PDEATHSIG takes a signal number and touches no memory.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let corpus = CorpusFile::open(&args.corpus)?;
    let sums = corpus_sums(&corpus);
    let len = args.size as usize / PAGE * PAGE;
    let area = WalkArea::new(&args, len)?;
    // SAFETY: the area is `len` bytes, page-aligned, lives until the end of this function, and
    // nothing else here touches it.
    let mut walk = unsafe {
        Workload::new((area.as_ptr(), len), (&corpus, &sums), args.threads, args.bounds())
    };
    say(&Message::Ready { pid: std::process::id() as i32 })?;
    wait_for_line()?;
    let soak = (args.soak > 0).then_some(Phase::Soak);
    for phase in args.phases.iter().copied().chain(soak) {
        say(&Message::Phase(walk.run(phase)))?;
    }
    let bytes_wrong = walk.verify();
    say(&Message::Done { bytes_wrong, counters: area.counters() })?;
    wait_for_line()
}

impl AreaKind {
    /// Returns the kind of memory for a run on the kernel's swap with folios of this size.
    pub fn of_kernel(folio: FolioKib) -> AreaKind {
        if folio.0 == 4 { AreaKind::Plain } else { AreaKind::Huge }
    }
}

impl WalkChildArgs {
    /// Returns the command line of this program with these arguments.
    pub fn words(&self) -> Vec<OsString> {
        let area = self.area.to_possible_value().expect("no value is skipped");
        let phases: Vec<&str> = self.phases.iter().map(|phase| phase.name()).collect();
        let mut words =
            ["walk-child", "--area", area.get_name(), "--corpus"].map(OsString::from).to_vec();
        words.push(self.corpus.clone().into());
        let values = [
            ("--size", self.size.to_string()),
            ("--resident", self.resident.to_string()),
            ("--codec", self.codec.clone()),
            ("--threads", self.threads.to_string()),
            ("--phases", phases.join(",")),
            ("--random-reads", self.random_reads.to_string()),
            ("--random-seconds", self.random_seconds.to_string()),
            ("--soak", self.soak.to_string()),
            ("--seed", self.seed.to_string()),
        ];
        let settings = self.set.iter().map(|setting| ("--set", setting.clone()));
        words.extend(
            values
                .into_iter()
                .chain(settings)
                .flat_map(|(name, value)| [name.into(), value.into()]),
        );
        words
    }

    fn bounds(&self) -> Bounds {
        Bounds {
            accesses: self.random_reads,
            random: Duration::from_secs(self.random_seconds),
            soak: Duration::from_secs(self.soak),
            seed: self.seed,
        }
    }
}

enum WalkArea {
    Plain(PlainArea),
    Folded(crate::harness::region::FoldedArea),
}

impl WalkArea {
    fn new(args: &WalkChildArgs, len: usize) -> anyhow::Result<WalkArea> {
        match args.area {
            AreaKind::Plain | AreaKind::Huge => {
                let area = PlainArea::new(len, args.area == AreaKind::Huge);
                Ok(WalkArea::Plain(area.with_context(|| format!("can't map {len} bytes"))?))
            }
            AreaKind::Signal | AreaKind::Thread => {
                let signal = args.area == AreaKind::Signal;
                Ok(WalkArea::Folded(crate::harness::region::FoldedArea::new(
                    len,
                    args.resident,
                    &args.codec,
                    signal,
                    &args.set,
                )?))
            }
        }
    }

    fn as_ptr(&self) -> *mut u8 {
        match self {
            WalkArea::Plain(area) => area.as_ptr(),
            WalkArea::Folded(area) => area.as_ptr(),
        }
    }

    fn counters(&self) -> BTreeMap<String, u64> {
        match self {
            WalkArea::Plain(_) => BTreeMap::new(),
            WalkArea::Folded(area) => area.counters(),
        }
    }
}
