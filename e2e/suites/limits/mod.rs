//! The limit, and how the processes of a run share it.
mod groups;
mod limit;
mod lowered;
mod many;
mod overcommit;
mod overshoot;
mod sharing;
mod sleeping;
mod sparse;
mod users;

use crate::common::{binaries, memfold};
use std::fs;
use std::path::Path;
use std::process::{Output, Stdio};
use std::time::Duration;

/// Returns the peak memory of all processes of a run in MiB, and the run's output. `command` is a
/// program that executes no other one.
fn peak_of(flags: &[&str], command: &[&str]) -> Option<(f64, Output)> {
    let bin = binaries()?;
    let arguments = [&["run"], flags, &["--"], command].concat();
    let mut run = memfold(&bin, &arguments);
    run.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut run = run.spawn().unwrap();
    let mut peak = 0;
    while run.try_wait().unwrap().is_none() {
        peak = peak.max(anonymous_kib(command[0]));
        std::thread::sleep(Duration::from_millis(10));
    }
    Some((peak as f64 / 1024.0, run.wait_with_output().unwrap()))
}

/// Returns the anonymous memory of all processes of a program, in KiB. Shared pages count once.
fn anonymous_kib(program: &str) -> u64 {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let of = |entry: fs::DirEntry| {
        let is_its = fs::read_link(entry.path().join("exe")).ok()? == Path::new(program);
        let rollup =
            is_its.then(|| fs::read_to_string(entry.path().join("smaps_rollup")).ok())??;
        let line = rollup.lines().find_map(|line| line.strip_prefix("Pss_Anon:"))?;
        line.trim().trim_end_matches(" kB").parse::<u64>().ok()
    };
    entries.filter_map(of).sum()
}
