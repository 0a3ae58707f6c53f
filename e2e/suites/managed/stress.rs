//! Every stressor of stress-ng that passes plainly also passes under `memfold run`, in little
//! memory. It takes half an hour: `make torture`. STRESSORS="vm mmap" runs only these.
use crate::common::real::installed;
use crate::common::{binaries, json, managed_in, open_scratch, unprivileged};
use std::process::{Command, Output};

/// The stressors that are not run, and why.
const LEFT_OUT: &[(&str, &str)] = &[("aiol", "io_setup fails with ENOSYS: docs/limits.md")];

/// Runs without any privilege, because some stressors can end a machine as root.
fn stressor(name: &str, directory: &str) -> Vec<String> {
    let option = format!("--{name}");
    let words = [&option, "1", "-t", "1", "--verify", "--oomable", "--temp-path", directory];
    words.map(String::from).into()
}

/// Returns whether the stressor ran and passed. A stressor that can't run prints "skipped" or "No
/// stress workers".
fn passes(output: &Output) -> bool {
    let text = String::from_utf8_lossy(&output.stderr) + String::from_utf8_lossy(&output.stdout);
    output.status.success() && !text.contains("skipp") && !text.contains("No stress workers")
}

/// Returns what is wrong with a stressor under memfold.
fn wrong_managed(stress: &str, arguments: &[String]) -> Option<String> {
    let scratch = open_scratch();
    let figures = scratch.path("figures");
    let words = arguments.iter().map(String::as_str);
    let command: Vec<&str> = [stress].into_iter().chain(words).collect();
    let flags = ["--limit", "8M", "--stats-file", &figures];
    let output = managed_in(unprivileged(), &flags, &command)?;
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    if !output.status.success() || errors.contains("because of folded memory") {
        return Some(format!("{}: {errors}", output.status));
    }
    let refusals = json(&figures)["calls_refused"].as_u64();
    (refusals != Some(0)).then(|| format!("{refusals:?} calls failed: {errors}"))
}

#[test]
#[ignore = "half an hour"]
fn every_stressor_that_passes_plainly_passes_in_little_memory() {
    let (Some(stress), Some(_)) = (installed("stress-ng"), binaries()) else { return };
    let output = Command::new(&stress).arg("--stressors").output().unwrap();
    let choice = std::env::var("STRESSORS");
    let all = choice.unwrap_or_else(|_| String::from_utf8(output.stdout).unwrap());
    let (mut failures, mut pass_count, mut plainly) = (Vec::new(), 0, Vec::new());
    for name in all.split_whitespace() {
        if LEFT_OUT.iter().any(|(other, _)| *other == name) {
            continue;
        }
        let scratch = open_scratch();
        let arguments = stressor(name, scratch.0.to_str().unwrap());
        let mut command = Command::new("setpriv");
        command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "--inh-caps=-all"]);
        command.args(["--bounding-set=-all", "--no-new-privs", &stress]).args(&arguments);
        if !passes(&command.current_dir("/").output().unwrap()) {
            plainly.push(name);
            continue;
        }
        match wrong_managed(&stress, &arguments) {
            None => pass_count += 1,
            Some(said) => failures.push(format!("{name}: {said}")),
        }
    }
    println!("{pass_count} pass; plainly don't: {plainly:?}");
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
