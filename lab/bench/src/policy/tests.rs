//! Tests of the simulator on traces that are made here.

use crate::policy::candidates::ALL;
use crate::policy::counts::Counts;
use crate::policy::memory::{Arrival, Batches, Candidate, PolicyMemory, replay};
use crate::policy::trace::{PageNumber, Trace};
use memfold_engine::policy::eviction::LruList;
use memfold_testkit::random::Random;

fn make(name: &str, trace: &Trace) -> Box<dyn Candidate> {
    (ALL.iter().find(|policy| policy.name == name).expect("a policy of that name").make)(trace)
}

fn run(name: &str, trace: &Trace, capacity: u64) -> Counts {
    replay(trace, capacity, &mut *make(name, trace))
}

/// A trace of reads of pages, two apart, so that they are no neighbours and no stream.
fn reads(pages: &[u64]) -> Trace {
    Trace::new(&pages.iter().map(|page| (page * 100, false)).collect::<Vec<_>>())
}

/// Touches at random, some pages more often than others.
fn random(pages: usize, touches: usize, seed: u64) -> Trace {
    let mut random = Random::new(seed);
    let mut touch = || {
        let most = 1 + random.below(pages);
        (random.below(most) as u64, random.per_mille(300))
    };
    Trace::new(&(0..touches).map(|_| touch()).collect::<Vec<_>>())
}

#[test]
fn classic_policies_miss_as_computed_by_hand() {
    // The example of textbooks: FIFO has more misses in more memory.
    let trace = reads(&[1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5]);
    // First touches are no misses: there are 5.
    let misses = |name, capacity| run(name, &trace, capacity).misses;
    assert_eq!((misses("fifo", 3), misses("fifo", 4)), (9 - 5, 10 - 5));
    assert_eq!((misses("lru", 3), misses("lru", 4)), (10 - 5, 8 - 5));
    assert_eq!((misses("optimum", 3), misses("optimum", 4)), (7 - 5, 6 - 5));
}

#[test]
fn events_of_a_page_are_counted_as_computed_by_hand() {
    let (a, b) = (0, 100);
    let trace = Trace::new(&[
        (a, false), // first touch
        (b, true),  // `a` is saved
        (a, false), // `b` is saved, `a` is loaded read-only
        (a, true),  // first write
        (b, true),  // `a` is saved, `b` is loaded writable
        (a, false), // `b` is saved
        (b, false), // `a` is dropped
    ]);
    let counts = run("fifo", &trace, 1);
    let expected = Counts { misses: 4, write_faults: 1, saved: 4, dropped: 1, ..Counts::default() };
    assert_eq!(counts, expected);
    // `a` left dirty, so that it is loaded writable. In the end its bytes are compared.
    let counts = run("memfold", &trace, 1);
    assert_eq!((counts.write_faults, counts.unchanged, counts.saved), (0, 1, 4));
}

#[test]
fn page_that_is_touched_again_in_the_swap_cache_is_rescued() {
    /// First in, first out. Dirty pages wait in the swap cache.
    struct Waiting;
    impl Candidate for Waiting {
        fn arrived(&mut self, page: PageNumber, _how: Arrival, memory: &mut PolicyMemory<'_>) {
            memory.list(page, LruList::Inactive);
        }
        fn victim(&mut self, memory: &mut PolicyMemory<'_>) -> PageNumber {
            memory.lists.isolate(LruList::Inactive).expect("a page is mapped").0 - 1
        }
        fn batches(&self, _capacity: u64) -> Batches {
            Batches { dropped: 1, dirty_wait: true }
        }
    }
    // Page 257 comes, and pages 1 to 3 leave the page table. A 128th of the memory, two pages, may
    // wait, so that page 1 is saved. Then page 2 is rescued.
    let pages: Vec<u64> = (1..=257).chain([2]).collect();
    let counts = replay(&reads(&pages), 256, &mut Waiting);
    assert_eq!(counts, Counts { rescues: 1, saved: 1, ..Counts::default() });
}

#[test]
fn optimum_has_the_fewest_misses_of_policies_that_load_on_demand() {
    for seed in 0..20 {
        let trace = random(60, 2000, seed);
        for capacity in [5, 15, 30, 50] {
            let least = run("optimum", &trace, capacity).misses;
            for name in ["lru", "clock", "fifo", "nostreams", "forgets", "writebits"] {
                let counts = run(name, &trace, capacity);
                assert!(counts.ahead > 0 || counts.misses >= least, "{name}, seed {seed}");
            }
        }
    }
}

#[test]
fn lru_never_misses_more_in_more_memory() {
    for seed in 0..20 {
        let trace = random(60, 2000, seed);
        let misses: Vec<u64> = (1..=60).map(|n| run("lru", &trace, n).misses).collect();
        assert!(misses.is_sorted_by(|less, more| less >= more), "{misses:?}");
        assert_eq!(misses[59], 0);
    }
}

#[test]
fn every_eviction_is_of_a_page_that_was_mapped_once() {
    for policy in &ALL {
        let trace = random(900, 20_000, 7);
        let counts = replay(&trace, 300, &mut *(policy.make)(&trace));
        let arrivals = trace.pages() as u64 + counts.misses + counts.ahead + counts.rescues;
        let departures = counts.saved + counts.unchanged + counts.dropped + counts.rescues;
        assert!(
            arrivals - 300 <= departures && departures <= arrivals,
            "{}: {counts:?}",
            policy.name
        );
        assert!(counts.wasted <= counts.ahead && counts.write_faults <= arrivals);
    }
}

#[test]
fn neighbours_are_loaded_together_and_unused_ones_are_wasted() {
    // Runs of 4 pages, one far from the other. Each is touched whole, twice.
    let runs = (0..200u64).flat_map(|run| (0..4).map(move |page| run * 1000 + page));
    let touches: Vec<(u64, bool)> = runs.map(|page| (page, false)).collect();
    let whole = Trace::new(&[touches.as_slice(), &touches].concat());
    let (single, around) = (run("memfold", &whole, 400), run("around4", &whole, 400));
    assert!(around.misses <= 200 && single.misses > around.misses, "{single:?} {around:?}");
    // The second time only the first page of each.
    let firsts: Vec<_> = touches.iter().step_by(4).cycle().take(1000).copied().collect();
    let some = Trace::new(&[touches.as_slice(), &firsts].concat());
    assert!(run("around4", &some, 100).wasted > 0);
    let learner = run("learned16", &some, 100);
    assert!(learner.ahead * 2 < run("around16", &some, 100).ahead, "{learner:?}");
}

#[test]
fn stream_loads_the_pages_that_follow() {
    let touches: Vec<(u64, bool)> = (0..2000).map(|page| (page, false)).collect();
    let trace = Trace::new(&[touches.as_slice(), &touches].concat());
    let counts = run("memfold", &trace, 500);
    assert!(counts.misses < 400 && counts.ahead > 1000 && counts.wasted == 0, "{counts:?}");
}

#[test]
fn trace_with_all_pages_in_memory_has_no_misses() {
    let trace = random(100, 1000, 3);
    for policy in &ALL {
        let counts =
            replay(&trace, trace.pages() as PageNumber as u64, &mut *(policy.make)(&trace));
        assert_eq!((counts.misses, counts.seconds(&crate::policy::counts::COSTS)), (0, 0.0));
    }
}
