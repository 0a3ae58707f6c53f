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
