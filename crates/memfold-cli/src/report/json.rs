//! The JSON text of a stats file.
use crate::report::figures::RunFigures;
use crate::report::recommended::LimitCurve;
use memfold::config::Config;
use memfold::stats::{TimeBucket, TimeCounts};
use memfold_run::table::ProcessSlot;
use memfold_run::users::UserTables;
use serde_json::{Map, Value, json};
use std::ffi::OsString;

/// The facts about the run as a whole.
pub struct RunReport<'a> {
    /// Its settings.
    pub config: &'a Config,
    /// The program and its arguments.
    pub arguments: &'a [OsString],
    /// The status that memfold exits with.
    pub status: u8,
    /// Wall time from the start of the program to its end.
    pub seconds: f64,
}

/// Returns one object: the run, the sum of every counter over all processes, and `processes` with
/// the counters of each.
pub fn json(run: &RunReport, sum: &RunFigures, tables: &UserTables) -> String {
    let mut all = figures(sum);
    let command: Vec<_> = run.arguments.iter().map(|a| a.to_string_lossy()).collect();
    let curve = LimitCurve::of(tables, sum);
    let about = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "command": command,
        "exit_status": run.status,
        "seconds": run.seconds,
        "memory_bytes": run.config.memory_bytes,
        "limit_bytes": run.config.limit_bytes,
        "resident_limit_bytes": run.config.resident_bytes,
        "codec": run.config.codec,
        "ratio": sum.ratio(),
        "peak_unmanaged_processes_bytes": tables.bounds().peak_slotless_bytes(),
        "frame_success": frame_success(sum),
        "recommended_limits": curve.as_ref().map(LimitCurve::json),
        "slowdown_by_limit": curve.map(|curve| curve.points().json()),
    });
    let Value::Object(about) = about else { unreachable!("written as an object") };
    all.extend(about);
    all.insert("processes".to_string(), tables.processes().map(of_process).collect());
    format!("{:#}\n", Value::Object(all))
}

/// Returns the counters of one process.
pub fn of_process(process: ProcessSlot) -> Value {
    let mut one = figures(&RunFigures::of(process.stats()));
    one.insert("pid".to_string(), process.pid().into());
    Value::Object(one)
}

/// Returns the share of requests for large frames that got the requested size. Returns `None`
/// without requests.
fn frame_success(sum: &RunFigures) -> Option<f64> {
    let asked = sum.get("frame_alloc") as f64;
    (asked > 0.0).then(|| 1.0 - sum.get("frame_alloc_failed") as f64 / asked)
}

/// Returns every counter and every histogram of times by name.
pub fn figures(figures: &RunFigures) -> Map<String, Value> {
    let counters = figures.each().map(|(name, value)| (name, value.into()));
    counters.chain(figures.times().map(|(name, its)| (name.to_string(), times(its)))).collect()
}

/// Returns a histogram of times: its percentiles, and the buckets that are not empty, each with the
/// time at which it ends. Percentiles are null without times.
fn times(counts: &TimeCounts) -> Value {
    let buckets = counts.buckets.iter().enumerate().filter(|(_, count)| **count > 0);
    json!({
        "count": counts.count(),
        "total_ns": counts.total_ns,
        "p50_ns": counts.percentile_ns(50),
        "p90_ns": counts.percentile_ns(90),
        "p99_ns": counts.percentile_ns(99),
        "buckets": buckets.map(|(n, count)| [TimeBucket(n).end_ns(), *count]).collect::<Vec<_>>(),
    })
}

/// Reads the buckets and the sum of a histogram of times.
pub fn read_times(value: &Value) -> TimeCounts {
    let mut counts = TimeCounts::NONE;
    for bucket in value["buckets"].as_array().into_iter().flatten() {
        let [end, count] = [0, 1].map(|n| bucket[n].as_u64().unwrap_or(0));
        counts.buckets[TimeBucket::of(end.saturating_sub(1)).0] += count;
    }
    TimeCounts { total_ns: value["total_ns"].as_u64().unwrap_or(0), ..counts }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::hand_over::tests::{claim, tables};
    use std::sync::atomic::Ordering::Relaxed;

    #[test]
    fn times_are_read_back_as_they_were_written() {
        let mut counts = TimeCounts::NONE;
        assert_eq!(read_times(&times(&counts)), counts);
        counts.buckets = std::array::from_fn(|n| (n as u64 * 7) % 5);
        counts.total_ns = 1 << 40;
        assert_eq!(read_times(&times(&counts)), counts);
        assert_eq!(read_times(&Value::Null), TimeCounts::NONE);
    }

    #[test]
    fn no_figure_is_hidden_by_a_fact_about_the_run() {
        let tables = tables();
        let stats = claim(&tables, 9).stats();
        stats.faults.store(3, Relaxed);
        stats.frame_alloc.store(8, Relaxed);
        stats.frame_alloc_failed.store(2, Relaxed);
        let (config, sum) = (Config::new(1 << 30), RunFigures::sum(&tables));
        let run = RunReport { config: &config, arguments: &["a".into()], status: 3, seconds: 0.5 };
        let value: Value = serde_json::from_str(&json(&run, &sum, &tables)).unwrap();
        let map = value.as_object().unwrap();
        assert!(sum.each().all(|(name, number)| map[&name] == number));
        assert_eq!(map.len(), sum.each().count() + sum.times().count() + 14);
        assert_eq!((&value["exit_status"], &value["processes"][0]["pid"]), (&json!(3), &json!(9)));
        assert_eq!(
            (&value["processes"][0]["faults"], &value["frame_success"]),
            (&json!(3), &json!(0.75))
        );
    }
}
