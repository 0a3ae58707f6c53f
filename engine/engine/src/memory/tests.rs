//! Tests of frames below folios.
use crate::memory::frames::{FrameKind, Frames};
use memfold_os::Errno;
use memfold_os::thread::{each_cpu, pin};
use memfold_os::uffd::space::Space;
use memfold_os::units::{MAX_BYTES, MAX_PAGES, Order};
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
        match frames.take(order, FrameKind::Empty) {
            Some(frame) => small.push((frame, order)),
            None if order == Order::PAGE => break,
            None => {}
        }
    }
    let taken: usize = small.iter().map(|(_, order)| order.pages()).sum();
    assert_eq!(taken, (runs - reserve) * MAX_PAGES, "the rest is used to the last page");
    let large: Vec<_> = std::iter::from_fn(|| frames.take(Order::MAX, FrameKind::Empty)).collect();
    assert_eq!(large.len(), reserve, "the largest folios find all of the reserve");
    assert!(small.iter().all(|(frame, _)| {
        !large.iter().any(|run| frame / MAX_PAGES as u32 == run / MAX_PAGES as u32)
    }));
    frames.check(&FakeSpace::new(1)).unwrap();
    // Freed runs fill the reserve first.
    large.into_iter().for_each(|run| frames.give(run, Order::MAX, FrameKind::Empty));
    assert_eq!(frames.take(Order::PAGE, FrameKind::Empty), None);
    small.into_iter().for_each(|(frame, order)| frames.give(frame, order, FrameKind::Empty));
    assert!(frames.take(Order::PAGE, FrameKind::Empty).is_some());
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
    let first = frames.take(Order::PAGE, FrameKind::Empty).unwrap();
    frames.give(first, Order::PAGE, FrameKind::Empty);
    let pages = faults() - before;
    assert!(pages < 100, "{pages} pages for 64 GiB of address space");
    frames.check(&FakeSpace::new(1)).unwrap();
}

/// A limit of 8 TiB asks for twice that.
#[test]
fn frames_are_as_many_as_can_be_named_where_more_are_asked_for() {
    for bytes in [16usize << 40, 20 << 40] {
        let frames = Frames::new(bytes, 4).unwrap();
        assert_eq!(frames.zone().len(), (16 << 40) - MAX_BYTES);
        let first = frames.take(Order::PAGE, FrameKind::Empty).unwrap();
        frames.give(first, Order::PAGE, FrameKind::Empty);
    }
}

#[test]
fn free_pages_that_a_fork_shares_are_put_together_all_the_same() {
    let pair = Order::new(1).unwrap();
    // Two full pages that are no neighbours: a frame of two must be made of them.
    let scattered = |space: &Troubled| {
        let frames = Frames::new(2 * MAX_BYTES, 0).unwrap();
        let run = frames.take(Order::new(2).unwrap(), FrameKind::Empty).unwrap();
        frames.populate(space, run, Order::PAGE).unwrap();
        frames.populate(space, run + 2, Order::PAGE).unwrap();
        frames.give_mixed(run, Order::new(2).unwrap(), |page| page % 2 == 0);
        frames
    };
    let cases = [
        (vec![], Ok(true)),
        // A fork shares the page: it is made private, and moved then.
        (vec![(1, Trouble::Busy)], Ok(true)),
        (vec![(2, Trouble::Busy)], Ok(true)),
        // A device has pinned the page.
        (vec![(1, Trouble::Busy), (2, Trouble::Busy)], Err(Errno::BUSY)),
        // An event must be read first: the caller must know.
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

#[test]
fn free_pages_that_are_moved_and_not_counted_are_put_together() {
    let (pair, four) = (Order::new(1).unwrap(), Order::new(2).unwrap());
    // Two full pairs that are no neighbours: a frame of four must be made of them.
    for (nth, said, more) in [(1, 0, 1), (1, 0, 2), (1, 1, 1), (2, 0, 2), (2, 1, 1)] {
        let space = Troubled::new(&FakeSpace::new(1));
        let frames = Frames::new(2 * MAX_BYTES, 0).unwrap();
        let run = frames.take(Order::new(3).unwrap(), FrameKind::Empty).unwrap();
        for first in [run, run + 4] {
            frames.populate(&space, first, pair).unwrap();
        }
        frames.give_mixed(run, Order::new(3).unwrap(), |page| page % 4 < 2);
        space.strike(Call::MoveFrames, nth, Trouble::Short(said, more));
        let made = frames.gather(&space, four).unwrap_or(None);
        assert_eq!(space.struck(|_| true), 1);
        if let Some(frame) = made {
            assert!((0..4).all(|page| space.is_populated(frames.addr(frame + page))));
            frames.give(frame, four, FrameKind::Full);
        }
        assert_eq!((frames.populated(), frames.full_free()), (4, 4), "{nth}: {said}, {more}");
        frames.check(&space).unwrap();
    }
}

/// Makes single full pages.
fn filled(space: &Troubled, pages: usize) -> (Frames, Vec<u32>) {
    let frames = Frames::new(8 * MAX_BYTES, 1).unwrap();
    let singles: Vec<u32> =
        (0..pages).map(|_| frames.take(Order::PAGE, FrameKind::Empty).unwrap()).collect();
    singles.iter().for_each(|&page| frames.populate(space, page, Order::PAGE).unwrap());
    (frames, singles)
}

/// Runs a test in a thread that stays on one CPU.
fn on_one_cpu(test: impl FnOnce() + Send + 'static) {
    let pinned = || {
        let mut cpus = Vec::new();
        each_cpu(|cpu| cpus.push(cpu));
        pin(cpus[0]);
        test();
    };
    std::thread::spawn(pinned).join().unwrap();
}

#[test]
fn single_pages_lie_side_by_side_and_go_back_in_one_call() {
    on_one_cpu(|| {
        let space = Troubled::new(&FakeSpace::new(1));
        let (frames, mut singles) = filled(&space, 64);
        assert!(singles.windows(2).all(|pair| pair[0] + 1 == pair[1]), "{singles:?}");
        // They become free in some order, so that runs of several sizes lie in the lists.
        singles.swap(3, 60);
        singles[1..].iter().for_each(|&page| frames.give(page, Order::PAGE, FrameKind::Full));
        space.strike(Call::DiscardFrame, 2, Trouble::Refused);
        assert_eq!(frames.trim_now(&space, 63), 63);
        assert_eq!(space.struck(|_| true), 0, "there was a second call");
        assert_eq!((frames.populated(), frames.full_free()), (1, 0));
        frames.check(&space).unwrap();
    });
}

#[test]
fn what_the_kernel_does_not_take_back_stays_full() {
    on_one_cpu(|| {
        for (nth, gone) in [(1, 0), (2, 3), (3, 7)] {
            let space = Troubled::new(&FakeSpace::new(1));
            let (frames, singles) = filled(&space, 12);
            // Three ranges: pages 0 to 2, 4 to 7 and 9 to 11.
            let free = singles.iter().filter(|page| !matches!(*page - singles[0], 3 | 8));
            free.for_each(|&page| frames.give(page, Order::PAGE, FrameKind::Full));
            space.strike(Call::DiscardFrame, nth, Trouble::Refused);
            assert_eq!(frames.trim_now(&space, 64), gone, "at range {nth}");
            assert_eq!((frames.populated(), frames.full_free()), (12 - gone, 10 - gone));
            frames.check(&space).unwrap();
            assert_eq!(frames.trim(&space, 64), 10 - gone, "the next time it does");
            frames.check(&space).unwrap();
        }
    });
}
