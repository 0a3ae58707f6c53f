//! Processes that sleep: memfold does nothing in them, and sees at once that they work again.
use crate::common::folded::folded_in;
use crate::common::{Scratch, binaries, compile, json, memfold};
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

/// The rests of a process grow to ten seconds in about twice as long. Before that, idle processes are
/// compressed once more, which takes CPU time of the process and so ends rests.
const SETTLES: Duration = Duration::from_secs(40);
const MEASURED: Duration = Duration::from_secs(20);

/// A run whose processes sleep. They are killed when it is dropped.
struct Sleepers {
    run: Child,
    program: u32,
}

impl Sleepers {
    fn start(bin: &Path, flags: &[&str], program: &str, mib: &str, children: &str) -> Sleepers {
        let arguments = [&["run"], flags, &["--", program, "all", mib, children, "0"]].concat();
        let mut command: Command = memfold(bin, &arguments);
        let mut run = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(run.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let program = line.trim().strip_prefix("ready ").expect("a number").parse().unwrap();
        Sleepers { run, program }
    }

    fn processes(&self) -> Vec<u32> {
        let mut ps = Command::new("ps");
        ps.args(["-o", "pid=", "--ppid", &self.program.to_string()]);
        let text = String::from_utf8(ps.output().unwrap().stdout).unwrap();
        let children = text.split_whitespace().map(|child| child.parse().unwrap());
        [self.run.id(), self.program].into_iter().chain(children).collect()
    }

    /// Returns how often each thread of memfold has woken, by process, number and name.
    fn wakes(&self) -> BTreeMap<(u32, String, String), u64> {
        let mut all = BTreeMap::new();
        for pid in self.processes() {
            for entry in fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten() {
                let text = fs::read_to_string(entry.path().join("status")).unwrap();
                let field = |name: &str| {
                    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
                    line.trim().to_string()
                };
                let name = field("Name:");
                if name.starts_with("memfold") {
                    let number = entry.file_name().into_string().unwrap();
                    let wakes = field("voluntary_ctxt_switches:").parse().unwrap();
                    all.insert((pid, number, name), wakes);
                }
            }
        }
        all
    }
}

impl Drop for Sleepers {
    fn drop(&mut self) {
        for pid in self.processes().into_iter().skip(1) {
            let _ = Command::new("kill").args(["-9", &pid.to_string()]).status();
        }
        let _ = self.run.wait();
    }
}

/// Each process once woke 200 times a second. With forks, each took a tenth of a CPU.
#[test]
#[ignore = "a minute: make torture"]
fn every_thread_of_a_sleeping_run_wakes_once_in_ten_seconds() {
    let (Some(bin), program) = (binaries(), compile("sleeping")) else { return };
    // A limit far away, near and below the program's size, idle processes, and none of them.
    let flags: [&[&str]; 5] =
        [&["--limit", "1G"], &["--limit", "110M"], &["--limit", "50M"], &["--idle", "2"], &[]];
    let start = |flags: &&[&str]| {
        ["0", "4"].map(|children| Sleepers::start(&bin, flags, &program.path, "100", children))
    };
    let runs: Vec<Sleepers> = flags.iter().flat_map(start).collect();
    sleep(SETTLES);
    let before: Vec<_> = runs.iter().map(Sleepers::wakes).collect();
    sleep(MEASURED);
    for ((run, before), n) in runs.iter().zip(before).zip(0..) {
        assert!(before.len() >= 2, "{before:?}");
        for (thread, wakes) in run.wakes() {
            let wake_count = wakes - before.get(&thread).copied().unwrap_or(0);
            let most = MEASURED.as_secs() / 10 + 3;
            assert!(wake_count <= most, "{:?}: {thread:?} woke {wake_count} times", flags[n / 2]);
        }
    }
    drop(runs);
    drop(program.scratch);
}

/// Runs `sleeping` to its end, and returns the figures of the run.
fn figures(flags: &[&str], least_mib: u64, arguments: &[&str]) -> Option<serde_json::Value> {
    let program = compile("sleeping");
    let command = [&[program.path.as_str()], arguments].concat();
    let (output, stats) = folded_in("", flags, least_mib, &command)?;
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"right\n"[..]), "{errors}");
    drop(program.scratch);
    Some(stats)
}

/// Each busy process once measured its shared memory for a tenth of the time.
#[test]
fn shared_memory_is_measured_only_when_it_may_change() {
    let Some(stats) = figures(&["--limit", "1G"], 0, &["busy", "100", "3", "6"]) else { return };
    let measurements = stats["sharing_measured"].as_u64().unwrap();
    assert!((4..=60).contains(&measurements), "{measurements} measurements of 4 processes in 6 s");
}

#[test]
fn process_that_grows_after_a_long_sleep_keeps_its_limit() {
    let Some(stats) = figures(&["--limit", "64M"], 16, &["grows", "48", "0", "12"]) else { return };
    let peak_mib = stats["peak_bytes"].as_u64().unwrap() >> 20;
    assert!(peak_mib <= 64 + 32, "peak of {peak_mib} MiB");
    let looks = stats["looks"].as_u64().unwrap();
    assert!(looks < 2000, "{looks} looks, almost all of them while it slept");
}

/// A change of the limit is news.
#[test]
fn sleeping_process_follows_a_new_limit_at_once() {
    let (Some(bin), program) = (binaries(), compile("sleeping")) else { return };
    let scratch = Scratch::new();
    let file = scratch.path("stats");
    let flags = ["--limit", "1G", "--stats-file", &file];
    let run = Sleepers::start(&bin, &flags, &program.path, "100", "0");
    sleep(Duration::from_secs(11));
    let (pid, begin) = (run.program, std::time::Instant::now());
    let set = memfold(&bin, &["set", &pid.to_string(), "--limit", "50M"]).output().unwrap();
    assert!(set.status.success(), "{}", String::from_utf8_lossy(&set.stderr));
    let resident_mib = || {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() >> 10
    };
    while resident_mib() > 60 {
        assert!(begin.elapsed() < Duration::from_secs(300), "{} MiB", resident_mib());
        sleep(Duration::from_millis(20));
    }
    println!("it took {:.2} s", begin.elapsed().as_secs_f64());
    let pids = run.processes();
    drop(run);
    assert_eq!(pids.len(), 2);
    let looks = json(&file)["looks"].as_u64().unwrap();
    assert!(looks < 2000, "{looks}");
    drop(program.scratch);
}
