//! The swap cache under contention, refault distance, the ageing of slots, and the span of a shard
//! lock.

use crate::common::latency::Latency;
use crate::common::row::StoreRow;
use crate::common::summary::{Spread, show};
use crate::corpus::file::{CorpusFile, PAGE};
use crate::corpus::page::corpus_sums;
use crate::harness::region::{counters_of, folded};
use crate::harness::workload::{Bounds, Phase, Workload};
use anyhow::ensure;
use memfold_engine::{Delivery, Memory, Region};
use memfold_os::units::Order;
use memfold_swap::cluster::{CLUSTER_SLOTS, Clusters, SearchScope};
use memfold_testkit::random::Sequence as Random;
use std::path::Path;
use std::sync::Barrier;
use std::time::{Duration, Instant};

const FOLIO: usize = 64 << 10;

/// Makes a region filled with corpus pages, all of it folded.
fn filled(
    corpus: &CorpusFile,
    len: usize,
    settings: &[String],
) -> anyhow::Result<(Memory, Region)> {
    let (memory, mut region) = folded(len, Delivery::Thread, settings)?;
    corpus.fill(&mut region);
    let start = Instant::now();
    while count(&memory, "folded_bytes") < len as u64 {
        region.pageout(0..len);
        ensure!(start.elapsed() < Duration::from_secs(20), "not all of it could be folded");
    }
    Ok((memory, region))
}

fn count(memory: &Memory, name: &str) -> u64 {
    counters_of(memory).get(name).copied().unwrap_or(0)
}

/// C2: `threads` touch different pages of one folio in the file at once, a new folio in each round.
pub fn wait_rows(corpus: &CorpusFile, dir: &Path, quick: bool) -> anyhow::Result<Vec<StoreRow>> {
    let len = if quick { 64 << 20 } else { 192 << 20 };
    let mut rows = Vec::new();
    for threads in [1, 16] {
        let settings = ["limit=512M", "codec=none", "folio=64K", "block=64K", "readahead=off"]
            .map(String::from);
        let settings: Vec<String> =
            settings.into_iter().chain([format!("swap={}", dir.display())]).collect();
        let (memory, region) = filled(corpus, len, &settings)?;
        let mut folios: Vec<usize> = (0..len / FOLIO).collect();
        Random::new(1).shuffle(&mut folios);
        let before = count(&memory, "swpin_64K");
        let latency = touch_together(corpus, &region, &folios, threads)?;
        let reads = count(&memory, "swpin_64K") - before;
        let note = format!(
            "p50 {} us, p99 {}, p99.9 {}, worst {}; {} folios, {} faults waited",
            show(latency.quantile_us(0.5)),
            show(latency.quantile_us(0.99)),
            show(latency.quantile_us(0.999)),
            show(latency.max_us()),
            folios.len(),
            count(&memory, "faults_waited"),
        );
        let label = format!("{threads} thread(s) touch one folio in the file: reads of each");
        rows.push(StoreRow::at_most(&label, reads as f64 / folios.len() as f64, 1.0, note));
    }
    Ok(rows)
}

fn touch_together(
    corpus: &CorpusFile,
    region: &Region,
    folios: &[usize],
    threads: usize,
) -> anyhow::Result<Latency> {
    let barrier = Barrier::new(threads);
    let start = region.as_ptr() as usize;
    let one = |thread: usize| {
        let mut latency = Latency::default();
        let mut wrong_words = 0;
        for folio in folios {
            let at = folio * FOLIO + thread * PAGE;
            barrier.wait();
            let touch_start = Instant::now();
            // SAFETY: the word lies in the region, which lives until the threads have ended.
            let word = unsafe { ((start + at + 512) as *const u64).read_volatile() };
            latency.add(touch_start.elapsed());
            // SAFETY: a word of a corpus page.
            let expected = unsafe { corpus.page((at / PAGE) as u64).add(512).cast::<u64>().read() };
            wrong_words += u64::from(word != expected);
        }
        (latency, wrong_words)
    };
    let mut all = Latency::default();
    let wrong_words: u64 = std::thread::scope(|scope| {
        let one = &one;
        let threads: Vec<_> = (0..threads).map(|thread| scope.spawn(move || one(thread))).collect();
        threads
            .into_iter()
            .map(|t| t.join().expect("it only reads"))
            .map(|(l, wrong_words)| {
                all.merge(&l);
                wrong_words
            })
            .sum()
    });
    ensure!(wrong_words == 0, "{wrong_words} WRONG WORDS");
    Ok(all)
}

/// C4: in 64 MiB, a hot set of 20 MiB is touched once for each 16 MiB of a scan. Returns loads of
/// hot blocks in the second half.
pub fn hot_rows(corpus: &CorpusFile, quick: bool) -> anyhow::Result<Vec<StoreRow>> {
    const BLOCK: usize = 16 << 10;
    let (hot, step, rounds) = (20 << 20, 16 << 20, if quick { 12 } else { 24 });
    let mut refaults = Vec::new();
    for on in ["on", "off"] {
        let settings =
            ["resident=64M".to_string(), "readahead=off".into(), format!("workingset={on}")];
        let (memory, region) = filled(corpus, hot + rounds * step, &settings)?;
        let touch = |at: usize| {
            // SAFETY: the byte lies in the region.
            unsafe { region.as_ptr().add(at).read_volatile() };
        };
        let (mut late, mut touches) = (0, 0);
        for round in 0..rounds {
            (0..step).step_by(PAGE).for_each(|at| touch(hot + round * step + at));
            let before = count(&memory, "pgmajfault");
            (0..hot).step_by(BLOCK).for_each(touch);
            if round >= rounds / 2 {
                late += count(&memory, "pgmajfault") - before;
                touches += hot / BLOCK;
            }
        }
        let activations = count(&memory, "workingset_activate");
        check_all(corpus, &region)?;
        refaults.push((late, touches, activations));
    }
    let [(with, touches, activations), (without, ..)] = refaults[..] else {
        unreachable!("two settings")
    };
    let note = format!(
        "{with} loads of {touches} touches, {without} with --workingset off; {activations} pages activated"
    );
    let share = with as f64 / without.max(1) as f64;
    Ok(vec![StoreRow::plain(
        "loads of hot blocks beside a scan, of those without refault distance",
        share,
        note,
    )])
}

/// Returns an error if a byte of a region that was [`filled`] and only read differs from the
/// corpus.
fn check_all(corpus: &CorpusFile, region: &Region) -> anyhow::Result<()> {
    // SAFETY: a whole page of the corpus, which is mapped and never written.
    let page_at =
        |page: usize| unsafe { std::slice::from_raw_parts(corpus.page(page as u64), PAGE) };
    let wrong_pages = region
        .as_slice()
        .chunks_exact(PAGE)
        .enumerate()
        .filter(|(page, bytes)| *bytes != page_at(*page))
        .count();
    ensure!(wrong_pages == 0, "{wrong_pages} PAGES came back WRONG");
    Ok(())
}

/// S-bench: takes and frees slots of mixed orders for 100 rounds, at up to 60% of the slots.
pub fn ageing_rows() -> Vec<StoreRow> {
    const ORDERS: [u8; 15] = [0, 0, 0, 2, 2, 2, 4, 4, 4, 4, 5, 6, 7, 8, 9];
    let (clusters, count) = (Clusters::new(), 256);
    clusters.grow(count);
    let total = (count * CLUSTER_SLOTS) as u64;
    let mut random = Random::new(4);
    let mut slots: Vec<(u64, Order)> = Vec::new();
    let (mut requests, mut fallback) = (0u64, 0u64);
    for _ in 0..100 {
        while clusters.used() < total * 6 / 10 {
            let order = Order::new(random.pick(&ORDERS)).expect("an order");
            requests += 1;
            match clusters.allocate(order, random.below(4), SearchScope::All) {
                Some(first) => slots.push((first, order)),
                None => {
                    fallback += 1;
                    break;
                }
            }
        }
        for _ in 0..slots.len() * 6 / 10 {
            let (first, order) = slots.swap_remove(random.below(slots.len()));
            clusters.release(first, order.pages());
        }
    }
    let note = format!(
        "{fallback} of {requests} runs of 4 KiB to 2 MiB, in a file of {} MiB",
        total / 256
    );
    vec![StoreRow::at_most(
        "slots after 100 rounds of mixed orders: runs split, %",
        fallback as f64 * 100.0 / requests as f64,
        0.0,
        note,
    )]
}

/// C7: four threads fill and read a region in turn, by the span of a shard lock.
pub fn shard_rows(corpus: &CorpusFile, quick: bool) -> anyhow::Result<Vec<StoreRow>> {
    let (len, rounds) = if quick { (128 << 20, 2) } else { (256 << 20, 5) };
    let spans = ["2M", "16M", "1G"];
    let sums = corpus_sums(corpus);
    let mut speeds = [const { Vec::new() }; 3];
    for _ in 0..rounds {
        for (span, speeds) in spans.iter().zip(&mut speeds) {
            let settings = [format!("resident={}", len / 4), format!("shard={span}")];
            let (_memory, region) = folded(len, Delivery::Signal, &settings)?;
            let bounds =
                Bounds { accesses: 0, random: Duration::ZERO, soak: Duration::ZERO, seed: 1 };
            // SAFETY: the region is `len` bytes, page-aligned, outlives the walk, and nothing else
            // touches it.
            let mut walk =
                unsafe { Workload::new((region.as_ptr(), len), (corpus, &sums), 4, bounds) };
            let phases = [Phase::Fill, Phase::Read1, Phase::Dirty].map(|phase| walk.run(phase));
            ensure!(walk.bytes_wrong() == 0, "{} WRONG BYTES", walk.bytes_wrong());
            let seconds: f64 = phases.iter().map(|phase| phase.seconds).sum();
            speeds.push(3.0 * len as f64 / 1e6 / seconds);
        }
    }
    let rows = spans.iter().zip(speeds).map(|(span, speeds)| {
        let speed = Spread::of(speeds).expect("a round");
        let label = format!("4 threads, a lock of the index for each {span}: MB/s");
        StoreRow::plain(
            &label,
            speed.median,
            format!("{}; write, read and change, signal mode", speed.show()),
        )
    });
    Ok(rows.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::row::all_good;

    #[test]
    fn slots_age_without_a_split() {
        let rows = ageing_rows();
        assert!(all_good(&rows) && rows[0].figure == Some(0.0), "{rows:?}");
    }
}
