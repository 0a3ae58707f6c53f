//! The JSON text of a stats file.
use crate::report::figures::RunFigures;
use crate::report::recommended::LimitCurve;
use memfold_engine::config::Config;
use memfold_run::table::ProcessSlot;
use memfold_run::users::UserTables;
use memfold_stats::{TimeBucket, TimeCounts};
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

/// The version of the form of the file. It grows when a name is removed or its meaning changes, and
/// stays when one is added. `docs/stats.schema.json` describes the form.
const SCHEMA: u32 = 1;

/// Returns one object: the run, the sum of every counter over all processes, and `processes` with
/// the counters of each.
pub fn json(run: &RunReport, sum: &RunFigures, tables: &UserTables) -> String {
    let mut all = figures(sum);
    let command: Vec<_> = run.arguments.iter().map(|a| a.to_string_lossy()).collect();
    let curve = LimitCurve::of(tables, sum);
    let about = json!({
        "schema": SCHEMA,
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
    let requests = sum.get("frame_alloc") as f64;
    (requests > 0.0).then(|| 1.0 - sum.get("frame_alloc_failed") as f64 / requests)
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
    use memfold_stats::{FIGURES, ORDER_FIGURES, ORDERS, TIME_FIGURES, size_suffix};
    use std::sync::atomic::Ordering::Relaxed;

    fn described(kind: &str, help: &str) -> Value {
        match kind {
            "times" => json!({"$ref": "#/$defs/times", "description": help}),
            "bytes" => json!({"type": ["integer", "null"], "minimum": 0, "description": help}),
            "number" => json!({"type": ["number", "null"], "description": help}),
            kind => json!({"type": kind, "description": help}),
        }
    }

    /// Returns the schema of the file, from the tables of figures.
    fn schema() -> Value {
        let figures = || {
            let plain_figures =
                FIGURES.iter().map(|one| (one.name.to_string(), "integer", one.help));
            let per_order = ORDER_FIGURES.iter().flat_map(|one| {
                let base = one.name.trim_end_matches("_folio");
                (0..ORDERS).map(move |order| {
                    (format!("{base}_{}", size_suffix(order)), "integer", one.help)
                })
            });
            let times = TIME_FIGURES.iter().map(|one| (one.name.to_string(), "times", one.help));
            let all = plain_figures.chain(per_order).chain(times);
            all.map(|(name, kind, help)| (name, described(kind, help)))
        };
        let about = [
            ("version", "string", "The version of memfold"),
            ("command", "array", "The program and its arguments"),
            ("exit_status", "integer", "The status that memfold exits with"),
            ("seconds", "number", "Wall time from the start of the program to its end"),
            ("memory_bytes", "bytes", "Memory of the machine, or of the cgroup's limit"),
            ("limit_bytes", "bytes", "--limit; null for none"),
            ("resident_limit_bytes", "bytes", "--resident; null for none"),
            ("codec", "string", "--codec"),
            ("ratio", "number", "Compression of all stored data; null if none was stored"),
            (
                "peak_unmanaged_processes_bytes",
                "integer",
                "The most that processes without an engine held",
            ),
            (
                "frame_success",
                "number",
                "Share of requests for large frames that got the requested size",
            ),
        ];
        let mut all: Map<String, Value> = figures().collect();
        all.extend(about.map(|(name, kind, help)| (name.to_string(), described(kind, help))));
        let mut process: Map<String, Value> = figures().collect();
        process.insert("pid".to_string(), described("integer", "Process ID"));
        let point = json!({"type": "object", "properties": {
            "limit_bytes": {"type": "integer"}, "percent": {"type": "number"}}});
        let recommendation = json!({"type": ["object", "null"], "description":
            "The limit for a slowdown of so many percent, bytes; null where the run's own is enough"});
        let others = json!({
            "schema": {"const": SCHEMA},
            "recommended_limits": recommendation,
            "slowdown_by_limit": {"type": ["array", "null"], "items": point,
                "description": "Larger limits and the slowdown that they would cost, by an estimate"},
            "processes": {"type": "array", "items": {"type": "object",
                "required": process.keys().collect::<Vec<_>>(), "properties": process}},
        });
        all.extend(others.as_object().unwrap().clone());
        let ns = json!({"type": ["integer", "null"]});
        json!({
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": format!("What memfold run --stats-file writes, version {SCHEMA}"),
            "type": "object",
            "required": all.keys().collect::<Vec<_>>(),
            "properties": all,
            "$defs": {"times": {"type": "object", "properties": {
                "count": {"type": "integer"}, "total_ns": {"type": "integer"},
                "p50_ns": ns, "p90_ns": ns, "p99_ns": ns,
                "buckets": {"type": "array", "description":
                    "Buckets with any times: the time at which it ends, and its count",
                    "items": {"type": "array"}},
            }}},
        })
    }

    #[test]
    fn schema_is_that_of_the_tables() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/stats.schema.json");
        let text = format!("{:#}\n", schema());
        if std::env::var_os("MEMFOLD_WRITE_SCHEMA").is_some() {
            std::fs::write(path, &text).unwrap();
        }
        let file_text = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            file_text == text,
            "docs/stats.schema.json is old: MEMFOLD_WRITE_SCHEMA=1 writes it"
        );
    }

    /// Asserts that a value has a type that its description allows.
    fn assert_allowed(name: &str, value: &Value, by: &Value) {
        let kind = match value {
            Value::Null => "null",
            Value::Bool(_) => "boolean",
            Value::Number(number) if number.is_u64() => "integer",
            Value::Number(_) => "number",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        };
        let one = std::slice::from_ref(&by["type"]);
        let allowed = by["type"].as_array().map_or(one, Vec::as_slice);
        let is_number = |it: &Value| it == "number" && kind == "integer";
        let fits = allowed.iter().any(|it| *it == kind || is_number(it));
        assert!(fits || by["const"] == *value || by["$ref"].is_string(), "{name}: {value}");
    }

    #[test]
    fn file_has_what_the_schema_says_and_nothing_else() {
        let (tables, schema) = (tables(), schema());
        let (config, sum) = (Config::new(1 << 30), RunFigures::sum(&tables));
        claim(&tables, 9).stats().fault_pool_time.note(5000);
        let run = RunReport { config: &config, arguments: &["a".into()], status: 3, seconds: 0.5 };
        let value: Value = serde_json::from_str(&json(&run, &sum, &tables)).unwrap();
        let process = &schema["properties"]["processes"]["items"];
        for (value, by) in [(&value, &schema), (&value["processes"][0], process)] {
            let (value, by) = (value.as_object().unwrap(), by["properties"].as_object().unwrap());
            let names = |map: &Map<String, Value>| map.keys().cloned().collect::<Vec<_>>();
            assert_eq!(names(value), names(by));
            value.iter().for_each(|(name, value)| assert_allowed(name, value, &by[name]));
        }
    }

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
        assert_eq!(map.len(), sum.each().count() + sum.times().count() + 15);
        assert_eq!((&value["exit_status"], &value["processes"][0]["pid"]), (&json!(3), &json!(9)));
        assert_eq!(
            (&value["processes"][0]["faults"], &value["frame_success"]),
            (&json!(3), &json!(0.75))
        );
    }
}
