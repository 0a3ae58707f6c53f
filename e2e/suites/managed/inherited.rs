//! A program inherits the same state under memfold as without it.
use crate::common::{Scratch, binaries, compile, memfold};
use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Shell words that change the state a program inherits, and a text that the program's record must
/// then contain (empty if any record is accepted).
const WORLDS: &[(&str, &str)] = &[
    ("", ""),
    ("trap '' PIPE", "signal 13: ignored"),
    ("trap '' INT QUIT HUP TERM USR1 CHLD ALRM TSTP", "signal 14: ignored"),
    ("ulimit -S -n 200", "200 "),
    ("ulimit -n 300", "300 "),
    ("ulimit -s 4096", "4194304"),
    ("ulimit -S -c 0; ulimit -t 1000; ulimit -f 100000", "1000"),
    ("umask 027", "0027"),
    ("cd /usr/lib", "directory: /usr/lib"),
    ("exec 0<&-", "fd 1:"),
    ("exec 1>&-", "fd 0:"),
    ("exec 2>&-", "fd 0:"),
    ("exec 0<&- 1>&- 2>&-", "argv 0:"),
    ("exec 5</dev/zero 9</dev/null", "fd 9: /dev/null, 0"),
    ("export ZZ=1 AA=2; unset HOME", "env: ZZ=1"),
    ("export LD_PRELOAD=", ""),
    ("renice -n 5 -p $$ >/dev/null", "nice: 5"),
    ("chrt -b -p 0 $$", "policy: 3"),
    ("taskset -p -c 0 $$ >/dev/null", "Cpus_allowed_list:\t0\n"),
    ("ionice -c 3 -p $$", "io: 24583"),
    ("echo 500 >/proc/$$/oom_score_adj", "500"),
];

/// Runs the words of `prepare`, then the program started by `launcher`, and returns its record.
fn record(scratch: &Scratch, program: &str, launcher: &[&OsStr], prepare: &str) -> String {
    let file = scratch.path("record");
    let _ = std::fs::remove_file(&file);
    let mut command = Command::new("bash");
    command
        .args(["-c", &format!("{prepare}\nexec \"$@\""), "bash"])
        .args(launcher)
        .args([program, &file]);
    // Unsorted variables, and entries that are no valid variables.
    command.env_clear().envs([("PATH", std::env::var("PATH").unwrap()), ("HOME", "/".into())]);
    let status = command.stdin(std::process::Stdio::null()).status().unwrap();
    assert!(status.success(), "{prepare}: {status}");
    std::fs::read_to_string(file).unwrap()
}

#[test]
fn a_program_inherits_exactly_what_env_would_give_it() {
    let Some(bin) = binaries() else { return };
    let program = compile("inherited");
    let memfold = bin.join("memfold");
    let env_command = [OsStr::new("env")];
    let run = ["run", "--limit", "64M", "--"].map(OsStr::new);
    let managed: Vec<&OsStr> = [memfold.as_os_str()].into_iter().chain(run).collect();
    let mut differences = Vec::new();
    for (prepare, display) in WORLDS {
        let want = record(&program.scratch, &program.path, &env_command, prepare);
        assert!(want.contains(display), "{prepare:?} was not done: {want}");
        let record_managed = record(&program.scratch, &program.path, &managed, prepare);
        let lines = |a: &str, b: &str| {
            a.lines().filter(|l| !b.lines().any(|m| m == *l)).collect::<Vec<_>>().join("; ")
        };
        if record_managed != want {
            differences.push(format!(
                "{prepare:?}: without: {}, with: {}",
                lines(&want, &record_managed),
                lines(&record_managed, &want)
            ));
        }
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

/// A shell can't block signals, and can't pass the same variable twice.
#[test]
fn blocked_signals_and_environment_order_are_inherited() {
    let Some(bin) = binaries() else { return };
    let program = compile("inherited");
    let file = program.scratch.path("record");
    let starter = "
        #include <signal.h>
        #include <unistd.h>
        int main(int argc, char **argv) {
            char *given[] = {\"ZZ=1\", \"PATH=/usr/bin:/bin\", \"AA=2\", \"ZZ=3\", \"no-sign\", \"MM=\", 0};
            sigset_t set;
            sigemptyset(&set);
            sigaddset(&set, SIGUSR1);
            sigaddset(&set, SIGPIPE);
            sigaddset(&set, SIGRTMIN + 3);
            sigprocmask(SIG_SETMASK, &set, 0);
            return execve(argv[1], argv + 1, given);
        }";
    let starter = program.scratch.compile("starter", starter, &[]);
    let record = |launcher: &[&str]| {
        let status =
            Command::new(&starter).args(launcher).args([&program.path, &file]).status().unwrap();
        assert!(status.success(), "{launcher:?}: {status}");
        std::fs::read_to_string(&file).unwrap()
    };
    let want = record(&["/usr/bin/env"]);
    assert!(
        want.contains("env: AA=2\nenv: ZZ=3") && want.contains("SigBlk:\t0000001000001200"),
        "{want}"
    );
    assert_eq!(
        record(&[bin.join("memfold").to_str().unwrap(), "run", "--limit", "64M", "--"]),
        want
    );
}

#[test]
fn who_ignores_broken_pipes_goes_on_ignoring_them() {
    let Some(bin) = binaries() else { return };
    for (ignores, status) in [(true, "1"), (false, "141")] {
        let script = [
            "run",
            "--limit",
            "64M",
            "--",
            "bash",
            "-c",
            "yes 2>/dev/null | true; echo ${PIPESTATUS[0]}",
        ];
        let mut command = memfold(&bin, &script);
        // SAFETY: `signal` is async-signal-safe.
        unsafe {
            command.pre_exec(move || {
                libc::signal(libc::SIGPIPE, if ignores { libc::SIG_IGN } else { libc::SIG_DFL });
                Ok(())
            })
        };
        assert_eq!(
            String::from_utf8(command.output().unwrap().stdout).unwrap().trim(),
            status,
            "ignored: {ignores}"
        );
    }
}

#[test]
fn script_without_interpreter_line_runs_under_sh() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let text = "printf '%s|' \"$0\" \"$@\"; cat /proc/$$/comm\nexit 7\n";
    let script = scratch.file("script", text, 0o755);
    let outer = scratch.file("outer", format!("#!{script}\nprintf 'outer '\n{text}"), 0o755);
    let empty = scratch.file("empty", "", 0o755);
    for (name, status) in [(script.as_str(), 7), ("script", 7), (&outer, 7), (&empty, 0)] {
        let search = format!("{}:{}", scratch.0.display(), std::env::var("PATH").unwrap());
        let words = ["a b", "", "--", "-x"];
        let want = Command::new("env").arg(name).args(words).env("PATH", &search).output().unwrap();
        assert_eq!(want.status.code(), Some(status), "{name}");
        let mut command =
            memfold(&bin, &[&["run", "--limit", "64M", "--", name][..], &words].concat());
        let output = command.env("PATH", &search).output().unwrap();
        assert_eq!(
            (output.status, &output.stdout, &output.stderr),
            (want.status, &want.stdout, &want.stderr),
            "{name}"
        );
    }
}
