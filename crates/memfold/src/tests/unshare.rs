//! What a fork shares is made private, and nothing else is touched for that.
use super::fault::Engine;
use memfold_sys::units::Order;

/// While mremap moves memory it isn't registered. A page of it that had been folded since it was
/// noted, and was touched to be made private, came as one of zeros.
#[test]
fn what_is_folded_by_the_time_it_is_made_private_is_left_alone() {
    let engine = Engine::new(Order::new(2).unwrap());
    engine.fill(0..32, 2);
    let all = engine.page(0)..engine.page(64);
    engine.pager.to_unshare.note(engine.page(0)..engine.page(32), all.clone());
    engine.page_out(0..32);
    engine.space.seem_populated();
    engine.pager.reclaim_in_background();
    assert!(engine.pager.to_unshare.take().next().is_none(), "it was looked at");
    (0..32).for_each(|number| engine.assert_holds(number, 2));
}
