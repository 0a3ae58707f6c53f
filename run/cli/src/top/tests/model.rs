use super::{heard, run_of};
use crate::top::columns::table;
use crate::top::json::json;
use crate::top::model::{RowKey, TopPage, counters, rows};
use crate::top::watch::{Heard, SilentProcess, WatchSource};
use memfold_stats::FIGURES;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

fn all(heard: &[Heard]) -> Vec<crate::top::model::Row> {
    rows(heard, &TopPage::All, Instant::now())
}

#[test]
fn rates_are_those_between_two_answers() {
    let before = json!({"faults": 100, "pgmajfault": 10, "faults_zero": 5, "fault_ns": 0});
    let now = json!({"faults": 400, "pgmajfault": 60, "faults_zero": 5, "fault_ns": 250_000_000});
    let run = |counters| run_of(&["a"], 9.0, counters);
    let row = all(&[heard(WatchSource::Run(3), Some(run(before)), run(now.clone()))]).remove(0);
    let rates = row.rates;
    assert_eq!((rates.faults, rates.loads, rates.zeros), (Some(300.0), Some(50.0), Some(0.0)));
    assert_eq!((row.fault_percent(), rates.writes), (Some(25.0), None));
    let first = all(&[heard(WatchSource::Run(3), None, run(now))]).remove(0);
    assert_eq!((first.rates.faults, first.fault_percent()), (None, None));
}

#[test]
fn counter_that_began_anew_has_no_negative_rate() {
    let run = |seconds, faults: u64| run_of(&["a"], seconds, json!({"faults": faults}));
    let rate =
        |before, now| all(&[heard(WatchSource::Run(3), Some(before), now)]).remove(0).rates.faults;
    assert_eq!(rate(run(8.0, 500), run(9.0, 30)), Some(30.0));
    // Another run got the process ID.
    assert_eq!(rate(run(80.0, 500), run(0.5, 900)), None);
}

#[test]
fn process_that_has_ended_leaves_no_row_and_a_new_one_has_no_rate() {
    let process = |pid: u32, faults: u64| json!({"pid": pid, "name": "p", "faults": faults});
    let run = |processes: Value| json!({"command": ["a"], "seconds": 1.0, "processes": processes});
    let (before, now) =
        (run(json!([process(7, 10), process(8, 10)])), run(json!([process(8, 30), process(9, 5)])));
    let answers = [heard(WatchSource::Run(3), Some(before), now)];
    let rows_found = rows(&answers, &TopPage::Run(3), Instant::now());
    let rates: Vec<_> = rows_found.iter().map(|row| (row.pid, row.rates.faults)).collect();
    assert_eq!(rates, [(Some(8), Some(20.0)), (Some(9), None)]);
    assert!(rows(&answers, &TopPage::Run(4), Instant::now()).is_empty());
}

#[test]
fn held_memory_is_what_the_limit_counts() {
    let mut run = run_of(
        &["/bin/a", "/tmp/b c", "x"],
        1.0,
        json!({
            "resident_bytes": 10, "frame_bytes": 5, "unmanaged_bytes": 3, "shared_bytes": 2,
            "pool_bytes": 7, "index_bytes": 1, "folded_bytes": 50, "swap_bytes": 9,
            "remote_bytes": 4, "saved_bytes": 90, "payload_bytes": 40, "recompress_gained_bytes": 10,
        }),
    );
    run["unmanaged_processes"] = 2.into();
    run["unmanaged_processes_bytes"] = 100.into();
    run["group"] = json!({"name": "g", "share_bytes": 1000});
    let group = json!([{"group": "g", "limit_bytes": 5000, "used_bytes": 123, "runs": 1}]);
    let answers = [heard(WatchSource::Groups, None, group), heard(WatchSource::Run(3), None, run)];
    let rows_found = all(&answers);
    let [row, group] = &rows_found[..] else { panic!("{rows_found:?}") };
    assert_eq!((row.resident_bytes, row.compressed_bytes, row.used_bytes), (116, 8, 124));
    assert_eq!((row.spilled_bytes, row.folded_bytes, row.ratio()), (13, 50, Some(3.0)));
    assert_eq!((row.limit_bytes, row.members), (Some(1000), Some(3)));
    assert_eq!((row.name.as_str(), row.command.as_deref()), ("a b c x", Some("/bin/a /tmp/b c x")));
    assert_eq!((&group.key, group.limit_bytes), (&RowKey::Group("g".to_string()), Some(5000)));
    assert_eq!((group.used_bytes, group.folded_bytes, group.ratio()), (123, 50, Some(3.0)));
    assert_eq!(rows(&answers, &TopPage::Group("g".to_string()), Instant::now()).len(), 1);
    assert!(rows(&answers, &TopPage::Group("h".to_string()), Instant::now()).is_empty());
}

#[test]
fn server_has_the_sums_of_its_devices() {
    let server = |reads: u64, writes: u64| {
        let export = |name: &str| json!({"name": name, "size_bytes": 1 << 30, "counters": {"reads": reads, "writes": writes}});
        json!({
            "seconds": 4.0, "limit_bytes": 500, "codec": "zstd:1",
            "mm_stat": {"orig_data_size": 300, "compr_data_size": 100, "mem_used_total": 120},
            "writeback": {"used_bytes": 40},
            "exports": [export("disk"), export("")],
        })
    };
    let answers = [heard(WatchSource::Server(5), Some(server(10, 0)), server(40, 8))];
    let row = all(&answers).remove(0);
    assert_eq!(
        (row.name.as_str(), row.ratio(), row.used_bytes),
        ("blk disk,1.00G", Some(3.0), 120)
    );
    assert_eq!(
        (row.rates.loads, row.rates.writes, row.spilled_bytes),
        (Some(60.0), Some(16.0), 40)
    );
    let devices = rows(&answers, &TopPage::Server(5), Instant::now());
    assert_eq!(devices.len(), 2);
    assert_eq!(devices[1].rates.loads, Some(30.0));
}

#[test]
fn run_that_does_not_answer_is_shown_as_silent() {
    let mut one = heard(WatchSource::Run(3), None, run_of(&["a"], 1.0, json!({})));
    let now = Instant::now();
    one.asked = Some(now);
    let silent = |at| rows(std::slice::from_ref(&one), &TopPage::All, at).remove(0).silent;
    assert_eq!(silent(now + Duration::from_secs(1)), None);
    assert_eq!(silent(now + Duration::from_secs(5)), Some(Duration::from_secs(5)));
    let (source, before) = (WatchSource::Run(9), None);
    let mut never = Heard { source, before, now: None, asked: Some(now), process: None };
    let row = |one: &Heard| {
        rows(std::slice::from_ref(one), &TopPage::All, now + Duration::from_secs(3)).remove(0)
    };
    let unknown = row(&never);
    assert_eq!((unknown.name.as_str(), unknown.pid), ("run 9", Some(9)));
    assert!(unknown.silent.is_some() && !unknown.has_figures && !unknown.is_stopped);
    let command = vec!["/bin/app".to_string(), "x".to_string()];
    never.process = Some(SilentProcess { command, is_stopped: true });
    let row_stopped = row(&never);
    assert_eq!(
        (row_stopped.name.as_str(), row_stopped.command.as_deref()),
        ("app x", Some("/bin/app x"))
    );
    let table = table(&[row_stopped]);
    assert!(table[1].ends_with(" /bin/app x (stopped, no answer for 3 s)"), "{table:?}");
    assert!(!table[1].contains("0B"), "{table:?}");
}

#[test]
fn page_of_a_process_shows_only_counters_that_exist() {
    let every: serde_json::Map<String, Value> =
        FIGURES.iter().map(|figure| (figure.name.to_string(), 1.into())).collect();
    let run = |counters: &Value| run_of(&["a"], 1.0, counters.clone());
    let every = Value::Object(every);
    let answers = [heard(WatchSource::Run(3), Some(run(&every)), run(&every))];
    let values = counters(&answers, 3, 7);
    assert!(values.len() > 10 && values.iter().all(|(_, value)| value != "-"), "{values:?}");
    let sizes = values.iter().filter(|(_, value)| value == "1B").count();
    let counts = values.iter().filter(|(_, value)| value == "1").count();
    let rates = values.iter().filter(|(_, value)| value == "0").count();
    assert_eq!(sizes + counts + rates, values.len(), "a counter is missing: {values:?}");
    assert!(counters(&answers, 3, 8).is_empty() && counters(&answers, 4, 7).is_empty());
}

#[test]
fn json_has_every_run_with_its_processes() {
    let counters = |faults: u64| json!({"faults": faults, "resident_bytes": 4096});
    let run = |faults| run_of(&["a\u{1b}", "b"], 2.0, counters(faults));
    let group = json!([{"group": "g", "limit_bytes": 5000, "used_bytes": 123, "runs": 0}]);
    let answers =
        [heard(WatchSource::Groups, None, group), heard(WatchSource::Run(3), Some(run(1)), run(5))];
    let all = json(&answers);
    let one = &all["runs"][0];
    assert_eq!(
        (&one["pid"], &one["name"], &one["codec"]),
        (&json!(3), &json!("a\u{1b} b"), &json!("lz4"))
    );
    assert_eq!((&one["faults_per_second"], &one["ratio"]), (&json!(4.0), &Value::Null));
    assert_eq!(one["processes"][0]["resident_bytes"], 4096);
    assert_eq!(
        (&all["groups"][0]["name"], all["servers"].as_array().map(Vec::len)),
        (&json!("g"), Some(0))
    );
}
