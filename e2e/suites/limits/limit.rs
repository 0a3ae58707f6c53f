//! What `--limit` bounds under `memfold run`.
use super::peak_of;
use crate::common::{
    Holder, Scratch, assert_right_with, binaries, compile, folded_in, json, make_unmanageable,
    managed_in, memfold,
};
use std::process::Command;
use std::time::Instant;

/// The program leaves one page in 16 untouched. Adopted memory must still be folded in large
/// folios, so reading all of it takes few faults: 200 to 700, or some thousand on a busy machine.
/// It took 28,000 when each untouched page ended a folio.
#[test]
fn untouched_pages_do_not_cut_what_is_adopted_in_pieces() {
    let program = compile("overshoot");
    let command = [program.path.as_str(), "malloc", "1024"];
    let Some((output, stats)) = folded_in("", &["--limit", "256M"], 128, &command) else { return };
    assert_eq!(output.stdout, b"right\n");
    let loads = stats["pgmajfault"].as_u64();
    assert!(loads.expect("a figure") < 14_000, "{loads:?}");
}

#[test]
fn processes_of_a_run_share_its_limit() {
    // The program itself sums the memory of its processes.
    assert_right_with(&["--limit", "128M"], "family", 128, &["exec", "fork", "rewrite"]);
}

#[test]
fn z4_data_that_does_not_shrink_passes_the_limit_and_it_says_so() {
    let program = concat!(env!("CARGO_MANIFEST_DIR"), "/programs/random_data.py");
    let command = ["python3", program, "150"];
    let start = Instant::now();
    assert!(Command::new(command[0]).args(&command[1..]).output().unwrap().status.success());
    let time_alone = start.elapsed();
    let scratch = Scratch::new();
    let stats = scratch.path("json");
    let start = Instant::now();
    let Some(output) = managed_in("", &["--limit", "64M", "--stats-file", &stats], &command) else {
        return;
    };
    let managed = start.elapsed();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"right\n"[..]), "{text}");
    assert!(text.contains("can't be kept"), "it says so: {text}");
    println!("{time_alone:?} alone, {managed:?} managed: near twice the time on a quiet machine");
    let json = std::fs::read_to_string(stats).unwrap();
    let at = json.find("\"peak_pool_bytes\"").unwrap();
    let digits =
        json[at..].chars().skip_while(|c| !c.is_ascii_digit()).take_while(char::is_ascii_digit);
    let pool: u64 = digits.collect::<String>().parse().unwrap();
    assert!(pool < 32 << 20, "{pool} bytes in the pool");
}

/// Compression ratios of the data. In `half`, half of the memory is excluded from core dumps and
/// never folded.
const KINDS: [&str; 5] = ["48", "3", "1.3", "1", "half"];
/// The engine's own memory in a process, in MiB: threads, buffers, and pages in transit.
const ENGINE_MIB: f64 = 2.0;

/// Returns the memory that all processes of the program hold at the end, with or without a limit,
/// in MiB.
fn held_at(program: &str, kind: &str, mib: u64, count: u64, limit: Option<u64>) -> Option<f64> {
    let (mib, count) = (mib.to_string(), count.to_string());
    let command = [program, kind, &mib, &count];
    let output = match limit {
        Some(limit) => managed_in("", &["--limit", &format!("{limit}M")], &command)?,
        None => Command::new(program).args(&command[1..]).output().unwrap(),
    };
    let text = String::from_utf8_lossy(&output.stdout);
    let total = text.trim().strip_prefix("right ");
    let total = total.unwrap_or_else(|| panic!("{kind} x{count} at {limit:?}: {output:?}"));
    Some(total.parse::<f64>().unwrap() / 1024.0)
}

/// Asserts the limit for each kind of data and number of processes, at falling percentages of the
/// whole.
fn assert_the_limit_is_the_promise(mib: u64, counts: &[u64], percentages: &[u64]) {
    let program = compile("shrinking");
    for kind in KINDS {
        for &count in counts {
            let own = ENGINE_MIB * count as f64;
            let baseline = held_at(&program.path, kind, mib, count, None).unwrap();
            let mut sizes = Vec::new();
            for percent in percentages {
                let limit = mib * percent / 100;
                let Some(total) = held_at(&program.path, kind, mib, count, Some(limit)) else {
                    return;
                };
                println!("{kind} x{count}: {total:.0} MiB at {limit} of {baseline:.0}");
                // Folding the last tenth of data that hardly compresses can cost more than it
                // gains. Then it stays resident, whatever the limit is (`policy/thrash.rs`).
                let may_stay = kind == "1.3";
                assert!(
                    total <= baseline * 1.02 + own,
                    "{kind} x{count}: more than without memfold"
                );
                if let Some(&before) = sizes.last().filter(|_| !may_stay) {
                    assert!(
                        total <= before * 1.05 + own,
                        "{kind} x{count}: more at a smaller limit"
                    );
                }
                sizes.push(total);
            }
            let least = sizes.iter().copied().fold(f64::MAX, f64::min);
            for (total, percent) in sizes.iter().zip(percentages) {
                let limit = (mib * percent / 100) as f64;
                let least = if kind == "1.3" { least.max(baseline) } else { least };
                let bound = limit.max(least) * 1.05 + own;
                assert!(*total <= bound, "{kind} x{count} at {limit}: {total:.0} MiB");
            }
        }
    }
}

#[test]
fn b1_total_never_rises_as_the_limit_falls() {
    assert_the_limit_is_the_promise(96, &[1, 4], &[90, 50, 15]);
}

#[test]
#[ignore = "ten processes, larger: make torture"]
fn b1_total_never_rises_as_the_limit_falls_at_length() {
    assert_the_limit_is_the_promise(400, &[1, 10], &[90, 70, 50, 30, 15]);
}

/// Each process has room for its own share when it asks for it, and for no more.
#[test]
#[ignore = "a busy machine fails it: make torture"]
fn ten_processes_that_fill_at_once_stay_near_the_limit() {
    let program = compile("shrinking");
    for (kind, limit) in [("48", 40), ("3", 140)] {
        let flag = format!("{limit}M");
        let command = [program.path.as_str(), kind, "200", "10"];
        let Some((peak, output)) = peak_of(&["--limit", &flag], &command) else { return };
        assert!(output.stdout.starts_with(b"right "), "{output:?}");
        println!("{kind} at {limit}: {peak:.1} MiB at most");
        assert!(peak <= limit as f64 * 1.1, "{kind} at {limit}: {peak:.1} MiB");
    }
}

/// The process with incompressible data gets more than half of the limit, because the other process
/// can fold more.
#[test]
fn process_that_cant_fold_has_what_others_can_fold() {
    let program = compile("unlike");
    let most = (105.0 + 2.0 * ENGINE_MIB) * 1024.0;
    let most_text = most.to_string();
    let command = [program.path.as_str(), "64", "64", &most_text];
    let flags = ["--limit", "100M", "--on-full", "stop"];
    let Some(output) = managed_in("", &flags, &command) else { return };
    let text = String::from_utf8_lossy(&output.stdout);
    let total = text.trim().strip_prefix("right ").unwrap_or_else(|| panic!("{output:?}"));
    assert!(total.parse::<f64>().unwrap() <= most, "{total} KiB");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!text.contains("can't be kept"), "{text}");
}

/// When the process with the most memory ends, the other one gets its room.
#[test]
fn on_full_stop_ends_the_process_that_can_fold_least() {
    let program = compile("unlike");
    let command = [program.path.as_str(), "64", "64", "1000000"];
    let flags = ["--limit", "60M", "--on-full", "stop"];
    let Some(output) = managed_in("", &flags, &command) else { return };
    let text = String::from_utf8_lossy(&output.stderr);
    let stops: Vec<&str> = text.lines().filter(|line| line.contains("--on-full stop")).collect();
    assert!(stops.len() == 1 && stops[0].contains("does not compress"), "{text}");
    assert_eq!(output.status.code(), Some(3), "the parent hears of it: {output:?}");
}

#[test]
fn warning_names_each_cause_and_the_least_limit() {
    let program = compile("shrinking");
    let command = [program.path.as_str(), "half", "96", "1"];
    let Some(output) = managed_in("", &["--limit", "40M"], &command) else { return };
    let text = String::from_utf8_lossy(&output.stderr);
    let warnings: Vec<&str> = text.lines().filter(|line| line.contains("warning")).collect();
    assert_eq!(warnings.len(), 1, "{text}");
    for word in ["limit of 40.0 MiB", "core dumps (--dont-dump fold", "least limit", "--swap DIR"] {
        assert!(warnings[0].contains(word), "{word}: {text}");
    }
    for word in ["B does not compress", "pinned", "shared by a fork"] {
        assert!(!warnings[0].contains(word), "{word}: {text}");
    }
}

/// With `--limit` and with `--resident`: the sums cover all processes, and the causes are those of
/// the process that can fold least.
#[test]
fn warning_of_several_processes_gives_the_sums_and_the_largest() {
    let (differing, shrinking) = (compile("unlike"), compile("shrinking"));
    let cases: [(&str, &str, &[&str]); 2] = [
        ("B does not compress", "--limit", &[&differing.path, "64", "48", "1000000"]),
        ("B is kept out of core dumps", "--resident", &[&shrinking.path, "half", "96", "2"]),
    ];
    for (words, flag, command) in cases {
        let Some(output) = managed_in("", &[flag, "40M"], command) else { return };
        let text = String::from_utf8_lossy(&output.stderr);
        let warnings: Vec<&str> = text.lines().filter(|line| line.contains("warning")).collect();
        assert!(output.stdout.starts_with(b"right "), "{output:?}");
        assert_eq!(warnings.len(), 1, "{text}");
        assert!(warnings[0].contains(words) && warnings[0].contains("In all "), "{text}");
        let least = warnings[0].split("can be kept now is ").nth(1).unwrap();
        let least: f64 = least.split(' ').next().unwrap().parse().unwrap();
        assert!(least > 40.0, "{text}");
    }
}

#[test]
fn on_full_stop_ends_the_program_with_one_line() {
    let program = compile("shrinking");
    let command = [program.path.as_str(), "1", "96", "1"];
    let Some(output) = managed_in("", &["--limit", "40M", "--on-full", "stop"], &command) else {
        return;
    };
    let text = String::from_utf8_lossy(&output.stderr);
    let stops: Vec<&str> = text.lines().filter(|line| line.contains("--on-full stop")).collect();
    assert_eq!((output.status.code(), stops.len()), (Some(1), 1), "{text}");
    assert!(output.stdout.starts_with(b"WRONG"), "its process has ended: {output:?}");
    assert!(!text.contains("panic") && stops[0].contains("does not compress"), "{text}");
}

/// Written pages of a private file mapping count as the process's memory but aren't folded. So the
/// heap has only the rest of the limit.
#[test]
fn written_pages_of_private_file_mappings_count() {
    let source = r#"
        #define _GNU_SOURCE
        #include <fcntl.h>
        #include <stdio.h>
        #include <stdlib.h>
        #include <string.h>
        #include <sys/mman.h>
        #include <unistd.h>
        int main(int count, char **words) {
            size_t len = 40u << 20;
            int file = open(words[1], O_RDWR | O_CREAT, 0600);
            if (ftruncate(file, len)) return 2;
            char *mapped = mmap(0, len, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
            memset(mapped, 7, len);
            char *heap = malloc(4 * len);
            for (size_t at = 0; at < 4 * len; at++) heap[at] = at / 4096 % 100;
            for (size_t at = 0; at < len; at += 4096) if (mapped[at] != 7) return 3;
            char line[256];
            FILE *status = fopen("/proc/self/status", "r");
            while (fgets(line, sizeof line, status)) if (strstr(line, "RssAnon:")) fputs(line + 8, stdout);
        }"#;
    let scratch = Scratch::new();
    let program = scratch.compile("mapped", source, &["-O1"]);
    let (file, flags) = (scratch.path("file"), ["--limit", "80M"]);
    let Some((output, stats)) = folded_in("", &flags, 100, &[&program, &file]) else { return };
    let text = String::from_utf8(output.stdout).unwrap();
    let kib: u64 = text.trim().trim_end_matches(" kB").parse().unwrap();
    assert!((40 << 10..90 << 10).contains(&kib), "{kib} KiB");
    let peak = stats["peak_bytes"].as_u64().unwrap();
    assert!((70 << 20..110 << 20).contains(&peak), "{peak}");
}

/// The library can't load the program, so it runs unmanaged. It has 48 of the 96 MiB.
#[test]
fn unmanaged_process_reduces_the_limit_of_the_others() {
    let Some(bin) = binaries() else { return };
    let (program, scratch) = (compile("holder"), Scratch::new());
    let source = r#"
        #include <string.h>
        #include <sys/stat.h>
        #include <unistd.h>
        static char memory[48 << 20];
        int main(int count, char **arguments) {
            memset(memory, 1, sizeof memory);
            mkdir(arguments[1], 0700);
            char end;
            return read(0, &end, 1);
        }"#;
    let large = scratch.compile("large", source, &["-static"]);
    make_unmanageable(&scratch, &large);
    let (pipe, stats) = (scratch.path("pipe"), scratch.path("json"));
    // Its size is known only when it no longer grows.
    let ready = scratch.path("ready");
    let waits = format!("while ! test -d {ready}; do sleep 0.05; done");
    let begin = format!("mkfifo {pipe}; {large} {ready} <{pipe} & exec 9>{pipe}");
    let script = format!("{begin}; {waits}; exec {} 80\n", program.path);
    let script = scratch.file("script", format!("#!/bin/sh\n{script}"), 0o755);
    let flags = ["--limit", "96M", "--stats-file", &stats];
    let mut holder = Holder::start(&bin, &scratch, &flags, &script, "");
    holder.wait_for("48 MiB of 96 are left", |mib| mib <= 52);
    let pid = holder.pid.to_string();
    let ask = |arguments: &[&str]| {
        let output = memfold(&bin, arguments).env("XDG_RUNTIME_DIR", &scratch.0).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let about: serde_json::Value = serde_json::from_str(&ask(&["stat", &pid, "--json"])).unwrap();
    assert_eq!(about["unmanaged_processes"], 1, "{about}");
    let bytes = about["unmanaged_processes_bytes"].as_u64().unwrap();
    assert!((48 << 20..50 << 20).contains(&bytes), "{bytes}");
    assert!(about["processes"][0]["file_bytes"].as_u64() > Some(4096), "{about}");
    let text = ask(&["stat", &pid]);
    assert!(text.contains("processes without an engine: 1, 48"), "{text}");
    holder.check();
    holder.end();
    assert!(json(&stats)["peak_unmanaged_processes_bytes"].as_u64() >= Some(48 << 20));
}

/// A heap that is readable, writable and executable, as in Lisps and JITs. Code in it is called
/// after it was folded.
#[test]
fn executable_memory_is_folded_and_runs_on() {
    let source = r#"
        #define _GNU_SOURCE
        #include <stdio.h>
        #include <string.h>
        #include <sys/mman.h>
        typedef int (*code)(void);
        enum { SIZE = 160 << 20, STEP = 4096 };
        int main(void) {
            int access = PROT_READ | PROT_WRITE | PROT_EXEC;
            char *at = mmap(0, SIZE, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (at == MAP_FAILED) return 2;
            for (int page = 0; page < SIZE / STEP; page++) {
                char *to = at + (long)page * STEP;
                for (int n = 8; n < STEP; n += 8) *(long *)(to + n) = page * 7L + n / 512;
                memcpy(to, "\xb8", 1); /* mov $page, %eax; ret */
                memcpy(to + 1, &page, 4);
                memcpy(to + 5, "\xc3", 1);
            }
            for (int round = 0; round < 2; round++)
                for (int page = 0; page < SIZE / STEP; page++) {
                    char *code_at = at + (long)page * STEP;
                    if (((code)code_at)() != page || *(long *)(code_at + 800) != page * 7L + 1) return 3;
                    if (page % 3 == 0) code_at[4000] = code_at[4000]; /* a write */
                }
            char line[256];
            FILE *status = fopen("/proc/self/status", "r");
            while (fgets(line, sizeof line, status)) if (strstr(line, "RssAnon:")) fputs(line + 8, stdout);
        }"#;
    let scratch = Scratch::new();
    let program = scratch.compile("executable", source, &["-O1"]);
    let Some((output, stats)) = folded_in("", &["--limit", "64M"], 64, &[&program]) else { return };
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let kib: u64 = text.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(kib < 72 << 10, "{kib} KiB");
    assert!(stats["pgmajfault"].as_u64() > Some(100), "{stats}");
}
