//! `memfold run --list`, `memfold stat` and `memfold set` on running programs.
use crate::common::{
    HANG, Holder, Scratch, assert_refused, binaries, can_make_worlds, compile, memfold, memfold_in,
};
use std::io::BufReader;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Instant;

fn ask(bin: &Path, scratch: &Scratch, arguments: &[&str]) -> Output {
    memfold(bin, arguments).env("XDG_RUNTIME_DIR", &scratch.0).output().unwrap()
}

#[track_caller]
fn text(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn a_live_limit_is_shrunk_and_grown_and_memory_follows() {
    let Some(bin) = binaries() else { return };
    let (program, scratch) = (compile("holder"), Scratch::new());
    let mut holder = Holder::start(&bin, &scratch, &["--limit", "256M"], &program.path, "96");
    assert!(holder.resident_mib() >= 96);
    let pid = holder.pid.to_string();
    let answer = text(&ask(&bin, &scratch, &["set", &pid, "--limit", "64M"]));
    assert!(answer.contains("limit 64.0 MiB, resident limit none"), "{answer}");
    holder.wait_for("limit 64M", |mib| mib <= 64);
    holder.check();
    holder.wait_for("limit 64M, all touched", |mib| mib <= 64);
    // The PID of `memfold run` itself is accepted too.
    let runner = holder.runner.id().to_string();
    let answer =
        text(&ask(&bin, &scratch, &["set", &runner, "--limit", "none", "--resident", "24M"]));
    assert!(answer.contains("limit none, resident limit 24.0 MiB"), "{answer}");
    holder.wait_for("resident 24M, the rest compressed", |mib| mib <= 24 + 32);
    holder.check();
    text(&ask(&bin, &scratch, &["set", &pid, "--limit", "256M", "--resident", "none"]));
    // An engine reads its limits every few milliseconds.
    let begin = Instant::now();
    while holder.resident_mib() < 96 {
        assert!(begin.elapsed() < HANG, "limit 256M: {} MiB resident", holder.resident_mib());
        holder.check();
    }
    holder.end();
}

/// Asks as [`ask`] does, where only runs in the scratch directory can be found.
fn ask_alone(bin: &Path, scratch: &Scratch, arguments: &[&str]) -> Output {
    let world =
        r#"mkdir -p -m 700 /tmp/memfold-0 && mount -t tmpfs none /tmp/memfold-0 && exec "$@""#;
    memfold_in(world, bin, arguments).env("XDG_RUNTIME_DIR", &scratch.0).output().unwrap()
}

#[test]
fn only_run_needs_no_pid_and_one_of_two_does() {
    let Some(bin) = binaries() else { return };
    if !can_make_worlds() {
        return;
    }
    let (program, scratch) = (compile("holder"), Scratch::new());
    for command in ["stat", "curve", "explain"] {
        let refusal = ask_alone(&bin, &scratch, &[command]);
        assert_refused(&refusal, 125, &["This user has no run"]);
        assert_refused(
            &ask_alone(&bin, &scratch, &[command, "abc"]),
            125,
            &["'abc'", "no process ID"],
        );
    }
    let holder = Holder::start(&bin, &scratch, &["--limit", "64M"], &program.path, "16");
    let run = holder.runner.id();
    for command in ["stat", "explain"] {
        let answer = text(&ask_alone(&bin, &scratch, &[command]));
        assert!(answer.starts_with(&format!("run {run}, ")), "{answer}");
    }
    assert_refused(
        &ask_alone(&bin, &scratch, &["curve"]),
        125,
        &[&format!("Run {run} has loaded no")],
    );
    let list = text(&ask_alone(&bin, &scratch, &["run", "--list"]));
    assert!(list.contains(&run.to_string()), "{list}");
    for command in ["list", "ls", "ps"] {
        let line = |list: &str| list.lines().next().unwrap().to_string();
        assert_eq!(line(&text(&ask_alone(&bin, &scratch, &[command]))), line(&list), "{command}");
    }
    let other = Holder::start(&bin, &scratch, &["--limit", "64M"], &program.path, "16");
    let numbers = [run, other.runner.id()].map(|run| run.to_string());
    for command in ["stat", "curve", "explain"] {
        let words = ["several runs", &numbers[0], &numbers[1]];
        assert_refused(&ask_alone(&bin, &scratch, &[command]), 125, &words);
    }
    other.end();
    holder.end();
}

/// The holder touches all its memory in turn, so only a limit that holds all of it helps.
#[test]
fn slowdown_of_a_live_run_is_shown_by_limit() {
    let Some(bin) = binaries() else { return };
    let (program, scratch) = (compile("holder"), Scratch::new());
    let mut holder = Holder::start(&bin, &scratch, &["--limit", "256M"], &program.path, "96");
    let pid = holder.pid.to_string();
    assert_refused(&ask(&bin, &scratch, &["curve", &pid]), 125, &["loaded no folded memory yet"]);
    text(&ask(&bin, &scratch, &["set", &pid, "--limit", "64M"]));
    holder.wait_for("limit 64M", |mib| mib <= 64);
    let begin = Instant::now();
    let output_shown = loop {
        holder.check();
        let curve = ask(&bin, &scratch, &["curve", "--json", &pid]);
        if curve.status.success() {
            break text(&curve);
        }
        assert!(begin.elapsed() < HANG, "{curve:?}");
    };
    let points: serde_json::Value = serde_json::from_str(&output_shown).unwrap();
    let points = points.as_array().unwrap();
    let of = |name: &'static str| points.iter().map(move |one| one[name].as_f64().unwrap());
    assert!(of("percent").zip(of("percent").skip(1)).all(|(a, b)| a >= b), "{output_shown}");
    assert!(of("limit_bytes").zip(of("limit_bytes").skip(1)).all(|(a, b)| a < b), "{output_shown}");
    assert!(of("percent").next_back() == Some(0.0), "{output_shown}");
    assert!(text(&ask(&bin, &scratch, &["curve", &pid])).contains("slowdown by limit"));
    assert!(text(&ask(&bin, &scratch, &["curve", "--svg", &pid])).starts_with("<svg"));
    let both = ["curve", "--svg", "--json", &pid];
    assert_refused(&ask(&bin, &scratch, &both), 125, &["cannot be used with"]);
    // Not 1: a run of another test may have that number in a PID namespace of its own.
    let own = std::process::id().to_string();
    assert_refused(
        &ask(&bin, &scratch, &["curve", &own]),
        125,
        &[&format!("Process {own}: it belongs")],
    );
    holder.end();
}

/// A process without an engine has no slot in the run's table.
#[test]
fn a_small_process_is_found_by_its_number_too() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let script = scratch.path("small");
    scratch.file("small", "#!/bin/sh\necho ready $$\nread line || true\n", 0o755);
    let holder = Holder::start(&bin, &scratch, &["--limit", "256M"], &script, "");
    let pid = holder.pid.to_string();
    let answer = text(&ask(&bin, &scratch, &["stat", &pid]));
    assert!(answer.contains("limit 256.0 MiB"), "{answer}");
    let answer = text(&ask(&bin, &scratch, &["set", &pid, "--limit", "128M"]));
    assert!(answer.contains("limit 128.0 MiB, resident limit none"), "{answer}");
    holder.end();
}

#[test]
fn the_limit_grows_far_past_what_it_began_with() {
    let Some(bin) = binaries() else { return };
    let (program, scratch) = (compile("holder"), Scratch::new());
    let mut holder = Holder::start(&bin, &scratch, &["--resident", "16M"], &program.path, "400");
    let pid = holder.pid.to_string();
    for (size, least, most) in [("300M", 250, 300 + 150), ("16M", 0, 16 + 150), ("1G", 400, 1024)] {
        text(&ask(&bin, &scratch, &["set", &pid, "--resident", size]));
        let begin = Instant::now();
        while !(least..=most).contains(&holder.resident_mib()) {
            assert!(begin.elapsed() < HANG, "{size}: {} MiB resident", holder.resident_mib());
            holder.check();
        }
        println!("resident {size}: {} MiB with the pool", holder.resident_mib());
    }
    holder.end();
}

#[test]
fn two_runs_are_listed_and_told_apart() {
    let Some(bin) = binaries() else { return };
    let (program, scratch) = (compile("holder"), Scratch::new());
    let mut one = Holder::start(&bin, &scratch, &["--limit", "64M"], &program.path, "80");
    let mut two = Holder::start(&bin, &scratch, &["--resident", "128M"], &program.path, "8");
    let list = text(&ask(&bin, &scratch, &["run", "--list"]));
    let line = |runner: u32| {
        list.lines().find(|line| line.trim_start().starts_with(&format!("{runner} "))).unwrap()
    };
    // Other users may have runs on this machine.
    let own = |list: &str| list.lines().filter(|line| line.contains(&program.path)).count();
    assert_eq!(own(&list), 2, "{list}");
    assert!(
        line(one.runner.id()).contains("64.0 MiB") && line(one.runner.id()).contains(" none "),
        "{list}"
    );
    assert!(
        line(two.runner.id()).contains("128.0 MiB") && line(two.runner.id()).contains("holder 8"),
        "{list}"
    );

    text(&ask(&bin, &scratch, &["set", &two.pid.to_string(), "--resident", "200M"]));
    let about = |pid: u32| -> serde_json::Value {
        serde_json::from_str(&text(&ask(&bin, &scratch, &["stat", &pid.to_string(), "--json"])))
            .unwrap()
    };
    assert_eq!(about(one.pid)["limit_bytes"], 64 << 20);
    assert_eq!(about(two.pid)["resident_limit_bytes"], 200 << 20);
    let stat = about(one.runner.id());
    assert_eq!(
        (&stat["run"], &stat["processes"][0]["pid"]),
        (&one.runner.id().into(), &one.pid.into())
    );
    assert!(stat["processes"][0]["folded_bytes"].as_u64().unwrap() > 16 << 20, "{stat}");
    let table = text(&ask(&bin, &scratch, &["stat", &one.pid.to_string()]));
    assert!(
        table.contains("limit 64.0 MiB, resident limit none")
            && table.contains(&one.pid.to_string()),
        "{table}"
    );
    one.check();
    two.check();
    one.end();
    let list = text(&ask(&bin, &scratch, &["run", "--list"]));
    assert_eq!(own(&list), 1, "{list}");
    two.end();
    assert_eq!(own(&text(&ask(&bin, &scratch, &["run", "--list"]))), 0);
    assert_eq!(std::fs::read_dir(scratch.0.join("memfold")).unwrap().count(), 0);
}

#[test]
fn run_without_an_engine_is_listed_with_its_memory() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let mut small = memfold(&bin, &["run", "--limit", "64M", "--", "sh", "-c", "read x"]);
    small.env("XDG_RUNTIME_DIR", &scratch.0).stdin(Stdio::piped());
    let mut small = small.spawn().unwrap();
    let (pid, begin) = (small.id().to_string(), Instant::now());
    loop {
        let list = text(&ask(&bin, &scratch, &["run", "--list"]));
        let lines = list.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let line = lines.into_iter().find(|line| line[0] == pid).unwrap_or_default();
        // PID, limit, "none", and the resident size; at the end one process and its seconds.
        if line.get(4).is_some_and(|size| *size != "0") && line[10] == "1" {
            break;
        }
        assert!(begin.elapsed() < HANG, "{list}");
    }
    drop(small.stdin.take());
    small.wait().unwrap();
}

#[test]
fn nonsense_is_refused_and_changes_nothing() {
    let Some(bin) = binaries() else { return };
    let (program, scratch) = (compile("holder"), Scratch::new());
    let holder = Holder::start(&bin, &scratch, &["--limit", "64M"], &program.path, "8");
    let pid = holder.pid.to_string();
    let own = std::process::id().to_string();
    for (arguments, words) in [
        (&["set", &pid, "--limit", "1M"][..], &["--limit", "too small"][..]),
        (&["set", &pid, "--limit", "lots"], &["\"lots\" is not a size"]),
        (&["set", &pid, "--limit", "none"], &["Give --limit SIZE or --resident SIZE"]),
        (&["set", &pid], &["Give --limit SIZE or --resident SIZE"]),
        (&["set", "--limit", "64M"], &["PID"]),
        (&["stat", "0"], &["PID"]),
        (&["stat", "x"], &["PID"]),
        (&["stat", "4000000000"], &["Process 4000000000", "no such process"]),
        (&["stat", &own], &["to no run of yours", "memfold list"]),
        (&["set", &own, "--limit", "64M"], &["to no run of yours"]),
        (&["explain", "x"], &["PID"]),
        (&["explain", "0"], &["PID"]),
        (&["explain", &pid, "--limit", "64M"], &["--limit"]),
        (&["explain", "4000000000"], &["Process 4000000000", "no such process"]),
        (&["explain", &own], &["to no run of yours", "memfold list"]),
        (&["run", "--list", "--limit", "64M"], &["--list"]),
    ] {
        let output = ask(&bin, &scratch, arguments);
        assert_refused(&output, 125, words);
    }
    let about = text(&ask(&bin, &scratch, &["stat", &pid]));
    assert!(about.contains("limit 64.0 MiB, resident limit none"), "{about}");
    holder.end();
}

#[test]
fn remains_of_a_killed_run_are_removed() {
    let Some(bin) = binaries() else { return };
    let (program, scratch) = (compile("holder"), Scratch::new());
    let mut holder = Holder::start(&bin, &scratch, &["--limit", "64M"], &program.path, "8");
    let runner = holder.runner.id().to_string();
    holder.runner.kill().unwrap();
    holder.runner.wait().unwrap();
    let directory = scratch.0.join("memfold");
    assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 1);
    // The first of them takes the socket away.
    let output = ask(&bin, &scratch, &["explain", &runner]);
    assert_refused(&output, 125, &["no such process"]);
    assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 0);
    let output = ask(&bin, &scratch, &["stat", &runner]);
    assert_refused(&output, 125, &["no such process"]);
}

#[test]
fn a_process_of_a_stopped_run_belongs_to_it() {
    let Some(bin) = binaries() else { return };
    let (program, scratch) = (compile("holder"), Scratch::new());
    let holder = Holder::start(&bin, &scratch, &["--limit", "64M"], &program.path, "8");
    let runner = holder.runner.id();
    // SAFETY: kill touches no memory, and the process is a child that has not been waited for.
    let send = |signal| unsafe { libc::kill(runner as i32, signal) };
    assert_eq!(send(libc::SIGSTOP), 0);
    for command in ["stat", "explain"] {
        let output = ask(&bin, &scratch, &[command, &holder.pid.to_string()]);
        assert_refused(&output, 125, &[&format!("Run {runner}: "), "stopped"]);
    }
    assert_eq!(send(libc::SIGCONT), 0);
    holder.end();
}

#[test]
fn another_user_finds_and_changes_nothing() {
    let Some(bin) = binaries() else { return };
    if !can_make_worlds() {
        return;
    }
    let (program, scratch) = (compile("holder"), Scratch::new());
    let holder = Holder::start(&bin, &scratch, &["--limit", "64M"], &program.path, "8");
    // No other test has runs of this user. The command lies where every user can execute it.
    let open = Scratch::new();
    let command = open.file("memfold", std::fs::read(bin.join("memfold")).unwrap(), 0o755);
    const OTHER: [&str; 5] = ["--reuid", "61234", "--regid", "61234", "--clear-groups"];
    let as_other = |arguments: &[&str]| {
        let mut sudo = Command::new("setpriv");
        sudo.args(OTHER).arg(&command).args(arguments);
        sudo.env("XDG_RUNTIME_DIR", &scratch.0).output().unwrap()
    };
    let pid = holder.pid.to_string();
    assert_refused(&as_other(&["stat", &pid]), 125, &["another user (0)"]);
    assert_refused(&as_other(&["explain", &pid]), 125, &["another user (0)"]);
    assert_refused(&as_other(&["set", &pid, "--limit", "32M"]), 125, &["another user (0)"]);
    assert_eq!(text(&as_other(&["run", "--list"])).lines().count(), 1);
    // The directory is open to all, so the run checks the peer's user, and the client checks the
    // directory's owner.
    use std::os::unix::fs::PermissionsExt;
    let set = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap()
    };
    set(&scratch.0, 0o755);
    set(&scratch.0.join("memfold"), 0o777);
    set(&scratch.0.join("memfold").join(format!("{}.sock", holder.runner.id())), 0o777);
    let script = "import socket,sys; s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); \
                  s.sendall(b'{\"do\":\"set\",\"limit\":\"32M\"}'); s.shutdown(1); print(repr(s.recv(9999)))";
    let socket = scratch.0.join("memfold").join(format!("{}.sock", holder.runner.id()));
    let mut python = Command::new("setpriv");
    python.args(OTHER).args(["python3", "-c", script]).arg(&socket);
    let output = python.env("PATH", "/usr/bin:/bin").output().unwrap();
    assert!(!String::from_utf8_lossy(&output.stdout).contains("limit_bytes"), "{output:?}");
    set(&scratch.0.join("memfold"), 0o700);
    let about = text(&ask(&bin, &scratch, &["stat", &pid]));
    assert!(about.contains("limit 64.0 MiB"), "{about}");
    holder.end();
}

#[test]
fn children_follow_a_limit_that_changes() {
    let Some(bin) = binaries() else { return };
    let (program, scratch) = (compile("holder"), Scratch::new());
    let shell = format!("{} 64", program.path);
    let mut holder = {
        let mut command = memfold(
            &bin,
            &["run", "--limit", "256M", "--", "sh", "-c", &format!("{shell}; exit 0")],
        );
        command.env("XDG_RUNTIME_DIR", &scratch.0).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut runner = command.spawn().unwrap();
        let (input, output) = (runner.stdin.take(), BufReader::new(runner.stdout.take().unwrap()));
        let mut holder = Holder { runner, pid: 0, input, output };
        holder.pid = holder.line().strip_prefix("ready ").unwrap().parse().unwrap();
        holder
    };
    text(&ask(&bin, &scratch, &["set", &holder.pid.to_string(), "--limit", "48M"]));
    holder.wait_for("a child, limit 48M", |mib| mib <= 48);
    holder.check();
    holder.end();
}

#[test]
fn a_reader_that_has_gone_is_no_failure() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let list = |out: Stdio| {
        let mut list = memfold(&bin, &["run", "--list"]);
        list.env("XDG_RUNTIME_DIR", &scratch.0).stdout(out).stderr(Stdio::piped());
        list.spawn().unwrap().wait_with_output().unwrap()
    };
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = list(writer.into());
    assert_eq!((output.status.code(), output.stderr.len()), (Some(0), 0));
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    assert_refused(&list(full.into()), 125, &["Writing to stdout failed"]);
}
