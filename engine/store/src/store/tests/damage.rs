//! Damaged objects and handles always give an error, never a panic, never wrong bytes.
use super::*;

fn fills() -> Vec<Vec<Fill>> {
    let (zero, one, real) = (Fill::Zero, Fill::Pattern(0xabcdef), Fill::Real(777_777));
    vec![
        vec![real; 4],
        vec![Fill::Random(1); 4],
        vec![one; 4],
        vec![one, real, zero, real],
        vec![one, zero, zero, one],
        vec![zero, Fill::Random(9), zero, zero],
    ]
}

/// Makes stores with one object each, of every kind and codec, beside a bystander in each span.
fn each_object(mut test: impl FnMut(&Store, &mut CodecWorker, Handle, &Pages)) {
    for spec in ["lz4", "lz4hc", "zstd", "deflate", "delta", "none"] {
        for fills in fills() {
            let store = store_with(|c| c.codec = CodecSpec::parse(spec).unwrap());
            let mut w = store.worker();
            let mut folio = Pages::new(4);
            fills.iter().enumerate().for_each(|(i, f)| f.write(folio.page_mut(i)));
            save(&store, &mut w, &folio, order(2), 1).unwrap();
            let handle = save(&store, &mut w, &folio, order(2), 1).unwrap()[0];
            test(&store, &mut w, handle, &folio);
            store.check().unwrap();
        }
    }
}

#[test]
fn every_flipped_bit_of_an_object_is_an_error() {
    each_object(|store, w, handle, folio| {
        let name = handle.object().unwrap();
        let pool = &store.pools[name.pool as usize];
        let entry = pool.entries.get(name.index).unwrap();
        for bit in 0..128 {
            entry.flip(bit);
            let error = load(store, w, handle, order(2)).unwrap_err();
            assert_eq!(error.handle, handle);
            assert!(store.check().is_err(), "check() misses bit {bit} of the entry");
            entry.flip(bit);
        }
        let (start, len) = store.object_bytes(handle);
        let mut random = Random::new(2);
        let some = (0..len * 8).filter(|bit| len < 200 || *bit < 256 || random.below(len / 8) == 0);
        for bit in some.chain(len * 8 - 64..len * 8) {
            // SAFETY: the byte lies in the object, which nothing else uses.
            let flip = || unsafe { *start.add(bit / 8) ^= 1 << (bit % 8) };
            flip();
            assert!(load(store, w, handle, order(2)).is_err(), "bit {bit} of the object");
            let mut page = Pages::new(1);
            // SAFETY: the buffer has room for the page.
            let partial = unsafe {
                store.load_pages(w, handle, order(2), 3, 1, page.bytes_mut().as_mut_ptr())
            };
            assert!(partial.is_err(), "bit {bit} of the object, partial");
            flip();
        }
        assert_same(store, w, &[handle], folio, order(2));
        let failures = store.stats().events.failed_loads;
        for round in 1..=100 {
            let (at, count) = (random.below(len), 1 + random.below(64));
            // SAFETY: the bytes lie in the object, which nothing else uses.
            let bytes =
                unsafe { std::slice::from_raw_parts_mut(start.add(at), count.min(len - at)) };
            let before = bytes.to_vec();
            bytes.iter_mut().for_each(|b| *b = random.word() as u8);
            if bytes == before {
                bytes[0] ^= 1;
            }
            let error = load(store, w, handle, order(2)).unwrap_err();
            assert!(
                error.to_string().starts_with(&format!("{handle:?}: ")),
                "the error names the object: {error}"
            );
            assert_eq!(store.stats().events.failed_loads, failures + round);
            bytes.copy_from_slice(&before);
        }
        assert_same(store, w, &[handle], folio, order(2));
    });
}

#[test]
fn a_damaged_object_does_not_stop_compaction_of_others() {
    let store = store_with(|_| ());
    let mut w = store.worker();
    let mut folio = Pages::new(4);
    let mut saves: Vec<(Handle, Pages)> = Vec::new();
    for i in 0..200 {
        (0..4).for_each(|p| Fill::Real(i * 9000 + p * 4096).write(folio.page_mut(p)));
        saves.push((save(&store, &mut w, &folio, order(2), 1).unwrap()[0], folio.clone()));
    }
    let bad = saves[50].0;
    let (start, _) = store.object_bytes(bad);
    // SAFETY: this is the first byte of the object (its owner's note), and no other thread uses it.
    unsafe { *start ^= 0x40 };
    let mut index = 0;
    saves.retain(|(h, _)| {
        index += 1;
        let keep = index % 5 == 1;
        (!keep).then(|| store.free(*h));
        keep
    });
    store.compact(u64::MAX);
    assert!(load(&store, &mut w, bad, order(2)).is_err());
    for (handle, folio) in saves.iter().filter(|(h, _)| *h != bad) {
        assert_same(&store, &mut w, &[*handle], folio, order(2));
    }
}

#[test]
fn dead_and_unknown_handles_are_errors_and_free_nothing() {
    let store = store_with(|c| c.pools = 2);
    let mut w = store.worker();
    let mut folio = Pages::new(1);
    Fill::Real(5).write(folio.page_mut(0));
    let dead = save(&store, &mut w, &folio, order(0), 1).unwrap()[0];
    store.free(dead);
    let alive = save(&store, &mut w, &folio, order(0), 1).unwrap()[0];
    assert_ne!(dead, alive, "the entry is reused under another generation");
    assert_eq!(dead.object().unwrap().index, alive.object().unwrap().index);
    let mut unknown = vec![dead, Handle::NONE, Handle::from_bits(2), Handle::from_bits(u64::MAX)];
    let mut random = Random::new(1);
    unknown.extend((0..10_000).map(|_| Handle::from_bits(random.word() >> random.below(64))));
    unknown
        .extend((0..10_000).map(|_| Handle::from_bits(alive.to_bits() ^ (1 << random.below(64)))));
    unknown.retain(|h| *h != alive && !h.is_zero());
    for handle in unknown {
        assert_eq!(
            load(&store, &mut w, handle, order(0)).unwrap_err().problem,
            LoadProblem::Unknown,
            "{handle:?}"
        );
        store.free(handle);
    }
    assert!(store.stats().bad_frees > 0);
    assert_same(&store, &mut w, &[alive], &folio, order(0));
    store.check().unwrap();
}

#[test]
fn a_wrong_order_is_an_error() {
    let store = store_with(|_| ());
    let mut w = store.worker();
    let mut folio = Pages::new(4);
    (0..4).for_each(|p| Fill::Real(p * 4096).write(folio.page_mut(p)));
    let handle = save(&store, &mut w, &folio, order(2), 1).unwrap()[0];
    let mut page = Pages::new(2);
    // SAFETY: the buffer has room for the pages.
    unsafe {
        store.load_pages(&mut w, handle, order(2), 0, 1, page.bytes_mut().as_mut_ptr()).unwrap()
    };
    for o in [0, 1, 3].map(order) {
        let error = load(&store, &mut w, handle, o).unwrap_err();
        assert_eq!(error.problem, LoadProblem::Order { expected: o.get(), found: 2 });
    }
    // SAFETY: the buffer has room for the pages. The block is in the cache, but with
    // another order.
    let partial =
        unsafe { store.load_pages(&mut w, handle, order(1), 0, 1, page.bytes_mut().as_mut_ptr()) };
    assert_eq!(partial.unwrap_err().problem, LoadProblem::Order { expected: 1, found: 2 });
}
