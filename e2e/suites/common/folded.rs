//! Assertions for every program run under memfold: enough of its memory was folded, and no system
//! call failed because of folded memory.
use super::{Scratch, compile, json, managed_in};
use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::process::Output;

/// Asserts by a run's figures that at least `least_mib` were folded at once, and that no call
/// failed because of folded memory. `said` is memfold's log.
#[track_caller]
pub fn assert_figures(stats: &Value, said: &str, least_mib: u64) {
    let figure = |name: &str| stats[name].as_u64().unwrap_or_else(|| panic!("no {name}: {stats}"));
    let folded_mib = figure("peak_folded_bytes") >> 20;
    assert!(folded_mib >= least_mib, "{folded_mib} MiB folded at most, not {least_mib}: {said}");
    assert_eq!(figure("calls_refused"), 0, "{said}");
    assert!(!said.contains("because of folded memory"), "{said}");
    assert!(!said.contains("A second read found"), "{said}");
    println!("{folded_mib} MiB folded at most");
}

/// Runs a command to its end in a `world` of [`managed_in`], and checks its figures by
/// [`assert_figures`]. Returns its output and the figures.
#[track_caller]
pub fn folded_in(
    world: &str,
    flags: &[&str],
    least_mib: u64,
    command: &[&str],
) -> Option<(Output, Value)> {
    let scratch = open_scratch();
    let file = scratch.path("stats");
    let output = managed_in(world, &[flags, &["--stats-file", &file]].concat(), command)?;
    let errors = String::from_utf8_lossy(&output.stderr);
    let is_written = std::path::Path::new(&file).exists();
    assert!(is_written, "{command:?} has no figures: {}: {errors}", output.status);
    let stats = json(&file);
    println!("{command:?}: {}", errors.trim());
    assert_figures(&stats, &errors, least_mib);
    Some((output, stats))
}

/// Runs [`run_folded`] with a command that must succeed, and returns its stdout.
#[track_caller]
pub fn printed_in(
    world: &str,
    flags: &[&str],
    least_mib: u64,
    command: &[&str],
) -> Option<Vec<u8>> {
    let (output, _) = folded_in(world, flags, least_mib, command)?;
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}: {errors}", output.status);
    Some(output.stdout)
}

/// Returns a scratch directory that any user may use.
pub fn open_scratch() -> Scratch {
    let scratch = Scratch::new();
    std::fs::set_permissions(&scratch.0, std::fs::Permissions::from_mode(0o777)).unwrap();
    scratch
}

/// The unit of most sizes in the C programs: `UNIT` of their `common.h`.
const UNIT: u64 = 512 << 10;

/// Asserts that a C program finds every byte right in each of `promises`, with at least
/// `least_units` of [`UNIT`] folded.
#[track_caller]
pub fn assert_right(name: &str, least_units: u64, promises: &[&str]) {
    assert_right_in("", name, least_units, promises);
}

/// Asserts the same as [`assert_right`], for a run with these flags.
#[track_caller]
pub fn assert_right_with(flags: &[&str], name: &str, least_units: u64, promises: &[&str]) {
    assert_all_right("", flags, name, least_units, promises);
}

/// Asserts the same as [`assert_right`], in a `world` of [`managed_in`].
#[track_caller]
pub fn assert_right_in(world: &str, name: &str, least_units: u64, promises: &[&str]) {
    assert_all_right(world, &["--resident", "8M"], name, least_units, promises);
}

#[track_caller]
pub fn assert_all_right(
    world: &str,
    flags: &[&str],
    name: &str,
    least_units: u64,
    promises: &[&str],
) {
    let (program, least_mib) = (compile(name), (least_units * UNIT) >> 20);
    for promise in promises {
        let command = [program.path.as_str(), promise];
        let Some((output, _)) = folded_in(world, flags, least_mib, &command) else { return };
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{name} {promise}: {errors}");
        assert_eq!(output.stdout, b"right\n", "{name} {promise}: {errors}");
    }
    drop(program.scratch);
}
