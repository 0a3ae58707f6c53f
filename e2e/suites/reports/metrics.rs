//! `memfold metrics`: the figures of all runs for Prometheus.
use crate::common::{Holder, Scratch, assert_refused, binaries, compile, memfold};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

const BUILD: &str = concat!("memfold_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"}");

/// Reads the text as a parser of OpenMetrics does: comments before their metric, one value a line,
/// and the end.
#[track_caller]
fn parsed(text: &str) -> BTreeMap<String, f64> {
    let mut lines: Vec<&str> = text.trim_end().lines().collect();
    assert_eq!(lines.pop(), Some("# EOF"), "{text}");
    let (mut values, mut family) = (BTreeMap::new(), String::new());
    for line in lines {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
            family = name.to_string();
        } else if !line.starts_with("# HELP ") && !line.starts_with("# UNIT ") {
            let (series, value) = line.rsplit_once(' ').unwrap();
            assert!(series.starts_with(&family) && series.starts_with("memfold_"), "{line}");
            let before = values.insert(series.to_string(), value.parse().unwrap());
            assert_eq!(before, None, "{line} comes twice");
        }
    }
    values
}

/// A server that ends with the test.
struct MetricsServer(Child);

impl Drop for MetricsServer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the address that a server prints.
fn address_of(server: &mut MetricsServer) -> String {
    let mut line = String::new();
    BufReader::new(server.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    line.trim().strip_prefix("http://").unwrap().strip_suffix("/metrics").unwrap().to_string()
}

fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// Returns the label of a run without a name.
fn of_run(run: &Holder) -> String {
    format!("run=\"{}\"", run.runner.id())
}

#[test]
fn metrics_have_the_figures_of_every_run_and_group() {
    let Some(bin) = binaries() else { return };
    let (program, scratch) = (compile("holder"), Scratch::new());
    let own = |command: &mut Command| command.env("XDG_RUNTIME_DIR", &scratch.0).output().unwrap();
    let output = own(&mut memfold(&bin, &["set", "--group", "some", "--limit", "1G"]));
    assert!(output.status.success());
    let mut one = Holder::start(&bin, &scratch, &["--limit", "64M"], &program.path, "96");
    let flags = ["--group", "some", "--name", "two"];
    let two = Holder::start(&bin, &scratch, &flags, &program.path, "8");
    let name = format!("memfold_fault_pool_time_seconds_count{{run=\"{}\"", one.runner.id());
    let has_times = |values: &BTreeMap<String, f64>| {
        values.iter().any(|(series, count)| series.starts_with(&name) && *count > 0.0)
    };
    // One fault in sixteen is timed, and background threads load most pages of a read.
    let mut values = BTreeMap::new();
    for _ in 0..50 {
        one.check();
        let output = own(&mut memfold(&bin, &["metrics"]));
        values = parsed(&String::from_utf8(output.stdout).unwrap());
        if has_times(&values) {
            break;
        }
    }
    let of = |name: &str, run: &str, rest: &str| {
        values.get(&format!("memfold_{name}{{run=\"{run}\",command=\"holder\"{rest}}}"))
    };
    let of_one = |name: &str| of(name, &one.runner.id().to_string(), "");
    assert_eq!(of_one("run_limit_bytes"), Some(&f64::from(64 << 20)));
    assert!(of_one("zswpin_total").is_some_and(|pages| *pages > 0.0), "{values:?}");
    assert!(of_one("folded_bytes").is_some_and(|bytes| *bytes > 1e6), "{values:?}");
    assert!(of_one("own_seconds_total").is_some_and(|seconds| *seconds < 1e5), "{values:?}");
    let of_two = |name: &str| of(name, "two", ",group=\"some\"");
    assert!(of_two("run_share_bytes").is_some() && of_two("run_limit_bytes").is_none());
    assert!(of_two("resident_bytes").is_none(), "its group has the figures");
    let of_group = |name: &str| values[&format!("memfold_{name}_bytes{{group=\"some\"}}")];
    assert!(of_group("resident") + of_group("unmanaged") > 1e6);
    let count = values.keys().filter(|series| series.contains(&of_run(&one))).count();
    assert!((100..200).contains(&count), "{count} series for a run");
    let run = of_run(&one);
    let times = |part: &str| -> Vec<(&String, f64)> {
        let name = format!("memfold_fault_pool_time_seconds_{part}");
        let all = values.iter().filter(|(one, _)| one.starts_with(&name) && one.contains(&run));
        all.map(|(series, value)| (series, *value)).collect()
    };
    let (count, sum, buckets) = (times("count")[0].1, times("sum")[0].1, times("bucket"));
    let all = buckets.iter().find(|(series, _)| series.contains("le=\"+Inf\"")).unwrap().1;
    let most = buckets.iter().fold(0.0f64, |most, (_, value)| value.max(most));
    assert!(
        count > 0.0 && count == all && count == most && sum > 0.0,
        "{count} {all} {most} {sum}"
    );
    assert_eq!(values["memfold_group_runs{group=\"some\"}"], 1.0);
    assert_eq!(values[BUILD], 1.0);
    one.end();
    two.end();
}

#[test]
fn counters_of_a_group_go_on_when_a_run_ends() {
    let Some(bin) = binaries() else { return };
    let (program, scratch) = (compile("holder"), Scratch::new());
    let own = |args: &[&str]| {
        let mut command = memfold(&bin, args);
        command.env("XDG_RUNTIME_DIR", &scratch.0);
        command
    };
    assert!(own(&["set", "--group", "some", "--limit", "1G"]).status().unwrap().success());
    let flags = ["--group", "some", "--limit", "64M"];
    let start = || Holder::start(&bin, &scratch, &flags, &program.path, "96");
    let (mut one, two) = (start(), start());
    let mut server = own(&["metrics", "--listen", "127.0.0.1:0"]);
    let mut server = MetricsServer(server.stdout(Stdio::piped()).spawn().unwrap());
    let address = address_of(&mut server);
    let values = || parsed(get(&address, "/metrics").split_once("\r\n\r\n").unwrap().1);
    let count = |values: &BTreeMap<String, f64>| values["memfold_zswpout_total{group=\"some\"}"];
    one.check();
    let before = values();
    assert!(count(&before) > 0.0, "{before:?}");
    one.end();
    let after = values();
    assert_eq!(after["memfold_group_runs{group=\"some\"}"], 1.0);
    assert!(count(&after) >= count(&before), "{} {}", count(&before), count(&after));
    let each = own(&["metrics", "--each"]).output().unwrap();
    let each = parsed(&String::from_utf8(each.stdout).unwrap());
    let series =
        format!("memfold_zswpout_total{{{},command=\"holder\",group=\"some\"}}", of_run(&two));
    assert!(
        each.contains_key(&series) && !each.contains_key("memfold_zswpout_total{group=\"some\"}")
    );
    two.end();
}

#[test]
fn metrics_are_served_until_the_server_is_ended() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let listen = |address: &str| {
        let mut command = memfold(&bin, &["metrics", "--listen", address]);
        command.env("XDG_RUNTIME_DIR", &scratch.0);
        command
    };
    let mut server = MetricsServer(listen("127.0.0.1:0").stdout(Stdio::piped()).spawn().unwrap());
    let address = &address_of(&mut server);
    for _ in 0..3 {
        let answer = get(address, "/metrics");
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 OK") && head.contains("openmetrics-text"), "{head}");
        assert!(parsed(body).contains_key(BUILD));
    }
    assert!(get(address, "/").starts_with("HTTP/1.1 404"));
    // A request that is too long or breaks off harms no other.
    assert!(get(address, &"x".repeat(20_000)).starts_with("HTTP/1.1 431"));
    drop(TcpStream::connect(address).unwrap());
    let refusal = listen(address).output().unwrap();
    assert_refused(&refusal, 125, &[address, "in use"]);
    assert_refused(&listen("nonsense").output().unwrap(), 125, &["--listen: nonsense"]);
    assert!(get(address, "/metrics").starts_with("HTTP/1.1 200"));
}
