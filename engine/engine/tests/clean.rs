//! What is loaded for a read is protected, and dropped while it is clean: with real faults, no write
//! is lost, and what is pinned may be written to by the kernel. Rows C1, C2.
use memfold_engine::{Delivery, Memory, Region};
use memfold_os::units::PAGE_SIZE;
use memfold_testkit::random::{Random, seed};
use memfold_testkit::sharer::Sharer;
use std::io::Read;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const RESIDENT: u64 = 8 << 20;

fn memory(block: &str) -> Memory {
    let builder = Memory::builder().resident_bytes(RESIDENT).delivery(Delivery::Signal);
    builder.set("block", block).build().unwrap()
}

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Relaxed)
}

/// Word `n` of a page.
fn word(region: &Region, page: usize, n: usize) -> &AtomicU64 {
    assert!((page + 1) * PAGE_SIZE <= region.len() && n < PAGE_SIZE / 8);
    // SAFETY: in the region, aligned, and used by no other means while tests count there.
    unsafe { &*region.as_ptr().add(page * PAGE_SIZE).cast::<AtomicU64>().add(n) }
}

/// Fills a region with what compresses somewhat.
fn fill(region: &mut Region) {
    let mut random = Random::new(1);
    for (n, page) in region.as_mut_slice().chunks_exact_mut(PAGE_SIZE).enumerate() {
        page[1024..2048].fill_with(|| random.word() as u8);
        page[2048..].fill(n as u8);
    }
}

/// Threads that count at random in a region eight times as large as its residence, and read beside
/// that, so that pages are written to at every moment of their eviction: each counts in words of
/// its own, in pages of all.
#[test]
fn c1_a_page_that_is_written_to_while_it_leaves_loses_nothing() {
    const THREADS: usize = 4;
    const STEPS: usize = 40_000;
    for block in ["4K", "16K"] {
        let memory = memory(block);
        let mut region = memory.region(8 * RESIDENT as usize).unwrap();
        fill(&mut region);
        let region = &region;
        let pages = region.len() / PAGE_SIZE;
        std::thread::scope(|scope| {
            for me in 0..THREADS {
                scope.spawn(move || {
                    let mut random = Random::new(seed(7 + me as u64));
                    let mut counts = vec![0u64; pages];
                    for _ in 0..STEPS {
                        let page = random.below(pages);
                        let own = word(region, page, me);
                        assert_eq!(own.load(Relaxed), counts[page], "page {page}, thread {me}");
                        if random.below(4) == 0 {
                            counts[page] += 1;
                            own.store(counts[page], Relaxed);
                        }
                    }
                    for (page, count) in counts.iter().enumerate() {
                        let count_found = word(region, page, me).load(Relaxed);
                        assert_eq!(count_found, *count, "page {page}, thread {me}, at the end");
                    }
                });
            }
        });
        memory.check().unwrap();
        let s = memory.stats();
        let (drops, writes) = (get(&s.drops), get(&s.faults_write));
        assert!(
            drops > 100 && writes > 100,
            "{drops} drops, {writes} first writes, --block {block}"
        );
    }
}

/// A page that had changed at its last eviction is loaded writable, so that its next write is no
/// fault. One that had not changed is loaded read-only again, and dropped while it is clean.
#[test]
fn c1_page_that_changes_each_time_has_one_fault_each_time() {
    let memory = memory("4K");
    let mut region = memory.region(4 * RESIDENT as usize).unwrap();
    fill(&mut region);
    let (pages, s) = (region.len() / PAGE_SIZE, memory.stats());
    let mut random = Random::new(seed(5));
    let mut counts = vec![0u64; pages];
    let mut touch = |writes: bool| {
        let page = random.below(pages);
        let own = word(&region, page, 0);
        assert_eq!(own.load(Relaxed), counts[page], "page {page}");
        if writes {
            counts[page] += 1;
            own.store(counts[page], Relaxed);
        }
    };
    let counters = || [&s.pgmajfault, &s.faults_write, &s.drops, &s.moves_out].map(get);
    (0..20_000).for_each(|_| touch(true));
    let before = counters();
    (0..20_000).for_each(|_| touch(true));
    let after = counters();
    let [loads, writes, _, moves] = [0, 1, 2, 3].map(|n| after[n] - before[n]);
    assert!(loads > 5000 && writes < loads / 4, "{writes} first writes in {loads} loads");
    assert!(moves > 0 && moves <= 2 * loads, "{moves} moves out in {loads} loads");
    (0..20_000).for_each(|_| touch(false));
    let before = counters();
    (0..20_000).for_each(|_| touch(false));
    let after = counters();
    let [_, writes, drops, _] = [0, 1, 2, 3].map(|n| after[n] - before[n]);
    assert!(writes == 0 && drops > 100, "{writes} first writes, {drops} drops");
    memory.check().unwrap();
}

/// Two blocks side by side are no stream yet. If they are only read, they are dropped together with
/// others, and not moved.
#[test]
fn c1_blocks_that_are_read_in_pairs_are_dropped() {
    let builder = Memory::builder().resident_bytes(RESIDENT).delivery(Delivery::Signal);
    let memory = builder.set("block", "16K").set("folio", "16K").build().unwrap();
    let mut region = memory.region(4 * RESIDENT as usize).unwrap();
    fill(&mut region);
    const BLOCK: usize = 4;
    let (pairs, s) = (region.len() / PAGE_SIZE / (2 * BLOCK), memory.stats());
    let mut random = Random::new(seed(6));
    let mut read_pair = || {
        let first = random.below(pairs) * 2 * BLOCK;
        for page in [first, first + BLOCK] {
            assert_eq!(region.as_slice()[page * PAGE_SIZE + 3000], page as u8, "page {page}");
        }
    };
    (0..10_000).for_each(|_| read_pair());
    let before = [&s.pgmajfault, &s.moves_out].map(get);
    (0..5000).for_each(|_| read_pair());
    let [loads, moves] = [get(&s.pgmajfault) - before[0], get(&s.moves_out) - before[1]];
    assert!(loads > 1000 && moves < loads / 10, "{moves} moves out in {loads} loads");
    memory.check().unwrap();
}

/// The kernel's writes to pinned memory succeed, whatever had been loaded of it before, and stay.
#[test]
fn c1_pinned_memory_may_be_written_to_by_the_kernel() {
    let memory = memory("16K");
    let mut region = memory.region(4 * RESIDENT as usize).unwrap();
    fill(&mut region);
    let pages = region.len() / PAGE_SIZE;
    let mut random = Random::new(seed(3));
    let mut zeros = std::fs::File::open("/dev/zero").unwrap();
    let mut writes = vec![false; pages];
    let mut was_protected = 0;
    for _ in 0..2000 {
        let page = random.below(pages - 4);
        // Loaded for a read, and with it its block.
        word(&region, page, 200).load(Relaxed);
        let count = 1 + random.below(4);
        let at = page * PAGE_SIZE..(page + count) * PAGE_SIZE;
        // SAFETY: in the region, and borrowed by nobody else.
        let bytes =
            || unsafe { std::slice::from_raw_parts_mut(region.as_ptr().add(at.start), at.len()) };
        was_protected += zeros.read_exact(&mut bytes()[..1]).is_err() as usize;
        let pin = region.pin(at.clone());
        zeros.read_exact(bytes()).expect("the kernel may write to what is pinned");
        drop(pin);
        writes[page..page + count].fill(true);
    }
    assert!(was_protected > 100, "{was_protected}: nothing was protected");
    let is_zero = |page: &[u8]| page.iter().all(|byte| *byte == 0);
    for (n, page) in region.as_slice().chunks_exact(PAGE_SIZE).enumerate() {
        let is_filled = page[2048..].iter().all(|byte| *byte == n as u8);
        assert!(if writes[n] { is_zero(page) } else { is_filled }, "page {n}");
    }
    memory.check().unwrap();
}

/// What the kernel refuses to drop, as it is locked, keeps its bytes; the rest goes on.
#[test]
fn c2_what_can_not_be_dropped_stays() {
    let memory = memory("16K");
    let mut region = memory.region(4 * RESIDENT as usize).unwrap();
    fill(&mut region);
    let pages = region.len() / PAGE_SIZE;
    let mut random = Random::new(seed(4));
    for round in 0..20 {
        // Of each of these blocks, a part.
        let page = random.below(pages / 4 - 1) * 4 + 1;
        let sum = word(&region, page, 300).load(Relaxed);
        let start = region.as_ptr().wrapping_add(page * PAGE_SIZE);
        // SAFETY: a page of the region; locking what is there, or will be, changes no byte.
        assert_eq!(unsafe { libc::mlock2(start.cast(), PAGE_SIZE, libc::MLOCK_ONFAULT as _) }, 0);
        for _ in 0..4000 {
            let at = random.below(pages);
            assert_eq!(region.as_slice()[at * PAGE_SIZE + 3000], at as u8, "page {at}");
        }
        word(&region, page, 300).fetch_add(1, Relaxed);
        assert_eq!(word(&region, page, 300).load(Relaxed), sum + 1, "round {round}");
        word(&region, page, 300).fetch_sub(1, Relaxed);
        // SAFETY: the page belongs to the region, which lives on. `munlock` changes no byte, and
        // only the lock above ends.
        assert_eq!(unsafe { libc::munlock(start.cast(), PAGE_SIZE) }, 0);
    }
    memory.check().unwrap();
}

/// A child of fork shares pages with its parent for a while, which goes on to read and write.
#[test]
fn c1_pages_shared_with_a_child_are_dropped_like_others() {
    let memory = memory("4K");
    let mut region = memory.region(4 * RESIDENT as usize).unwrap();
    fill(&mut region);
    let pages = region.len() / PAGE_SIZE;
    let mut random = Random::new(seed(5));
    let mut counts = vec![0u64; pages];
    // SAFETY: the range is the region's; a child may have a copy of what is there.
    let result = unsafe { libc::madvise(region.as_ptr().cast(), region.len(), libc::MADV_DOFORK) };
    assert_eq!(result, 0);
    for _ in 0..5 {
        for _ in 0..3000 {
            let page = random.below(pages);
            assert_eq!(word(&region, page, 0).load(Relaxed), counts[page], "page {page}");
        }
        let _child = Sharer::fork();
        for _ in 0..6000 {
            let page = random.below(pages);
            assert_eq!(word(&region, page, 0).load(Relaxed), counts[page], "page {page}");
            if random.below(3) == 0 {
                counts[page] += 1;
                word(&region, page, 0).store(counts[page], Relaxed);
            }
        }
    }
    memory.check().unwrap();
}
