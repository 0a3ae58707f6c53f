//! Where a fault looks, and where a page comes from while the engine is at rest.
use crate::config::{Config, Delivery, WORKABLE_MIN_BYTES};
use crate::fault::{Fault, Served};
use crate::folio::Touch;
use crate::folio::frames::Kind;
use crate::pager::{Pager, Parts, StatsPlace};
use core::ops::Range;
use memfold_sys::Errno;
use memfold_sys::sync::atomic::Ordering::Relaxed;
use memfold_sys::units::{Order, PAGE_SIZE};
use memfold_testkit::disk::MemoryDisk;
use memfold_testkit::fake::FakeSpace;
use memfold_testkit::fill::partly_random;

/// An engine over 64 pages, with a swap file in memory. Its program's faults are served by the
/// tests.
pub struct Engine {
    pub space: FakeSpace,
    pub pager: Pager,
    pub disk: MemoryDisk,
}

/// What a touch did: look-ups in the index that found nothing, blocks out of the store, reads of
/// the device.
#[derive(Debug, PartialEq, Eq)]
pub struct Looked {
    nothing: usize,
    blocks: u64,
    reads: u64,
}

impl Engine {
    /// Whose program's touches load a block each.
    fn of_blocks() -> Engine {
        Engine::new(Order::new(2).unwrap())
    }

    /// Whose folios grow to `largest` where they are touched in order.
    pub fn new(largest: Order) -> Engine {
        let mut config = Config::new(1 << 30);
        (config.limit_bytes, config.delivery) = (Some(WORKABLE_MIN_BYTES), Delivery::Signal);
        (config.folio_order, config.pools, config.swap_keep_free_bytes) = (largest, 1, 0);
        config.swap = Some("memory".into());
        Engine::with(config, 64)
    }

    /// With an area of so many pages.
    pub fn with(config: Config, pages: usize) -> Engine {
        let (space, disk) = (FakeSpace::new(pages), MemoryDisk::default());
        let parts = Parts {
            space: Box::new(space.clone()),
            has_move: true,
            reports_limit: false,
            stats: StatsPlace::Own(Box::default()),
            cpus: 1,
            disk: Some(Box::new(disk.clone())),
            remote: None,
            errands: None,
            shared_limit: None,
        };
        let pager = Pager::new(config, parts).unwrap();
        pager.prepare();
        pager.manage_empty(space.area().start, space.area().end);
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

    /// Writes a page, whose faults it serves.
    pub fn write(&self, number: usize, write: impl Fn(&mut [u8])) {
        let addr = self.page(number);
        while let Err(ticket) = self.space.write(addr, &write) {
            let fault = Fault { addr, write: true, protected: ticket.protected };
            assert_eq!(self.pager.fault(fault), Served::Yes);
            self.space.leave(ticket);
        }
    }

    pub fn page_out(&self, pages: Range<usize>) {
        self.pager.page_out_at(self.page(pages.start)..self.page(pages.end));
    }

    /// The orders of the folios that begin in a range of pages.
    pub fn orders(&self, pages: Range<usize>) -> Vec<u8> {
        let areas = self.pager.areas.read();
        let key = |number: usize| {
            areas.find(self.page(0)).expect("the area").key_of(self.page(0)) + number as u64
        };
        let mut orders = Vec::new();
        self.pager.each_folio(key(pages.start)..key(pages.end), |guard, id| {
            orders.push(self.pager.folios.get(guard, id).order().get());
        });
        orders
    }

    /// Asserts that a page holds what `fill` has written there with `share`.
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
        let nothing = || self.pager.index.looked[1].load(Relaxed);
        let (before, events, reads) =
            (nothing(), self.pager.store.stats().events, self.disk.reads());
        let served = self.pager.fault(Fault { addr: self.page(number), ..Fault::default() });
        assert!(served == Served::Yes && self.space.is_present(self.page(number)));
        let now = self.pager.store.stats().events;
        Looked {
            nothing: nothing() - before,
            blocks: now.loads.iter().sum::<u64>() - events.loads.iter().sum::<u64>(),
            reads: self.disk.reads() - reads,
        }
    }
}

#[test]
fn c5_a_fault_looks_nowhere_but_where_its_page_is() {
    let engine = Engine::of_blocks();
    let get = |counter: &core::sync::atomic::AtomicU64| counter.load(Relaxed);
    let looked = |blocks, reads| Looked { nothing: 0, blocks, reads };
    // Nothing was there: neither pool nor file is asked.
    assert_eq!(engine.touch(0), Looked { nothing: 1, blocks: 0, reads: 0 });
    engine.fill(0..4, 2);
    // In the swap cache: not looked for in the pool.
    let areas = engine.pager.areas.read();
    engine.pager.evict(&areas);
    drop(areas);
    assert!(!engine.space.is_present(engine.page(0)));
    assert_eq!(engine.touch(0), looked(0, 0));
    assert_eq!(get(&engine.pager.stats.rescues), 1);
    // A page that the program has dropped in a folio that is there.
    assert!(engine.space.punch(engine.page(3)));
    assert_eq!(engine.touch(3), looked(0, 0));
    // In the pool: one block, and no look at the file.
    engine.page_out(0..4);
    assert_eq!(engine.touch(2), looked(1, 0));
    // In the file, as it doesn't shrink: one read, and no look into the pool.
    engine.fill(32..36, 0);
    engine.page_out(32..36);
    assert!(get(&engine.pager.stats.pswpout) == 4 && !engine.space.is_present(engine.page(32)));
    assert_eq!(engine.touch(33), looked(0, 1));
    // Outside all areas nothing is looked up at all.
    let before = engine.pager.index.looked[0].load(Relaxed);
    assert_eq!(
        engine.pager.fault(Fault { addr: PAGE_SIZE, ..Fault::default() }),
        Served::NotManaged
    );
    assert_eq!(engine.pager.index.looked[0].load(Relaxed), before);
    // Every fault went one way.
    let s = &engine.pager.stats;
    let ways =
        [&s.faults_zero, &s.faults_stale, &s.rescues, &s.pgmajfault, &s.faults_waited].map(get);
    assert_eq!(get(&s.faults), ways.iter().sum::<u64>(), "{ways:?}");
    engine.pager.check().unwrap();
}

#[test]
fn m3_m7_pages_at_rest_come_from_one_decompression_of_their_block() {
    let engine = Engine::of_blocks();
    engine.fill(0..12, 2);
    engine.page_out(0..12);
    assert_eq!(engine.space.present_pages(), 0);
    let before = engine.pager.store.stats().events;
    for number in [0, 1, 5, 2, 4, 3, 7, 6, 11] {
        // SAFETY: nobody else uses the engine.
        let page = unsafe { engine.pager.page_at_rest(Some(engine.page(number))) };
        // SAFETY: a page that stays until the next call.
        let bytes = unsafe { core::slice::from_raw_parts(page, PAGE_SIZE) };
        assert!(bytes == partly_random(number as u64, 2), "page {number}");
    }
    let now = engine.pager.store.stats().events;
    assert_eq!(
        (now.recent_misses - before.recent_misses, now.recent_hits - before.recent_hits),
        (3, 6)
    );
    assert_eq!(engine.pager.stats.partial_loads.load(Relaxed), 9);
    assert_eq!(engine.pager.stats.recent_hits.load(Relaxed), 6);
    assert_eq!(engine.space.present_pages(), 0, "nothing changes at rest");
    engine.pager.check().unwrap();
}

#[test]
fn c1_what_a_load_takes_past_the_bound_is_asked_back_without_another_fault() {
    let engine = Engine::of_blocks();
    let (pager, block) = (&engine.pager, Order::new(2).unwrap());
    // Other loads have taken all there is.
    let mut taken = Vec::new();
    while pager.physical() + block.pages() as u64 <= pager.target() {
        let frame = pager.frames.take(block, Kind::Empty).unwrap();
        pager.frames.populate(&engine.space, frame, block).unwrap();
        taken.push(frame);
    }
    engine.touch(0);
    assert!(pager.physical() > pager.target() && pager.queue.is_reclaim_due());
    for frame in taken {
        pager.frames.give(frame, block, Kind::Full);
    }
    assert!(pager.work());
    assert!(pager.physical() <= pager.target());
    pager.check().unwrap();
}

#[test]
fn blocks_are_cut_only_while_there_are_folios_left() {
    let engine = Engine::of_blocks();
    engine.fill(0..16, 3);
    let block = engine.pager.config.block_order;
    let is_cut = || engine.pager.is_to_be_cut(block, Touch::RANDOM, true);
    assert!(is_cut());
    engine.pager.folios.crowd_at(engine.pager.folios.count() + 1);
    assert!(is_cut());
    engine.fill(16..17, 3);
    assert!(!is_cut());
}

#[test]
fn no_more_is_managed_where_nearly_all_folios_are_taken() {
    let engine = Engine::of_blocks();
    engine.fill(0..16, 3);
    let pager = &engine.pager;
    let take = |page: usize| {
        let mut is_asked = false;
        let start = page * PAGE_SIZE;
        let taken = pager.take_empty(start..start + PAGE_SIZE, || {
            is_asked = true;
            Ok(())
        });
        assert_eq!(taken.is_ok(), is_asked, "what isn't taken isn't registered");
        taken
    };
    take(1 << 20).unwrap();
    pager.folios.crowd_at(pager.folios.count());
    assert_eq!(take(2 << 20), Err(Errno::NOMEM));
    assert!(!pager.manages((2 << 20) * PAGE_SIZE));
    // What is managed is served.
    engine.fill(16..32, 3);
    pager.check().unwrap();
}
