//! The swap device fails at every operation there is, one at a time. Rows S3, S5, B3.
use memfold_engine::{Config, OnFull};
use memfold_os::transfer::Direction;
use memfold_stats::Stats;
use memfold_testkit::disk::{DiskTrouble, MemoryDisk};
use memfold_testkit::fill::partly_random;
use memfold_testkit::program::{Setup, small_config};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Pages of the program: more than twice its memory, so that the pool overflows too.
const PAGES: usize = 4608;

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Relaxed)
}

fn stats(setup: &Setup) -> &Stats {
    setup.pager.stats()
}

/// Of every six folios one is random bytes and is written raw; the others shrink by half and are
/// packed.
fn content(number: usize) -> Vec<u8> {
    partly_random(number as u64, if (number / 16).is_multiple_of(6) { 0 } else { 2 })
}

fn filled(config: Config, disk: &MemoryDisk, pages: usize) -> Setup {
    let setup = Setup::with_disk(config, pages, Some(disk));
    for n in 0..pages {
        setup.program.write(n, |page| page.copy_from_slice(&content(n)));
    }
    setup
}

fn assert_holds_all(setup: &Setup, pages: usize) {
    for n in 0..pages {
        setup.program.read(n, |page| assert!(*page == *content(n), "page {n}"));
    }
    setup.assert_sound();
}

#[test]
fn b3_every_raw_write_can_fail_in_every_way_and_no_byte_is_lost() {
    const FEW: usize = 96;
    let run = |strike: Option<(u64, DiskTrouble)>| {
        let disk = MemoryDisk::default();
        if let Some((nth, trouble)) = strike {
            disk.strike(Direction::Write, nth, trouble);
        }
        let mut config = small_config();
        config.codec = "none".into();
        let setup = filled(config, &disk, FEW);
        setup.pager.mappings().page_out_at(setup.addrs(0..FEW));
        assert_holds_all(&setup, FEW);
        (disk.writes().len() as u64, get(&stats(&setup).swap_write_failed))
    };
    let (writes, _) = run(None);
    assert!(writes >= 6, "{writes}");
    for nth in 1..=writes {
        for trouble in [DiskTrouble::Full, DiskTrouble::Failed, DiskTrouble::Short] {
            assert_eq!(run(Some((nth, trouble))).1, 1, "write {nth}, {trouble:?}");
        }
    }
}

#[test]
fn b3_packed_writes_can_fail_and_no_byte_is_lost() {
    let whole = MemoryDisk::default();
    drop(filled(small_config(), &whole, PAGES));
    let writes = whole.writes();
    assert!(writes.iter().any(|len| *len > 64 << 10), "some are packed: {writes:?}");
    let mut failures = 0;
    for nth in (0..writes.len()).filter(|n| writes[*n] > 64 << 10).step_by(3).take(6) {
        let disk = MemoryDisk::default();
        disk.strike(
            Direction::Write,
            nth as u64 + 1,
            if nth % 2 == 0 { DiskTrouble::Full } else { DiskTrouble::Short },
        );
        let setup = filled(small_config(), &disk, PAGES);
        assert_holds_all(&setup, PAGES);
        failures += get(&stats(&setup).swap_write_failed);
    }
    assert!(failures > 0);
}

#[test]
fn b3_every_growth_of_the_file_can_fail_and_no_byte_is_lost() {
    let whole = MemoryDisk::default();
    drop(filled(small_config(), &whole, PAGES));
    assert!(whole.growths() > 0);
    for nth in 1..=whole.growths() {
        let disk = MemoryDisk::default();
        disk.fail_growth(nth);
        let setup = filled(small_config(), &disk, PAGES);
        assert_holds_all(&setup, PAGES);
        assert!(get(&stats(&setup).pswpout) > 0, "it is tried again");
    }
}

#[test]
fn b3_every_read_that_fails_ends_the_program_with_a_message() {
    let whole = MemoryDisk::default();
    let setup = filled(small_config(), &whole, PAGES);
    let before = whole.reads();
    assert_holds_all(&setup, PAGES);
    let reads = whole.reads() - before;
    assert!(reads > 20, "{reads}");
    for nth in (1..=reads).step_by(reads as usize / 6) {
        let disk = MemoryDisk::default();
        let setup = filled(small_config(), &disk, PAGES);
        disk.strike(
            Direction::Read,
            nth,
            if nth % 2 == 0 { DiskTrouble::Failed } else { DiskTrouble::Short },
        );
        let outcome = catch_unwind(AssertUnwindSafe(|| assert_holds_all(&setup, PAGES)));
        let payload = outcome.expect_err("a byte that was not read must not be given");
        let why = payload.downcast_ref::<String>().unwrap();
        assert!(
            why.contains("swap file memory-disk, slot ") && why.contains("reading failed"),
            "{why}"
        );
        // A locked shard stays locked: the program is over.
        core::mem::forget(setup);
    }
}

#[test]
fn b3_a_read_that_gives_a_wrong_byte_once_is_made_again() {
    let count_reads = |trouble: Option<u64>| {
        let disk = MemoryDisk::default();
        let setup = filled(small_config(), &disk, PAGES);
        let before = disk.reads();
        trouble.iter().for_each(|nth| disk.strike(Direction::Read, *nth, DiskTrouble::Wrong));
        assert_holds_all(&setup, PAGES);
        disk.reads() - before
    };
    let reads = count_reads(None);
    for nth in (1..=reads).step_by(reads as usize / 6) {
        assert!(count_reads(Some(nth)) > 0);
    }
}

#[test]
fn b3_on_full_says_what_a_full_file_does() {
    for (on_full, is_end) in [(OnFull::Grow, false), (OnFull::Stop, true)] {
        let disk = MemoryDisk::default();
        let mut config = small_config();
        (config.swap_bytes, config.on_full) = (2 << 20, on_full);
        config.codec = "none".into();
        let setup = Setup::with_disk(config, PAGES, Some(&disk));
        let fill = || {
            for n in 0..PAGES {
                setup.program.write(n, |page| page.copy_from_slice(&content(n)));
            }
        };
        match catch_unwind(AssertUnwindSafe(fill)) {
            Ok(()) => {
                assert!(!is_end, "it went on");
                assert!(get(&stats(&setup).over_limit) > 0);
                assert_holds_all(&setup, PAGES);
            }
            Err(payload) => {
                let why = payload.downcast_ref::<String>().unwrap();
                assert!(is_end && why.contains("--on-full stop"), "{why}");
                core::mem::forget(setup);
            }
        }
    }
}

#[test]
fn s5_pageout_and_cold_write_whole_folios_after_a_discard() {
    let disk = MemoryDisk::default();
    let mut config = small_config();
    config.codec = "none".into();
    let setup = filled(config, &disk, 256);
    let splits = get(&stats(&setup).splits);
    setup.pager.mappings().cool_at(setup.addrs(0..256));
    setup.pager.mappings().page_out_at(setup.addrs(0..256));
    assert_eq!(setup.space.present_pages(), 0);
    assert_eq!(get(&stats(&setup).splits), splits, "nothing is split");
    let large = get(&stats(&setup).swpout_folio[4]);
    assert!(large * 16 >= 200, "{large} folios of 64 KiB");
    // A part that the program has dropped is split off, and the rest comes back.
    // SAFETY: nobody uses the pages.
    unsafe { setup.pager.mappings().discard_at(setup.addrs(100..104)) };
    assert!(get(&stats(&setup).splits) > splits);
    (0..256).filter(|n| !(100..104).contains(n)).for_each(|n| {
        setup.program.read(n, |page| assert!(*page == *content(n), "page {n}"));
    });
    (100..104).for_each(|n| {
        setup.program.read(n, |page| assert!(page.iter().all(|b| *b == 0), "page {n}"))
    });
    setup.assert_sound();
}
