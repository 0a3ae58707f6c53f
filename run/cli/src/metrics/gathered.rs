//! All metrics of one moment, and how they are encoded.
use crate::group;
use crate::metrics::totals::{Labels, RunSeries, Totals};
use crate::runs::counted;
use crate::sockets;
use memfold_stats::{FIGURES, FigureKind, TIME_FIGURES, TimeBucket, TimeCounts};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

/// A run or server that does not answer in this time is left out.
const PATIENCE: Duration = Duration::from_secs(2);
/// The ends of the buckets of a histogram, as powers of two of nanoseconds: 1 us to 17 ms. One more
/// has all longer times.
const BUCKET_SHIFTS: [u32; 8] = [10, 12, 14, 16, 18, 20, 22, 24];

/// A metric with a value for each run, group or device.
#[derive(Clone, Debug)]
pub struct Metric {
    pub name: String,
    help: String,
    pub kind: FigureKind,
    values: Vec<(Labels, f64)>,
}

/// A histogram of times with a value for each run or group.
#[derive(Debug)]
struct TimesMetric {
    name: &'static str,
    help: &'static str,
    values: Vec<(Labels, TimeCounts)>,
}

/// All that was gathered at one moment.
#[derive(Debug)]
pub struct GatheredMetrics {
    metrics: Vec<Metric>,
    times: Vec<TimesMetric>,
}

impl GatheredMetrics {
    /// Asks all runs and servers. If `is_each`, a run of a group has its own figures.
    pub fn now(series: &mut RunSeries, is_each: bool) -> GatheredMetrics {
        let ask = |suffix: &str| -> Vec<Value> {
            let ask = |path: PathBuf| {
                sockets::ask(&path, &json!({"do": "stat"}), Some(PATIENCE)).ok().flatten()
            };
            // All at once, so that stopped runs cost their patience only once.
            thread::scope(|scope| {
                let all = sockets::all(suffix).into_iter();
                let answers: Vec<_> = all.map(|(_, path)| scope.spawn(move || ask(path))).collect();
                answers.into_iter().filter_map(|one| one.join().ok().flatten()).collect()
            })
        };
        let mut all = vec![Metric {
            name: "build_info".to_string(),
            help: "The version of memfold".to_string(),
            kind: FigureKind::Gauge,
            values: vec![(vec![("version", env!("CARGO_PKG_VERSION").to_string())], 1.0)],
        }];
        let runs = ask(sockets::RUN);
        // The socket of a run that has been killed is removed once it was asked.
        let live: BTreeSet<u32> = sockets::all(sockets::RUN).into_iter().map(|one| one.0).collect();
        let answers: Vec<(Labels, &Value)> =
            runs.iter().map(|run| (labels_of_figures(run, is_each), run)).collect();
        let totals = series.note(&answers, &live);
        all.extend(of_runs(&runs));
        all.extend(figures(&answers, &totals));
        all.extend(of_groups());
        all.extend(of_devices(&ask(sockets::BLK)));
        GatheredMetrics { metrics: all, times: times(&totals) }
    }
}

impl Collector for GatheredMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for times in self.times.iter().filter(|times| !times.values.is_empty()) {
            let mut family = encoder.encode_descriptor(
                times.name,
                times.help,
                Some(&Unit::Seconds),
                MetricType::Histogram,
            )?;
            for (labels, counts) in &times.values {
                encode_times(family.encode_family(&&labels[..])?, counts)?;
            }
        }
        for metric in self.metrics.iter().filter(|metric| !metric.values.is_empty()) {
            let kind = match metric.kind {
                FigureKind::Counter => ConstCounter::new(0.0).metric_type(),
                _ => ConstGauge::new(0.0).metric_type(),
            };
            let mut metric_encoder =
                encoder.encode_descriptor(&metric.name, &metric.help, None, kind)?;
            for (labels, value) in &metric.values {
                let labels = &labels[..];
                let one = metric_encoder.encode_family(&labels)?;
                match metric.kind {
                    FigureKind::Counter => ConstCounter::new(*value).encode(one)?,
                    _ => ConstGauge::new(*value).encode(one)?,
                }
            }
        }
        Ok(())
    }
}

/// Returns how many times are in each bucket of a metric, with the bucket's end in nanoseconds.
fn buckets(counts: &TimeCounts) -> Vec<(u64, u64)> {
    let ends = BUCKET_SHIFTS.map(|shift| 1 << shift).into_iter().chain([u64::MAX]);
    let mut before = 0;
    let bucket = |end: u64| {
        let is_within = |n: &usize| TimeBucket(*n).end_ns() <= end;
        let first = before;
        // The last bucket of the run has longer times too.
        before = match end {
            u64::MAX => counts.buckets.len(),
            _ => (first..counts.buckets.len() - 1).take_while(is_within).last().unwrap_or(0) + 1,
        };
        (end, counts.buckets[first..before].iter().sum())
    };
    ends.map(bucket).collect()
}

/// Encodes a histogram of times in seconds.
fn encode_times(mut encoder: MetricEncoder<'_>, counts: &TimeCounts) -> Result<(), fmt::Error> {
    let seconds = |ns: u64| if ns == u64::MAX { f64::INFINITY } else { ns as f64 / 1e9 };
    let buckets: Vec<_> = buckets(counts).iter().map(|(end, n)| (seconds(*end), *n)).collect();
    let no_exemplars = None::<&std::collections::HashMap<usize, Exemplar<Labels, f64>>>;
    let sum = counts.total_ns as f64 / 1e9;
    encoder.encode_histogram(sum, counts.count(), &buckets, no_exemplars)
}

/// Returns the histograms of runs and groups.
fn times(totals: &[(Labels, Totals)]) -> Vec<TimesMetric> {
    let all = TIME_FIGURES.iter().enumerate();
    all.map(|(n, figure)| TimesMetric {
        name: figure.name,
        help: figure.help,
        values: totals.iter().map(|(labels, totals)| (labels.clone(), totals.times[n])).collect(),
    })
    .collect()
}

/// Returns the labels of a run: its name or process ID, its command, and its group.
fn labels_of(run: &Value) -> Labels {
    let command = run["command"][0].as_str().unwrap_or_default();
    let command = command.rsplit('/').next().unwrap_or_default().to_string();
    let name = run["name"].as_str().map_or(run["run"].to_string(), str::to_string);
    let group = run["group"]["name"].as_str().map(|name| ("group", name.to_string()));
    [("run", name), ("command", command)].into_iter().chain(group).collect()
}

/// Returns the labels of a run's figures. Those of a group are added up, unless `is_each`.
fn labels_of_figures(run: &Value, is_each: bool) -> Labels {
    match run["group"]["name"].as_str() {
        Some(name) if !is_each => vec![("group", name.to_string())],
        _ => labels_of(run),
    }
}

/// Returns a metric of figures. Values with the same labels are combined.
fn metric(
    name: &str,
    help: &str,
    kind: FigureKind,
    combine: fn(f64, f64) -> f64,
    values: impl Iterator<Item = (Labels, Option<f64>)>,
) -> Metric {
    let mut all: BTreeMap<Labels, f64> = BTreeMap::new();
    for (labels, value) in values.filter_map(|(labels, value)| Some((labels, value?))) {
        all.entry(labels).and_modify(|sum| *sum = combine(*sum, value)).or_insert(value);
    }
    Metric {
        name: name.to_string(),
        help: help.to_string(),
        kind,
        values: all.into_iter().collect(),
    }
}

fn add(one: f64, other: f64) -> f64 {
    one + other
}

/// Returns the metrics of each run. Runs with the same name are added up.
pub fn of_runs(runs: &[Value]) -> Vec<Metric> {
    let of = |name, help, of: &dyn Fn(&Value) -> Option<f64>| {
        let values = runs.iter().map(|run| (labels_of(run), of(run)));
        let combine = if name == "run_seconds" { f64::max } else { add };
        metric(name, help, FigureKind::Gauge, combine, values)
    };
    vec![
        of("run_count", "Live runs with these labels", &|_| Some(1.0)),
        of("run_limit_bytes", "Limit of all memory of the run", &|run| run["limit_bytes"].as_f64()),
        of("run_used_bytes", "Memory of the run that counts against its limit", &|run| {
            let live = run["processes"].as_array()?.iter();
            let managed: u64 = live.flat_map(counted).sum();
            Some(managed as f64 + run["unmanaged_processes_bytes"].as_f64()?)
        }),
        of("run_resident_limit_bytes", "Limit of uncompressed memory of the run", &|run| {
            run["resident_limit_bytes"].as_f64()
        }),
        of("run_share_bytes", "Part of its group's limit that the run may use", &|run| {
            run["group"]["share_bytes"].as_f64()
        }),
        of("run_seconds", "Time since the run began", &|run| run["seconds"].as_f64()),
        of("run_processes", "Live processes of the run with an engine", &|run| {
            Some(run["processes"].as_array()?.len() as f64)
        }),
    ]
}

/// Returns the metrics of the figures of runs and groups. A counter is of all processes that they ever
/// had, and a gauge of those that live.
pub fn figures(runs: &[(Labels, &Value)], totals: &[(Labels, Totals)]) -> Vec<Metric> {
    let all = FIGURES.iter().enumerate();
    all.map(|(n, figure)| {
        let seconds = |raw: f64| if figure.name.ends_with("_ns") { raw / 1e9 } else { raw };
        let counters = totals.iter().map(|(labels, totals)| (labels, totals.counters[n] as f64));
        let gauges = runs.iter().map(|(labels, run)| {
            let live = run["processes"].as_array().into_iter().flatten();
            (labels, live.filter_map(|one| one[figure.name].as_f64()).sum())
        });
        let values: Vec<(&Labels, f64)> = match figure.kind {
            FigureKind::Counter => counters.collect(),
            _ => gauges.collect(),
        };
        let name = match figure.name.strip_suffix("_ns") {
            Some(name) => format!("{name}_seconds"),
            None => figure.name.to_string(),
        };
        let values = values.into_iter().map(|(labels, raw)| (labels.clone(), Some(seconds(raw))));
        let help = figure.help.replace("nanoseconds", "seconds");
        metric(&name, &help, figure.kind, add, values)
    })
    .collect()
}

pub fn of_groups() -> Vec<Metric> {
    let groups = group::figures();
    let of = |name, help, of: &dyn Fn(&group::GroupFigures) -> u64| {
        let value =
            |one: &group::GroupFigures| (vec![("group", one.name.clone())], Some(of(one) as f64));
        metric(name, help, FigureKind::Gauge, add, groups.iter().map(value))
    };
    vec![
        of("group_limit_bytes", "Limit of the group", &|group| group.limit_bytes),
        of(
            "group_used_bytes",
            "Memory of the group's runs that counts against its limit",
            &|group| group.held_bytes,
        ),
        of("group_runs", "Live runs of the group", &|group| group.runs),
    ]
}

/// Returns the metrics of servers of block devices, and those of each export.
pub fn of_devices(servers: &[Value]) -> Vec<Metric> {
    let label = |server: &Value| vec![("server", server["pid"].to_string())];
    let gauge = |name, help, of: &dyn Fn(&Value) -> Option<f64>| {
        metric(name, help, FigureKind::Gauge, add, servers.iter().map(|one| (label(one), of(one))))
    };
    let exports = || {
        servers.iter().flat_map(|server| {
            let exports = server["exports"].as_array().into_iter().flatten();
            exports.map(move |export| {
                let name = export["name"].as_str().unwrap_or_default().to_string();
                ([label(server), vec![("export", name)]].concat(), export)
            })
        })
    };
    let counter = |name, help, field: &str| {
        let of = |(labels, export): (Labels, &Value)| (labels, export["counters"][field].as_f64());
        metric(name, help, FigureKind::Counter, add, exports().map(of))
    };
    vec![
        gauge("blk_limit_bytes", "Limit of the memory of a server of block devices", &|server| {
            server["limit_bytes"].as_f64()
        }),
        gauge("blk_data_bytes", "Data in its devices", &|server| {
            server["mm_stat"]["orig_data_size"].as_f64()
        }),
        gauge("blk_memory_bytes", "Memory that this data takes", &|server| {
            server["mm_stat"]["mem_used_total"].as_f64()
        }),
        counter("blk_reads", "Reads of an export", "reads"),
        counter("blk_writes", "Writes of an export", "writes"),
        counter("blk_discards", "Discards of an export", "zeroings"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the names of all metrics that can be printed, as Prometheus knows them.
    fn names() -> Vec<String> {
        let run = json!({"run": 1, "command": ["x"]});
        let figures = figures(&[(Labels::new(), &run)], &[]);
        let all =
            [of_runs(std::slice::from_ref(&run)), figures, of_groups(), of_devices(&[])].concat();
        let name = |metric: Metric| match metric.kind {
            FigureKind::Counter => format!("memfold_{}_total", metric.name),
            _ => format!("memfold_{}", metric.name),
        };
        all.into_iter().map(name).chain(["memfold_build_info".to_string()]).collect()
    }

    /// A name that no server has would be an empty panel, or an alert that never fires.
    #[test]
    fn dashboard_and_alerts_use_metrics_that_exist() {
        let names = names();
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
        for (file, text, least) in [
            (
                "grafana-dashboard.json",
                include_str!("../../../../contrib/grafana-dashboard.json"),
                30,
            ),
            ("prometheus-alerts.yml", include_str!("../../../../contrib/prometheus-alerts.yml"), 6),
        ] {
            let words = text.split(|c| !is_part(c)).filter(|word| word.starts_with("memfold_"));
            let names_used: std::collections::BTreeSet<&str> = words.collect();
            for name in &names_used {
                assert!(
                    names.iter().any(|known| known == name),
                    "contrib/{file}: no metric {name}"
                );
            }
            assert!(names_used.len() >= least, "contrib/{file} uses only {names_used:?}");
        }
    }

    #[test]
    fn dashboard_is_json_with_queries_in_every_panel() {
        let text = include_str!("../../../../contrib/grafana-dashboard.json");
        let dashboard: Value = serde_json::from_str(text).unwrap();
        let panels = dashboard["panels"].as_array().unwrap();
        let has_query = |panel: &&Value| {
            let targets = panel["targets"].as_array().into_iter().flatten();
            targets
                .filter_map(|target| target["expr"].as_str())
                .any(|expr| expr.contains("memfold_"))
        };
        let panels_shown: Vec<&Value> =
            panels.iter().filter(|panel| panel["type"] != "row").collect();
        assert!(panels_shown.len() >= 12 && panels_shown.iter().all(has_query));
    }

    #[test]
    fn every_time_is_in_one_bucket_of_the_metric() {
        let mut counts = TimeCounts::NONE;
        counts.buckets = std::array::from_fn(|n| 1 << n);
        let buckets = buckets(&counts);
        assert_eq!(buckets.iter().map(|(_, n)| n).sum::<u64>(), counts.count());
        let mut start = 0;
        for (end, count) in buckets {
            let within = (0..counts.buckets.len()).filter(|n| {
                let middle = (TimeBucket(*n).start_ns() + TimeBucket(*n).end_ns()) / 2;
                (start..end).contains(&middle)
            });
            assert_eq!(count, within.map(|n| 1 << n).sum::<u64>(), "up to {end} ns");
            start = end;
        }
    }

    #[test]
    fn runs_of_one_name_have_one_series() {
        let run = |run: u32, limit: u64, seconds: f64| json!({"run": run, "name": "web", "command": ["/bin/x"], "limit_bytes": limit, "seconds": seconds, "processes": []});
        let metrics = of_runs(&[run(1, 100, 3.0), run(2, 50, 9.0)]);
        let labels = vec![("run", "web".to_string()), ("command", "x".to_string())];
        let values =
            |name: &str| &metrics.iter().find(|metric| metric.name == name).unwrap().values;
        assert_eq!(values("run_count"), &[(labels.clone(), 2.0)]);
        assert_eq!(values("run_limit_bytes"), &[(labels.clone(), 150.0)]);
        assert_eq!(values("run_seconds"), &[(labels, 9.0)]);
    }
}
