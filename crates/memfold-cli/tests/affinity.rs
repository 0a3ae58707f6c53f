//! Threads that `memfold run` keeps on one CPU for a while: nobody may see it who doesn't look from
//! outside.
mod common;
use common::{
    assert_right, assert_right_in, assert_right_with, can_make_worlds, compile_go, managed,
};

#[test]
fn nothing_that_a_kept_thread_starts_or_asks_for_shows_it() {
    assert_right("affinity", &["all", "executed-by"]);
}

#[test]
fn nothing_that_one_of_several_kept_threads_starts_or_asks_for_shows_it() {
    assert_right("affinity", &["several"]);
}

/// As in a container: root, but not allowed to deal with other users' threads.
#[test]
fn a_thread_that_becomes_another_user_is_let_go_before() {
    const NO_NICE: &str = r#"exec setpriv --bounding-set -sys_nice --inh-caps -sys_nice -- "$@""#;
    if can_make_worlds() {
        assert_right_in(NO_NICE, "affinity", &["user"]);
        assert_right_in(NO_NICE, "affinity", &["user-syscall"]);
    }
}

#[test]
fn affinity_that_a_kept_thread_sets_stays() {
    assert_right("affinity", &["set"]);
}

#[test]
fn no_thread_is_kept_if_that_is_off() {
    assert_right_with(&["--resident", "16M", "--keep-cpu", "off"], "affinity", &["never"]);
}

/// Go makes threads and processes by system calls of its own, which nobody can let a thread go
/// before.
#[test]
fn threads_of_a_go_program_are_never_kept() {
    let Some(program) = compile_go("affinity") else { return };
    let Some(output) = managed("16M", &[&program.path]) else { return };
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.stdout, b"right\n", "{text}");
    assert!(text.contains("major"), "{text}");
}
