//! M3, M7: reading a part of a block decompresses it once.
use super::*;
use core::ops::Range;
use std::sync::Barrier;

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
    for cached_blocks in [0, 1, 4] {
        let store = store_with(|c| {
            c.codec = CodecSpec::parse("lz4").unwrap();
            c.block_order = order(4);
            c.cached_blocks = cached_blocks;
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
        // The load of all pages takes them from the cache, but isn't what it is for.
        let (hits, misses) = if cached_blocks == 0 { (0, 19) } else { (19, 1) };
        let events = &stats.events;
        assert_eq!((events.block_cache_hits, events.block_cache_misses), (hits, misses));
        assert_eq!(events.partial_loads, 19);
        assert_eq!(events.loads[4], 20 - hits);
        let rate = hits as f64 / (hits + misses) as f64;
        assert!((stats.block_cache_hit_rate() - rate).abs() < 1e-9);
        store.check().unwrap();
    }
}

/// Loads pages to their places in a block.
fn load_in_place(
    store: &Store,
    w: &mut CodecWorker,
    handle: Handle,
    o: Order,
    pages: Range<usize>,
) -> (Vec<u8>, CacheUse) {
    let mut block = Pages::new(o.pages());
    let to = block.bytes_mut().as_mut_ptr();
    // SAFETY: the buffer has room for the block, and is ours.
    let cache = unsafe { store.load_in_place(w, handle, o, pages.clone(), to).unwrap() };
    (block.bytes()[pages.start * PAGE_SIZE..pages.end * PAGE_SIZE].to_vec(), cache)
}

/// A block of numbers, which `+shuffle` splits into planes.
fn numbers() -> Pages {
    let mut folio = Pages::new(4);
    for (i, word) in folio.bytes_mut().chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&(i as u64 * 3).to_ne_bytes());
    }
    folio
}

#[test]
fn m7_pages_in_place_use_the_cache_only_where_the_codec_goes_on() {
    let mut real = Pages::new(4);
    (0..4).for_each(|p| Fill::Real(p * 4096).write(real.page_mut(p)));
    for (codec, folio, is_cached) in [
        ("lz4", &real, false),
        ("lz4hc", &real, false),
        ("none", &real, false),
        ("delta", &real, false),
        ("delta", &numbers(), false),
        ("zstd", &real, true),
        ("zstd:-5", &real, true),
        ("deflate", &real, true),
        ("lz4+shuffle", &numbers(), true),
        ("zstd+shuffle", &numbers(), true),
    ] {
        let store = store_with(|c| c.codec = CodecSpec::parse(codec).unwrap());
        let mut w = store.worker();
        let handle = save(&store, &mut w, folio, order(2), 1).unwrap()[0];
        let uses = [2..3, 0..1, 3..4, 1..4, 0..4].map(|pages| {
            let (bytes, cache) = load_in_place(&store, &mut w, handle, order(2), pages.clone());
            let all = pages.start * PAGE_SIZE..pages.end * PAGE_SIZE;
            assert!(bytes == folio.bytes()[all], "{codec} {pages:?}");
            cache
        });
        let expected = if is_cached {
            [CacheUse::Miss, CacheUse::Hit, CacheUse::Hit, CacheUse::Hit, CacheUse::Hit]
        } else {
            [CacheUse::Unused; 5]
        };
        assert_eq!(uses, expected, "{codec}");
        let loads = store.stats().events.loads[2];
        assert_eq!(loads, if is_cached { 1 } else { 5 }, "{codec}");
    }
}

#[test]
fn pages_beside_same_filled_ones_load_alone() {
    let store = store_with(|c| {
        c.codec = CodecSpec::parse("delta").unwrap();
        c.block_order = order(3);
    });
    let mut w = store.worker();
    for same_bits in [0b0000_0000u8, 0b0010_0100, 0b1100_0001, 0b0101_0101, 0b0111_1111] {
        let mut folio = Pages::new(8);
        (0..8).for_each(|page| {
            let is_same = same_bits >> page & 1 != 0;
            for (at, word) in folio.page_mut(page).chunks_exact_mut(8).enumerate() {
                let value = if is_same { page } else { 4096 * page + 48 * at };
                word.copy_from_slice(&value.to_ne_bytes());
            }
        });
        let handle = save(&store, &mut w, &folio, order(3), 1).unwrap()[0];
        for first in 0..8 {
            for last in first + 1..=8 {
                let expected = &folio.bytes()[first * PAGE_SIZE..last * PAGE_SIZE];
                let (bytes, _) = load_in_place(&store, &mut w, handle, order(3), first..last);
                assert!(bytes == expected, "{same_bits:b}, {first}..{last} in place");
                let bytes = load_page(&store, &mut w, handle, order(3), first, last - first);
                assert!(bytes == expected, "{same_bits:b}, {first}..{last}");
            }
        }
        store.free(handle);
    }
    let events = store.stats().events;
    assert_eq!((events.block_cache_hits, events.block_cache_misses), (0, 0));
    store.check().unwrap();
}

#[test]
fn m7_cached_blocks_count_as_held_from_their_first_use() {
    let store = store_with(|c| (c.codec, c.cached_blocks) = (CodecSpec::parse("zstd").unwrap(), 2));
    let mut w = store.worker();
    let folio = numbers();
    let handles: Vec<_> =
        (0..3).map(|key| save(&store, &mut w, &folio, order(2), key).unwrap()[0]).collect();
    let held_bytes = store.pool_bytes();
    for (handle, blocks) in [(0, 1), (0, 1), (1, 2), (2, 2), (0, 2)] {
        load_page(&store, &mut w, handles[handle], order(2), 1, 1);
        assert_eq!(store.pool_bytes(), held_bytes + blocks * order(2).bytes() as u64);
        store.check().unwrap();
    }
}

#[test]
fn m7_a_freed_block_is_forgotten_and_the_oldest_is_replaced() {
    let store = store_with(|c| {
        c.codec = CodecSpec::parse("lz4").unwrap();
        c.cached_blocks = 2;
    });
    let mut w = store.worker();
    let blocks: Vec<_> = (0..3)
        .map(|i| {
            let mut folio = Pages::new(4);
            (0..4).for_each(|p| Fill::Real(i * 70_000 + p * 4096).write(folio.page_mut(p)));
            save(&store, &mut w, &folio, order(2), 1).unwrap()[0]
        })
        .collect();
    let mut read_block = |i: usize| {
        let before = store.stats().events.block_cache_hits;
        load_page(&store, &mut w, blocks[i], order(2), 1, 1);
        store.stats().events.block_cache_hits > before
    };
    let hits = [0, 1, 0, 2, 0, 1].map(&mut read_block);
    assert_eq!(hits, [false, false, true, false, true, false]);
    store.free(blocks[0]);
    let mut page = Pages::new(1);
    // SAFETY: the buffer has room for the page.
    let outcome = unsafe {
        store.load_pages(&mut w, blocks[0], order(2), 1, 1, page.bytes_mut().as_mut_ptr())
    };
    assert_eq!(outcome.unwrap_err().problem, LoadProblem::Unknown);
    assert!(load_page(&store, &mut w, Handle::ZERO, order(2), 2, 2).iter().all(|b| *b == 0));
}

#[test]
fn m7_no_handle_is_not_found_in_an_empty_slot() {
    let store = store_with(|_| ());
    let mut w = store.worker();
    let mut page = Pages::new(1);
    let to = page.bytes_mut().as_mut_ptr();
    // SAFETY: the buffer has room for the page.
    let outcome = unsafe { store.load_pages(&mut w, Handle::NONE, order(2), 1, 1, to) };
    assert_eq!(outcome.unwrap_err().problem, LoadProblem::Unknown);
}

/// Loads pages of a block in both ways, and compares.
fn assert_pages(
    store: &Store,
    w: &mut CodecWorker,
    handle: Handle,
    folio: &Pages,
    random: &mut Random,
) {
    let first = random.below(4);
    let end = first + 1 + random.below(4 - first);
    let expected = &folio.bytes()[first * PAGE_SIZE..end * PAGE_SIZE];
    let outcome = if random.below(2) == 0 {
        load_in_place(store, w, handle, order(2), first..end).0
    } else {
        load_page(store, w, handle, order(2), first, end - first)
    };
    assert!(outcome == expected, "{first}..{end}");
}

/// Saves, loads, frees and recompresses this thread's own blocks, and loads those of all.
fn use_blocks(store: &Store, shared: &[(Handle, Pages)], me: u64) {
    let (mut w, mut strong) =
        (store.worker(), store.worker_for(CodecSpec::parse("zstd:6").unwrap()));
    let mut random = Random::new(me);
    let mut own: Vec<(Handle, Pages)> = Vec::new();
    for round in 0..1500 {
        match random.below(8) {
            0 if own.len() > 4 => store.free(own.swap_remove(random.below(own.len())).0),
            1 if !own.is_empty() => {
                let at = random.below(own.len());
                // SAFETY: only this thread frees its handles.
                let new = unsafe { store.recompress(&mut strong, own[at].0, order(2)).unwrap() };
                if let Some(new) = new {
                    store.free(std::mem::replace(&mut own[at].0, new));
                }
            }
            2 | 3 if own.len() < 12 => {
                let mut folio = Pages::new(4);
                (0..4).for_each(|p| Fill::any(&mut random).write(folio.page_mut(p)));
                let handle = save(store, &mut w, &folio, order(2), round % 3).unwrap()[0];
                assert_pages(store, &mut w, handle, &folio, &mut random);
                own.push((handle, folio));
            }
            4 | 5 => {
                let (handle, folio) = &shared[random.below(shared.len())];
                assert_pages(store, &mut w, *handle, folio, &mut random);
            }
            _ if !own.is_empty() => {
                let (handle, folio) = &own[random.below(own.len())];
                assert_pages(store, &mut w, *handle, folio, &mut random);
            }
            _ => {}
        }
    }
    own.iter().for_each(|(handle, _)| store.free(*handle));
}

#[test]
fn m7_no_thread_reads_a_stale_block_from_the_cache() {
    for (codec, cached_blocks) in [("zstd", 0), ("zstd", 1), ("deflate", 4), ("lz4", 4)] {
        let store = store_with(|c| {
            (c.codec, c.cached_blocks) = (CodecSpec::parse(codec).unwrap(), cached_blocks)
        });
        let (mut w, mut random) = (store.worker(), Random::new(9));
        let handles: Vec<_> = (0..5)
            .map(|key| {
                let mut folio = Pages::new(4);
                (0..4).for_each(|p| Fill::any(&mut random).write(folio.page_mut(p)));
                (save(&store, &mut w, &folio, order(2), key).unwrap()[0], folio)
            })
            .collect();
        let start = Barrier::new(4);
        std::thread::scope(|scope| {
            for me in 0..4 {
                let (store, handles, start) = (&store, &handles, &start);
                scope.spawn(move || {
                    start.wait();
                    use_blocks(store, handles, me);
                });
            }
            (0..20).for_each(|_| {
                store.compact(u64::MAX);
            });
        });
        store.check().unwrap();
        let events = store.stats().events;
        assert_eq!(events.block_cache_hits > 0, cached_blocks > 0, "{codec}");
        assert!(events.block_cache_misses > 0 && events.recompressed > 0, "{codec}");
    }
}
