//! Folios that are taken for unchanged.
use super::fault::Engine;
use crate::config::{Config, Delivery, WORKABLE_MIN_BYTES};
use core::sync::atomic::Ordering::Relaxed;
use memfold_os::units::Order;
use memfold_testkit::fill::{equal_xxh3, partly_random};

const PAGES: usize = 64;

/// Writes bytes to every page that have the same XXH3-128 for any `x` and `y` of equal sum.
fn write(engine: &Engine, x: u32, y: u32) {
    for number in 0..PAGES {
        engine.write(number, |page| equal_xxh3(page, x, y));
    }
}

/// Pages that compress are kept in the pool, those of random bytes in the swap file.
#[test]
fn a_write_that_keeps_a_pages_public_hash_is_not_lost() {
    for (block, zeros) in [0, 2, 4].into_iter().flat_map(|order| [(order, 2), (order, 0)]) {
        let mut config = Config::new(1 << 30);
        (config.limit_bytes, config.delivery) = (Some(WORKABLE_MIN_BYTES), Delivery::Signal);
        (config.block_order, config.folio_order) =
            (Order::new(block).unwrap(), Order::new(4).unwrap());
        (config.swap, config.swap_keep_free_bytes) = (Some("memory".into()), 0);
        let engine = Engine::with(config, PAGES);
        engine.fill(0..PAGES, zeros);
        for (x, y) in [(1, 7), (2, 6), (0, 8)] {
            write(&engine, x, y);
            engine.page_out(0..PAGES);
            assert_eq!(engine.space.present_pages(), 0);
            for number in 0..PAGES {
                let mut page = partly_random(number as u64, zeros);
                equal_xxh3(&mut page, x, y);
                engine.touch(number);
                let right = engine.space.read(engine.page(number), |bytes| *bytes == page);
                assert_eq!(
                    right.ok(),
                    Some(true),
                    "page {number}, {:?}, {zeros}/4 zeros",
                    Order::new(block)
                );
            }
        }
        let clean = engine.pager.0.stats.clean_evictions.load(Relaxed);
        engine.page_out(0..PAGES);
        assert!(
            engine.pager.0.stats.clean_evictions.load(Relaxed) > clean,
            "what is unchanged is still known as that"
        );
        engine.pager.check().unwrap();
    }
}
