//! Those who use a program's folded memory past its own loads and stores: devices, other processes, locks in the kernel.
//! And memory that the program marks as never to be folded.
mod common;
use common::assert_right;

#[test]
fn direct_and_asynchronous_io_find_and_leave_the_right_bytes() {
    assert_right("devices", &["direct", "aio"]);
}

#[test]
fn io_uring_finds_and_leaves_the_right_bytes() {
    assert_right("devices", &["uring"]);
}

#[test]
fn pages_that_a_device_has_pinned_are_never_parted_from_the_program() {
    assert_right("devices", &["pinned"]);
}

#[test]
fn pages_lent_to_a_pipe_or_a_socket_never_change() {
    assert_right("devices", &["splice", "zerocopy"]);
}

#[test]
fn another_process_reads_and_writes_folded_memory() {
    assert_right("observers", &["other_process"]);
}

#[test]
fn a_debugger_never_reads_a_wrong_byte() {
    assert_right("observers", &["debugger"]);
}

#[test]
fn locks_and_futexes_work_in_folded_memory() {
    assert_right("observers", &["futexes"]);
}

#[test]
fn a_program_that_is_stopped_and_continued_stays_right() {
    assert_right("observers", &["stopped"]);
}

#[test]
fn locked_memory_comes_home_and_stays() {
    assert_right("marks", &["locks", "lock_all"]);
}

#[test]
fn memory_kept_from_core_dumps_is_never_folded_again() {
    assert_right("marks", &["dump"]);
}

#[test]
fn memory_kept_from_children_is_theirs_as_the_kernel_says() {
    assert_right("marks", &["forks", "wipe"]);
}

#[test]
fn marks_come_and_go_while_threads_use_the_memory() {
    assert_right("marks", &["threads"]);
}
