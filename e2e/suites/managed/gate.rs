//! The gate serves faults for every user, without any privilege. Where it is unavailable, `memfold
//! run` refuses or takes another paging.
#![cfg(target_arch = "x86_64")]
use crate::common::{
    Program, Scratch, UNPRIVILEGED, assert_all_right, assert_refused, binaries, can_make_worlds,
    compile, folded_in, json, managed_in, memfold, open_scratch, printed_in, run,
};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

const FLAGS: &[&str] = &["--resident", "8M"];

#[track_caller]
fn assert_right(name: &str, least_units: u64, promises: &[&str]) {
    assert_all_right("", FLAGS, name, least_units, promises);
}

#[test]
fn without_any_privilege_everything_is_as_right() {
    if !can_make_worlds() {
        return;
    }
    for (name, least_units, promises) in [
        ("heap", 32, &["brk"][..]),
        ("mappings", 40, &["mremap_move", "dontneed"]),
        ("threads", 16, &["slots"]),
        ("calls", 64, &["all"]),
        ("children", 48, &["fork", "spawn"]),
        ("forks", 48, &["few_libc"]),
        ("signals", 48, &["alarms"]),
        ("rlimits", 40, &["as", "data", "nofile"]),
    ] {
        assert_all_right(UNPRIVILEGED, FLAGS, name, least_units, promises);
    }
}

#[test]
fn without_any_privilege_a_swap_file_takes_what_does_not_shrink() {
    if !can_make_worlds() {
        return;
    }
    let (swap, program) = (open_scratch(), compile("copied"));
    let flags = [FLAGS, &["--swap-keep-free", "64M", "--swap", swap.0.to_str().unwrap()]].concat();
    for promise in ["both", "execs"] {
        let command = [program.path.as_str(), promise];
        let Some((output, figures)) = folded_in(UNPRIVILEGED, &flags, 11, &command) else { return };
        assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"right\n"[..]));
        assert!(figures["pswpout"].as_u64() > Some(10 << 8), "{promise}: {figures}");
    }
}

/// Each child of `posix_spawn` asks for the actions of all signals before it executes its program.
#[test]
fn spawned_children_and_their_parent_keep_their_signals() {
    let program = compile("spawned");
    let command = [program.path.as_str()];
    let Some((output, _)) = folded_in("", FLAGS, 32, &command) else { return };
    let baseline = Command::new(command[0]).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert_eq!(text(&output.stdout), text(&baseline.stdout));
    assert!(output.stdout.ends_with(b"right\n"), "{output:?}");
}

#[test]
fn small_process_is_folded_when_it_grows() {
    let ways = ["break", "steps", "mremap", "reservation", "thread", "fork", "shared"];
    assert_right("small", 16, &ways);
    if can_make_worlds() {
        assert_right("small", 16, &["rights"]);
    }
}

#[test]
fn processes_that_stay_small_have_no_engine() {
    let Some(bin) = binaries() else { return };
    let small = compile("small");
    let path = small.scratch.path("s.json");
    let script = format!("/bin/true; (exit 3); ls / | cat >/dev/null; {} fork", small.path);
    let output = run(&bin, &["--resident", "16M", "--stats-file", &path], &["sh", "-c", &script]);
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(0), &b"right\n"[..]));
    let stats = json(&path);
    let processes = stats["processes"].as_array().unwrap();
    assert_eq!(processes.len(), 2);
    assert!(processes.iter().all(|one| one["pgmajfault"].as_u64() > Some(0)));
}

#[test]
fn program_that_counts_its_threads_sees_its_own() {
    let Some(bin) = binaries() else { return };
    let program = compile("zygote");
    let words = ["run", "--limit", "500M", "--", &program.path, "small"];
    let output = memfold(&bin, &words).output().unwrap();
    assert_eq!(output.stdout, b"right\n", "{output:?}");
    assert_right("zygote", 32, &["folds", "namespaces"]);
    let swap = program.scratch.path("");
    let words = ["run", "--limit", "16M", "--swap", &swap, "--", &program.path, "folds"];
    let output = memfold(&bin, &words).output().unwrap();
    assert_eq!(output.stdout, b"right\n", "{output:?}");
}

#[test]
fn program_in_a_user_namespace_is_right() {
    if !can_make_worlds() {
        return;
    }
    let heap = compile("heap");
    if let Some(bwrap) = crate::common::real::installed("bwrap") {
        // Two namespaces. `unshare` makes the second after the privileges were dropped.
        let words = ["--bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--unshare-pid"];
        let command = [&[bwrap.as_str()], &words[..], &[&heap.path, "fast"]].concat();
        let Some(output) = printed_in(UNPRIVILEGED, FLAGS, 48, &command) else { return };
        assert_eq!(output, b"right\n");
    }
    for launcher in [&["unshare", "-Ur"][..], &["unshare", "-rmpf"]] {
        let command = [launcher, &[heap.path.as_str(), "fast"]].concat();
        let Some(output) = printed_in("", FLAGS, 48, &command) else { return };
        assert_eq!(output, b"right\n", "{launcher:?}");
    }
}

/// Static data isn't folded, but counts against the limit.
#[test]
fn a_program_with_much_static_data_has_an_engine_from_its_start() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let source = "static char data[64 << 20]; int main(void) { data[5] = 1; return data[6]; }";
    let (program, path) = (scratch.compile("static", source, &[]), scratch.path("s.json"));
    let output = run(&bin, &["--stats-file", &path], &[&program]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(json(&path)["processes"].as_array().unwrap().len(), 1);
}

/// Asserts that a command, run unprivileged under memfold, is folded and prints the same as without
/// memfold.
#[track_caller]
fn assert_same(resident: &str, least_mib: u64, command: &[&str]) {
    let flags = ["--resident", resident];
    let Some(output) = printed_in(UNPRIVILEGED, &flags, least_mib, command) else { return };
    let baseline = Command::new(command[0]).args(&command[1..]).output().unwrap();
    assert!(baseline.status.success() && output == baseline.stdout, "{command:?}");
}

#[test]
fn unprivileged_programs_print_the_same_as_without_memfold() {
    if !can_make_worlds() {
        return;
    }
    let scratch = Scratch::new();
    let script = |name: &str| {
        let text = std::fs::read(format!("{}/programs/{name}.py", env!("CARGO_MANIFEST_DIR")));
        scratch.file(name, text.unwrap(), 0o644)
    };
    // An interpreter that other users may execute too.
    assert_same("16M", 12, &["/usr/bin/python3", &script("database")]);
    assert_same("20M", 64, &["/usr/bin/python3", &script("processes")]);
    let lines: String = (0..600_000u64).map(|n| format!("{}\n", n * 7_919 % 600_011)).collect();
    let file = scratch.file("lines", &lines, 0o644);
    assert_same("16M", 12, &["/usr/bin/sort", "-n", "-S", "200M", &file]);
}

/// Returns the words that start `program` under a filter that removes a kernel feature.
fn lacking(what: &str, program: &Program) -> String {
    format!("exec {} {what} \"$@\"", program.path)
}

/// Linux 5.14 to 6.7: the engine copies pages, and reads /proc's maps and pagemap.
#[test]
fn simulated_older_kernel_runs_right_and_unprivileged() {
    if !can_make_worlds() {
        return;
    }
    let lacks = compile("lacking");
    fs::set_permissions(&lacks.scratch.0, fs::Permissions::from_mode(0o755)).unwrap();
    let world = UNPRIVILEGED.replace("/mnt/memfold", &format!("{} moves /mnt/memfold", lacks.path));
    assert_ne!(world, UNPRIVILEGED);
    assert_all_right(&lacking("moves", &lacks), FLAGS, "forks", 48, &["few_libc"]);
    for (name, least_units, promises) in [
        ("heap", 32, &["fast", "brk"][..]),
        ("mappings", 40, &["mremap_move", "dontneed"]),
        ("calls", 48, &["all"]),
        ("forks", 48, &["few_raw"]),
        ("small", 32, &["reservation"]),
        ("copied", 20, &["both"]),
        ("hard", 48, &["five"]),
    ] {
        assert_all_right(&world, FLAGS, name, least_units, promises);
    }
    let Some(output) = managed_in(&world, FLAGS, &["/bin/true"]) else { return };
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!text.contains("warning"), "{text}");
}

/// No userfaultfd, as in Docker's default profile without the device: page protection reports
/// touches of folded pages.
#[test]
fn run_without_userfaultfd_is_right_and_unprivileged() {
    assert_right_without_userfaultfd(&[
        ("heap", 32, &["brk"]),
        ("mappings", 40, &["mremap_move", "dontneed", "sealed"]),
        ("calls", 48, &["all"]),
        ("children", 48, &["fork"]),
        ("forks", 48, &["few_libc"]),
        ("small", 16, &["break", "mremap", "reservation", "fork"]),
        ("hard", 48, &["five", "handler", "crash"]),
        ("kinds", 32, &["faults"]),
        // Its 11 processes are not all folded at the same time on a busy machine.
        ("apart", 240, &["marked"]),
        // A child that may not open /proc/self/mem loads all its memory.
        ("shut", 32, &["dumpable_memory"]),
    ]);
}

#[test]
#[ignore = "a variant: make test-all"]
fn other_programs_are_right_without_userfaultfd() {
    assert_right_without_userfaultfd(&[
        ("mappings", 40, &["mremap_grow"]),
        ("threads", 16, &["slots"]),
        ("forks", 48, &["libc"]),
        ("hard", 48, &["robust", "coroutines"]),
        ("kinds", 32, &["stacks"]),
    ]);
}

/// Runs programs, each with its least units and its promises.
#[track_caller]
fn assert_right_without_userfaultfd(programs: &[(&str, u64, &[&str])]) {
    if !can_make_worlds() {
        return;
    }
    let filter = compile("container");
    fs::set_permissions(&filter.scratch.0, fs::Permissions::from_mode(0o755)).unwrap();
    let world = UNPRIVILEGED.replace("/mnt/memfold", &format!("{} 1 /mnt/memfold", filter.path));
    assert_ne!(world, UNPRIVILEGED);
    let Some(output) = managed_in(&world, FLAGS, &["/bin/true"]) else { return };
    let text = String::from_utf8_lossy(&output.stderr);
    let by_guards = "userfaultfd is unavailable, so memory is paged by guard pages";
    assert!(text.contains(by_guards) || memfold_os::probe::guards().is_err(), "{text}");
    let by_choice: [&[&str]; 2] = [&[], &["--paging", "protection"]];
    for chosen in by_choice {
        let flags = [FLAGS, chosen].concat();
        for (name, least_units, promises) in programs {
            assert_all_right(&world, &flags, name, *least_units, promises);
        }
    }
}

#[test]
fn lent_pages_are_copied_where_a_pipe_knows_no_nowait() {
    if can_make_worlds() {
        let (lacks, flags) = (compile("lacking"), FLAGS);
        let promises = ["splice", "splice:bare", "splice_waits", "splice_waits:bare"];
        assert_all_right(&lacking("nowait", &lacks), flags, "devices", 32, &promises);
    }
}

#[test]
fn a_run_without_the_gate_is_refused_with_reason_and_remedy() {
    if !can_make_worlds() {
        return;
    }
    let lacks = compile("lacking");
    fs::set_permissions(&lacks.scratch.0, fs::Permissions::from_mode(0o755)).unwrap();
    let unprivileged =
        UNPRIVILEGED.replace("/mnt/memfold", &format!("{} dispatch /mnt/memfold", lacks.path));
    assert_ne!(unprivileged, UNPRIVILEGED);
    for world in [lacking("dispatch", &lacks), unprivileged] {
        for flags in [FLAGS, &[FLAGS, &["--paging", "protection"]].concat()] {
            let Some(output) = managed_in(&world, flags, &["/bin/true"]) else { return };
            assert_refused(&output, 125, &["Syscall User Dispatch", "sandbox", "Linux 5.11"]);
        }
    }
}

#[test]
fn a_child_without_the_gate_runs_unmanaged_with_one_line() {
    let Some(bin) = binaries() else { return };
    let (lacks, heap) = (compile("lacking"), compile("heap"));
    let output = run(&bin, FLAGS, &[&lacks.path, "dispatch", &heap.path, "fast"]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"right\n"[..]), "{text}");
    // The filter has ended the gate of the process that sets it.
    let is_about_filter = |line: &&str| line.contains("A seccomp filter of the program refuses");
    assert_eq!(text.lines().filter(is_about_filter).count(), 1, "{text}");
}

/// A child of fork needs no /proc, no privilege and no free descriptor. Without a userfaultfd it
/// loads all its memory.
#[test]
fn sandboxed_processes_fork_with_every_byte_right() {
    if !can_make_worlds() {
        return;
    }
    assert_right("shut", 32, &["setuid", "proc", "descriptors", "filter", "filter_huge"]);
    assert_all_right(UNPRIVILEGED, FLAGS, "shut", 32, &["dumpable"]);
}

/// The message once was `/proc/self/mem: os error 13`.
#[test]
fn unmanaged_child_after_setuid_says_why_and_what_to_do() {
    if !can_make_worlds() {
        return;
    }
    let program = compile("shut");
    let flags = ["--resident", "8M", "--paging", "protection"];
    let Some(output) = managed_in("", &flags, &[&program.path, "setuid_memory"]) else { return };
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"right\n"[..]), "{text}");
    let line = text.lines().find(|line| line.contains("runs unmanaged")).expect("a warning");
    let parts = ["in a child of fork", "has changed its user", "call prctl(PR_SET_DUMPABLE, 1)"];
    assert!(parts.iter().all(|part| line.contains(part)), "{line}");
}

#[test]
#[ignore = "a variant: make test-all"]
fn processes_in_other_sandboxes_fork_with_every_byte_right() {
    if !can_make_worlds() {
        return;
    }
    assert_right("shut", 32, &["root", "small", "filter_root", "filter_small"]);
    assert_all_right(UNPRIVILEGED, FLAGS, "shut", 32, &["descriptors"]);
}

/// MADV_DONTFORK memory is folded like any other, and absent in a child of fork.
#[test]
fn memory_that_is_not_for_children_is_folded_and_gone_in_them() {
    assert_right("apart", 128, &["marked", "parts", "moved", "racing"]);
}

/// V8 marks its heap with MADV_DONTFORK, so most of the folded memory of such a program is marked.
#[test]
fn the_heap_of_node_is_folded() {
    let script = "const all = [];
        for (let i = 0; i < 500000; i++) all.push({ id: i, name: 'n' + i, list: [i, i + 1] });
        let sum = 0;
        for (const each of all) sum += each.id + each.list[1] + each.name.length;
        console.log(sum);";
    let Some(node) = crate::common::real::installed("node") else { return };
    let command = [node.as_str(), "-e", script];
    let Some(output) = printed_in("", &["--resident", "48M"], 32, &command) else { return };
    let baseline = Command::new(command[0]).args(&command[1..]).output().unwrap();
    assert!(baseline.status.success());
    assert_eq!(output, baseline.stdout);
}

#[test]
fn hard_cases_below_a_program_are_right() {
    assert_right("hard", 48, &["five", "robust", "affinity"]);
    assert_right("hard", 48, &["ends", "spawns"]);
    assert_right("hard", 48, &["crowd", "constructor"]);
    assert_right("hard", 48, &["handler", "filter", "coroutines", "crash", "undo", "registers"]);
}

#[test]
fn signals_arrive_on_folded_memory_and_leave_no_holds() {
    assert_right("kinds", 32, &["stacks", "blocked", "leave", "cancel", "faults"]);
}

#[test]
#[ignore = "some hundred signals, at moments of luck"]
fn every_signal_is_handled_on_coroutine_stacks() {
    assert_right("kinds", 32, &["coroutines"]);
}

/// Runs a program that makes calls on buffers of 64 MiB with 16 MiB resident. Returns the run's
/// figures.
fn large(promise: &str) -> Option<serde_json::Value> {
    let program = compile("large");
    let (output, stats) = folded_in("", &["--resident", "16M"], 44, &[&program.path, promise])?;
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{promise}: {text}");
    assert_eq!(output.stdout, b"right\n", "{promise}: {text}");
    Some(stats)
}

/// Calls made in pieces return what one call returns, and keep little in memory.
#[test]
fn calls_on_huge_buffers_act_as_one_call_within_the_limit() {
    for promise in ["files", "offset", "pipes", "sockets", "signals", "readers", "untouched"] {
        let Some(stats) = large(promise) else { return };
        let [held_bytes, resident] = ["peak_held_bytes", "peak_resident_bytes"]
            .map(|name| stats[name].as_u64().expect("a figure"));
        println!("{promise}: {held_bytes} bytes held at most, {resident} in memory");
        // When a hundred threads wait for input, each holds one piece. A call that can't be made in
        // pieces (MSG_WAITALL) holds its whole buffer.
        let whole = if promise == "sockets" { 64 << 20 } else { 0 };
        assert!(
            held_bytes > 0 && held_bytes < (10 << 20) + whole,
            "{promise}: {held_bytes} bytes held"
        );
        assert!(resident < (40 << 20) + whole, "{promise}: {resident} bytes in memory");
    }
}

/// A call that can't be made in pieces is held whole, past the limit, with a warning.
#[test]
fn messages_and_appended_writes_are_made_by_one_call() {
    let Some(stats) = large("messages") else { return };
    assert!(stats["peak_held_bytes"].as_u64() >= Some(24 << 20), "{stats}");
    assert!(stats["over_limit"].as_u64() > Some(0), "{stats}");
}

/// Many waiting calls with scattered parts hold only the pages that they name.
#[test]
fn calls_hold_exactly_what_they_name() {
    let ways = ["threads", "thousands", "discarded", "gaps", "spread", "environment"];
    assert_right("held", 24, &ways);
    assert_right("held", 24, &["gaps:bare", "spread:bare", "closed", "closed:bare", "beside"]);
}

/// Asserts that two thousand waiting threads of a runtime leave the folded memory within the limit.
#[track_caller]
fn assert_threads_leave_room(limit: &str, command: &[&str]) {
    let flags = ["--resident", limit];
    let Some((output, stats)) = folded_in("", &flags, 32, command) else { return };
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.stdout, b"right\n", "{command:?}: {errors}");
    let resident = stats["peak_resident_bytes"].as_u64().expect("a figure") >> 20;
    assert!(resident < 400, "{command:?}: {resident} MiB in memory: {errors}");
}

#[test]
fn two_thousand_waiting_threads_leave_room_for_eviction() {
    let Some(python) = crate::common::real::python("threading") else { return };
    let script = "
import os, threading
threading.stack_size(64 << 10)
end, write = os.pipe()
started = threading.Semaphore(0)
def wait():
    started.release()
    assert os.read(end, 1) == b'x'
threads = [threading.Thread(target=wait) for _ in range(2000)]
for thread in threads: thread.start()
for _ in threads: started.acquire()
rows = [bytes([n % 251]) * 4096 for n in range(65536)]
assert all(row == bytes([n % 251]) * 4096 for n, row in enumerate(rows))
os.write(write, b'x' * len(threads))
for thread in threads: thread.join()
print('right')
";
    assert_threads_leave_room("96M", &[&python, "-c", script]);
}

#[test]
#[ignore = "a variant: make test-all"]
fn two_thousand_waiting_threads_of_java_leave_room_for_eviction() {
    let Some(java) = crate::common::real::installed("java") else { return };
    let (scratch, source) = (open_scratch(), include_str!("../../programs/Waiting.java"));
    let path = scratch.path("Waiting.java");
    fs::write(&path, source).unwrap();
    assert_threads_leave_room("320M", &[&java, "-Xss256k", "-Xmx600m", "-XX:+UseSerialGC", &path]);
}

/// A waiting call may need another thread to map memory first.
#[test]
fn thread_that_fills_memory_for_a_waiting_call_maps_its_own() {
    assert_right("held", 24, &["filled", "filled:bare"]);
}

#[test]
fn killed_writer_leaves_the_offset_where_it_has_written_to() {
    assert_right("held", 24, &["killed", "killed:bare"]);
}

/// The process may be inside any call when it is killed.
#[test]
fn killed_child_of_vfork_leaves_no_lock_taken() {
    assert_right("held", 24, &["children"]);
    assert_right("victims", 32, &VICTIMS);
}

const VICTIMS: [&str; 13] = [
    "advice", "held", "locks", "files", "segments", "protects", "executes", "gives", "early",
    "earlier", "traced", "copies", "robust",
];

#[test]
#[ignore = "thousands of children for each call: make torture"]
fn thousands_of_killed_children_of_vfork_leave_no_lock_taken() {
    let long = VICTIMS.map(|each| format!("{each}:long"));
    assert_right("victims", 32, &long.each_ref().map(String::as_str));
}

#[test]
fn socket_that_waits_for_much_gives_it_by_one_call() {
    assert_right("held", 24, &["low_water", "low_water:bare"]);
}

/// The gate uses SIGBUS, SIGSEGV and SIGSYS. A program may use them too.
#[test]
fn signals_of_the_gate_that_are_sent_arrive_as_any_other() {
    let all = ["sigwaits", "sigsuspends", "signalfds", "threads", "stay", "executed"];
    assert_right("sent", 32, &all);
}

#[test]
fn signal_that_a_thread_makes_up_for_itself_is_no_fault() {
    assert_right("sent", 32, &["made_up"]);
}

#[test]
fn process_ends_when_a_filter_has_killed_its_last_thread() {
    assert_right("denied", 32, &["killed"]);
}

#[test]
fn folded_memory_is_read_under_a_filter_that_refuses_nearly_all() {
    assert_right("denied", 32, &["refused"]);
}

/// Sandboxes of browsers set such filters. Each filter refuses a call of memfold and none of the
/// program.
#[test]
fn program_goes_on_when_its_filter_refuses_memfolds_calls() {
    assert_right("sandboxed", 8, &["alone", "one_of_many"]);
}

#[test]
fn all_threads_go_on_when_their_filter_refuses_memfolds_calls() {
    assert_right("sandboxed", 8, &["all"]);
}

#[test]
fn executed_program_goes_on_when_its_filter_refuses_memfolds_calls() {
    assert_right("sandboxed", 8, &["executed"]);
}

#[test]
fn hidden_program_goes_on_when_its_filter_refuses_calls() {
    let flags = &["--resident", "8M", "--paging", "protection"];
    assert_all_right("", flags, "sandboxed", 8, &["first_rule"]);
}

/// Each filter refuses in each way, for one thread and for all.
#[test]
#[ignore = "a variant: make test-all"]
fn programs_go_on_when_every_filter_refuses_calls() {
    for paging in ["userfaultfd", "protection"] {
        let flags = &["--resident", "8M", "--paging", paging];
        assert_all_right("", flags, "sandboxed", 8, &["every_rule"]);
    }
}

#[test]
fn thread_without_the_processors_counter_is_served() {
    assert_right("denied", 32, &["counter"]);
}

#[test]
fn process_that_may_start_no_thread_is_served() {
    assert_right("denied", 32, &["spaces"]);
}

/// As without memfold, the program gets the same SIGSYS for each dispatched call, the same errors
/// for wrong arguments, and the same exit statuses of its processes.
#[test]
fn program_dispatches_its_own_system_calls_as_without_memfold() {
    let Some(bin) = binaries() else { return };
    let program = compile("dispatching");
    let promises = ["info", "libc_sites", "ranges", "inclusive", "arguments", "ends", "toggled"];
    for promise in promises.into_iter().chain(["threads", "inherited", "beside_signals"]) {
        let baseline = Command::new(&program.path).arg(promise).output().unwrap();
        assert!(baseline.status.success() && baseline.stdout.ends_with(b"right\n"), "{baseline:?}");
        for flags in [FLAGS, &["--resident", "8M", "--paging", "protection"]] {
            let output = run(&bin, flags, &[&program.path, promise]);
            assert_eq!(output.status.code(), Some(0), "{promise}: {output:?}");
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            assert_eq!(text(&output.stdout), text(&baseline.stdout), "{promise}");
        }
    }
}

#[test]
fn patched_sites_of_the_program_change_nothing_else() {
    assert_right("sites", 8, &["reads", "opens"]);
}

#[test]
fn dispatched_system_calls_take_folded_buffers() {
    assert_right("dispatching", 32, &["folded"]);
    let flags = &["--resident", "8M", "--paging", "protection"];
    assert_all_right("", flags, "dispatching", 32, &["folded"]);
}

#[test]
fn process_in_strict_seccomp_goes_on_and_ends() {
    assert_right("sent", 32, &["strict"]);
}

/// Limits of about half of the memory of all ranks, with both pagings.
const RANKS: [&[&str]; 2] = [&["--limit", "20M"], &["--limit", "20M", "--paging", "protection"]];

#[track_caller]
fn assert_ranks_right(promises: &[&str]) {
    RANKS.iter().for_each(|flags| assert_all_right("", flags, "ranks", 16, promises));
}

#[test]
fn ranks_read_and_write_folded_memory_of_each_other() {
    assert_ranks_right(&["two", "threads"]);
    assert_all_right("", RANKS[0], "ranks", 16, &["four", "small"]);
    if can_make_worlds() {
        assert_all_right("", RANKS[0], "ranks", 16, &["inside"]);
        assert_all_right(UNPRIVILEGED, RANKS[0], "ranks", 16, &["two"]);
    }
}

#[test]
#[ignore = "a variant: make test-all"]
fn hidden_ranks_read_and_write_folded_memory_of_each_other() {
    assert_all_right("", RANKS[1], "ranks", 16, &["four", "small", "killed"]);
    if can_make_worlds() {
        assert_all_right("", RANKS[1], "ranks", 16, &["inside"]);
    }
}

#[test]
fn transfers_between_ranks_end_where_the_kernel_ends_them() {
    assert_ranks_right(&["short"]);
}

#[test]
fn ranks_outlive_those_that_are_killed_in_transfers() {
    assert_all_right("", RANKS[0], "ranks", 16, &["killed"]);
}

#[test]
fn rank_does_not_wait_for_one_that_is_stopped() {
    assert_ranks_right(&["stopped"]);
}
