//! Many workloads on one store at once: one pool against several (P2).

use crate::common::row::StoreRow;
use crate::corpus::file::CorpusFile;
use crate::store::pool::{Buffer, FOLIO_PAGES, load, order, save, store};
use memfold_store::{Handle, Store, StoreConfig};
use memfold_testkit::random::Random;
use std::sync::Barrier;
use std::time::Instant;

const WORKLOADS: u64 = 10;
/// Folios that each workload keeps.
const LIVE: usize = 64;
/// The default number of pools must be within this of the best number.
const BEST_SHARE: f64 = 0.97;

/// What ten workloads did on one store.
struct Together {
    folios_s: f64,
    /// Locks of a class that were held when wanted, per thousand folios.
    waits: f64,
    /// Time spent waiting for them, of the time of all workloads.
    wait_share: f64,
}

/// Each workload saves a folio, loads another and frees a third, over and over.
fn workload(store: &Store, corpus: &CorpusFile, number: u64, steps: usize) {
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

fn together(corpus: &CorpusFile, pools: usize, steps: usize) -> anyhow::Result<Together> {
    let store = store("lz4", 2, pools)?;
    let barrier = Barrier::new(WORKLOADS as usize + 1);
    let start = std::thread::scope(|scope| {
        for number in 0..WORKLOADS {
            let (store, barrier) = (&store, &barrier);
            scope.spawn(move || {
                barrier.wait();
                workload(store, corpus, number, steps);
            });
        }
        barrier.wait();
        Instant::now()
    });
    let seconds = start.elapsed().as_secs_f64();
    let stats = store.stats();
    let folios = (WORKLOADS as usize * steps) as f64;
    let wait_share = stats.lock_wait_ns as f64 / 1e9 / (seconds * WORKLOADS as f64);
    Ok(Together { folios_s: folios / seconds, waits: stats.lock_waits as f64 / folios * 1e3, wait_share })
}

/// Ten workloads on one pool, on the default number and on 32, each the best of `rounds`.
pub fn rows(corpus: &CorpusFile, steps: usize, rounds: usize) -> anyhow::Result<Vec<StoreRow>> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let default = StoreConfig::pools_for(cores);
    let mut counts = vec![1, default, 32];
    counts.sort_unstable();
    counts.dedup();
    let mut best: Vec<Option<Together>> = counts.iter().map(|_| None).collect();
    for _ in 0..rounds {
        for (count, best) in counts.iter().zip(&mut best) {
            let now = together(corpus, *count, steps)?;
            if best.as_ref().is_none_or(|b| b.folios_s < now.folios_s) {
                *best = Some(now);
            }
        }
    }
    let best: Vec<Together> = best.into_iter().flatten().collect();
    let top = best.iter().map(|t| t.folios_s).fold(0.0, f64::max);
    let mut rows: Vec<StoreRow> = Vec::new();
    for (count, t) in counts.iter().zip(&best) {
        let label = format!("{WORKLOADS} workloads on {count} pools: folios of 64K per second");
        let waits = format!("waits for a lock: {:.2} per 1000 folios, {:.3}% of the time", t.waits, t.wait_share * 1e2);
        rows.push(StoreRow::plain(&label, t.folios_s, waits));
        if *count == default {
            let label = format!("the default, {default} pools, of the best number of pools");
            rows.push(StoreRow::at_least(&label, t.folios_s / top, BEST_SHARE, String::new()));
        }
    }
    Ok(rows)
}
