//! `memfold bench usemem`: vm-scalability's usemem with real data, on memfold and on the kernel's
//! compressed swap.

mod child;
mod peer;

use crate::common::output::Output;
use crate::common::refusal::Refusal;
use crate::common::row::StoreRow;
use crate::common::size::{parse_size, show_size};
use crate::common::summary::Spread;
use crate::common::table::layout;
use crate::corpus::Given;
use crate::corpus::file::{CorpusFile, PAGE};
use crate::harness::file_run::{FileRun, check, check_zswap};
use crate::harness::report::Report;
use crate::harness::runner::{self, RunResult};
use crate::harness::stats_file::{RATIO_PERMILLE, StatsFile};
use crate::harness::workload::Phase;
use crate::harness::zram_run::ZramRun;
use crate::host::folio::FolioKib;
use crate::host::guard;
use crate::host::journal::JOURNAL_PATH;
use crate::host::machine::Machine;
use crate::host::program::memfold;
use crate::host::zram::Zram;
use crate::usemem::peer::{PagerSetting, SWAP_DIR, default_peers, parse};
use anyhow::Context;
use serde::Serialize;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

pub use child::{UsememChildArgs, usemem_child};

/// Arguments of `memfold bench usemem`. One-letter flags are those of usemem.
#[derive(clap::Args, Debug, Clone)]
pub struct UsememArgs {
    /// Memory of each task [default: 256M, with --quick 48M]
    #[arg(value_parser = parse_size)]
    pub size: Option<u64>,
    /// Tasks, each a process
    #[arg(short = 'n', long, default_value_t = 7)]
    pub nproc: usize,
    /// Memory that all tasks together may keep resident [default: 4/7 of what they use, as 40G of
    /// 70 x 1G]
    #[arg(long, value_parser = parse_size)]
    pub limit: Option<u64>,
    /// Only read; the memory is filled before the measurement
    #[arg(short = 'o', long)]
    pub readonly: bool,
    /// Pages in random order
    #[arg(short = 'R', long)]
    pub random: bool,
    /// Passes: the first fills, the others read and change every page
    #[arg(short = 'r', long, default_value_t = 1)]
    pub repeat: u32,
    /// Show the time of set-up, which is never part of the other times
    #[arg(long)]
    pub init_time: bool,
    /// Accepted for compatibility with usemem: memory is always written
    #[arg(short = 'w', long = "open-rw")]
    pub open_rw: bool,
    /// Accepted for compatibility with usemem: memory is always anonymous
    #[arg(short = 'O', long)]
    pub anonymous: bool,
    /// Accepted for compatibility with usemem: all is always read again, and every page checked
    #[arg(short = 'Z', long)]
    pub read_again: bool,
    #[allow(rustdoc::broken_intra_doc_links)]
    /// memfold[:CODEC[:FOLIO]][+verify][+canned][+lean][+swap][+counted|+uncounted],
    /// zram[:CODEC][:FOLIO], zswap:CODEC:FOLIO (name it last: until the next boot the kernel then
    /// reads no large folios from swap) or file:FOLIO; repeatable [default: many]
    #[arg(long, value_name = "PEER")]
    pub peer: Vec<String>,
    /// The data
    #[command(flatten)]
    pub corpus: Given,
    /// Runs of each peer, in turn [default: 1; bench report has rounds of its own]
    #[arg(long, default_value_t = 1)]
    pub runs: usize,
    /// A quick run: less memory, fewer peers
    #[arg(long)]
    pub quick: bool,
    /// Where the report goes
    #[command(flatten)]
    pub output: Output,
}

/// Memory beyond the limit for each process itself, which no peer is charged for.
const OWN_BYTES: u64 = 1 << 20;
/// The size limit of zswap, in percent of the machine's memory: the kernel's default.
const ZSWAP_PERCENT: u64 = 20;
/// A run that prints nothing for this long is killed.
const SILENCE_MAX: Duration = Duration::from_secs(120);

/// The results of a peer over its runs.
#[derive(Serialize)]
struct Took {
    peer: String,
    out_mb_s: Option<Spread>,
    in_mb_s: Option<Spread>,
    user_s: Option<Spread>,
    system_s: Option<Spread>,
    cpu_s: Option<Spread>,
    /// Peak pool memory, in bytes.
    pool_bytes: Option<u64>,
    /// Data bytes per byte of the pool at that time.
    ratio: Option<f64>,
    bytes_wrong: u64,
    counters: BTreeMap<String, u64>,
    note: String,
}

#[derive(Serialize)]
struct UsememFindings {
    conditions: String,
    peers: Vec<Took>,
}

struct UsememPlan {
    corpus: PathBuf,
    size: u64,
    limit: u64,
    args: UsememArgs,
}

/// Runs usemem on every peer in turn, prints the report, and returns the exit status: 1 if a byte
/// was wrong, a run failed or, with `--check`, a row is short. Every kernel setting is restored.
pub fn usemem(args: UsememArgs) -> anyhow::Result<i32> {
    guard::install()?;
    let (mut pagers, mut left_out) = (Vec::new(), Vec::new());
    let peers: Vec<&str> = args.peer.iter().map(String::as_str).collect();
    for text in if peers.is_empty() { default_peers(args.quick) } else { peers.clone() } {
        for pager in parse(text).map_err(Refusal::Usage)? {
            match why_not(&pager) {
                Ok(()) => pagers.push(pager),
                Err(why) if peers.is_empty() => left_out.push((pager, why.to_string())),
                Err(why) => return Err(why.into()),
            }
        }
    }
    let plan = UsememPlan::new(args)?;
    let kernel = pagers.iter().any(|pager| !matches!(pager, PagerSetting::Memfold { .. }));
    if kernel {
        guard::open_journal(Path::new(JOURNAL_PATH))?;
    }
    let mut results: Vec<Vec<RunResult>> = pagers.iter().map(|_| Vec::new()).collect();
    let mut notes = vec![String::new(); pagers.len()];
    let mut is_failure = false;
    for _ in 0..plan.args.runs {
        for (index, pager) in pagers.iter().enumerate() {
            match plan.run(pager) {
                Ok(result) => {
                    is_failure |= has_failed(&result);
                    notes[index] = result.broke_off.clone().unwrap_or_default();
                    results[index].push(result);
                }
                Err(error) => {
                    is_failure = true;
                    notes[index] = format!("{error:#}");
                }
            }
        }
    }
    if kernel {
        guard::close_journal();
    }
    let mut peers: Vec<Took> = pagers
        .iter()
        .zip(&results)
        .zip(notes)
        .map(|((pager, runs), note)| Took::of(pager, runs, note))
        .collect();
    let rows = rows(&pagers, &peers, &left_out);
    peers.extend(left_out.iter().map(|(pager, why)| Took::of(pager, &[], why.clone())));
    let mut report = Report::new(UsememFindings { conditions: plan.conditions(), peers });
    report.rows = rows;
    let is_wrong = report.found.peers.iter().any(|result| result.bytes_wrong > 0);
    let note = format!("; zswap enabled: {}", report.machine.zswap_enabled);
    let body = report.found.text(plan.args.init_time);
    report.finish(&plan.args.output, "usemem", (&note, &body), is_failure || is_wrong)
}

/// Returns whether a run failed. If the kernel killed it because its cgroup was out of memory, that
/// is a result and not a failure.
fn has_failed(result: &RunResult) -> bool {
    result.broke_off.is_some() && result.counters.get("oom_kills").is_none_or(|kills| *kills == 0)
}

/// Returns why this machine can't run this peer.
fn why_not(pager: &PagerSetting) -> Result<(), Refusal> {
    match pager {
        PagerSetting::Memfold { .. } => Ok(()),
        PagerSetting::Zram { codec, folio } => Zram::check(codec).and_then(|()| folio.check()),
        PagerSetting::File { zswap: Some(_), folio } => {
            check().and_then(|()| check_zswap()).and_then(|()| folio.check())
        }
        PagerSetting::File { zswap: None, folio } => check().and_then(|()| folio.check()),
    }
}

impl UsememPlan {
    fn new(args: UsememArgs) -> anyhow::Result<UsememPlan> {
        let size = args.size.unwrap_or(if args.quick { 48 << 20 } else { 256 << 20 }) / PAGE as u64
            * PAGE as u64;
        let all = size.saturating_mul(args.nproc as u64);
        let limit = args.limit.unwrap_or(all / 7 * 4);
        let memory = Machine::read().memory_bytes;
        let usage = |why: &str| Err(Refusal::Usage(why.into()));
        match () {
            () if !(1..=256).contains(&args.nproc) => usage("-n must be 1 to 256"),
            () if args.runs == 0 => usage("--runs must be at least 1"),
            () if size < 4 << 20 => usage("a task needs at least 4M"),
            () if all > memory / 4 * 3 => {
                usage("the tasks together need over three quarters of this machine's memory")
            }
            () if limit < 8 << 20 => usage("--limit must be at least 8M"),
            () if limit >= all => {
                usage("--limit must be smaller than what the tasks use: else nothing is folded")
            }
            () => Ok(()),
        }?;
        let corpus = args.corpus.find()?;
        // Reading all of it puts it into the page cache, charged to this process.
        CorpusFile::open(&corpus)?;
        std::fs::read(&corpus).with_context(|| format!("reading {}", corpus.display()))?;
        Ok(UsememPlan { corpus, size, limit, args })
    }

    fn conditions(&self) -> String {
        let order = if self.args.random { "random" } else { "sequential" };
        let (n, size, limit) = (self.args.nproc, show_size(self.size), show_size(self.limit));
        let passes = self.args.repeat.max(1);
        format!(
            "{n} tasks of {size} in {limit}, {order}, {passes} pass(es), {} run(s)",
            self.args.runs
        )
    }

    fn child_args(&self, huge: bool) -> Vec<OsString> {
        let args = &self.args;
        let mut list: Vec<OsString> = ["usemem-child", "--nproc"].map(OsString::from).to_vec();
        let values = [
            args.nproc.to_string(),
            "--size".into(),
            self.size.to_string(),
            "--repeat".into(),
            args.repeat.to_string(),
        ];
        list.extend(values.map(OsString::from));
        list.extend(["--corpus".into(), self.corpus.clone().into_os_string()]);
        let flags = [("--huge", huge), ("--readonly", args.readonly), ("--random", args.random)];
        list.extend(flags.iter().filter(|flag| flag.1).map(|flag| OsString::from(flag.0)));
        list
    }

    fn run(&self, pager: &PagerSetting) -> anyhow::Result<RunResult> {
        let limit_bytes = self.limit + (self.args.nproc as u64 + 1) * OWN_BYTES;
        let this = std::env::current_exe().context("finding this program's own file")?;
        match pager {
            PagerSetting::Memfold { .. } => {
                let stats = StatsFile::new();
                let mut command = Command::new(memfold()?);
                command
                    .args(pager.run_args(limit_bytes))
                    .arg("--stats-file")
                    .arg(stats.path())
                    .arg("--");
                command.arg(&this).args(self.child_args(false));
                let mut result = runner::run(&pager.name(), &mut command, SILENCE_MAX, |_| Ok(()))?;
                result.counters.extend(stats.counters());
                Ok(result)
            }
            PagerSetting::Zram { codec, folio } => {
                let area_bytes = self.size * self.args.nproc as u64;
                let run = ZramRun { codec, folio: *folio, area_bytes, resident_bytes: limit_bytes };
                let huge = *folio != FolioKib(4);
                run.run(
                    &pager.name(),
                    Command::new(&this).args(self.child_args(huge)),
                    SILENCE_MAX,
                    |_| Ok(()),
                )
            }
            PagerSetting::File { zswap, folio } => {
                let (dir, area_bytes) = (Path::new(SWAP_DIR), self.size * self.args.nproc as u64);
                let zswap = zswap.as_deref().map(|codec| (codec, ZSWAP_PERCENT));
                let run =
                    FileRun { dir, folio: *folio, area_bytes, resident_bytes: limit_bytes, zswap };
                let huge = *folio != FolioKib(4);
                run.run(&pager.name(), Command::new(&this).args(self.child_args(huge)), SILENCE_MAX)
            }
        }
    }
}

impl Took {
    fn of(pager: &PagerSetting, runs: &[RunResult], note: String) -> Took {
        let phase = |phase| {
            let results =
                runs.iter().flat_map(|run| &run.phases).filter(|result| result.phase == phase);
            Spread::of(results.map(|result| result.mb_per_s).collect())
        };
        let whole = || runs.iter().filter(|run| run.broke_off.is_none());
        let seconds = |names: &[&str]| {
            let sum = |run: &RunResult| {
                names.iter().map(|name| *run.counters.get(*name).unwrap_or(&0)).sum::<u64>()
            };
            Spread::of(whole().map(|run| sum(run) as f64 / 1e6).collect())
        };
        let counters = whole().next_back().map_or(BTreeMap::new(), |run| run.counters.clone());
        let pool_bytes =
            ["peak_pool_bytes", "pool_bytes"].iter().find_map(|name| counters.get(*name).copied());
        let kernel = || {
            Some(
                *counters.get("stored_bytes")? as f64 / pool_bytes.filter(|pool| *pool > 0)? as f64,
            )
        };
        let ours = counters.get(RATIO_PERMILLE).map(|ratio| *ratio as f64 / 1e3);
        let ratio = if matches!(pager, PagerSetting::Memfold { .. }) { ours } else { kernel() };
        Took {
            peer: pager.name(),
            out_mb_s: phase(Phase::Fill),
            in_mb_s: phase(Phase::Read1),
            user_s: seconds(&["out_user_us", "in_user_us"]),
            system_s: seconds(&["out_system_us", "in_system_us"]),
            cpu_s: seconds(&["out_user_us", "in_user_us", "out_system_us", "in_system_us"]),
            pool_bytes,
            ratio,
            bytes_wrong: runs.iter().map(|run| run.bytes_wrong).sum(),
            counters,
            note,
        }
    }

    /// Returns the pages out and in by folio size, as far as they are counted.
    fn by_order(&self) -> String {
        let mut parts = Vec::new();
        for kind in ["zswpout", "zswpin", "swpout", "swpin"] {
            for (name, count) in self.counters.iter().filter(|(_, count)| **count > 0) {
                if let Some(size) =
                    name.strip_prefix(&format!("{kind}_")).filter(|size| *size != "fallback")
                {
                    parts.push(format!("{kind}_{size} {count}"));
                }
            }
        }
        if let (Some(out), Some(large)) =
            (self.counters.get("pages_swapped_out"), self.counters.get("pages_out_in_folios"))
        {
            parts.push(format!("pages out {out}, in folios {large}"));
        }
        parts.join(", ")
    }
}

/// Makes rows of memfold against zram at the same folio size, of large folios against small ones,
/// and of memory held.
fn rows(
    pagers: &[PagerSetting],
    peers: &[Took],
    left_out: &[(PagerSetting, String)],
) -> Vec<StoreRow> {
    let mut rows: Vec<StoreRow> = pagers
        .iter()
        .zip(peers)
        .flat_map(|(pager, result)| against(pager, result, peers))
        .collect();
    for peer in peers {
        let name = peer.peer.strip_suffix("+uncounted");
        let counterpart = name.and_then(|name| find(peers, &format!("{name}+counted")));
        rows.extend(
            counterpart
                .and_then(|counterpart| switch_rows(peer, counterpart))
                .into_iter()
                .flatten(),
        );
    }
    rows.extend(peers.iter().filter_map(frames_row));
    rows.extend(peers.iter().filter_map(held_row));
    let runs = peers.iter().filter(|result| result.out_mb_s.is_some()).count();
    let wrong_bytes: u64 = peers.iter().map(|result| result.bytes_wrong).sum();
    let note = format!("{runs} peers");
    rows.push(StoreRow::at_most("bytes wrong, all runs", wrong_bytes as f64, 0.0, note));
    for (pager, why) in left_out {
        rows.push(StoreRow::not_run(&format!("{}: throughput out", pager.name()), "", why));
    }
    rows
}

fn find<'a>(peers: &'a [Took], name: &str) -> Option<&'a Took> {
    peers.iter().find(|result| result.peer == name)
}

/// Makes rows of a memfold run against the peers that it is compared with.
fn against(pager: &PagerSetting, took: &Took, peers: &[Took]) -> Vec<StoreRow> {
    let PagerSetting::Memfold { codec, folio, with } = pager else { return Vec::new() };
    let mut rows = Vec::new();
    if let Some(theirs) = find(peers, &format!("zram:lzo-rle:{}", folio.name())) {
        let source = match (folio.0, codec.as_str(), with.is_empty()) {
            (64, "lz4", true) => "; 1.04 in the source, there zswap lz4",
            (64, "deflate", true) => "; 1.49 in the source, there deflate-iaa",
            (2048, "lz4", true) => "; 1.01 in the source, there zswap lz4",
            (2048, "deflate", true) => "; 1.31 in the source, there deflate-iaa",
            _ => "",
        };
        rows.extend(both_ways(took, theirs, source));
    }
    let size = format!(":{}", folio.name());
    for other in peers.iter().filter(|_| with.contains(&"swap")) {
        let kind = other.peer.split(':').next().unwrap_or_default();
        if ["file", "zswap"].contains(&kind) && other.peer.ends_with(&size) {
            rows.extend(both_ways(took, other, ""));
        }
    }
    let small = find(peers, &format!("memfold:{codec}:4k"));
    if let Some(small) = small.filter(|_| with.is_empty() && folio.0 > 4) {
        let label = format!("folios of {} of 4k, {codec}: throughput out", folio.name());
        rows.extend(speed_row(label, took.out_mb_s, small.out_mb_s, ""));
    }
    rows
}

fn both_ways(ours: &Took, theirs: &Took, source: &str) -> impl Iterator<Item = StoreRow> {
    let label = |way| format!("{}: throughput {way} of {}", ours.peer, theirs.peer);
    let out = speed_row(label("out"), ours.out_mb_s, theirs.out_mb_s, source);
    out.into_iter().chain(speed_row(label("in"), ours.in_mb_s, theirs.in_mb_s, ""))
}

fn speed_row(
    label: String,
    ours: Option<Spread>,
    theirs: Option<Spread>,
    source: &str,
) -> Option<StoreRow> {
    let (a, b) = (ours?.median, theirs?.median);
    let note = format!("{:.0} of {:.0} KB/s{source}", a * 1e6 / 1024.0, b * 1e6 / 1024.0);
    Some(StoreRow::plain(&label, a / b, note))
}

fn frames_row(took: &Took) -> Option<StoreRow> {
    let count = |name: &str| took.counters.get(name).map(|count| *count as f64);
    let requests = count("frame_alloc").filter(|n| *n > 0.0)?;
    let failures = count("frame_alloc_failed")?;
    let note = format!("{failures} of {requests} could not be had at their size");
    let label = format!("large frames had at once, %, {}", took.peer);
    Some(StoreRow::plain(&label, (1.0 - failures / requests) * 100.0, note))
}

fn held_row(took: &Took) -> Option<StoreRow> {
    let note = format!("the pool held at most {}", show_size(took.pool_bytes.unwrap_or(0)));
    let label = format!("memory held: data for each byte, {}", took.peer);
    Some(StoreRow::plain(&label, took.ratio?, note))
}

/// Makes rows of the pool outside of the limit against the pool inside it (Z6).
fn switch_rows(outside: &Took, inside: &Took) -> Option<[StoreRow; 2]> {
    let peak_bytes = |result: &Took| Some(*result.counters.get("peak_bytes")? as f64);
    let (out, peak_inside) = (peak_bytes(outside)?, peak_bytes(inside)?);
    let note = format!(
        "{} of {}: pages, frames, pool, index",
        show_size(out as u64),
        show_size(peak_inside as u64)
    );
    let speed = |result: &Took| result.in_mb_s.map(|spread| spread.median);
    let (fast, slow) = (speed(outside)?, speed(inside)?);
    Some([
        StoreRow::plain(
            "--pool-counts off of on: all memory held at most",
            out / peak_inside,
            note,
        ),
        StoreRow::plain(
            "--pool-counts off of on: throughput in",
            fast / slow,
            format!("{fast:.0} of {slow:.0} MB/s"),
        ),
    ])
}

impl UsememFindings {
    fn text(&self, init_time: bool) -> String {
        let mut text = format!("{}\n\n", self.conditions);
        let mut head = vec![
            "peer", "out KB/s", "in KB/s", "user s", "system s", "faults", "major", "held",
            "ratio", "wrong",
        ];
        if init_time {
            head.push("init s");
        }
        let mut table = vec![head.into_iter().map(String::from).collect::<Vec<_>>()];
        for result in &self.peers {
            let kb = |spread: Option<Spread>| {
                spread.map_or("-".into(), |s| format!("{:.0}", s.median * 1e6 / 1024.0))
            };
            let s =
                |spread: Option<Spread>| spread.map_or("-".into(), |s| format!("{:.2}", s.median));
            let sum = |names: [&str; 2]| {
                names.iter().filter_map(|name| result.counters.get(*name)).sum::<u64>().to_string()
            };
            let size = |bytes: Option<u64>| bytes.map_or("-".into(), show_size);
            let mut row = vec![
                result.peer.clone(),
                kb(result.out_mb_s),
                kb(result.in_mb_s),
                s(result.user_s),
                s(result.system_s),
            ];
            row.extend([
                sum(["out_faults_minor", "in_faults_minor"]),
                sum(["out_faults_major", "in_faults_major"]),
            ]);
            let ratio = result.ratio.map_or("-".into(), |ratio| format!("{ratio:.2}"));
            row.extend([size(result.pool_bytes), ratio, result.bytes_wrong.to_string()]);
            if init_time {
                row.push(format!(
                    "{:.2}",
                    *result.counters.get("init_us").unwrap_or(&0) as f64 / 1e6
                ));
            }
            table.push(row);
        }
        text += &layout(&table);
        text.push('\n');
        for result in &self.peers {
            let (orders, note) = (result.by_order(), &result.note);
            if !orders.is_empty() || !note.is_empty() {
                text += &format!(
                    "{}: {orders}{}{note}\n",
                    result.peer,
                    if note.is_empty() { "" } else { " BROKE OFF: " }
                );
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_run_is_a_failure_unless_it_was_oom_killed() {
        let run = |broke_off: Option<&str>, oom_kills: Option<u64>| RunResult {
            peer: "a".into(),
            phases: Vec::new(),
            bytes_wrong: 0,
            resident_bytes_max: 0,
            memory: Vec::new(),
            counters: oom_kills.map(|kills| ("oom_kills".to_string(), kills)).into_iter().collect(),
            broke_off: broke_off.map(String::from),
        };
        assert!(
            has_failed(&run(Some("signal: 6"), None))
                && has_failed(&run(Some("signal: 6"), Some(0)))
        );
        assert!(!has_failed(&run(Some("signal: 9"), Some(1))) && !has_failed(&run(None, None)));
    }
}
