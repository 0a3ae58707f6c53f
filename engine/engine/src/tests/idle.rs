//! An idle process: all of it is folded and compressed once more, and it comes back in windows.
use super::fault::Engine;
use super::writeback::hex;
use crate::config::{Config, Delivery};
use crate::policy::slowdown::WorkDone;
use memfold_os::sync::atomic::Ordering::Relaxed;
use memfold_store::CodecSpec;

const PAGES: usize = 4096;
const SECOND: u64 = 1_000_000_000;

/// Makes an engine whose process works, with all pages in memory.
fn working() -> Engine {
    let mut config = Config::new(1 << 30);
    (config.delivery, config.slowdown, config.pools) = (Delivery::Signal, 200, 1);
    config.recompress = Some("zstd:3".into());
    let engine = Engine::with(config, PAGES);
    engine.fill(0..PAGES, 2);
    engine.pager.0.budget.weigh(&WorkDone::default());
    engine
}

/// Lets the process be without work, and folds all of it.
fn idle() -> Engine {
    let engine = working();
    let resident = PAGES as u64;
    for now_ns in (1..100).map(|second| second * SECOND) {
        let work = WorkDone { now_ns, resident, ..WorkDone::default() };
        engine.pager.0.budget.weigh(&work);
    }
    engine.page_out(0..PAGES);
    engine.pager.gauges().publish();
    engine
}

#[test]
fn idle_memory_is_compressed_again_at_once_and_that_of_others_is_not() {
    let engine = working();
    assert_eq!(engine.pager.recompress().due(), None);
    engine.pager.gauges().publish();
    assert!(engine.pager.0.backing.store().refuses_incompressible());
    let engine = idle();
    let dense = 0..64;
    for number in dense.clone() {
        engine.write(number, |bytes| bytes.copy_from_slice(&hex(number)));
    }
    engine.page_out(dense.clone());
    let store = engine.pager.0.backing.store();
    assert!(!store.refuses_incompressible(), "what lz4 can't compress, zstd may");
    assert_eq!(engine.pager.recompress().due(), Some((0, 100)));
    let mut worker = store.worker_for(CodecSpec::parse("zstd:3").unwrap());
    assert!(engine.pager.recompress().some(&mut worker, 0, u64::MAX / 2) > 0);
    for number in dense.clone() {
        engine.touch(number);
        let is_same = |bytes: &[u8]| assert!(*bytes == *hex(number), "page {number}");
        engine.space.read(engine.page(number), is_same).unwrap();
    }
    (dense.end..PAGES).for_each(|n| engine.assert_holds(n, 2));
    engine.pager.check().unwrap();
}

#[test]
fn the_loads_of_a_process_that_works_again_wake_it_and_come_in_windows() {
    let engine = idle();
    let (budget, stats) = (&engine.pager.0.budget, engine.pager.stats());
    let loaded = || stats.zswpin.load(Relaxed);
    let mut touched = (0..PAGES / 2).step_by(4);
    let before = loaded();
    while loaded() - before < 256 {
        assert!(budget.is_idle() && !budget.is_waking() && budget.aim_pages() == 0);
        engine.assert_holds(touched.next().unwrap(), 2);
        assert!(loaded() - before < 256 + 64);
    }
    for number in (PAGES / 2..PAGES).step_by(128) {
        let before = loaded();
        engine.assert_holds(number, 2);
        assert_eq!(loaded() - before, 64, "page {number}");
        assert!(!budget.is_idle() && budget.is_waking() && budget.aim_pages() == u64::MAX);
    }
    (0..PAGES).for_each(|n| engine.assert_holds(n, 2));
    engine.pager.check().unwrap();
}
