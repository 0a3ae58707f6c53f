//! Processes that copy themselves under `memfold run`: what parent and child find in folded memory.
mod common;
use common::{
    NOBODY, Scratch, assert_right, assert_right_in, assert_right_with, can_make_worlds, compile,
    managed_in,
};

#[test]
fn parent_and_child_of_fork_both_find_every_byte() {
    assert_right("children", 48, &["fork", "threads"]);
}

#[test]
fn a_copy_made_past_the_fork_handlers_never_reads_zeros() {
    assert_right("children", 48, &["copies"]);
}

#[test]
fn a_parent_that_shares_its_pages_with_a_child_neither_spins_nor_goes_wrong() {
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
fn a_fork_while_other_threads_change_mappings_gives_the_child_right_bytes() {
    assert_right("forks", 48, &["libc", "raw", "elsewhere", "spawn", "daemon"]);
}

#[test]
fn a_fork_of_several_threads_brings_nothing_home_and_its_child_is_managed() {
    assert_right("forks", 48, &["kept"]);
}

#[test]
fn what_libc_touches_in_a_child_before_any_handler_is_there() {
    assert_right("children", 48, &["libc"]);
}

#[test]
fn by_handler_threads_a_fork_with_a_swap_file_brings_all_home() {
    let swap = Scratch::new();
    let flags = ["--delivery", "thread", "--resident", "16M", "--swap", swap.0.to_str().unwrap()];
    assert_right_with(&flags, "children", 48, &["fork", "threads", "libc", "grown"]);
}

#[test]
fn a_fork_that_lacks_the_memory_is_refused() {
    if !can_make_worlds() {
        return;
    }
    let (program, scratch) = (compile("children"), Scratch::new());
    let meminfo = scratch.file("meminfo", "MemTotal: 8388608 kB\nMemAvailable: 1024 kB\n", 0o644);
    let world = format!("mount --bind {meminfo} /proc/meminfo && exec \"$@\"");
    let swap = scratch.0.to_str().unwrap();
    let flags = ["--delivery", "thread", "--resident", "16M", "--swap", swap];
    let Some(output) = managed_in(&world, &flags, &[&program.path, "threads"]) else { return };
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(125), "{text}");
    assert!(
        output.stdout.is_empty() && text.contains("fork() needs all memory back in place"),
        "{text}"
    );
    assert!(text.contains("the machine has 1.0 MiB left"), "{text}");
}
