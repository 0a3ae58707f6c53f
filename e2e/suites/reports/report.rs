//! `--summary`, `--stats-file`, and what the program sees of memfold.
use crate::common::{Holder, Scratch, binaries, compile, json, memfold, run};
use memfold_stats::{FIGURES, ORDER_FIGURES, size_suffix};
use serde_json::Value;

#[test]
fn the_stats_file_has_every_figure_and_the_facts_of_the_run() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let path = scratch.path("s.json");
    let output = run(&bin, &["--stats-file", &path], &["sh", "-c", "sleep 0.2; exit 3"]);
    assert_eq!((output.status.code(), output.stderr.len()), (Some(3), 0));
    let stats = json(&path);
    for figure in FIGURES {
        assert!(stats[figure.name].is_u64(), "{}", figure.name);
    }
    for figure in ORDER_FIGURES {
        for order in 0..10 {
            let name = format!("{}_{}", figure.name.trim_end_matches("_folio"), size_suffix(order));
            assert!(stats[&name].is_u64(), "{name}");
        }
    }
    assert_eq!(
        (&stats["exit_status"], &stats["limit_bytes"]),
        (&Value::from(3), &Value::from(64 << 20))
    );
    assert_eq!(stats["version"], env!("CARGO_PKG_VERSION"));
    assert!((0.2..30.0).contains(&stats["seconds"].as_f64().unwrap()));
    assert_eq!(std::fs::read_dir(&scratch.0).unwrap().count(), 1, "only the file itself is left");
}

#[test]
fn every_process_has_its_own_figures_also_after_a_crash() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let path = scratch.path("s.json");
    // The shell stays small, so it has no engine.
    let small = compile("small");
    let script = format!("ulimit -c 0; {0} ends; {0} crashes; {0} ends", small.path);
    let output = run(&bin, &["--stats-file", &path], &["sh", "-c", &script]);
    let mut pids_started: Vec<u64> =
        String::from_utf8(output.stdout).unwrap().lines().map(|l| l.parse().unwrap()).collect();
    let stats = json(&path);
    let processes = stats["processes"].as_array().unwrap();
    let mut pids_counted: Vec<u64> = processes.iter().map(|p| p["pid"].as_u64().unwrap()).collect();
    pids_started.sort_unstable();
    pids_counted.sort_unstable();
    assert_eq!(pids_counted, pids_started);
    assert!(processes.iter().all(|p| p["faults"].is_u64() && p["zswpout_64K"].is_u64()));
}

#[test]
fn more_processes_than_slots_are_no_trouble() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let path = scratch.path("s.json");
    let small = compile("small");
    let script = format!(
        "i=0; while [ $i -lt 100 ]; do {} ends || exit 1; i=$((i+1)); done; exit 4",
        small.path
    );
    let output = run(&bin, &["--summary", "--stats-file", &path], &["sh", "-c", &script]);
    assert_eq!(output.status.code(), Some(4));
    assert_eq!(json(&path)["processes"].as_array().unwrap().len(), 64);
    assert!(String::from_utf8_lossy(&output.stderr).contains("64 or more processes"));
}

#[test]
fn the_summary_is_on_stderr_and_only_when_asked_for() {
    let Some(bin) = binaries() else { return };
    let output = run(&bin, &["--summary"], &["echo", "hello"]);
    assert_eq!(output.stdout, b"hello\n");
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(
        text.lines().count() >= 1 && text.lines().all(|line| line.starts_with("memfold: ")),
        "{text}"
    );
    assert!(text.contains("all processes were small"), "{text}");
    assert!(run(&bin, &[], &["echo", "hello"]).stderr.is_empty());
}

#[test]
fn the_summary_of_a_failed_program_is_still_there() {
    let Some(bin) = binaries() else { return };
    let output = run(&bin, &["--summary"], &["sh", "-c", "kill -KILL $$"]);
    assert_eq!(output.status.code(), Some(137));
    assert!(String::from_utf8(output.stderr).unwrap().starts_with("memfold: "));
}

/// Fills 200 MiB with the data that the first argument names, and reads it twice.
const FILLED: &str = r#"
#include <stdlib.h>
#include <string.h>
int main(int count, char **words) {
    size_t len = 200u << 20;
    char *at = malloc(len);
    const char *what = count > 2 ? words[2] : "";
    for (size_t i = 0; i < len; i++) at[i] = *what ? what[i % strlen(what)] : 0;
    unsigned char sum = 0;
    for (int turn = 0; turn < 2; turn++)
        for (size_t i = 0; i < len; i += 4096) sum += at[i];
    return count > 1 ? atoi(words[1]) : sum == 77;
}"#;

/// The ratio of a single moment was anything from 1.6 to 52.
#[test]
fn equal_runs_have_equal_ratios() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let (program, path) = (scratch.compile("filled", FILLED, &["-O1"]), scratch.path("s.json"));
    for (what, least) in [("", 500.0), ("abc", 100.0)] {
        let ratio = || {
            let output = run(&bin, &["--stats-file", &path], &[&program, "0", what]);
            assert!(output.status.success(), "{output:?}");
            json(&path)["ratio"].as_f64().unwrap()
        };
        let (first, second) = (ratio(), ratio());
        assert!(first > least && (first - second).abs() < first / 20.0, "{first} {second}");
    }
}

/// The summary once printed the sum of their peaks.
#[test]
fn processes_that_follow_one_another_have_the_peak_of_one() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let (program, path) = (scratch.compile("filled", FILLED, &["-O1"]), scratch.path("s.json"));
    let script = format!("for i in 1 2 3 4; do {program} 0 abc; done");
    let output = run(&bin, &["--summary", "--stats-file", &path], &["sh", "-c", &script]);
    let stats = json(&path);
    let peak = stats["peak_bytes"].as_u64().unwrap();
    let own = stats["processes"].as_array().unwrap().iter();
    let own: Vec<u64> = own.map(|one| one["peak_bytes"].as_u64().unwrap()).collect();
    assert_eq!(own.len(), 4);
    let largest = *own.iter().max().unwrap();
    assert!((largest..largest * 3 / 2).contains(&peak), "{peak} of {own:?}");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!errors.contains("at most") && errors.contains("4 processes"), "{errors}");
}

#[test]
fn summary_claims_no_distance_for_dead_or_unmanaged_runs() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let program = scratch.compile("filled", FILLED, &["-O1"]);
    let cases: &[(&[&str], &str)] = &[
        (&["sh", "-c", "kill -SEGV $$"], "ended with status 139"),
        (&["sh", "-c", "exit 7"], "ended with status 7"),
        (&["env", "MEMFOLD_DISABLE=1", &program], "the largest process had 20"),
    ];
    for (command, words) in cases {
        let output = run(&bin, &["--summary"], command);
        let text = String::from_utf8_lossy(&output.stderr);
        let line = text.lines().last().unwrap();
        assert!(line.contains("nothing was folded") && line.contains(words), "{command:?}: {text}");
        assert!(!text.contains("never"), "{text}");
    }
}

#[test]
fn an_earlier_preload_is_kept_and_ours_comes_first() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let other = scratch.compile("other.so", "int other;", &["-shared", "-fPIC"]);
    let mut command = memfold(
        &bin,
        &["run", "--limit", "64M", "--", "sh", "-c", "echo $LD_PRELOAD; cat /proc/$$/maps"],
    );
    let text =
        String::from_utf8(command.env("LD_PRELOAD", &other).output().unwrap().stdout).unwrap();
    assert_eq!(text.lines().next().unwrap(), other, "the program sees its own alone");
    assert!(text.lines().skip(1).any(|l| l.ends_with("libmemfold_preload.so")));
    assert!(text.lines().skip(1).any(|l| l.ends_with("other.so")));
}

#[test]
fn disabled_it_does_nothing_in_the_program() {
    let Some(bin) = binaries() else { return };
    let mut command = memfold(
        &bin,
        &["run", "--limit", "64M", "--summary", "--", "sh", "-c", "echo ran; exit 2"],
    );
    let output = command.env("MEMFOLD_DISABLE", "1").output().unwrap();
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(2), b"ran\n".as_slice()));
    assert!(String::from_utf8_lossy(&output.stderr).contains("no process"));
}

#[test]
fn an_order_that_makes_no_sense_ends_the_process_with_a_message() {
    let Some(bin) = binaries() else { return };
    for order in ["limit=banana", "limit=1", "nonsense", "memory=1G;limit=512M;speed=9"] {
        let mut command = std::process::Command::new("/bin/echo");
        command
            .arg("ran")
            .env("LD_PRELOAD", bin.join("libmemfold_preload.so"))
            .env("MEMFOLD_RUN", order);
        let output = command.output().unwrap();
        assert_eq!((output.status.code(), output.stdout.len()), (Some(125), 0), "{order}");
        assert!(
            String::from_utf8_lossy(&output.stderr).starts_with("memfold: MEMFOLD_RUN: "),
            "{order}"
        );
    }
}

#[test]
fn a_program_without_an_order_is_left_alone() {
    let Some(bin) = binaries() else { return };
    let mut command = std::process::Command::new("/bin/echo");
    command
        .arg("ran")
        .env("LD_PRELOAD", bin.join("libmemfold_preload.so"))
        .env_remove("MEMFOLD_RUN");
    let output = command.output().unwrap();
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(0), b"ran\n".as_slice()));
    assert!(output.stderr.is_empty());
}

#[test]
fn figures_are_not_lost_where_memfold_is_gone() {
    let Some(bin) = binaries() else { return };
    // The path leads to no table. The process keeps its figures private and runs.
    for stats in ["/proc/999999999/fd/3", "/dev/null", "/etc/passwd", ""] {
        let mut command = std::process::Command::new("/bin/echo");
        command.arg("ran").env("LD_PRELOAD", bin.join("libmemfold_preload.so"));
        let output = command
            .env("MEMFOLD_RUN", format!("memory=1G;limit=512M;stats={stats}"))
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(
            (output.status.code(), output.stdout.as_slice()),
            (Some(0), b"ran\n".as_slice()),
            "{text}"
        );
    }
}

/// A program that goes through all of its memory again and again gains nothing from a larger limit
/// until that holds all of it.
#[test]
fn recommended_limit_holds_all_that_is_used() {
    let Some(bin) = binaries() else { return };
    let (program, scratch) = (compile("holder"), Scratch::new());
    let path = scratch.path("s.json");
    let flags = ["--limit", "64M", "--stats-file", &path];
    let mut holder = Holder::start(&bin, &scratch, &flags, &program.path, "96");
    (0..8).for_each(|_| holder.check());
    holder.end();
    let stats = json(&path);
    let limits = &stats["recommended_limits"];
    let mib = |percent: &str| limits[percent].as_u64().map_or(0, |bytes| bytes >> 20);
    assert!((90..=120).contains(&mib("2")), "{limits}");
    assert!(mib("50") <= mib("10") && mib("10") <= mib("2"), "{limits}");
}
