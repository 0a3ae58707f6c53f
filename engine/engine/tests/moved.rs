//! Memory that mremap moves, as gate delivery does it, over real page tables and a fake one. It is
//! registered at every moment, so the kernel puts no zeros where something is folded. Rows Z1, B1.
use memfold_engine::Delivery;
use memfold_engine::fault::{FaultOutcome, PageFault};
use memfold_engine::mappings::calls::{RemapCall, failed};
use memfold_engine::pager::Pager;
use memfold_os::maps::pagemap::Pagemap;
use memfold_os::uffd::space::UffdSpace;
use memfold_os::uffd::{Uffd, feature};
use memfold_os::units::PAGE_SIZE;
use memfold_testkit::fill::partly_random;
use memfold_testkit::program;
use memfold_testkit::unthreaded::engine;
use std::ops::Range;
use std::ptr::null_mut;
use std::sync::Arc;

const PAGES: usize = 512;
const LEN: usize = PAGES * PAGE_SIZE;
/// From here on nothing is ever written.
const UNUSED_FROM: usize = 400;

/// An engine without threads. Each touch is preceded by its fault.
struct Setup {
    pager: Pager,
    uffd: Arc<Uffd>,
    pagemap: Arc<Pagemap>,
}

/// Fresh private memory.
fn map() -> usize {
    let (access, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: at an address that the kernel chooses.
    let at = unsafe { libc::mmap(null_mut(), LEN, access, flags, -1, 0) };
    assert_ne!(at, libc::MAP_FAILED);
    at as usize
}

impl Setup {
    fn new() -> Setup {
        let uffd = Arc::new(
            Uffd::open(feature::GATE | feature::MOVE, true).expect("userfaultfd with MOVE"),
        );
        let pagemap = Arc::new(Pagemap::open().expect("/proc"));
        let reader = uffd.clone();
        std::thread::spawn(move || {
            loop {
                reader.next_move();
            }
        });
        let pager = engine(&uffd, UffdSpace::with_free(uffd.clone(), pagemap.clone()));
        Setup { pager, uffd, pagemap }
    }

    fn register(&self, range: Range<usize>) {
        // SAFETY: a touch of a missing page is preceded by its fault.
        unsafe { self.uffd.register(range.start, range.len(), self.pager.protects()).unwrap() };
    }

    /// Folds memory that it has written, in part.
    fn folded(&self) -> usize {
        let at = map();
        let register = |_| {
            self.register(at..at + LEN);
            Ok(())
        };
        self.pager.mappings().take(at..at + LEN, &self.pagemap, |_| {}, register).unwrap();
        for number in 0..UNUSED_FROM {
            // SAFETY: the page is there, and the test's own.
            unsafe {
                let page = self.page(at, number, true);
                page.copy_from_nonoverlapping(partly_random(number as u64, 2).as_ptr(), PAGE_SIZE);
            }
        }
        self.pager.mappings().page_out_at(at..at + UNUSED_FROM * PAGE_SIZE);
        at
    }

    fn page(&self, at: usize, number: usize, write: bool) -> *mut u8 {
        let addr = at + number * PAGE_SIZE;
        while !self.pagemap.is_populated(addr) {
            let _ = self.pager.faults().fault(PageFault { addr, write, ..PageFault::default() });
        }
        if write {
            // The page may be protected.
            let fault = PageFault { addr, write, protected: true };
            while self.pager.faults().fault(fault) == FaultOutcome::Again {}
        }
        addr as *mut u8
    }

    #[track_caller]
    fn assert_kept(&self, at: usize) {
        for number in 0..PAGES {
            // SAFETY: `page` has made the page present, and the engine has no thread that takes it away. It is
            // in one mapping of the test, and no thread writes to it while the slice is in use.
            let bytes =
                unsafe { std::slice::from_raw_parts(self.page(at, number, false), PAGE_SIZE) };
            let is_right = match number < UNUSED_FROM {
                true => *bytes == *partly_random(number as u64, 2),
                false => bytes.iter().all(|byte| *byte == 0),
            };
            assert!(is_right, "page {number} begins with {:?}", &bytes[..8]);
        }
        self.pager.check().unwrap();
    }

    /// Returns whether the kernel puts zeros in any missing page of a range.
    fn puts_zeros(&self, at: usize) -> bool {
        let is_missing = |page: &usize| !self.pagemap.is_populated(*page);
        (at..at + LEN).step_by(5 * PAGE_SIZE).filter(is_missing).any(|page| {
            // SAFETY: changes no byte of what is there.
            unsafe { libc::madvise(page as *mut _, PAGE_SIZE, libc::MADV_POPULATE_WRITE) == 0 }
        })
    }

    /// mremap of all to `to`.
    fn remap(&self, from: usize, to: usize) -> isize {
        let remap =
            RemapCall { from: from..from + LEN, len: LEN, to: Some(to), keeps_source: false };
        let make = || {
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            // SAFETY: both ranges are the test's own.
            match unsafe { libc::mremap(from as *mut _, LEN, LEN, flags, to as *mut u8) } {
                libc::MAP_FAILED => {
                    assert!(!self.puts_zeros(from));
                    -(libc::EINVAL as isize)
                }
                at => {
                    assert!(!self.puts_zeros(to));
                    at as isize
                }
            }
        };
        self.pager.mappings().remap_with(&remap, make)
    }
}

#[test]
fn z1_memory_is_registered_at_every_moment_of_a_move() {
    let setup = Setup::new();
    let (from, to) = (setup.folded(), map());
    assert_eq!(setup.remap(from, to), to as isize);
    setup.assert_kept(to);
    setup.pager.mappings().page_out_at(to..to + LEN);
    setup.assert_kept(to);
}

#[test]
fn z1_memory_that_could_not_be_moved_stays_registered() {
    let setup = Setup::new();
    let from = setup.folded();
    assert!(failed(setup.remap(from, from + PAGE_SIZE)), "they overlap");
    setup.assert_kept(from);
}

/// Single pages of a block that the program fills are joined. A page that mremap has moved keeps its
/// key, but it isn't beside them any more.
#[test]
fn page_that_moved_is_not_joined_with_its_old_neighbours() {
    let config = memfold_engine::Config { delivery: Delivery::Gate, ..program::small_config() };
    let setup = program::Setup::new(config, 64);
    let (from, to) = (setup.addrs(2..3), setup.addrs(40..41));
    let remap =
        RemapCall { from: from.clone(), len: PAGE_SIZE, to: Some(to.start), keeps_source: false };
    let make = || {
        setup.space.remap(from, to.start, false);
        to.start as isize
    };
    setup.pager.mappings().remap_with(&remap, make);
    for page in [40, 0, 1, 3] {
        setup.program.write(page, |bytes| bytes.fill(page as u8));
    }
    setup.assert_sound();
    setup.pager.mappings().page_out_at(setup.addrs(0..64));
    for page in [40, 0, 1, 3] {
        setup.program.read(page, |bytes| assert!(bytes.iter().all(|byte| *byte == page as u8)));
    }
    setup.assert_sound();
}
