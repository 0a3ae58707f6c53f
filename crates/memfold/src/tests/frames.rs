//! Tests of frames below folios.
use crate::frames::{Frames, Kind};
use memfold_sys::Errno;
use memfold_sys::units::{MAX_BYTES, MAX_PAGES, Order};
use memfold_testkit::fake::FakeSpace;
use memfold_testkit::trouble::{Call, Trouble, Troubled};

#[test]
fn m8_a_reserve_of_large_frames_is_left_to_large_folios() {
    let (runs, reserve) = (7, 4);
    let frames = Frames::new(runs * MAX_BYTES, reserve as u32).unwrap();
    let mut small = Vec::new();
    // Single pages, and folios of every size below the largest, get all but the reserve.
    let orders = (0..9).rev().cycle().map(|order| Order::new(order).unwrap());
    for order in orders {
        match frames.take(order, Kind::Empty) {
            Some(frame) => small.push((frame, order)),
            None if order == Order::PAGE => break,
            None => {}
        }
    }
    let taken: usize = small.iter().map(|(_, order)| order.pages()).sum();
    assert_eq!(taken, (runs - reserve) * MAX_PAGES, "the rest is used to the last page");
    let large: Vec<_> = std::iter::from_fn(|| frames.take(Order::MAX, Kind::Empty)).collect();
    assert_eq!(large.len(), reserve, "the largest folios find all of the reserve");
    assert!(small.iter().all(|(frame, _)| !large.iter().any(|run| frame / MAX_PAGES as u32 == run / MAX_PAGES as u32)));
    frames.check(&FakeSpace::new(1)).unwrap();
    // What comes back fills the reserve first.
    large.into_iter().for_each(|run| frames.give(run, Order::MAX, Kind::Empty));
    assert_eq!(frames.take(Order::PAGE, Kind::Empty), None);
    small.into_iter().for_each(|(frame, order)| frames.give(frame, order, Kind::Empty));
    assert!(frames.take(Order::PAGE, Kind::Empty).is_some());
    frames.check(&FakeSpace::new(1)).unwrap();
}

#[test]
fn frames_that_nobody_has_taken_cost_no_memory() {
    // The eighth field after the name in brackets: faults that needed no disk (proc_pid_stat(5)).
    let faults = || {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        let (_, fields) = stat.rsplit_once(") ").unwrap();
        fields.split(' ').nth(7).unwrap().parse::<u64>().unwrap()
    };
    let before = faults();
    let frames = Frames::new(64 << 30, 4).unwrap();
    let first = frames.take(Order::PAGE, Kind::Empty).unwrap();
    frames.give(first, Order::PAGE, Kind::Empty);
    let pages = faults() - before;
    assert!(pages < 100, "{pages} pages for 64 GiB of address space");
    frames.check(&FakeSpace::new(1)).unwrap();
}

#[test]
fn free_pages_that_a_fork_shares_are_put_together_all_the_same() {
    let pair = Order::new(1).unwrap();
    // Two full pages that are no neighbours: a frame of two must be made of them.
    let scattered = |space: &Troubled| {
        let frames = Frames::new(2 * MAX_BYTES, 0).unwrap();
        let run = frames.take(Order::new(2).unwrap(), Kind::Empty).unwrap();
        frames.populate(space, run, Order::PAGE).unwrap();
        frames.populate(space, run + 2, Order::PAGE).unwrap();
        frames.give_mixed(run, Order::new(2).unwrap(), |page| page % 2 == 0);
        frames
    };
    let cases = [
        (vec![], Ok(true)),
        // Shared: they are made private, and go then.
        (vec![(1, Trouble::Busy)], Ok(true)),
        (vec![(2, Trouble::Busy)], Ok(true)),
        // Pinned.
        (vec![(1, Trouble::Busy), (2, Trouble::Busy)], Err(Errno::BUSY)),
        // An event waits to be read: the caller must know.
        (vec![(2, Trouble::Again)], Err(Errno::AGAIN)),
    ];
    for (troubles, expected) in cases {
        let space = Troubled::new(&FakeSpace::new(1));
        let frames = scattered(&space);
        troubles.iter().for_each(|&(nth, trouble)| space.strike(Call::MoveFrames, nth, trouble));
        let made = frames.gather(&space, pair);
        assert_eq!(made.map(|frame| frame.is_some()), expected, "{troubles:?}");
        let full = if expected.is_ok() { 0 } else { 2 };
        assert_eq!((frames.populated(), frames.full_free()), (2, full), "{troubles:?}");
        frames.check(&space).unwrap();
    }
}
