//! The swap file behind the pool, over a fake address space and a device in memory. Rows S3, Z4,
//! Z5, Z10, M9, C2, B3.
use memfold_engine::Config;
use memfold_os::transfer::Direction;
use memfold_os::units::PAGE_SIZE;
use memfold_stats::Stats;
use memfold_testkit::disk::{DiskTrouble, MemoryDisk};
use memfold_testkit::fill::partly_random;
use memfold_testkit::program::{Setup, fatal, small_config};
use memfold_testkit::random::{Random, seed};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Relaxed)
}

/// What a page holds: random bytes, of which about `share` of 4 are zeros.
fn content(number: usize, version: u64, share: usize) -> Vec<u8> {
    partly_random((number as u64) << 32 | version, share)
}

fn write(setup: &Setup, number: usize, version: u64, share: usize) {
    setup.program.write(number, |page| page.copy_from_slice(&content(number, version, share)));
}

fn assert_holds(setup: &Setup, number: usize, version: u64, share: usize) {
    let want = content(number, version, share);
    setup
        .program
        .read(number, |page| assert!(*page == *want, "page {number} isn't version {version}"));
}

/// Pages `0..count`, incompressible, folded.
fn folded_raw(config: Config, disk: &MemoryDisk, count: usize) -> Setup {
    let setup = Setup::with_disk(config, count.max(64), Some(disk));
    (0..count).for_each(|n| write(&setup, n, 1, 0));
    setup.pager.mappings().page_out_at(setup.addrs(0..count));
    setup
}

fn stats(setup: &Setup) -> &Stats {
    setup.pager.stats()
}

#[test]
fn z4_incompressible_folio_is_written_whole_in_one_write() {
    for encrypt in [true, false] {
        let disk = MemoryDisk::default();
        let mut config = small_config();
        config.swap_encrypt = encrypt;
        let setup = folded_raw(config, &disk, 64);
        assert_eq!(setup.space.present_pages(), 0, "all is away");
        let writes = disk.writes();
        let order_4 = get(&stats(&setup).swpout_folio[4]);
        assert!(
            order_4 > 0 && writes.iter().filter(|len| **len == 64 << 10).count() as u64 == order_4,
            "{writes:?}"
        );
        assert_eq!(writes.iter().sum::<usize>(), 64 * PAGE_SIZE, "nothing is written twice");
        assert_eq!(get(&stats(&setup).pswpout), 64);
        assert_eq!(get(&stats(&setup).zswpout), 0);
        assert_eq!(get(&stats(&setup).swap_bytes), 0, "published on demand");
        setup.pager.gauges().publish();
        assert_eq!(get(&stats(&setup).swap_bytes), 64 << 12);
        let on_disk = disk.bytes();
        let page = content(5, 1, 0);
        let is_plain = on_disk.windows(64).any(|w| w == &page[256..320]);
        assert_eq!(is_plain, !encrypt, "the device must hold no plain bytes when encrypted");
        setup.assert_sound();
        (0..64).for_each(|n| assert_holds(&setup, n, 1, 0));
        assert_eq!(get(&stats(&setup).pswpin), 64);
        assert_eq!(get(&stats(&setup).zswpin), 0);
        setup.assert_sound();
    }
}

#[test]
fn c6_a_clean_copy_in_the_file_costs_no_second_write() {
    let disk = MemoryDisk::default();
    let setup = folded_raw(small_config(), &disk, 32);
    (0..32).for_each(|n| assert_holds(&setup, n, 1, 0));
    let before = disk.writes().len();
    setup.pager.mappings().page_out_at(setup.addrs(0..32));
    assert_eq!(setup.space.present_pages(), 0);
    assert_eq!(disk.writes().len(), before);
    assert!(get(&stats(&setup).clean_evictions) > 0);
    // A changed one is written anew, and its old slots are free.
    write(&setup, 3, 2, 0);
    setup.pager.mappings().page_out_at(setup.addrs(0..32));
    assert!(disk.writes().len() > before);
    setup.pager.gauges().publish();
    assert_eq!(get(&stats(&setup).swap_bytes), 32 << 12);
    assert_holds(&setup, 3, 2, 0);
    assert_holds(&setup, 4, 1, 0);
    setup.assert_sound();
}

/// Fills 24 MiB, half of it compressible, in a limit of 8 MiB.
fn overfilled(config: Config, disk: &MemoryDisk) -> Setup {
    let setup = Setup::with_disk(config, 6144, Some(disk));
    (0..6144).for_each(|n| write(&setup, n, 1, 2));
    setup
}

#[test]
fn m9_z10_full_pool_is_packed_and_loaded_block_by_block() {
    let disk = MemoryDisk::default();
    let setup = overfilled(small_config(), &disk);
    let s = stats(&setup);
    assert!(get(&s.zswpwb) > 1000, "{} pages written back", get(&s.zswpwb));
    assert_eq!(get(&s.pswpout), get(&s.zswpwb));
    assert_eq!(get(&s.swpout_folio[2]) * 4, get(&s.zswpwb), "a block is one object");
    let bytes: usize = disk.writes().iter().sum();
    assert!(
        (bytes as u64) < get(&s.zswpwb) * PAGE_SIZE as u64 * 3 / 4,
        "they stay compressed: {bytes} bytes, {} pages",
        get(&s.zswpwb)
    );
    assert!(disk.writes().iter().any(|len| *len > 32 << 10), "many to a write");
    assert!(
        setup.pager.store().pool_bytes() < 5 << 20,
        "{} in the pool",
        setup.pager.store().pool_bytes()
    );
    setup.assert_sound();
    // One random block: one read of the slots it lies in.
    let (reads, loads) = (disk.reads(), get(&s.blocks_loaded));
    assert_holds(&setup, 0, 1, 2);
    assert_eq!((disk.reads() - reads, get(&s.blocks_loaded) - loads), (1, 1));
    (0..6144).for_each(|n| assert_holds(&setup, n, 1, 2));
    assert!(get(&s.pswpin) > 0);
    setup.assert_sound();
}

#[test]
fn a_discard_frees_slots_and_gives_their_space_back() {
    let disk = MemoryDisk::default();
    let setup = folded_raw(small_config(), &disk, 8192);
    setup.pager.gauges().publish();
    assert!(get(&stats(&setup).swap_bytes) > 24 << 20);
    // SAFETY: nobody uses the pages.
    unsafe { setup.pager.mappings().discard_at(setup.addrs(0..8192)) };
    setup.pager.gauges().publish();
    assert_eq!(get(&stats(&setup).swap_bytes), 0);
    setup.pager.writeback().write_pending(false);
    assert!(disk.punched() >= 16 << 20, "{} given back", disk.punched());
    setup.assert_sound();
}

#[test]
fn writes_that_fail_lose_nothing_and_the_data_stays() {
    for trouble in [DiskTrouble::Full, DiskTrouble::Failed, DiskTrouble::Short] {
        let disk = MemoryDisk::default();
        disk.strike(Direction::Write, 2, trouble);
        let setup = folded_raw(small_config(), &disk, 64);
        assert_eq!(get(&stats(&setup).swap_write_failed), 1, "{trouble:?}");
        setup.assert_sound();
        (0..64).for_each(|n| assert_holds(&setup, n, 1, 0));
        setup.assert_sound();
    }
}

#[test]
fn random_failures_of_writes_under_load_lose_nothing() {
    let disk = MemoryDisk::default();
    let seed = seed(11);
    disk.fail_writes_at_random(200, seed);
    let mut random = Random::new(seed);
    let mut config = small_config();
    config.swap_encrypt = false;
    let setup = Setup::with_disk(config, 6144, Some(&disk));
    let mut shadow = vec![(0, 0); 6144];
    for step in 0..8_000u64 {
        let n = random.below(6144);
        if random.per_mille(400) || shadow[n].0 == 0 {
            shadow[n] = (step + 1, random.below(3));
            write(&setup, n, shadow[n].0, shadow[n].1);
        } else {
            assert_holds(&setup, n, shadow[n].0, shadow[n].1);
        }
        if step % 2000 == 1999 {
            setup.assert_sound();
        }
    }
    let rest = shadow.iter().enumerate().filter(|(_, rest)| rest.0 > 0);
    rest.for_each(|(n, (version, share))| assert_holds(&setup, n, *version, *share));
    assert!(get(&stats(&setup).swap_write_failed) > 0 && get(&stats(&setup).pswpin) > 0);
    setup.assert_sound();
}

#[test]
fn s3_full_file_is_used_to_the_last_slot_then_memory_grows() {
    let disk = MemoryDisk::default();
    let mut config = small_config();
    config.swap_bytes = 4 << 20;
    let setup = folded_raw(config, &disk, 4096);
    setup.pager.gauges().publish();
    let bytes = get(&stats(&setup).swap_bytes);
    assert!(bytes <= 4 << 20, "{bytes}");
    assert!(bytes >= (4 << 20) - (64 << 10), "only {bytes} of 4 MiB are used");
    assert!(get(&stats(&setup).over_limit) > 0);
    (0..4096).for_each(|n| assert_holds(&setup, n, 1, 0));
    setup.assert_sound();
}

#[test]
fn a_full_file_splits_no_folios() {
    let disk = MemoryDisk::default();
    let mut config = small_config();
    config.swap_bytes = 4 << 20;
    let setup = Setup::with_disk(config, 8192, Some(&disk));
    (0..6144).for_each(|n| write(&setup, n, 1, 0));
    let splits = || stats(&setup).swpout_fallback.iter().map(get).sum::<u64>();
    let before = splits();
    for round in 0..3 {
        // Writes are tried again after 100 ms.
        std::thread::sleep(std::time::Duration::from_millis(110));
        (0..200).for_each(|n| write(&setup, 6144 + round * 200 + n, 1, 0));
    }
    // A fault may find no frame of its order meanwhile, once in a round.
    assert!(splits() - before <= 3, "{} of {before} before", splits());
    (0..6144).for_each(|n| assert_holds(&setup, n, 1, 0));
    setup.assert_sound();
}

#[test]
fn the_floor_of_the_file_system_is_kept() {
    let disk = MemoryDisk::default();
    disk.set_file_system_bytes(100 << 20);
    let mut config = small_config();
    config.swap_keep_free_bytes = 92 << 20;
    let setup = folded_raw(config, &disk, 4096);
    assert_eq!(disk.bytes().len(), 8 << 20, "all that the floor leaves, and no more");
    (0..4096).for_each(|n| assert_holds(&setup, n, 1, 0));
    setup.assert_sound();
}

/// What reading page `n` ends the program with.
fn fatal_read(setup: &Setup, n: usize) -> String {
    fatal(|| assert_holds(setup, n, 1, 0))
}

#[test]
fn a_read_that_fails_ends_the_program_and_names_file_and_slot() {
    let disk = MemoryDisk::default();
    let setup = folded_raw(small_config(), &disk, 16);
    disk.strike(Direction::Read, 1, DiskTrouble::Failed);
    let why = fatal_read(&setup, 0);
    assert!(
        why.contains("swap file memory-disk, slot ") && why.contains("reading failed"),
        "{why}"
    );
}

#[test]
fn damage_in_the_file_is_never_believed() {
    for encrypt in [true, false] {
        for damage in [
            (|disk: &MemoryDisk| disk.damage(|at| at % 4096 == 77)) as fn(&MemoryDisk),
            |disk| disk.exchange(0, 65536, 65536),
            |disk| disk.exchange(0, 4096, 4096),
        ] {
            let disk = MemoryDisk::default();
            let mut config = small_config();
            config.swap_encrypt = encrypt;
            let setup = folded_raw(config, &disk, 32);
            damage(&disk);
            let why = fatal_read(&setup, 0);
            assert!(
                why.contains("swap file memory-disk, slot ")
                    && why.contains("not what was written"),
                "{why}"
            );
        }
    }
}

#[test]
fn damage_of_packed_objects_is_never_believed() {
    for encrypt in [true, false] {
        let disk = MemoryDisk::default();
        let mut config = small_config();
        config.swap_encrypt = encrypt;
        let setup = overfilled(config, &disk);
        disk.damage(|at| at % 512 == 300);
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            (0..6144).for_each(|n| assert_holds(&setup, n, 1, 2))
        }));
        let payload = outcome.expect_err("a wrong byte must never be read");
        let why = payload.downcast_ref::<String>().unwrap();
        assert!(
            why.contains("swap file memory-disk, slot ") && why.contains("not what was written"),
            "{why}"
        );
    }
}

#[test]
fn c2_many_threads_that_wait_for_one_folio_cause_one_read() {
    let disk = MemoryDisk::default();
    let setup = Arc::new(folded_raw(small_config(), &disk, 4));
    disk.hold_reads();
    let before = disk.reads();
    let threads: Vec<_> = (0..8)
        .map(|n| {
            let setup = setup.clone();
            std::thread::spawn(move || assert_holds(&setup, n % 4, 1, 0))
        })
        .collect();
    while get(&stats(&setup).faults_waited) < 7 {
        std::thread::yield_now();
    }
    disk.release_reads();
    threads.into_iter().for_each(|t| t.join().unwrap());
    assert_eq!(disk.reads() - before, 1);
}

#[test]
fn c1_a_folio_under_writeback_is_rescued_at_once() {
    let disk = MemoryDisk::default();
    let setup = Arc::new(Setup::with_disk(small_config(), 64, Some(&disk)));
    (0..16).for_each(|n| write(&setup, n, 1, 0));
    disk.set_delay_us(2_000_000);
    let evictor = setup.clone();
    let evictor =
        std::thread::spawn(move || evictor.pager.mappings().page_out_at(evictor.addrs(0..16)));
    while disk.begun() == 0 {
        std::thread::yield_now();
    }
    write(&setup, 3, 2, 0);
    assert!(!evictor.is_finished(), "it has waited for the write to the file");
    evictor.join().unwrap();
    disk.set_delay_us(0);
    assert!(get(&stats(&setup).rescues) > 0);
    assert_holds(&setup, 3, 2, 0);
    (0..16).filter(|n| *n != 3).for_each(|n| assert_holds(&setup, n, 1, 0));
    setup.assert_sound();
}

/// A hot set of 2.5 MiB, touched whole once for each 2 MiB of a scan of 32 MiB, in 8 MiB: without
/// shadows the scan would push it out each time.
#[test]
fn c4_a_hot_set_survives_a_scan() {
    let disk = MemoryDisk::default();
    let mut config = small_config();
    config.codec = "lz4".into();
    config.readahead = false;
    let setup = Setup::with_disk(config, 9000, Some(&disk));
    let hot = |n: usize| 8300 + n;
    (0..8192).for_each(|n| write(&setup, n, 1, 4));
    (0..640).for_each(|n| write(&setup, hot(n), 1, 4));
    setup.pager.mappings().page_out_at(setup.addrs(0..9000));
    let s = stats(&setup);
    let (mut refaults, mut touches) = (Vec::new(), 0);
    for round in 0..16 {
        (round * 512..(round + 1) * 512).for_each(|n| assert_holds(&setup, n, 1, 4));
        let before = get(&s.pgmajfault);
        for n in (0..640).step_by(4) {
            assert_holds(&setup, hot(n), 1, 4);
            touches += 1;
        }
        refaults.push(get(&s.pgmajfault) - before);
    }
    let late: u64 = refaults[8..].iter().sum();
    assert!(late < touches / 2 / 20, "hot refaults by round: {refaults:?}");
    assert!(get(&s.workingset_refault) > 0 && get(&s.workingset_activate) > 0);
    setup.assert_sound();
}

#[test]
fn c6_reading_ahead_from_the_file_is_counted_and_used() {
    let disk = MemoryDisk::default();
    let setup = Arc::new(Setup::with_disk(small_config(), 20 * 512, Some(&disk)));
    let page = |region: usize, n: usize| region * 512 + n;
    (0..20).for_each(|region| (0..64).for_each(|n| write(&setup, page(region, n), 1, 0)));
    setup.pager.mappings().page_out_at(setup.addrs(0..20 * 512));
    let background = setup.clone();
    let worker = std::thread::spawn(move || while background.pager.work() {});
    let s = stats(&setup);
    // More places that move forward in turn than streams are told apart.
    for n in (0..64).step_by(4) {
        for region in 0..20 {
            assert_holds(&setup, page(region, n), 1, 0);
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
    }
    let (reads, hits) = (get(&s.swap_ra), get(&s.swap_ra_hit));
    setup.pager.stop();
    worker.join().unwrap();
    assert!(hits > 0 && hits <= reads, "{hits} of {reads} pages were used");
    setup.assert_sound();
}

/// A discard that cuts a block in the file must not need a frame: while events wait, the kernel
/// gives none, and the handler that applies the discard would wait for itself. (A program that
/// shrank its heap hung.)
#[test]
fn a_discard_that_cuts_a_raw_block_takes_no_frame() {
    let disk = MemoryDisk::default();
    let setup = folded_raw(small_config(), &disk, 64);
    let frames = || {
        setup.pager.gauges().publish();
        get(&stats(&setup).frame_bytes)
    };
    let before = frames();
    setup.troubles.strike_at_random(1000, 1);
    // SAFETY: nobody uses the pages.
    unsafe { setup.pager.mappings().discard_at(setup.addrs(1..18)) };
    setup.troubles.clear();
    assert_eq!(frames(), before);
    assert_eq!(setup.space.present_pages(), 0);
    assert_holds(&setup, 0, 1, 0);
    (18..64).for_each(|n| assert_holds(&setup, n, 1, 0));
    (1..18).for_each(|n| {
        setup.program.read(n, |page| assert!(page.iter().all(|b| *b == 0), "page {n}"))
    });
    setup.assert_sound();
}
