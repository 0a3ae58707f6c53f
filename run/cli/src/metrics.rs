//! `memfold metrics`: the figures of all runs, groups and block devices of this user, in the
//! OpenMetrics text format.
use crate::failure::CommandFailure;
use crate::group;
use crate::program::plain;
use crate::runs::counted;
use crate::sockets;
use clap::{Arg, ArgMatches, Command};
use memfold_stats::{FIGURES, Figure, FigureKind, TIME_BUCKETS, TIME_FIGURES, TimeBucket};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};
use serde_json::{Value, json};
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

/// A run or server that does not answer in this time is left out.
const PATIENCE: Duration = Duration::from_secs(2);
/// Longest wait for a request, and its longest length in bytes.
const REQUEST_PATIENCE: Duration = Duration::from_secs(2);
const REQUEST_LEN_MAX: usize = 8192;
/// The path of the metrics.
const PATH: &str = "/metrics";
const TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Returns the command line of `metrics`.
pub fn command() -> Command {
    Command::new("metrics")
        .about("Prints the figures of all runs, groups and block devices of this user for Prometheus, or serves them")
        .override_usage("memfold metrics [--listen ADDRESS:PORT]")
        .arg(
            Arg::new("listen")
                .long("listen")
                .value_name("ADDRESS:PORT")
                .help("Serve them at http://ADDRESS:PORT/metrics until it is ended, instead of printing them once"),
        )
        .after_help(
            "Every process that can connect to the address can read the figures, and the names of the commands.\n\
             \nExit status: 0; 125 if the address can't be used.",
        )
}

/// Prints the metrics, or serves them.
///
/// # Errors
/// 125: the address can't be used, or stdout can't be written.
pub fn main(matches: &ArgMatches) -> Result<u8, CommandFailure> {
    let Some(address) = matches.get_one::<String>("listen") else {
        say!("{}", text().trim_end());
        return Ok(0);
    };
    let fail = |e: &io::Error| {
        CommandFailure::own(format!(
            "--listen: {address}: {}. Give ADDRESS:PORT, such as 127.0.0.1:9464.",
            plain(e)
        ))
    };
    let listener = TcpListener::bind(address.as_str()).map_err(|e| fail(&e))?;
    say!("http://{}{PATH}", listener.local_addr().map_err(|e| fail(&e))?);
    memfold_remote::each_connection(
        || listener.accept().map(|(stream, _)| stream),
        |stream| {
            // A slow or broken connection affects no other. Without a thread it is closed.
            let serve = move || drop(answer(stream));
            drop(thread::Builder::new().name("memfold-metrics".to_string()).spawn(serve));
        },
    );
    Ok(0)
}

/// Answers one request.
fn answer(mut stream: TcpStream) -> io::Result<()> {
    stream.set_read_timeout(Some(REQUEST_PATIENCE))?;
    stream.set_write_timeout(Some(REQUEST_PATIENCE))?;
    let (mut request, mut bytes) = (Vec::new(), [0; 1024]);
    let end = Instant::now() + REQUEST_PATIENCE;
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        match stream.read(&mut bytes)? {
            0 => break,
            _ if Instant::now() > end => return Err(io::ErrorKind::TimedOut.into()),
            len if request.len() + len > REQUEST_LEN_MAX => {
                return refuse(&mut stream, "431 Request Header Fields Too Large", end);
            }
            len => request.extend_from_slice(&bytes[..len]),
        }
    }
    let line = String::from_utf8_lossy(&request);
    let mut words = line.split_ascii_whitespace();
    match (words.next(), words.next().map(|path| path.split('?').next().unwrap_or_default())) {
        (Some("GET"), Some(PATH)) => reply(&mut stream, "200 OK", &text()),
        (Some("GET"), Some(_)) => refuse(&mut stream, "404 Not Found", end),
        _ => refuse(&mut stream, "405 Method Not Allowed", end),
    }
}

/// Refuses a request, and reads the rest of it. If the connection were closed before, the client would
/// see a reset in place of the answer.
fn refuse(stream: &mut TcpStream, status: &str, end: Instant) -> io::Result<()> {
    reply(stream, status, "")?;
    stream.shutdown(Shutdown::Write)?;
    let mut bytes = [0; 1024];
    while Instant::now() < end && stream.read(&mut bytes)? > 0 {}
    Ok(())
}

fn reply(stream: &mut TcpStream, status: &str, body: &str) -> io::Result<()> {
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {TYPE}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())
}

/// Returns the metrics as text.
fn text() -> String {
    let mut registry = Registry::with_prefix("memfold");
    registry.register_collector(Box::new(GatheredMetrics::now()));
    let mut text = String::new();
    // Writing to a string can't fail.
    let _ = encode(&mut text, &registry);
    text
}

/// The labels of a value.
type Labels = Vec<(&'static str, String)>;

/// A metric with a value for each run, group or device.
#[derive(Clone, Debug)]
struct Metric {
    name: String,
    help: String,
    kind: FigureKind,
    values: Vec<(Labels, f64)>,
}

/// A histogram of times with a value for each run: the JSON of `report/json.rs`.
#[derive(Debug)]
struct TimesMetric {
    name: String,
    help: &'static str,
    values: Vec<(Labels, Value)>,
}

/// All that was gathered at one moment.
#[derive(Debug)]
struct GatheredMetrics {
    metrics: Vec<Metric>,
    times: Vec<TimesMetric>,
}

impl GatheredMetrics {
    fn now() -> GatheredMetrics {
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
        all.extend(of_runs(&runs));
        all.extend(of_groups());
        all.extend(of_devices(&ask(sockets::BLK)));
        GatheredMetrics { metrics: all, times: times_of_runs(&runs) }
    }
}

impl Collector for GatheredMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for times in &self.times {
            let name = &times.name;
            let mut family = encoder.encode_descriptor(
                name,
                times.help,
                Some(&Unit::Seconds),
                MetricType::Histogram,
            )?;
            for (labels, value) in &times.values {
                encode_times(family.encode_family(&&labels[..])?, value)?;
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

/// Encodes a histogram of times in seconds. Its buckets are the same for all.
fn encode_times(mut encoder: MetricEncoder<'_>, value: &Value) -> Result<(), fmt::Error> {
    let within = |end_ns: u64| {
        let buckets = value["buckets"].as_array().into_iter().flatten();
        buckets.filter(|one| one[0] == end_ns).filter_map(|one| one[1].as_u64()).sum()
    };
    let seconds = |ns: u64| ns as f64 / 1e9;
    let ends = (0..TIME_BUCKETS).map(|n| TimeBucket(n).end_ns());
    let mut buckets: Vec<(f64, u64)> = ends.map(|end| (seconds(end), within(end))).collect();
    // The last bucket has all longer times.
    if let Some(last) = buckets.last_mut() {
        last.0 = f64::INFINITY;
    }
    let (total, count) = (value["total_ns"].as_u64(), value["count"].as_u64());
    let no_exemplars = None::<&std::collections::HashMap<usize, Exemplar<Labels, f64>>>;
    let sum = seconds(total.unwrap_or(0));
    encoder.encode_histogram(sum, count.unwrap_or(0), &buckets, no_exemplars)
}

/// Returns the histograms of runs.
fn times_of_runs(runs: &[Value]) -> Vec<TimesMetric> {
    let of = |figure: &'static Figure| TimesMetric {
        name: figure.name.to_string(),
        help: figure.help,
        values: runs.iter().map(|run| (labels_of(run), run["sum"][figure.name].clone())).collect(),
    };
    TIME_FIGURES.iter().filter(|_| !runs.is_empty()).map(of).collect()
}

/// Returns the labels of a run.
fn labels_of(run: &Value) -> Labels {
    let command = run["command"][0].as_str().unwrap_or_default();
    let command = command.rsplit('/').next().unwrap_or_default().to_string();
    vec![("run", run["run"].to_string()), ("command", command)]
}

/// Returns a metric of figures in JSON: one value for each that has it.
fn metric(
    name: &str,
    help: &str,
    kind: FigureKind,
    values: impl Iterator<Item = (Labels, Option<f64>)>,
) -> Metric {
    let values = values.filter_map(|(labels, value)| Some((labels, value?))).collect();
    Metric { name: name.to_string(), help: help.to_string(), kind, values }
}

/// Returns the metrics of runs. A counter is of all processes that the run ever had, and a gauge of
/// those that live.
fn of_runs(runs: &[Value]) -> Vec<Metric> {
    let labels = labels_of;
    let of = |name, help, of: &dyn Fn(&Value) -> Option<f64>| {
        metric(name, help, FigureKind::Gauge, runs.iter().map(|run| (labels(run), of(run))))
    };
    let mut all = vec![
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
    ];
    all.extend(FIGURES.iter().map(|figure| {
        let value = |run: &Value| {
            let raw = match figure.kind {
                FigureKind::Counter => run["sum"][figure.name].as_f64()?,
                _ => {
                    let live = run["processes"].as_array()?.iter();
                    live.filter_map(|one| one[figure.name].as_f64()).sum()
                }
            };
            Some(if figure.name.ends_with("_ns") { raw / 1e9 } else { raw })
        };
        let name = match figure.name.strip_suffix("_ns") {
            Some(name) => format!("{name}_seconds"),
            None => figure.name.to_string(),
        };
        let values = runs.iter().map(|run| (labels(run), value(run)));
        metric(&name, &figure.help.replace("nanoseconds", "seconds"), figure.kind, values)
    }));
    all
}

fn of_groups() -> Vec<Metric> {
    let groups = group::figures();
    let of = |name, help, of: &dyn Fn(&group::GroupFigures) -> u64| {
        let value =
            |one: &group::GroupFigures| (vec![("group", one.name.clone())], Some(of(one) as f64));
        metric(name, help, FigureKind::Gauge, groups.iter().map(value))
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
fn of_devices(servers: &[Value]) -> Vec<Metric> {
    let label = |server: &Value| vec![("server", server["pid"].to_string())];
    let gauge = |name, help, of: &dyn Fn(&Value) -> Option<f64>| {
        metric(name, help, FigureKind::Gauge, servers.iter().map(|one| (label(one), of(one))))
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
        metric(name, help, FigureKind::Counter, exports().map(of))
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
        let all = [of_runs(&[run]), of_groups(), of_devices(&[])].concat();
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
            ("grafana-dashboard.json", include_str!("../../../contrib/grafana-dashboard.json"), 30),
            ("prometheus-alerts.yml", include_str!("../../../contrib/prometheus-alerts.yml"), 6),
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
        let text = include_str!("../../../contrib/grafana-dashboard.json");
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
}
