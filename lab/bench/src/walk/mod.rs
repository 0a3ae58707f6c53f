//! `memfold bench walk`: the same walk for every peer, in turn, and the comparison.

mod child;
pub mod peer;
mod targets;
mod report;

use crate::common::output::Output;
use crate::common::refusal::Refusal;
use crate::common::size::{parse_size, show_size};
use crate::corpus::file::{CorpusFile, PAGE};
use crate::corpus::{Given, describe};
use crate::harness::message::Message;
use crate::harness::runner::{self, RunResult};
use crate::harness::stats_file::StatsFile;
use crate::harness::workload::Phase;
use crate::harness::zram_run::ZramRun;
use crate::host::folio::FolioKib;
use crate::host::guard;
use crate::host::journal::JOURNAL_PATH;
use crate::host::machine::Machine;
use crate::host::program::{THIS, memfold};
use crate::host::zram::Zram;
use crate::walk::peer::{Form, Peer, parse_vs};
use crate::walk::report::{WalkReport, Walked, left_out};
use anyhow::Context;
use indicatif::{ProgressBar, ProgressStyle};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

pub use child::{AreaKind, WalkChildArgs, walk_child};

/// Arguments of `memfold bench walk`.
#[derive(clap::Args, Debug, Clone)]
pub struct WalkArgs {
    /// The data
    #[command(flatten)]
    pub corpus: Given,
    /// Size of the area walked over [default: 1G]
    #[arg(long, value_parser = parse_size)]
    pub size: Option<u64>,
    /// How much of it may be resident [default: 256M]
    #[arg(long, value_parser = parse_size)]
    pub resident: Option<u64>,
    /// memfold's codec
    #[arg(long, default_value = "lz4")]
    pub codec: String,
    /// Runs of each peer, in turn [default: 5]
    #[arg(long)]
    pub runs: Option<usize>,
    /// A quick run: 256M in 64M, one run, 50000 random reads
    #[arg(long)]
    pub quick: bool,
    /// Only these phases (fill always runs first) [default: all but mixed, whose writes at random
    /// make blocks into pages and metadata larger]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub phases: Vec<Phase>,
    /// Threads, each with its own part of the area
    #[arg(long, default_value_t = 1)]
    pub threads: usize,
    /// Accesses of each random phase [default: 200000]
    #[arg(long)]
    pub random_reads: Option<u64>,
    /// Most seconds of each random phase
    #[arg(long, default_value_t = 10, value_name = "SECONDS")]
    pub random_seconds: u64,
    /// After the other phases, read and write at random for this long, and detect growth of memory
    #[arg(long, default_value_t = 0, value_name = "SECONDS")]
    pub soak: u64,
    /// Seed of the random phases
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Only these forms of memfold [default: all]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "FORM")]
    pub peer: Vec<Form>,
    /// No form of memfold, only the peers of --vs
    #[arg(long, conflicts_with = "peer")]
    pub no_memfold: bool,
    #[allow(rustdoc::broken_intra_doc_links)]
    /// Also zram[:lz4|lzo-rle][:4k|16k|64k|256k|1m|2m], as root; without a size all six.
    /// Repeatable, commas too
    #[arg(long, value_name = "PEER")]
    pub vs: Vec<String>,
    /// Where the report goes
    #[command(flatten)]
    pub output: Output,
    /// Kill a run that prints nothing for this long (a soak's time is added)
    #[arg(long, default_value_t = 600, value_name = "SECONDS")]
    pub silence_max: u64,
    /// The memfold program for `memfold-run` [default: the one beside this program, else that of
    /// PATH]
    #[arg(long, value_name = "FILE")]
    pub memfold: Option<PathBuf>,
}

/// Runs the walks, prints the report, and returns the exit status: 1 if a byte was wrong or a peer
/// failed or, with `--check`, a row is short. Every kernel setting is restored, also on SIGINT,
/// SIGTERM, a panic, or at the next start.
pub fn walk(args: WalkArgs) -> anyhow::Result<i32> {
    guard::install()?;
    let plan = Plan::new(&args)?;
    let corpus = describe(&plan.corpus)?;
    let kernel = plan.peers.iter().any(|peer| matches!(peer, Peer::Zram { .. }));
    if kernel {
        guard::open_journal(Path::new(JOURNAL_PATH))?;
    }
    let mut report = WalkReport::new(Walked {
        corpus,
        resident_bytes: plan.resident,
        conditions: plan.conditions(),
        departures: plan.departures(),
        left_out: plan.left_out.clone(),
        runs: Vec::new(),
    });
    let outcome = plan.run_all(&mut report.found.runs);
    if kernel {
        guard::close_journal();
    }
    report.found.left_out.extend(outcome.notes);
    report.judge();
    print!("{}", report.text());
    let is_wrong = report.found.runs.iter().any(|run| run.bytes_wrong > 0);
    args.output.finish(&report, outcome.failed || is_wrong, report.is_good())
}

/// The failures of some runs.
#[derive(Default)]
struct Outcome {
    notes: Vec<String>,
    failed: bool,
}

/// The arguments, checked and completed.
struct Plan {
    corpus: PathBuf,
    size: u64,
    resident: u64,
    codec: String,
    runs: usize,
    phases: Vec<Phase>,
    threads: usize,
    random_reads: u64,
    random_seconds: u64,
    soak: u64,
    seed: u64,
    peers: Vec<Peer>,
    left_out: Vec<String>,
    silence_max: Duration,
    this: PathBuf,
    memfold: Result<PathBuf, Refusal>,
}

impl Plan {
    fn new(args: &WalkArgs) -> anyhow::Result<Plan> {
        let quick = |normal, quick| if args.quick { quick } else { normal };
        let this = std::env::current_exe().context("finding this program's own file")?;
        let mut plan = Plan {
            corpus: PathBuf::new(),
            size: args.size.unwrap_or(quick(1 << 30, 256 << 20)) / PAGE as u64 * PAGE as u64,
            resident: args.resident.unwrap_or(quick(256 << 20, 64 << 20)),
            codec: args.codec.clone(),
            runs: args.runs.unwrap_or(quick(5, 1) as usize),
            phases: Phase::ALL.to_vec(),
            threads: args.threads,
            random_reads: args.random_reads.unwrap_or(quick(200_000, 50_000)),
            random_seconds: args.random_seconds,
            soak: args.soak,
            seed: args.seed,
            peers: Vec::new(),
            left_out: Vec::new(),
            silence_max: Duration::from_secs(args.silence_max + args.soak),
            memfold: args.memfold.clone().map_or_else(memfold, Ok),
            this,
        };
        plan.phases.retain(|phase| match args.phases.is_empty() {
            true => *phase != Phase::Mixed,
            false => *phase == Phase::Fill || args.phases.contains(phase),
        });
        plan.check_numbers()?;
        plan.choose_peers(args)?;
        plan.corpus = args.corpus.find()?;
        CorpusFile::open(&plan.corpus)?;
        Ok(plan)
    }

    fn check_numbers(&self) -> Result<(), Refusal> {
        let usage = |why: &str| Err(Refusal::Usage(why.into()));
        let memory = Machine::read().memory_bytes;
        match () {
            () if self.size < 16 << 20 => usage("--size must be at least 16M"),
            () if self.resident < 8 << 20 => usage("--resident must be at least 8M"),
            () if self.resident >= self.size => {
                usage("--resident must be smaller than --size: else nothing is folded")
            }
            () if self.size > memory / 4 * 3 => {
                usage("--size is over three quarters of this machine's memory")
            }
            () if self.runs == 0 => usage("--runs must be at least 1"),
            () if !(1..=256).contains(&self.threads) => usage("--threads must be 1 to 256"),
            () if self.random_seconds == 0 => usage("--random-seconds must be at least 1"),
            () if self.random_reads == 0 => usage("--random-reads must be at least 1"),
            () => Ok(()),
        }
    }

    fn choose_peers(&mut self, args: &WalkArgs) -> anyhow::Result<()> {
        let mut forms = args.peer.clone();
        if forms.is_empty() && !args.no_memfold {
            forms = vec![Form::Signal, Form::Thread, Form::Run];
        }
        for form in forms {
            match self.why_not(form) {
                None => self.peers.push(Peer::Memfold(form)),
                Some(why) => self.left_out.push(left_out(&Peer::Memfold(form), &why)),
            }
        }
        for text in &args.vs {
            for peer in parse_vs(text).map_err(Refusal::Usage)? {
                if let Peer::Zram { codec, folio } = &peer {
                    Zram::check(codec)?;
                    FolioKib::check(*folio)?;
                }
                if !self.peers.contains(&peer) {
                    self.peers.push(peer);
                }
            }
        }
        if self.peers.is_empty() {
            let why = if self.left_out.is_empty() {
                "name one with --vs".into()
            } else {
                self.left_out.join("; ")
            };
            return Err(Refusal::Usage(format!("no peer to run: {why}")).into());
        }
        Ok(())
    }

    /// Returns why this form of memfold can't run, if so.
    fn why_not(&self, form: Form) -> Option<String> {
        if form != Form::Run {
            return None;
        }
        let memfold = match &self.memfold {
            Ok(memfold) => memfold,
            Err(why) => return Some(why.to_string()),
        };
        let mut probe = Command::new(memfold);
        probe
            .args(["run", "--help"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        match probe.status() {
            Ok(status) if status.success() => None,
            Ok(_) => Some(format!("{} has no `run`", memfold.display())),
            Err(error) => Some(format!("{}: {error}", memfold.display())),
        }
    }

    /// Runs all peers in turn, as often as asked, and returns the failures. A failed peer isn't run
    /// again. If the kernel killed a walk on zram because its cgroup was out of memory, that is a
    /// result and not a failure.
    fn run_all(&self, results: &mut Vec<RunResult>) -> Outcome {
        let steps =
            self.runs * self.peers.len() * (self.phases.len() + 1 + usize::from(self.soak > 0));
        let bar = ProgressBar::new(steps as u64); // Draws to stderr, and only on a terminal.
        let style = ProgressStyle::with_template("{wide_bar} {pos}/{len} {elapsed} {msg}");
        bar.set_style(style.expect("a valid template"));
        let mut outcome = Outcome::default();
        let mut dropped_peers: Vec<&Peer> = Vec::new();
        for run in 1..=self.runs {
            for peer in &self.peers {
                if dropped_peers.contains(&peer) {
                    continue;
                }
                bar.set_message(format!("{} run {run}/{}", peer.name(), self.runs));
                let run_outcome = self.run_one(peer, &bar);
                let (why, is_killed) = match &run_outcome {
                    Ok(result) => {
                        (result.broke_off.clone(), result.counters.contains_key("oom_kills"))
                    }
                    Err(error) => (Some(format!("{error:#}")), false),
                };
                results.extend(run_outcome.ok());
                let Some(why) = why else { continue };
                let cause = if is_killed {
                    " (out of memory in its cgroup: killed by the kernel)"
                } else {
                    ""
                };
                outcome.notes.push(left_out(peer, &format!("run {run} broke off: {why}{cause}")));
                if !is_killed {
                    outcome.failed = true;
                    dropped_peers.push(peer);
                }
            }
        }
        bar.finish_and_clear();
        outcome
    }

    fn run_one(&self, peer: &Peer, bar: &ProgressBar) -> anyhow::Result<RunResult> {
        let tick = |message: &Message| {
            if !matches!(message, Message::Ready { .. }) {
                bar.inc(1);
            }
            Ok(())
        };
        let name = peer.name();
        match peer {
            Peer::Zram { codec, folio } => {
                let area = AreaKind::of_kernel(*folio);
                let run = ZramRun {
                    codec,
                    folio: *folio,
                    area_bytes: self.size,
                    resident_bytes: self.resident,
                };
                run.run(
                    &name,
                    Command::new(THIS).args(self.child_args(area)),
                    self.silence_max,
                    tick,
                )
            }
            Peer::Memfold(Form::Run) => {
                let mut command = Command::new(self.memfold.clone()?);
                command.args([
                    "run",
                    "--resident",
                    &self.resident.to_string(),
                    "--codec",
                    &self.codec,
                ]);
                let stats = StatsFile::new();
                command
                    .arg("--stats-file")
                    .arg(stats.path())
                    .arg("--")
                    .arg(&self.this)
                    .args(self.child_args(AreaKind::Plain));
                let mut result = runner::run(&name, &mut command, self.silence_max, tick)?;
                result.counters.extend(stats.counters());
                Ok(result)
            }
            Peer::Memfold(form) => {
                let area = if *form == Form::Signal { AreaKind::Signal } else { AreaKind::Thread };
                runner::run(
                    &name,
                    Command::new(THIS).args(self.child_args(area)),
                    self.silence_max,
                    tick,
                )
            }
        }
    }

    fn child_args(&self, area: AreaKind) -> Vec<OsString> {
        let args = WalkChildArgs {
            area,
            corpus: self.corpus.clone(),
            size: self.size,
            resident: self.resident,
            codec: self.codec.clone(),
            set: Vec::new(),
            threads: self.threads,
            phases: self.phases.clone(),
            random_reads: self.random_reads,
            random_seconds: self.random_seconds,
            soak: self.soak,
            seed: self.seed,
        };
        args.words()
    }

    fn conditions(&self) -> String {
        format!(
            "{} in {} resident, {}, {} thread(s), {} run(s), {} random accesses or {} s a phase, seed {}",
            show_size(self.size),
            show_size(self.resident),
            self.codec,
            self.threads,
            self.runs,
            self.random_reads,
            self.random_seconds,
            self.seed,
        )
    }

    fn departures(&self) -> Vec<String> {
        let all = [
            (self.size == 1 << 30, "1 GiB"),
            (self.resident == 256 << 20, "256 MiB resident"),
            (self.codec == "lz4", "lz4"),
            (self.threads == 1, "1 thread"),
            (self.runs >= 5, "5 runs"),
        ];
        all.iter().filter(|(is_kept, _)| !is_kept).map(|(_, name)| name.to_string()).collect()
    }
}
