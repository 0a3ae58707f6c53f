//! A program that uses all of its memory, and later a tenth of it.

use crate::common::row::StoreRow;
use crate::host::program::memfold;
use anyhow::{Context, ensure};
use memfold_testkit::random::Random;
use serde::Serialize;
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const WORDS: usize = 512;
/// One page in this many is changed when it is touched.
const CHANGED: usize = 8;

/// Arguments of the program.
#[derive(clap::Args, Debug, Clone)]
pub struct IdleChildArgs {
    mib: usize,
    seconds_all: u64,
    seconds_tenth: u64,
}

/// Runs the program. Prints a line when it begins to use only a tenth, and at the end how many words
/// were wrong.
pub fn idle_child(args: &IdleChildArgs) -> i32 {
    let pages = args.mib << 8;
    let mut random = Random::new(1);
    let mut memory = vec![0u64; pages * WORDS];
    for (number, page) in memory.chunks_exact_mut(WORDS).enumerate() {
        for (at, word) in page.iter_mut().enumerate() {
            *word = if at < WORDS / 4 { random.word() } else { (number + at / 8) as u64 };
        }
    }
    let mut wrong_pages = 0;
    for (page_count, seconds) in [(pages, args.seconds_all), (pages / 10, args.seconds_tenth)] {
        let end = Instant::now() + Duration::from_secs(seconds);
        while Instant::now() < end {
            for n in 0..1000 {
                let page = random.below(page_count);
                let last = memory[page * WORDS + WORDS - 1];
                wrong_pages += u64::from(last != (page + (WORDS - 1) / 8) as u64);
                if n % CHANGED == 0 {
                    memory[page * WORDS + WORDS / 2] ^= 1;
                }
            }
        }
        println!("{}", if page_count == pages { "a tenth" } else { "end" });
    }
    i32::from(wrong_pages > 0)
}

/// What was measured.
#[derive(Serialize)]
pub struct PhaseFigures {
    /// From the change until nine tenths of the memory that is no longer used are folded; `None` if
    /// that was not reached.
    pub folded_seconds: Option<f64>,
    pub slowdown_percent: f64,
}

/// Runs the program under `memfold run`.
pub fn measure(mib: u64, seconds: u64) -> anyhow::Result<PhaseFigures> {
    let this = std::env::current_exe()?;
    let stats = std::env::temp_dir().join(format!("memfold-phases-{}", std::process::id()));
    let mut child = Command::new(memfold()?)
        .arg("run")
        .arg("--stats-file")
        .arg(&stats)
        .arg("--")
        .arg(this)
        .arg("idle-child")
        .args([mib.to_string(), "5".to_string(), seconds.to_string()])
        .stdout(Stdio::piped())
        .spawn()?;
    let mut lines = BufReader::new(child.stdout.take().context("it was piped")?).lines();
    lines.next().context("the program ended early")??;
    let (begin, mut folded_seconds) = (Instant::now(), None);
    while begin.elapsed() < Duration::from_secs(seconds) && folded_seconds.is_none() {
        std::thread::sleep(Duration::from_millis(200));
        let bytes = folded_bytes(child.id()).unwrap_or(0);
        if bytes >= (mib << 20) / 10 * 9 / 10 * 9 {
            folded_seconds = Some(begin.elapsed().as_secs_f64());
        }
    }
    ensure!(child.wait()?.success(), "a word was wrong");
    let about: Value = serde_json::from_str(&std::fs::read_to_string(&stats)?)?;
    std::fs::remove_file(&stats)?;
    let [own, folding] = ["own_ns", "folding_ns"].map(|name| about[name].as_f64().unwrap_or(0.0));
    Ok(PhaseFigures { folded_seconds, slowdown_percent: folding * 100.0 / own.max(1.0) })
}

/// Returns the folded memory of a run, in bytes.
fn folded_bytes(run: u32) -> Option<u64> {
    let output =
        Command::new(memfold().ok()?).args(["stat", "--json", &run.to_string()]).output().ok()?;
    let about: Value = serde_json::from_slice(&output.stdout).ok()?;
    about["processes"].as_array()?.iter().map(|one| one["folded_bytes"].as_u64()).sum()
}

/// Returns the rows of the report.
pub fn rows(figures: &PhaseFigures) -> [StoreRow; 2] {
    let label = "phases: time until the unused memory is folded, s";
    let row = match figures.folded_seconds {
        Some(seconds) => StoreRow::at_most(label, seconds, 20.0, String::new()),
        None => StoreRow::not_run(label, "<= 20", "it was not folded in this time"),
    };
    [row, StoreRow::at_most("phases: slowdown, %", figures.slowdown_percent, 2.0, String::new())]
}
