//! Tests of the parts that need no terminal and no run.
mod columns;
mod draw;
mod keys;
mod model;

use super::model::{Row, RowKey};
use super::watch::{Answer, Heard, WatchSource};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Returns a source that has answered twice, a second apart.
fn heard(source: WatchSource, before: Option<Value>, now: Value) -> Heard {
    let at = Instant::now();
    let answer = |at, value| Answer { at, value: Arc::new(value) };
    let before = before.map(|value| answer(at - Duration::from_secs(1), value));
    Heard { source, before, now: Some(answer(at, now)), asked: None, process: None }
}

/// Returns the answer of a run with one process of these counters.
fn run_of(command: &[&str], seconds: f64, counters: Value) -> Value {
    let mut process = counters.clone();
    process["pid"] = 7.into();
    process["name"] = command[0].into();
    json!({
        "command": command,
        "seconds": seconds,
        "limit_bytes": 64 << 20,
        "codec": "lz4",
        "processes": [process],
        "sum": counters,
    })
}

/// Any row: of any kind, with any name and any figures.
fn any_row() -> impl Strategy<Value = Row> {
    let key = prop_oneof![
        any::<u32>().prop_map(RowKey::Run),
        any::<u32>().prop_map(RowKey::Server),
        any::<u32>().prop_map(RowKey::Process),
        any::<String>().prop_map(RowKey::Group),
        any::<String>().prop_map(RowKey::Export),
    ];
    let rate = prop::option::of(0.0f64..1e12);
    // Sums of two sizes stay in range, as they do on any machine.
    let bytes = (0u64..1 << 60, 0u32..60).prop_map(|(bytes, shift)| bytes >> shift);
    let texts = (any::<String>(), prop::option::of(any::<String>()), any::<Option<u64>>());
    (key, texts, prop::array::uniform6(bytes), prop::option::of(0u64..1 << 60), rate).prop_map(
        |(key, (name, group, silent), bytes, limit_bytes, rate)| {
            let mut row = Row::new(key, name);
            row.group = group;
            row.silent = silent.map(Duration::from_secs);
            row.limit_bytes = limit_bytes;
            [row.used_bytes, row.resident_bytes, row.compressed_bytes] =
                [bytes[0], bytes[1], bytes[2]];
            [row.spilled_bytes, row.folded_bytes, row.stored[1]] = [bytes[3], bytes[4], bytes[5]];
            row.rates.faults = rate;
            row.rates.fault_seconds = rate;
            row
        },
    )
}

#[test]
fn export_never_overwrites_a_file() {
    let scratch = memfold_testkit::scratch::Scratch::new();
    let names: Vec<String> =
        (0..3).map(|_| super::export(&[], &scratch.0).expect("a file is written")).collect();
    let texts: Vec<String> =
        names.iter().map(|name| std::fs::read_to_string(scratch.0.join(name)).unwrap()).collect();
    assert_eq!(std::fs::read_dir(&scratch.0).unwrap().count(), 3, "{names:?}");
    assert!(texts.iter().all(|text| serde_json::from_str::<Value>(text).is_ok()), "{texts:?}");
    assert!(super::export(&[], &scratch.0.join("missing")).is_err());
}
