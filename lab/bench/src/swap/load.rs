//! The load of `bench swap`: as in usemem, threads write their parts of an area, read them and
//! write them again, over a swap file of memfold or of the kernel. Every page is checked.

use crate::common::row::StoreRow;
use crate::common::size::show_size;
use crate::common::summary::{Spread, show};
use crate::harness::file_run::{FileRun, ZSWAP_CODEC, check, check_zswap};
use crate::harness::message::Message;
use crate::harness::runner::{RunResult, run};
use crate::harness::stats_file::StatsFile;
use crate::harness::workload::Phase;
use crate::host::cgroup::Hierarchy;
use crate::host::folio::FolioKib;
use crate::host::guard;
use crate::host::journal::JOURNAL_PATH;
use crate::host::machine::Machine;
use crate::host::program::{THIS, memfold};
use crate::walk::{AreaKind, WalkChildArgs};
use anyhow::{Context, bail};
use std::ffi::OsString;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// The least gain of folios of 64 KiB and 2 MiB over folios of 4 KiB.
const LARGE_MIN: [(&str, f64); 2] = [("64K", 1.46), ("2M", 1.90)];
/// The least gain of memfold over the kernel.
const KERNEL_MIN: f64 = 1.5;
const SILENCE_MAX: Duration = Duration::from_secs(120);
/// The size limit of zswap, in percent of the machine's memory: the smallest that the kernel
/// accepts.
const ZSWAP_PERCENT: u64 = 1;

/// The parameters of a load.
#[derive(Clone)]
pub struct Load<'a> {
    /// The corpus file.
    pub corpus: &'a Path,
    /// The directory of swap files.
    pub dir: &'a Path,
    /// Bytes written.
    pub size: u64,
    /// The memory limit, in bytes.
    pub limit: u64,
    /// Threads, each with its own part.
    pub threads: usize,
    /// Runs of each kind, in turn.
    pub runs: usize,
}

impl Load<'_> {
    fn child(
        &self,
        area: AreaKind,
        phases: &[Phase],
        codec: &str,
        settings: &[String],
    ) -> Vec<OsString> {
        let args = WalkChildArgs {
            area,
            corpus: self.corpus.into(),
            size: self.size,
            resident: self.limit,
            codec: codec.into(),
            set: settings.to_vec(),
            threads: self.threads,
            phases: phases.to_vec(),
            random_reads: 0,
            random_seconds: 0,
            soak: 0,
            seed: 1,
        };
        args.words()
    }

    /// Runs the load in a region of the library (thread mode), within `limit`. All evicted data
    /// goes to the swap file.
    fn in_region(
        &self,
        phases: &[Phase],
        codec: &str,
        settings: &[String],
    ) -> anyhow::Result<RunResult> {
        let mut all = vec![format!("limit={}", self.limit), format!("swap={}", self.dir.display())];
        all.extend_from_slice(settings);
        finished(run(
            "region",
            Command::new(THIS).args(self.child(AreaKind::Thread, phases, codec, &all)),
            SILENCE_MAX,
            |_| Ok(()),
        )?)
    }

    /// Runs the load as a plain program under `memfold run --limit --swap` with further flags.
    /// `on_ready` gets its process.
    pub fn under_run(&self, flags: &[&str], on_ready: impl Fn(i32)) -> anyhow::Result<RunResult> {
        let stats = StatsFile::new();
        let mut command = Command::new(memfold()?);
        command.args(["run", "--limit", &self.limit.to_string(), "--swap"]).arg(self.dir);
        command
            .args(flags)
            .arg("--stats-file")
            .arg(stats.path())
            .arg("--")
            .arg(std::env::current_exe()?);
        command.args(self.child(AreaKind::Plain, &WALK, "lz4", &[]));
        let on_message = |message: &Message| {
            if let Message::Ready { pid } = message {
                on_ready(*pid);
            }
            Ok(())
        };
        let mut result = finished(run("memfold-run", &mut command, SILENCE_MAX, on_message)?)?;
        result.counters.extend(stats.counters());
        Ok(result)
    }

    fn on_kernel(&self, folio: FolioKib, zswap_percent: Option<u64>) -> anyhow::Result<RunResult> {
        let zswap = zswap_percent.map(|percent| (ZSWAP_CODEC, percent));
        let run = FileRun {
            dir: self.dir,
            folio,
            area_bytes: self.size,
            resident_bytes: self.limit,
            zswap,
        };
        finished(run.run(
            &folio.name(),
            Command::new(THIS).args(self.child(AreaKind::of_kernel(folio), &WALK, "none", &[])),
            SILENCE_MAX,
        )?)
    }
}

/// The phases that are compared with the kernel: write, read, write again.
const WALK: [Phase; 3] = [Phase::Fill, Phase::Read1, Phase::Dirty];

/// Returns an error if a run failed or found a wrong byte.
fn finished(result: RunResult) -> anyhow::Result<RunResult> {
    if let Some(why) = &result.broke_off {
        bail!("{}: broke off: {why}", result.peer);
    }
    if result.bytes_wrong > 0 {
        bail!("{}: {} WRONG BYTES", result.peer, result.bytes_wrong);
    }
    Ok(result)
}

/// Returns the bytes of all phases over their time, in MB/s.
fn throughput(result: &RunResult) -> f64 {
    let bytes: f64 = result.phases.iter().map(|phase| phase.mb_per_s * phase.seconds).sum();
    bytes / result.phases.iter().map(|phase| phase.seconds).sum::<f64>()
}

fn median(results: &[RunResult], of: impl Fn(&RunResult) -> f64) -> f64 {
    Spread::of(results.iter().map(of).collect()).map_or(f64::NAN, |spread| spread.median)
}

/// Formats the figures of the phases for a note: `fill 500, read1 400, dirty 300`.
fn phases(results: &[RunResult]) -> String {
    let show = |phase: &Phase| {
        let of = |r: &RunResult| {
            r.phases.iter().find(|p| p.phase == *phase).map_or(f64::NAN, |p| p.mb_per_s)
        };
        format!("{} {}", phase.name(), show(median(results, of)))
    };
    WALK.iter().map(show).collect::<Vec<_>>().join(", ")
}

/// Runs usemem's load, write once, with nothing compressed: folios of 64 KiB and 2 MiB against
/// those of 4 KiB.
pub fn folio_rows(load: &Load<'_>) -> anyhow::Result<Vec<StoreRow>> {
    let sizes = ["4K", "64K", "2M"];
    let mut results: [Vec<RunResult>; 3] = Default::default();
    for _ in 0..load.runs {
        for (size, results) in sizes.iter().zip(&mut results) {
            let block = if *size == "4K" { "4K" } else { "16K" };
            let settings = [format!("folio={size}"), format!("block={block}")];
            results.push(
                load.in_region(&[Phase::Fill], "none", &settings)
                    .with_context(|| format!("folios of {size}"))?,
            );
        }
    }
    let fill = |i: usize| median(&results[i], throughput);
    let note = |i: usize| {
        let counters = &results[i][0].counters;
        let count = |name: &str| counters.get(name).copied().unwrap_or(0);
        let whole = count(&format!("swpout_{}", sizes[i])) * sizes_bytes(sizes[i]);
        let fallback = count(&format!("swpout_fallback_{}", sizes[i]));
        let out = count("pswpout") << 12;
        format!(
            "{} MB/s; {} written, {} of it in folios of {}; {fallback} split",
            show(fill(i)),
            show_size(out),
            show_size(whole),
            sizes[i]
        )
    };
    let mut rows = vec![StoreRow::plain("raw to the file, folios of 4K: MB/s", fill(0), note(0))];
    for (i, (size, least)) in LARGE_MIN.into_iter().enumerate() {
        let label = format!("raw to the file, folios of {size} of 4K: throughput");
        rows.push(StoreRow::at_least(&label, fill(i + 1) / fill(0), least, note(i + 1)));
    }
    Ok(rows)
}

fn sizes_bytes(size: &str) -> u64 {
    crate::common::size::parse_size(size).unwrap_or(0)
}

/// Runs the load on the kernel's swap to a file on the same disk. zswap comes last, and only on
/// request.
pub fn kernel_rows(load: &Load<'_>, zswap: bool) -> anyhow::Result<Vec<StoreRow>> {
    let labels =
        ["of kernel swap to a file: throughput", "of kernel swap with zswap lzo: throughput"];
    let target = format!(">= {KERNEL_MIN}");
    if let Err(why) = check() {
        return Ok(labels
            .iter()
            .map(|label| StoreRow::not_run(label, &target, &why.to_string()))
            .collect());
    }
    guard::open_journal(Path::new(JOURNAL_PATH))?;
    let rows = against_kernel(load, labels[0], None).and_then(|plain_run| {
        let refusal = match (check_zswap(), zswap) {
            (Err(why), _) => Some(why.to_string()),
            (Ok(()), false) => {
                Some("give --zswap: until the next boot the kernel then swaps large folios in page by page".to_string())
            }
            (Ok(()), true) => None,
        };
        let with = match refusal {
            Some(why) => vec![StoreRow::not_run(labels[1], &target, &why)],
            None => against_kernel(load, labels[1], Some(ZSWAP_PERCENT))?,
        };
        Ok([plain_run, with].concat())
    });
    guard::close_journal();
    rows
}

fn against_kernel(
    load: &Load<'_>,
    label: &str,
    zswap_percent: Option<u64>,
) -> anyhow::Result<Vec<StoreRow>> {
    // A cgroup of version 1 doesn't count zswap's memory. So memfold gets as much on top, and the
    // load grows with it.
    let room = match (zswap_percent, Hierarchy::find()?) {
        (Some(percent), Hierarchy::V1(_)) => Machine::read().memory_bytes / 100 * percent,
        _ => 0,
    };
    let kernels = Load { size: load.size + 2 * (room >> 20 << 20), ..load.clone() };
    let ours = Load { limit: load.limit + room, ..kernels.clone() };
    let sizes = [FolioKib(4), FolioKib(64)].into_iter().filter(|size| size.check().is_ok());
    let mut theirs: Vec<(FolioKib, Vec<RunResult>)> =
        sizes.map(|size| (size, Vec::new())).collect();
    let mut own = Vec::new();
    for _ in 0..load.runs {
        own.push(ours.under_run(&[], |_| ())?);
        for (size, results) in &mut theirs {
            results.push(kernels.on_kernel(*size, zswap_percent)?);
        }
    }
    let mut rows = Vec::new();
    let mut best = f64::NAN;
    for (size, results) in &theirs {
        let speed = median(results, throughput);
        best = best.max(speed);
        let counters = &results[0].counters;
        let out = show_size(counters.get("pages_swapped_out").unwrap_or(&0) << 12);
        let note = match zswap_percent {
            None => format!("{}; {out} swapped out", phases(results)),
            Some(_) => {
                let note = show_size(*counters.get("zswap_bytes").unwrap_or(&0));
                format!("{}; {out} swapped out; zswap {ZSWAP_CODEC} held {note}", phases(results))
            }
        };
        let label = label
            .replace(": throughput", &format!(", folios of {}: MB/s", size.name()))
            .replacen("of k", "k", 1);
        rows.push(StoreRow::plain(&label, speed, note));
    }
    let speed = median(&own, throughput);
    let size =
        show_size(own[0].counters.get("swap_bytes").copied().unwrap_or(0).max(written(&own[0])));
    let note = format!(
        "{} of {} MB/s: {}; {} in {}; {size} of data in the file",
        show(speed),
        show(best),
        phases(&own),
        show_size(ours.size),
        show_size(ours.limit)
    );
    rows.push(StoreRow::at_least(label, speed / best, KERNEL_MIN, note));
    Ok(rows)
}

fn written(result: &RunResult) -> u64 {
    result.counters.get("pswpout").copied().unwrap_or(0) << 12
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::workload::PhaseResult;
    use std::collections::BTreeMap;

    fn result(phases: &[(Phase, f64, f64)]) -> RunResult {
        let phase = |&(phase, seconds, mb_per_s): &(Phase, f64, f64)| PhaseResult {
            phase,
            seconds,
            mb_per_s,
            accesses: 0,
            mean_us: 0.0,
            p50_us: 0.0,
            p99_us: 0.0,
            max_us: 0.0,
            cdf: Vec::new(),
            bytes_wrong: 0,
        };
        RunResult {
            peer: "a".into(),
            phases: phases.iter().map(phase).collect(),
            bytes_wrong: 0,
            resident_bytes_max: 0,
            counters: BTreeMap::new(),
            memory: Vec::new(),
            broke_off: None,
        }
    }

    #[test]
    fn throughput_is_all_bytes_over_all_time() {
        let run = result(&[(Phase::Fill, 1.0, 100.0), (Phase::Read1, 3.0, 500.0)]);
        assert_eq!(throughput(&run), 400.0);
        assert_eq!(phases(&[run]), "fill 100, read1 500, dirty NaN");
    }

    #[test]
    fn run_with_wrong_byte_or_without_end_is_rejected() {
        let result_wrong = RunResult { bytes_wrong: 1, ..result(&[]) };
        assert!(finished(result_wrong).unwrap_err().to_string().contains("1 WRONG BYTES"));
        let result_broken = RunResult { broke_off: Some("killed".into()), ..result(&[]) };
        assert!(finished(result_broken).unwrap_err().to_string().contains("killed"));
        assert!(finished(result(&[])).is_ok());
    }
}
