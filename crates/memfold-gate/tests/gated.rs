//! Programs behave behind the gate as they do without it: same output, same end.
//!
//! Each runs plainly and with the library of `examples/counting.rs`, whose keeper has no memory; one
//! with that of `examples/vanishing.rs`, whose keeper takes memory away.
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::OnceLock;

/// The library to load.
fn library() -> PathBuf {
    examples().join("libcounting.so")
}

/// Where the libraries are.
fn examples() -> &'static PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "-p", "memfold-gate", "--examples"]);
        assert!(build.status().expect("cargo").success());
        let tests = std::env::current_exe().expect("a path");
        let debug = tests.ancestors().nth(2).expect("target/debug/deps");
        debug.with_file_name("debug").join("examples")
    })
}

/// Compiles a program of `tests/programs`.
fn compile(name: &str, options: &[&str]) -> PathBuf {
    let to = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let from = format!("{}/tests/programs/{name}.c", env!("CARGO_MANIFEST_DIR"));
    let mut cc = Command::new("cc");
    cc.args(["-O1", "-g", "-w", "-pthread", "-o"]).arg(&to).arg(from).args(options);
    assert!(cc.status().expect("a C compiler").success());
    to
}

fn run(command: &mut Command) -> (Option<i32>, String, Output) {
    let output = command.output().expect("the program runs");
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    (output.status.code(), text.into_owned(), output)
}

/// Runs a command twice and compares.
fn same(program: &str, args: &[&str]) -> String {
    let command = || {
        let mut command = Command::new(program);
        command.args(args).current_dir(env!("CARGO_TARGET_TMPDIR"));
        command
    };
    let plain = run(&mut command());
    let gated = run(command().env("LD_PRELOAD", library()));
    assert_eq!((&plain.0, &plain.1), (&gated.0, &gated.1), "{program} {args:?}");
    plain.1
}

fn same_program(name: &str) -> String {
    same(compile(name, &[]).to_str().expect("a path"), &[])
}

fn has(program: &str) -> bool {
    let look = format!("command -v {program} >/dev/null");
    let found = Command::new("sh").args(["-c", &look]).status().expect("a shell").success();
    if !found {
        eprintln!("skipped: there is no {program}");
    }
    found
}

#[test]
fn the_gate_is_passed() {
    // Three lines: a shell makes two processes, one of which becomes another program.
    let script = "exec 9>&2; cat /proc/self/status | grep -c Seccomp: >/dev/null; exec true";
    let mut command = Command::new("sh");
    command.args(["-c", script]).env("LD_PRELOAD", library()).env("MEMFOLD_GATE_COUNT", "9");
    let (code, text, _) = run(&mut command);
    assert_eq!(code, Some(0));
    let counts = |line: &str| line.split_whitespace().map(str::to_string).collect::<Vec<_>>();
    assert!(text.lines().filter(|line| counts(line).len() == 3).count() >= 3, "{text}");
}

#[test]
fn coroutines_on_small_stacks_are_interrupted_by_timers() {
    assert!(same_program("coroutines").contains("ticked 1"));
}

#[test]
fn masks_actions_information_and_contexts_are_as_the_kernel_has_them() {
    assert!(same_program("signals").contains("ends by 11 7 31 11 1003 11"));
}

#[test]
fn calls_that_a_filter_of_the_programs_refuses_come_to_its_handler() {
    let said = same_program("refused");
    for who in ["process", "thread", "child"] {
        assert!(said.contains(&format!("{who}: 93 seen, 0 wrong, 0 bad")), "{said}");
    }
}

#[test]
fn threads_are_cancelled_signalled_copied_and_end() {
    assert!(same_program("threads").contains("ended"));
}

/// Pages of its buffers are taken away all the time, and only the program's own touches bring them
/// back. A timer interrupts its calls a thousand times a second, which it must not hear of either.
#[test]
fn no_system_call_meets_a_page_that_was_taken_away() {
    let script = format!("exec 9>&2; exec {}", compile("buffers", &[]).display());
    for _ in 0..5 {
        let mut command = Command::new("sh");
        command.args(["-c", &script]).env("LD_PRELOAD", examples().join("libvanishing.so"));
        let (code, text, output) = run(command.env("MEMFOLD_GATE_COUNT", "9"));
        assert_eq!(code, Some(0), "{text}");
        assert_eq!(String::from_utf8_lossy(&output.stdout), "all there\n");
        let taken = |line: &str| -> Option<u32> {
            line.strip_prefix("taken")?.split_whitespace().next()?.parse().ok()
        };
        assert!(text.lines().filter_map(taken).max() > Some(1000), "{text}");
    }
}

/// Threads wait in every kind of call, make others, end, fork, fault, and stand on alternate stacks.
#[test]
fn a_process_is_armed_while_its_threads_are_in_everything() {
    let program = compile("late", &["-ldl"]);
    for busy in [false, true].repeat(10) {
        let mut command = Command::new(&program);
        command.arg(examples().join("liblate.so")).args(busy.then_some("ticks"));
        let (code, text, _) = run(&mut command);
        assert_eq!((code, text.as_str()), (Some(0), "all passed\n"));
    }
}

#[test]
fn shells_and_interpreters_run() {
    same(
        "bash",
        &["-c", "trap 'echo got' USR1; kill -USR1 $$; x=$(ls / | wc -l); (exit 3); echo $?"],
    );
    if has("perl") {
        same(
            "perl",
            &[
                "-e",
                "$SIG{ALRM}=sub{die 'rang'}; alarm 1; eval{sleep 9}; print $@; fork or exit 3; wait; print $?",
            ],
        );
    }
    if has("python3") {
        same("python3", &["-c", include_str!("programs/many.py")]);
    }
    if has("gcc") {
        same("sh", &["-c", "echo 'int main(){return 4;}' | gcc -x c -o four - && ./four; echo $?"]);
    }
    if has("sqlite3") {
        same(
            "sqlite3",
            &[":memory:", "create table a(x); insert into a values(1),(2); select sum(x) from a"],
        );
    }
    if has("node") {
        same(
            "node",
            &["-e", "console.log(require('child_process').execSync('echo n').toString())"],
        );
    }
    if has("tar") {
        same("sh", &["-c", "tar cf - -C /usr/include . | md5sum"]);
    }
}
