//! What `--limit` bounds under `memfold run`.
mod common;
use common::{Scratch, assert_right_with, compile, managed_in};
use std::process::Command;
use std::time::{Duration, Instant};

/// The peak that `overshoot` reports, KiB.
fn peak_kib(path: &str, way: &str) -> Option<u64> {
    let output = managed_in("", &["--limit", "256M"], &[path, way])?;
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"right\n"[..]), "{way}: {text}");
    let rest = text.split("peak of anonymous memory: ").nth(1).unwrap_or_else(|| panic!("{way}: {text}"));
    Some(rest.split(' ').next().unwrap().parse().unwrap())
}

#[test]
fn a_program_that_allocates_fast_hardly_passes_its_limit() {
    let program = compile("overshoot");
    for way in ["large", "malloc", "mmap", "brk", "populate", "populate_small", "advise"] {
        // While the machine is busy with something else, whoever looks at the program's size may have to wait: the best of
        // three runs counts.
        let mut peaks = Vec::new();
        while peaks.len() < 3 && peaks.last().is_none_or(|kib| *kib > (256 + 32) << 10) {
            let Some(kib) = peak_kib(&program.path, way) else { return };
            peaks.push(kib);
        }
        println!("{way}: {peaks:?} KiB");
        assert!(peaks.iter().any(|kib| *kib <= (256 + 32) << 10), "{way}: {peaks:?} KiB");
    }
    drop(program.scratch);
}

/// The program leaves a page in 16 untouched. What is adopted is folded in large folios all the same, so reading all of it takes
/// few faults: 28,000 when each untouched page ended a folio, 200 to 700 now.
#[test]
fn untouched_pages_do_not_cut_what_is_adopted_in_pieces() {
    let (program, scratch) = (compile("overshoot"), Scratch::new());
    let file = scratch.path("stats");
    let Some(output) = managed_in("", &["--limit", "256M", "--stats-file", &file], &[&program.path, "malloc"]) else {
        return;
    };
    assert_eq!(output.stdout, b"right\n");
    let stats: serde_json::Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let loads = stats["pgmajfault"].as_u64();
    assert!(loads.expect("a figure") < 6000, "{loads:?}");
}

#[test]
fn processes_of_a_run_share_its_limit() {
    // The program adds up what its processes hold.
    assert_right_with(&["--limit", "128M"], "family", &["exec", "fork"]);
}

#[test]
fn z4_data_that_does_not_shrink_passes_the_limit_at_hardly_any_cost_of_time() {
    let program = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/random_data.py");
    let command = ["python3", program, "150"];
    let start = Instant::now();
    assert!(Command::new(command[0]).args(&command[1..]).output().unwrap().status.success());
    let alone = start.elapsed();
    let scratch = Scratch::new();
    let stats = scratch.path("json");
    let start = Instant::now();
    let Some(output) = managed_in("", &["--limit", "64M", "--stats-file", &stats], &command) else { return };
    let managed = start.elapsed();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"right\n"[..]), "{text}");
    assert!(text.contains("going past it"), "it says so: {text}");
    // Near twice the time on a quiet machine; it was more than a minute, or a hang.
    println!("{alone:?} alone, {managed:?} managed");
    assert!(managed < alone * 5 + Duration::from_secs(5), "{managed:?}, {alone:?} alone: {text}");
    let json = std::fs::read_to_string(stats).unwrap();
    let at = json.find("\"peak_pool_bytes\"").unwrap();
    let digits = json[at..].chars().skip_while(|c| !c.is_ascii_digit()).take_while(char::is_ascii_digit);
    let pool: u64 = digits.collect::<String>().parse().unwrap();
    assert!(pool < 32 << 20, "{pool} bytes in the pool");
}
