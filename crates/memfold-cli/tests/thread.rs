//! Programs whose faults are served by handler threads (`--delivery thread`), as where the gate
//! can't be had: every byte stays right, with all that a program may do to its memory.
mod common;
use common::assert_all_right;

const THREAD: &[&str] = &["--delivery", "thread", "--resident", "16M"];

#[track_caller]
fn assert_right(name: &str, least_mib: u64, promises: &[&str]) {
    assert_all_right("", THREAD, name, least_mib, promises);
}

#[test]
fn a_heap_that_grows_and_shrinks_stays_right() {
    assert_right("heap", 32, &["brk", "realloc", "fast"]);
}

#[test]
fn a_write_that_keeps_a_pages_public_hash_is_not_lost() {
    assert_right("pair", 48, &["pair"]);
}

#[test]
fn changes_of_the_address_space_are_followed() {
    let changes =
        ["munmap_middle", "map_fixed_over", "mremap_move", "mremap_grow", "mremap_shrink"];
    assert_right("mappings", 40, &changes);
}

#[test]
fn advice_on_folded_memory_does_what_the_kernel_says() {
    assert_right("mappings", 40, &["dontneed", "free", "advice", "guards", "read_only", "sparse"]);
}

#[test]
fn memory_given_up_with_madv_free_is_as_it_was_or_zeros_and_stays_written() {
    let ways = ["before", "past_libc", "by_libc", "by_number", "by_process", "refused"];
    assert_right("freed", 24, &ways);
}

#[test]
fn system_calls_work_on_folded_buffers() {
    assert_right("calls", 64, &["all"]);
}

/// The gate refuses these, as what is submitted is read and written at any time.
#[test]
fn asynchronous_io_finds_and_leaves_the_right_bytes() {
    assert_right("devices", 32, &["aio", "uring", "pinned"]);
}

#[test]
fn pages_lent_to_a_pipe_or_a_socket_never_change() {
    assert_right("devices", 32, &["splice", "zerocopy"]);
}

#[test]
fn threads_that_discard_unmap_and_remap_at_once_find_their_own_bytes() {
    assert_right("threads", 16, &["slots", "shared", "churn"]);
}

#[test]
fn what_a_program_serves_by_a_userfaultfd_of_its_own_stays_its_own() {
    assert_right("userfault", 16, &["before", "after", "by_number"]);
}

#[test]
fn marked_memory_leaves_management_and_comes_back() {
    assert_right("marks", 32, &["locks", "lock_all", "dump", "forks", "wipe", "threads"]);
}

#[test]
fn parent_and_child_of_fork_both_find_every_byte() {
    assert_right("children", 48, &["fork", "threads", "copies", "long", "generations", "grown"]);
}

#[test]
fn a_daemon_that_closes_every_descriptor_stays_managed() {
    assert_right("children", 48, &["daemon", "close", "libc", "spawn", "exec"]);
}

#[test]
fn a_fork_while_other_threads_change_mappings_gives_the_child_right_bytes() {
    assert_right("forks", 48, &["libc", "raw", "elsewhere", "kept"]);
}

#[test]
fn signal_handlers_touch_folded_memory_and_jump_out_of_it() {
    assert_right("signals", 48, &["alarms", "jumps", "forks"]);
}

#[test]
fn a_debugger_never_reads_a_wrong_byte_and_locks_in_folded_memory_work() {
    assert_right("observers", 32, &["debugger", "other_process", "futexes"]);
}
