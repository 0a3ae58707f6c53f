//! Processes of a run that become another user: they go on, and can do nothing to those that don't.
mod common;
use common::{assert_right, assert_right_with, can_make_worlds};

/// One that wrote a smaller limit ended its parent.
#[test]
fn process_that_has_given_up_its_rights_spoils_nothing_for_others() {
    if can_make_worlds() {
        assert_right_with(&["--limit", "64M", "--on-full", "stop"], "users", 8, &["spoils"]);
    }
}

#[test]
fn engine_gives_up_what_the_program_gives_up_for_good() {
    if can_make_worlds() {
        assert_right("users", 32, &["threads", "while", "vfork"]);
    }
}
