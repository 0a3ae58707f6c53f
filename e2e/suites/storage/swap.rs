//! `memfold run --swap`: incompressible data that is larger than the limit. Rows B3, Z4.
use crate::common::{Mounted, Scratch, assert_refused, binaries, managed_in, memfold, run};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

const PROGRAM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/programs/random_data.py");

/// Returns a figure of a stats file.
fn figure(json: &str, name: &str) -> u64 {
    let at = json.find(&format!("\"{name}\"")).unwrap_or_else(|| panic!("no {name} in {json}"));
    let digits: String = json[at + name.len() + 2..]
        .chars()
        .skip_while(|c| !c.is_ascii_digit())
        .take_while(char::is_ascii_digit)
        .collect();
    digits.parse().unwrap()
}

fn names_in(dir: &Path) -> usize {
    std::fs::read_dir(dir).unwrap().count()
}

#[test]
fn b3_incompressible_data_survives_the_swap_file() {
    let Some(bin) = binaries() else { return };
    for encrypt in ["on", "off"] {
        let scratch = Scratch::new();
        let (dir, json) = (scratch.path("swap"), scratch.path("json"));
        std::fs::create_dir(&dir).unwrap();
        let flags = [
            "--swap",
            &dir,
            "--swap-encrypt",
            encrypt,
            "--swap-keep-free",
            "64M",
            "--stats-file",
            &json,
        ];
        let output = run(&bin, &flags, &["python3", PROGRAM, "200"]);
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{text}");
        assert_eq!(output.stdout, b"right\n");
        let json = std::fs::read_to_string(&json).unwrap();
        assert!(figure(&json, "pswpout") > 100 << 8, "{json}");
        assert!(figure(&json, "pswpin") > 100 << 8, "{json}");
        assert_eq!(figure(&json, "swap_write_failed"), 0);
        assert_eq!(names_in(Path::new(&dir)), 0);
    }
}

#[test]
fn a_full_file_system_costs_memory_and_no_data() {
    let scratch = Scratch::new();
    let dir = scratch.path("small");
    let Some(mount) = Mounted::tmpfs(&dir, "32M") else { return };
    let flags = ["--limit", "64M", "--swap", &dir, "--swap-keep-free", "1M"];
    let Some(output) = managed_in("", &flags, &["python3", PROGRAM, "150"]) else { return };
    let stop = [&flags[..], &["--on-full", "stop"]].concat();
    let Some(output_stopped) = managed_in("", &stop, &["python3", PROGRAM, "150"]) else { return };
    drop(mount);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"right\n"[..]), "{text}");
    assert!(text.contains("can't be kept"), "it says so: {text}");
    let text = String::from_utf8_lossy(&output_stopped.stderr);
    assert_eq!(output_stopped.status.code(), Some(125), "{text}");
    assert!(text.contains("--on-full stop"), "{text}");
}

#[test]
fn full_file_system_of_the_swap_file_is_reported_once_by_name() {
    let scratch = Scratch::new();
    let dir = scratch.path("small");
    let Some(mount) = Mounted::tmpfs(&dir, "32M") else { return };
    let (keeps_free_text, full) = ("than --swap-keep-free leaves free.", "is full.");
    for (keep_free, reason, not_here) in
        [("0", full, keeps_free_text), ("16M", keeps_free_text, full)]
    {
        let flags = ["--limit", "64M", "--swap", &dir, "--swap-keep-free", keep_free];
        let Some(output) = managed_in("", &flags, &["python3", PROGRAM, "150"]) else { return };
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(
            (output.status.code(), &output.stdout[..]),
            (Some(0), &b"right\n"[..]),
            "{text}"
        );
        let line = format!("warning: The file system of --swap {dir} ");
        assert_eq!(text.matches(&line).count(), 1, "{text}");
        assert!(text.contains(reason) && !text.contains(not_here), "{text}");
        assert!(text.contains("Free space there"), "{text}");
    }
    std::fs::write(format!("{dir}/fill"), vec![1; 40 << 20]).unwrap_err();
    let Some(output) = managed_in("", &["--swap", &dir], &["true"]) else { return };
    assert_refused(&output, 125, &["--swap", &dir, "no space left; free some"]);
    drop(mount);
}

/// Returns a command that runs the program with these arguments in 64 MiB, with a swap file in
/// `dir`.
fn swapping(bin: &Path, dir: &str, keep_free: &str, arguments: &[&str]) -> Command {
    let flags = ["run", "--limit", "64M", "--swap", dir, "--swap-keep-free", keep_free];
    memfold(bin, &[&flags[..], &["--", "python3", PROGRAM], arguments].concat())
}

#[test]
fn a_killed_run_leaves_no_file_and_no_space_taken() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let dir = scratch.path("swap");
    std::fs::create_dir(&dir).unwrap();
    let mut child =
        swapping(&bin, &dir, "64M", &["120", "wait"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "right\n");
    assert_eq!(names_in(Path::new(&dir)), 0, "the file has no name while it is used");
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(names_in(Path::new(&dir)), 0);
}

/// Returns the free bytes on the file system at `dir`, by `df`.
fn free_bytes(dir: &str) -> u64 {
    let output = Command::new("df").args(["--output=avail", "-B1", dir]).output().unwrap();
    String::from_utf8_lossy(&output.stdout).lines().nth(1).unwrap().trim().parse().unwrap()
}

#[test]
fn run_killed_while_writing_frees_its_swap_space() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let dir = scratch.path("swap");
    let Some(mount) = Mounted::tmpfs(&dir, "400M") else { return };
    let free = free_bytes(&dir);
    for _ in 0..3 {
        let mut child = swapping(&bin, &dir, "1M", &["300"]).stdout(Stdio::null()).spawn().unwrap();
        let start = std::time::Instant::now();
        // The file grows 64 MiB at a time. At the second growth, writes are certainly in progress.
        while free_bytes(&dir) + (100 << 20) > free {
            assert!(child.try_wait().unwrap().is_none(), "it has ended before it wrote");
            assert!(start.elapsed().as_secs() < 600, "nothing was written");
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        // The program dies with `memfold run`, but is reaped by another process.
        let start = std::time::Instant::now();
        while free_bytes(&dir) < free {
            assert!(
                start.elapsed().as_secs() < 600,
                "{} of {free} bytes are free",
                free_bytes(&dir)
            );
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        assert_eq!(names_in(Path::new(&dir)), 0);
    }
    drop(mount);
}

/// Each process that the shell starts makes a file in the directory.
#[test]
fn processes_that_start_together_with_one_swap_directory_never_fail() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let dir = scratch.path("");
    let script =
        "for round in 1 2 3 4 5; do for n in $(seq 40); do /bin/echo $n & done; wait; done";
    let output = run(&bin, &["--swap", &dir], &["sh", "-c", script]);
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    assert_eq!(
        (output.status.code(), output.stdout.iter().filter(|b| **b == b'\n').count()),
        (Some(0), 200)
    );
    assert_eq!(names_in(&scratch.0), 0);
}

#[test]
fn unusable_swap_directory_is_refused_before_the_start() {
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let file = scratch.file("precious", "data", 0o644);
    assert_refused(
        &run(&bin, &["--swap", &file], &["true"]),
        125,
        &["--swap", "exists and is not a directory"],
    );
    assert_refused(
        &run(&bin, &["--swap", "/nowhere/at/all"], &["true"]),
        125,
        &["--swap", "no swap file can be made"],
    );
    // A mistyped directory: the data must not go to its parent.
    let typo = scratch.path("scrach");
    assert_refused(
        &run(&bin, &["--swap", &typo], &["true"]),
        125,
        &["--swap", &typo, "there is no such directory. Make it, or give another"],
    );
    assert_eq!(std::fs::read(&file).unwrap(), b"data");
}
