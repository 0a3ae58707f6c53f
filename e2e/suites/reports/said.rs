//! Messages of a run: each is printed once, to memfold's own standard error or to a file, and never
//! into a stream of the program.
use crate::common::{
    NOBODY, Scratch, assert_refused, binaries, can_make_worlds, compile, folded_in,
    make_unmanageable, managed_in, memfold, run,
};
use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Output;

const RANDOM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/programs/random_data.py");

/// Each child is managed and exceeds its limit. Its parent reads its standard error.
const PARENT: &str = r#"
import subprocess, sys
for _ in range(3):
    done = subprocess.run([sys.executable, sys.argv[1], "60"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    print(done.returncode, done.stdout, done.stderr)
"#;

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Returns memfold's lines on standard error. Asserts that there are no others.
#[track_caller]
fn said(output: &Output) -> Vec<String> {
    let lines: Vec<String> = text(&output.stderr).lines().map(str::to_string).collect();
    assert!(lines.iter().all(|line| line.starts_with("memfold: ")), "{lines:?}");
    lines
}

#[test]
fn warning_prints_once_and_never_to_program_streams() {
    let Some(bin) = binaries() else { return };
    let arguments =
        ["run", "--limit", "24M", "--adopt-at", "1", "--", "python3", "-c", PARENT, RANDOM];
    let output = memfold(&bin, &arguments).output().unwrap();
    assert_eq!(text(&output.stdout), "0 b'right\\n' b''\n".repeat(3), "{output:?}");
    let lines = said(&output);
    assert!(lines.len() == 1 && lines[0].contains("can't be kept"), "{lines:?}");
    // A program that can't be managed gets no warning in its streams either.
    let script = r#"for n in 1 2 3; do (ulimit -v 60000; /bin/echo ran) 2>&1; done; exit $?"#;
    let output = run(&bin, &[], &["sh", "-c", script]);
    assert_eq!(text(&output.stdout), "ran\n".repeat(3), "{output:?}");
    let lines = said(&output);
    assert!(lines.len() == 1 && lines[0].contains("unmanaged"), "{lines:?}");
}

#[test]
fn reason_of_a_fast_end_is_printed_with_the_process() {
    let Some(bin) = binaries() else { return };
    // The program itself, and two that it starts.
    let output = run(&bin, &["--on-full", "stop"], &["python3", RANDOM, "150"]);
    assert_eq!(output.status.code(), Some(125), "{output:?}");
    let lines = said(&output).concat();
    assert!(lines.contains("--on-full stop") && !lines.contains("memfold: process"), "{lines}");
    let script = r#"for n in 1 2; do python3 "$1" 150 2>&1; echo $?; done"#;
    let output = run(&bin, &["--on-full", "stop"], &["sh", "-c", script, "sh", RANDOM]);
    assert_eq!(text(&output.stdout), "125\n".repeat(2), "{output:?}");
    let lines = said(&output);
    let reasons = lines.iter().filter(|line| line.contains("--on-full stop")).count();
    let processes: HashSet<_> = lines
        .iter()
        .filter_map(|line| line.strip_prefix("memfold: process ")?.split(':').next())
        .collect();
    assert!(reasons == 2 && processes.len() == 2, "{lines:?}");
}

#[test]
fn log_flag_appends_all_messages_to_the_file() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let log = scratch.file("log", "before\n", 0o644);
    let output = run(&bin, &["--log", &log, "--summary"], &["python3", RANDOM, "150"]);
    assert_eq!(
        (text(&output.stdout), text(&output.stderr)),
        ("right\n".to_string(), String::new())
    );
    let text = fs::read_to_string(&log).unwrap();
    let lines: Vec<_> = text.lines().collect();
    assert!(
        lines[0] == "before" && lines[1].contains("can't be kept") && lines.len() > 3,
        "{text}"
    );
    // Runs may share a file, so each line names its run.
    let run_of = |line: &str| line.strip_prefix("memfold[")?.split_once("]: ")?.0.parse().ok();
    let runs: Vec<Option<u32>> = lines[1..].iter().map(|line| run_of(line)).collect();
    assert!(runs[0].is_some() && runs.iter().all(|run| *run == runs[0]), "{text}");
    let output = run(&bin, &["--log", "/dev/full"], &["sh", "-c", "kill -9 $$"]);
    let lines = self::said(&output);
    assert!(lines.len() == 4 && lines[1].contains("SIGKILL ended the program"), "{lines:?}");
    for words in ["warning: --log: Writing to /dev/full failed: No space left", "go to stderr"] {
        assert!(lines[0].contains(words), "{lines:?}");
    }
    for bad in ["/no/such/directory/log", "/tmp"] {
        assert_refused(&run(&bin, &["--log", bad], &["echo", "ran"]), 125, &["--log", bad]);
    }
}

#[test]
fn log_has_the_level_and_the_form_that_were_asked_for() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let log_lines = |level: &str| -> Vec<serde_json::Value> {
        let log = scratch.file("log", "", 0o644);
        let flags = ["--log", &log, "--summary", "--log-level", level, "--log-format", "json"];
        let output = run(&bin, &flags, &["python3", RANDOM, "150"]);
        assert_eq!(text(&output.stdout), "right\n", "{output:?}");
        let text = fs::read_to_string(&log).unwrap();
        text.lines().map(|line| serde_json::from_str(line).expect(line)).collect()
    };
    let (all, warnings) = (log_lines("info"), log_lines("warning"));
    let levels = |lines: &[serde_json::Value]| -> Vec<String> {
        lines.iter().map(|line| line["level"].as_str().unwrap().to_string()).collect()
    };
    assert!(levels(&all)[0] == "warning" && levels(&all).iter().any(|level| level == "info"));
    assert!(all.iter().any(|line| line["message"].as_str().unwrap().starts_with("peak ")));
    assert!(!warnings.is_empty() && levels(&warnings).iter().all(|level| level == "warning"));
    assert_eq!(log_lines("error"), Vec::<serde_json::Value>::new());
    for flags in [["--log-level", "loud"], ["--log-format", "xml"]] {
        assert_refused(&run(&bin, &flags, &["echo", "ran"]), 125, &flags);
    }
}

/// The machine or the user has as many threads as allowed. Root may have more.
#[test]
fn failed_engine_threads_are_retried_and_warned_of_once() {
    if !can_make_worlds() {
        return;
    }
    let scratch = Scratch::new();
    let log = scratch.file("log", "", 0o666);
    fs::set_permissions(&scratch.0, fs::Permissions::from_mode(0o755)).unwrap();
    let script = r#"
import resource, sys
most = resource.getrlimit(resource.RLIMIT_NPROC)[1]
resource.setrlimit(resource.RLIMIT_NPROC, (1, most))
page = lambda n: (b"%9d" % n) * 455
pages = [page(n) for n in range(20000)]
while "starting engine threads" not in open(sys.argv[1]).read(): pass
resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
pages += [page(n) for n in range(20000, 60000)]
print(all(it == page(n) for n, it in enumerate(pages)))
"#;
    let world = NOBODY.replace("65534", "54321");
    let flags = ["--resident", "40M", "--log", &log];
    let command = ["python3", "-c", script, &log];
    let Some((output, _)) = folded_in(&world, &flags, 32, &command) else { return };
    let log_text = fs::read_to_string(&log).unwrap();
    assert_eq!(text(&output.stdout), "True\n", "{output:?} {log_text}");
    assert_eq!(log_text.matches("starting engine threads").count(), 1, "{log_text}");
}

/// A daemon outlives `memfold run`, so its messages can't be printed.
#[test]
fn process_outliving_run_is_managed_and_prints_its_own_end() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let (out, mark) = (scratch.path("out"), scratch.path("done"));
    let script = r#"run=$PPID; (while kill -0 $run; do sleep 0.02; done; python3 "$1" 150 >"$2" 2>&1; echo $? >"$3.new"; mv "$3.new" "$3") </dev/null >/dev/null 2>&1 &"#;
    let output =
        run(&bin, &["--on-full", "stop"], &["sh", "-c", script, "sh", RANDOM, &out, &mark]);
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let begin = std::time::Instant::now();
    while !std::path::Path::new(&mark).exists() {
        assert!(begin.elapsed().as_secs() < 600, "the daemon does not end");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let (status, words) = (fs::read_to_string(mark).unwrap(), fs::read_to_string(out).unwrap());
    assert!(status == "125\n" && words.contains("--on-full stop"), "{status} {words}");
}

#[test]
fn an_occupied_directory_of_sockets_is_named() {
    if !can_make_worlds() {
        return;
    }
    // SAFETY: the call has no preconditions.
    let path = format!("/tmp/memfold-{}", unsafe { libc::geteuid() });
    // A directory of another user. Only this one is mounted over, because memfold itself may lie in
    // /tmp.
    let script = format!("mkdir -p -m 700 {path} && mount -t tmpfs -o uid=54321 none {path}");
    let world = format!("{script} && exec env -u XDG_RUNTIME_DIR \"$@\"");
    let Some(output) = managed_in(&world, &["--limit", "64M"], &["/bin/echo", "ran"]) else {
        return;
    };
    let words = text(&output.stderr);
    assert_eq!(text(&output.stdout), "ran\n", "{words}");
    assert!(words.lines().any(|line| line.contains("warning") && line.contains(&path)), "{words}");
}

/// None of this memory can be folded.
#[test]
fn program_with_kernel_merging_gets_a_warning() {
    let Some(bin) = binaries() else { return };
    let script = r#"
import ctypes
if ctypes.CDLL(None).prctl(67, 1, 0, 0, 0): print("SKIPPED")
data = [bytes([n & 255]) * 4096 for n in range(40000)]
"#;
    let output = run(&bin, &[], &["python3", "-c", script]);
    if text(&output.stdout).contains("SKIPPED") {
        eprintln!("SKIPPED, NOTHING WAS TESTED: this kernel has no PR_SET_MEMORY_MERGE");
        return;
    }
    let words = text(&output.stderr);
    assert!(output.status.success() && words.contains("PR_SET_MEMORY_MERGE"), "{words}");
}

#[test]
fn a_program_that_closes_every_descriptor_keeps_its_swap_file() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let script = r#"
import os, random
os.closerange(3, 100000)
data = [random.Random(n).randbytes(1 << 20) for n in range(120)]
os.closerange(3, 100000)
print(all(one == random.Random(n).randbytes(1 << 20) for n, one in enumerate(data)))
"#;
    let directory = scratch.0.to_str().unwrap();
    let stats = scratch.path("stats");
    let output =
        run(&bin, &["--swap", directory, "--stats-file", &stats], &["python3", "-c", script]);
    assert_eq!(text(&output.stdout), "True\n", "{output:?}");
    let stats: serde_json::Value = serde_json::from_slice(&fs::read(stats).unwrap()).unwrap();
    assert!(stats["pswpin"].as_u64() > Some(0), "it never read its swap file");
}

/// Asserts that a run prints one line, with all the words.
#[track_caller]
fn assert_says(output: &Output, words: &[&str]) {
    let lines = said(output);
    assert!(
        matches!(&lines[..], [line] if line.contains("warning") && words.iter().all(|word| line.contains(word))),
        "{words:?}: {lines:?}"
    );
}

#[cfg(target_arch = "x86_64")]
#[test]
fn refusals_and_unfolded_memory_are_reported_once() {
    let Some(bin) = binaries() else { return };
    let program = compile("unserved");
    for (what, word) in [
        ("io_uring", "io_uring_setup fails with ENOSYS"),
        ("aio", "io_setup"),
        ("kvm", "KVM"),
        ("vfio", "VFIO"),
        ("vhost", "vhost"),
        ("userfaultfd", "userfaultfd"),
        ("int80", "int 0x80"),
    ] {
        let output = run(&bin, &[], &[&program.path, what]);
        if what == "int80" && output.stdout == b"none\n" {
            eprintln!("SKIPPED: this kernel has no int 0x80");
            continue;
        }
        assert_eq!(output.stdout, b"right\n", "{what}: {output:?}");
        assert_says(&output, &[word]);
    }
    let output = run(&bin, &[], &[&program.path, "filter"]);
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"right\n"[..]));
    assert_says(&output, &["A seccomp filter of the program refuses"]);
}

/// A program that CMD executes and memfold can't be loaded into: no warning, and a line in the
/// summary.
#[cfg(target_arch = "x86_64")]
#[test]
fn program_that_runs_unmanaged_is_counted_in_the_summary() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let source = "#include <stdio.h>\nint main(void) { puts(\"ran\"); return 0; }";
    let file = scratch.compile("static", source, &["-static"]);
    make_unmanageable(&scratch, &file);
    let script = scratch.file("script", format!("#!{file}\n"), 0o755);
    let lines_counted = |output: &Output, times: u32, words: &[&str]| {
        let lines = said(output);
        let count = format!("executed {times} times");
        let has = |line: &String| line.contains(&count) && words.iter().all(|w| line.contains(w));
        assert!(lines.iter().filter(|line| has(line)).count() == 1, "{words:?}: {lines:?}");
        assert!(!lines.concat().contains("warning"), "{lines:?}");
    };
    for command in [&file, &script] {
        let twice = format!("{command}; {command}; /no/such/program; exit 0");
        let output =
            run(&bin, &["--summary"], &["sh", "-c", &format!("{{ {twice}; }} 2>/dev/null")]);
        assert_eq!(output.stdout, b"ran\nran\n", "{output:?}");
        lines_counted(&output, 2, &[&file, "a segment of it is invalid"]);
        let output = run(&bin, &[], &["sh", "-c", &format!("{command}; exit 0")]);
        assert!(said(&output).is_empty(), "{output:?}");
    }
    // Executed by descriptor and by posix_spawn. A file that can't be executed isn't counted.
    let script = r#"
import os, subprocess, sys
pid = os.fork()
if pid == 0: os.execve(os.open(sys.argv[1], os.O_RDONLY), ["static"], os.environ)
os.waitpid(pid, 0)
subprocess.run([sys.argv[1]])
try: os.execv(sys.argv[2], ["no"])
except PermissionError: pass
"#;
    let no = scratch.file("no", "no program", 0o644);
    let output = run(&bin, &["--summary"], &["python3", "-c", script, &file, &no]);
    assert_eq!(output.stdout, b"ran\nran\n", "{output:?}");
    lines_counted(&output, 2, &["/proc/self/fd/"]);
    let output = run(&bin, &[], &["env", "MEMFOLD_DISABLE=1", "/bin/echo", "ran"]);
    assert!(said(&output).is_empty(), "{output:?}");
    if !can_make_worlds() {
        return;
    }
    // Root is no other user for its own set-user-ID programs.
    let su = scratch.compile("su", source, &[]);
    fs::set_permissions(&su, fs::Permissions::from_mode(0o4755)).unwrap();
    fs::set_permissions(&scratch.0, fs::Permissions::from_mode(0o755)).unwrap();
    assert!(said(&run(&bin, &[], &["sh", "-c", &format!("{su}; true")])).is_empty());
    let other = format!("setpriv --reuid 65534 --regid 65534 --clear-groups {su}; true");
    lines_counted(&run(&bin, &["--summary"], &["sh", "-c", &other]), 1, &[&su, "set-user-ID"]);
}

#[test]
fn program_with_full_environment_runs_unmanaged_with_warning() {
    let Some(bin) = binaries() else { return };
    let script = r#"
import os, subprocess
for environment in ({f"V{n}": "" for n in range(16_010)}, {"LD_PRELOAD": ":" * 8_190}, {"LD_PRELOAD": ":" * 7_000}):
    given = {"PATH": os.environ["PATH"]} | environment
    print(subprocess.run(["sh", "-c", "echo $MEMFOLD_RUN | wc -c"], env=given, capture_output=True, text=True))
"#;
    let output = run(&bin, &[], &["python3", "-c", script]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(text(&output.stdout).matches("stdout='1\\n', stderr=''").count(), 3, "{output:?}");
    let lines = said(&output);
    assert!(lines.len() == 1 && lines[0].contains("16000 environment variables"), "{lines:?}");
}
