//! memfold-bench: memfold measured against its peers, at the same work. `memfold bench …` runs it.
//!
//! `corpus` builds a file of real and realistic bytes. `walk` runs one workload over it in
//! memfold's regions, under `memfold run` and, as root, on the kernel's own zram swap, in one
//! invocation, and prints how they compare. Each run of the workload is a child process
//! (`walk-child`). `store` measures the compressed store, `swap` the swap file, `apps` well-known
//! programs, `usemem` several processes at once. `report` runs all of them and says where every
//! requirement stands.
//!
//! # Folders
//! - `common/`: numbers, sizes, latencies, tables; `row.rs`: a figure with its target and
//!   `verdict.rs`; `output.rs`: `--json` and `--check`
//! - `corpus/`: the file of real data (`file.rs`, `parts.rs`, `mod.rs` builds it); `page.rs`: what
//!   each page must hold
//! - `host/`: `journal.rs`, `guard.rs`: every kernel setting is noted before it is changed, and
//!   restored whatever happens; `machine.rs`; `program.rs`: where programs are; `folio.rs`,
//!   `zram.rs`, `cgroup.rs` (which keeps the kernel's figures of a cgroup current): the kernel's
//!   side
//! - `harness/`: `plain.rs`, `region.rs`: memory to walk over; `workload.rs`: the phases;
//!   `message.rs`: what a child says; `runner.rs` follows it, `zram_run.rs` and `file_run.rs` on
//!   the kernel's swap; `stats_file.rs`: the figures of a run; `report.rs`: what every benchmark
//!   reports; `brief.rs`: what the small ones share
//! - `walk/`: `child.rs`: one run in a process of its own; `peer.rs`, `targets.rs`, `report.rs`
//! - `store/`: the parts of `bench store`: `pool.rs`, `engine.rs`, `canned.rs`, `zram.rs`,
//!   `batch.rs`; `blocks.rs` with `program_pages.rs`, `pools.rs`, `peers.rs`: the benchmarks of these
//!   names
//! - `apps/`: `pipe.rs`: a client that pipelines; `run.rs`: one run of a program or server with a
//!   peer; `server.rs`: MariaDB, memcached, redis and their clients; `case.rs`: well-known programs
//!   and their work
//! - `swap/`: the parts of `bench swap`: `load.rs`, `index.rs`, `read.rs`, `wait.rs`, `remote.rs`
//! - `usemem/`: `child.rs`: a leader and its tasks; `peer.rs`: who gives them memory
//! - `idle/`: `server.rs`: servers in three languages; `group.rs`: many of them in a group;
//!   `phases.rs`: a program that stops using most of its memory
//! - `policy/`: the policy lab: `trace.rs`; `record.rs` makes traces with a plugin of qemu
//!   (`pagetrace.c`); `memory.rs` replays them after the engine; `candidates/`: the policies;
//!   `counts.rs`: events and the table of their costs; `replay.rs`: the tables; `measure.rs`:
//!   `bench costs`
//! - `report/`: `rows.rs`: each requirement with the tests and figures that show it, the one table;
//!   `gather.rs`: runs the other benchmarks as children and takes the `rows` of their `--json`
//!   files (a new benchmark needs a line in `mod.rs` `steps`); `state.rs`: where each requirement
//!   stands; `plot.rs`, `charts.rs`: plots; `evidence.rs`: all that a report says; `text.rs`:
//!   Markdown and the section of docs/benchmarks.md; `html.rs`: the page

// Bottom first: a module imports only from modules listed above it.
mod common;
mod corpus;
mod host;
mod harness;
mod walk;
mod store;
mod apps;
mod swap;
mod usemem;
mod idle;
mod policy;
mod report;

use clap::Parser;
use clap::error::ErrorKind;
use common::refusal::Refusal;
use std::process::ExitCode;

/// Exit status for an invalid command line, as in `memfold`.
const USAGE: u8 = 125;
/// Exit status of a failed benchmark, after sysexits.h (EX_SOFTWARE).
const BROKEN: i32 = 70;

/// Measures memfold against the kernel's own compressed swap
#[derive(Parser)]
#[command(name = "memfold-bench", version)]
enum BenchCommand {
    /// Builds the file of real data that the benchmarks work on
    Corpus(corpus::CorpusArgs),
    /// Fills memory, reads, dirties and checks it, for memfold and its peers in turn
    Walk(walk::WalkArgs),
    /// Measures the compressed store: memory held, speed, many threads
    Store(store::StoreArgs),
    /// Measures the swap file: large folios, reading, index; against the kernel's as root
    Swap(swap::SwapArgs),
    /// Runs well-known programs in a third of their memory, and on zram as root
    Apps(apps::AppsArgs),
    /// Several processes write and read more memory than they may keep (usemem)
    Usemem(usemem::UsememArgs),
    /// Idle servers give their memory back, and share the limit of a group
    Idle(idle::IdleArgs),
    /// Replays page traces of programs on memfold's policy and on others, or records one
    Policy(policy::PolicyArgs),
    /// Measures the time of a fault, of each step of an eviction, and of the codec
    Costs(policy::CostsArgs),
    /// Shows the compression of the corpus, and of pages of programs, by codec and block size
    Blocks(harness::brief::BriefArgs),
    /// Ten workloads reclaim and refault at once, on one pool and on several
    Pools(harness::brief::BriefArgs),
    /// Compares with nbdkit's memory disk and python-blosc2, where they are installed
    Peers(harness::brief::BriefArgs),
    /// Runs all of these, and shows where every requirement and target stands
    Report(report::ReportArgs),
    #[command(hide = true)]
    WalkChild(walk::WalkChildArgs),
    #[command(hide = true)]
    UsememChild(usemem::UsememChildArgs),
    #[command(hide = true)]
    IdleChild(idle::IdleChildArgs),
}

fn main() -> ExitCode {
    let bench = match BenchCommand::try_parse() {
        Ok(bench) => bench,
        Err(error) => return usage(&error),
    };
    match run(bench) {
        Ok(status) => ExitCode::from(status as u8),
        Err(error) => {
            eprintln!("memfold: {error:#}");
            ExitCode::from(error.downcast_ref().map_or(BROKEN, Refusal::exit_code) as u8)
        }
    }
}

/// Runs a benchmark, and returns the exit status.
fn run(bench: BenchCommand) -> anyhow::Result<i32> {
    match bench {
        BenchCommand::Corpus(args) => corpus::corpus(args).map(|()| 0),
        BenchCommand::Walk(args) => walk::walk(args),
        BenchCommand::Store(args) => store::store(args),
        BenchCommand::Swap(args) => swap::swap(args),
        BenchCommand::Apps(args) => apps::apps(args),
        BenchCommand::Usemem(args) => usemem::usemem(args),
        BenchCommand::Policy(args) => policy::policy(args),
        BenchCommand::Costs(args) => policy::costs(&args),
        BenchCommand::Blocks(args) => store::blocks(args),
        BenchCommand::Pools(args) => store::pools(args),
        BenchCommand::Peers(args) => store::peers(args),
        BenchCommand::Report(args) => report::report(args),
        BenchCommand::WalkChild(args) => walk::walk_child(args).map(|()| 0),
        BenchCommand::Idle(args) => idle::idle(args),
        BenchCommand::IdleChild(args) => Ok(idle::idle_child(&args)),
        BenchCommand::UsememChild(args) => usemem::usemem_child(args).map(|()| 0),
    }
}

/// Prints help on request. Other errors are printed as one line: clap's own, without its advice.
fn usage(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() || error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let _ = error.print();
        return ExitCode::from(if error.use_stderr() { USAGE } else { 0 });
    }
    let text = error.render().to_string();
    let reason = text.split("\n\n").next().unwrap_or_default().trim_start_matches("error: ");
    eprintln!("memfold: {}", reason.split_whitespace().collect::<Vec<_>>().join(" "));
    ExitCode::from(USAGE)
}
