//! Programs without a limit keep in memory what they use.
use crate::common::compile;
use crate::common::folded::{assert_right_with, folded_in};

#[test]
fn b6_what_a_working_program_does_not_use_is_folded() {
    // A debug build takes long to fold, which counts.
    assert_right_with(&["--slowdown", "50%"], "unbounded", 40, &["used"]);
}

#[test]
fn b6_an_idle_program_keeps_next_to_nothing() {
    assert_right_with(&["--idle", "1"], "unbounded", 70, &["idle", "changes"]);
}

/// They once came back as small pages, and the program was slower for good.
#[test]
fn b6_huge_pages_of_an_idle_program_come_back() {
    let program = compile("unbounded");
    let figures_found = folded_in("", &["--idle", "1"], 0, &[&program.path, "huge"]);
    let Some((output, stats)) = figures_found else { return };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let figure = |name: &str| stats[name].as_u64().unwrap();
    // The kernel may make no huge pages at first.
    assert!(figure("peak_folded_bytes") == 0 || figure("huge_pages") > 0);
    drop(program.scratch);
}

#[test]
fn b6_below_a_limit_memory_sinks_too() {
    assert_right_with(
        &["--limit", "100M", "--slowdown", "5%", "--idle", "1"],
        "unbounded",
        70,
        &["idle"],
    );
}

/// Runs a promise that must not count as idle.
fn assert_not_idle(promise: &str) {
    let program = compile("unbounded");
    let figures_found = folded_in("", &["--idle", "2"], 0, &[&program.path, promise]);
    let Some((output, stats)) = figures_found else { return };
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"right\n"[..]), "{errors}");
    assert_eq!(stats["idle_ns"].as_u64(), Some(0), "{errors}");
    drop(program.scratch);
}

/// It once was folded all over every few seconds, because it took less than 5% of a CPU.
#[test]
fn b6_starved_program_is_not_idle() {
    assert_not_idle("starved");
}

#[test]
fn b6_program_that_works_a_little_all_the_time_is_not_idle() {
    assert_not_idle("limited");
}
