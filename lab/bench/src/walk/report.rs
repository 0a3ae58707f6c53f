//! The text and the JSON report of a walk.

use crate::common::size::show_size;
use crate::common::summary::Spread;
use crate::common::table::layout;
use crate::common::verdict::Verdict;
use crate::harness::report::Report;
use crate::harness::runner::RunResult;
use crate::harness::workload::{Phase, PhaseResult};
use crate::walk::peer::{Form, Peer};
use crate::walk::targets::{TargetRow, compare, memory_rows, wrong_row};
use serde::Serialize;
use std::collections::BTreeMap;

/// The results of a walk.
#[derive(Debug, Serialize)]
pub struct Walked {
    /// Corpus: file, size and hash.
    pub corpus: String,
    /// The resident limit of every peer, in bytes.
    pub resident_bytes: u64,
    /// Area, resident size, codec, threads, runs, as text.
    pub conditions: String,
    /// Differences of the conditions from those that the targets are set for.
    pub departures: Vec<String>,
    /// Peers that were not run or failed, with the reason.
    pub left_out: Vec<String>,
    /// All runs, in order.
    pub runs: Vec<RunResult>,
}

/// The report of a walk, whose rows compare with the kernel's best.
pub type WalkReport = Report<Walked, TargetRow>;

impl WalkReport {
    /// Computes the rows from the runs.
    pub fn judge(&mut self) {
        let ours = |form: Form, phase| {
            self.spread(form.name(), phase, metric(phase)).map(|spread| spread.median)
        };
        let kernel = |phase| {
            let best = |name: &String| {
                let size = name.strip_prefix("zram:lz4:")?.to_string();
                Some((self.spread(name, phase, metric(phase))?.median, size))
            };
            self.peers().iter().filter_map(best).collect()
        };
        let mut rows = compare(ours, kernel, |form| self.over_bound(form.name()).is_some());
        let memfold: Vec<&RunResult> =
            self.found.runs.iter().filter(|run| run.peer.starts_with("memfold")).collect();
        rows.push(wrong_row(memfold.iter().map(|run| run.bytes_wrong).sum(), memfold.len()));
        rows.extend(memory_rows(&memfold));
        self.rows = rows;
    }

    /// Returns whether no row is short, no peer failed and no byte is wrong, the kernel's included.
    pub fn is_good(&self) -> bool {
        self.rows.iter().all(|row| matches!(row.verdict, Verdict::Pass | Verdict::NotRun))
            && self.found.runs.iter().all(|run| run.bytes_wrong == 0)
    }

    /// Returns the report as text.
    pub fn text(&self) -> String {
        let machine = &self.machine;
        let mut text = format!(
            "memfold bench walk, {}; zswap enabled: {}; vm.page-cluster {}; THP {}\n",
            machine.heading(),
            machine.zswap_enabled,
            machine.page_cluster,
            machine.thp_enabled,
        );
        text += &format!(
            "command: {}\ncorpus: {}\n{}\n",
            self.command, self.found.corpus, self.found.conditions
        );
        if machine.zswap_enabled == "Y" {
            text += "WARNING: zswap is on: the zram figures are not those of zram alone\n";
        }
        text += "figures: median (min..max); sequential phases MB/s, random and skewed mean us per access\n\n";
        text += &layout(&self.figure_rows());
        text.push('\n');
        text += &layout(&self.memory_table());
        for peer in self.peers() {
            if let Some(bytes) = self.over_bound(&peer) {
                let (bytes, bound) = (show_size(bytes), show_size(self.found.resident_bytes));
                text += &format!(
                    "{peer}: VOID: kept {bytes} of the data in memory, allowed are {bound}\n"
                );
            }
        }
        for reason in &self.found.left_out {
            text += &format!("{reason}\n");
        }
        text.push('\n');
        if !self.found.departures.is_empty() {
            text += &format!(
                "the targets are set for other conditions: {}\n",
                self.found.departures.join(", ")
            );
        }
        let heading = ["it must reach", "memfold", "kernel's best", "ratio", "target", "verdict"];
        let mut rows = vec![heading.map(String::from).to_vec()];
        rows.extend(self.rows.iter().map(TargetRow::cells));
        text + &layout(&rows)
    }

    fn figure_rows(&self) -> Vec<Vec<String>> {
        let phases: Vec<Phase> =
            Phase::ALL.into_iter().chain([Phase::Soak]).filter(|phase| self.has(*phase)).collect();
        let mut heading = vec!["peer".to_string()];
        for phase in &phases {
            heading.push(phase.name().into());
            if phase.is_latency() {
                heading.push("p50".into());
                heading.push("p99".into());
                heading.push("max".into());
            }
        }
        heading.push("wrong".into());
        let mut rows = vec![heading];
        for peer in self.peers() {
            let mut row = vec![peer.clone()];
            let show = |phase, of| {
                self.spread(&peer, phase, of).map_or("-".into(), |spread| spread.show())
            };
            let median = |phase, of| {
                self.spread(&peer, phase, of)
                    .map_or("-".into(), |s| crate::common::summary::show(s.median))
            };
            for &phase in &phases {
                row.push(show(phase, metric(phase)));
                if phase.is_latency() {
                    row.push(median(phase, |result| result.p50_us));
                    row.push(median(phase, |result| result.p99_us));
                    row.push(median(phase, |result| result.max_us));
                }
            }
            row.push(
                self.found
                    .runs
                    .iter()
                    .filter(|run| run.peer == peer)
                    .map(|run| run.bytes_wrong)
                    .sum::<u64>()
                    .to_string(),
            );
            rows.push(row);
        }
        rows
    }

    /// Returns the memory of each peer, from its last complete run.
    fn memory_table(&self) -> Vec<Vec<String>> {
        let heading = [
            "peer",
            "process peak",
            "store held",
            "all memory",
            "data stored",
            "compressed",
            "stored/held",
            "index/folio",
            "out in folios",
            "in in folios",
        ];
        let mut rows = vec![heading.map(String::from).to_vec()];
        for peer in self.peers() {
            let whole =
                self.found.runs.iter().rfind(|run| run.peer == peer && run.broke_off.is_none());
            let Some(run) = whole else { continue };
            let bytes =
                |name: &str| run.counters.get(name).map_or("-".into(), |&bytes| show_size(bytes));
            // memfold's store is memory of the process, but zram's is kernel memory.
            let bytes_outside = if peer.starts_with("zram") {
                run.counters.get("pool_bytes").unwrap_or(&0)
            } else {
                &0
            };
            // A program under `run` has freed its memory by the time its figures are read.
            let pool = if run.counters.contains_key("peak_pool_bytes") {
                "peak_pool_bytes"
            } else {
                "pool_bytes"
            };
            let mut row = vec![peer.clone(), show_size(run.resident_bytes_max), bytes(pool)];
            row.push(show_size(run.resident_bytes_max + bytes_outside));
            row.extend(["stored_bytes", "compressed_bytes"].map(bytes));
            row.push(
                share(&run.counters, "stored_bytes", "pool_bytes")
                    .map_or("-".into(), |r| format!("{r:.2}")),
            );
            row.push(
                share(&run.counters, "index_bytes", "folios")
                    .map_or("-".into(), |r| format!("{r:.0} B")),
            );
            for (part, whole) in [
                ("pages_out_in_folios", "pages_swapped_out"),
                ("pages_in_in_folios", "pages_swapped_in"),
            ] {
                let large = !peer.ends_with(":4k") && peer.starts_with("zram");
                let share = share(&run.counters, part, whole).filter(|_| large);
                row.push(share.map_or("-".into(), |share| format!("{:.0}%", share * 100.0)));
            }
            rows.push(row);
        }
        rows
    }

    /// Returns the bytes that a form of memfold kept resident beside its store, in the worst run,
    /// if they exceed the limit by more than a tenth and 16 MiB (the process's own memory, and
    /// frames in use).
    fn over_bound(&self, peer: &str) -> Option<u64> {
        let runs =
            self.found.runs.iter().filter(|run| run.peer == peer && peer.starts_with("memfold"));
        let sizes = runs.map(|run| {
            let store = ["peak_pool_bytes", "peak_index_bytes"]
                .map(|name| run.counters.get(name).unwrap_or(&0));
            run.resident_bytes_max.saturating_sub(store.into_iter().sum())
        });
        sizes.max().filter(|&size| size > self.found.resident_bytes / 10 * 11 + (16 << 20))
    }

    fn has(&self, phase: Phase) -> bool {
        self.found.runs.iter().any(|run| run.phases.iter().any(|result| result.phase == phase))
    }

    /// Returns the names of the peers that ran, in order.
    fn peers(&self) -> Vec<String> {
        let mut peers: Vec<String> = Vec::new();
        for run in &self.found.runs {
            if !peers.contains(&run.peer) {
                peers.push(run.peer.clone());
            }
        }
        peers
    }

    fn spread(&self, peer: &str, phase: Phase, of: fn(&PhaseResult) -> f64) -> Option<Spread> {
        let runs = self.found.runs.iter().filter(|run| run.peer == peer);
        Spread::of(
            runs.flat_map(|run| &run.phases)
                .filter(|result| result.phase == phase)
                .map(of)
                .collect(),
        )
    }
}

/// Formats the line of a peer that could not run.
pub fn left_out(peer: &Peer, why: &str) -> String {
    format!("{}: {why}", peer.name())
}

/// Returns the metric of a phase.
fn metric(phase: Phase) -> fn(&PhaseResult) -> f64 {
    if phase.is_latency() { |result| result.mean_us } else { |result| result.mb_per_s }
}

fn share(counters: &BTreeMap<String, u64>, part: &str, whole: &str) -> Option<f64> {
    let (part, whole) = (*counters.get(part)?, *counters.get(whole)?);
    (whole > 0).then(|| part as f64 / whole as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(peer: &str, fill: f64, bytes_wrong: u64) -> RunResult {
        let phase = PhaseResult {
            phase: Phase::Fill,
            seconds: 1.0,
            mb_per_s: fill,
            accesses: 256,
            mean_us: 0.0,
            p50_us: 0.0,
            p99_us: 0.0,
            max_us: 0.0,
            cdf: Vec::new(),
            bytes_wrong,
        };
        let counters = BTreeMap::from([("stored_bytes".into(), 200), ("pool_bytes".into(), 100)]);
        let (peer, phases) = (peer.into(), vec![phase]);
        RunResult {
            peer,
            phases,
            bytes_wrong,
            resident_bytes_max: 1 << 20,
            memory: Vec::new(),
            counters,
            broke_off: None,
        }
    }

    fn report(runs: Vec<RunResult>) -> WalkReport {
        let mut report = WalkReport::new(Walked {
            corpus: String::new(),
            resident_bytes: 256 << 20,
            conditions: String::new(),
            departures: vec![],
            left_out: vec![],
            runs,
        });
        report.judge();
        report
    }

    #[test]
    fn medians_are_compared_with_the_best_zram_lz4() {
        let runs = vec![
            run("memfold-signal", 160.0, 0),
            run("zram:lz4:4k", 90.0, 0),
            run("zram:lz4:64k", 100.0, 0),
            run("zram:lzo-rle:64k", 500.0, 0),
            run("memfold-signal", 150.0, 0),
            run("memfold-signal", 140.0, 0),
        ];
        let report = report(runs);
        let fill = &report.rows[0];
        assert_eq!((fill.figure, fill.best.clone()), (Some(150.0), Some((100.0, "64k".into()))));
        assert_eq!((fill.ratio, fill.verdict), (Some(1.5), Verdict::Pass));
        assert!(report.is_good());
        let text = report.text();
        assert!(
            text.contains("150 (140..160)") && text.contains("not run") && text.contains("2.00"),
            "{text}"
        );
    }

    #[test]
    fn a_wrong_byte_or_a_short_row_is_not_good() {
        assert!(!report(vec![run("zram:lz4:4k", 100.0, 1)]).is_good());
        assert!(!report(vec![run("memfold-thread", 500.0, 1)]).is_good());
        assert!(
            !report(vec![run("memfold-run", 100.0, 0), run("zram:lz4:4k", 100.0, 0)]).is_good()
        );
    }

    #[test]
    fn a_run_that_folds_nothing_is_void_however_fast() {
        let mut all_resident = run("memfold-run", 40_000.0, 0);
        all_resident.resident_bytes_max = 1 << 30;
        let report = report(vec![all_resident, run("zram:lz4:4k", 100.0, 0)]);
        assert!(!report.is_good());
        assert!(report.text().contains("VOID: kept 1 GiB"), "{}", report.text());
        let mut run_folded = run("memfold-run", 400.0, 0);
        run_folded.resident_bytes_max = 900 << 20;
        run_folded.counters.insert("peak_pool_bytes".into(), 640 << 20);
        assert!(super::tests::report(vec![run_folded, run("zram:lz4:4k", 100.0, 0)]).is_good());
    }
}
