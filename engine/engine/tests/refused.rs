//! Data that nothing takes, in bounds that can't hold it: it costs memory, not time, and the rest
//! is folded as before. Row Z4.
use memfold_engine::Config;
use memfold_engine::config::OnFull;
use memfold_stats::Stats;
use memfold_testkit::fill::partly_random;
use memfold_testkit::program::{Setup, small_config};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

/// 16 MiB that don't shrink.
const DENSE: Range<usize> = 0..4096;
/// 12 MiB that shrink to about a quarter.
const SOFT: Range<usize> = 4096..7168;

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Relaxed)
}

/// 16 KiB blocks, folios up to 64 KiB, codec lz4.
fn config(change: impl FnOnce(&mut Config)) -> Config {
    let mut config = small_config();
    config.limit_bytes = None;
    change(&mut config);
    config
}

fn setup(change: impl FnOnce(&mut Config)) -> Setup {
    Setup::new(config(change), SOFT.end)
}

/// What a page holds: random bytes, of which 3 of 4 are zeros in `SOFT`.
fn content(number: usize) -> Vec<u8> {
    partly_random(number as u64, if DENSE.contains(&number) { 0 } else { 3 })
}

fn write(setup: &Setup, pages: Range<usize>) {
    pages.for_each(|n| setup.program.write(n, |page| page.copy_from_slice(&content(n))));
}

fn assert_holds(setup: &Setup, pages: Range<usize>) {
    pages.for_each(|n| setup.program.read(n, |page| assert!(*page == *content(n), "page {n}")));
}

fn stats(setup: &Setup) -> &Stats {
    setup.pager.gauges().publish();
    setup.pager.stats()
}

#[test]
fn z4_incompressible_data_stays_and_is_not_retried_each_fault() {
    let setup = setup(|c| c.limit_bytes = Some(8 << 20));
    let start = Instant::now();
    write(&setup, DENSE);
    let s = stats(&setup);
    assert!(get(&s.pool_bytes) < 1 << 20, "{} bytes in the pool", get(&s.pool_bytes));
    assert!(get(&s.refused_bytes) > 8 << 20, "{} bytes refused", get(&s.refused_bytes));
    assert!(get(&s.over_limit) > 0);
    // Each folio has 4 pages or more.
    let refusals = get(&s.save_refused);
    assert!(refusals <= DENSE.len() as u64 / 4, "{refusals} refusals");
    assert_holds(&setup, DENSE);
    assert_eq!(get(&s.pgmajfault), 0, "nothing of it has left");

    // What does shrink is folded as ever, in the room that is kept for it.
    write(&setup, SOFT);
    (0..3).for_each(|_| assert_holds(&setup, SOFT));
    let retries = start.elapsed().as_millis() as u64 / 50 + 1;
    assert!(get(&s.pgmajfault) > 100 && get(&s.zswpin) > 3072, "{} pages loaded", get(&s.zswpin));
    let refusals = get(&s.save_refused);
    // The last of the dense ones are met now; one retry in 50 ms.
    assert!(
        refusals <= DENSE.len() as u64 / 4 + retries,
        "{refusals} refusals, in a time for {retries} retries"
    );
    let pages_present = setup.space.present_pages();
    assert!(pages_present <= DENSE.len() + (5 << 20 >> 12), "{pages_present} pages are mapped");
    setup.assert_sound();

    // The program gives it up: the limit is kept again.
    // SAFETY: nobody uses the pages.
    unsafe { setup.pager.mappings().discard_at(setup.addrs(DENSE)) };
    assert_holds(&setup, SOFT);
    let s = stats(&setup);
    let over_limit = get(&s.over_limit);
    assert_eq!(get(&s.refused_bytes), 0);
    (0..2).for_each(|_| assert_holds(&setup, SOFT));
    while setup.pager.background().reclaim_in_background() {}
    let s = stats(&setup);
    assert_eq!(get(&s.over_limit), over_limit);
    let held_bytes = [&s.resident_bytes, &s.frame_bytes, &s.pool_bytes, &s.index_bytes]
        .map(get)
        .iter()
        .sum::<u64>();
    assert!(held_bytes <= 8 << 20, "{held_bytes} bytes held");
    setup.assert_sound();
}

/// Memory that isn't managed takes all of the limit: what can be folded is folded all the same.
#[test]
fn z10_memory_outside_of_management_never_stops_folding() {
    let setup = setup(|c| c.limit_bytes = Some(16 << 20));
    setup.pager.gauges().set_unmanaged_bytes(20 << 20);
    write(&setup, SOFT);
    while setup.pager.background().reclaim_in_background() {}
    let s = stats(&setup);
    let floor = setup.pager.gauges().room_bytes() + get(&s.resident_bytes) + get(&s.frame_bytes);
    assert!(floor <= 5 << 20, "{floor} bytes stay uncompressed");
    assert!(
        get(&s.folded_bytes) + (5 << 20) >= (SOFT.len() as u64) << 12,
        "{s:?}",
        s = get(&s.folded_bytes)
    );
    assert!(get(&s.over_limit) > 0, "and that is counted");
    assert_holds(&setup, SOFT);
    setup.assert_sound();
}

#[test]
fn z4_a_full_pool_is_not_asked_again_at_each_fault() {
    let setup = setup(|c| {
        c.resident_bytes = Some(8 << 20);
        c.max_pool_bytes = Some(1 << 20);
    });
    let start = Instant::now();
    write(&setup, SOFT);
    let s = stats(&setup);
    assert!(get(&s.over_limit) > 0 && get(&s.zswpout) > 0);
    (0..3).for_each(|_| assert_holds(&setup, SOFT));
    let retries = start.elapsed().as_millis() as u64 / 50 + 1;
    let refusals = get(&s.save_refused);
    assert!(
        refusals <= SOFT.len() as u64 / 2 + retries,
        "{refusals} refusals, in a time for {retries} retries"
    );
    setup.assert_sound();
}

#[test]
fn z4_refused_folios_are_retried_when_refusals_end() {
    let setup = setup(|c| {
        c.resident_bytes = Some(8 << 20);
        c.max_pool_bytes = Some(1 << 20);
    });
    write(&setup, SOFT);
    let before = get(&stats(&setup).refused_bytes);
    assert!(before > 1 << 20, "{before} bytes refused");
    // What was stored first leaves room in the pool.
    let (given_up, rest) = (SOFT.start..SOFT.start + 768, SOFT.start + 768..SOFT.end);
    // SAFETY: nobody uses the pages.
    unsafe { setup.pager.mappings().discard_at(setup.addrs(given_up)) };
    std::thread::sleep(std::time::Duration::from_millis(60));
    while setup.pager.background().reclaim_in_background() {}
    let s = stats(&setup);
    let (after, held_bytes) = (get(&s.refused_bytes), get(&s.resident_bytes) + get(&s.frame_bytes));
    assert!(after < before, "{after} bytes refused, {before} before");
    assert!(held_bytes <= 8 << 20, "the bound is kept again: {held_bytes} bytes");
    assert_holds(&setup, rest);
    setup.assert_sound();
}

#[test]
fn on_full_stop_ends_the_program_when_all_was_tried() {
    let setup = setup(|c| {
        c.limit_bytes = Some(12 << 20);
        c.on_full = OnFull::Stop;
    });
    // Dense data in between must not hide that the rest can be folded.
    write(&setup, 0..1024);
    write(&setup, SOFT);
    assert_holds(&setup, SOFT);
    assert_eq!(get(&stats(&setup).over_limit), 0);
    let panic =
        catch_unwind(AssertUnwindSafe(|| write(&setup, DENSE))).expect_err("it can't hold that");
    let text = panic.downcast_ref::<String>().unwrap();
    assert!(text.contains("--on-full stop"), "{text}");
}
