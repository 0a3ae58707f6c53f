//! Counters of runs, added up for each series of Prometheus.
//!
//! The runs of a group have one series for each counter, and so have runs of one name. A counter must
//! not become less when one of them ends, so what it had counted until then is kept.
use crate::report::json::read_times;
use memfold_stats::{FIGURES, FigureKind, TIME_FIGURES, TimeCounts};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// The labels of a series.
pub type Labels = Vec<(&'static str, String)>;

/// The counters and histograms of a run, or of several.
#[derive(Clone, Debug, PartialEq)]
pub struct Totals {
    /// One for each of [`FIGURES`]. A figure that is no counter has zero.
    pub counters: [u64; FIGURES.len()],
    /// One for each of [`TIME_FIGURES`].
    pub times: [TimeCounts; TIME_FIGURES.len()],
}

impl Totals {
    const NONE: Totals =
        Totals { counters: [0; FIGURES.len()], times: [TimeCounts::NONE; TIME_FIGURES.len()] };

    /// Reads those of all processes that a run ever had.
    pub fn of(run: &Value) -> Totals {
        let counter = |n: usize| match FIGURES[n].kind {
            FigureKind::Counter => run["sum"][FIGURES[n].name].as_u64().unwrap_or(0),
            _ => 0,
        };
        Totals {
            counters: std::array::from_fn(counter),
            times: std::array::from_fn(|n| read_times(&run["sum"][TIME_FIGURES[n].name])),
        }
    }

    fn add(&mut self, other: &Totals) {
        for (to, from) in self.counters.iter_mut().zip(other.counters) {
            *to = to.wrapping_add(from);
        }
        self.times.iter_mut().zip(&other.times).for_each(|(to, from)| to.add(from));
    }
}

/// The runs of a series.
struct Series {
    /// Totals of the runs that have ended.
    ended: Totals,
    /// The last answer of each other run: its age in seconds, and its totals.
    live: BTreeMap<u32, (f64, Totals)>,
}

/// All series that have a live run.
#[derive(Default)]
pub struct RunSeries(BTreeMap<Labels, Series>);

impl RunSeries {
    /// Adds the answers of runs, each with the labels of its series. `live` are the IDs of all live
    /// runs, also of those that did not answer. Returns the totals of each series that an answer was
    /// for.
    pub fn note(
        &mut self,
        answers: &[(Labels, &Value)],
        live: &BTreeSet<u32>,
    ) -> Vec<(Labels, Totals)> {
        for (labels, run) in answers {
            let id = run["run"].as_u64().unwrap_or(0) as u32;
            let age = run["seconds"].as_f64().unwrap_or(0.0);
            let new = || Series { ended: Totals::NONE, live: BTreeMap::new() };
            let series = self.0.entry(labels.clone()).or_insert_with(new);
            match series.live.insert(id, (age, Totals::of(run))) {
                // Another run has the process ID of one that has ended.
                Some((age_before, before)) if age_before > age => series.ended.add(&before),
                _ => {}
            }
        }
        for series in self.0.values_mut() {
            let ended = series.live.extract_if(.., |id, _| !live.contains(id));
            ended.for_each(|(_, (_, totals))| series.ended.add(&totals));
        }
        self.0.retain(|_, series| !series.live.is_empty());
        let answered: BTreeSet<&Labels> = answers.iter().map(|(labels, _)| labels).collect();
        let totals = |series: &Series| {
            let mut all = series.ended.clone();
            series.live.values().for_each(|(_, totals)| all.add(totals));
            all
        };
        let all = answered.into_iter().filter_map(|labels| self.0.get_key_value(labels));
        all.map(|(labels, series)| (labels.clone(), totals(series))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn run(id: u32, seconds: f64, faults: u64) -> Value {
        let times =
            json!({"count": faults, "total_ns": faults * 1000, "buckets": [[1024, faults]]});
        json!({"run": id, "seconds": seconds, "sum": {"faults": faults, "fault_pool_time": times}})
    }

    /// Notes the runs as those of one series, with `silent` that don't answer. Returns its faults.
    fn note(series: &mut RunSeries, runs: &[Value], silent: &[u32]) -> Option<u64> {
        let labels = vec![("group", "g".to_string())];
        let answers: Vec<_> = runs.iter().map(|run| (labels.clone(), run)).collect();
        let ids = runs.iter().map(|run| run["run"].as_u64().unwrap() as u32);
        let live: BTreeSet<u32> = ids.chain(silent.iter().copied()).collect();
        let all = series.note(&answers, &live);
        let faults = FIGURES.iter().position(|figure| figure.name == "faults").unwrap();
        let times = TIME_FIGURES.iter().position(|one| one.name == "fault_pool_time").unwrap();
        let one = all.first().map(|(_, totals)| totals)?;
        assert_eq!(one.counters[faults], one.times[times].count(), "both are kept alike");
        Some(one.counters[faults])
    }

    #[test]
    fn counters_of_a_series_never_become_less() {
        let mut series = RunSeries::default();
        assert_eq!(note(&mut series, &[run(1, 1.0, 10), run(2, 1.0, 5)], &[]), Some(15));
        // One has ended, and one has begun.
        assert_eq!(note(&mut series, &[run(2, 2.0, 6), run(3, 0.5, 1)], &[]), Some(17));
        // One does not answer for a while, and counts once after that too.
        assert_eq!(note(&mut series, &[run(3, 1.5, 2)], &[2]), Some(18));
        assert_eq!(note(&mut series, &[run(2, 4.0, 9), run(3, 2.5, 2)], &[]), Some(21));
        // A new run has the process ID of one that has ended.
        assert_eq!(note(&mut series, &[run(2, 0.1, 1), run(3, 3.5, 2)], &[]), Some(22));
    }

    #[test]
    fn series_without_a_live_run_is_forgotten() {
        let mut series = RunSeries::default();
        note(&mut series, &[run(1, 1.0, 10)], &[]);
        assert_eq!(note(&mut series, &[], &[]), None);
        assert!(series.0.is_empty());
        assert_eq!(note(&mut series, &[run(2, 1.0, 3)], &[]), Some(3));
    }
}
