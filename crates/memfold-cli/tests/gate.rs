//! Who may have faults served by the gate: everybody, without any privilege. And what is done where
//! it can't be had.
#![cfg(target_arch = "x86_64")]
mod common;
use common::{
    Program, Scratch, UNPRIVILEGED, assert_all_right, assert_refused, binaries, can_make_worlds,
    compile, managed_in, memfold,
};
use std::process::Command;

const FLAGS: &[&str] = &["--resident", "16M"];

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
        assert_all_right(UNPRIVILEGED, FLAGS, name, promises);
    }
}

/// Asserts that a command prints what it prints without memfold and with all privileges, and was
/// folded.
#[track_caller]
fn assert_same(resident: &str, command: &[&str]) {
    let Some(output) = managed_in(UNPRIVILEGED, &["--resident", resident], command) else { return };
    let plain = Command::new(command[0]).args(&command[1..]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(plain.status.success() && output.status.success(), "{command:?}: {text}");
    assert!(output.stdout == plain.stdout, "{command:?}: {text}");
    assert!(text.contains("major"), "{command:?} was never folded: {text}");
    println!("{command:?}: {}", text.trim());
}

#[test]
fn without_any_privilege_real_programs_print_what_they_print_without() {
    if !can_make_worlds() {
        return;
    }
    let scratch = Scratch::new();
    let script = |name: &str| {
        let text =
            std::fs::read(format!("{}/tests/programs/{name}.py", env!("CARGO_MANIFEST_DIR")));
        scratch.file(name, text.unwrap(), 0o644)
    };
    // An interpreter that others may execute too.
    assert_same("16M", &["/usr/bin/python3", &script("database")]);
    assert_same("20M", &["/usr/bin/python3", &script("processes")]);
    let lines: String = (0..600_000u64).map(|n| format!("{}\n", n * 7_919 % 600_011)).collect();
    let file = scratch.file("lines", &lines, 0o644);
    assert_same("16M", &["/usr/bin/sort", "-n", "-S", "200M", &file]);
}

/// Handler threads can't be had there, so the world is one without privileges; and it is said that
/// none are needed.
#[test]
fn without_any_privilege_handler_threads_are_refused_with_the_remedies() {
    if !can_make_worlds() {
        return;
    }
    let flags = ["--delivery", "thread", "--resident", "16M"];
    let Some(output) = managed_in(UNPRIVILEGED, &flags, &["/bin/true"]) else { return };
    let words =
        ["vm.unprivileged_userfaultfd", "/dev/userfaultfd", "seccomp", "without --delivery"];
    assert_refused(&output, 125, &words);
}

/// In front of `memfold`: what lacks there.
fn lacking(what: &str, program: &Program) -> String {
    format!("exec {} {what} \"$@\"", program.path)
}

#[test]
fn a_run_that_cant_have_the_gate_says_so_in_one_line_and_goes_on_with_handler_threads() {
    if !can_make_worlds() {
        return;
    }
    let (lacks, heap) = (compile("lacking"), compile("heap"));
    for (what, word) in [("dispatch", "Syscall User Dispatch"), ("queries", "PROCMAP_QUERY")] {
        for asked in [&[][..], &["--delivery", "gate"]] {
            let flags = [FLAGS, asked].concat();
            let world = lacking(what, &lacks);
            let Some(output) = managed_in(&world, &flags, &[&heap.path, "fast"]) else { return };
            let text = String::from_utf8_lossy(&output.stderr);
            assert_eq!(
                (output.status.code(), &output.stdout[..]),
                (Some(0), &b"right\n"[..]),
                "{text}"
            );
            let warnings: Vec<&str> =
                text.lines().filter(|line| line.contains("warning")).collect();
            assert!(
                matches!(warnings[..], [line] if line.contains(word) && line.contains("handler threads")),
                "{what}: {text}"
            );
            assert!(text.contains("major"), "{what}: it was never folded: {text}");
        }
    }
}

#[test]
fn a_run_that_can_have_neither_is_refused_with_both_reasons() {
    if !can_make_worlds() {
        return;
    }
    let program = compile("lacking");
    for (what, word) in [("dispatch", "Syscall User Dispatch"), ("queries", "PROCMAP_QUERY")] {
        let world =
            UNPRIVILEGED.replace("/mnt/memfold", &format!("{} {what} /mnt/memfold", program.path));
        assert_ne!(world, UNPRIVILEGED);
        let Some(output) = managed_in(&world, FLAGS, &["/bin/true"]) else { return };
        assert_refused(&output, 125, &[word, "vm.unprivileged_userfaultfd"]);
    }
}

#[test]
fn a_process_of_a_run_that_cant_have_the_gate_says_so_and_is_served_by_handler_threads() {
    // SAFETY: the call has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("SKIPPED: needs root, which may have handler threads");
        return;
    }
    let (lacks, heap) = (compile("lacking"), compile("heap"));
    let command = [&lacks.path, "dispatch", &heap.path, "fast"];
    let Some(output) = managed_in("", FLAGS, &command) else { return };
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"right\n"[..]), "{text}");
    assert_eq!(text.lines().filter(|line| line.contains("so it is thread")).count(), 1, "{text}");
    assert!(text.contains("major"), "it was never folded: {text}");
}

#[test]
fn the_gate_refuses_a_swap_file_with_one_line() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let swap = scratch.0.to_str().unwrap();
    let flags = ["run", "--limit", "64M", "--delivery", "gate", "--swap", swap, "--", "true"];
    assert_refused(&memfold(&bin, &flags).output().unwrap(), 125, &["--swap", "gate"]);
}
