//! One fault at a time: what each refusal of the kernel or the store leads to, and that nothing is
//! lost by it.
use memfold_engine::fault::{FaultOutcome, PageFault};
use memfold_engine::{Config, Delivery};
use memfold_os::units::{Order, PAGE_SIZE};
use memfold_stats::Stats;
use memfold_store::InjectedFault as StoreFault;
use memfold_testkit::fill::fill;
use memfold_testkit::program::Setup;
use memfold_testkit::random::Random;
use memfold_testkit::trouble::{Call, Trouble};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const PAGES: usize = 16;

/// An engine whose program has filled [`PAGES`] pages, all of them mapped, and what they hold.
struct Filled {
    setup: Setup,
    want: Vec<Vec<u8>>,
}

impl Filled {
    fn new(change: impl FnOnce(&mut Config)) -> Filled {
        let mut config = Config::new(1 << 30);
        change(&mut config);
        let mut world =
            Filled { setup: Setup::new(config, 4 * PAGES), want: vec![vec![0; PAGE_SIZE]; PAGES] };
        (0..PAGES).for_each(|n| world.write(n, n as u64));
        world
    }

    /// Real bytes: every block of them becomes an object that compresses.
    fn write(&mut self, number: usize, seed: u64) {
        let want = &mut self.want[number];
        let mut random = Random::new(seed);
        loop {
            fill(&mut random, want);
            want[..8].copy_from_slice(&seed.to_ne_bytes());
            if want[8..].chunks(8).any(|word| *word != want[8..16]) {
                break;
            }
        }
        self.setup.program.write(number, |page| page.copy_from_slice(want));
    }

    fn page_out(&self) -> u64 {
        self.setup.pager.mappings().page_out_at(self.setup.addrs(0..4 * PAGES))
    }

    fn mapped(&self) -> usize {
        self.setup.space.present_pages()
    }

    fn stats(&self) -> &Stats {
        self.setup.pager.stats()
    }

    /// Sound, and every page holds what it must, now and after another round trip through the
    /// store.
    fn assert_whole(&self) {
        for _ in 0..2 {
            self.setup.assert_sound();
            for (number, want) in self.want.iter().enumerate() {
                self.setup.program.read(number, |page| assert!(*page == **want, "page {number}"));
            }
            self.page_out();
        }
        assert_eq!(self.mapped(), 0, "in the end all of it can be folded");
    }
}

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Relaxed)
}

#[test]
fn eagain_while_mapping_out_ends_only_the_present_round() {
    let world = Filled::new(|_| ());
    world.setup.troubles.strike(Call::MoveOut, 2, Trouble::Again);
    assert!(world.page_out() < PAGES as u64);
    assert!(world.mapped() > 0);
    assert_eq!(get(&world.stats().move_again), 1);
    world.page_out();
    assert_eq!(world.mapped(), 0);
    world.assert_whole();
}

#[test]
fn eagain_while_mapping_in_is_served_again() {
    for trouble in [Trouble::Again, Trouble::NoMemory, Trouble::Gone] {
        let world = Filled::new(|_| ());
        world.page_out();
        world.setup.troubles.strike(Call::MoveIn, 1, trouble);
        world.assert_whole();
        assert_eq!(world.setup.troubles.struck(|t| *t == trouble), 1);
    }
}

#[test]
fn ebusy_while_mapping_out_leaves_that_folio_mapped() {
    let world = Filled::new(|_| ());
    world.setup.troubles.strike(Call::MoveOut, 1, Trouble::Busy);
    world.page_out();
    assert_eq!(get(&world.stats().move_busy), 1);
    assert!(world.mapped() > 0 && world.mapped() < PAGES, "{} pages are mapped", world.mapped());
    world.assert_whole();
}

/// A page that many processes share would take more compressed than this one has of it. But others
/// of its folio may have been written to since the fork.
#[test]
fn of_what_many_share_one_block_is_refused() {
    let block = Config::new(0).block_order.pages();
    const SHARED: u64 = 1 << 20;
    // Of three that share, one may not be known yet.
    for (own, processes, stays) in
        [(SHARED, 2, false), (SHARED / 2, 2, false), (SHARED / 3, 2, true), (SHARED / 2, 3, true)]
    {
        let world = Filled::new(|c| c.clean_percent = 100);
        world.page_out();
        // Shared by many, their copies stay beside what comes back.
        world.setup.pager.fork().note_shared(SHARED, own, processes);
        (0..PAGES)
            .for_each(|n| world.setup.program.read(n, |page| assert!(*page == *world.want[n])));
        assert_eq!(world.mapped(), PAGES);
        world.setup.troubles.strike(Call::MoveOut, 1, Trouble::Busy);
        world.page_out();
        world.setup.pager.gauges().publish();
        let refused_bytes = if stays { block * PAGE_SIZE } else { 0 };
        assert_eq!(get(&world.stats().refused_bytes) as usize, refused_bytes);
        world.setup.pager.fork().note_private();
        world.setup.pager.gauges().publish();
        assert_eq!(get(&world.stats().refused_bytes), 0, "it may be folded again");
        world.page_out();
        assert_eq!(world.mapped(), 0);
        world.assert_whole();
    }
}

#[test]
fn ebusy_while_mapping_in_is_answered_by_copying() {
    let world = Filled::new(|_| ());
    world.page_out();
    world.setup.troubles.strike(Call::MoveIn, 1, Trouble::Busy);
    world.setup.troubles.strike(Call::MoveIn, 2, Trouble::Busy);
    world.assert_whole();
    assert_eq!(get(&world.stats().copies), 1);
}

#[test]
fn eexist_keeps_the_page_that_is_there() {
    for moves in [true, false] {
        let world = Filled::new(|c| c.use_move = moves);
        world.page_out();
        world.setup.troubles.strike(
            if moves { Call::MoveIn } else { Call::CopyIn },
            1,
            Trouble::Exists,
        );
        world.assert_whole();
        assert!(get(&world.stats().move_exists) > 0);
    }
}

/// A page that is there while its folio counts as `Loading` could be dropped by the program, and
/// come back. So it must not take a second step to find out that it is there.
#[test]
fn eexist_for_a_single_page_ends_the_load() {
    let world = Filled::new(|c| (c.block_order, c.readahead) = (Order::PAGE, false));
    world.page_out();
    world.setup.troubles.strike(Call::CopyIn, 1, Trouble::Exists);
    world.setup.troubles.strike(Call::MoveIn, 1, Trouble::Gone);
    world.setup.program.read(0, |page| assert!(*page == *world.want[0]));
    assert_eq!(get(&world.stats().move_exists), 1);
    assert_eq!(
        world.setup.troubles.struck(|t| *t == Trouble::Gone),
        0,
        "the page was loaded a second time"
    );
    assert_eq!(world.mapped(), 1);
    world.assert_whole();
}

/// After EEXIST no other call about that page is made, which could say EAGAIN: the page would be
/// there and writable, while its folio counts as stored, and could be dropped as clean with others.
#[test]
fn eexist_for_the_first_page_of_a_folio_is_not_forgotten() {
    let world = Filled::new(|c| c.delivery = Delivery::Signal);
    world.page_out();
    world.setup.troubles.strike(Call::MoveIn, 1, Trouble::Exists);
    world.setup.troubles.strike(Call::MoveIn, 2, Trouble::Again);
    let addr = world.setup.program.page(0);
    world.setup.pager.faults().fault(PageFault { addr, write: true, ..PageFault::default() });
    assert_eq!(world.setup.troubles.struck(|t| *t == Trouble::Exists), 1, "it was a move");
    world.setup.pager.gauges().publish();
    let known = get(&world.stats().resident_bytes) as usize / PAGE_SIZE;
    assert!(known == world.mapped() && known > 0, "{known} of {}", world.mapped());
    world.setup.troubles.clear();
    world.assert_whole();
}

#[test]
fn pages_of_a_load_that_was_given_up_are_discarded() {
    let mut world = Filled::new(|c| c.fallback_percent = 100);
    world.page_out();
    // They take the frames that became free.
    (PAGES..3 * PAGES).for_each(|n| world.setup.program.write(n, |page| page[0] = 1));
    let others = world.mapped();
    world.setup.troubles.strike(Call::CopyIn, 1, Trouble::Partial(2));
    world.setup.troubles.strike(Call::CopyIn, 2, Trouble::Again);
    world.setup.troubles.strike(Call::Populate, 1, Trouble::Again);
    let fault = PageFault { addr: world.setup.program.page(0), ..PageFault::default() };
    assert_eq!(world.setup.pager.faults().fault(fault), FaultOutcome::Again);
    assert_eq!(world.mapped(), others + 2, "of a folio that is stored");
    // SAFETY: nobody uses the pages.
    unsafe { world.setup.pager.mappings().discard_at(world.setup.addrs(0..4)) };
    world.want[..4].iter_mut().for_each(|page| page.fill(0));
    world.assert_whole();
}

#[test]
fn a_move_that_does_a_part_splits_the_folio() {
    for part in 1..4 {
        let world = Filled::new(|_| ());
        world.setup.troubles.strike(Call::MoveOut, 1, Trouble::Partial(part));
        world.setup.troubles.strike(Call::MoveOut, 2, Trouble::Again);
        world.page_out();
        assert_eq!(world.setup.troubles.struck(|_| true), 2);
        assert!(get(&world.stats().splits) > 0);
        world.setup.assert_sound();
        world.page_out();
        world.setup.troubles.strike(Call::MoveIn, 1, Trouble::Partial(part));
        world.setup.troubles.strike(Call::MoveIn, 2, Trouble::Again);
        world.assert_whole();
    }
}

#[test]
fn pages_that_are_moved_and_not_counted_are_where_they_went() {
    let cases = (0..4).flat_map(|strikes| (1..=4 - strikes).map(move |more| (strikes, more)));
    for (strikes, more) in cases {
        let world = Filled::new(|_| ());
        world.setup.troubles.strike(Call::MoveOut, 1, Trouble::Short(strikes, more));
        world.page_out();
        world.setup.assert_sound();
        assert_eq!(get(&world.stats().move_uncounted), more as u64);
        world.setup.troubles.strike(Call::MoveIn, 1, Trouble::Short(strikes, more));
        world.assert_whole();
        world.setup.assert_sound();
        assert_eq!(world.setup.troubles.struck(|_| true), 2);
    }
}

/// An unmap makes a move stop early, and before the engine has looked, another thread has mapped
/// something there.
#[test]
fn moved_and_replaced_page_is_not_in_an_empty_frame() {
    let mut world = Filled::new(|_| ());
    world.setup.troubles.strike(Call::MoveOut, 1, Trouble::Replaced);
    world.page_out();
    assert_eq!(world.setup.troubles.struck(|_| true), 1);
    // The engine learns of the other mapping, as by the call that made it.
    // SAFETY: nobody uses the page.
    unsafe { world.setup.pager.mappings().discard_at(world.setup.addrs(0..1)) };
    world.want[0].fill(0);
    world.assert_whole();
    (0..PAGES).for_each(|n| world.write(n, 100 + n as u64));
    world.assert_whole();
}

/// As where a heap has grown: what was adopted with it later stays an area of its own to the
/// kernel.
#[test]
fn a_folio_across_two_of_the_kernels_areas_goes_in_parts() {
    for border in [1, 5, 8, 15] {
        let world = Filled::new(|_| ());
        world.page_out();
        world.setup.space.set_border(border);
        world.assert_whole();
        assert_eq!(get(&world.stats().move_busy) + get(&world.stats().copies), 0);
    }
}

#[test]
fn enoent_for_a_page_that_the_program_dropped_is_zeros() {
    let mut world = Filled::new(|_| ());
    for number in [0, 5, 15] {
        assert!(world.setup.space.punch(world.setup.program.page(number)));
        world.want[number].fill(0);
    }
    world.setup.program.read(5, |page| assert!(page.iter().all(|b| *b == 0)));
    world.page_out();
    assert_eq!(get(&world.stats().move_holes), 2);
    assert_eq!(world.mapped(), 0);
    world.assert_whole();
}

#[test]
fn no_memory_for_a_frame_is_tried_again() {
    let mut world = Filled::new(|_| ());
    for trouble in [Trouble::NoMemory, Trouble::Again, Trouble::Partial(1)] {
        world.page_out();
        // The free frames are given back, so that the next load needs fresh ones.
        let pages = world.setup.addrs(0..PAGES);
        // SAFETY: nobody uses the pages; they are written before they are read.
        unsafe { world.setup.pager.mappings().discard_at(pages) };
        world.setup.troubles.strike(Call::Populate, 1, trouble);
        (0..PAGES).for_each(|n| world.write(n, 100 + n as u64));
        world.setup.assert_sound();
    }
    world.assert_whole();
}

#[test]
fn discard_loads_a_block_that_the_store_refuses_by_page() {
    let mut world = Filled::new(|_| ());
    world.page_out();
    // New pages take all free frames, so that the block needs a fresh one, which can't be had at
    // once.
    (PAGES..4 * PAGES).for_each(|n| world.setup.program.write(n, |page| page[0] = n as u8));
    world.setup.pager.store().faults().strike_at(StoreFault::PoolFull, 1);
    (1..4).for_each(|nth| world.setup.troubles.strike(Call::Populate, nth, Trouble::Again));
    // SAFETY: nobody uses the page.
    unsafe { world.setup.pager.mappings().discard_at(world.setup.addrs(1..2)) };
    world.want[1].fill(0);
    assert_eq!(world.setup.troubles.struck(|_| true), 3);
    world.setup.pager.mappings().page_out_at(world.setup.addrs(0..4 * PAGES));
    world.assert_whole();
}

/// What the store refuses stays whole in memory; nothing of it stays in the store, its old copy
/// included.
fn refused(
    change: impl FnOnce(&mut Config),
    fault: StoreFault,
    counter: impl Fn(&Stats) -> &AtomicU64,
) {
    let mut world = Filled::new(change);
    world.page_out();
    world.assert_whole();
    // Mapped with clean copies, then changed: the next save replaces some blocks of a folio.
    (0..PAGES).for_each(|n| world.setup.program.read(n, |_| ()));
    (0..PAGES).step_by(3).for_each(|n| world.write(n, 1000 + n as u64));
    let before = get(&world.stats().zswpout);
    let faults = world.setup.pager.store().faults();
    faults.strike_every(fault, 1);
    world.page_out();
    assert!(faults.struck(fault) > 0);
    faults.clear();
    assert_eq!(world.mapped(), PAGES, "all folios were refused and stayed");
    assert_eq!(get(counter(world.stats())), faults.struck(fault), "each refusal is counted");
    assert_eq!(get(&world.stats().zswpout), before, "only successes are counted as stored");
    assert_eq!(world.setup.pager.store().stats().objects, 0, "no old copy is left at any offset");
    world.setup.assert_sound();
    world.assert_whole();
}

#[test]
fn z3_z4_z5_full_pool_keeps_the_folio_resident_and_stores_none() {
    refused(|_| (), StoreFault::PoolFull, |s| &s.save_refused);
}

#[test]
fn z3_z5_codec_failure_keeps_the_folio_resident() {
    refused(|_| (), StoreFault::Codec, |s| &s.save_refused);
}

#[test]
fn z7_a_verify_mismatch_is_counted_and_the_folio_is_kept() {
    refused(|c| c.verify = true, StoreFault::Compressed, |s| &s.verify_mismatch);
}

#[test]
fn copying_survives_pages_that_stay() {
    for trouble in [Trouble::Refused, Trouble::Partial(1)] {
        let world = Filled::new(|c| c.use_move = false);
        world.setup.troubles.strike(Call::CopyOut, 1, trouble);
        world.page_out();
        assert_eq!(world.setup.troubles.struck(|_| true), 1);
        assert!(world.mapped() > 0);
        world.assert_whole();
    }
}

#[test]
#[should_panic(expected = "Stored data is damaged")]
fn damaged_data_stops_the_program_before_a_wrong_byte_is_read() {
    let world = Filled::new(|_| ());
    world.setup.pager.store().faults().strike_at(StoreFault::Stored, 1);
    world.page_out();
    (0..PAGES).for_each(|n| world.setup.program.read(n, |_| ()));
}
