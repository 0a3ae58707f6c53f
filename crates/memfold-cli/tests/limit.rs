//! What `--limit` bounds under `memfold run`.
mod common;
use common::{Scratch, assert_right_with, compile, folded_in, managed_in};
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

/// How many times data shrinks; of `half`, half is kept from core dumps and never folded.
const KINDS: [&str; 5] = ["48", "3", "1.3", "1", "half"];
/// An engine's own memory in a process, MiB: threads, buffers, and what is in work at the moment.
const ENGINE_MIB: f64 = 2.0;

/// What all processes of the program hold at the end under a limit, and without one, MiB.
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

/// Holds for each kind of data and number of processes, at limits from 90 to 15% of the whole.
fn assert_the_limit_is_the_promise(mib: u64, counts: &[u64]) {
    let program = compile("shrinking");
    for kind in KINDS {
        for &count in counts {
            let own = ENGINE_MIB * count as f64;
            let plain = held_at(&program.path, kind, mib, count, None).unwrap();
            let mut held = Vec::new();
            for percent in [90, 70, 50, 30, 15] {
                let limit = mib * percent / 100;
                let Some(total) = held_at(&program.path, kind, mib, count, Some(limit)) else {
                    return;
                };
                println!("{kind} x{count}: {total:.0} MiB at {limit} of {plain:.0}");
                assert!(total <= plain * 1.02 + own, "{kind} x{count}: more than without memfold");
                if let Some(&before) = held.last() {
                    assert!(
                        total <= before * 1.05 + own,
                        "{kind} x{count}: more at a smaller limit"
                    );
                }
                held.push(total);
            }
            let least = held.iter().copied().fold(f64::MAX, f64::min);
            for (total, percent) in held.iter().zip([90, 70, 50, 30, 15]) {
                let limit = (mib * percent / 100) as f64;
                let bound = limit.max(least) * 1.05 + own;
                assert!(*total <= bound, "{kind} x{count} at {limit}: {total:.0} MiB");
            }
        }
    }
}

#[test]
fn b1_total_never_rises_as_the_limit_falls() {
    assert_the_limit_is_the_promise(96, &[1, 4]);
}

#[test]
#[ignore = "ten processes, larger: make torture"]
fn b1_total_never_rises_as_the_limit_falls_at_length() {
    assert_the_limit_is_the_promise(400, &[1, 10]);
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
    assert!(!text.contains("panic") && stops[0].contains("doesn't shrink"), "{text}");
}
