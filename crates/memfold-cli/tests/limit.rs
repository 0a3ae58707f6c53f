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
