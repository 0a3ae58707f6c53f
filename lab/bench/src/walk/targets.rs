//! The targets of memfold against the best of the kernel's zram lz4.

use crate::common::summary::show;
use crate::common::verdict::Verdict;
use crate::harness::runner::RunResult;
use crate::harness::workload::Phase;
use crate::walk::peer::Form;
use serde::{Deserialize, Serialize};

/// A target: a phase, a form of memfold, and the ratio to the kernel's best.
struct Target {
    label: &'static str,
    phase: Phase,
    form: Form,
    ratio: f64,
}

const fn target(label: &'static str, phase: Phase, form: Form, ratio: f64) -> Target {
    Target { label, phase, form, ratio }
}

/// Throughput: at least `ratio` times the kernel's best. Latency: at most.
const TARGETS: [Target; 14] = [
    target("fill, signal mode", Phase::Fill, Form::Signal, 1.5),
    target("fill, thread mode", Phase::Fill, Form::Thread, 1.5),
    target("fill, under run", Phase::Fill, Form::Run, 1.5),
    target("second sequential read, signal mode", Phase::Read2, Form::Signal, 4.0),
    target("second sequential read, thread mode", Phase::Read2, Form::Thread, 3.0),
    target("second sequential read, under run", Phase::Read2, Form::Run, 4.0),
    target("sequential dirtying, signal mode", Phase::Dirty, Form::Signal, 1.5),
    target("sequential dirtying, thread mode", Phase::Dirty, Form::Thread, 1.5),
    target("sequential dirtying, under run", Phase::Dirty, Form::Run, 2.0),
    target("random 4 KiB reads, signal mode", Phase::Random, Form::Signal, 0.9),
    target("random 4 KiB reads, thread mode", Phase::Random, Form::Thread, 1.5),
    target("random 4 KiB reads, under run", Phase::Random, Form::Run, 0.6),
    target("random, one write in 8, under run", Phase::Mixed, Form::Run, 0.7),
    target("skewed, under run", Phase::Skewed, Form::Run, 0.7),
];

/// A target and its measurement. Throughput in MB/s, latency in microseconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TargetRow {
    /// The name of the target.
    pub label: String,
    /// memfold's median.
    pub figure: Option<f64>,
    /// The kernel's best median, and its folio size.
    pub best: Option<(f64, String)>,
    /// The figure over the best.
    pub ratio: Option<f64>,
    /// `>= 1.5x` or `<= 0.9x`.
    pub target: String,
    /// Whether the target is reached.
    pub verdict: Verdict,
}

impl TargetRow {
    /// The cells of the printed table.
    pub fn cells(&self) -> Vec<String> {
        let best = self
            .best
            .as_ref()
            .map_or("-".into(), |(value, size)| format!("{} ({size})", show(*value)));
        vec![
            self.label.clone(),
            self.figure.map_or("-".into(), show),
            best,
            self.ratio.map_or("-".into(), |ratio| format!("{ratio:.2}x")),
            self.target.clone(),
            self.verdict.name().into(),
        ]
    }
}

/// Compares. `ours` returns the median of a form in a phase, and `kernel` those of the zram lz4
/// peers with their folio size. A form for which `void` is true gets that verdict.
pub fn compare(
    ours: impl Fn(Form, Phase) -> Option<f64>,
    kernel: impl Fn(Phase) -> Vec<(f64, String)>,
    void: impl Fn(Form) -> bool,
) -> Vec<TargetRow> {
    let rows = TARGETS.iter().map(|target| {
        let latency = target.phase.is_latency();
        let figure = ours(target.form, target.phase);
        let better = |a: &(f64, String), b: &(f64, String)| {
            if latency { b.0.total_cmp(&a.0) } else { a.0.total_cmp(&b.0) }
        };
        let best = kernel(target.phase).into_iter().max_by(better);
        let ratio = figure.zip(best.as_ref()).map(|(figure, best)| figure / best.0);
        let verdict = match ratio {
            _ if figure.is_some() && void(target.form) => Verdict::Void,
            None => Verdict::NotRun,
            Some(ratio) if latency && ratio <= target.ratio => Verdict::Pass,
            Some(ratio) if !latency && ratio >= target.ratio => Verdict::Pass,
            Some(_) => Verdict::Short,
        };
        let unit = if latency { "mean us" } else { "MB/s" };
        TargetRow {
            label: format!("{}, {unit}", target.label),
            figure,
            best,
            ratio,
            target: format!("{} {}x", if latency { "<=" } else { ">=" }, target.ratio),
            verdict,
        }
    });
    rows.collect()
}

/// Makes the row of wrong bytes, which must be none. `runs` is the number of checked runs.
pub fn wrong_row(bytes_wrong: u64, runs: usize) -> TargetRow {
    TargetRow {
        label: "bytes wrong, memfold, all runs".into(),
        figure: (runs > 0).then_some(bytes_wrong as f64),
        best: None,
        ratio: None,
        target: "0".into(),
        verdict: match (runs, bytes_wrong) {
            (0, _) => Verdict::NotRun,
            (_, 0) => Verdict::Pass,
            _ => Verdict::Short,
        },
    }
}

/// Makes the rows of memfold's own memory: its index, and growth in a soak.
pub fn memory_rows(runs: &[&RunResult]) -> Vec<TargetRow> {
    let worst = |part: &str, whole: &str| {
        let pairs = runs
            .iter()
            .filter_map(|run| Some((*run.counters.get(part)?, *run.counters.get(whole)?)));
        pairs
            .filter(|(_, whole)| *whole > 0)
            .map(|(part, whole)| part as f64 / whole as f64)
            .max_by(f64::total_cmp)
    };
    let row = |label: &str, figure: Option<f64>, most: f64, target: &str| TargetRow {
        label: label.into(),
        figure,
        best: None,
        ratio: None,
        target: target.into(),
        verdict: match figure {
            None => Verdict::NotRun,
            Some(figure) if figure <= most => Verdict::Pass,
            Some(_) => Verdict::Short,
        },
    };
    let index_percent = worst("peak_index_bytes", "peak_folded_bytes").map(|share| share * 100.0);
    let growth = worst("soak_bytes_late", "soak_bytes_early").map(|ratio| (ratio - 1.0) * 100.0);
    vec![
        row("index and metadata, % of folded data, worst run", index_percent, 1.0, "<= 1"),
        row("growth of memory in a soak, %, worst run", growth, 2.0, "<= 2"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdicts(ours: f64, kernel: &[f64]) -> Vec<Verdict> {
        let kernel = |_| kernel.iter().map(|&value| (value, "4k".to_string())).collect();
        let ours = |form, _| (form != Form::Run).then_some(ours);
        compare(ours, kernel, |_| false).iter().map(|row| row.verdict).collect()
    }

    #[test]
    fn throughput_must_beat_the_best_and_latency_stay_below_it() {
        use Verdict::*;
        // 3.5x of the best: the target of 4x is not reached. As a latency it is far too much.
        let throughput = [Pass, Pass, NotRun, Short, Pass, NotRun, Pass, Pass, NotRun];
        let latency = [Short, Short, NotRun, NotRun, NotRun];
        assert_eq!(verdicts(350.0, &[50.0, 100.0]), [&throughput[..], &latency].concat());
        // As a latency the kernel's best is 50, so 45 is 0.9x.
        assert_eq!(verdicts(45.0, &[50.0, 100.0])[9..11], [Pass, Pass]);
        assert_eq!(verdicts(46.0, &[50.0, 100.0])[9..11], [Short, Pass]);
    }

    #[test]
    fn a_form_over_its_bound_reaches_nothing() {
        let rows =
            compare(|_, _| Some(1e6), |_| vec![(1.0, "4k".into())], |form| form == Form::Run);
        let void = |row: &&TargetRow| row.label.contains("under run");
        assert!(rows.iter().filter(void).all(|row| row.verdict == Verdict::Void));
        assert!(rows.iter().filter(|row| !void(row)).all(|row| row.verdict != Verdict::Void));
    }

    #[test]
    fn report_claims_nothing_without_the_kernel() {
        assert!(verdicts(1000.0, &[]).iter().all(|&verdict| verdict == Verdict::NotRun));
        assert_eq!(wrong_row(0, 0).verdict, Verdict::NotRun);
        assert_eq!(wrong_row(1, 5).verdict, Verdict::Short);
    }
}
