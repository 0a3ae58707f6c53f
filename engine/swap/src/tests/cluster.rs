//! Tests of the slot allocator: comparison with a naive bitmap, and ageing.
use crate::cluster::{CLUSTER_SLOTS, Clusters, SearchScope, SlotSet};
use memfold_os::units::Order;
use memfold_testkit::random::{Random, seed};
use proptest::prelude::*;

fn order(n: u8) -> Order {
    Order::new(n).unwrap()
}

/// A count for each slot, to compare the clusters with.
struct Naive(Vec<u8>);

impl Naive {
    fn free_run(&self, order: Order) -> bool {
        self.0.chunks(order.pages()).any(|run| run.iter().all(|holders| *holders == 0))
    }

    fn take(&mut self, first: u64, order: Order) {
        assert!(
            first.is_multiple_of(order.pages() as u64),
            "a run of order {} starts at {first}",
            order.get()
        );
        let run = &mut self.0[first as usize..][..order.pages()];
        assert!(run.iter().all(|holders| *holders == 0), "a slot was given out twice");
        run.fill(1);
    }
}

proptest! {
    /// S1, S2, S4: every allocated run is aligned, whole, and was free. An allocation succeeds
    /// whenever a run is free. A slot is free exactly when its last holder has released it.
    #[test]
    fn s1_agrees_with_a_bitmap(ops in prop::collection::vec((0u8..=9, 0usize..4, 0usize..6, any::<prop::sample::Index>()), 1..400)) {
        let clusters = Clusters::new();
        clusters.grow(6);
        let mut naive = Naive(vec![0; 6 * CLUSTER_SLOTS]);
        let mut runs: Vec<(u64, usize)> = Vec::new();
        for (n, cpu, what, pick) in ops {
            let order = order(n);
            match what {
                0..=2 => match clusters.allocate(order, cpu, SearchScope::All) {
                    Some(first) => {
                        naive.take(first, order);
                        runs.push((first, order.pages()));
                    }
                    None => prop_assert!(!naive.free_run(order), "a free run of order {n} was not found"),
                },
                3 | 4 if !runs.is_empty() => {
                    let (first, count) = runs.swap_remove(pick.index(runs.len()));
                    // A part of it is released, perhaps across the middle; the rest stays held.
                    let part = if what == 3 { count } else { 1 + pick.index(count) };
                    let run = &mut naive.0[first as usize..][..part];
                    run.iter_mut().for_each(|holders| *holders -= 1);
                    let freed_slots = run.iter().filter(|holders| **holders == 0).count();
                    prop_assert_eq!(clusters.release(first, part), freed_slots);
                    if part < count {
                        runs.push((first + part as u64, count - part));
                    }
                }
                5 if !runs.is_empty() => {
                    let (first, count) = runs[pick.index(runs.len())];
                    if naive.0[first as usize] < 3 {
                        clusters.retain(first, count);
                        naive.0[first as usize..][..count].iter_mut().for_each(|holders| *holders += 1);
                        runs.push((first, count));
                    }
                }
                _ => {
                    let mut ranges = [const { 0..0 }; 3];
                    let count = clusters.begin_discard(&mut ranges);
                    for range in &ranges[..count] {
                        prop_assert!(naive.0[range.start as usize..range.end as usize].iter().all(|h| *h == 0));
                        clusters.discarded(range);
                    }
                }
            }
            prop_assert_eq!(clusters.check(), Ok(()));
            prop_assert_eq!(clusters.used(), naive.0.iter().filter(|h| **h > 0).count() as u64);
        }
    }
}

#[test]
fn s2_order_0_takes_every_free_slot_from_every_cluster() {
    let clusters = Clusters::new();
    clusters.grow(4);
    // Each CPU has reserved a cluster of its own for another order, and taken one run of it.
    (0..4u8).for_each(|n| {
        assert!(clusters.allocate(order(n * 2 + 1), n as usize, SearchScope::Own).is_some())
    });
    let bits: u64 = (0..4).map(|n| 1 << (n * 2 + 1)).sum();
    assert_eq!(
        clusters.allocate(order(0), 7, SearchScope::Own),
        None,
        "nothing of its own is left"
    );
    let mut count = 0;
    while clusters.allocate(order(0), 7, SearchScope::All).is_some() {
        count += 1;
    }
    assert_eq!(count + bits, 4 * CLUSTER_SLOTS as u64);
    clusters.check().unwrap();
}

#[test]
fn s4_emptied_cluster_is_discarded_once_with_its_neighbour() {
    let clusters = Clusters::new();
    clusters.grow(3);
    let runs: Vec<u64> =
        (0..3).map(|_| clusters.allocate(Order::MAX, 0, SearchScope::Own).unwrap()).collect();
    assert_eq!(
        clusters.release(0, 2 * CLUSTER_SLOTS),
        2 * CLUSTER_SLOTS,
        "two runs in one operation"
    );
    let mut ranges = [const { 0..0 }; 8];
    assert_eq!(clusters.begin_discard(&mut ranges), 1);
    assert_eq!(ranges[0], 0..2 * CLUSTER_SLOTS as u64);
    assert_eq!(clusters.begin_discard(&mut ranges), 0, "they are under way");
    assert_eq!(clusters.allocate(Order::MAX, 0, SearchScope::All), None);
    clusters.discarded(&(0..2 * CLUSTER_SLOTS as u64));
    assert!(clusters.allocate(Order::MAX, 0, SearchScope::Own).is_some());
    assert_eq!(runs.len(), 3);
    clusters.check().unwrap();
}

#[test]
fn s4_an_emptied_cluster_is_used_again_before_its_discard() {
    let clusters = Clusters::new();
    clusters.grow(1);
    let run = clusters.allocate(Order::MAX, 0, SearchScope::Own).unwrap();
    clusters.release(run, CLUSTER_SLOTS);
    assert_eq!(clusters.allocate(order(3), 0, SearchScope::Own), Some(0));
    assert_eq!(clusters.begin_discard(&mut [const { 0..0 }; 2]), 0);
    clusters.check().unwrap();
}

/// S-bench: mixed orders are taken and freed for 100 rounds at up to 60% of the slots. No run has
/// to be made smaller while there is room for it.
#[test]
fn s_ageing_has_no_fallback_while_there_is_space() {
    let clusters = Clusters::new();
    let count = 64;
    clusters.grow(count);
    let total = (count * CLUSTER_SLOTS) as u64;
    let mut random = Random::new(seed(4));
    let mut runs: Vec<(u64, Order)> = Vec::new();
    let mut naive = Naive(vec![0; total as usize]);
    let (mut requests, mut fallback) = (0, 0);
    for round in 0..100 {
        while clusters.used() < total * 6 / 10 {
            // The mix is like the folios of a program: many small ones, few large ones.
            let order = order(random.pick(&[0, 0, 0, 2, 2, 2, 4, 4, 4, 4, 5, 6, 7, 8, 9]));
            requests += 1;
            match clusters.allocate(order, random.below(4), SearchScope::All) {
                Some(first) => {
                    naive.take(first, order);
                    runs.push((first, order));
                }
                None => {
                    fallback += 1;
                    assert!(!naive.free_run(order), "round {round}: a free run was not found");
                    break;
                }
            }
        }
        for _ in 0..runs.len() * 6 / 10 {
            let (first, order) = runs.swap_remove(random.below(runs.len()));
            naive.0[first as usize..][..order.pages()].fill(0);
            assert_eq!(clusters.release(first, order.pages()), order.pages());
        }
        clusters.check().unwrap();
    }
    assert!(requests > 10_000, "{requests} runs were asked for");
    assert_eq!(fallback, 0, "of {requests}");
}

/// A parent and its child begin with equal clusters. Neither takes slots that were used at the copy
/// until they are no longer lent. Then only the parent takes them.
#[test]
fn lent_and_inherited_slots_are_never_given_out() {
    let mut random = Random::new(seed(1));
    for _ in 0..50 {
        let (parent, child) = (Clusters::new(), Clusters::new());
        let mut runs: Vec<(u64, Order)> = Vec::new();
        [&parent, &child].iter().for_each(|each| each.grow(4));
        for _ in 0..200 {
            let order = order(random.below(7) as u8);
            if random.below(3) > 0 {
                let firsts =
                    [&parent, &child].map(|each| each.allocate(order, 0, SearchScope::All));
                assert_eq!(firsts[0], firsts[1]);
                runs.extend(firsts[0].map(|first| (first, order)));
            } else if !runs.is_empty() {
                let (first, order) = runs.swap_remove(random.below(runs.len()));
                let counts = [&parent, &child].map(|each| each.release(first, order.pages()));
                assert_eq!(counts[0], counts[1]);
            }
        }
        let mut slots = [false; 4 * CLUSTER_SLOTS];
        runs.iter().for_each(|(first, order)| slots[*first as usize..][..order.pages()].fill(true));
        let mut sets = [SlotSet::default(), SlotSet::default()];
        parent.retain_used(&mut sets[0]);
        child.retain_used(&mut sets[1]);
        child.release_set(&sets[1]);
        // SAFETY: no other thread uses the clusters, as in a child.
        unsafe { child.inherit() };
        assert_eq!(child.allocate(Order::PAGE, 0, SearchScope::All), None);
        child.grow(1);
        for (first, order) in &runs {
            assert_eq!([&parent, &child].map(|each| each.release(*first, order.pages())), [0, 0]);
            assert_eq!(parent.check().and_then(|()| child.check()), Ok(()));
        }
        while let Some(slot) = parent.allocate(Order::PAGE, 0, SearchScope::All) {
            assert!(!slots[slot as usize], "slot {slot} is read by the child");
        }
        for slot in 0..CLUSTER_SLOTS {
            let first_of_child = child.allocate(Order::PAGE, 0, SearchScope::All);
            assert!(first_of_child >= Some(4 * CLUSTER_SLOTS as u64), "{slot}: {first_of_child:?}");
        }
        assert_eq!(child.allocate(Order::PAGE, 0, SearchScope::All), None);
        parent.release_set(&sets[0]);
        while let Some(slot) = parent.allocate(Order::PAGE, 0, SearchScope::All) {
            assert!(std::mem::take(&mut slots[slot as usize]));
        }
        assert_eq!(slots, [false; 4 * CLUSTER_SLOTS]);
        assert_eq!(parent.check().and_then(|()| child.check()), Ok(()));
    }
}
