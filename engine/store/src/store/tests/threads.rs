//! Many threads: saves, loads, partial loads and frees beside continuous compaction.
use super::*;
use std::sync::atomic::{AtomicBool, Ordering};

const THREADS: u64 = 4;

fn folio_of(seed: u64, o: Order) -> Pages {
    let mut random = Random::new(seed);
    let mut folio = Pages::new(o.pages());
    (0..o.pages()).for_each(|p| Fill::any(&mut random).write(folio.page_mut(p)));
    folio
}

/// Saves, reads and frees one thread's own folios at random.
fn churn(store: &Store, me: u64, rounds: usize) -> Vec<Handle> {
    let mut random = Random::new(me);
    let mut w = store.worker();
    let mut live: Vec<(Vec<Handle>, u64, Order)> = Vec::new();
    for round in 0..rounds {
        match random.below(if live.len() > 30 { 3 } else { 4 }) {
            0 if !live.is_empty() => {
                let (handles, ..) = live.swap_remove(random.below(live.len()));
                store.free_many(&handles);
            }
            1 | 2 if !live.is_empty() => {
                let (handles, seed, o) = &live[random.below(live.len())];
                let folio = folio_of(*seed, *o);
                assert_same(store, &mut w, handles, &folio, *o);
                let block = store.block_order(*o);
                let page = random.below(block.pages());
                let mut to = Pages::new(1);
                let dst = to.bytes_mut().as_mut_ptr();
                // SAFETY: the buffer has room for the page; only this thread frees its handles.
                unsafe { store.load_pages(&mut w, handles[0], block, page, 1, dst).unwrap() };
                assert!(to.bytes() == &folio.bytes()[page * PAGE_SIZE..][..PAGE_SIZE]);
            }
            _ => {
                // Few different contents, so that many objects share a size class and compaction
                // has work.
                let seed = (me + round as u64) % 12;
                let o = order(seed as u8 % 6);
                // Few keys, so that threads meet in the same pools and classes.
                if let Ok(handles) = save(store, &mut w, &folio_of(seed, o), o, seed % 3) {
                    live.push((handles, seed, o));
                }
            }
        }
    }
    live.into_iter().flat_map(|(handles, ..)| handles).collect()
}

#[test]
fn loads_frees_and_compaction_do_not_disturb_each_other() {
    let store = store_with(|c| {
        c.pools = 2;
        c.cached_blocks = 3;
    });
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let compactor = scope.spawn(|| {
            let mut bytes = 0;
            while !is_done.load(Ordering::Relaxed) {
                bytes += store.compact(u64::MAX);
            }
            bytes
        });
        let checker = scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                store.check().unwrap();
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
        });
        let store = &store;
        let churners: Vec<_> =
            (0..THREADS).map(|me| scope.spawn(move || churn(store, me, 1200))).collect();
        let rest: Vec<Handle> = churners.into_iter().flat_map(|t| t.join().unwrap()).collect();
        is_done.store(true, Ordering::Relaxed);
        checker.join().unwrap();
        let bytes = compactor.join().unwrap();
        store.check().unwrap();
        let stats = store.stats();
        println!(
            "moved {}, released {} KiB, lock waits {}",
            stats.moved,
            bytes >> 10,
            stats.lock_waits
        );
        assert!(stats.moved > 0 && bytes > 0);
        assert_eq!(stats.bad_frees, 0);
        store.free_many(&rest);
    });
    store.check().unwrap();
    assert_eq!(store.stats().objects, 0);
    store.compact(u64::MAX);
    assert_eq!(store.pool_bytes(), store.stats().metadata_bytes);
}

#[test]
fn threads_read_the_same_objects_while_they_move() {
    let store = store_with(|_| ());
    let mut w = store.worker();
    let folios: Vec<_> = (0..60).map(|i| folio_of(i % 5, order(4))).collect();
    let handles: Vec<_> =
        folios.iter().map(|f| save(&store, &mut w, f, order(4), 1).unwrap()).collect();
    let rounds = 40;
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..3)
            .map(|me| {
                let (store, folios, handles) = (&store, &folios, &handles);
                scope.spawn(move || {
                    let (mut w, mut random) = (store.worker(), Random::new(me));
                    for _ in 0..rounds * 30 {
                        let i = random.below(folios.len());
                        assert_same(store, &mut w, &handles[i], &folios[i], order(4));
                    }
                })
            })
            .collect();
        // Makes gaps beside objects that are being read, and compacts them again.
        while readers.iter().any(|r| !r.is_finished()) {
            let gaps: Vec<_> =
                (0..60).map(|i| save(&store, &mut w, &folios[i], order(4), 1).unwrap()).collect();
            gaps.iter().step_by(2).for_each(|h| store.free_many(h));
            store.compact(u64::MAX);
            gaps.iter().skip(1).step_by(2).for_each(|h| store.free_many(h));
            store.compact(u64::MAX);
        }
        readers.into_iter().for_each(|r| r.join().unwrap());
    });
    store.check().unwrap();
    println!("moved {}", store.stats().moved);
    assert!(store.stats().moved > 100);
}
