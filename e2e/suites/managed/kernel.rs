//! Accesses to folded memory that bypass the program's own loads and stores: devices, other
//! processes, locks in the kernel. Also memory that the program marks as never to be folded.
use crate::common::{Holder, Scratch, assert_right, assert_right_with, binaries, compile, managed};
use memfold_testkit::random::mix;
use std::process::Command;

#[test]
fn direct_io_finds_and_leaves_the_right_bytes() {
    assert_right("devices", 32, &["direct"]);
}

#[test]
fn pages_lent_to_a_pipe_or_a_socket_never_change() {
    assert_right("devices", 32, &["splice", "splice_waits", "zerocopy", "zerocopy_inherited"]);
}

#[test]
fn pages_lent_by_a_bare_instruction_never_change() {
    assert_right("devices", 32, &["splice:bare", "zerocopy:bare"]);
}

#[test]
#[ignore = "a variant: make test-all"]
fn pages_lent_by_a_bare_instruction_never_change_while_others_wait_or_inherit() {
    assert_right("devices", 32, &["splice_waits:bare", "zerocopy_inherited:bare"]);
}

#[test]
fn marks_by_a_bare_instruction_are_kept() {
    assert_right("marks", 32, &["locks:bare", "dump:bare", "forks:bare"]);
}

#[test]
#[ignore = "a variant: make test-all"]
fn marks_of_other_kinds_by_a_bare_instruction_are_kept() {
    assert_right("marks", 32, &["lock_all:bare", "wipe:bare", "threads:bare"]);
}

#[test]
fn another_process_of_the_run_reads_and_writes_folded_memory() {
    assert_right("observers", 32, &["other_process"]);
}

#[test]
fn program_reads_and_writes_its_own_memory_by_its_file() {
    assert_right("observers", 32, &["own_memory"]);
    assert_right_with(
        &["--resident", "8M", "--paging", "protection"],
        "observers",
        32,
        &["own_memory"],
    );
}

/// The sandboxes of browsers count their threads there.
#[test]
fn own_files_of_proc_are_right_where_no_path_leads_there() {
    assert_right("observers", 32, &["in_an_empty_root"]);
    assert_right("observers", 6, &["by_an_outer_proc"]);
    let flags = &["--resident", "8M", "--paging", "protection"];
    assert_right_with(flags, "observers", 32, &["in_an_empty_root"]);
}

#[test]
fn a_debugger_never_reads_a_wrong_byte() {
    assert_right("observers", 32, &["debugger"]);
}

#[test]
fn locks_and_futexes_work_in_folded_memory() {
    assert_right("observers", 32, &["futexes"]);
}

#[test]
fn a_program_that_is_stopped_and_continued_stays_right() {
    assert_right("observers", 32, &["stopped"]);
}

#[test]
fn locked_memory_comes_home_and_stays() {
    assert_right("marks", 32, &["locks", "lock_all"]);
}

#[test]
fn memory_kept_from_core_dumps_is_never_folded_again() {
    assert_right("marks", 32, &["dump"]);
}

#[test]
fn memory_without_its_mark_is_folded_again_on_busy_cpus_too() {
    assert_right("marks", 32, &["unmarked"]);
}

#[test]
fn memory_kept_from_children_is_theirs_as_the_kernel_says() {
    assert_right("marks", 32, &["forks", "wipe"]);
}

#[test]
fn undumpable_memory_is_folded_on_request_and_else_reported() {
    assert_right_with(&["--resident", "8M", "--dont-dump", "fold"], "marks", 32, &["dump_folded"]);
    let program = compile("marks");
    let Some(output) = managed("8M", &[&program.path, "dump_large"]) else { return };
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(text.contains("can't be kept") && text.contains("--dont-dump fold"), "{text}");
    drop(program.scratch);
}

#[test]
fn private_anonymous_memory_of_each_kind_is_folded() {
    let kinds = &["statics", "inherited", "stacks", "mergeable", "growing", "zero_device", "small"];
    assert_right("anonymous", 32, kinds);
    let flags = &["--resident", "8M", "--paging", "protection"];
    assert_right_with(flags, "anonymous", 32, kinds);
}

#[test]
fn marks_come_and_go_while_threads_use_the_memory() {
    assert_right("marks", 32, &["threads"]);
}

/// Returns word 0 of a page of pattern 1, with which `holder` fills its memory (see `common.h`).
fn first_word(page: u64) -> u64 {
    mix(mix(0x100000001u64.wrapping_add(page)))
}

/// Returns whether gdb can call functions here. gdb 13 can't on CPUs with AMX: it fails to restore
/// registers ("Couldn't write extended state status"), which ends any program, folded or not.
fn gdb_calls_functions() -> bool {
    let mut sleep = Command::new("sleep").arg("60").spawn().unwrap();
    let mut gdb = Command::new("gdb");
    gdb.args([
        "-nx",
        "-batch",
        "-p",
        &sleep.id().to_string(),
        "-ex",
        "print 6 * ((int(*)(int))toupper)(55)",
    ]);
    let output = gdb.output().unwrap();
    sleep.kill().unwrap();
    sleep.wait().unwrap();
    String::from_utf8_lossy(&output.stdout).contains("$1 = 330")
}

#[test]
fn gdb_says_what_it_cant_read_and_reads_it_after_asking() {
    let Some(bin) = binaries() else { return };
    if crate::common::real::installed("gdb").is_none() {
        return;
    }
    let (program, scratch) = (compile("holder"), Scratch::new());
    let mut holder = Holder::start(&bin, &scratch, &["--resident", "16M"], &program.path, "64");
    let mut gdb = Command::new("timeout");
    gdb.args(["-s", "KILL", "40", "gdb", "-nx", "-batch", "-p", &holder.pid.to_string()]);
    let calls = gdb_calls_functions();
    let page = |page: u64| format!("x/gx *(char**)&memory + {page} * 4096");
    let mut steps = vec![page(2)];
    if calls {
        steps.push("call ((int(*)(void))memfold_unfold)()".into());
        steps.extend([2, 0, 5000, 16383].map(page));
        steps.push("call ((int(*)(void))memfold_fold)()".into());
    }
    steps.iter().for_each(|step| _ = gdb.args(["-ex", step]));
    let output = gdb.output().unwrap();
    let (answer, complaints) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(complaints.contains("Cannot access memory at address"), "{complaints}{answer}");
    if calls {
        for page in [2, 0, 5000, 16383] {
            assert!(
                answer.contains(&format!("0x{:016x}", first_word(page))),
                "page {page}: {answer}{complaints}"
            );
        }
        assert!(answer.contains("$1 = 0") && answer.contains("$2 = 0"), "{answer}{complaints}");
    } else {
        eprintln!("SKIPPED in part: this gdb can't call functions of any program on this CPU");
    }
    // The memory is folded again, and every byte is right.
    holder.check();
    holder.wait_for("after gdb", |mib| mib <= 16 + 24);
    holder.check();
    holder.end();
}

#[test]
fn a_core_dump_without_the_folded_data_says_so() {
    let (program, scratch) = (compile("signals"), Scratch::new());
    let script = |limit: &str| {
        format!("cd {} && ulimit -c {limit} && exec {} crash", scratch.0.display(), program.path)
    };
    for (limit, dumps) in [("0", false), ("unlimited", true)] {
        let Some(output) = managed("8M", &["sh", "-c", &script(limit)]) else { return };
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(139), "{text}");
        // The kernel's core_pattern can prevent a core file.
        let has_core = std::fs::read_dir(&scratch.0).unwrap().count() > 0;
        assert!(dumps || !has_core);
        assert!(
            text.contains("The core dump has zeros in place of") == has_core,
            "{limit}: {text}"
        );
        println!("{limit}: dumped: {has_core}: {}", text.trim());
    }
}
