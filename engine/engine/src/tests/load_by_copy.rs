//! Loads by copy, and the room that they make.
use super::fault::Engine;
use crate::config::{Config, Delivery};
use crate::memory::frames::{Frame, FrameKind};
use memfold_os::units::Order;
use memfold_testkit::random::Random;

const PAGES: usize = 4096;

/// Makes an engine with half of its pages in memory, in which each fault loads one page.
fn of_pages() -> Engine {
    let mut config = Config::new(1 << 30);
    (config.resident_bytes, config.delivery) = (Some(8 << 20), Delivery::Thread);
    (config.block_order, config.folio_order, config.readahead) = (Order::PAGE, Order::PAGE, false);
    let engine = Engine::with(config, PAGES);
    engine.fill(0..PAGES, 2);
    engine
}

/// Returns the most pages that were free at once while pages were touched at random.
fn most_free(engine: &Engine, random: &mut Random, touches: usize) -> u64 {
    let touch = |_| {
        engine.assert_holds(random.below(PAGES), 2);
        engine.pager.0.mapper.frames().full_free()
    };
    (0..touches).map(touch).max().unwrap()
}

/// Giving pages back interrupts all CPUs that the program runs on, so it must be many at once.
#[test]
fn a_batch_of_free_pages_comes_back_after_others_have_taken_it() {
    let (engine, mut random) = (of_pages(), Random::new(1));
    let batch = most_free(&engine, &mut random, 1000);
    assert!(batch >= 30, "{batch} pages at once");
    // Another thread takes all free pages, again and again.
    for round in 0..20 {
        let frames = engine.pager.0.mapper.frames();
        let taken: Vec<Frame> =
            std::iter::from_fn(|| frames.take(Order::PAGE, FrameKind::Full)).collect();
        let most = most_free(&engine, &mut random, 400);
        assert!(most >= batch / 2, "round {round}: {most} pages at once, {batch} before");
        taken.into_iter().for_each(|page| frames.give(page, Order::PAGE, FrameKind::Full));
    }
    engine.pager.check().unwrap();
}

/// Its pages have no bits in `Folio::here`. It once counted as folded although it was resident.
#[test]
fn held_clean_block_of_many_pages_stays_resident() {
    const PAGES: usize = 64;
    let mut config = Config::new(1 << 30);
    (config.delivery, config.fallback_percent) = (Delivery::Signal, 100);
    config.limit_bytes = Some(64 << 20);
    let order = Order::new(5).unwrap();
    (config.block_order, config.folio_order) = (order, order);
    let engine = Engine::with(config, PAGES);
    engine.fill(0..PAGES, 2);
    engine.page_out(0..PAGES);
    (0..PAGES).for_each(|page| engine.assert_holds(page, 2));
    let mut building = engine.pager.0.holds.begin(0);
    building.push(engine.page(3)..engine.page(3) + 1, false);
    let hold = building.publish().unwrap().unwrap();
    engine.page_out(0..PAGES);
    assert!(engine.space.is_present(engine.page(3)));
    engine.pager.check().unwrap();
    engine.pager.0.holds.release(hold);
    (0..PAGES).for_each(|page| engine.write(page, |bytes| bytes[0] ^= 0));
    (0..PAGES).for_each(|page| engine.assert_holds(page, 2));
    engine.pager.check().unwrap();
}

/// A record of an ended folio is used again. Its page once came back writable, as if it had changed.
#[test]
fn new_page_is_not_taken_for_one_that_changed() {
    let engine = of_pages();
    engine.page_out(0..64);
    let range = engine.page(0)..engine.page(64);
    engine.pager.mappings().discard_with(&[range], || 0, |made| made == 0);
    for page in 0..64 {
        let _ = engine.touch(page);
    }
    let key = {
        let areas = engine.pager.0.areas.read();
        areas.find(engine.page(0)).unwrap().key_of(engine.page(0))
    };
    let mut count = 0;
    engine.pager.0.table.each(key..key + 64, |guard, id| {
        let folio = engine.pager.0.table.get(guard, id);
        assert!(folio.has_copy.get() || !folio.written.get(), "page {}", folio.key() - key);
        count += 1;
    });
    assert_eq!(count, 64);
}
