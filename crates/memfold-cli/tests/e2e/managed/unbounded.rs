//! Programs without a limit keep in memory what they use.
use crate::common::folded::assert_right_with;

#[test]
fn b6_what_a_working_program_does_not_use_is_folded() {
    // A debug build takes long to fold, which counts.
    assert_right_with(&["--slowdown", "50%"], "unbounded", 40, &["used"]);
}

#[test]
fn b6_an_idle_program_keeps_next_to_nothing() {
    assert_right_with(&["--idle", "1"], "unbounded", 70, &["idle", "changes"]);
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
