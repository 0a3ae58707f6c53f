//! Programs behave behind the gate as they do without it: same output, same end.
//!
//! Each runs plainly and with the library of `examples/counting.rs`, whose keeper has no memory; one
//! with that of `examples/vanishing.rs`, whose keeper takes memory away.
use std::path::{Path, PathBuf};
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
        // nextest has built them with the tests. Alone, `--test gated` builds none.
        if std::env::var_os("NEXTEST").is_none() {
            let mut build = Command::new(env!("CARGO"));
            build.args(["build", "--quiet", "-p", "memfold-gate", "--examples"]);
            assert!(build.status().expect("cargo").success());
        }
        let tests = std::env::current_exe().expect("a path");
        let debug = tests.ancestors().nth(2).expect("target/debug/deps");
        debug.with_file_name("debug").join("examples")
    })
}

/// Compiles a program of `tests/programs`. Tests in other processes may compile and execute it too, so
/// a whole one gets its name.
fn compile(name: &str, options: &[&str]) -> PathBuf {
    let place = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let to = place.join(format!("{name}-{}", own_name()));
    let from = format!("{}/tests/programs/{name}.c", env!("CARGO_MANIFEST_DIR"));
    let mut cc = Command::new("cc");
    cc.args(["-O1", "-g", "-w", "-pthread", "-o"]).arg(&to).arg(from).args(options);
    assert!(cc.status().expect("a C compiler").success());
    std::fs::rename(&to, place.join(name)).expect("a file of ours");
    place.join(name)
}

/// A name that no other test has at the same time, also in another process.
fn own_name() -> String {
    format!("{}-{:?}", std::process::id(), std::thread::current().id())
}

fn run(command: &mut Command) -> (Option<i32>, String, Output) {
    let output = command.output().expect("the program runs");
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    (output.status.code(), text.into_owned(), output)
}

/// Runs a command twice and compares.
fn same(program: &str, args: &[&str]) -> String {
    same_under(&library(), program, args).0
}

/// The same under a library; also what its keeper has said of each process at its end.
fn same_under(library: &Path, program: &str, args: &[&str]) -> (String, String) {
    let baseline = run(Command::new(program).args(args).current_dir(env!("CARGO_TARGET_TMPDIR")));
    let to = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("said-{}", own_name()));
    let script = format!("exec 9>'{}'; exec \"$@\"", to.display());
    let mut command = Command::new("sh");
    command.args(["-c", &script, "sh", program]).args(args);
    command.current_dir(env!("CARGO_TARGET_TMPDIR"));
    command.env("LD_PRELOAD", library).env("MEMFOLD_GATE_COUNT", "9");
    let output = run(&mut command);
    assert_eq!((&baseline.0, &baseline.1), (&output.0, &output.1), "{program} {args:?}");
    let text = std::fs::read_to_string(&to).expect("a file");
    std::fs::remove_file(to).expect("a file of ours");
    (baseline.1, text)
}

/// Pages that a keeper has taken away, of what it has said.
fn taken(said: &str) -> impl Iterator<Item = u32> {
    let of_line = |line: &str| -> Option<u32> {
        line.strip_prefix("taken")?.split_whitespace().next()?.parse().ok()
    };
    said.lines().filter_map(of_line)
}

fn same_program(name: &str) -> String {
    same(compile(name, &[]).to_str().expect("a path"), &[])
}

fn has(program: &str) -> bool {
    let look = format!("command -v {program} >/dev/null");
    let is_found = Command::new("sh").args(["-c", &look]).status().expect("a shell").success();
    if !is_found {
        eprintln!("skipped: there is no {program}");
    }
    is_found
}

#[test]
fn system_calls_pass_the_gate() {
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
fn signals_look_as_the_kernel_makes_them() {
    assert!(same_program("signals").contains("ends by 11 7 31 11 1003 11"));
}

#[test]
fn call_refused_by_a_filter_reaches_the_handler() {
    let text = same_program("refused");
    for who in ["process", "thread", "child"] {
        assert!(text.contains(&format!("{who}: 93 seen, 0 wrong, 0 bad")), "{text}");
    }
}

#[test]
fn calls_that_fail_set_errno_at_rewritten_sites() {
    assert!(same_program("errors").contains("failed as ever"));
}

#[test]
fn threads_are_cancelled_signalled_copied_and_end() {
    assert!(same_program("threads").contains("ended"));
}

/// Pages of its buffers are taken away all the time, and only the program's own touches bring them
/// back. A timer interrupts its calls a thousand times a second, which it must not hear of either.
#[test]
fn no_system_call_meets_an_evicted_page() {
    let script = format!("exec 9>&2; exec {}", compile("buffers", &[]).display());
    for _ in 0..5 {
        let mut command = Command::new("sh");
        command.args(["-c", &script]).env("LD_PRELOAD", examples().join("libvanishing.so"));
        let (code, text, output) = run(command.env("MEMFOLD_GATE_COUNT", "9"));
        assert_eq!(code, Some(0), "{text}");
        assert_eq!(String::from_utf8_lossy(&output.stdout), "all there\n");
        // On busy CPUs the program may end early.
        assert!(taken(&text).max() > Some(100), "{text}");
    }
}

/// Threads wait in every kind of call, make others, end, fork, fault, and stand on alternate stacks.
#[test]
fn busy_threads_are_armed() {
    let program = compile("late", &["-ldl"]);
    for busy in [false, true].repeat(10) {
        let mut command = Command::new(&program);
        command.arg(examples().join("liblate.so")).args(busy.then_some("ticks"));
        let (code, text, _) = run(&mut command);
        assert_eq!((code, text.as_str()), (Some(0), "all passed\n"));
    }
}

/// Shells and interpreters, each with what it does; each has some large blocks.
const PROGRAMS: &[(&str, &[&str])] = &[
    (
        "bash",
        &[
            "-c",
            "trap 'echo got' USR1; kill -USR1 $$; x=$(ls / | wc -l); (exit 3); echo $?
            y=$(printf '%20000s' x); z=${y// /abcdefghij}; while read -r l; do n=$((n + ${#l})); done <<<$z
            (echo $n $(echo $z | md5sum))",
        ],
    ),
    (
        "perl",
        &[
            "-e",
            "$SIG{ALRM}=sub{die 'rang'}; alarm 1; eval{sleep 9}; print $@; fork or exit 3; wait; print $?;
            my @all = split / /, 'some words ' x 100000; open(my $to, '|-', 'md5sum'); print $to sort @all",
        ],
    ),
    ("python3", &["-c", include_str!("programs/many.py")]),
    (
        "gcc",
        &["-O1", "-S", "-o", "-", concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/threads.c")],
    ),
    (
        "sqlite3",
        &[
            ":memory:",
            "create table a(x); with recursive n(i) as (select 1 union all select i + 1 from n where i < 99999)
            insert into a select i from n; select sum(x), length(group_concat(x)) from a; select x from a order by -x",
        ],
    ),
    ("node", &["-e", "console.log(require('child_process').execSync('echo n').toString())"]),
    ("sh", &["-c", "tar -b 1024 -cf - -C /usr/include . | md5sum"]),
];

#[test]
fn shells_and_interpreters_run() {
    for (program, args) in PROGRAMS.iter().filter(|(program, _)| has(program)) {
        same(program, args);
    }
    if has("gcc") {
        same("sh", &["-c", "echo 'int main(){return 4;}' | gcc -x c -o four - && ./four; echo $?"]);
    }
}

#[test]
fn interpreters_run_while_their_pages_are_evicted() {
    let library = examples().join("libvanishing.so");
    for (program, args) in PROGRAMS.iter().filter(|(program, _)| has(program)) {
        let (_, text) = same_under(&library, program, args);
        println!("{program}: {} pages were taken away", taken(&text).sum::<u32>());
        assert!(taken(&text).sum::<u32>() > 0, "{program}: {text}");
    }
}
