//! Programs under `memfold run`, with several times the memory that they may have: every byte stays
//! right.
//!
//! The C programs fill memory with a pattern that identifies each page, wait until it is folded,
//! exercise it, and verify all of it. The Python programs must print the same as without memfold.
use crate::common::real::{copied, plainly, python};
use crate::common::{Scratch, assert_right, assert_right_with, compile, folded_in, printed_in};
use crate::common::{binaries, json, memfold};

/// Asserts that a Python program prints the same under memfold as without.
#[track_caller]
fn assert_same(name: &str, resident: &str, least_mib: u64) {
    let (Some(python), scratch) = (python("sqlite3"), Scratch::new()) else { return };
    let script = copied(&scratch, &format!("{name}.py"));
    let flags = ["--resident", resident];
    let Some(output) = printed_in("", &flags, least_mib, &[&python, &script]) else { return };
    let baseline = plainly(&[&python, &script]);
    assert_eq!(String::from_utf8_lossy(&output), String::from_utf8_lossy(&baseline));
}

#[test]
fn a_heap_that_grows_and_shrinks_stays_right() {
    assert_right("heap", 32, &["brk", "realloc", "fast"]);
}

/// An attacker who chooses a page's bytes can give it the same public hash as its stored copy.
#[test]
fn a_write_that_keeps_a_pages_public_hash_is_not_lost() {
    for block in ["4K", "16K", "64K"] {
        assert_right_with(&["--resident", "8M", "--block", block], "pair", 48, &["pair"]);
    }
}

#[test]
fn unmapped_or_replaced_parts_vanish_and_the_rest_stays() {
    assert_right("mappings", 40, &["munmap_middle", "map_fixed_over"]);
}

#[test]
fn mremap_moves_grows_and_shrinks_folded_memory() {
    assert_right("mappings", 40, &["mremap_move", "mremap_grow", "mremap_shrink", "mremap_reread"]);
    assert_right("mappings", 40, &["mremap_leaves", "mremap_leaves:bare", "mremap_grow:bare"]);
}

#[test]
fn advice_on_folded_memory_does_what_the_kernel_says() {
    assert_right("mappings", 40, &["dontneed", "free", "advice", "guards", "guards_stay"]);
    for paging in ["guard", "protection"] {
        let flags = ["--resident", "8M", "--paging", paging];
        assert_right_with(&flags, "mappings", 20, &["guards", "guards_stay"]);
    }
}

/// Covers pages that the kernel has already dropped, and memory given up before it was managed, or
/// by a call that memfold doesn't see.
/// The kernel handles one mapping after the other, and stops at the first one that it refuses.
#[test]
fn calls_on_several_mappings_do_what_the_kernel_does_of_them() {
    let all = ["mremap_several", "mremap_half", "advised", "locked"];
    assert_right("mappings", 20, &all);
    for paging in ["guard", "protection"] {
        assert_right_with(&["--resident", "8M", "--paging", paging], "mappings", 0, &all);
    }
}

/// Flags for each way to find touches of folded memory.
const PAGINGS: [&[&str]; 3] = [
    &["--resident", "8M"],
    &["--resident", "8M", "--paging", "guard"],
    &["--resident", "8M", "--paging", "protection"],
];
/// A userfaultfd, and pages are copied.
const COPIES: [&str; 4] = ["--resident", "8M", "--move", "off"];

/// Where memory is hidden, a range of several mappings was once hidden whole. Then the kernel took it
/// for one, and moved or lengthened what it refuses, and read-only and shared memory became
/// private and writable. Before a gap, the process ended.
#[test]
fn mremap_of_several_mappings_does_as_without_memfold() {
    let program = compile("remaps");
    let baseline = plainly(&[&program.path]);
    let baseline = String::from_utf8_lossy(&baseline);
    // Before Linux 6.17 the kernel moves one mapping only. The gate moves them all.
    let moves_several = baseline.lines().any(|line| line.starts_with("wrw 0 24->24 3 to : target"));
    let is_move = |line: &str| line.contains("->24 3 ") || line.contains("->16 3 ");
    for way in PAGINGS {
        let Some(output) = printed_in("", way, 4, &[&program.path]) else { return };
        let text = String::from_utf8_lossy(&output);
        assert_eq!(text.lines().count(), baseline.lines().count());
        for (line_plain, line_managed) in baseline.lines().zip(text.lines()) {
            assert!(
                line_plain == line_managed || !moves_several && is_move(line_plain),
                "{way:?}\n{line_plain}\n{line_managed}"
            );
        }
    }
}

#[test]
fn moved_memory_is_right_for_other_threads_at_every_moment() {
    for way in PAGINGS {
        assert_right_with(way, "touched", 16, &["moved_in", "moved_out"]);
    }
    assert_right_with(&COPIES, "touched", 16, &["moved_in", "moved_out"]);
}

#[test]
fn writes_to_replaced_or_discarded_memory_are_never_lost() {
    for way in PAGINGS {
        assert_right_with(way, "touched", 16, &["replaced", "discarded"]);
    }
    assert_right_with(&COPIES, "touched", 16, &["replaced", "discarded"]);
}

#[test]
fn calls_beside_used_memory_leave_it_as_it_is() {
    for way in PAGINGS {
        assert_right_with(way, "touched", 16, &BESIDE);
    }
}

const BESIDE: [&str; 5] = ["shrunk", "grown", "refused", "protected", "advised"];

#[test]
#[ignore = "a variant: make test-all"]
fn calls_beside_used_memory_leave_it_as_it_is_where_pages_are_copied() {
    assert_right_with(&COPIES, "touched", 16, &BESIDE);
    assert_right_with(&COPIES, "touched", 0, &["too_many_mappings", "guarded", "grows_by_steps"]);
}

#[test]
fn program_goes_on_at_the_limit_of_mappings() {
    for way in PAGINGS {
        assert_right_with(way, "touched", 0, &["too_many_mappings"]);
    }
}

#[test]
fn guards_stay_while_the_pages_around_them_are_loaded() {
    for way in PAGINGS {
        assert_right_with(way, "touched", 0, &["guarded"]);
    }
}

#[test]
fn small_growth_of_a_large_buffer_costs_what_it_adds() {
    for way in PAGINGS {
        assert_right_with(way, "touched", 0, &["grows_by_steps"]);
    }
}

#[test]
fn madv_free_memory_is_intact_or_zero_and_keeps_writes() {
    assert_right("freed", 24, &["before", "past_libc", "by_libc", "by_number", "by_process"]);
}

#[test]
fn memory_that_madv_free_refuses_is_kept() {
    assert_right("freed", 24, &["refused"]);
}

#[test]
fn memory_that_becomes_read_only_or_inaccessible_comes_back() {
    assert_right("mappings", 40, &["read_only", "sealed"]);
}

#[test]
fn memory_of_the_programs_own_userfaultfd_stays_its_own() {
    assert_right("userfault", 16, &["before", "after", "by_number", "before:bare", "after:bare"]);
    let others = ["signals", "protects", "sources", "misplaced", "signals:bare", "sources:bare"];
    assert_right("userfault", 16, &others);
    assert_right("userfault", 4, &["streamed"]);
    assert_right_with(&["--resident", "8M", "--paging", "guard"], "userfault", 4, &["streamed"]);
}

/// A fork, or a call that changes mappings, blocks in the kernel until a thread of the program has
/// read the event. That thread may need folded memory first.
#[test]
fn thread_that_reads_what_becomes_of_memory_waits_for_nobody() {
    let kinds = ["forks", "changes", "mixed"];
    assert_right("events", 32, &kinds);
    for paging in ["guard", "protection"] {
        assert_right_with(&["--paging", paging, "--resident", "8M"], "events", 32, &kinds);
    }
}

#[test]
fn limits_that_a_program_sets_itself_are_its_own() {
    assert_right("rlimits", 40, &["as", "data", "nofile"]);
}

/// Sanitizer runtimes interpose many functions of libc, and use thread-local variables.
#[test]
fn programs_with_a_sanitizer_run() {
    let Some(bin) = binaries() else { return };
    let source =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/programs/sanitized.c"));
    for sanitizer in ["thread", "address", "undefined"] {
        let (scratch, flag) = (Scratch::new(), format!("-fsanitize={sanitizer}"));
        let program = scratch.compile("sanitized", source.as_ref().unwrap(), &["-pthread", &flag]);
        let path = scratch.path("s.json");
        let words = ["run", "--limit", "48M", "--stats-file", &path, "--", &program];
        // gcc's runtime insists on being the first library.
        let mut command = memfold(&bin, &words);
        let output = command.env("ASAN_OPTIONS", "verify_asan_link_order=0").output().unwrap();
        assert_eq!(output.stdout, b"right\n", "{sanitizer}: {output:?}");
        assert!(json(&path)["processes"][0]["pgmajfault"].as_u64() > Some(0), "{sanitizer}");
    }
}

#[test]
fn sparse_memory_stays_right() {
    assert_right("mappings", 40, &["sparse"]);
}

/// Near the limit a part of a block is loaded by UFFDIO_COPY, which refuses a range that crosses a
/// border of two kernel areas.
#[test]
fn memory_with_borders_in_the_middle_of_blocks_is_loaded() {
    for limit in ["12M", "16M", "24M"] {
        assert_right_with(&["--limit", limit], "border", 16, &["32"]);
    }
}

/// The gate sees the system calls of such functions. With MEMFOLD_DISABLE=1 there is no gate.
#[test]
fn program_with_own_libc_functions_runs_managed_and_disabled() {
    assert_right("own_calls", 32, &["folded"]);
    let Some(bin) = binaries() else { return };
    let program = compile("own_calls");
    let mut without_engine =
        memfold(&bin, &["run", "--limit", "100M", "--", &program.path, "plain"]);
    let output = without_engine.env("MEMFOLD_DISABLE", "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && output.stdout == b"right\n", "{text}");
    assert!(text.is_empty(), "{text}");
}

#[test]
fn concurrent_discard_unmap_and_remap_keep_own_bytes() {
    assert_right("threads", 16, &["slots"]);
}

#[test]
fn threads_that_share_folded_memory_find_what_others_wrote() {
    assert_right("threads", 16, &["shared"]);
}

#[test]
fn process_ends_with_the_last_thread_of_the_program() {
    assert_right("threads", 16, &["ends"]);
}

#[test]
fn threads_that_come_and_go_keep_their_stacks() {
    assert_right("threads", 16, &["churn"]);
}

#[test]
fn system_calls_work_on_folded_buffers() {
    assert_right("calls", 64, &["all"]);
}

#[test]
fn a_folded_program_starts_other_programs() {
    assert_right("children", 48, &["spawn", "exec"]);
}

#[test]
fn signal_handlers_touch_folded_memory_and_jump_out_of_it() {
    assert_right("signals", 48, &["alarms", "jumps", "forks"]);
}

#[test]
fn the_end_of_a_folded_program_is_passed_on() {
    let program = compile("signals");
    for (arguments, status) in [(&["exit", "42"][..], 42), (&["crash"], 139), (&["abort"], 134)] {
        let command = [&[program.path.as_str()], arguments].concat();
        let flags = ["--resident", "8M"];
        let Some((output, _)) = folded_in("", &flags, 24, &command) else { return };
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{errors}");
    }
    drop(program.scratch);
}

#[test]
fn python_objects_stay_right() {
    assert_same("objects", "40M", 40);
}

#[test]
fn a_python_database_in_memory_stays_right() {
    assert_same("database", "16M", 12);
}

#[test]
fn python_processes_stay_right() {
    assert_same("processes", "20M", 64);
}
