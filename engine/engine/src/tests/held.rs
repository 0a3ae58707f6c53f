//! Eviction beside buffers of system calls.
use super::fault::Engine;
use crate::reclaim::Reclaim;
use memfold_os::units::Order;
use memfold_testkit::random::Random;

const PAGES: usize = 64;
const BLOCK_PAGES: usize = 4;

/// A call with a buffer in each large folio once kept all memory: each eviction tried every folio
/// in vain.
#[test]
fn held_page_keeps_its_block_and_not_its_folio() {
    let mut random = Random::new(1);
    for round in 0..40 {
        let engine = Engine::new(Order::new(3 + round % 4).unwrap());
        engine.fill(0..PAGES, 2);
        assert!(engine.orders(0..PAGES).iter().any(|order| *order > 2), "large folios");
        let held: Vec<usize> = (0..1 + random.below(6)).map(|_| random.below(PAGES)).collect();
        let mut building = engine.pager.0.holds.begin(0);
        held.iter()
            .for_each(|page| building.push(engine.page(*page)..engine.page(*page) + 1, false));
        let hold = building.publish().unwrap().unwrap();
        let areas = engine.pager.0.areas.read();
        (0..100).for_each(|_| _ = Reclaim::new(&engine.pager.0).evict(&areas));
        drop(areas);
        for page in 0..PAGES {
            let is_kept = held.iter().any(|held| held / BLOCK_PAGES == page / BLOCK_PAGES);
            let is_here = engine.space.is_present(engine.page(page));
            assert_eq!(is_here, is_kept, "round {round}, page {page}, held {held:?}");
        }
        engine.pager.0.holds.release(hold);
        (0..PAGES).for_each(|page| engine.assert_holds(page, 2));
        engine.pager.check().unwrap();
    }
}
