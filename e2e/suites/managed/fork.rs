//! Forks under `memfold run`: parent and child find the right bytes in folded memory.
use crate::common::{NOBODY, assert_right, assert_right_in, can_make_worlds};

#[test]
fn parent_and_child_of_fork_both_find_every_byte() {
    assert_right("children", 48, &["fork", "threads"]);
}

#[test]
fn a_copy_made_past_the_fork_handlers_never_reads_zeros() {
    assert_right("children", 48, &["copies"]);
}

#[test]
fn parent_sharing_pages_with_a_child_neither_spins_nor_fails() {
    assert_right("children", 48, &["long"]);
}

#[test]
fn generations_of_children_are_folded_and_find_every_byte() {
    assert_right("children", 48, &["generations", "loop"]);
}

#[test]
fn a_mapping_that_has_grown_is_one_in_parent_and_child() {
    assert_right("children", 48, &["grown"]);
}

#[test]
fn a_write_to_what_was_only_read_before_a_fork_is_not_lost() {
    assert_right("children", 48, &["reread"]);
}

#[test]
fn clone3_with_a_longer_struct_is_as_plainly() {
    assert_right("children", 48, &["later"]);
}

#[test]
fn a_daemon_that_closes_every_descriptor_stays_managed() {
    assert_right("children", 48, &["daemon", "close"]);
}

#[test]
fn without_privileges_copies_are_as_right() {
    if can_make_worlds() {
        assert_right_in(NOBODY, "children", 48, &["copies", "fork"]);
    }
}

#[test]
fn fork_amid_mapping_changes_gives_the_child_right_bytes() {
    assert_right("forks", 48, &["libc", "raw", "elsewhere", "spawn", "daemon"]);
}

#[test]
fn fork_with_threads_loads_nothing_and_child_is_managed() {
    assert_right("forks", 48, &["kept"]);
}

#[test]
fn libc_runs_in_a_child_before_any_handler_is_there() {
    assert_right("children", 48, &["libc"]);
}

#[test]
fn child_of_fork_inherits_no_held_lock() {
    assert_right("forklocks", 32, &["few_forks"]);
}

#[test]
#[ignore = "a variant: make test-all"]
fn each_of_many_children_of_fork_inherits_no_held_lock() {
    assert_right("forklocks", 32, &["forks"]);
}

#[test]
fn child_made_amid_an_execution_takes_its_faults() {
    assert_right("forklocks", 20, &["ignored"]);
}

#[test]
fn child_of_vfork_goes_on_when_its_parent_ends() {
    assert_right("orphans", 20, &["mapping", "mapping-later", "executing"]);
}

#[test]
fn orphan_of_vfork_finds_folded_memory_right_or_ends() {
    assert_right("orphans", 20, &["reading", "touching"]);
}

#[test]
fn orphan_of_vfork_takes_signals() {
    assert_right("orphans", 20, &["terminated"]);
}

#[test]
fn children_end_if_their_parent_ends_while_it_spawns() {
    assert_right("orphans", 20, &["spawning"]);
}
