//! The effects of page out, cold and discard on folios (S5).
use super::fault::Engine;
use crate::folio::lru::LruList;
use crate::reclaim::Reclaim;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use memfold_os::units::Order;

/// The share of a page of zeros.
const ZEROS: usize = 4;

/// Makes an engine whose pages 16..64 are three mapped folios of 64 KiB, made by a stream of
/// writes.
fn three_folios() -> Engine {
    let engine = Engine::new(Order::new(4).unwrap());
    engine.fill(0..64, 2);
    let orders = |pages| engine.orders(pages);
    assert_eq!(orders(16..64), [4, 4, 4], "{:?}", orders(0..64));
    assert_eq!(engine.pager.0.stats.splits.load(Relaxed), 0);
    engine
}

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Relaxed)
}

/// Returns the number of saved folios, by order.
fn saved(engine: &Engine) -> [u64; 5] {
    core::array::from_fn(|order| get(&engine.pager.0.stats.zswpout_folio[order]))
}

#[test]
fn s5_page_out_and_cold_act_on_whole_folios_without_splitting() {
    let engine = three_folios();
    let addrs = engine.page(32)..engine.page(64);
    engine.pager.mappings().cool_at(addrs.clone());
    assert_eq!((engine.orders(32..64), get(&engine.pager.0.stats.splits)), (vec![4, 4], 0));
    // The cold folios are the next to be evicted, though neither is the oldest.
    for _ in 0..2 {
        Reclaim::new(&engine.pager.0).evict(&engine.pager.0.areas.read());
    }
    assert!((0..32).all(|n| engine.space.is_present(engine.page(n))), "what was not named stays");
    assert!((32..64).all(|n| !engine.space.is_present(engine.page(n))), "the cold folios left");
    engine.page_out(16..64);
    assert_eq!((saved(&engine), get(&engine.pager.0.stats.zswpout)), ([0, 0, 0, 0, 3], 48));
    assert_eq!((engine.orders(16..64), get(&engine.pager.0.stats.splits)), (vec![4, 4, 4], 0));
    assert_eq!(engine.pager.0.stats.check_sums(), Ok(()));
    engine.pager.check().unwrap();
}

#[test]
fn s5_only_a_folio_that_the_range_cuts_is_split_first() {
    for cold in [false, true] {
        let engine = three_folios();
        // Pages 20..52: the first folio loses its first quarter, the last one all but its first.
        let addrs = engine.page(20)..engine.page(52);
        if cold {
            engine.pager.mappings().cool_at(addrs);
            assert_eq!(engine.pager.0.table.lists().pages(LruList::Cooling), 0);
        } else {
            engine.pager.mappings().page_out_at(addrs);
            assert_eq!((saved(&engine), get(&engine.pager.0.stats.zswpout)), ([0, 0, 2, 1, 1], 32));
        }
        assert_eq!(
            engine.orders(16..64),
            [2, 2, 3, 4, 2, 2, 3],
            "the folio in the middle stays whole"
        );
        assert_eq!(
            get(&engine.pager.0.stats.splits),
            4,
            "16 pages into 8 and 8, one of them into 4 and 4, twice"
        );
        let present = |pages: core::ops::Range<usize>| {
            pages.filter(|n| engine.space.is_present(engine.page(*n))).count()
        };
        assert_eq!(
            (present(16..20), present(20..52), present(52..64)),
            (4, if cold { 32 } else { 0 }, 12)
        );
        engine.pager.check().unwrap();
    }
}

#[test]
fn s5_partly_discarded_folio_is_split_and_evicted_in_pieces() {
    let engine = three_folios();
    // SAFETY: the bytes are not needed.
    unsafe { engine.pager.mappings().discard_at(engine.page(36)..engine.page(40)) };
    assert_eq!(engine.orders(32..48), [2, 3], "nothing is left where it was discarded");
    assert_eq!((engine.orders(16..32), engine.orders(48..64)), (vec![4], vec![4]));
    assert_eq!(get(&engine.pager.0.stats.splits), 2);
    engine.page_out(16..64);
    assert_eq!((saved(&engine), get(&engine.pager.0.stats.zswpout)), ([0, 0, 1, 1, 2], 44));
    assert_eq!(get(&engine.pager.0.stats.splits), 2, "the others were never split");
    engine.pager.check().unwrap();
}

#[test]
fn m3_m5_discard_inside_a_stored_block_keeps_its_other_pages() {
    let engine = three_folios();
    engine.page_out(16..64);
    // SAFETY: the bytes are not needed.
    unsafe { engine.pager.mappings().discard_at(engine.page(33)..engine.page(35)) };
    // Pages 32 and 35 remain of their block: it is read once, and they are stored again, page by
    // page.
    assert_eq!(get(&engine.pager.0.stats.partial_writes), 1);
    assert_eq!(engine.orders(32..36), [0, 0]);
    for (number, share) in [(32, 2), (33, ZEROS), (34, ZEROS), (35, 2)] {
        engine.assert_holds(number, share);
    }
    engine.pager.check().unwrap();
}
