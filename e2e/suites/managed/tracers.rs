//! strace and perf on a folded program, inside memfold and around it. The program prints the same
//! as without them, and they trace it. (gdb: `kernel.rs`.)
use crate::common::real::{installed, plainly, python};
use crate::common::{
    Scratch, assert_figures, assert_right_with, binaries, compile, json, managed_in, memfold,
    printed_in,
};
use std::process::Command;

/// Fills four times the limit with different bytes in each page, and reads files.
const SCRIPT: &str = "import glob, hashlib
block, sum = bytearray(64 << 20), hashlib.sha256()
for at in range(0, len(block), 4096): block[at] = at // 4096 % 251
for name in sorted(glob.glob('/etc/*.conf')): sum.update(open(name, 'rb').read())
for at in range(0, len(block), 1 << 20): sum.update(block[at:at + 4096])
print(sum.hexdigest())";
const FLAGS: [&str; 2] = ["--limit", "24M"];

/// Returns the trace of a program that a tracer has started under memfold, and of one that memfold
/// has started with a tracer. `None` if tracing is unavailable here.
#[track_caller]
fn traced(tracer: &str, arguments: &[&str]) -> Option<[Vec<u8>; 2]> {
    let (tracer, python, bin) = (installed(tracer)?, python("hashlib")?, binaries()?);
    let scratch = Scratch::new();
    let (file, figures) = (scratch.path("trace"), scratch.path("figures"));
    let tracing = [&[tracer.as_str()], arguments, &["-o", &file]].concat();
    let trial = Command::new(tracing[0]).args(&tracing[1..]).arg("true").output().unwrap();
    if !trial.status.success() {
        let errors = String::from_utf8_lossy(&trial.stderr);
        eprintln!("SKIPPED, NOTHING WAS TESTED: {tracer} can't trace `true` here: {errors}");
        return None;
    }
    let command = [python.as_str(), "-c", SCRIPT];
    let expected = plainly(&command);

    let output = printed_in("", &FLAGS, 32, &[&tracing[..], &command].concat())?;
    assert!(output == expected, "{tracer} under memfold");
    let below = std::fs::read(&file).unwrap();

    let run = ["run", "--stats-file", &figures];
    let run = memfold(&bin, &[&run[..], &FLAGS, &["--"], &command].concat());
    let mut outer = Command::new(tracing[0]);
    outer.args(&tracing[1..]).arg(run.get_program()).args(run.get_args());
    let output = outer.env_remove("MEMFOLD_RUN").env_remove("MEMFOLD_DISABLE").output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && output.stdout == expected,
        "memfold under {tracer}: {errors}"
    );
    assert_figures(&json(&figures), &errors, 32);
    Some([below, std::fs::read(&file).unwrap()])
}

/// The gate's signals are left out as docs/limits.md says.
#[test]
fn strace_sees_a_folded_program_end_with_what_it_prints_alone() {
    let Some(traces) = traced("strace", &["-f", "-e", "signal=!SIGSYS,SIGBUS"]) else { return };
    for trace in traces {
        let trace = String::from_utf8(trace).unwrap();
        assert!(trace.contains("/etc/") && trace.contains("exited with 0"), "calls are seen");
        assert!(!trace.contains("--- SIGSYS") && !trace.contains("--- SIGBUS"), "left out");
    }
}

#[test]
fn strace_shows_the_gates_signals_if_asked_to() {
    let Some(traces) = traced("strace", &["-f"]) else { return };
    for trace in traces {
        let trace = String::from_utf8(trace).unwrap();
        assert!(trace.contains("--- SIGSYS {si_signo=SIGSYS, si_code=SYS_USER_DISPATCH"));
    }
}

/// Uses a clock, because a virtual machine may have no hardware counters.
#[test]
fn perf_records_a_folded_program_with_unchanged_output() {
    let Some(traces) = traced("perf", &["record", "-q", "-e", "cpu-clock"]) else { return };
    for trace in traces {
        assert!(trace.starts_with(b"PERFILE2"), "something was recorded");
    }
}

/// A debugger's child asks to be traced. With vfork, its parent waits for it and can't continue.
#[test]
fn child_that_asks_to_be_traced_stops_only_at_its_exec() {
    let program = compile("traced");
    for how in ["fork", "vfork"] {
        for paging in ["userfaultfd", "guard", "protection"] {
            let flags = ["--limit", "12M", "--paging", paging];
            let command = [program.path.as_str(), how];
            let Some(output) = printed_in("", &flags, 16, &command) else { return };
            assert_eq!(output, b"right\n", "{how} {paging}");
        }
    }
}

/// Asserts that a tracer as the program of a run ends as it does without memfold, and prints
/// `ends`.
#[track_caller]
fn started_by(tracer: &[&str], ends: &str) {
    let Some(path) = installed(tracer[0]) else { return };
    let command = [&[path.as_str()], &tracer[1..]].concat();
    let trial = Command::new(command[0]).args(&command[1..]).output().unwrap();
    if !String::from_utf8_lossy(&trial.stdout).contains(ends) {
        return eprintln!("SKIPPED, NOTHING WAS TESTED: {command:?} fails here: {trial:?}");
    }
    let Some(output) = managed_in("", &["--limit", "100M"], &command) else { return };
    let (text, errors) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), trial.status.code(), "{command:?}: {text} {errors}");
    assert!(text.contains(ends) && !text.contains("SIGSYS"), "{command:?}: {text} {errors}");
}

#[test]
fn debugger_as_the_program_runs_another_program_to_its_end() {
    started_by(&["gdb", "-nx", "-batch", "-ex", "run", "--args", "/bin/true"], "exited normally");
}

/// A child traces the program. In each round it sends a signal one instruction later in a patched
/// call. One instruction is a push that faults.
#[test]
fn signal_at_each_instruction_of_a_call_leaves_none_blocked() {
    assert_right_with(&FLAGS, "stepped", 32, &["64"]);
}

#[test]
fn gdb_stops_its_program_at_a_breakpoint_and_goes_on() {
    let program = compile("passed");
    let run = ["gdb", "-nx", "-batch", "-ex", "break main", "-ex", "run", "-ex", "continue"];
    started_by(&[&run[..], &["--args", &program.path, "show"]].concat(), "exited normally");
}

#[test]
fn valgrind_as_the_program_runs_another_program_to_its_end() {
    started_by(&["valgrind", "-q", "/bin/echo", "right"], "right");
}

#[test]
fn proot_as_the_program_runs_another_program_to_its_end() {
    started_by(&["proot", "-r", "/", "/bin/sh", "-c", "echo $((1+1)) right"], "2 right");
}
