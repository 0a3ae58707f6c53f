//! Programs whose system calls pass the gate (`--delivery gate`): every byte stays right, with all
//! that a program may do to its memory, and without any privilege.
#![cfg(target_arch = "x86_64")]
mod common;
use common::{
    Scratch, UNPRIVILEGED, assert_all_right, binaries, can_make_worlds, compile, managed_in,
    memfold,
};
use std::process::Command;

const GATE: &[&str] = &["--delivery", "gate", "--resident", "16M"];

#[track_caller]
fn assert_right(name: &str, promises: &[&str]) {
    assert_all_right("", GATE, name, promises);
}

#[test]
fn a_heap_that_grows_and_shrinks_stays_right() {
    assert_right("heap", &["brk", "realloc", "fast"]);
}

#[test]
fn a_write_that_keeps_a_pages_public_hash_is_not_lost() {
    assert_right("pair", &["pair"]);
}

#[test]
fn changes_of_the_address_space_are_followed() {
    let changes =
        ["munmap_middle", "map_fixed_over", "mremap_move", "mremap_grow", "mremap_shrink"];
    assert_right("mappings", &changes);
}

#[test]
fn advice_on_folded_memory_does_what_the_kernel_says() {
    assert_right("mappings", &["dontneed", "free", "advice", "guards", "read_only", "sparse"]);
}

#[test]
fn memory_given_up_with_madv_free_is_as_it_was_or_zeros_and_stays_written() {
    let ways = ["before", "past_libc", "by_libc", "by_number", "by_process", "refused"];
    assert_right("freed", &ways);
}

#[test]
fn system_calls_work_on_folded_buffers() {
    assert_right("calls", &["all"]);
}

/// Each thread finds its own bytes while others discard, unmap and remap: what mremap moves to the
/// side of another's memory does not end its registration.
#[test]
fn threads_that_discard_unmap_and_remap_at_once_find_their_own_bytes() {
    for _ in 0..3 {
        assert_right("threads", &["slots"]);
    }
    assert_right("threads", &["shared", "churn"]);
}

#[test]
fn what_a_program_serves_by_a_userfaultfd_of_its_own_stays_its_own() {
    assert_right("userfault", &["before", "after", "by_number"]);
}

#[test]
fn marked_memory_leaves_management_and_comes_back() {
    assert_right("marks", &["locks", "lock_all", "dump", "forks", "wipe", "threads"]);
}

#[test]
fn parent_and_child_of_fork_both_find_every_byte() {
    assert_right(
        "children",
        &["fork", "threads", "copies", "long", "generations", "loop", "grown"],
    );
}

#[test]
fn a_write_to_what_was_only_read_is_not_lost_by_a_fork_or_a_move() {
    assert_right("children", &["reread"]);
    assert_right("mappings", &["mremap_reread"]);
}

#[test]
fn a_daemon_that_closes_every_descriptor_stays_managed() {
    assert_right("children", &["daemon", "close", "libc", "spawn", "exec"]);
}

#[test]
fn a_fork_while_other_threads_change_mappings_gives_the_child_right_bytes() {
    assert_right("forks", &["libc", "raw", "elsewhere", "spawn", "daemon", "kept"]);
}

#[test]
fn signal_handlers_touch_folded_memory_and_jump_out_of_it() {
    assert_right("signals", &["alarms", "jumps", "forks"]);
}

#[test]
fn without_any_privilege_everything_is_as_right() {
    if !can_make_worlds() {
        return;
    }
    for (name, promises) in [
        ("heap", &["brk"][..]),
        ("mappings", &["mremap_move", "dontneed"]),
        ("threads", &["slots"]),
        ("calls", &["all"]),
        ("children", &["fork", "spawn"]),
        ("forks", &["libc"]),
        ("signals", &["alarms"]),
    ] {
        assert_all_right(UNPRIVILEGED, GATE, name, promises);
    }
}

/// Thread delivery can't be had there, so the world is one without privileges.
#[test]
fn the_world_without_privileges_is_one() {
    if !can_make_worlds() {
        return;
    }
    let flags = ["--delivery", "thread", "--resident", "16M"];
    let Some(output) = managed_in(UNPRIVILEGED, &flags, &["/bin/true"]) else { return };
    assert_eq!(output.status.code(), Some(125), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Asserts that a command prints under the gate what it prints without, and was folded.
#[track_caller]
fn assert_same(resident: &str, command: &[&str]) {
    let flags = ["--delivery", "gate", "--resident", resident];
    let Some(output) = managed_in("", &flags, command) else { return };
    let plain = Command::new(command[0]).args(&command[1..]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(plain.status.success() && output.status.success(), "{command:?}: {text}");
    assert!(output.stdout == plain.stdout, "{command:?}: {text}");
    assert!(text.contains("major"), "{command:?} was never folded: {text}");
    println!("{command:?}: {}", text.trim());
}

#[test]
fn real_programs_print_what_they_print_without() {
    let question = "import sys; print(sys.executable)";
    let answer = Command::new("python3").args(["-c", question]).output().unwrap();
    let python = String::from_utf8(answer.stdout).unwrap().trim().to_string();
    let script = |name: &str| format!("{}/tests/programs/{name}.py", env!("CARGO_MANIFEST_DIR"));
    assert_same("40M", &[&python, &script("objects")]);
    assert_same("16M", &[&python, &script("database")]);
    assert_same("20M", &[&python, &script("processes")]);
    let scratch = Scratch::new();
    let lines: String = (0..600_000u64).map(|n| format!("{}\n", n * 7_919 % 600_011)).collect();
    let file = scratch.file("lines", &lines, 0o644);
    assert_same("16M", &["sort", "-n", "-S", "200M", &file]);
}

/// A child of fork needs no /proc, no privilege and no free descriptor; without a userfaultfd it has
/// everything back.
#[test]
fn processes_that_have_shut_themselves_in_fork_with_every_byte_right() {
    if !can_make_worlds() {
        return;
    }
    assert_right("shut", &["setuid", "root", "proc", "small", "descriptors"]);
    assert_right("shut", &["filter", "filter_root", "filter_small"]);
    assert_all_right(UNPRIVILEGED, GATE, "shut", &["dumpable", "descriptors"]);
}

/// It is folded like any other memory, and gone in a child of fork.
#[test]
fn memory_that_is_not_for_children_is_folded_and_gone_in_them() {
    assert_right("apart", &["marked", "parts", "moved", "racing"]);
}

/// V8 marks its heap so: most of what is folded of such a program is that.
#[test]
fn the_heap_of_node_is_folded() {
    let script = "const all = [];
        for (let i = 0; i < 500000; i++) all.push({ id: i, name: 'n' + i, list: [i, i + 1] });
        let sum = 0;
        for (const each of all) sum += each.id + each.list[1] + each.name.length;
        console.log(sum);";
    if Command::new("node").arg("--version").output().is_err() {
        eprintln!("SKIPPED: node is not installed");
        return;
    }
    let scratch = Scratch::new();
    let file = scratch.path("stats");
    let flags = ["--delivery", "gate", "--resident", "48M", "--stats-file", &file];
    let command = ["node", "-e", script];
    let Some(output) = managed_in("", &flags, &command) else { return };
    let plain = Command::new(command[0]).args(&command[1..]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(plain.status.success() && output.status.success(), "{text}");
    assert_eq!(output.stdout, plain.stdout, "{text}");
    let folded = common::json(&file)["peak_folded_bytes"].as_u64().expect("a figure");
    println!("{folded} bytes folded at most: {}", text.trim());
    assert!(folded > 32 << 20, "{folded} bytes folded: {text}");
}

#[test]
fn what_is_hard_to_get_right_below_a_program_is_right() {
    assert_right("hard", &["five", "robust", "crowd", "constructor"]);
    assert_right("hard", &["handler", "filter", "coroutines", "crash"]);
}

/// Runs a program of calls on buffers of 256 MiB in 16 MiB; gives the run's figures.
fn large(promise: &str) -> Option<serde_json::Value> {
    let (program, scratch) = (compile("large"), Scratch::new());
    let file = scratch.path("stats");
    let flags = [GATE, &["--stats-file", &file]].concat();
    let output = managed_in("", &flags, &[&program.path, promise])?;
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{promise}: {text}");
    assert_eq!(output.stdout, b"right\n", "{promise}: {text}");
    assert!(!text.contains("met folded memory"), "{promise}: {text}");
    Some(common::json(&file))
}

/// Calls that may be made in pieces give what one call gives, and little is in memory meanwhile.
#[test]
fn calls_on_buffers_far_larger_than_the_limit_are_as_one_call_within_it() {
    for promise in ["files", "offset", "pipes", "sockets", "signals", "readers"] {
        let Some(stats) = large(promise) else { return };
        let [held, resident] = ["peak_held_bytes", "peak_resident_bytes"]
            .map(|name| stats[name].as_u64().expect("a figure"));
        println!("{promise}: {held} bytes held at most, {resident} in memory");
        // All that waits for input at once is a piece for each of a hundred threads; one call that
        // must be whole names a buffer of it all (MSG_WAITALL).
        let whole = if promise == "sockets" { 256 << 20 } else { 0 };
        assert!(held > 0 && held < (10 << 20) + whole, "{promise}: {held} bytes held");
        assert!(resident < (40 << 20) + whole, "{promise}: {resident} bytes in memory");
    }
}

/// What must be one call is held whole, past the limit, which is said.
#[test]
fn messages_and_appended_writes_are_made_by_one_call() {
    let Some(stats) = large("messages") else { return };
    assert!(stats["peak_held_bytes"].as_u64() >= Some(24 << 20), "{stats}");
    assert!(stats["over_limit"].as_u64() > Some(0), "{stats}");
}

#[test]
fn the_gate_refuses_a_swap_file_with_one_line() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let swap = scratch.0.to_str().unwrap();
    let flags = ["run", "--limit", "64M", "--delivery", "gate", "--swap", swap, "--", "true"];
    common::assert_refused(&memfold(&bin, &flags).output().unwrap(), 125, &["--swap", "gate"]);
}
