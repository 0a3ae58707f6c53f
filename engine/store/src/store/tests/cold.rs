//! Z10 and M9: limits with hysteresis, the shrinker's second chance, recompression.
use super::*;
use std::collections::{HashMap, HashSet};

fn real(o: Order, at: usize) -> Pages {
    let mut folio = Pages::new(o.pages());
    (0..o.pages()).for_each(|p| Fill::Real(at + p * PAGE_SIZE).write(folio.page_mut(p)));
    folio
}

/// Saves `count` real folios of order 4 with keys 16 pages apart, from key 1000 on.
fn filled(store: &Store, w: &mut CodecWorker, count: usize) -> Vec<(Vec<Handle>, Pages)> {
    let one = |i: usize| {
        let folio = real(order(4), i * 70_000);
        (save(store, w, &folio, order(4), 1000 + 16 * i as u64).unwrap(), folio)
    };
    (0..count).map(one).collect()
}

#[test]
fn z10_full_pool_accepts_saves_again_below_the_threshold() {
    let max = 2u64 << 20;
    let store = store_with(|c| {
        c.pool_bytes_max = max;
        c.accept_percent = 60;
    });
    let mut w = store.worker();
    let mut live = Vec::new();
    let refusal = loop {
        let folio = real(order(4), live.len() * 70_000);
        match save(&store, &mut w, &folio, order(4), 1) {
            Ok(handles) => live.push(handles),
            Err(error) => break error,
        }
        assert!(live.len() < 1000);
    };
    assert_eq!(refusal, SaveError::PoolFull);
    let folio = real(order(0), 5);
    let mut taken_at = None;
    while let Some(handles) = live.pop() {
        store.free_many(&handles);
        store.compact(u64::MAX);
        let held_bytes = store.pool_bytes();
        let outcome = save(&store, &mut w, &folio, order(0), 1);
        assert_eq!(outcome.is_ok(), held_bytes <= max * 60 / 100, "{held_bytes} held: {outcome:?}");
        if outcome.is_ok() {
            taken_at = Some(held_bytes);
            break;
        }
    }
    assert!(taken_at.is_some_and(|bytes| bytes > max / 3), "{taken_at:?}");
    // Between the threshold and the limit, saves are accepted until the next refusal.
    assert!((0..20).all(|i| save(&store, &mut w, &real(order(2), i * 9999), order(2), 1).is_ok()));
    store.check().unwrap();
    let error = Store::new(&StoreConfig { accept_percent: 101, ..Default::default() }).err();
    assert_eq!(error, Some(StoreError::AcceptPercent(101)));
}

/// Returns everything that the shrinker names in one turn.
fn named(store: &Store, out: &mut [ColdObject]) -> Vec<ColdObject> {
    let count = store.coldest(100_000, out);
    out[..count].to_vec()
}

#[test]
fn z10_what_takes_the_place_of_stored_data_is_not_refused() {
    let store = store_with(|c| c.pool_bytes_max = 1 << 20);
    let mut w = store.worker();
    let mut seed = 0;
    let mut next = || {
        seed += 70_000;
        real(order(4), seed)
    };
    while save(&store, &mut w, &next(), order(4), 1).is_ok() {}
    let is_past = store.past_limit();
    let answers: Vec<_> = (0..8).map(|_| next()).collect();
    let handles: Vec<_> =
        answers.iter().map(|folio| save(&store, &mut w, folio, order(4), 1).unwrap()).collect();
    drop(is_past);
    assert_eq!(save(&store, &mut w, &next(), order(4), 1), Err(SaveError::PoolFull));
    answers
        .iter()
        .zip(&handles)
        .for_each(|(folio, handles)| assert_same(&store, &mut w, handles, folio, order(4)));
    store.check().unwrap();
}

#[test]
fn z10_the_shrinker_names_what_was_not_used_since_its_last_look() {
    let store = store_with(|c| c.pools = 3);
    let mut w = store.worker();
    let saves = filled(&store, &mut w, 50);
    let mut out = [ColdObject::NONE; 400];
    assert_eq!(store.coldest(200 + 3, &mut out), 0, "what is new has its second chance");
    let used_handles: HashSet<_> =
        saves.iter().step_by(3).flat_map(|(handles, _)| handles.clone()).collect();
    saves
        .iter()
        .step_by(3)
        .for_each(|(handles, folio)| assert_same(&store, &mut w, handles, folio, order(4)));
    let cold = named(&store, &mut out);
    let keys: HashMap<_, _> = saves
        .iter()
        .enumerate()
        .flat_map(|(i, (handles, _))| {
            handles.iter().enumerate().map(move |(b, h)| (*h, 1000 + 16 * i + 4 * b))
        })
        .collect();
    assert!(cold.len() >= keys.len() - used_handles.len());
    // The hand may have completed a turn. Only then may a used object be named, after its second
    // chance.
    let first_turn: Vec<_> = cold.iter().take(keys.len() - used_handles.len()).collect();
    assert!(first_turn.iter().all(|c| !used_handles.contains(&c.handle)));
    assert!(cold.iter().all(|c| c.key == keys[&c.handle] as u64 && c.order == order(2)));
    saves.iter().for_each(|(handles, _)| store.free_many(handles));
    assert_eq!(named(&store, &mut out), [], "freed objects are not named");
    store.check().unwrap();
}

#[test]
fn z10_a_look_is_bounded_and_goes_on_where_it_ended() {
    let store = store_with(|_| ());
    let mut w = store.worker();
    let saves = filled(&store, &mut w, 25);
    let mut out = [ColdObject::NONE; 7];
    store.coldest(100, &mut out);
    let mut handles_seen = HashSet::new();
    for _ in 0..100 {
        let count = store.coldest(10, &mut out);
        assert!(count <= 7);
        handles_seen.extend(out[..count].iter().map(|c| c.handle));
    }
    assert_eq!(handles_seen.len(), saves.iter().map(|(handles, _)| handles.len()).sum::<usize>());
}

#[test]
fn m9_idle_and_huge_objects_become_smaller_and_keep_their_bytes() {
    for verify in [false, true] {
        let store = store_with(|c| c.verify = verify);
        let mut w = store.worker();
        let mut saves = filled(&store, &mut w, 40);
        let mut raw = Pages::new(4);
        (0..4).for_each(|p| Fill::Random(p as u64).write(raw.page_mut(p)));
        let huge = save(&store, &mut w, &raw, order(2), 5).unwrap();
        let mut out = [ColdObject::NONE; 300];
        let count = store.to_recompress(3, 1000, &mut out);
        assert!(
            out[..count].iter().all(|c| c.is_huge && c.idle_ticks == 0),
            "nothing else is idle yet"
        );
        assert!(out[..count].iter().any(|c| c.handle == huge[0]));
        (0..3).for_each(|_| _ = store.tick());
        let busy = saves[7].0[1];
        load(&store, &mut w, busy, order(2)).unwrap();
        let before = store.stats();
        let mut strong = store.worker_for(CodecSpec::parse("zstd:9").unwrap());
        let count = store.to_recompress(3, 1000, &mut out);
        let due_handles: HashSet<_> = out[..count].iter().map(|c| c.handle).collect();
        assert!(due_handles.len() > 100 && !due_handles.contains(&busy));
        let mut smaller = 0;
        for handle in due_handles {
            // SAFETY: only this test frees its handles.
            let new = unsafe { store.recompress(&mut strong, handle, order(2)) }.unwrap();
            let Some(new) = new else { continue };
            let slots = saves.iter_mut().flat_map(|(handles, _)| handles.iter_mut());
            for slot in slots.filter(|slot| **slot == handle) {
                *slot = new;
            }
            store.free(handle);
            smaller += 1;
        }
        store.check().unwrap();
        let after = store.stats();
        println!(
            "{smaller} recompressed: {} -> {} bytes stored",
            before.stored_bytes, after.stored_bytes
        );
        assert!(smaller > 100 && after.stored_bytes < before.stored_bytes * 9 / 10);
        assert_eq!(after.events.recompressed, smaller);
        assert_eq!(before.stored_bytes - after.stored_bytes, after.events.recompress_gained);
        saves
            .iter()
            .for_each(|(handles, folio)| assert_same(&store, &mut w, handles, folio, order(4)));
        (0..9).for_each(|_| _ = store.tick());
        let count = store.to_recompress(3, 1000, &mut out);
        assert!(out[..count].iter().all(|c| c.handle == busy), "each object is tried once");
        assert_eq!(after.events.verify_mismatches, 0);
    }
}

#[test]
fn m9_a_damaged_object_is_refused_and_stays() {
    let store = store_with(|_| ());
    let mut w = store.worker();
    store.faults().strike_at(InjectedFault::Stored, 1);
    let handle = save(&store, &mut w, &real(order(2), 0), order(2), 1).unwrap()[0];
    let mut strong = store.worker_for(CodecSpec::parse("zstd:9").unwrap());
    // SAFETY: only this test frees its handles.
    let error = unsafe { store.recompress(&mut strong, handle, order(2)) }.unwrap_err();
    assert!(matches!(error.problem, LoadProblem::Checksum { .. }), "{error}");
    assert_eq!((store.stats().objects, store.stats().events.failed_loads), (1, 1));
}
