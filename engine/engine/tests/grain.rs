//! The size of blocks follows how they are asked for: random touches cut them into pages, streams
//! join them again (`grain.rs`).
use memfold_engine::{Delivery, Memory, Region};
use memfold_testkit::random::{Random, seed};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

const PAGE: usize = 4096;
const RESIDENT: u64 = 8 << 20;
const PAGES: usize = (32 << 20) / PAGE;

struct Setup {
    memory: Memory,
    region: Region,
    /// What each page's first word must be.
    words: Vec<u64>,
    random: Random,
    _alone: MutexGuard<'static, ()>,
}

/// One test at a time: how far a stream is read ahead depends on who else wants the processors.
static ALONE: Mutex<()> = Mutex::new(());

impl Setup {
    /// Pages of text that compresses as real text does, each with a number in front.
    fn new(delivery: Delivery, moves: &str) -> Setup {
        Setup::with_codec(delivery, moves, "lz4")
    }

    fn with_codec(delivery: Delivery, moves: &str, codec: &str) -> Setup {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let memory = Memory::builder()
            .resident_bytes(RESIDENT)
            .codec(codec)
            .delivery(delivery)
            .set("move", moves)
            .build()
            .unwrap();
        let mut region = memory.region(PAGES * PAGE).unwrap();
        let source = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let words: Vec<u64> = (0..PAGES as u64).collect();
        for (n, page) in region.as_mut_slice().chunks_mut(PAGE).enumerate() {
            page.copy_from_slice(&source[n * PAGE % (source.len() - PAGE)..][..PAGE]);
            page[..8].copy_from_slice(&words[n].to_le_bytes());
        }
        Setup { memory, region, words, random: Random::new(seed(1)), _alone }
    }

    fn check(&self, n: usize) {
        let word = u64::from_le_bytes(self.region.as_slice()[n * PAGE..][..8].try_into().unwrap());
        assert_eq!(word, self.words[n], "page {n}");
    }

    fn touch_at_random(&mut self, times: usize, write: bool) {
        self.touch_at_random_below(PAGES, times, write);
    }

    fn touch_at_random_below(&mut self, pages: usize, times: usize, write: bool) {
        for _ in 0..times {
            let n = self.random.below(pages);
            self.check(n);
            if write {
                self.words[n] = self.random.word();
                self.region.as_mut_slice()[n * PAGE..][..8]
                    .copy_from_slice(&self.words[n].to_le_bytes());
            }
        }
    }

    fn scan(&self) {
        (0..PAGES).for_each(|n| self.check(n));
    }

    /// Has all saved that waits in the swap cache: a touch would rescue it from there, and it would
    /// neither be stored nor loaded.
    fn save_all(&mut self) {
        self.region.pageout(0..PAGE);
    }

    fn figure(&self, of: impl Fn(&memfold_stats::Stats) -> &AtomicU64) -> u64 {
        of(self.memory.stats()).load(Relaxed)
    }

    /// Pages loaded and faults that needed a load since.
    fn loads(&self, what: impl FnOnce(&Setup)) -> (u64, u64) {
        let now = || (self.figure(|s| &s.zswpin), self.figure(|s| &s.pgmajfault));
        let before = now();
        what(self);
        (now().0 - before.0, now().1 - before.1)
    }
}

fn random_writes_cut_and_scans_join(delivery: Delivery, moves: &str) {
    let mut setup = Setup::new(delivery, moves);
    assert_eq!(setup.figure(|s| &s.blocks_cut), 0, "what is filled in order is stored in blocks");
    setup.touch_at_random(4 * PAGES, true);
    setup.save_all();
    let cuts = setup.figure(|s| &s.blocks_cut);
    assert!(cuts > PAGES as u64 / 4 / 2, "{cuts} blocks were cut");
    let (pages, faults) = {
        let before = (setup.figure(|s| &s.zswpin), setup.figure(|s| &s.pgmajfault));
        setup.touch_at_random(PAGES, true);
        (setup.figure(|s| &s.zswpin) - before.0, setup.figure(|s| &s.pgmajfault) - before.1)
    };
    assert!(pages < 2 * faults, "{pages} pages were loaded for {faults} random touches");
    // On a busy machine background threads evict in the middle of a scan, which joins fewer blocks.
    let joins = |setup: &Setup| setup.figure(|s| &s.blocks_joined);
    let scans = (0..30).take_while(|n| *n < 3 || joins(&setup) <= cuts / 2);
    scans.for_each(|_| setup.scan());
    assert!(joins(&setup) > cuts / 2, "{} of {cuts}", joins(&setup));
    let mut figures = Vec::new();
    let is_joined = (0..30).any(|_| {
        setup.save_all();
        figures.push(setup.loads(Setup::scan));
        figures.last().is_some_and(|(pages, faults)| *faults < pages / 4)
    });
    assert!(is_joined, "pages loaded in order, and faults for them: {figures:?}");
    assert_eq!(setup.memory.stats().check_sums(), Ok(()));
    setup.memory.check().unwrap();
}

#[test]
fn random_writes_cut_blocks_and_scans_join_them() {
    random_writes_cut_and_scans_join(Delivery::Signal, "on");
    random_writes_cut_and_scans_join(Delivery::Thread, "on");
    random_writes_cut_and_scans_join(Delivery::Thread, "off");
}

/// To cut a block is to compress it: that must not happen to one that is only read now and then.
#[test]
fn blocks_that_are_only_read_are_cut_after_many_loads() {
    cuts_what_is_only_read(Delivery::Thread, "lz4");
}

/// It can't stop early: a page would cost as much as its block, each time.
#[test]
fn blocks_that_are_only_read_are_cut_by_codecs_without_parts() {
    cuts_what_is_only_read(Delivery::Signal, "zstd:1");
}

fn cuts_what_is_only_read(delivery: Delivery, codec: &str) {
    let mut setup = Setup::with_codec(delivery, "on", codec);
    setup.touch_at_random(PAGES / 2, false);
    let few = setup.figure(|s| &s.blocks_cut);
    assert!(few < PAGES as u64 / 4 / 50, "{few} blocks were cut after two reads each");
    setup.touch_at_random(8 * PAGES, false);
    let many = setup.figure(|s| &s.blocks_cut);
    assert!(many > PAGES as u64 / 4 / 2, "{many} blocks were cut after 34 reads each");
    setup.scan();
    setup.memory.check().unwrap();
}

/// Where pages of a block can be loaded alone, what is read at random is: nothing is compressed for
/// it, and streams find the blocks as they were.
#[test]
fn pages_that_are_only_read_are_loaded_one_by_one() {
    let mut setup = Setup::new(Delivery::Signal, "on");
    // What was written leaves memory.
    setup.region.pageout(0..PAGES * PAGE);
    setup.touch_at_random(PAGES, false);
    let saves = setup.figure(|s| &s.blocks_saved);
    let before = (setup.figure(|s| &s.zswpin), setup.figure(|s| &s.pgmajfault));
    setup.touch_at_random(8 * PAGES, false);
    let (pages, faults) =
        (setup.figure(|s| &s.zswpin) - before.0, setup.figure(|s| &s.pgmajfault) - before.1);
    assert!(faults > 4 * PAGES as u64 && pages < faults + faults / 10, "{pages} in {faults}");
    let (cuts, after) = (setup.figure(|s| &s.blocks_cut), setup.figure(|s| &s.blocks_saved));
    assert!(cuts < PAGES as u64 / 4 / 50, "{cuts} blocks were cut");
    assert!(after - saves < PAGES as u64 / 4 / 50, "{} blocks were compressed", after - saves);
    setup.memory.check().unwrap();
    setup.scan();
    let (pages, faults) = setup.loads(Setup::scan);
    assert!(faults < pages / 8, "{faults} faults loaded {pages} pages in order");
    setup.memory.check().unwrap();
}

/// So is what was stored as planes of bytes, whatever the codec.
#[test]
fn numbers_that_are_read_at_random_are_loaded_page_by_page() {
    let number = |n: usize| (3 * n + n % 2) as u64;
    for block in ["16K", "64K", "128K"] {
        let memory = Memory::builder()
            .resident_bytes(RESIDENT)
            .codec("zstd+shuffle")
            .delivery(Delivery::Signal)
            .set("block", block)
            .build()
            .unwrap();
        let mut region = memory.region(PAGES * PAGE).unwrap();
        for (n, word) in region.as_mut_slice().chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&number(n).to_le_bytes());
        }
        region.pageout(0..PAGES * PAGE);
        let now = || {
            let s = memory.stats();
            (s.zswpin.load(Relaxed), s.pgmajfault.load(Relaxed))
        };
        let (mut random, before) = (Random::new(seed(2)), now());
        for _ in 0..2 * PAGES {
            let n = random.below(PAGES * PAGE / 8);
            let word = region.as_slice()[8 * n..][..8].try_into().unwrap();
            assert_eq!(u64::from_le_bytes(word), number(n), "word {n}, --block {block}");
        }
        let (pages, faults) = (now().0 - before.0, now().1 - before.1);
        // Some are completed to be cut.
        let is_alone = pages < 2 * faults;
        assert_eq!(is_alone, block != "128K", "{pages} pages in {faults} faults, --block {block}");
        memory.check().unwrap();
    }
}

/// What is used page by page, but all together, is loaded in blocks: here 4 blocks that are
/// written in another order in each round, while a scan pushes them out of memory in between.
#[test]
fn pages_that_are_used_together_are_joined() {
    let mut setup = Setup::new(Delivery::Signal, "on");
    let mut hot: Vec<usize> = (0..4).flat_map(|block| block * 512 + 4..block * 512 + 8).collect();
    let (mut faults, rounds) = (0, 40);
    for _ in 0..rounds {
        for i in (1..hot.len()).rev() {
            hot.swap(i, setup.random.below(i + 1));
        }
        let before = setup.figure(|s| &s.pgmajfault);
        for &n in &hot {
            setup.check(n);
            setup.words[n] += 1;
            setup.region.as_mut_slice()[n * PAGE..][..8]
                .copy_from_slice(&setup.words[n].to_le_bytes());
        }
        faults += setup.figure(|s| &s.pgmajfault) - before;
        (PAGES / 4..PAGES).for_each(|n| setup.check(n));
        setup.save_all();
    }
    let (cuts, joins) = (setup.figure(|s| &s.blocks_cut), setup.figure(|s| &s.blocks_joined));
    assert!(cuts > 0 && joins > 0, "{cuts} blocks were cut, {joins} joined");
    assert!(
        faults * 3 < (2 * rounds * hot.len()) as u64,
        "{faults} faults in {rounds} rounds over {} pages",
        hot.len()
    );
    setup.memory.check().unwrap();
}

/// At any time most pages of each block are in memory. But each of them was loaded by a fault of its
/// own, at another time.
#[test]
fn pages_that_are_used_at_different_times_are_not_joined() {
    let mut setup = Setup::new(Delivery::Signal, "on");
    setup.region.pageout(0..PAGES * PAGE);
    let pages = RESIDENT as usize / PAGE * 5 / 4;
    setup.touch_at_random_below(pages, 20 * pages, true);
    let (cuts, joins) = (setup.figure(|s| &s.blocks_cut), setup.figure(|s| &s.blocks_joined));
    assert!(cuts > pages as u64 / 4 / 2, "{cuts} blocks were cut");
    assert!(joins * 20 < cuts, "{cuts} blocks were cut, {joins} joined");
    setup.memory.check().unwrap();
}
