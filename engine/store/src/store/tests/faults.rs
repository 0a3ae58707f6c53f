//! Z3: a save is all or nothing, whichever block fails and however.
use super::*;
use std::cell::Cell;

fn folio() -> Pages {
    let mut folio = Pages::new(64);
    let mut random = Random::new(11);
    (0..64).for_each(|p| Fill::any(&mut random).write(folio.page_mut(p)));
    // Every block has an object and bytes that compress, so that every fault can strike in every
    // block.
    (0..16).for_each(|b| Fill::Real(b * 50_000).write(folio.page_mut(b * 4 + 1)));
    folio
}

/// Saves with a failing block and checks that `error` is the only effect.
fn assert_nothing_stays(
    store: &Store,
    w: &mut CodecWorker,
    error: SaveError,
    cancel: impl Fn() -> bool,
) {
    let folio = folio();
    let mark = Handle::from_bits(99);
    let mut out = [mark; 16];
    let before = store.stats();
    // SAFETY: the folio has 64 pages and is borrowed.
    let outcome = unsafe {
        store.save(w, folio.bytes().as_ptr(), order(6), 1, &BlockSet::first(16), cancel, &mut out)
    };
    assert_eq!(outcome, Err(error));
    assert_eq!(out, [mark; 16], "the handles are untouched");
    store.check().unwrap();
    let after = store.stats();
    assert_eq!(
        (after.objects, after.stored_bytes, after.spans),
        (before.objects, before.stored_bytes, before.spans)
    );
    assert_eq!(after.bad_frees, 0);
    assert_eq!(
        (after.events.saves, after.events.blocks_saved),
        (before.events.saves, before.events.blocks_saved)
    );
}

#[test]
fn z3_a_fault_in_any_block_leaves_nothing() {
    let store = store_with(|c| c.verify = true);
    let mut w = store.worker();
    let others = save(&store, &mut w, &folio(), order(6), 1).unwrap();
    for nth in 1..=16 {
        for (fault, error) in [
            (InjectedFault::Codec, SaveError::Codec(CodecError(0))),
            (InjectedFault::PoolFull, SaveError::PoolFull),
            (InjectedFault::Compressed, SaveError::Verify),
        ] {
            store.faults().clear();
            store.faults().strike_at(fault, nth);
            assert_nothing_stays(&store, &mut w, error, || false);
        }
        store.faults().clear();
        let polls = Cell::new(0);
        let cancel = || polls.replace(polls.get() + 1) + 1 == nth;
        assert_nothing_stays(&store, &mut w, SaveError::Cancelled, cancel);
    }
    let events = store.stats().events;
    assert_eq!(
        (events.codec_failures, events.refused_full, events.verify_mismatches, events.cancelled),
        (16, 16, 16, 16)
    );
    assert_same(&store, &mut w, &others, &folio(), order(6));
}

#[test]
fn z3_full_pool_keeps_no_part_and_saves_again_after_frees() {
    let store = store_with(|c| {
        c.pool_bytes_max = 1 << 20;
        c.accept_percent = 100;
    });
    let mut w = store.worker();
    let folio = folio();
    let mut saves = Vec::new();
    let error = loop {
        match save(&store, &mut w, &folio, order(6), 1) {
            Ok(handles) => saves.push(handles),
            Err(error) => break error,
        }
    };
    assert_eq!(error, SaveError::PoolFull);
    assert!(saves.len() > 3);
    store.check().unwrap();
    let metadata = store.stats().metadata_bytes;
    assert!(store.stats().held_bytes_peak <= (1 << 20) + metadata);
    assert_eq!(
        store.stats().objects as usize,
        saves.iter().flatten().filter(|h| h.object().is_some()).count()
    );
    saves.iter().for_each(|h| assert_same(&store, &mut w, h, &folio, order(6)));
    saves.drain(..2).for_each(|h| store.free_many(&h));
    assert!(save(&store, &mut w, &folio, order(6), 1).is_ok());
    store.set_pool_bytes_max(0);
    assert!((0..20).all(|_| save(&store, &mut w, &folio, order(6), 1).is_ok()));
}

#[test]
fn a_full_pool_compacts_itself_before_it_refuses() {
    let store = store_with(|c| c.pool_bytes_max = 2 << 20);
    let mut w = store.worker();
    let folio = folio();
    let mut handles = Vec::new();
    while let Ok(more) = save(&store, &mut w, &folio, order(6), 1) {
        handles.extend(more);
    }
    // Every second object is freed: no whole folio is free, but half of the bytes are.
    let mut index = 0;
    handles.retain(|h| {
        index += 1;
        let keep = index % 2 == 0;
        (!keep).then(|| store.free(*h));
        keep
    });
    let mut small = Pages::new(1);
    Fill::Random(1).write(small.page_mut(0));
    for key in 0..50 {
        save(&store, &mut w, &small, order(0), key).unwrap();
    }
    store.check().unwrap();
}

#[test]
fn a_bit_flipped_in_the_store_is_an_error_at_load() {
    let store = store_with(|_| ());
    let mut w = store.worker();
    store.faults().strike_at(InjectedFault::Stored, 3);
    let folio = folio();
    let handles = save(&store, &mut w, &folio, order(6), 1).unwrap();
    for (i, handle) in handles.iter().enumerate() {
        let outcome = load(&store, &mut w, *handle, order(2));
        assert_eq!(outcome.is_err(), i == 2, "block {i}");
        if let Err(error) = outcome {
            assert!(matches!(error.problem, LoadProblem::Checksum { .. }));
            assert!(error.to_string().contains("expected checksum"));
        }
    }
    assert_eq!(store.stats().events.failed_loads, 1);
}

#[test]
fn codec_fault_goes_unseen_without_verify_mode() {
    let store = store_with(|c| c.codec = CodecSpec::parse("none").unwrap());
    store.faults().strike_every(InjectedFault::Compressed, 1);
    // Nothing is compressed, so there is no chance for the fault.
    save(&store, &mut store.worker(), &folio(), order(6), 1).unwrap();
    assert_eq!(store.faults().struck(InjectedFault::Compressed), 0);
    store.set_codec(CodecSpec::default());
    let _ = save(&store, &mut store.worker(), &folio(), order(6), 1).unwrap();
    assert_eq!(store.faults().struck(InjectedFault::Compressed), 16);
    store.set_verify(true);
    assert_eq!(save(&store, &mut store.worker(), &folio(), order(6), 1), Err(SaveError::Verify));
}
