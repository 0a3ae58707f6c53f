//! What `--limit` bounds under `memfold run`.
mod common;
use common::{
    Holder, Scratch, assert_right_with, binaries, compile, folded_in, json, managed_in, memfold,
};
use std::process::Command;
use std::time::Instant;

/// The program leaves a page in 16 untouched. What is adopted is folded in large folios all the
/// same, so reading all of it takes few faults: 28,000 when each untouched page ended a folio, 200
/// to 700 now.
#[test]
fn untouched_pages_do_not_cut_what_is_adopted_in_pieces() {
    let program = compile("overshoot");
    let command = [program.path.as_str(), "malloc"];
    let Some((output, stats)) = folded_in("", &["--limit", "256M"], 128, &command) else { return };
    assert_eq!(output.stdout, b"right\n");
    let loads = stats["pgmajfault"].as_u64();
    assert!(loads.expect("a figure") < 6000, "{loads:?}");
}

#[test]
fn processes_of_a_run_share_its_limit() {
    // The program adds up what its processes hold.
    assert_right_with(&["--limit", "128M"], "family", 64, &["exec", "fork", "rewrite"]);
}

#[test]
fn z4_data_that_does_not_shrink_passes_the_limit_and_it_says_so() {
    let program = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/random_data.py");
    let command = ["python3", program, "150"];
    let start = Instant::now();
    assert!(Command::new(command[0]).args(&command[1..]).output().unwrap().status.success());
    let alone = start.elapsed();
    let scratch = Scratch::new();
    let stats = scratch.path("json");
    let start = Instant::now();
    let Some(output) = managed_in("", &["--limit", "64M", "--stats-file", &stats], &command) else {
        return;
    };
    let managed = start.elapsed();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"right\n"[..]), "{text}");
    assert!(text.contains("going past it"), "it says so: {text}");
    println!("{alone:?} alone, {managed:?} managed: near twice the time on a quiet machine");
    let json = std::fs::read_to_string(stats).unwrap();
    let at = json.find("\"peak_pool_bytes\"").unwrap();
    let digits =
        json[at..].chars().skip_while(|c| !c.is_ascii_digit()).take_while(char::is_ascii_digit);
    let pool: u64 = digits.collect::<String>().parse().unwrap();
    assert!(pool < 32 << 20, "{pool} bytes in the pool");
}

/// What is written of a private file mapping is the process's own memory, and isn't folded: so its
/// heap has the rest.
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

/// It is static, and has 48 MiB of the 96.
#[test]
fn memory_of_a_process_that_cant_be_managed_is_taken_off_the_limit_of_the_others() {
    let Some(bin) = binaries() else { return };
    let (program, scratch) = (compile("holder"), Scratch::new());
    let source = r#"
        #include <string.h>
        #include <unistd.h>
        static char memory[48 << 20];
        int main(void) {
            memset(memory, 1, sizeof memory);
            char end;
            return read(0, &end, 1);
        }"#;
    let large = scratch.compile("large", source, &["-static"]);
    let (pipe, stats) = (scratch.path("pipe"), scratch.path("json"));
    let script =
        format!("mkfifo {pipe}; {large} <{pipe} & exec 9>{pipe}; exec {} 80\n", program.path);
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
