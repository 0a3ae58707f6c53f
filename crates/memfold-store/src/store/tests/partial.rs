//! M3, M7: reading a part of a block decompresses it once.
use super::*;

fn load_page(
    store: &Store,
    w: &mut CodecWorker,
    handle: Handle,
    o: Order,
    first: usize,
    pages: usize,
) -> Vec<u8> {
    let mut to = Pages::new(pages);
    // SAFETY: the buffer has room for the pages, and is ours.
    unsafe { store.load_pages(w, handle, o, first, pages, to.bytes_mut().as_mut_ptr()).unwrap() };
    to.bytes().to_vec()
}

#[test]
fn m7_pages_of_a_block_come_from_one_decompression() {
    for recent_blocks in [0, 1, 4] {
        let store = store_with(|c| {
            c.block_order = order(4);
            c.recent_blocks = recent_blocks;
        });
        let mut w = store.worker();
        let mut folio = Pages::new(16);
        (0..16).for_each(|p| Fill::Real(p * 4096).write(folio.page_mut(p)));
        let handle = save(&store, &mut w, &folio, order(4), 1).unwrap()[0];
        for (first, pages) in (0..16).map(|p| (p, 1)).chain([(3, 9), (0, 16), (15, 1), (1, 15)]) {
            let expected = &folio.bytes()[first * PAGE_SIZE..][..pages * PAGE_SIZE];
            assert!(
                load_page(&store, &mut w, handle, order(4), first, pages) == expected,
                "{first}+{pages}"
            );
        }
        let stats = store.stats();
        let hits = if recent_blocks == 0 { 0 } else { 19 };
        assert_eq!((stats.events.recent_hits, stats.events.recent_misses), (hits, 20 - hits));
        assert_eq!(stats.events.partial_loads, 19);
        assert!((stats.recent_hit_rate() - hits as f64 / 20.0).abs() < 1e-9);
    }
}

#[test]
fn m7_a_freed_block_is_forgotten_and_the_oldest_is_replaced() {
    let store = store_with(|c| c.recent_blocks = 2);
    let mut w = store.worker();
    let blocks: Vec<_> = (0..3)
        .map(|i| {
            let mut folio = Pages::new(4);
            (0..4).for_each(|p| Fill::Real(i * 70_000 + p * 4096).write(folio.page_mut(p)));
            save(&store, &mut w, &folio, order(2), 1).unwrap()[0]
        })
        .collect();
    let mut read = |i: usize| {
        let before = store.stats().events.recent_hits;
        load_page(&store, &mut w, blocks[i], order(2), 1, 1);
        store.stats().events.recent_hits > before
    };
    let hits = [0, 1, 0, 2, 0, 1].map(&mut read);
    assert_eq!(hits, [false, false, true, false, true, false]);
    store.free(blocks[0]);
    let mut page = Pages::new(1);
    // SAFETY: the buffer has room for the page.
    let loaded = unsafe {
        store.load_pages(&mut w, blocks[0], order(2), 1, 1, page.bytes_mut().as_mut_ptr())
    };
    assert_eq!(loaded.unwrap_err().problem, LoadProblem::Unknown);
    assert!(load_page(&store, &mut w, Handle::ZERO, order(2), 2, 2).iter().all(|b| *b == 0));
}
