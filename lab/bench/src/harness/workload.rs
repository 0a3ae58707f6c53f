//! The phases of a walk over an area of memory, in one or more threads. This module does not know
//! how the area is paged.

use crate::common::latency::Latency;
use crate::corpus::file::{CorpusFile, PAGE};
use crate::corpus::page::Pages;
pub use crate::corpus::page::corpus_sums;
use clap::ValueEnum;
use memfold_testkit::random::Sequence as Random;
use serde::{Deserialize, Serialize};
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// A phase of the walk. Every phase verifies what it reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Copies corpus pages into the area, in order
    Fill,
    /// Reads all pages in order
    Read1,
    /// Reads all pages in order again: nothing has changed, so stored copies may still be valid
    Read2,
    /// Reads all pages in order and changes one word of each
    Dirty,
    /// Reads whole pages at random
    Random,
    /// Reads whole pages at random, and changes one of eight
    Mixed,
    /// Makes 90% of all accesses to 10% of the memory (scattered runs of 64 KiB); one in ten is a
    /// write
    Skewed,
    /// Reads whole pages at random and changes one in ten, for the time of --soak, to detect growth
    /// of memory
    #[value(skip)]
    Soak,
}

impl Phase {
    /// All phases in order, without the soak, which comes after them.
    pub const ALL: [Phase; 7] = [
        Phase::Fill,
        Phase::Read1,
        Phase::Read2,
        Phase::Dirty,
        Phase::Random,
        Phase::Mixed,
        Phase::Skewed,
    ];

    /// Returns the name on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Fill => "fill",
            Phase::Read1 => "read1",
            Phase::Read2 => "read2",
            Phase::Dirty => "dirty",
            Phase::Random => "random",
            Phase::Mixed => "mixed",
            Phase::Skewed => "skewed",
            Phase::Soak => "soak",
        }
    }

    /// Returns whether the phase is measured by the latency of accesses. Otherwise it is measured
    /// in bytes per second.
    pub fn is_latency(self) -> bool {
        matches!(self, Phase::Random | Phase::Mixed | Phase::Skewed | Phase::Soak)
    }
}

/// The results of one phase of one run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PhaseResult {
    /// The phase.
    pub phase: Phase,
    /// Time from the start of the first thread to the end of the last.
    pub seconds: f64,
    /// Accessed bytes per second, in millions.
    pub mb_per_s: f64,
    /// Number of accessed pages.
    pub accesses: u64,
    /// Mean latency of an access in microseconds (0 for sequential phases).
    pub mean_us: f64,
    /// Median latency.
    pub p50_us: f64,
    /// 99th percentile of latency.
    pub p99_us: f64,
    /// Maximum latency.
    pub max_us: f64,
    /// Points of the distribution of latencies: microseconds, and the share of accesses that took
    /// no longer.
    #[serde(default)]
    pub cdf: Vec<(f64, f64)>,
    /// Wrong bytes: they differ from what was last written.
    pub bytes_wrong: u64,
}

/// The bounds of a random phase. It ends when it reaches the first of them.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Accesses of a random phase, over all threads.
    pub accesses: u64,
    /// Time of a random phase.
    pub random: Duration,
    /// Time of the soak, which is its only bound.
    pub soak: Duration,
    /// Seed of the random phases.
    pub seed: u64,
}

/// The area of one run, split into one slice for each thread.
pub struct Workload<'c> {
    slices: Vec<Pages<'c>>,
    bounds: Bounds,
}

impl<'c> Workload<'c> {
    /// Makes a walk of `threads` over `len` bytes from `start`, with `sums` from [`corpus_sums`].
    ///
    /// # Safety
    /// As for [`Pages::new`], for `len` bytes: `start` is page-aligned, and `len` a multiple of a
    /// page.
    pub unsafe fn new(
        (start, len): (*mut u8, usize),
        (corpus, sums): (&'c CorpusFile, &'c [u64]),
        threads: usize,
        bounds: Bounds,
    ) -> Workload<'c> {
        let pages = len / PAGE;
        assert!(threads >= 1 && pages >= threads);
        let each = pages / threads;
        let slices = (0..threads).map(|thread| {
            let first = thread * each;
            let count = if thread + 1 == threads { pages - first } else { each };
            // SAFETY: slices don't overlap and lie in the caller's area.
            unsafe { Pages::new(start.add(first * PAGE), count, first as u64, corpus, sums) }
        });
        Workload { slices: slices.collect(), bounds }
    }

    /// Runs one phase. `Fill` must be the first.
    pub fn run(&mut self, phase: Phase) -> PhaseResult {
        let mut bounds = self.bounds;
        bounds.accesses = match phase {
            Phase::Soak => u64::MAX,
            _ => bounds.accesses.div_ceil(self.slices.len() as u64),
        };
        let wrong_before = self.bytes_wrong();
        let parts = each_slice(&mut self.slices, |thread, slice| {
            let start = Instant::now();
            let latency = work(
                phase,
                slice,
                bounds,
                Random::new(bounds.seed ^ ((phase as u64) << 32) ^ thread as u64),
            );
            (start, Instant::now(), latency)
        });
        let start = parts.iter().map(|p| p.0).min().expect("a thread");
        let end = parts.iter().map(|p| p.1).max().expect("a thread");
        let mut latency = Latency::default();
        parts.iter().for_each(|p| latency.merge(&p.2));
        let seconds = (end - start).as_secs_f64();
        let accesses = match phase.is_latency() {
            true => latency.count(),
            false => self.slices.iter().map(|s| s.len() as u64).sum(),
        };
        PhaseResult {
            phase,
            seconds,
            mb_per_s: (accesses * PAGE as u64) as f64 / 1e6 / seconds,
            accesses,
            mean_us: latency.mean_us(),
            p50_us: latency.quantile_us(0.5),
            p99_us: latency.quantile_us(0.99),
            max_us: latency.max_us(),
            cdf: latency.cdf(),
            bytes_wrong: self.bytes_wrong() - wrong_before,
        }
    }

    /// Compares every byte of the area, untimed, and returns the number of wrong bytes.
    pub fn verify(&mut self) -> u64 {
        let before = self.bytes_wrong();
        each_slice(&mut self.slices, |_, slice| {
            (0..slice.len()).for_each(|i| slice.check_whole(i))
        });
        self.bytes_wrong() - before
    }

    /// Returns the number of wrong bytes found since the start.
    pub fn bytes_wrong(&self) -> u64 {
        self.slices.iter().map(|s| s.bytes_wrong).sum()
    }
}

/// Runs one thread's part of a phase, and returns the latencies of phases that have them.
fn work(phase: Phase, slice: &mut Pages<'_>, bounds: Bounds, random: Random) -> Latency {
    let pages = slice.len();
    match phase {
        Phase::Fill => (0..pages).for_each(|i| slice.fill(i)),
        Phase::Read1 | Phase::Read2 => (0..pages).for_each(|i| slice.check_samples(i)),
        Phase::Dirty => {
            for i in 0..pages {
                slice.check_samples(i);
                slice.change(i);
            }
        }
        Phase::Random => {
            return accesses(slice, bounds.accesses, bounds.random, random, uniform, 0);
        }
        Phase::Mixed => {
            return accesses(slice, bounds.accesses, bounds.random, random, uniform, 8);
        }
        Phase::Skewed => {
            return accesses(slice, bounds.accesses, bounds.random, random, skewed, 10);
        }
        Phase::Soak => return accesses(slice, bounds.accesses, bounds.soak, random, uniform, 10),
    }
    Latency::default()
}

/// Accesses the pages that `choose` returns, until there were `count` accesses or `time` is over.
/// One in `write_every` (0: none) also writes.
fn accesses(
    slice: &mut Pages<'_>,
    count: u64,
    time: Duration,
    mut random: Random,
    choose: fn(&mut Random, usize) -> usize,
    write_every: usize,
) -> Latency {
    let mut latency = Latency::default();
    let begin = Instant::now();
    for _ in 0..count {
        let i = choose(&mut random, slice.len());
        let write = write_every != 0 && random.below(write_every) == 0;
        let start = Instant::now();
        if start - begin > time {
            break;
        }
        slice.check_sum(i);
        if write {
            slice.change(i);
        }
        latency.add(start.elapsed());
    }
    latency
}

fn uniform(random: &mut Random, pages: usize) -> usize {
    random.below(pages)
}

/// Returns a page of every tenth run of 16 pages in nine of ten cases, otherwise any page.
fn skewed(random: &mut Random, pages: usize) -> usize {
    const RUN: usize = 16;
    let hot_runs = pages / (10 * RUN);
    if hot_runs == 0 || random.below(10) == 0 {
        return random.below(pages);
    }
    random.below(hot_runs) * 10 * RUN + random.below(RUN)
}

/// Runs `job` on every slice. Each slice has a thread, and all start together. A single slice runs
/// on the calling thread, so that a walk of one thread is a process of one thread.
fn each_slice<'c, T: Send>(
    slices: &mut [Pages<'c>],
    job: impl Fn(usize, &mut Pages<'c>) -> T + Sync,
) -> Vec<T> {
    if let [slice] = slices {
        return vec![job(0, slice)];
    }
    let barrier = Barrier::new(slices.len());
    let (barrier, job) = (&barrier, &job);
    std::thread::scope(|scope| {
        let threads: Vec<_> = slices
            .iter_mut()
            .enumerate()
            .map(|(index, slice)| {
                scope.spawn(move || {
                    barrier.wait();
                    job(index, slice)
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("a thread of the walk panicked"))
            .collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::plain::PlainArea;
    use memfold_testkit::random::mix;

    const LEN: usize = 4 << 20;
    const BOUNDS: Bounds = Bounds {
        accesses: 20_000,
        random: Duration::from_secs(60),
        soak: Duration::from_millis(50),
        seed: 1,
    };

    fn with_walk(threads: usize, test: impl FnOnce(&mut Workload<'_>, *mut u8)) {
        let name = format!(
            "memfold-walk-{}-{threads}-{:?}",
            std::process::id(),
            std::thread::current().id()
        );
        let path = std::env::temp_dir().join(name);
        let bytes: Vec<u8> = (0..1u64 << 17).flat_map(|i| mix(i).to_le_bytes()).collect();
        std::fs::write(&path, bytes).unwrap();
        let corpus = CorpusFile::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let sums = corpus_sums(&corpus);
        let area = PlainArea::new(LEN, false).unwrap();
        // SAFETY: the area is LEN bytes of its own; the tests flip bytes only between phases.
        let mut walk =
            unsafe { Workload::new((area.as_ptr(), LEN), (&corpus, &sums), threads, BOUNDS) };
        test(&mut walk, area.as_ptr());
    }

    fn flip(start: *mut u8, at: usize) {
        assert!(at < LEN);
        // SAFETY: inside the area of `with_walk`, between phases.
        unsafe { *start.add(at) ^= 0x40 };
    }

    #[test]
    fn all_phases_find_nothing_wrong_in_plain_memory() {
        for threads in [1, 3] {
            with_walk(threads, |walk, _| {
                for phase in Phase::ALL.into_iter().chain([
                    Phase::Read1,
                    Phase::Dirty,
                    Phase::Random,
                    Phase::Soak,
                ]) {
                    let result = walk.run(phase);
                    assert_eq!(result.bytes_wrong, 0, "{phase:?}");
                    assert!(result.seconds > 0.0 && result.mb_per_s > 0.0);
                    assert_eq!(result.mean_us > 0.0, phase.is_latency());
                }
                assert_eq!(walk.verify(), 0);
            });
        }
    }

    #[test]
    fn a_flipped_byte_is_found() {
        with_walk(2, |walk, start| {
            walk.run(Phase::Fill);
            flip(start, 5 * PAGE);
            assert_eq!(walk.run(Phase::Read1).bytes_wrong, 1, "the stamp of a page");
            flip(start, 5 * PAGE);
            flip(start, 64 * PAGE + 4095);
            assert_eq!(walk.run(Phase::Read2).bytes_wrong, 1, "any byte of a 64th page");
            assert_eq!(walk.verify(), 1, "any byte of any page");
            assert!(walk.run(Phase::Random).bytes_wrong >= 1, "20000 reads of 1024 pages");
        });
    }

    #[test]
    fn a_lost_change_is_found() {
        with_walk(1, |walk, start| {
            walk.run(Phase::Fill);
            let mut old = vec![0u8; PAGE];
            // SAFETY: page 7 of the area, no phase runs.
            unsafe { std::ptr::copy_nonoverlapping(start.add(7 * PAGE), old.as_mut_ptr(), PAGE) };
            walk.run(Phase::Dirty);
            // SAFETY: page 7 of the area, and no phase runs.
            unsafe { std::ptr::copy_nonoverlapping(old.as_ptr(), start.add(7 * PAGE), PAGE) };
            assert!(
                (1..=8).contains(&walk.run(Phase::Read1).bytes_wrong),
                "the page as it was before its change"
            );
        });
    }

    #[test]
    fn skewed_accesses_are_nine_tenths_in_a_tenth() {
        let mut random = Random::new(3);
        let hot =
            (0..100_000).filter(|_| (skewed(&mut random, 16_000) / 16).is_multiple_of(10)).count();
        assert!((90_000..92_000).contains(&hot), "{hot}");
    }
}
