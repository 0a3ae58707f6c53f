//! The slots of a swap file under a model checker that chooses every switch between threads. Row
//! S6.
//!
//! Run by `scripts/check models`. Each model is run under random schedules and under PCT (few, well-placed
//! switches). `MEMFOLD_MODEL_RUNS` multiplies the number of runs.

use memfold_os::units::Order;
use memfold_swap::cluster::{CLUSTER_SLOTS, Clusters, SearchScope};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::thread;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const RUNS: usize = 400;

/// Explores `model` under both schedulers.
fn explore(model: fn()) {
    let times = std::env::var("MEMFOLD_MODEL_RUNS").ok().and_then(|t| t.parse().ok()).unwrap_or(1);
    let mut config = shuttle::Config::new();
    config.stack_size = 2 << 20;
    config.max_steps = shuttle::MaxSteps::FailAfter(200_000);
    shuttle::Runner::new(RandomScheduler::new(RUNS * times), config.clone()).run(model);
    shuttle::Runner::new(PctScheduler::new(3, RUNS * times), config).run(model);
}

/// Slots and counts stay exact while CPUs take, hold, let go and discard at once (S6). No run is
/// given out twice.
#[test]
fn s6_racing_allocators_keep_the_counts_exact() {
    explore(|| {
        let clusters = Arc::new(Clusters::new());
        clusters.grow(2);
        let owners: Arc<Vec<AtomicU64>> =
            Arc::new((0..2 * CLUSTER_SLOTS).map(|_| AtomicU64::new(0)).collect());
        let allocator = |cpu: usize, orders: [u8; 3]| {
            let (clusters, owners) = (clusters.clone(), owners.clone());
            thread::spawn(move || {
                let mut mine = Vec::new();
                for order in orders.map(|o| Order::new(o).unwrap()) {
                    if let Some(first) = clusters.allocate(order, cpu, SearchScope::All) {
                        for slot in first..first + order.pages() as u64 {
                            assert_eq!(
                                owners[slot as usize].swap(1, Relaxed),
                                0,
                                "slot {slot} has two owners"
                            );
                        }
                        assert!(clusters.used() >= order.pages() as u64);
                        mine.push((first, order.pages()));
                    }
                }
                let (first, count) = mine.pop().expect("there is room for one");
                clusters.retain(first, count);
                assert_eq!(clusters.release(first, count), 0, "another holder is left");
                (first..first + count as u64)
                    .for_each(|slot| owners[slot as usize].store(0, Relaxed));
                assert_eq!(clusters.release(first, count), count);
                mine.iter().map(|run| run.1 as u64).sum::<u64>()
            })
        };
        let threads = [allocator(0, [9, 4, 0]), allocator(1, [4, 4, 9]), allocator(2, [0, 9, 6])];
        let discarder = clusters.clone();
        let discarder = thread::spawn(move || {
            let mut ranges = [const { 0..0 }; 2];
            for _ in 0..2 {
                let count = discarder.begin_discard(&mut ranges);
                ranges[..count].iter().for_each(|range| discarder.discarded(range));
            }
        });
        let sum: u64 = threads.into_iter().map(|t| t.join().unwrap()).sum();
        discarder.join().unwrap();
        assert_eq!(clusters.used(), sum);
        assert_eq!(clusters.check(), Ok(()));
    });
}
