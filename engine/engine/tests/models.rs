//! The engine's own code under a model checker that chooses every switch between threads: the swap
//! cache as the one place where threads meet. Rows C1, C2, C3, C5.
//!
//! `scripts/check models` runs the models. The kernel is the fake of memfold-testkit. The checker
//! reports a thread that waits for ever as a deadlock. It runs each model under random schedules, and
//! under those of PCT, which have few switches. `MEMFOLD_MODEL_RUNS` multiplies the number of runs.

use memfold_engine::{Config, Delivery};
use memfold_os::units::{Order, PAGE_SIZE};
use memfold_testkit::program::Setup;
use memfold_testkit::random::Random;
use memfold_testkit::trouble::{Call, Trouble};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::thread;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Runs of each model, scheduler and delivery. `make torture` multiplies them by 25.
const RUNS: usize = 80;

/// Explores `model` under both schedulers, in both deliveries.
fn explore(model: fn(Delivery)) {
    let times = std::env::var("MEMFOLD_MODEL_RUNS").ok().and_then(|t| t.parse().ok()).unwrap_or(1);
    for delivery in [Delivery::Thread, Delivery::Signal] {
        let mut config = shuttle::Config::new();
        config.stack_size = 2 << 20;
        config.max_steps = shuttle::MaxSteps::FailAfter(200_000);
        shuttle::Runner::new(RandomScheduler::new(RUNS * times), config.clone())
            .run(move || model(delivery));
        shuttle::Runner::new(PctScheduler::new(3, RUNS * times), config)
            .run(move || model(delivery));
    }
}

/// An engine over 64 pages with 16 KiB blocks and folios up to 64 KiB.
fn setup(delivery: Delivery) -> Arc<Setup> {
    setup_of(delivery, 64)
}

fn setup_of(delivery: Delivery, pages: usize) -> Arc<Setup> {
    setup_with(delivery, pages, 4)
}

fn setup_with(delivery: Delivery, pages: usize, folio_order: u8) -> Arc<Setup> {
    let mut config = Config::new(1 << 30);
    config.delivery = delivery;
    config.folio_order = Order::new(folio_order).unwrap();
    config.readahead = true;
    config.workers = 1;
    config.pools = 1;
    Arc::new(Setup::new(config, pages))
}

/// Bytes that don't repeat in a page, so that every block becomes an object.
fn content(number: usize, version: u8) -> Vec<u8> {
    let mut random = Random::new((number as u64) << 8 | version as u64);
    (0..PAGE_SIZE).map(|i| if i % 4 == 0 { random.word() as u8 } else { version }).collect()
}

fn write(setup: &Setup, number: usize, version: u8) {
    setup.program.write(number, |page| page.copy_from_slice(&content(number, version)));
}

fn assert_holds(setup: &Setup, number: usize, version: u8) {
    setup.program.read(number, |page| {
        assert!(*page == *content(number, version), "page {number} isn't version {version}")
    });
}

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Relaxed)
}

/// Fills pages `0..count` and folds them.
fn folded(setup: &Setup, count: usize) {
    (0..count).for_each(|n| write(setup, n, 1));
    setup.pager.mappings().page_out_at(setup.addrs(0..64));
    assert_eq!(setup.space.present_pages(), 0, "all is folded");
}

fn join(threads: Vec<thread::JoinHandle<()>>) {
    threads.into_iter().for_each(|t| t.join().unwrap());
}

#[test]
fn c1_a_fault_and_an_eviction_keep_every_byte() {
    explore(|delivery| {
        let setup = setup(delivery);
        (0..4).for_each(|n| write(&setup, n, 1));
        let (evictor, writer, reader) = (setup.clone(), setup.clone(), setup.clone());
        join(vec![
            thread::spawn(move || _ = evictor.pager.mappings().page_out_at(evictor.addrs(0..4))),
            thread::spawn(move || {
                write(&writer, 1, 2);
                assert_holds(&writer, 1, 2);
            }),
            thread::spawn(move || assert_holds(&reader, 2, 1)),
        ]);
        setup.assert_sound();
        [(0, 1), (1, 2), (2, 1), (3, 1)].into_iter().for_each(|(n, v)| assert_holds(&setup, n, v));
    });
}

#[test]
fn c2_two_faults_load_a_block_once() {
    explore(|delivery| {
        let setup = setup(delivery);
        folded(&setup, 4);
        let before = get(&setup.pager.stats().blocks_loaded);
        let threads = (0..3).map(|n| {
            let setup = setup.clone();
            thread::spawn(move || assert_holds(&setup, n, 1))
        });
        join(threads.collect());
        let stats = setup.pager.stats();
        let (loads, pages) = (get(&stats.blocks_loaded) - before, get(&stats.zswpin));
        match delivery {
            Delivery::Thread => assert_eq!((loads, pages), (1, 4), "one loads, the others wait"),
            // Page by page.
            _ => {
                assert!(loads <= 3 && (3..=4).contains(&pages), "{pages} pages in {loads} loads")
            }
        }
        setup.assert_sound();
    });
}

#[test]
fn c2_two_first_touches_make_one_folio() {
    explore(|delivery| {
        let setup = setup(delivery);
        let threads = (0..3).map(|n| {
            let setup = setup.clone();
            thread::spawn(move || write(&setup, n, 1))
        });
        join(threads.collect());
        (0..3).for_each(|n| assert_holds(&setup, n, 1));
        setup.assert_sound();
    });
}

#[test]
fn c1_a_rescue_during_compression_keeps_the_folio() {
    explore(|delivery| {
        let setup = setup(delivery);
        // Two blocks, so that a save can be called off between them.
        (0..16).for_each(|n| write(&setup, n, 1));
        let (saver, toucher) = (setup.clone(), setup.clone());
        join(vec![
            thread::spawn(move || _ = saver.pager.mappings().page_out_at(saver.addrs(0..16))),
            thread::spawn(move || {
                write(&toucher, 5, 2);
                write(&toucher, 9, 2);
            }),
        ]);
        setup.assert_sound();
        (0..16).for_each(|n| assert_holds(&setup, n, if n == 5 || n == 9 { 2 } else { 1 }));
    });
}

/// The areas are not locked while a background thread compresses: another may be added, and pages
/// discarded.
#[test]
fn c1_saving_touches_and_area_changes_keep_every_folio() {
    static SAVED: AtomicU64 = AtomicU64::new(0);
    static WAITED: AtomicU64 = AtomicU64::new(0);
    let model = |delivery| {
        // The least that `limits` leaves resident whatever the bounds are.
        const FLOOR_PAGES: usize = (512 << 10) / PAGE_SIZE;
        let setup = setup_of(delivery, FLOOR_PAGES + 64);
        (0..16).for_each(|n| write(&setup, n, 1));
        (16..FLOOR_PAGES + 16).for_each(|n| setup.program.write(n, |page| page[0] = 1));
        // Less room than there are pages.
        setup.pager.gauges().set_bounds(u64::MAX, 1, 1);
        let (saver, toucher, owner) = (setup.clone(), setup.clone(), setup.clone());
        join(vec![
            thread::spawn(move || {
                (0..3).for_each(|_| _ = saver.pager.background().reclaim_in_background())
            }),
            thread::spawn(move || {
                write(&toucher, 5, 2);
                assert_holds(&toucher, 9, 1);
            }),
            thread::spawn(move || {
                let far = owner.addrs(0..1).end + (1 << 30);
                owner.pager.mappings().manage_empty(far, far + 16 * PAGE_SIZE);
                // SAFETY: only this thread uses the pages.
                unsafe { owner.pager.mappings().discard_at(owner.addrs(12..16)) };
            }),
        ]);
        SAVED.fetch_add(get(&setup.pager.stats().blocks_saved), Relaxed);
        WAITED.fetch_add(get(&setup.pager.stats().faults_waited), Relaxed);
        setup.assert_sound();
        (0..12).for_each(|n| assert_holds(&setup, n, if n == 5 { 2 } else { 1 }));
        (12..16).for_each(|n| setup.program.read(n, |page| assert!(page.iter().all(|b| *b == 0))));
    };
    // Schedules are drawn anew each time, and in few of them the touch meets the saving: nearly
    // always within ten times.
    let meets = || get(&SAVED) > 0 && get(&WAITED) > 0;
    assert!((0..200).any(|_| (explore(model), meets()).1), "schedules in which nothing meets");
}

#[test]
fn c1_a_refused_save_and_a_touch_keep_the_folio() {
    explore(|delivery| {
        let setup = setup(delivery);
        (0..8).for_each(|n| write(&setup, n, 1));
        setup.pager.store().faults().strike_at(memfold_store::InjectedFault::PoolFull, 2);
        let (saver, toucher) = (setup.clone(), setup.clone());
        join(vec![
            thread::spawn(move || _ = saver.pager.mappings().page_out_at(saver.addrs(0..8))),
            thread::spawn(move || write(&toucher, 5, 2)),
        ]);
        setup.assert_sound();
        (0..8).for_each(|n| assert_holds(&setup, n, if n == 5 { 2 } else { 1 }));
    });
}

#[test]
fn c3_a_discard_and_a_fault_of_its_neighbour_agree() {
    explore(|delivery| {
        let setup = setup(delivery);
        folded(&setup, 8);
        let (owner, neighbour) = (setup.clone(), setup.clone());
        join(vec![
            thread::spawn(move || {
                // SAFETY: only this thread uses the pages.
                unsafe { owner.pager.mappings().discard_at(owner.addrs(2..6)) };
                owner.program.read(3, |page| assert!(page.iter().all(|b| *b == 0)));
                write(&owner, 2, 2);
            }),
            thread::spawn(move || {
                assert_holds(&neighbour, 1, 1);
                write(&neighbour, 6, 3);
            }),
        ]);
        setup.assert_sound();
        [(0, 1), (1, 1), (2, 2), (6, 3), (7, 1)]
            .into_iter()
            .for_each(|(n, v)| assert_holds(&setup, n, v));
        (3..6).for_each(|n| setup.program.read(n, |page| assert!(page.iter().all(|b| *b == 0))));
    });
}

#[test]
fn c6_reading_ahead_and_faults_share_one_load() {
    explore(|delivery| {
        let setup = setup(delivery);
        folded(&setup, 48);
        let counts = |setup: &Setup| {
            let stats = setup.pager.stats();
            (get(&stats.blocks_loaded), get(&stats.zswpin))
        };
        let before = counts(&setup);
        let (stream, late, background) = (setup.clone(), setup.clone(), setup.clone());
        join(vec![
            thread::spawn(move || while background.pager.work() {}),
            thread::spawn(move || {
                (0..48).for_each(|n| assert_holds(&stream, n, 1));
                stream.pager.stop();
            }),
            thread::spawn(move || (30..34).for_each(|n| assert_holds(&late, n, 1))),
        ]);
        let after = counts(&setup);
        assert_eq!(after.1 - before.1, 48, "each page is loaded once");
        // In signal delivery the late reader may have found pages of a block by themselves.
        let most = if delivery == Delivery::Thread { 12 } else { 16 };
        assert!((12..=most).contains(&(after.0 - before.0)), "{} blocks", after.0 - before.0);
        setup.assert_sound();
    });
}

#[test]
fn c2_whoever_waits_is_woken_when_the_kernel_stops_half_way() {
    explore(|delivery| {
        let setup = setup(delivery);
        folded(&setup, 16);
        setup.troubles.strike(Call::MoveIn, 1, Trouble::Partial(1));
        setup.troubles.strike(Call::MoveIn, 2, Trouble::Again);
        setup.troubles.strike(Call::MoveOut, 1, Trouble::Partial(2));
        let (a, b, evictor) = (setup.clone(), setup.clone(), setup.clone());
        join(vec![
            thread::spawn(move || assert_holds(&a, 0, 1)),
            thread::spawn(move || write(&b, 3, 2)),
            thread::spawn(move || _ = evictor.pager.mappings().page_out_at(evictor.addrs(0..4))),
        ]);
        setup.assert_sound();
        (0..16).for_each(|n| assert_holds(&setup, n, if n == 3 { 2 } else { 1 }));
    });
}

#[test]
fn c1_two_evictors_and_a_writer_keep_every_byte() {
    explore(|delivery| {
        let setup = setup(delivery);
        (0..8).for_each(|n| write(&setup, n, 1));
        let threads = (0..2).map(|_| {
            let setup = setup.clone();
            thread::spawn(move || _ = setup.pager.mappings().page_out_at(setup.addrs(0..8)))
        });
        let mut threads: Vec<_> = threads.collect();
        let writer = setup.clone();
        threads.push(thread::spawn(move || {
            (2..5).for_each(|n| write(&writer, n, 2));
            writer.pager.mappings().need_at(writer.addrs(0..8));
            (2..5).for_each(|n| assert_holds(&writer, n, 2));
        }));
        join(threads);
        setup.assert_sound();
        (0..8).for_each(|n| assert_holds(&setup, n, if (2..5).contains(&n) { 2 } else { 1 }));
    });
}

#[test]
fn c1_a_slow_evictor_never_takes_another_folio_for_its_own() {
    explore(|delivery| {
        let setup = setup(delivery);
        folded(&setup, 20);
        assert_holds(&setup, 0, 1);
        let (slow, busy) = (setup.clone(), setup.clone());
        join(vec![
            thread::spawn(move || _ = slow.pager.mappings().page_out_at(slow.addrs(0..4))),
            thread::spawn(move || {
                write(&busy, 0, 2);
                busy.pager.mappings().page_out_at(busy.addrs(0..16));
                // A stream that runs down merges folios; first touches take the records that became
                // free.
                assert_holds(&busy, 16, 1);
                assert_holds(&busy, 15, 1);
                (5..16).for_each(|n| write(&busy, n * 4, 3));
            }),
        ]);
        setup.assert_sound();
        assert_holds(&setup, 0, 2);
        (1..20).for_each(|n| assert_holds(&setup, n, 1));
        (5..16).for_each(|n| assert_holds(&setup, n * 4, 3));
    });
}

/// Clean folios leave together while one of them is written to, one is read, one is pinned and one
/// discarded: no write is lost, and what is pinned may be written to by the kernel.
fn clean_folios_leave(delivery: Delivery, troubles: &[Trouble]) -> (u64, u64) {
    let setup = setup_with(delivery, 64, 2);
    folded(&setup, 48);
    // Far enough from each other, and from what was written last, to be no stream.
    [0, 8, 16, 24].into_iter().for_each(|n| assert_holds(&setup, n, 1));
    for (n, trouble) in troubles.iter().enumerate() {
        setup.troubles.strike(Call::DropHome, n as u64 + 1, *trouble);
    }
    let before = get(&setup.pager.stats().faults_waited);
    let (evictor, writer, reader) = (setup.clone(), setup.clone(), setup.clone());
    let (owner, discarder) = (setup.clone(), setup.clone());
    join(vec![
        thread::spawn(move || _ = evictor.pager.mappings().page_out_at(evictor.addrs(0..32))),
        thread::spawn(move || {
            write(&writer, 1, 2);
            assert_holds(&writer, 0, 1);
        }),
        thread::spawn(move || assert_holds(&reader, 9, 1)),
        thread::spawn(move || {
            let page = owner.addrs(17..18);
            owner.pager.mappings().pin_at(page.clone());
            assert_holds(&owner, 17, 1);
            let kernel = owner.space.write(page.start, |b| b.copy_from_slice(&content(17, 2)));
            kernel.expect("a pinned page is there and writable");
            owner.pager.mappings().unpin_at(page);
        }),
        thread::spawn(move || {
            // SAFETY: only this thread uses the pages.
            unsafe { discarder.pager.mappings().discard_at(discarder.addrs(24..26)) };
            discarder.program.read(24, |page| assert!(page.iter().all(|b| *b == 0)));
        }),
    ]);
    setup.assert_sound();
    (0..24).for_each(|n| assert_holds(&setup, n, if n == 1 || n == 17 { 2 } else { 1 }));
    setup.program.read(25, |page| assert!(page.iter().all(|b| *b == 0)));
    (26..32).for_each(|n| assert_holds(&setup, n, 1));
    setup.assert_sound();
    (get(&setup.pager.stats().drops), get(&setup.pager.stats().faults_waited) - before)
}

#[test]
fn c1_clean_folios_that_leave_lose_no_write() {
    static DROPS: AtomicU64 = AtomicU64::new(0);
    static WAITED: AtomicU64 = AtomicU64::new(0);
    explore(|delivery| {
        let (drops, waits) = clean_folios_leave(delivery, &[]);
        assert!(delivery == Delivery::Signal || drops == 0);
        DROPS.fetch_add(drops, Relaxed);
        if delivery == Delivery::Signal {
            WAITED.fetch_add(waits, Relaxed);
        }
    });
    assert!(get(&DROPS) > 0 && get(&WAITED) > 0, "schedules in which nothing meets");
}

#[test]
fn c1_clean_folios_that_leave_in_parts_lose_no_write() {
    explore(|delivery| {
        clean_folios_leave(delivery, &[Trouble::Partial(1), Trouble::Again, Trouble::Torn]);
    });
    explore(|delivery| {
        clean_folios_leave(delivery, &[Trouble::Refused, Trouble::Partial(1), Trouble::Refused]);
    });
}

/// Pages of one block are read and written, each by itself, while the block leaves and one of its
/// pages is discarded: what is here of it, and what is in the store alone, are never taken for each
/// other.
#[test]
fn c1_pages_of_a_block_that_is_here_in_part_keep_every_byte() {
    static PARTS: AtomicU64 = AtomicU64::new(0);
    explore(|delivery| {
        let setup = setup_with(delivery, 64, 2);
        folded(&setup, 48);
        assert_holds(&setup, 9, 1);
        let threads: [fn(&Setup); 4] = [
            |setup| (0..2).for_each(|_| _ = setup.pager.mappings().page_out_at(setup.addrs(8..12))),
            |setup| {
                write(setup, 8, 2);
                assert_holds(setup, 8, 2);
                assert_holds(setup, 9, 1);
            },
            |setup| {
                assert_holds(setup, 10, 1);
                write(setup, 10, 3);
            },
            |setup| {
                // SAFETY: only this thread uses the page.
                unsafe { setup.pager.mappings().discard_at(setup.addrs(11..12)) };
                setup.program.read(11, |page| assert!(page.iter().all(|b| *b == 0)));
            },
        ];
        let start = |work: fn(&Setup)| {
            let setup = setup.clone();
            thread::spawn(move || work(&setup))
        };
        join(threads.map(start).into());
        setup.assert_sound();
        let versions = [(8, 2), (9, 1), (10, 3)];
        versions.into_iter().for_each(|(n, version)| assert_holds(&setup, n, version));
        setup.program.read(11, |page| assert!(page.iter().all(|b| *b == 0)));
        setup.pager.mappings().page_out_at(setup.addrs(0..64));
        versions.into_iter().for_each(|(n, version)| assert_holds(&setup, n, version));
        setup.assert_sound();
        PARTS.fetch_add(get(&setup.pager.stats().page_loads), Relaxed);
    });
    assert!(get(&PARTS) > 0, "nothing was loaded in part");
}

/// Two threads whose loads make room for each other's, by dropping clean pages.
#[test]
fn c1_loads_that_drop_each_others_pages_lose_nothing() {
    explore(|delivery| {
        let setup = setup_with(delivery, 64, 2);
        folded(&setup, 48);
        let threads = [0, 8].map(|first| {
            let setup = setup.clone();
            thread::spawn(move || {
                (0..3).for_each(|n| {
                    assert_holds(&setup, first + n * 16, 1);
                    setup.pager.mappings().page_out_at(setup.addrs(0..64));
                });
                write(&setup, first + 1, 2);
            })
        });
        join(Vec::from(threads));
        setup.assert_sound();
        (0..48).for_each(|n| assert_holds(&setup, n, if n == 1 || n == 9 { 2 } else { 1 }));
    });
}

/// What goes to the file as it is, in folios of 64 KiB at most.
fn with_file(delivery: Delivery) -> Config {
    let mut config = Config::new(1 << 30);
    config.delivery = delivery;
    config.folio_order = Order::new(4).unwrap();
    (config.workers, config.pools) = (1, 1);
    config.codec = "none".into();
    config.swap_bytes = 2 << 20;
    config.swap_keep_free_bytes = 0;
    config.swap_encrypt = false;
    config
}

/// A raw write under way, a touch, and the writer: the folio is in one place, and no slot is lost.
#[test]
fn c1_writeback_and_touches_keep_every_byte_and_slot() {
    use memfold_testkit::disk::{DiskTrouble, MemoryDisk};
    explore(|delivery| {
        let disk = MemoryDisk::default();
        let setup = Arc::new(Setup::with_disk(with_file(delivery), 64, Some(&disk)));
        (0..8).for_each(|n| write(&setup, n, 1));
        disk.strike(memfold_os::transfer::Direction::Write, 2, DiskTrouble::Failed);
        let threads = [0..4, 4..8].map(|pages| {
            let setup = setup.clone();
            thread::spawn(move || _ = setup.pager.mappings().page_out_at(setup.addrs(pages)))
        });
        let mut threads = Vec::from(threads);
        let (writer, reader) = (setup.clone(), setup.clone());
        threads.push(thread::spawn(move || {
            write(&writer, 1, 2);
            assert_holds(&writer, 1, 2);
        }));
        threads.push(thread::spawn(move || (4..8).for_each(|n| assert_holds(&reader, n, 1))));
        join(threads);
        setup.assert_sound();
        (0..8).for_each(|n| assert_holds(&setup, n, if n == 1 { 2 } else { 1 }));
        setup.assert_sound();
    });
}

/// A fault that a handler has passed on, another of the same folio, an eviction, and the reader:
/// nobody sleeps for ever.
#[test]
fn c2_faults_that_are_passed_on_are_served() {
    use memfold_testkit::disk::MemoryDisk;
    explore(|_| {
        let disk = MemoryDisk::default();
        let setup = Arc::new(Setup::with_disk(with_file(Delivery::Thread), 64, Some(&disk)));
        folded(&setup, 8);
        setup.pager.faults().expect_readers();
        setup.troubles.strike(Call::MoveIn, 1, Trouble::Partial(1));
        setup.troubles.strike(Call::MoveIn, 2, Trouble::Again);
        let (reader, a, b, evictor) = (setup.clone(), setup.clone(), setup.clone(), setup.clone());
        let reader = thread::spawn(move || while reader.pager.faults().serve_passed() {});
        join(vec![
            thread::spawn(move || assert_holds(&a, 1, 1)),
            thread::spawn(move || write(&b, 2, 2)),
            thread::spawn(move || _ = evictor.pager.mappings().page_out_at(evictor.addrs(0..4))),
        ]);
        (0..8).for_each(|n| assert_holds(&setup, n, if n == 2 { 2 } else { 1 }));
        setup.pager.stop();
        reader.join().unwrap();
        setup.assert_sound();
    });
}
