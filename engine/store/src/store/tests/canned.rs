//! Canned mode (Z8): dictionaries in every codec that takes them, their versions, and the gate.
use super::*;

/// Returns records that share words but differ in order and numbers: the use case of a dictionary.
fn records(seed: u64, page: &mut [u8]) {
    let mut random = Random::new(seed);
    let mut text = Vec::new();
    while text.len() < page.len() {
        let words = [
            "timestamp",
            "customer_identifier",
            "payment_status",
            "delivery_address",
            "currency",
            "EUR",
        ];
        let key = words[random.below(words.len())];
        text.extend(
            format!(
                "{{\"{key}\": {}, \"source\": \"node-{}\"}}\n",
                random.word() % 9999,
                random.below(50)
            )
            .bytes(),
        );
    }
    page.copy_from_slice(&text[..page.len()]);
}

fn dictionary(bytes: usize, seed: u64) -> Dictionary {
    let mut content = vec![0; bytes];
    records(seed, &mut content);
    Dictionary::new(DictionaryKind::Raw, content).unwrap()
}

fn folio(seed: u64, pages: usize) -> Pages {
    let mut folio = Pages::new(pages);
    (0..pages).for_each(|p| records(seed * 1000 + p as u64, folio.page_mut(p)));
    folio
}

fn store_of(spec: &str, block: u8) -> Store {
    store_with(|c| {
        c.codec = CodecSpec::parse(spec).unwrap();
        c.block_order = order(block);
    })
}

fn stored(store: &Store) -> u64 {
    store.stats().stored_bytes
}

#[test]
fn dictionaries_of_all_sizes_work_at_all_levels_and_orders() {
    let levels = (-7..=19).filter(|l| *l != 0).map(|level| format!("zstd:{level}"));
    for spec in levels.chain(["lz4".into(), "lz4:20".into()]) {
        for block in [0, 2, 4, 9] {
            let slow = spec.len() == 7;
            for bytes in [256, 5000, 65536] {
                let store = store_of(&spec, block);
                let mut w = store.worker();
                store.install_dictionary(&dictionary(bytes, 5)).unwrap();
                for o in if slow { vec![0, 4] } else { vec![block, 0] } {
                    let folio = folio(o.into(), order(o).pages());
                    let handles = save(&store, &mut w, &folio, order(o), 1).unwrap();
                    assert_same(&store, &mut w, &handles, &folio, order(o));
                    let mut other = store.worker_for(CodecSpec::parse("deflate").unwrap());
                    assert_same(&store, &mut other, &handles, &folio, order(o));
                }
                store.check().unwrap();
            }
        }
    }
}

#[test]
fn dictionary_shrinks_small_blocks_and_keeps_others_readable() {
    for spec in ["lz4", "zstd", "delta"] {
        let store = store_of(spec, 0);
        let mut w = store.worker();
        let plain_handles = save(&store, &mut w, &folio(1, 16), order(4), 1).unwrap();
        let off = stored(&store);
        store.install_dictionary(&dictionary(16384, 77)).unwrap();
        let canned = save(&store, &mut w, &folio(1, 16), order(4), 1).unwrap();
        let on = stored(&store) - off;
        assert!(on * 100 < off * 95, "{spec}: {on} of {off}");
        store.retire_dictionary();
        let after = save(&store, &mut w, &folio(1, 16), order(4), 1).unwrap();
        assert_eq!(stored(&store) - off - on, off, "retired");
        for handles in [&plain_handles, &canned, &after] {
            assert_same(&store, &mut w, handles, &folio(1, 16), order(4));
        }
    }
}

/// Returns pages of records and of other test data in turn; `records` of four are records.
fn mixed(seed: u64, records_of_4: usize) -> Pages {
    let mut folio = Pages::new(16);
    for page in 0..16 {
        let to = folio.page_mut(page);
        if (seed as usize + page / 4) % 4 < records_of_4 {
            records(seed * 100 + page as u64, to);
        } else {
            let from = (seed as usize * 16 + page) * 4096 % (corpus().len() - 4096);
            to.copy_from_slice(&corpus()[from..][..4096]);
        }
    }
    folio
}

#[test]
fn no_block_of_mixed_data_is_larger_for_a_dictionary() {
    for spec in ["lz4", "lz4:20", "zstd", "zstd:-5", "zstd:6"] {
        for block in [0, 2, 4] {
            let (off, on) = (store_of(spec, block), store_of(spec, block));
            on.install_dictionary(&dictionary(32768, 77)).unwrap();
            let (mut off_w, mut on_w) = (off.worker(), on.worker());
            for records_of_4 in [0, 1, 3, 4] {
                for seed in 0..12 {
                    let folio = mixed(seed, records_of_4);
                    let plain_handles = save(&off, &mut off_w, &folio, order(4), 1).unwrap();
                    let canned = save(&on, &mut on_w, &folio, order(4), 1).unwrap();
                    assert_same(&on, &mut on_w, &canned, &folio, order(4));
                    for (a, b) in plain_handles.iter().zip(&canned) {
                        let (off, on) = (off.payload_bytes(*a), on.payload_bytes(*b));
                        assert!(
                            on <= off,
                            "{spec}, blocks of order {block}: {on} bytes, {off} without"
                        );
                    }
                }
            }
            assert!(
                block > 0 || stored(&on) * 100 < stored(&off) * 98,
                "{spec}: it still wins where it can"
            );
            on.check().unwrap();
        }
    }
}

#[test]
fn old_dictionary_is_freed_after_its_last_object() {
    let store = store_of("zstd", 0);
    let mut w = store.worker();
    let empty = store.pool_bytes();
    let mut saves = Vec::new();
    for seed in 0..8 {
        store.install_dictionary(&dictionary(2000, seed)).unwrap();
        saves.push((save(&store, &mut w, &folio(seed, 4), order(2), 1).unwrap(), folio(seed, 4)));
    }
    assert_eq!(store.dictionaries().0, 8);
    assert_eq!(store.install_dictionary(&dictionary(2000, 9)), Err(CannedError::Slots));
    assert!(store.pool_bytes() - empty > store.dictionaries().1, "dictionaries count as held");
    for (handles, folio) in &saves {
        assert_same(&store, &mut w, handles, folio, order(2));
    }
    store.free_many(&saves[3].0);
    store.install_dictionary(&dictionary(2000, 9)).unwrap_err();
    w.decoders.sync(); // it listed the dictionary still, and was told not to
    store.install_dictionary(&dictionary(2000, 9)).unwrap();
    for (i, (handles, folio)) in saves.iter().enumerate().filter(|(i, _)| *i != 3) {
        assert_same(&store, &mut w, handles, folio, order(2));
        store.check().unwrap();
        store.free_many(handles);
        assert_eq!(store.dictionaries().0, 8, "{i} is freed by reaping only");
    }
    store.retire_dictionary();
    w.decoders.sync();
    assert_eq!((store.reap_dictionaries(), store.dictionaries()), (8, (0, 0)));
    store.check().unwrap();
}

#[test]
fn codecs_without_dictionaries_and_damaged_ones_are_refused() {
    for spec in ["none", "lz4hc", "deflate"] {
        let store = store_of(spec, 0);
        let error = store.install_dictionary(&dictionary(1000, 1)).unwrap_err();
        assert_eq!(error, CannedError::Codec(CodecSpec::parse(spec).unwrap()));
    }
    let content = [&0xEC30_A437u32.to_le_bytes()[..], &[0x5a; 1000]].concat();
    let bad = Dictionary::new(DictionaryKind::Zstd, content).unwrap();
    assert!(store_of("zstd", 0).install_dictionary(&bad).is_err(), "zstd finds its tables damaged");
    assert!(store_of("lz4", 0).install_dictionary(&bad).is_err());
}

#[test]
fn other_codecs_and_levels_do_not_take_the_dictionary() {
    let store = store_of("zstd", 0);
    store.install_dictionary(&dictionary(9000, 1)).unwrap();
    for spec in ["zstd:3", "lz4", "none"] {
        let mut w = store.worker_for(CodecSpec::parse(spec).unwrap());
        let handles = save(&store, &mut w, &folio(2, 4), order(2), 1).unwrap();
        assert_same(&store, &mut w, &handles, &folio(2, 4), order(2));
    }
    assert_eq!(
        store.pools[0].counters.dictionary_objects[0].load(std::sync::atomic::Ordering::SeqCst),
        0
    );
}

/// Saves folios until canned mode has judged, at most `folios`.
fn until_judged(
    store: &Store,
    w: &mut CodecWorker,
    folios: u64,
    fill: impl Fn(u64, &mut Pages),
) -> CannedStep {
    let mut pages = Pages::new(16);
    for seed in 0..folios {
        fill(seed, &mut pages);
        save(store, w, &pages, order(4), seed).unwrap();
        match store.canned_step() {
            CannedStep::Nothing => {}
            // It wins, but so little is held that it would not save its own memory.
            CannedStep::Off(comparison) if comparison.wins() => {}
            step => return step,
        }
    }
    CannedStep::Nothing
}

#[test]
fn canned_mode_uses_shared_content_and_skips_the_rest() {
    for spec in ["lz4", "zstd", "delta"] {
        let store = store_of(spec, 0);
        let mut w = store.worker();
        let share = |seed: u64, pages: &mut Pages| {
            (0..16).for_each(|p| records(seed * 16 + p, pages.page_mut(p as usize)))
        };
        assert_eq!(until_judged(&store, &mut w, 100, share), CannedStep::Nothing, "it is off");
        store.set_canned(true);
        let step = until_judged(&store, &mut w, 2000, share);
        let CannedStep::Installed(comparison) = step else { panic!("{spec}: {step:?}") };
        assert!(comparison.wins(), "{comparison:?}");
        let step = until_judged(&store, &mut w, 4000, share);
        assert!(matches!(step, CannedStep::Kept(_) | CannedStep::Installed(_)), "{step:?}");
        let noise = |seed: u64, pages: &mut Pages| {
            (0..16).for_each(|p| Fill::Random(seed * 16 + p as u64).write(pages.page_mut(p)))
        };
        store.set_canned(true);
        let step = until_judged(&store, &mut w, 2000, noise);
        assert!(matches!(step, CannedStep::Off(_)), "{step:?}");
        assert_eq!(store.cans.current(store.codec()).map(|c| c.bytes), None);
        store.check().unwrap();
    }
}

#[test]
fn a_dictionary_that_saves_less_than_it_takes_is_not_used() {
    let store = store_of("lz4", 0);
    let mut w = store.worker();
    store.set_canned(true);
    let mut pages = Pages::new(16);
    for seed in 0..400 {
        (0..16).for_each(|p| records(seed * 16 + p, pages.page_mut(p as usize)));
        let handles = save(&store, &mut w, &pages, order(4), seed).unwrap();
        store.free_many(&handles);
        match store.canned_step() {
            CannedStep::Nothing => {}
            CannedStep::Off(comparison) => {
                return assert!(comparison.wins(), "nothing is held that it could save");
            }
            step => panic!("{step:?}"),
        }
    }
    panic!("never judged");
}
