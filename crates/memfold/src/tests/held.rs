//! Eviction beside buffers of system calls.
use super::fault::Engine;
use crate::reclaim::Reclaim;
use memfold_os::units::Order;

/// A call with a buffer in each large folio once kept all memory: each eviction tried every folio
/// in vain.
#[test]
fn held_page_keeps_its_block_and_not_its_folio() {
    let engine = Engine::new(Order::new(6).unwrap());
    engine.fill(0..64, 2);
    let orders = engine.orders(0..64);
    assert!(orders.iter().filter(|order| **order > 3).count() > 1, "large folios: {orders:?}");
    let at = |page: usize| engine.page(page)..engine.page(page) + 1;
    let mut building = engine.pager.0.holds.begin(0);
    [9, 30, 50].into_iter().for_each(|page| building.push(at(page), false));
    let hold = building.publish().unwrap().unwrap();
    let areas = engine.pager.0.areas.read();
    (0..100).for_each(|_| _ = Reclaim(&engine.pager.0).evict(&areas));
    drop(areas);
    let is_here = |page: &usize| engine.space.is_present(engine.page(*page));
    let blocks = (8..12).chain(28..32).chain(48..52);
    assert!((0..64).filter(is_here).eq(blocks), "only the held blocks stay");
    engine.pager.0.holds.release(hold);
    (0..64).for_each(|page| engine.assert_holds(page, 2));
    engine.pager.check().unwrap();
}
