//! `memfold bench pools`: ten workloads reclaim and refault at once, on one pool and on several
//! (P2). Also single streams out and in, of zeros and of real data, in small and in large folios
//! (C-bench). For `memfold bench store`: ten workloads on a store alone.

use crate::common::row::StoreRow;
use crate::common::summary::Spread;
use crate::corpus::file::{CorpusFile, PAGE};
use crate::corpus::page::{Pages, corpus_sums};
use crate::harness::brief::{BriefArgs, BriefFindings, brief};
use crate::store::pool::{Buffer, FOLIO_PAGES, load, order, save, store};
use anyhow::ensure;
use memfold_engine::{Delivery, Memory, Region};
use memfold_store::{Handle, Store, StoreConfig};
use memfold_testkit::random::Sequence as Random;
use serde_json::json;
use std::sync::Barrier;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

const WORKLOADS: u64 = 10;
/// Consecutive pages that a workload touches from a random place on: 64 KiB.
const RUN: usize = 16;
/// Folios that each workload on a store keeps.
const LIVE: usize = 64;
/// The default number of pools must reach this share of the best number.
const BEST_SHARE: f64 = 0.97;

/// Measures, prints and returns the exit status.
pub fn pools(args: BriefArgs) -> anyhow::Result<i32> {
    brief("pools", &args, |corpus, _, quick| {
        let mut findings = BriefFindings { rows: Vec::new(), name: "pools", raw: Vec::new() };
        many(corpus, quick, &mut findings)?;
        for (zeros, folio) in [(true, "4K"), (true, "2M"), (false, "4K"), (false, "2M")] {
            sequential(corpus, zeros, folio, quick, &mut findings.rows)?;
        }
        Ok(findings)
    })
}

fn memory(resident_bytes: u64, settings: &[(&str, &str)]) -> anyhow::Result<Memory> {
    let builder = Memory::builder().resident_bytes(resident_bytes).delivery(Delivery::Signal);
    let builder = settings.iter().fold(builder, |builder, (name, value)| builder.set(name, value));
    builder.build().map_err(|error| anyhow::anyhow!("memfold: {error}"))
}

fn region(memory: &Memory, len: usize) -> anyhow::Result<Region> {
    memory.region(len).map_err(|error| anyhow::anyhow!("memfold: {error}"))
}

/// The results of one run of all workloads.
struct Together {
    /// Their rate per second: MB, or folios.
    rate: f64,
    /// Waits for locks of the pools, per 1000 runs of pages or folios.
    waits: f64,
    /// The time of these waits, in percent of the time of all workloads.
    wait_percent: f64,
}

impl Together {
    /// Computes the results of `steps` in `seconds`. Each step adds `each` to the rate.
    fn of(steps: f64, each: f64, seconds: f64, waits: u64, wait_ns: u64) -> Together {
        Together {
            rate: steps * each / seconds,
            waits: waits as f64 / steps * 1e3,
            wait_percent: wait_ns as f64 / 1e9 / (seconds * WORKLOADS as f64) * 100.0,
        }
    }
}

/// Returns the default number of pools, and all numbers to compare: the default, 1 and `others`.
fn pool_counts(others: &[usize]) -> (usize, Vec<usize>) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let default = StoreConfig::pools_for(cores);
    let mut counts = [&[1, default], others].concat();
    counts.sort_unstable();
    counts.dedup();
    (default, counts)
}

/// Every workload has a part of one region, and a quarter of it in memory. So each touch evicts and
/// loads.
fn together(
    corpus: &CorpusFile,
    sums: &[u64],
    pools: usize,
    part: usize,
    steps: u64,
) -> anyhow::Result<Together> {
    let len = part * WORKLOADS as usize;
    let memory = memory(len as u64 / 4, &[("pools", &pools.to_string())])?;
    let region = region(&memory, len)?;
    let barrier = Barrier::new(WORKLOADS as usize + 1);
    let mut before = memory.store_stats();
    let mut start = Instant::now();
    let wrong_bytes: u64 = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..WORKLOADS)
            .map(|number| {
                let barrier = &barrier;
                let first = number * (part / PAGE) as u64;
                // SAFETY: the parts don't overlap, lie in the region, and only their own workload
                // uses them.
                let mut pages = unsafe {
                    Pages::new(
                        region.as_ptr().add(number as usize * part),
                        part / PAGE,
                        first,
                        corpus,
                        sums,
                    )
                };
                scope.spawn(move || {
                    (0..pages.len()).for_each(|page| pages.fill(page));
                    barrier.wait();
                    barrier.wait();
                    let mut random = Random::new(number);
                    for _ in 0..steps {
                        let at = random.below(pages.len() / RUN) * RUN;
                        for page in at..at + RUN {
                            pages.check_sum(page);
                            pages.change(page);
                        }
                    }
                    pages.bytes_wrong
                })
            })
            .collect();
        barrier.wait(); // All parts are filled.
        before = memory.store_stats();
        start = Instant::now();
        barrier.wait();
        threads.into_iter().map(|thread| thread.join().expect("a workload panicked")).sum()
    });
    let seconds = start.elapsed().as_secs_f64();
    ensure!(wrong_bytes == 0, "{wrong_bytes} bytes wrong");
    let after = memory.store_stats();
    let (waits, wait_ns) =
        (after.lock_waits - before.lock_waits, after.lock_wait_ns - before.lock_wait_ns);
    Ok(Together::of((WORKLOADS * steps) as f64, (RUN * PAGE) as f64 / 1e6, seconds, waits, wait_ns))
}

fn many(corpus: &CorpusFile, quick: bool, found: &mut BriefFindings) -> anyhow::Result<()> {
    let (default, counts) = pool_counts(&[8, 32]);
    let (part, steps, rounds) = if quick { (4 << 20, 300, 3) } else { (16 << 20, 1500, 5) };
    let sums = corpus_sums(corpus);
    let mut runs: Vec<Vec<Together>> = counts.iter().map(|_| Vec::new()).collect();
    for _ in 0..rounds {
        for (count, runs) in counts.iter().zip(&mut runs) {
            runs.push(together(corpus, &sums, *count, part, steps)?);
        }
    }
    let spread =
        |runs: &[Together], of: fn(&Together) -> f64| Spread::of(runs.iter().map(of).collect());
    let mut one = None;
    for (count, runs) in counts.iter().zip(&runs) {
        let name = match *count {
            1 => "1 pool".to_string(),
            count if count == default => format!("{count} pools (default)"),
            count => format!("{count} pools"),
        };
        let all = spread(runs, |t| t.rate)
            .zip(spread(runs, |t| t.wait_percent))
            .zip(spread(runs, |t| t.waits));
        let Some(((mb_s, percent), waits)) = all else { continue };
        let note = format!(
            "{} MB/s, {:.2} waits for a lock of a size class per 1000 touches of 64K, {:.3}% of the time",
            mb_s.show(),
            waits.median,
            percent.median
        );
        let of = mb_s.median / *one.get_or_insert(mb_s.median);
        let label =
            format!("{WORKLOADS} workloads reclaim and refault, {name}: throughput of 1 pool's");
        found.rows.push(StoreRow::plain(&label, of, note));
        let label = format!(
            "{WORKLOADS} workloads reclaim and refault, {name}: waiting for locks, % of the time"
        );
        found.rows.push(StoreRow::plain(&label, percent.median, String::new()));
        found.raw.push(
            json!({ "name": name, "mb_s": mb_s, "wait_percent": percent, "waits_per_1000": waits }),
        );
    }
    Ok(())
}

/// Evicts and loads a whole region, in order.
fn sequential(
    corpus: &CorpusFile,
    zeros: bool,
    folio: &str,
    quick: bool,
    rows: &mut Vec<StoreRow>,
) -> anyhow::Result<()> {
    let (len, rounds) = if quick { (48 << 20, 3) } else { (256 << 20, 5) };
    let block = if folio == "4K" { "4K" } else { "16K" };
    let memory =
        memory(2 * len as u64 + (64 << 20), &[("clean", "0"), ("folio", folio), ("block", block)])?;
    let region = region(&memory, len)?;
    let page = |number: usize| region.as_ptr().wrapping_add(number * PAGE);
    for number in 0..len / PAGE {
        // SAFETY: the page lies in the region, which only this thread uses; a corpus page lies
        // elsewhere.
        unsafe {
            match zeros {
                true => std::ptr::write_bytes(page(number), 0, PAGE),
                false => {
                    std::ptr::copy_nonoverlapping(corpus.page(number as u64), page(number), PAGE)
                }
            }
        }
    }
    let (mut out, mut back) = (Vec::new(), Vec::new());
    let (mut index_bytes, mut held_bytes) = (0, 0);
    for _ in 0..rounds {
        let start = Instant::now();
        region.pageout(0..len);
        // Workers may still be saving the last folios.
        while memory.stats().folded_bytes.load(Relaxed) < len as u64 {
            region.pageout(0..len);
        }
        out.push(len as f64 / 1e6 / start.elapsed().as_secs_f64());
        index_bytes = memory.stats().index_bytes.load(Relaxed).max(index_bytes);
        held_bytes = memory.stats().pool_bytes.load(Relaxed).max(held_bytes);
        let start = Instant::now();
        // SAFETY: each page lies in the region; the read is volatile, so that the page is really
        // touched.
        (0..len / PAGE).for_each(|number| unsafe {
            std::hint::black_box(page(number).read_volatile());
        });
        back.push(len as f64 / 1e6 / start.elapsed().as_secs_f64());
        let zero = [0u8; PAGE];
        let page_of =
            |number: usize| if zeros { zero.as_ptr() } else { corpus.page(number as u64) };
        // SAFETY: both are readable for a page.
        let is_same = |number| unsafe {
            libc::memcmp(page(number).cast(), page_of(number).cast(), PAGE) == 0
        };
        ensure!((0..len / PAGE).all(is_same), "a page came back wrong");
    }
    let what = if zeros { "zeros" } else { "real data" };
    let show =
        |spread: Option<Spread>| spread.map_or((f64::NAN, String::new()), |s| (s.median, s.show()));
    let ((out, out_note), (back, back_note)) = (show(Spread::of(out)), show(Spread::of(back)));
    let label = |figure: &str| format!("sequential, {what}, folios of {folio}: {figure}");
    rows.push(StoreRow::plain(&label("MB/s out"), out, out_note));
    rows.push(StoreRow::plain(&label("MB/s in"), back, back_note));
    let share = index_bytes as f64 * 100.0 / len as f64;
    let note = format!(
        "{} KiB, pool {:.1} MiB for {} MiB",
        index_bytes / 1024,
        held_bytes as f64 / 1048576.0,
        len >> 20
    );
    rows.push(StoreRow::plain(&label("index, % of the data"), share, note));
    Ok(())
}

/// Runs a workload that saves a folio, loads another and frees a third, repeatedly.
fn on_store(store: &Store, corpus: &CorpusFile, number: u64, steps: usize) {
    let (mut w, mut random) = (store.worker(), Random::new(number));
    let mut to = Buffer::new(order(4).bytes());
    let mut live: Vec<Vec<Handle>> = Vec::new();
    for _ in 0..steps {
        if live.len() == LIVE {
            store.free_many(&live.swap_remove(random.below(LIVE)));
        }
        let page = random.below(corpus.pages() / FOLIO_PAGES as usize) as u64 * FOLIO_PAGES;
        live.push(save(store, &mut w, corpus, page, order(4)));
        let other = &live[random.below(live.len())];
        load(store, &mut w, other, order(4), to.bytes());
    }
    live.iter().for_each(|handles| store.free_many(handles));
}

fn together_on_store(corpus: &CorpusFile, pools: usize, steps: usize) -> anyhow::Result<Together> {
    let store = store("lz4", 2, pools)?;
    let barrier = Barrier::new(WORKLOADS as usize + 1);
    let start = std::thread::scope(|scope| {
        for number in 0..WORKLOADS {
            let (store, barrier) = (&store, &barrier);
            scope.spawn(move || {
                barrier.wait();
                on_store(store, corpus, number, steps);
            });
        }
        barrier.wait();
        Instant::now()
    });
    let (seconds, stats) = (start.elapsed().as_secs_f64(), store.stats());
    Ok(Together::of(
        (WORKLOADS as usize * steps) as f64,
        1.0,
        seconds,
        stats.lock_waits,
        stats.lock_wait_ns,
    ))
}

/// Runs ten workloads on one pool, on the default number and on 32, and takes the best of `rounds`.
pub fn store_rows(
    corpus: &CorpusFile,
    steps: usize,
    rounds: usize,
) -> anyhow::Result<Vec<StoreRow>> {
    let (default, counts) = pool_counts(&[32]);
    let mut best: Vec<Option<Together>> = counts.iter().map(|_| None).collect();
    for _ in 0..rounds {
        for (count, best) in counts.iter().zip(&mut best) {
            let now = together_on_store(corpus, *count, steps)?;
            if best.as_ref().is_none_or(|b| b.rate < now.rate) {
                *best = Some(now);
            }
        }
    }
    let best: Vec<Together> = best.into_iter().flatten().collect();
    let top = best.iter().map(|t| t.rate).fold(0.0, f64::max);
    let mut rows: Vec<StoreRow> = Vec::new();
    for (count, t) in counts.iter().zip(&best) {
        let label = format!("{WORKLOADS} workloads on {count} pools: folios of 64K per second");
        let waits = format!(
            "waits for a lock: {:.2} per 1000 folios, {:.3}% of the time",
            t.waits, t.wait_percent
        );
        rows.push(StoreRow::plain(&label, t.rate, waits));
        if *count == default {
            let label = format!("the default, {default} pools, of the best number of pools");
            rows.push(StoreRow::at_least(&label, t.rate / top, BEST_SHARE, String::new()));
        }
    }
    Ok(rows)
}
