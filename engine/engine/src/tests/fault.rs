//! The look-ups of a fault, and the source of a page while the engine is quiesced.
use crate::config::{Config, Delivery, WORKABLE_MIN_BYTES};
use crate::fault::{FaultOutcome, PageFault};
use crate::folio::TouchKind;
use crate::memory::frames::FrameKind;
use crate::pager::{Pager, PagerParts, StatsPlace};
use crate::reclaim::Reclaim;
use crate::reclaim::block_size::BlockSize;
use core::ops::Range;
use memfold_os::Errno;
use memfold_os::maps::pagemap::Pagemap;
use memfold_os::sync::atomic::Ordering::Relaxed;
use memfold_os::units::{Order, PAGE_SIZE};
use memfold_testkit::disk::MemoryDisk;
use memfold_testkit::fake::FakeSpace;
use memfold_testkit::fill::partly_random;

/// An engine over 64 pages, with a swap file in memory. The tests serve its program's faults.
pub struct Engine {
    pub space: FakeSpace,
    pub pager: Pager,
    pub disk: MemoryDisk,
}

/// The effects of a touch: look-ups in the index that found no folio, blocks loaded from the store,
/// reads of the device.
#[derive(Debug, PartialEq, Eq)]
pub struct Looked {
    nothing: usize,
    blocks: u64,
    reads: u64,
}

impl Engine {
    /// Makes an engine where each touch loads a block.
    fn of_blocks() -> Engine {
        Engine::new(Order::new(2).unwrap())
    }

    /// Makes an engine whose folios grow to `largest` where they are touched in order.
    pub fn new(largest: Order) -> Engine {
        Engine::with(Engine::settings(largest), 64)
    }

    fn settings(largest: Order) -> Config {
        let mut config = Config::new(1 << 30);
        (config.limit_bytes, config.delivery) = (Some(WORKABLE_MIN_BYTES), Delivery::Signal);
        (config.folio_order, config.pools, config.swap_keep_free_bytes) = (largest, 1, 0);
        config.swap = Some("memory".into());
        config
    }

    /// Makes an engine with an area of so many pages.
    pub fn with(config: Config, pages: usize) -> Engine {
        let (space, disk) = (FakeSpace::new(pages), MemoryDisk::default());
        let parts = PagerParts {
            space: Box::new(space.clone()),
            has_move: true,
            reports_limit: false,
            stats: StatsPlace::Own(Box::default()),
            cpus: 1,
            disk: Some(Box::new(disk.clone())),
            remote: None,
            delegate_queue: None,
            shared_limit: None,
            compressors: None,
        };
        let pager = Pager::new(config, parts).unwrap();
        pager.prepare();
        pager.mappings().manage_empty(space.area().start, space.area().end);
        Engine { space, pager, disk }
    }

    pub fn page(&self, number: usize) -> usize {
        self.space.area().start + number * PAGE_SIZE
    }

    /// Writes pages; `share` of 4 of each is zeros.
    pub fn fill(&self, pages: Range<usize>, share: usize) {
        for number in pages {
            self.write(number, |bytes| bytes.copy_from_slice(&partly_random(number as u64, share)));
        }
    }

    /// Writes a page, and serves the faults of that.
    pub fn write(&self, number: usize, write: impl Fn(&mut [u8])) {
        let addr = self.page(number);
        while let Err(ticket) = self.space.write(addr, &write) {
            let fault = PageFault { addr, write: true, protected: ticket.protected };
            assert_eq!(self.pager.faults().fault(fault), FaultOutcome::Yes);
            self.space.leave(ticket);
        }
    }

    pub fn page_out(&self, pages: Range<usize>) {
        self.pager.mappings().page_out_at(self.page(pages.start)..self.page(pages.end));
    }

    /// Returns the orders of the folios that begin in a range of pages.
    pub fn orders(&self, pages: Range<usize>) -> Vec<u8> {
        let areas = self.pager.0.areas.read();
        let key = |number: usize| {
            areas.find(self.page(0)).expect("the area").key_of(self.page(0)) + number as u64
        };
        let mut orders = Vec::new();
        self.pager.0.table.each(key(pages.start)..key(pages.end), |guard, id| {
            orders.push(self.pager.0.table.get(guard, id).order().get());
        });
        orders
    }

    /// Asserts that a page holds the bytes that `fill` has written there with `share`.
    pub fn assert_holds(&self, number: usize, share: usize) {
        let want = partly_random(number as u64, share);
        while let Err(ticket) =
            self.space.read(self.page(number), |bytes| assert!(*bytes == *want, "page {number}"))
        {
            self.touch(number);
            self.space.leave(ticket);
        }
    }

    /// Serves the fault of a touch.
    pub fn touch(&self, number: usize) -> Looked {
        let nothing = || self.pager.0.table.looked()[1];
        let (before, events, reads) =
            (nothing(), self.pager.0.backing.store().stats().events, self.disk.reads());
        let served = self
            .pager
            .faults()
            .fault(PageFault { addr: self.page(number), ..PageFault::default() });
        assert!(served == FaultOutcome::Yes && self.space.is_present(self.page(number)));
        let now = self.pager.0.backing.store().stats().events;
        Looked {
            nothing: nothing() - before,
            blocks: now.loads.iter().sum::<u64>() - events.loads.iter().sum::<u64>(),
            reads: self.disk.reads() - reads,
        }
    }
}

/// The thread once tried again for ever, and its touch never found that the page was unmapped.
#[test]
fn refused_protection_ends_the_fault() {
    let engine = Engine::of_blocks();
    engine.fill(0..1, 2);
    let fault = PageFault { addr: engine.page(0), write: true, protected: true };
    engine.space.refuse_protection(Errno::AGAIN);
    assert_eq!(engine.pager.faults().fault(fault), FaultOutcome::Again);
    engine.space.refuse_protection(Errno::NOENT);
    assert_eq!(engine.pager.faults().fault(fault), FaultOutcome::Yes);
}

#[test]
fn c5_a_fault_looks_nowhere_but_where_its_page_is() {
    let engine = Engine::of_blocks();
    let get = |counter: &core::sync::atomic::AtomicU64| counter.load(Relaxed);
    let looked = |blocks, reads| Looked { nothing: 0, blocks, reads };
    // The page is new: neither pool nor file is read.
    assert_eq!(engine.touch(0), Looked { nothing: 1, blocks: 0, reads: 0 });
    engine.fill(0..4, 2);
    // In the swap cache: the pool is not searched.
    let areas = engine.pager.0.areas.read();
    Reclaim::new(&engine.pager.0).evict(&areas);
    drop(areas);
    assert!(!engine.space.is_present(engine.page(0)));
    assert_eq!(engine.touch(0), looked(0, 0));
    assert_eq!(get(&engine.pager.0.stats.rescues), 1);
    // The program has discarded a page of a resident folio.
    assert!(engine.space.punch(engine.page(3)));
    assert_eq!(engine.touch(3), looked(0, 0));
    // In the pool: one block, and the file is not read.
    engine.page_out(0..4);
    assert_eq!(engine.touch(2), looked(1, 0));
    // In the file, because it doesn't compress: one read, and the pool is not searched.
    engine.fill(32..36, 0);
    engine.page_out(32..36);
    assert!(get(&engine.pager.0.stats.pswpout) == 4 && !engine.space.is_present(engine.page(32)));
    assert_eq!(engine.touch(33), looked(0, 1));
    // Outside all areas there is no look-up.
    let before = engine.pager.0.table.looked()[0];
    assert_eq!(
        engine.pager.faults().fault(PageFault { addr: PAGE_SIZE, ..PageFault::default() }),
        FaultOutcome::NotManaged
    );
    assert_eq!(engine.pager.0.table.looked()[0], before);
    // Every fault is counted once.
    let s = &engine.pager.0.stats;
    let ways =
        [&s.faults_zero, &s.faults_stale, &s.rescues, &s.pgmajfault, &s.faults_waited].map(get);
    assert_eq!(get(&s.faults), ways.iter().sum::<u64>(), "{ways:?}");
    engine.pager.check().unwrap();
}

#[test]
fn fault_of_one_page_locks_its_shard_twice() {
    let mut config = Engine::settings(Order::new(2).unwrap());
    config.limit_bytes = Some(64 << 20);
    let engine = Engine::with(config, 1024);
    let locks = |number| {
        let before = engine.pager.0.table.locked();
        engine.touch(number);
        engine.pager.0.table.locked() - before
    };
    // A page of zeros, which takes no memory; pages of blocks in the pool, loaded with the block or alone; and a block in
    // the file, which doesn't compress.
    assert_eq!(locks(0), 1);
    for _ in 0..4 {
        engine.fill(0..1024, 2);
        engine.page_out(0..1024);
        // They are far from each other, because a stream's fault also looks at the following pages.
        for number in (1..24).map(|n| n * 389 % 1024) {
            assert_eq!(locks(number), 2, "page {number}");
        }
    }
    assert!(engine.pager.stats().page_loads.load(Relaxed) > 0, "some were loaded by themselves");
    engine.fill(512..516, 0);
    engine.page_out(512..516);
    assert_eq!(locks(513), 2);
    engine.pager.check().unwrap();
}

#[test]
fn m3_m7_pages_at_rest_share_one_decompression_of_a_block() {
    let mut config = Engine::settings(Order::new(2).unwrap());
    config.codec = "lz4".into();
    let engine = Engine::with(config, 64);
    engine.fill(0..12, 2);
    engine.page_out(0..12);
    assert_eq!(engine.space.present_pages(), 0);
    let before = engine.pager.0.backing.store().stats().events;
    for number in [0, 1, 5, 2, 4, 3, 7, 6, 11] {
        // SAFETY: no other thread uses the engine.
        let page = unsafe { engine.pager.fork().page_at_rest(Some(engine.page(number))) };
        // SAFETY: the page stays until the next call.
        let bytes = unsafe { core::slice::from_raw_parts(page, PAGE_SIZE) };
        assert!(bytes == partly_random(number as u64, 2), "page {number}");
    }
    let now = engine.pager.0.backing.store().stats().events;
    assert_eq!(
        (
            now.block_cache_misses - before.block_cache_misses,
            now.block_cache_hits - before.block_cache_hits
        ),
        (3, 6)
    );
    assert_eq!(engine.pager.0.stats.fork_page_loads.load(Relaxed), 9);
    assert_eq!(engine.pager.0.stats.block_cache_hits.load(Relaxed), 6);
    assert_eq!(engine.space.present_pages(), 0, "nothing changes at rest");
    engine.pager.check().unwrap();
}

#[test]
fn m7_consecutive_page_loads_decompress_their_block_once() {
    for codec in ["zstd", "deflate"] {
        let mut config = Engine::settings(Order::new(2).unwrap());
        (config.limit_bytes, config.codec) = (Some(64 << 20), codec.into());
        let engine = Engine::with(config, 1024);
        let stats = engine.pager.stats();
        let counts = || {
            [&stats.block_cache_misses, &stats.block_cache_hits, &stats.blocks_loaded]
                .map(|counter| counter.load(Relaxed))
        };
        engine.fill(0..1024, 2);
        engine.page_out(0..1024);
        // Blocks far from each other.
        for first in (0..40).map(|n| n * 389 % 128 * 8) {
            let (before, shown) = (counts(), engine.space.present_pages());
            engine.assert_holds(first + 2, 2);
            assert_eq!(engine.space.present_pages(), shown + 1, "only the page asked for");
            assert_eq!(counts(), [before[0] + 1, before[1], before[2] + 1], "{codec}");
            (0..4).for_each(|page| engine.assert_holds(first + page, 2));
            assert_eq!(counts(), [before[0] + 1, before[1] + 1, before[2] + 1], "{codec}");
        }
        engine.pager.check().unwrap();
    }
}

#[test]
fn c1_load_past_the_bound_requests_reclaim_without_a_fault() {
    let engine = Engine::of_blocks();
    let (pager, page) = (&engine.pager, Order::PAGE);
    // Other loads have taken all frames.
    let mut taken = Vec::new();
    while pager.limits().physical() + page.pages() as u64 <= pager.limits().target() {
        let frame = pager.0.mapper.frames().take(page, FrameKind::Empty).unwrap();
        pager.0.mapper.frames().populate(&engine.space, frame, page).unwrap();
        taken.push(frame);
    }
    engine.write(0, |_| {});
    assert!(
        pager.limits().physical() > pager.limits().target() && pager.0.requests.is_reclaim_due()
    );
    for frame in taken {
        pager.0.mapper.frames().give(frame, page, FrameKind::Full);
    }
    assert!(pager.work());
    assert!(pager.limits().physical() <= pager.limits().target());
    pager.check().unwrap();
}

#[test]
fn blocks_are_cut_only_while_there_are_folios_left() {
    let engine = Engine::of_blocks();
    engine.fill(0..16, 3);
    let block = engine.pager.0.config.block_order;
    let is_cut = || BlockSize::new(&engine.pager.0).is_to_be_cut(block, TouchKind::RANDOM, true);
    assert!(is_cut());
    engine.pager.0.table.crowd_at(engine.pager.0.table.count() + 1);
    assert!(is_cut());
    engine.fill(16..17, 3);
    assert!(!is_cut());
}

#[test]
fn no_more_is_managed_where_nearly_all_folios_are_taken() {
    let engine = Engine::of_blocks();
    engine.fill(0..16, 3);
    let pager = &engine.pager;
    let pagemap = Pagemap::open().expect("/proc");
    let take = |page: usize| {
        let mut is_asked = false;
        let start = page * PAGE_SIZE;
        let register = |_| {
            is_asked = true;
            Ok(())
        };
        let taken = pager.mappings().take(start..start + PAGE_SIZE, &pagemap, |_| {}, register);
        assert_eq!(taken.is_ok(), is_asked, "what isn't taken isn't registered");
        taken
    };
    take(1 << 20).unwrap();
    pager.0.table.crowd_at(pager.0.table.count());
    assert_eq!(take(2 << 20), Err(Errno::NOMEM));
    assert!(!pager.mappings().manages((2 << 20) * PAGE_SIZE));
    // Managed memory is served.
    engine.fill(16..32, 3);
    pager.check().unwrap();
}
