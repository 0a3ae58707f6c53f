//! The allocator of folded memory, and the vector in it. Row B2.
use memfold_engine::{FoldedVec, GRANULE_BYTES, Heap, Hint, Memory};
use std::sync::Arc;

const MIB: usize = 1 << 20;

fn heap() -> Heap {
    Heap::new(&Memory::builder().resident_bytes(16 << 20).build().unwrap())
}

/// Fills `words` words from `addr` on with what `seed` says.
fn fill(addr: usize, words: usize, seed: u64) {
    for i in 0..words {
        // SAFETY: callers give a piece of so many words that is theirs alone.
        unsafe { (addr as *mut u64).add(i).write(seed << 32 | i as u64) };
    }
}

fn holds(addr: usize, words: usize, seed: u64) -> bool {
    // SAFETY: callers give an aligned piece of at least so many words. The heap has filled it with
    // zeros at first, so each word is initialized. No other thread writes to it meanwhile.
    (0..words).all(|i| unsafe { (addr as *const u64).add(i).read() } == seed << 32 | i as u64)
}

#[test]
fn pieces_keep_bytes_through_eviction_and_restart_as_zeros() {
    let heap = heap();
    let words = 3 * MIB / 8 + 11;
    for round in 0..3 {
        let pieces: Vec<usize> =
            (0..12).map(|_| heap.alloc(words * 8).unwrap().as_ptr() as usize).collect();
        let is_zero = |&at: &usize| {
            // SAFETY: just allocated.
            let words = unsafe { std::slice::from_raw_parts(at as *const u64, words) };
            words.iter().all(|word| *word == 0)
        };
        assert!(pieces.iter().all(is_zero), "round {round}");
        pieces.iter().enumerate().for_each(|(n, &at)| fill(at, words, n as u64 + 7));
        assert!(pieces.iter().enumerate().all(|(n, &at)| holds(at, words, n as u64 + 7)));
        for at in pieces {
            // SAFETY: nothing uses it any more.
            unsafe { heap.free(at).unwrap() };
        }
    }
    assert_eq!(heap.allocated_bytes(), 0);
    heap.memory().check().unwrap();
}

#[test]
fn a_second_free_and_foreign_addresses_are_refused() {
    let heap = heap();
    let at = heap.alloc(100).unwrap().as_ptr() as usize;
    let local = 7u64;
    // SAFETY: refused, or not used any more.
    unsafe {
        assert!(heap.free(at + 8).is_err(), "the middle of a piece");
        assert!(heap.free(&raw const local as usize).is_err());
        heap.free(at).unwrap();
        assert!(heap.free(at).unwrap_err().to_string().contains("freed"));
        assert!(heap.resize(at, 200).is_err());
    }
    assert!(heap.hint(at..at + 10, Hint::Fold).is_err());
    assert!(
        heap.alloc(0).is_err() && heap.alloc(usize::MAX).is_err() && heap.alloc(1 << 50).is_err()
    );
    let at = heap.alloc(100).unwrap().as_ptr() as usize;
    assert!(
        heap.hint(at..at + GRANULE_BYTES + 1, Hint::Cold).is_err(),
        "past the end of the piece"
    );
    assert!(
        heap.pin(at..at + 10).is_ok()
            && heap.unpin(at..at + 11).is_err()
            && heap.unpin(at..at + 10).is_ok()
    );
}

#[test]
fn a_pin_ends_with_its_piece() {
    let heap = heap();
    let at = heap.alloc(MIB).unwrap().as_ptr() as usize;
    heap.pin(at..at + MIB).unwrap();
    assert_eq!(heap.hint(at..at + MIB, Hint::Fold).unwrap(), 0, "pinned");
    // SAFETY: nothing uses it any more.
    unsafe { heap.free(at).unwrap() };
    let again = heap.alloc(MIB).unwrap().as_ptr() as usize;
    assert_eq!(again, at);
    fill(again, MIB / 8, 3);
    assert!(
        heap.hint(again..again + MIB, Hint::Fold).unwrap() > 0,
        "the pin of its predecessor is gone"
    );
    assert!(holds(again, MIB / 8, 3));
}

#[test]
fn resized_pieces_keep_what_fits_and_grow_by_zeros() {
    let heap = heap();
    let mut at = heap.alloc(MIB).unwrap().as_ptr() as usize;
    fill(at, MIB / 8, 1);
    let neighbour = heap.alloc(MIB).unwrap().as_ptr() as usize;
    for (len, kept_bytes) in
        [(6 * MIB, MIB), (MIB / 2, MIB / 2), (9 * MIB, MIB / 2), (GRANULE_BYTES, GRANULE_BYTES)]
    {
        // SAFETY: only this test uses it, by its new address from now on.
        at = unsafe { heap.resize(at, len).unwrap().as_ptr() as usize };
        assert!(holds(at, kept_bytes / 8, 1), "{len}");
        // SAFETY: inside the piece.
        let rest =
            unsafe { std::slice::from_raw_parts((at + kept_bytes) as *const u8, len - kept_bytes) };
        assert!(rest.iter().all(|b| *b == 0), "{len}");
    }
    assert_eq!(heap.piece(neighbour + 5).unwrap(), neighbour..neighbour + MIB);
    assert_eq!(heap.allocated_bytes(), (MIB + GRANULE_BYTES) as u64);
}

#[test]
fn threads_share_a_heap() {
    let heap = heap();
    std::thread::scope(|scope| {
        for seed in 1..5 {
            let heap = &heap;
            scope.spawn(move || {
                for round in 0..30 {
                    let words = (64 + 700 * (round % 4)) * 1024 / 8;
                    let at = heap.alloc(words * 8).unwrap().as_ptr() as usize;
                    fill(at, words, seed);
                    assert!(holds(at, words, seed));
                    // SAFETY: this thread's alone.
                    unsafe { heap.free(at).unwrap() };
                }
            });
        }
    });
    heap.memory().check().unwrap();
}

#[test]
fn a_folded_vector_is_a_vector() {
    let heap = heap();
    let mut vec_folded = FoldedVec::new(&heap);
    let mut vec_plain = Vec::new();
    for n in 0..2_000_000u64 {
        vec_folded.push(n * n).unwrap();
        vec_plain.push(n * n);
    }
    vec_folded.extend_from_slice(&vec_plain[..1000]).unwrap();
    vec_plain.extend_from_within(..1000);
    assert!(vec_folded[..] == vec_plain[..]);
    vec_folded.sort_unstable_by(|a, b| b.cmp(a));
    vec_plain.sort_unstable_by(|a, b| b.cmp(a));
    assert!(vec_folded[..] == vec_plain[..] && vec_folded.pop() == vec_plain.pop());
    vec_folded.truncate(5);
    assert_eq!(vec_folded[..], vec_plain[..5]);
    assert!(vec_folded.reserve(usize::MAX).is_err() && vec_folded[..] == vec_plain[..5]);
    drop(vec_folded);
    assert_eq!(heap.allocated_bytes(), 0);
}

#[test]
fn a_folded_vector_drops_its_elements_once() {
    let (heap, counter) = (heap(), Arc::new(()));
    let mut vec = FoldedVec::with_capacity(&heap, 10).unwrap();
    for _ in 0..10_000 {
        vec.push(counter.clone()).unwrap();
    }
    vec.truncate(9000);
    drop(vec.pop());
    assert_eq!(Arc::strong_count(&counter), 1 + 8999);
    drop(vec);
    assert_eq!(Arc::strong_count(&counter), 1);
}

/// Pages of a range that are there.
fn there(addrs: std::ops::Range<usize>) -> usize {
    let mut bits = vec![0u8; addrs.len() / 4096];
    // SAFETY: only asks; there is a byte for each page.
    unsafe { libc::mincore(addrs.start as *mut _, addrs.len(), bits.as_mut_ptr()) };
    bits.iter().filter(|byte| **byte & 1 != 0).count()
}

/// The addresses are given out again, and what is there then can be folded.
#[test]
fn piece_that_is_freed_while_it_is_lent_is_pinned_no_more() {
    let (heap, len) = (heap(), 2 * MIB);
    let make = || (0..8).map(|_| heap.alloc(len).unwrap().as_ptr() as usize).collect::<Vec<_>>();
    let pieces = make();
    pieces.iter().for_each(|&at| fill(at, len / 8, 3));
    let gain = heap.lend().unwrap();
    // SAFETY: nothing uses them any more.
    let free = |at: &usize| unsafe { heap.free(*at).unwrap() };
    pieces[3..5].iter().for_each(free);
    let mut again = vec![heap.alloc(len).unwrap().as_ptr() as usize];
    heap.pin(again[0]..again[0] + len).unwrap();
    heap.take_back(gain);
    again.push(heap.alloc(len).unwrap().as_ptr() as usize);
    again.iter().for_each(|&at| fill(at, len / 8, 4));
    let fold = |at: usize| {
        (0..3).for_each(|_| _ = heap.hint(at..at + len, Hint::Fold).unwrap());
        there(at..at + len)
    };
    assert_eq!(fold(again[0]), len / 4096, "its own pin holds");
    heap.unpin(again[0]..again[0] + len).unwrap();
    let stuck_bytes = again.iter().chain(&pieces[..3]).map(|&at| fold(at)).sum::<usize>();
    assert_eq!(stuck_bytes, 0, "pages that can't leave");
    assert!(again.iter().all(|&at| holds(at, len / 8, 4)));
}

/// Each is larger than a region has room for beside another.
#[test]
fn regions_in_which_nothing_is_left_go_back_to_the_system() {
    let (heap, len) = (heap(), 12usize << 30);
    for _ in 0..200 {
        let pieces: Vec<usize> =
            (0..3).map(|_| heap.alloc(len).unwrap().as_ptr() as usize).collect();
        assert_eq!(heap.regions().count(), 3);
        for at in pieces {
            assert!(heap.owns(at));
            // SAFETY: nothing uses it any more.
            unsafe { heap.free(at).unwrap() };
        }
        assert_eq!(heap.regions().count(), 1);
    }
    heap.memory().check().unwrap();
}
