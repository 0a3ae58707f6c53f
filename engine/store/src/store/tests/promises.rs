//! The promises of rows Z1, Z2, Z7, M1, M2 and P1.
use super::*;
use crate::codec::CODECS;
use crate::format;

fn mixed_folio(o: Order, random: &mut Random) -> Pages {
    let mut folio = Pages::new(o.pages());
    for page in 0..o.pages() {
        Fill::any(random).write(folio.page_mut(page));
    }
    folio
}

#[test]
fn z1_z8_all_orders_and_codecs_return_their_bytes() {
    let mut random = Random::new(1);
    for spec in ["none", "lz4", "lz4:9", "lz4hc:2", "zstd", "zstd:-7", "zstd:3", "deflate", "delta"]
    {
        for block in 0..=9 {
            let store = store_with(|c| {
                c.codec = CodecSpec::parse(spec).unwrap();
                c.block_order = order(block);
                c.pools = 3;
            });
            let mut w = store.worker();
            let mut saves = Vec::new();
            for o in (0..=9).map(order) {
                let folio = mixed_folio(o, &mut random);
                let handles = save(&store, &mut w, &folio, o, o.get() as u64).unwrap();
                assert_eq!(handles.len(), o.pages() / o.min(order(block)).pages());
                assert_same(&store, &mut w, &handles, &folio, o);
                saves.push((handles, folio, o));
            }
            store.check().unwrap();
            for (handles, folio, o) in &saves {
                assert_same(&store, &mut w, handles, folio, *o);
                store.free_many(handles);
            }
            store.check().unwrap();
            let stats = store.stats();
            assert_eq!(
                (stats.objects, stats.stored_bytes, stats.original_bytes, stats.spans),
                (0, 0, 0, 0)
            );
            assert_eq!(stats.events.saves, [1; 10], "one folio of each order");
        }
    }
}

#[test]
fn z2_same_filled_pages_are_told_apart_inside_a_block() {
    let store = store_with(|c| c.block_order = order(3));
    let mut w = store.worker();
    let (zero, one, real) = (Fill::Zero, Fill::Pattern(0xab), Fill::Real(123_456));
    let cases: &[([Fill; 8], u64)] = &[
        ([zero; 8], 8),
        ([one; 8], 8),
        ([zero, one, zero, one, one, one, zero, Fill::Pattern(1)], 8),
        ([real, zero, zero, zero, zero, zero, zero, zero], 7),
        ([zero, zero, real, real, zero, zero, zero, zero], 6),
        ([real, one, real, one, real, one, real, one], 4),
        ([one, real, zero, real, Fill::Pattern(7), real, real, Fill::Random(3)], 3),
        ([Fill::Random(1), zero, Fill::Random(2), zero, Fill::Random(4), zero, zero, zero], 5),
        ([real; 8], 0),
    ];
    for (fills, same_pages) in cases {
        let mut folio = Pages::new(8);
        fills.iter().enumerate().for_each(|(i, f)| f.write(folio.page_mut(i)));
        let mut out = [Handle::NONE];
        let report =
            save_some(&store, &mut w, &folio, order(3), 1, &BlockSet::first(1), &mut out).unwrap();
        assert_eq!(report.same_pages, *same_pages, "{fills:?}");
        assert_same(&store, &mut w, &out, &folio, order(3));
        assert_eq!(out[0].is_zero(), fills == &[zero; 8]);
        if *same_pages == 8 {
            assert!(report.stored_bytes <= 80, "{fills:?} takes {}", report.stored_bytes);
            assert!((64..=80).contains(&report.counted_bytes), "{}", report.counted_bytes);
        } else {
            assert_eq!(report.counted_bytes, report.stored_bytes.max(64), "{fills:?}");
        }
        store.check().unwrap();
        store.free(out[0]);
    }
}

#[test]
fn zero_blocks_hold_no_memory_and_load_at_every_order() {
    let store = store_with(|c| c.block_order = order(9));
    let mut w = store.worker();
    let mut folio = Pages::new(512);
    folio.bytes_mut().fill(0);
    let handles = save(&store, &mut w, &folio, order(9), 1).unwrap();
    assert_eq!(handles, [Handle::ZERO]);
    assert_eq!(store.pool_bytes(), 0);
    for o in (0..=9).map(order) {
        assert!(load(&store, &mut w, Handle::ZERO, o).unwrap().iter().all(|b| *b == 0));
    }
    store.free(Handle::ZERO);
    store.free(Handle::NONE);
    assert_eq!(store.stats().bad_frees, 0);
}

#[test]
fn a_worker_keeps_its_codec_until_it_is_given_another() {
    let store = store_with(|_| ());
    let (mut w, folio) = (store.worker(), mixed_folio(order(4), &mut Random::new(4)));
    let mut saves = Vec::new();
    let formats = |store: &Store, handles: &[Handle]| {
        let format = |handle: &Handle| {
            let name = handle.object()?;
            Some(store.pools[name.pool as usize].entries.get(name.index)?.header().format)
        };
        handles
            .iter()
            .filter_map(format)
            .filter(|f| [format::DELTA, format::ZSTD, format::DEFLATE].contains(f))
            .collect::<Vec<u8>>()
    };
    for (next, before, after) in
        [("zstd", format::DELTA, format::ZSTD), ("deflate:6", format::ZSTD, format::DEFLATE)]
    {
        let spec = CodecSpec::parse(next).unwrap();
        store.set_codec(spec);
        saves.push(save(&store, &mut w, &folio, order(4), 1).unwrap());
        assert_eq!(
            formats(&store, &saves[saves.len() - 1]).first(),
            Some(&before),
            "{next}: it goes on with its own"
        );
        w.set_codec(store.codec());
        assert_eq!(w.codec(), spec);
        saves.push(save(&store, &mut w, &folio, order(4), 1).unwrap());
        assert_eq!(formats(&store, &saves[saves.len() - 1]).first(), Some(&after), "{next}");
        assert_eq!(store.worker().codec(), spec);
    }
    saves.iter().for_each(|handles| assert_same(&store, &mut w, handles, &folio, order(4)));
    store.check().unwrap();
}

#[test]
fn z8_objects_are_read_with_their_own_codec_after_a_switch() {
    let store = store_with(|_| ());
    let mut random = Random::new(3);
    let mut saves = Vec::new();
    for codec in CODECS {
        store.set_codec(CodecSpec::parse(codec.name).unwrap());
        let mut w = store.worker();
        assert_eq!(w.codec().name(), codec.name);
        let folio = mixed_folio(order(6), &mut random);
        saves.push((save(&store, &mut w, &folio, order(6), 1).unwrap(), folio));
    }
    for spec in ["none", "zstd:19"] {
        let mut w = store.worker_for(CodecSpec::parse(spec).unwrap());
        saves
            .iter()
            .for_each(|(handles, folio)| assert_same(&store, &mut w, handles, folio, order(6)));
    }
}

#[test]
fn only_the_chosen_blocks_are_saved_and_other_handles_stay() {
    let store = store_with(|_| ());
    let mut w = store.worker();
    let folio = mixed_folio(order(4), &mut Random::new(4));
    let mark = Handle::from_bits(42);
    let mut out = [mark; 4];
    let which: BlockSet = [1, 3].into_iter().collect();
    let report = save_some(&store, &mut w, &folio, order(4), 1, &which, &mut out).unwrap();
    assert_eq!((report.blocks, report.bytes), (2, 2 * 16384));
    assert!(out[0] == mark && out[2] == mark && out[1] != mark && out[3] != mark);
    for i in [1, 3] {
        assert!(
            load(&store, &mut w, out[i], order(2)).unwrap() == folio.bytes()[i * 16384..][..16384]
        );
    }
}

#[test]
fn p1_a_key_always_picks_the_same_pool_and_keys_spread_over_all() {
    for pools in [1, 2, 3, 32, 64] {
        let store = store_with(|c| c.pools = pools);
        let mut w = store.worker();
        let mut folio = Pages::new(1);
        Fill::Real(0).write(folio.page_mut(0));
        let mut pools_used = std::collections::HashSet::new();
        for key in 0..pools as u64 * 40 {
            let both: Vec<u8> = (0..2)
                .map(|_| {
                    save(&store, &mut w, &folio, order(0), key).unwrap()[0].object().unwrap().pool
                })
                .collect();
            assert_eq!(both[0], both[1]);
            pools_used.insert(both[0]);
        }
        assert_eq!(pools_used.len(), pools);
        store.check().unwrap();
        assert_eq!(store.stats().objects, pools as u64 * 80);
    }
    let error = |pools| Store::new(&StoreConfig { pools, ..Default::default() }).err();
    assert_eq!((error(0), error(65)), (Some(StoreError::Pools(0)), Some(StoreError::Pools(65))));
}

#[test]
fn z7_verify_mode_saves_the_same_and_counts_nothing() {
    let store = store_with(|c| c.verify = true);
    let mut w = store.worker();
    let folio = mixed_folio(order(9), &mut Random::new(5));
    let handles = save(&store, &mut w, &folio, order(9), 1).unwrap();
    assert_same(&store, &mut w, &handles, &folio, order(9));
    assert_eq!(store.stats().events.verify_mismatches, 0);
}

#[test]
fn blocks_that_do_not_shrink_are_stored_raw_or_refused() {
    let mut folio = Pages::new(4);
    (0..4).for_each(|p| Fill::Random(p as u64).write(folio.page_mut(p)));
    let store = store_with(|_| ());
    let mut w = store.worker();
    let mut out = [Handle::NONE];
    let report =
        save_some(&store, &mut w, &folio, order(2), 1, &BlockSet::first(1), &mut out).unwrap();
    assert_eq!((report.huge_blocks, report.stored_bytes), (1, 16384));
    assert_eq!(store.stats().events.dense_blocks, 0, "lz4 gives up by itself");
    let stats = store.stats();
    assert_eq!(
        stats.held_bytes - stats.metadata_bytes,
        16384,
        "a raw block takes exactly its pages"
    );
    assert_same(&store, &mut w, &out, &folio, order(2));
    let store = store_with(|c| c.refuse_incompressible = true);
    assert_eq!(
        save(&store, &mut store.worker(), &folio, order(2), 1),
        Err(SaveError::Incompressible)
    );
    assert_eq!((store.stats().objects, store.stats().events.refused_incompressible), (0, 1));
    let store = store_with(|c| c.codec = crate::CodecSpec::parse("zstd").unwrap());
    save(&store, &mut store.worker(), &folio, order(2), 1).unwrap();
    assert_eq!(store.stats().events.dense_blocks, 1, "zstd was spared");
}

/// Makes a store of two pools with every fourth of 400 folios. Returns these folios, and the
/// counters with all of them.
fn sparse_store(seed: u64) -> (Store, Vec<(Vec<Handle>, Pages)>, StoreStats) {
    let store = store_with(|c| c.pools = 2);
    let mut w = store.worker();
    let mut random = Random::new(seed);
    let mut saves: Vec<_> = (0..400)
        .map(|key| {
            let folio = mixed_folio(order(4), &mut random);
            (save(&store, &mut w, &folio, order(4), key).unwrap(), folio)
        })
        .collect();
    let full = store.stats();
    let mut index = 0;
    saves.retain(|(handles, _)| {
        index += 1;
        let keep = index % 4 == 0;
        (!keep).then(|| store.free_many(handles));
        keep
    });
    (store, saves, full)
}

#[test]
fn m2_compaction_empties_sparse_spans_and_keeps_every_byte() {
    let (store, saves, full) = sparse_store(6);
    let mut w = store.worker();
    store.check().unwrap();
    let sparse = store.stats();
    let bytes = store.compact(u64::MAX);
    store.check().unwrap();
    let compact = store.stats();
    assert_eq!(sparse.held_bytes - bytes, compact.held_bytes);
    assert_eq!(compact.warm_bytes, 0);
    assert!(compact.moved > 0);
    assert!(
        (compact.held_bytes - compact.metadata_bytes) * 2 < full.held_bytes,
        "{} of {} held for a quarter of the objects",
        compact.held_bytes,
        full.held_bytes
    );
    saves.iter().for_each(|(handles, folio)| assert_same(&store, &mut w, handles, folio, order(4)));
    saves.iter().for_each(|(handles, _)| store.free_many(handles));
    store.compact(u64::MAX);
    assert_eq!(store.pool_bytes(), store.stats().metadata_bytes);
    store.check().unwrap();
    let mut classes = 0;
    store.each_class(|_| classes += 1);
    assert_eq!(classes, 0);
}

#[test]
fn m2_bounded_tidying_packs_a_sparse_pool_and_stops() {
    let (store, saves, _) = sparse_store(16);
    let mut w = store.worker();
    let sparse = store.stats();
    let mut steps = 0;
    loop {
        let bytes = store.tidy();
        store.check().unwrap();
        if bytes == 0 {
            break;
        }
        assert!(bytes <= (256 << 10) + (128 << 10), "a step of {bytes} bytes");
        steps += 1;
    }
    let tidy = store.stats();
    println!("{steps} steps: {} of {} bytes held", tidy.held_bytes, sparse.held_bytes);
    assert!(steps > 3 && tidy.moved > 0);
    assert!(
        tidy.efficiency() > sparse.efficiency() * 1.3,
        "{} {}",
        tidy.efficiency(),
        sparse.efficiency()
    );
    assert_eq!((store.tidy(), store.stats().moved), (0, tidy.moved), "nothing is left to do");
    saves.iter().for_each(|(handles, folio)| assert_same(&store, &mut w, handles, folio, order(4)));
}

#[test]
fn m2_efficiency_stays_high_under_churn() {
    let store = store_with(|c| c.cached_blocks = 0);
    let mut w = store.worker();
    let mut random = Random::new(7);
    let mut live: Vec<Vec<Handle>> = Vec::new();
    let mut folio = Pages::new(16);
    for round in 0..6000 {
        // Only real data: same-filled pages would flatter the figure.
        let at = random.word() as usize;
        (0..16).for_each(|p| {
            Fill::Real(at % (corpus().len() - 65536) + p * PAGE_SIZE).write(folio.page_mut(p))
        });
        if live.len() >= 800 {
            let victim = live.swap_remove(random.below(800));
            store.free_many(&victim);
        }
        live.push(save(&store, &mut w, &folio, order(4), round).unwrap());
    }
    store.check().unwrap();
    let before = store.stats();
    store.compact(u64::MAX);
    store.check().unwrap();
    let after = store.stats();
    println!(
        "churn: stored {} KiB, held {} KiB ({} KiB warm, {} KiB metadata), efficiency {:.3}; compacted: held {} KiB, {:.3}",
        before.stored_bytes >> 10,
        before.held_bytes >> 10,
        before.warm_bytes >> 10,
        before.metadata_bytes >> 10,
        before.efficiency(),
        after.held_bytes >> 10,
        after.efficiency()
    );
    assert!(before.efficiency() > 0.80 && after.efficiency() > 0.88);
}

#[test]
fn held_bytes_are_what_the_kernel_sees() {
    let store = store_with(|c| c.pools = 2);
    let mut w = store.worker();
    let mut random = Random::new(8);
    let saves: Vec<_> = (0..100)
        .map(|k| save(&store, &mut w, &mixed_folio(order(6), &mut random), order(6), k).unwrap())
        .collect();
    saves.iter().step_by(2).for_each(|h| store.free_many(h));
    let resident = store.resident_bytes();
    let held_bytes = store.pool_bytes();
    assert!(resident <= held_bytes, "{resident} resident but {held_bytes} counted");
    assert!(resident * 100 > held_bytes * 85, "{resident} resident but {held_bytes} counted");
    store.compact(u64::MAX);
    let resident = store.resident_bytes();
    assert!(resident <= store.pool_bytes() && resident * 100 > store.pool_bytes() * 85);
}

#[test]
fn emptied_spans_are_kept_within_the_allowance_and_reused() {
    for (pools, allowance) in [(1, 1 << 20), (4, 4 * (256 << 10)), (8, 8 * (256 << 10))] {
        let store = store_with(|c| c.pools = pools);
        let mut w = store.worker();
        let mut random = Random::new(9);
        let save_one = |k: u64| {
            save(&store, &mut w, &mixed_folio(order(6), &mut random), order(6), k << 9).unwrap()
        };
        let handles: Vec<_> = (0..120u64).flat_map(save_one).collect();
        let full = store.stats();
        for handle in &handles {
            store.free(*handle);
            let warm = store.stats().warm_bytes;
            assert!(
                warm <= allowance + (full.held_bytes >> 6) + pools as u64 * (128 << 10),
                "{pools} pools: {warm}"
            );
        }
        store.check().unwrap();
        let warm = store.stats().warm_bytes;
        assert!(warm > 0);
        let bytes = store.trim();
        assert_eq!(store.stats().warm_bytes, warm - bytes);
        assert!(bytes > 0 && store.stats().warm_bytes <= allowance / 2, "{pools} pools");
        store.check().unwrap();
    }
}
