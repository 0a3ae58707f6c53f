//! `memfold run` ends as its program ends, and passes signals on.
use crate::common::{Scratch, assert_refused, binaries, can_make_worlds, memfold, run};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::FromRawFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

#[test]
fn the_programs_own_status_is_passed_on() {
    let Some(bin) = binaries() else { return };
    for status in [0, 1, 3, 42, 125, 255] {
        let output =
            run(&bin, &[], &["sh", "-c", &format!("echo out; echo err >&2; exit {status}")]);
        assert_eq!(output.status.code(), Some(status));
        assert_eq!(
            (output.stdout.as_slice(), output.stderr.as_slice()),
            (b"out\n".as_slice(), b"err\n".as_slice())
        );
    }
}

#[test]
fn death_by_a_signal_is_128_and_its_number() {
    let Some(bin) = binaries() else { return };
    for (name, number) in [("KILL", 9), ("TERM", 15), ("SEGV", 11), ("ABRT", 6)] {
        let output = run(&bin, &[], &["sh", "-c", &format!("ulimit -c 0; kill -{name} $$")]);
        assert_eq!(output.status.code(), Some(128 + number), "{name}");
    }
}

#[test]
fn a_command_that_is_not_there_is_127() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    assert_refused(&run(&bin, &[], &["no-such-command"]), 127, &["no-such-command", "not found"]);
    assert_refused(
        &run(&bin, &[], &["/no/such/command"]),
        127,
        &["/no/such/command", "No such file"],
    );
    assert_refused(&run(&bin, &[], &[""]), 127, &["not found"]);
    for (name, display) in [("\u{1b}[2Jx\n", "\\u{1b}[2Jx\\n"), ("./a\u{7}", "./a\\u{7}")] {
        assert_refused(&run(&bin, &[], &[name]), 127, &[display]);
    }
    let script = scratch.file("script", "#!/no/such/shell\n", 0o755);
    assert_refused(&run(&bin, &[], &[&script]), 127, &["bad interpreter", "/no/such/shell"]);
}

#[test]
fn a_command_that_cant_be_executed_is_126() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    assert_refused(&run(&bin, &[], &["/tmp"]), 126, &["/tmp", "is a directory"]);
    let plain_script = scratch.file("plain", "#!/bin/sh\n", 0o644);
    assert_refused(&run(&bin, &[], &[&plain_script]), 126, &["Permission denied"]);
    let short_file = scratch.file("cut", &std::fs::read("/bin/true").unwrap()[..100], 0o755);
    assert_refused(&run(&bin, &[], &[&short_file]), 126, &["exec format error"]);
    let endless = scratch.path("endless");
    std::fs::write(&endless, format!("#!{endless}\n")).unwrap();
    let endless = scratch.file("endless", format!("#!{endless}\n"), 0o755);
    assert_refused(&run(&bin, &[], &[&endless]), 126, &["too many scripts"]);
    let output = memfold(&bin, &["run", "--limit", "64M", "plain"])
        .env("PATH", &scratch.0)
        .output()
        .unwrap();
    assert_refused(&output, 126, &["plain", "Permission denied"]);
}

#[test]
fn scripts_run_and_their_arguments_arrive_untouched() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let script = scratch.file("script", "#!/bin/sh\nprintf '%s|' \"$@\"\n", 0o755);
    let outer = scratch.file("outer", format!("#!{script} one\n"), 0o755);
    let output = run(&bin, &[], &[&script, "a b", "--limit", "-x", "--", ""]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "a b|--limit|-x|--||");
    let output = run(&bin, &[], &[&outer, "two"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), format!("one|{outer}|two|"));
    let environment = scratch.file("environment", "#!/usr/bin/env sh\nexit 7\n", 0o755);
    assert_eq!(run(&bin, &[], &[&environment]).status.code(), Some(7));
    let status = memfold(&bin, &["run", "--limit", "64M", "sh", "-c", "exit 5"]).status().unwrap();
    assert_eq!(status.code(), Some(5));
}

/// A program that prints `ready` and the name of each signal it gets, and ends at TERM with status
/// 9.
const LISTENER: &str = "trap 'echo TERM; exit 9' TERM; for s in INT HUP QUIT USR1 USR2 ALRM WINCH RTMIN+3; do trap \"echo $s\" $s; done; \
                        echo ready; while :; do sleep 0.02; done";

/// A started memfold. Dropping it kills it, so it does not outlive a failed test.
struct Running(Child);

impl std::ops::Deref for Running {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl std::ops::DerefMut for Running {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(bin: &Path, script: &str) -> (Running, BufReader<std::process::ChildStdout>) {
    let mut command = memfold(bin, &["run", "--limit", "64M", "--", "bash", "-c", script]);
    // In a process group of its own, whose parent is this test. The kernel drops SIGTSTP in an
    // orphaned group, such as a test run in the background of a shell that has ended.
    let mut child = command.stdout(Stdio::piped()).process_group(0).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    assert_eq!(line(&mut lines), "ready");
    (Running(child), lines)
}

fn line(from: &mut impl BufRead) -> String {
    let mut line = String::new();
    from.read_line(&mut line).unwrap();
    line.trim_end().to_string()
}

fn send(pid: u32, signal: i32) {
    // SAFETY: `pid` is a process that this test started and has not yet waited for.
    assert_eq!(unsafe { libc::kill(pid as i32, signal) }, 0);
}

#[test]
fn signals_reach_the_program_and_memfold_outlives_them() {
    let Some(bin) = binaries() else { return };
    let (mut child, mut lines) = start(&bin, LISTENER);
    for (signal, name) in [
        (libc::SIGINT, "INT"),
        (libc::SIGHUP, "HUP"),
        (libc::SIGQUIT, "QUIT"),
        (libc::SIGUSR1, "USR1"),
        (libc::SIGUSR2, "USR2"),
        (libc::SIGALRM, "ALRM"),
        (libc::SIGWINCH, "WINCH"),
        (libc::SIGRTMIN() + 3, "RTMIN+3"),
        (libc::SIGTERM, "TERM"),
    ] {
        send(child.id(), signal);
        assert_eq!(line(&mut lines), name);
    }
    assert_eq!(child.wait().unwrap().code(), Some(9));
}

/// Orphans are children of PID 1, also as zombies. The program waits until none is left.
#[test]
fn memfold_as_pid_1_reaps_orphans_and_passes_signals_on() {
    let Some(bin) = binaries() else { return };
    if !can_make_worlds() {
        return;
    }
    let script = "trap 'exit 43' TERM; for i in $(seq 50); do (sleep 0.01 &); done; left=99; while [ $left -gt 1 ]; do \
                  left=0; for one in /proc/[0-9]*/stat; do read -r _ _ _ parent _ 2>/dev/null <$one && \
                  [ \"$parent\" = 1 ] && left=$((left + 1)); done; done; echo ready; (kill -TERM 1); \
                  while :; do sleep 0.01; done";
    let inner = memfold(&bin, &["run", "--limit", "64M", "--", "bash", "-c", script]);
    let mut outer = Command::new("timeout");
    outer.args(["-s", "KILL", "120", "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]);
    outer.arg(inner.get_program()).args(inner.get_args()).env_remove("MEMFOLD_RUN");
    // A run with the number 1 must not be found by other tests.
    let scratch = Scratch::new();
    let output = outer.env("XDG_RUNTIME_DIR", &scratch.0).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(43), "{text}");
    assert_eq!(output.stdout, b"ready\n", "{text}");
}

#[test]
fn signal_to_its_own_group_comes_back_once() {
    let Some(bin) = binaries() else { return };
    let script = "n=0; trap 'n=$((n+1))' USR1; kill -USR1 0; sleep 0.3; exit $((40 + n))";
    let mut command = memfold(&bin, &["run", "--limit", "64M", "--", "bash", "-c", script]);
    assert_eq!(command.process_group(0).status().unwrap().code(), Some(41));
}

#[test]
fn killing_memfold_kills_the_program() {
    let Some(bin) = binaries() else { return };
    let script = "trap '' TERM; echo ready; echo $$; while :; do sleep 0.02; done";
    let (mut child, mut lines) = start(&bin, script);
    let program = line(&mut lines);
    send(child.id(), libc::SIGKILL);
    child.wait().unwrap();
    // The pipe ends when the program is gone, because no other process has it.
    assert_eq!(line(&mut lines), "", "of {program}");
}

#[test]
fn job_control_stops_and_continues_both() {
    let Some(bin) = binaries() else { return };
    let (mut child, mut lines) =
        start(&bin, "trap 'echo on' CONT; echo ready; while :; do sleep 0.02; done");
    let state = |pid: u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        stat.rsplit(')').next().unwrap().trim().chars().next().unwrap()
    };
    send(child.id(), libc::SIGTSTP);
    while state(child.id()) != 'T' {
        std::thread::sleep(Duration::from_millis(5));
    }
    send(child.id(), libc::SIGCONT);
    assert_eq!(line(&mut lines), "on");
    send(child.id(), libc::SIGTERM);
    assert_eq!(child.wait().unwrap().code(), Some(128 + libc::SIGTERM));
}

#[test]
fn a_caller_that_ignores_children_and_hangups_changes_nothing() {
    let Some(bin) = binaries() else { return };
    let run_ignoring = |program: &[&str]| {
        let mut command = memfold(&bin, &[&["run", "--limit", "64M", "--"], program].concat());
        // SAFETY: `signal` is async-signal-safe.
        unsafe {
            command.pre_exec(|| {
                libc::signal(libc::SIGCHLD, libc::SIG_IGN);
                libc::signal(libc::SIGHUP, libc::SIG_IGN);
                Ok(())
            })
        };
        command.output().unwrap()
    };
    assert_eq!(run_ignoring(&["sh", "-c", "exit 6"]).status.code(), Some(6));
    let text =
        String::from_utf8(run_ignoring(&["grep", "SigIgn", "/proc/self/status"]).stdout).unwrap();
    let mask = u64::from_str_radix(text.split_whitespace().last().unwrap(), 16).unwrap();
    assert!(mask & 1 << (libc::SIGHUP - 1) != 0 && mask & 1 << (libc::SIGCHLD - 1) != 0, "{text}");
}

#[test]
fn ctrl_c_reaches_the_program_once() {
    let Some(bin) = binaries() else { return };
    let script = "n=0; trap 'n=$((n+1)); echo got' INT; echo ready; for i in 1 2 3 4 5 6 7 8; do sleep 0.05; done; \
                  exit $((40 + n))";
    let (mut keyboard, terminal) = terminal();
    let mut command = memfold(&bin, &["run", "--limit", "64M", "--", "bash", "-c", script]);
    command.stdin(terminal).stdout(Stdio::piped());
    // SAFETY: both calls are async-signal-safe; descriptor 0 is the terminal by then.
    unsafe {
        command.pre_exec(|| match libc::setsid() >= 0 && libc::ioctl(0, libc::TIOCSCTTY, 0) == 0 {
            true => Ok(()),
            false => Err(std::io::Error::last_os_error()),
        })
    };
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    assert_eq!(line(&mut lines), "ready");
    keyboard.write_all(b"\x03").unwrap();
    assert_eq!(line(&mut lines), "got");
    assert_eq!(child.wait().unwrap().code(), Some(41));
}

/// Returns both ends of a new terminal.
fn terminal() -> (File, File) {
    let (mut keyboard, mut terminal) = (-1, -1);
    let none = std::ptr::null_mut();
    // SAFETY: the two descriptors are local variables, and the optional arguments are null.
    let status =
        unsafe { libc::openpty(&mut keyboard, &mut terminal, none, none.cast(), none.cast()) };
    assert_eq!(status, 0);
    // SAFETY: the kernel has just made both descriptors, and nothing else owns them.
    unsafe { (File::from_raw_fd(keyboard), File::from_raw_fd(terminal)) }
}
