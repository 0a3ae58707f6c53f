//! Runs of many processes, in other PID namespaces and as other users: all of them count against
//! the limit. Also the cost of an idle process.
use crate::common::{Scratch, binaries, can_make_worlds, compile, folded_in, memfold};
use std::fs;
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;

/// Opens /dev/userfaultfd to all, so that processes of other users can be managed after exec.
const OPEN: &str = r#"
    node=$(mktemp -u) && mknod $node c $(tr : ' ' </sys/class/misc/userfaultfd/dev) && chmod 666 $node &&
    mount --bind $node /dev/userfaultfd && rm $node && exec "$@""#;

/// The tolerance above a limit, in MiB: memory that is being folded.
const SLACK_MIB: u64 = 32;

/// Runs `many`, which measures the total memory of its processes, within `limit_mib`. Returns the
/// figures of the run.
fn run_many(
    world: &str,
    limit_mib: u64,
    least_mib: u64,
    before: &[&str],
    arguments: &[&str],
) -> Option<serde_json::Value> {
    static MACHINE: Mutex<()> = Mutex::new(());
    let _alone = MACHINE.lock();
    let (program, scratch) = (compile("many"), Scratch::new());
    let bound = (limit_mib + SLACK_MIB).to_string();
    let limit = format!("{limit_mib}M");
    let command = [before, &[&program.path], &arguments[..2], &[&bound], &arguments[2..]].concat();
    // Each process runs as another user, so the executed files must be open to all.
    for path in [&program.scratch.0, &scratch.0] {
        fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    }
    let (output, stats) = folded_in(world, &["--limit", &limit], least_mib, &command)?;
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"right\n"[..]), "{text}");
    Some(stats)
}

/// Returns the PIDs in the figures.
fn pids(stats: &serde_json::Value) -> Vec<u64> {
    let mut pids: Vec<u64> = stats["processes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["pid"].as_u64().unwrap())
        .collect();
    pids.sort_unstable();
    pids.dedup();
    pids
}

/// Of 200 processes, 136 were not counted by the others, and were not limited.
#[test]
fn a_limit_that_200_processes_share_is_kept() {
    let Some(stats) = run_many("", 1024, 256, &[], &["200", "8"]) else { return };
    assert!(pids(&stats).len() >= 200, "each has a slot of its own");
}

/// An equal share of the limit is less than each process needs. The processes once held 650 MiB.
#[test]
fn a_limit_of_which_each_process_gets_5_mib_is_kept() {
    run_many("", 512, 512, &[], &["100", "20"]);
}

/// The processes see neither `memfold run` in their /proc nor the processes of other namespaces.
#[test]
fn pid_namespace_processes_share_limit_and_show_outer_numbers() {
    if !can_make_worlds() {
        return;
    }
    let Some(stats) = run_many("", 128, 128, &["unshare", "-pf", "--mount-proc"], &["4", "96"])
    else {
        return;
    };
    let pids = pids(&stats);
    assert!(pids.len() >= 4, "{pids:?}");
    // Inside the namespaces the PIDs are 2 to 5.
    assert!(pids.iter().all(|pid| *pid > 10), "numbers of another namespace: {pids:?}");
}

/// The name of the run's socket belongs to another network namespace.
#[test]
fn processes_in_network_namespaces_share_limit_and_numbers() {
    if !can_make_worlds() {
        return;
    }
    let namespaces = ["unshare", "-npf", "--mount-proc"];
    let Some(stats) = run_many("", 128, 128, &namespaces, &["4", "96"]) else { return };
    let pids = pids(&stats);
    assert!(pids.len() >= 4, "{pids:?}");
    assert!(pids.iter().all(|pid| *pid > 10), "numbers of another namespace: {pids:?}");
}

/// Half of the processes then execute another program, which may not read `memfold run`'s /proc.
#[test]
fn processes_that_become_other_users_share_the_limit() {
    if !can_make_worlds() {
        return;
    }
    let Some(stats) = run_many(OPEN, 128, 128, &[], &["4", "96", "60000"]) else { return };
    // All four once filled 96 MiB before they learned of each other.
    let peak_mib = stats["peak_bytes"].as_u64().unwrap() >> 20;
    assert!(peak_mib <= 128 + 2 * SLACK_MIB, "peak of {peak_mib} MiB");
}

/// A program that waits for the end of its input, plainly or under memfold.
struct Idle(Child);

impl Idle {
    fn start(mut command: Command) -> Idle {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut byte = [0];
        child.stdout.as_mut().unwrap().read_exact(&mut byte).unwrap();
        Idle(child)
    }

    fn end(mut self) {
        self.0.stdin.take().unwrap().write_all(b"\n").unwrap();
        assert!(self.0.wait().unwrap().success());
    }
}

/// Returns the memory (Pss, in KiB) and the threads of all processes that run `path`, and their
/// number.
fn cost(path: &str) -> (u64, u64, u64) {
    let (mut kib, mut threads, mut count) = (0, 0, 0);
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        if fs::read_link(entry.path().join("exe")).ok().is_none_or(|exe| exe.to_str() != Some(path))
        {
            continue;
        }
        let number = |file: &str, name: &str| -> u64 {
            let text = fs::read_to_string(entry.path().join(file)).unwrap();
            let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.split_whitespace().next().unwrap().parse().unwrap()
        };
        kib += number("smaps_rollup", "Pss:");
        threads += number("status", "Threads:");
        count += 1;
    }
    (kib, threads, count)
}

/// An idle process once cost 0.5 MiB and 6 threads, without the shared code of the library. 24 KiB
/// are pointers in the gate's table of system calls, which the loader relocates.
#[test]
fn idle_process_costs_at_most_400_kib_and_one_thread() {
    // More than a process may have without an engine.
    for (mib, threads, most) in [("0", 0, 250), ("5", 1, 400)] {
        costs(mib, threads, most);
    }
}

/// Asserts the cost of processes that have mapped memory without touching it: exactly
/// `more_threads` threads, and at most `most` KiB each.
fn costs(mapped: &str, more_threads: u64, most: u64) {
    const COUNT: u64 = 20;
    let Some(bin) = binaries() else { return };
    let scratch = Scratch::new();
    let source = r#"
        #include <stdio.h>
        #include <stdlib.h>
        #include <sys/mman.h>
        #include <sys/wait.h>
        #include <unistd.h>
        int main(int argc, char **argv) {
            char byte = 1;
            int count = atoi(argv[1]), ready[2];
            if (argc < 3) return 1;
            if (atoi(argv[2]) && mmap(0, atoi(argv[2]) << 20, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED) return 1;
            if (!count) {
                if (write(1, &byte, 1) != 1) return 1;
                return read(3, &byte, 1) < 0;
            }
            int go[2];
            if (pipe(ready) || pipe(go)) return 1;
            for (int i = 0; i < count; i++)
                if (!fork()) {
                    dup2(ready[1], 1);
                    dup2(go[0], 3);
                    for (int fd = 4; fd < 10; fd++) close(fd);
                    execl(argv[0], argv[0], "0", argv[2], (char *)0);
                    _exit(1);
                }
            for (int i = 0; i < count; i++)
                if (read(ready[0], &byte, 1) != 1) return 1;
            if (write(1, &byte, 1) != 1 || read(0, &byte, 1) != 1) return 1;
            return 0;
        }"#;
    let path = scratch.compile("idle", source, &[]);
    let count = COUNT.to_string();
    let mut baseline = Command::new(&path);
    baseline.args([&count, mapped]);
    let measure = |command: Command, most: u64| {
        let idle = Idle::start(command);
        let mut cost_now = cost(&path);
        // On busy CPUs an ended engine thread may not have freed its stack yet.
        for _ in 0..1000 {
            if cost_now.0 <= most {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
            cost_now = cost(&path);
        }
        idle.end();
        assert_eq!(cost_now.2, COUNT + 1);
        (cost_now.0, cost_now.1)
    };
    let (plain_kib, plain_threads) = measure(baseline, u64::MAX);
    let command = memfold(&bin, &["run", "--limit", "512M", "--", &path, &count, mapped]);
    let (kib, threads) = measure(command, plain_kib + most * (COUNT + 1));
    let each = (kib - plain_kib) / (COUNT + 1);
    println!("each of {} costs {each} KiB ({kib} KiB in all, {plain_kib} plainly)", COUNT + 1);
    assert_eq!(threads, plain_threads + more_threads * (COUNT + 1));
    assert!(each <= most, "{each} KiB");
}
