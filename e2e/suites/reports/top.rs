//! `memfold top`: printed once, and in a terminal.
use crate::common::{HANG, Holder, Scratch, assert_refused, binaries, compile, memfold};
use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, Output};
use std::time::Instant;

/// The other screen of the terminal, without a cursor; and back.
const ENTER: &str = "\u{1b}[?1049h\u{1b}[?25l";
const LEAVE: &str = "\u{1b}[?25h\u{1b}[?1049l";

fn top(bin: &Path, scratch: &Scratch, flags: &[&str]) -> Output {
    let arguments = [&["top", "--interval", "0.1"], flags].concat();
    memfold(bin, &arguments).env("XDG_RUNTIME_DIR", &scratch.0).output().unwrap()
}

#[track_caller]
fn printed(output: Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Runs `memfold top` in a terminal, with these steps of `terminal.py`, below a scratch directory.
#[track_caller]
fn in_terminal(bin: &Path, scratch: &Scratch, steps: Value) -> Value {
    let memfold = bin.join("memfold").display().to_string();
    let command = [&memfold, "top", "--interval", "0.1"].map(str::to_string);
    ended_in_terminal(scratch, steps, &command)
}

/// Runs a command in a terminal to its end, with these steps, below a scratch directory.
#[track_caller]
fn ended_in_terminal(scratch: &Scratch, steps: Value, command: &[String]) -> Value {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/programs/terminal.py");
    let mut python = Command::new("python3");
    python.arg(script).arg(steps.to_string()).args(command);
    python.env("XDG_RUNTIME_DIR", &scratch.0);
    let output = python.env_remove("NO_COLOR").current_dir(&scratch.0).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Asserts that the command ended with this status and left the terminal as it was.
#[track_caller]
fn assert_restored(done: &Value, status: i32) {
    let output = done["output"].as_str().unwrap();
    assert_eq!(
        (&done["status"], &done["is_restored"]),
        (&json!(status), &json!(true)),
        "{output:?}"
    );
    assert!(output.contains(ENTER) && output.trim_end().ends_with(LEAVE), "{output:?}");
}

#[test]
fn top_once_prints_each_run_in_a_plain_table() {
    let Some(bin) = binaries() else { return };
    let (program, scratch) = (compile("holder"), Scratch::new());
    let output = memfold(&bin, &["set", "--group", "some", "--limit", "1G"])
        .env("XDG_RUNTIME_DIR", &scratch.0)
        .status();
    assert!(output.unwrap().success());
    let mut one = Holder::start(&bin, &scratch, &["--limit", "64M"], &program.path, "96");
    one.check();
    let text = printed(top(&bin, &scratch, &["--once"]));
    let lines: Vec<Vec<&str>> =
        text.lines().map(|line| line.split_whitespace().collect()).collect();
    let head = &lines[0];
    let pid = one.runner.id().to_string();
    let row = lines.iter().find(|line| line[0] == pid).unwrap_or_else(|| panic!("{text}"));
    let cell = |title: &str| row[head.iter().position(|cell| *cell == title).unwrap()];
    assert!(cell("USED/LIMIT").ends_with("/64.0M"), "{text}");
    assert_eq!((cell("GROUP"), cell("CODEC"), cell("PARTS")), ("-", "delta", "1"), "{text}");
    assert!(cell("FOLD").ends_with('M') && cell("RATIO").contains('.'), "{text}");
    assert_eq!(row[row.len() - 2..], [program.path.as_str(), "96"], "{text}");
    assert!(text.lines().any(|line| line.contains("group") && line.ends_with(" some")), "{text}");
    assert!(!text.contains('\u{1b}'), "{text:?}");

    let run = shown_until(&bin, &scratch, one.runner.id(), |run| run["loads_per_second"].is_f64());
    assert_eq!((&run["limit_bytes"], &run["silent_seconds"]), (&json!(64 << 20), &Value::Null));
    assert!(run["folded_bytes"].as_u64().unwrap() > 16 << 20, "{run}");
    assert!(run["fault_time_percent"].is_f64(), "{run}");
    assert_eq!(run["processes"][0]["pid"], one.pid);
    one.end();
}

/// Asks until a run is shown as expected. It may take longer to answer on a busy machine than one
/// look waits.
#[track_caller]
fn shown_until(bin: &Path, scratch: &Scratch, run: u32, is_so: impl Fn(&Value) -> bool) -> Value {
    let begin = Instant::now();
    loop {
        let all: Value = serde_json::from_str(&printed(top(bin, scratch, &["--json"]))).unwrap();
        let runs = all["runs"].as_array().unwrap();
        match runs.iter().find(|one| one["pid"] == run) {
            Some(run) if is_so(run) => return run.clone(),
            shown => assert!(begin.elapsed() < HANG, "{shown:?}"),
        }
    }
}

#[test]
fn top_without_a_terminal_or_with_bad_flags_is_refused() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    assert_refused(&top(&bin, &scratch, &[]), 125, &["no terminal", "--once"]);
    for interval in ["0", "0.05", "61", "-1", "nan", "soon", ""] {
        let arguments = ["top", "--once", &format!("--interval={interval}")];
        let output = memfold(&bin, &arguments).output().unwrap();
        assert_refused(&output, 125, &["--interval", "0.1 to 60"]);
    }
}

#[test]
fn top_shows_a_stopped_run_as_silent() {
    let Some(bin) = binaries() else { return };
    let (program, scratch) = (compile("holder"), Scratch::new());
    let holder = Holder::start(&bin, &scratch, &["--limit", "64M"], &program.path, "8");
    let runner = holder.runner.id();
    // SAFETY: kill touches no memory, and the process is a child that has not been waited for.
    let send = |signal| unsafe { libc::kill(runner as i32, signal) };
    assert_eq!(send(libc::SIGSTOP), 0);
    let run = shown_until(&bin, &scratch, runner, |run| run["silent_seconds"].is_f64());
    assert!(run["silent_seconds"].as_f64().unwrap() >= 2.0, "{run}");
    // It has never answered this command, so only /proc tells what it is.
    let name = format!("{} 8", program.path);
    assert_eq!((&run["name"], &run["is_stopped"]), (&json!(name), &json!(true)), "{run}");
    assert_eq!((&run["used_bytes"], &run["limit_bytes"]), (&Value::Null, &Value::Null), "{run}");
    let table = printed(top(&bin, &scratch, &["--once"]));
    let line = table.lines().find(|line| line.contains(&name)).unwrap_or_else(|| panic!("{table}"));
    assert!(line.contains("(stopped, no answer for ") && !line.contains("0B"), "{table}");
    // The screen goes on.
    let steps =
        json!([["wait", "it is stopped"], ["type", "?"], ["wait", "Ctrl-C"], ["type", "q"]]);
    assert_restored(&in_terminal(&bin, &scratch, steps), 0);
    assert_eq!(send(libc::SIGCONT), 0);
    holder.end();
}

#[test]
fn top_changes_a_limit_and_exports_figures() {
    let Some(bin) = binaries() else { return };
    let (program, scratch) = (compile("holder"), Scratch::new());
    let holder = Holder::start(&bin, &scratch, &["--limit", "64M"], &program.path, "96");
    // Other tests may have runs in the other directory of this user.
    let filter = format!("/{}\n", program.path);
    let steps = json!([
        ["wait", "holder"],
        ["type", filter],
        ["wait", "Enter open"],
        ["type", "l1\n"],
        ["wait", "too small"],
        ["type", "l128M\n"],
        ["wait", "limit 128.0 MiB"],
        ["type", "e"],
        ["wait", "Written: memfold-top-"],
        ["type", "\r"],
        ["wait", format!("{} holder", holder.pid)],
        ["type", "\r"],
        ["wait", "[heap]"],
        ["type", "q"],
    ]);
    assert_restored(&in_terminal(&bin, &scratch, steps), 0);
    let about = memfold(&bin, &["stat", &holder.pid.to_string(), "--json"])
        .env("XDG_RUNTIME_DIR", &scratch.0)
        .output();
    let about: Value = serde_json::from_slice(&about.unwrap().stdout).unwrap();
    assert_eq!(about["limit_bytes"], 128 << 20);
    let mut files = std::fs::read_dir(&scratch.0).unwrap().map(|entry| entry.unwrap().path());
    let file = files.find(|path| path.extension().is_some_and(|end| end == "json"));
    let text = std::fs::read_to_string(file.expect("a file was written")).unwrap();
    let all: Value = serde_json::from_str(&text).unwrap();
    let runs = all["runs"].as_array().unwrap();
    assert!(runs.iter().any(|run| run["pid"] == holder.runner.id()), "{text}");
    holder.end();
}

/// Ctrl-Z gives the terminal to the shell, and `fg` brings the screen back.
#[test]
fn top_is_suspended_and_continued_by_the_shell() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let script = r#"set -m; "$@"; printf '\033[1;1Hended %s %s\n' $? "$(stty -a | grep -ow -- '-*icanon')"; read x; fg >/dev/null"#;
    let memfold = bin.join("memfold").display().to_string();
    let command = ["/bin/bash", "-c", script, "bash", &memfold, "top", "--interval", "0.1"]
        .map(str::to_string);
    let steps = json!([
        ["wait", "q quit"],
        ["type", "\u{1a}"],
        ["wait", "ended 148 icanon"],
        ["type", "\n"],
        ["type", "?"],
        ["wait", "Ctrl-Z"],
        ["type", "qq"],
    ]);
    let end = ended_in_terminal(&scratch, steps, &command);
    assert_restored(&end, 0);
    let output = end["output"].as_str().unwrap();
    assert_eq!((output.matches(ENTER).count() >= 2, output.matches(LEAVE).count()), (true, 2));
}

#[test]
fn top_restores_the_terminal_at_every_end() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    for (step, status) in [
        (json!(["type", "q"]), 0),
        (json!(["type", "\u{3}"]), 0),
        (json!(["signal", libc::SIGTERM.to_string()]), 128 + libc::SIGTERM),
        (json!(["signal", libc::SIGHUP.to_string()]), 128 + libc::SIGHUP),
    ] {
        let steps = json!([["wait", "memfold top"], ["wait", "q quit"], step]);
        assert_restored(&in_terminal(&bin, &scratch, steps), status);
    }
}
