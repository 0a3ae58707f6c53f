//! The plots of a report, from the files of the benchmarks.

use crate::common::summary::Spread;
use crate::report::gather::Gathered;
use crate::report::plot::{Axes, Bar, Line, bars, lines};
use serde_json::Value;

/// A plot with its caption, or the reason why there is none.
pub struct Chart {
    /// The caption.
    pub title: String,
    /// The SVG, or the reason.
    pub svg: Result<String, String>,
}

/// All plots, in the order of the page.
pub fn charts(gathered: &Gathered) -> Vec<Chart> {
    let document = |bench: &str| gathered.documents.get(bench).unwrap_or(&Value::Null);
    [
        walk_charts(document("walk")),
        usemem_charts(document("usemem")),
        block_charts(document("blocks")),
        pool_charts(document("pools")),
        peer_charts(document("peers")),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn chart(title: &str, svg: anyhow::Result<String>) -> Chart {
    Chart { title: title.into(), svg: svg.map_err(|error| error.to_string()) }
}

const SPEED: &str = "MB/s; longer is better";

fn walk_charts(walk: &Value) -> Vec<Chart> {
    let phases = [
        ("fill", "Filling memory past its limit (bench walk, fill)"),
        ("read2", "Reading it all again in order (bench walk, read2)"),
        ("dirty", "Reading and changing it all in order (bench walk, dirty)"),
    ];
    let speed = |(phase, title)| chart(title, bars(SPEED, &phase_bars(walk, phase, "mb_per_s")));
    let mut charts: Vec<Chart> = phases.map(speed).into();
    let means = phase_bars(walk, "random", "mean_us");
    let latency = Axes {
        x: "microseconds (logarithmic)",
        y: "share of reads",
        log_x: Some(10.0),
        y_max: Some(1.0),
    };
    let memory = Axes { x: "seconds", y: "MiB", log_x: None, y_max: None };
    charts.extend([
        chart(
            "Random 4 KiB reads (bench walk, random)",
            bars("mean microseconds; shorter is better", &means),
        ),
        chart(
            "Latency of random 4 KiB reads: share done within a time",
            lines(latency, &latencies(walk)),
        ),
        chart(
            "All memory over a walk: mapped pages, frames, store (memfold keeps stored copies of what it has in memory too)",
            lines(memory, &memories(walk)),
        ),
    ]);
    charts
}

fn usemem_charts(usemem: &Value) -> Vec<Chart> {
    let seconds = bars("seconds; shorter is better", &peer_bars(usemem, "cpu_s"));
    vec![
        chart("usemem: writing by several processes", bars(SPEED, &peer_bars(usemem, "out_mb_s"))),
        chart("usemem: reading it back", bars(SPEED, &peer_bars(usemem, "in_mb_s"))),
        chart("usemem: user and system time", seconds),
    ]
}

fn block_charts(blocks: &Value) -> Vec<Chart> {
    let against_size =
        |y| Axes { x: "KiB in a block (logarithmic)", y, log_x: Some(4.0), y_max: None };
    let ratio = lines(against_size("data / compressed"), &block_lines(blocks, "ratio"));
    let speed = lines(against_size("MB/s out, one core"), &block_lines(blocks, "out_mb_s"));
    vec![chart("Ratio by block size", ratio), chart("Speed of compression by block size", speed)]
}

fn pool_charts(pools: &Value) -> Vec<Chart> {
    let waits = bars("percent; shorter is better", &pool_bars(pools, "wait_percent"));
    vec![
        chart("Share of time that ten workloads wait for locks of the pools", waits),
        chart(
            "What ten workloads move, by the number of pools",
            bars(SPEED, &pool_bars(pools, "mb_s")),
        ),
    ]
}

fn peer_charts(peers: &Value) -> Vec<Chart> {
    let ratio = bars("data / memory held; longer is better", &peer_bars(peers, "ratio"));
    vec![
        chart("Other compressed memory: ratio", ratio),
        chart("Other compressed memory: writing", bars(SPEED, &peer_bars(peers, "out_mb_s"))),
        chart("Other compressed memory: reading", bars(SPEED, &peer_bars(peers, "in_mb_s"))),
    ]
}

/// Returns the colour group of a peer: one for memfold, others for each kind of peer.
fn group(peer: &str) -> usize {
    ["memfold", "zram", "zswap", "file", "nbdkit", "blosc2"]
        .iter()
        .position(|kind| peer.starts_with(kind))
        .unwrap_or(6)
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Returns the names of the peers of a walk, in order.
fn walkers(walk: &Value) -> Vec<&str> {
    let mut names = Vec::new();
    for name in list(&walk["runs"]).iter().filter_map(|run| run["peer"].as_str()) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

fn phases<'a>(walk: &'a Value, peer: &'a str, phase: &'a str) -> impl Iterator<Item = &'a Value> {
    let runs = list(&walk["runs"]).iter().filter(move |run| run["peer"] == peer);
    runs.flat_map(|run| list(&run["phases"])).filter(move |result| result["phase"] == phase)
}

fn phase_bars(walk: &Value, phase: &str, field: &str) -> Vec<Bar> {
    let bar = |name: &str| {
        let spread = Spread::of(
            phases(walk, name, phase).filter_map(|result| result[field].as_f64()).collect(),
        )?;
        Some(Bar {
            name: name.into(),
            value: spread.median,
            range: (spread.min, spread.max),
            group: group(name),
        })
    };
    walkers(walk).into_iter().filter_map(bar).collect()
}

/// Parses a point of two numbers.
fn point(value: &Value) -> Option<(f64, f64)> {
    Some((value.get(0)?.as_f64()?, value.get(1)?.as_f64()?))
}

fn latencies(walk: &Value) -> Vec<Line> {
    let line = |name: &str| {
        let points: Vec<_> =
            list(&phases(walk, name, "random").last()?["cdf"]).iter().filter_map(point).collect();
        (!points.is_empty()).then(|| Line { name: name.into(), points })
    };
    walkers(walk).into_iter().filter_map(line).collect()
}

fn memories(walk: &Value) -> Vec<Line> {
    // zram's sizes have the same curve.
    let is_shown = |name: &&str| {
        name.starts_with("memfold") || name.ends_with(":4k") || name.ends_with(":64k")
    };
    let line = |name: &str| {
        let run = list(&walk["runs"]).iter().rfind(|run| run["peer"] == name)?;
        let is_kernels = name.starts_with("zram");
        // A failed run has no figure of the kernel's store.
        let store = if is_kernels { run["counters"]["pool_bytes"].as_f64()? } else { 0.0 };
        let mib = |(s, bytes): (f64, f64)| (s, (bytes + store) / 1048576.0);
        let points: Vec<_> = list(&run["memory"]).iter().filter_map(point).map(mib).collect();
        let name =
            if is_kernels { format!("{name} and the most its store held") } else { name.into() };
        (!points.is_empty()).then_some(Line { name, points })
    };
    walkers(walk).into_iter().filter(is_shown).filter_map(line).collect()
}

/// Returns bars from `peers: [{peer, FIELD: {median, min, max}}]`.
fn peer_bars(document: &Value, field: &str) -> Vec<Bar> {
    let bar = |entry: &Value| {
        let (name, spread) = (entry["peer"].as_str()?, &entry[field]);
        let range = (spread["min"].as_f64()?, spread["max"].as_f64()?);
        Some(Bar {
            name: name.into(),
            value: spread["median"].as_f64()?,
            range,
            group: group(name),
        })
    };
    list(&document["peers"]).iter().filter_map(bar).collect()
}

/// Returns lines from `blocks: [{codec, block_kib, FIELD}]`.
fn block_lines(document: &Value, field: &str) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    for entry in list(&document["blocks"]) {
        let (Some(codec), Some(kib), Some(value)) =
            (entry["codec"].as_str(), entry["block_kib"].as_f64(), entry[field].as_f64())
        else {
            continue;
        };
        match lines.iter_mut().find(|line| line.name == codec) {
            Some(line) => line.points.push((kib, value)),
            None => lines.push(Line { name: codec.into(), points: vec![(kib, value)] }),
        }
    }
    lines
}

/// Returns bars from `pools: [{pools, FIELD: {median, min, max}}]`.
fn pool_bars(document: &Value, field: &str) -> Vec<Bar> {
    let bar = |entry: &Value| {
        let spread = &entry[field];
        let range = (spread["min"].as_f64()?, spread["max"].as_f64()?);
        Some(Bar {
            name: entry["name"].as_str()?.into(),
            value: spread["median"].as_f64()?,
            range,
            group: 0,
        })
    };
    list(&document["pools"]).iter().filter_map(bar).collect()
}
