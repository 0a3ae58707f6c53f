//! `memfold explain`: why the memory of a run is not folded.
use crate::common::{Holder, Scratch, binaries, compile, memfold};
use serde_json::Value;
use std::path::Path;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

fn explain(bin: &Path, scratch: &Scratch, arguments: &[&str]) -> String {
    let mut command = memfold(bin, &[&["explain"], arguments].concat());
    let output = command.env("XDG_RUNTIME_DIR", &scratch.0).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn as_json(bin: &Path, scratch: &Scratch, pid: u32) -> Value {
    serde_json::from_str(&explain(bin, scratch, &["--json", &pid.to_string()])).unwrap()
}

fn bytes(about: &Value, reason: &str) -> u64 {
    let rows = about["reasons"].as_array().unwrap();
    let row = rows.iter().find(|row| row["reason"] == reason);
    row.map_or(0, |row| row["bytes"].as_u64().unwrap())
}

/// Returns the first answer that is as wanted.
#[track_caller]
fn wait_for(bin: &Path, scratch: &Scratch, pid: u32, wanted: impl Fn(&Value) -> bool) -> Value {
    let begin = Instant::now();
    loop {
        let about = as_json(bin, scratch, pid);
        if wanted(&about) {
            return about;
        }
        assert!(begin.elapsed() < Duration::from_secs(60), "{about:#}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn explained_percent(about: &Value) -> u64 {
    let [explained_bytes, resident] =
        ["explained_bytes", "resident_bytes"].map(|name| about[name].as_u64().unwrap());
    explained_bytes * 100 / resident
}

#[test]
fn memory_of_every_kind_is_explained() {
    let Some(bin) = binaries() else { return };
    let (program, scratch) = (compile("explained"), Scratch::new());
    let file = scratch.file("file", vec![7; 10 * MIB as usize], 0o644);
    let holder = Holder::start(&bin, &scratch, &["--limit", "64M"], &program.path, &file);
    let has_all =
        |about: &Value| bytes(about, "incompressible") >= 8 * MIB && explained_percent(about) >= 95;
    let about = wait_for(&bin, &scratch, holder.pid, has_all);
    for (reason, least, most) in [
        ("incompressible", 8, 17),
        ("locked", 4, 5),
        ("files", 10, 16),
        ("shared_memory", 6, 7),
        ("pool", 0, 64),
        ("other_unmanaged", 0, 4),
    ] {
        let mib = bytes(&about, reason) as f64 / MIB as f64;
        assert!(
            (f64::from(least)..f64::from(most)).contains(&mib),
            "{reason}: {mib} MiB, {about:#}"
        );
    }
    let rows = about["reasons"].as_array().unwrap();
    let sizes: Vec<u64> = rows.iter().map(|row| row["bytes"].as_u64().unwrap()).collect();
    assert!(sizes.is_sorted_by(|one, other| one >= other), "the largest comes first: {about:#}");
    let is_outside = |row: &&Value| row["counts"] == false;
    assert_eq!(rows.iter().filter(is_outside).count(), 2, "files and shared memory");
    // The kernel's own figure of all resident memory.
    let status = std::fs::read_to_string(format!("/proc/{}/status", holder.pid)).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let resident = line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10;
    let known = about["resident_bytes"].as_u64().unwrap();
    assert!(known.abs_diff(resident) < resident / 20, "{known} of {resident}");
    // Of the whole run, it is the only process.
    let run = as_json(&bin, &scratch, holder.runner.id());
    assert_eq!(run["processes"], serde_json::json!([holder.pid]));
    let text = explain(&bin, &scratch, &[&holder.pid.to_string()]);
    for words in [
        "does not compress\n            to do: --swap DIR",
        "locked in memory (mlock)",
        "mapped pages of files (not counted)",
        "slowdown ",
        "% of it explained",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    holder.end();
}

#[test]
fn memory_below_the_limit_and_of_small_processes_is_explained() {
    let Some(bin) = binaries() else { return };
    let (program, scratch) = (compile("holder"), Scratch::new());
    let holder = Holder::start(&bin, &scratch, &["--limit", "256M"], &program.path, "48");
    let is_known = |about: &Value| bytes(about, "not_managed_yet") >= 48 * MIB;
    let about = wait_for(&bin, &scratch, holder.pid, is_known);
    assert!(explained_percent(&about) >= 95, "{about:#}");
    holder.end();
    scratch.file("small", "#!/bin/sh\necho ready $$\nread line || true\n", 0o755);
    let script = scratch.path("small");
    let holder = Holder::start(&bin, &scratch, &["--limit", "256M"], &script, "");
    let about = as_json(&bin, &scratch, holder.pid);
    assert!(bytes(&about, "no_engine") > 0 && explained_percent(&about) == 100, "{about:#}");
    let run = explain(&bin, &scratch, &[&holder.runner.id().to_string()]);
    assert!(run.contains("limit 256.0 MiB") && run.contains("slowdown -"), "{run}");
    holder.end();
}

#[test]
fn explain_names_the_limits_that_cost_less() {
    let Some(bin) = binaries() else { return };
    let (program, scratch) = (compile("holder"), Scratch::new());
    let mut holder = Holder::start(&bin, &scratch, &["--limit", "48M"], &program.path, "96");
    let begin = Instant::now();
    loop {
        holder.check();
        let about = as_json(&bin, &scratch, holder.pid);
        if about["recommended_limits"]["2"].as_u64() > Some(48 * MIB) {
            assert!(
                about["loads"].as_u64() > Some(0) && about["slowdown_percent"].as_f64() > Some(2.0)
            );
            break;
        }
        assert!(begin.elapsed() < Duration::from_secs(60), "{about:#}");
    }
    let text = explain(&bin, &scratch, &[&holder.pid.to_string()]);
    assert!(text.contains("limits of the run for a smaller slowdown"), "{text}");
    assert!(text.contains("folded: "), "{text}");
    holder.end();
}
