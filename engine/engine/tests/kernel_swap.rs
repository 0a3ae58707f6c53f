//! The kernel swaps out what the engine has: frames, and the program's own pages. A page in the
//! kernel's swap is there. Needs root (see `memfold_testkit::kernel_swap`). Rows Z1, B1, B2.
use memfold_engine::fault::PageFault;
use memfold_engine::pager::Pager;
use memfold_engine::{Delivery, Memory};
use memfold_os::maps::pagemap::Pagemap;
use memfold_os::memory::zone::Zone;
use memfold_os::uffd::space::{Space, UffdSpace};
use memfold_os::uffd::{Uffd, feature};
use memfold_os::units::{MAX_BYTES, PAGE_SIZE};
use memfold_testkit::kernel_swap::{KernelSwap, swap_all_out, swap_out, swapped_bytes};
use memfold_testkit::sharer::Sharer;
use memfold_testkit::unthreaded::engine;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const MIB: usize = 1 << 20;
const AREA_PAGES: usize = 12 * MIB / PAGE_SIZE;

/// One test swaps and forks at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What each byte of a page is in a round.
fn byte(number: usize, round: u8) -> u8 {
    number as u8 ^ round.wrapping_mul(16)
}

/// An engine without threads over the process's real memory. Each touch is preceded by its fault.
struct Setup {
    pager: Pager,
    pagemap: Arc<Pagemap>,
    area: Zone,
    rounds: Vec<u8>,
}

impl Setup {
    fn new() -> Setup {
        let uffd = Arc::new(
            Uffd::open(feature::MOVE | feature::SIGBUS, true).expect("userfaultfd with MOVE"),
        );
        let pagemap = Arc::new(Pagemap::open().expect("/proc"));
        let pager = engine(&uffd, UffdSpace::new(uffd.clone(), Some(pagemap.clone())));
        let area = Zone::reserve(AREA_PAGES * PAGE_SIZE, MAX_BYTES).expect("address space");
        // SAFETY: a touch of a missing page is preceded by its fault.
        unsafe { uffd.register(area.start(), area.len(), false).unwrap() };
        pager.mappings().manage_empty(area.start(), area.start() + area.len());
        Setup { pager, pagemap, area, rounds: vec![0; AREA_PAGES] }
    }

    fn frames(&self) -> Range<usize> {
        let (start, len) = self.pager.frames_zone();
        start..start + len
    }

    fn home(&self) -> Range<usize> {
        self.area.start()..self.area.start() + self.area.len()
    }

    fn swap_out(&self, what: &Range<usize>) -> usize {
        swap_out(what.start, what.len());
        swapped_bytes(what.start, what.end)
    }

    fn page(&self, number: usize) -> *mut u8 {
        let page = self.area.as_ptr().wrapping_add(number * PAGE_SIZE);
        while !self.pagemap.is_populated(page as usize) {
            let _ = self
                .pager
                .faults()
                .fault(PageFault { addr: page as usize, ..PageFault::default() });
        }
        page
    }

    fn write(&mut self, number: usize) {
        self.rounds[number] += 1;
        // SAFETY: the page is there, and the test's own.
        unsafe { self.page(number).write_bytes(byte(number, self.rounds[number]), PAGE_SIZE) };
    }

    #[track_caller]
    fn assert_kept(&self) {
        for number in 0..AREA_PAGES {
            // SAFETY: `page` returns the start of a page of the test's area, which is mapped and
            // initialized as long as `self` lives. Only this thread uses it, and nothing writes to
            // it while the slice exists.
            let bytes = unsafe { std::slice::from_raw_parts(self.page(number), PAGE_SIZE) };
            let expected = byte(number, self.rounds[number]);
            let position = bytes.iter().position(|byte| *byte != expected);
            assert_eq!(
                position,
                None,
                "page {number} has {} where {expected} was written",
                bytes[position.unwrap_or(0)]
            );
        }
        self.pager.check().unwrap();
        assert_eq!(self.pager.stats().check_sums(), Ok(()));
    }
}

#[test]
fn frames_swapped_out_by_the_kernel_are_not_empty() {
    let _alone = alone();
    let Some(_swap) = KernelSwap::on(192) else { return };
    let mut setup = Setup::new();
    for round in 0..3 {
        (0..AREA_PAGES).for_each(|page| setup.write(page));
        let swapped_bytes = setup.swap_out(&setup.frames());
        assert!(
            swapped_bytes >= MIB / 4,
            "round {round}: {swapped_bytes} bytes of frames are swapped out"
        );
        // What it has in swap can't be moved from now on.
        let _sharer = Sharer::fork();
        setup.assert_kept();
        // Free frames as well: they are put together and given back.
        setup.swap_out(&setup.frames());
        (0..AREA_PAGES).rev().step_by(3).for_each(|page| setup.write(page));
        setup.assert_kept();
    }
    assert!(setup.pager.stats().move_busy.load(Relaxed) > 0);
}

#[test]
fn pages_swapped_out_by_the_kernel_are_folded() {
    let _alone = alone();
    let Some(_swap) = KernelSwap::on(192) else { return };
    let mut setup = Setup::new();
    for is_shared in [false, true] {
        (0..AREA_PAGES).for_each(|page| setup.write(page));
        let swapped_bytes = setup.swap_out(&setup.home());
        assert!(swapped_bytes >= 4 * MIB, "{swapped_bytes} bytes of the program's are swapped out");
        let _sharer = is_shared.then(Sharer::fork);
        let pages = setup.home();
        // What is shared is noted first, and then made private by a background thread, of which
        // this is the work.
        let folded_bytes = || setup.pager.stats().folded_bytes.load(Relaxed);
        for _ in 0..AREA_PAGES {
            setup.pager.mappings().page_out_at(pages.clone());
            setup.pager.gauges().publish();
            if folded_bytes() == pages.len() as u64 {
                break;
            }
            setup.pager.background().reclaim_in_background();
        }
        assert_eq!(folded_bytes(), pages.len() as u64, "shared: {is_shared}");
        setup.assert_kept();
    }
}

#[test]
fn memory_in_the_kernels_swap_survives_its_adoption() {
    let _alone = alone();
    let Some(_swap) = KernelSwap::on(64) else { return };
    let zone = Zone::reserve(64 * PAGE_SIZE, PAGE_SIZE).unwrap();
    let pagemap = Pagemap::open().unwrap();
    for page in (0..64).step_by(3) {
        // SAFETY: inside the zone.
        unsafe { zone.as_ptr().add(page * PAGE_SIZE).write_bytes(7, PAGE_SIZE) };
    }
    swap_out(zone.start(), zone.len());
    assert!(swapped_bytes(zone.start(), zone.start() + zone.len()) > 0);
    let mut ranges = Vec::new();
    let each = |start: usize, end: usize| ranges.extend((start..end).step_by(PAGE_SIZE));
    pagemap.for_each_populated(zone.start(), zone.start() + zone.len(), each).unwrap();
    let address_of = |page: &usize| zone.start() + page * PAGE_SIZE;
    assert_eq!(ranges, (0..64).step_by(3).map(|page| address_of(&page)).collect::<Vec<_>>());
    let space =
        UffdSpace::new(Arc::new(Uffd::open(feature::MOVE, true).unwrap()), Some(Arc::new(pagemap)));
    assert!((0..64).all(|page| space.is_populated(address_of(&page)) == (page % 3 == 0)));
}

#[test]
fn regions_keep_every_byte_under_kernel_swap_and_forks() {
    let _alone = alone();
    let Some(_swap) = KernelSwap::on(192) else { return };
    for delivery in [Delivery::Signal, Delivery::Thread] {
        let memory = Memory::builder().resident_bytes(12 << 20).delivery(delivery).build().unwrap();
        let mut region = memory.region(32 * MIB).unwrap();
        let (is_done, is_swapped) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Relaxed) {
                    swap_all_out();
                    is_swapped.fetch_or(swapped_bytes(0, usize::MAX) > 0, Relaxed);
                    drop(Sharer::fork());
                }
            });
            let mut round = 0u8;
            while round < 6 || !is_swapped.load(Relaxed) {
                let expected = round;
                round = round.wrapping_add(1);
                for (number, page) in region.as_mut_slice().chunks_mut(PAGE_SIZE).enumerate() {
                    let byte_before = if expected == 0 { 0 } else { byte(number, expected) };
                    assert!(
                        page.iter().all(|byte| *byte == byte_before),
                        "page {number} in round {round}, {delivery:?}"
                    );
                    page.fill(byte(number, round));
                }
            }
            is_done.store(true, Relaxed);
        });
        memory.check().unwrap();
    }
}
