use super::*;
use crate::raw::read_if_there;
use crate::sync::MutexGuard;
use crate::thread::pin;

const PAGES: usize = 16;
const LEN: usize = PAGES * PAGE_SIZE;

/// How bytes get into hidden memory, and what hides it.
#[derive(Copy, Clone, PartialEq, Eq)]
enum Kind {
    Forced,
    Moved,
    Guarded,
}

/// Returns the kinds that this kernel has.
fn kinds() -> impl Iterator<Item = Kind> {
    let has_guards = Protection::open().unwrap().with_guards().is_ok();
    if !has_guards {
        eprintln!("SKIPPED, NOTHING WAS TESTED: guard pages need Linux 6.16");
    }
    [Kind::Forced, Kind::Moved].into_iter().chain(has_guards.then_some(Kind::Guarded))
}

/// A test's zones, with the lock of forks, because pages that a fork shares aren't evicted.
struct Setup {
    _alone: MutexGuard<'static, ()>,
    space: ProtectionSpace,
    memory: Zone,
    frame: Zone,
}

impl Setup {
    /// Makes pages that hold their number, except for one that is missing.
    fn new(kind: Kind) -> Setup {
        let _alone = crate::FORKS.lock();
        // A page that another CPU has just been given is in that CPU's batch, and stays.
        pin(rustix::thread::sched_getcpu());
        let (protection, pagemap) = (Protection::open().unwrap(), Pagemap::open().unwrap());
        let protection = match kind {
            Kind::Forced => protection,
            Kind::Moved => Protection { forces: false, ..protection },
            Kind::Guarded => protection.with_guards().expect("Linux 6.16"),
        };
        let [memory, frame] = [(); 2].map(|()| Zone::reserve(LEN, LEN).unwrap());
        for page in (0..PAGES).filter(|page| *page != 3) {
            // SAFETY: the page is inside the zone.
            unsafe { memory.as_ptr().add(page * PAGE_SIZE).write_bytes(page as u8, PAGE_SIZE) };
        }
        Setup {
            _alone,
            space: ProtectionSpace::new(Arc::new(protection), Arc::new(pagemap)),
            memory,
            frame,
        }
    }

    fn take(&self) -> usize {
        // SAFETY: only the test uses the zones.
        unsafe { self.space.take_by_copy(self.memory.start(), self.frame.as_ptr(), LEN) }
    }

    /// Returns the first byte of a resident page, or the error of reading it.
    fn byte(&self, page: usize) -> Result<u8, Errno> {
        let mut byte = 0;
        let from = self.memory.start() + page * PAGE_SIZE;
        // SAFETY: `byte` has room for one.
        unsafe { read_if_there(from, &raw mut byte, 1) }.map(|_| byte)
    }

    fn taken(&self, page: usize) -> u8 {
        // SAFETY: the page is inside the zone.
        unsafe { self.frame.as_ptr().add(page * PAGE_SIZE).read_volatile() }
    }

    fn is_there(&self, page: usize) -> bool {
        self.space.is_populated(self.memory.start() + page * PAGE_SIZE)
    }
}

fn number(page: usize) -> u8 {
    if page == 3 { 0 } else { page as u8 }
}

#[test]
fn pages_go_with_their_bytes_are_hidden_and_come_back() {
    kinds().map(Setup::new).for_each(go_and_come_back);
}

fn go_and_come_back(setup: Setup) {
    // SAFETY: the bytes are inside the zone.
    unsafe { setup.frame.as_ptr().write_bytes(0xAA, LEN) };
    for turn in 0..3 {
        assert_eq!(setup.take(), LEN);
        for page in 0..PAGES {
            assert!(!setup.is_there(page) && setup.taken(page) == number(page), "{turn} {page}");
            assert_eq!(setup.byte(page), Err(Errno::FAULT), "hidden");
        }
        let (address, from) = (setup.memory.start(), setup.frame.as_ptr());
        // SAFETY: only the test uses the zones.
        unsafe { setup.space.copy(address, from, LEN, false) }.unwrap();
        (0..PAGES).for_each(|page| assert_eq!(setup.byte(page), Ok(number(page))));
    }
}

/// A pipe holds a page, like a device that writes to it.
#[test]
fn held_page_stays_with_the_pages_after_it() {
    kinds().map(Setup::new).for_each(stay_while_held);
}

fn stay_while_held(setup: Setup) {
    let (out, into) = std::io::pipe().unwrap();
    let span = [setup.memory.start() + 7 * PAGE_SIZE, PAGE_SIZE];
    let pipe = std::os::fd::AsRawFd::as_raw_fd(&into) as usize;
    // SAFETY: the page is present; no thread writes to it while the pipe has it.
    let result =
        unsafe { system_call(libc::SYS_vmsplice, [pipe, span.as_ptr() as usize, 1, 0, 0, 0]) };
    assert_eq!(result.unwrap(), PAGE_SIZE as i64);
    assert_eq!(setup.take(), 7 * PAGE_SIZE);
    for page in 7..PAGES {
        assert!(setup.is_there(page) && setup.byte(page) == Ok(page as u8), "{page}");
        // SAFETY: the page is inside the zone, and writable.
        unsafe { setup.memory.as_ptr().add(page * PAGE_SIZE).write_volatile(99) };
    }
    assert_eq!((setup.byte(6), setup.taken(6)), (Err(Errno::FAULT), 6));
    drop((out, into));
    // It is evicted when the pipe no longer holds it.
    assert_eq!(setup.take(), LEN);
    assert_eq!(setup.taken(9), 99);
}

#[test]
fn guarded_pages_take_no_mapping_each() {
    if !kinds().any(|kind| kind == Kind::Guarded) {
        return;
    }
    let setup = Setup::new(Kind::Guarded);
    let range = setup.memory.start()..setup.memory.start() + LEN;
    let mappings = || {
        let mut count = 0;
        each_area(|area| {
            count += (area.start < range.end && area.end > range.start) as usize;
            Continue(())
        })
        .unwrap();
        count
    };
    for page in (1..PAGES).step_by(2) {
        let at = range.start + page * PAGE_SIZE;
        // SAFETY: only the test uses the zones.
        let taken = unsafe { setup.space.take_by_copy(at, setup.frame.as_ptr(), PAGE_SIZE) };
        assert_eq!(
            (taken, setup.byte(page), setup.byte(page - 1)),
            (PAGE_SIZE, Err(Errno::FAULT), Ok(number(page - 1)))
        );
        assert_eq!(mappings(), 1);
    }
    setup.space.protection.show(&range);
    assert_eq!((setup.byte(1), setup.byte(2)), (Ok(0), Ok(2)), "guards become missing pages");
}

/// While pages are loaded and evicted, other threads read no byte but theirs.
#[test]
fn no_thread_sees_a_page_before_it_has_its_bytes() {
    for kind in kinds() {
        let setup = Setup::new(kind);
        let at = setup.memory.start() + 5 * PAGE_SIZE;
        let (frame, ends) = (setup.frame.start(), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while ends.load(SeqCst) == 0 {
                    // The kernel reads as a thread of the program would, and can't be interrupted.
                    match setup.byte(5) {
                        Ok(byte) => assert_eq!(byte, 5),
                        Err(e) => assert_eq!(e, Errno::FAULT),
                    }
                }
            });
            for _ in 0..2000 {
                // SAFETY: only the test uses the zones, and the frame has room.
                unsafe {
                    if setup.space.take_by_copy(at, frame as *mut u8, PAGE_SIZE) == PAGE_SIZE {
                        setup.space.copy(at, frame as *const u8, PAGE_SIZE, false).unwrap();
                    }
                }
            }
            ends.store(1, SeqCst);
        });
    }
}

#[test]
fn cover_hides_only_blocks_without_a_page() {
    let setup = Setup::new(Kind::Forced);
    let range = setup.memory.start()..setup.memory.start() + LEN;
    let page = |page: usize| range.start + page * PAGE_SIZE;
    // SAFETY: only the test uses the zone.
    unsafe { setup.space.discard(page(4), 8 * PAGE_SIZE) }.unwrap();
    // SAFETY: the page is inside the zone.
    unsafe { setup.memory.as_ptr().add(9 * PAGE_SIZE).write_volatile(77) };
    let block = 4 * PAGE_SIZE;
    let is_hidden = |page: usize| setup.byte(page) == Err(Errno::FAULT);
    setup.space.protection.cover(&range, block, &setup.space.pagemap, false).unwrap();
    for each in 0..PAGES {
        let near: Vec<usize> = (0..PAGES).filter(|p| p / 4 == each / 4).collect();
        let has_page = |p: &usize| *p != 3 && (!(4..12).contains(p) || *p == 9);
        assert_eq!(is_hidden(each), !near.iter().any(has_page), "{each}");
    }
    assert_eq!((setup.byte(9), setup.byte(15)), (Ok(77), Ok(15)));
}

#[test]
fn cover_of_empty_memory_hides_all_and_leaves_no_page() {
    for (is_held, write_at) in [(false, None), (false, Some(0)), (false, Some(1)), (true, None)] {
        let setup = Setup::new(Kind::Forced);
        let range = setup.memory.start()..setup.memory.start() + LEN;
        // SAFETY: only the test uses the zone.
        unsafe { setup.space.discard(range.start, LEN) }.unwrap();
        if let Some(page) = write_at {
            // SAFETY: the page is inside the zone.
            unsafe { setup.memory.as_ptr().add(page * PAGE_SIZE).write_volatile(7) };
        }
        let (protection, map) = (&setup.space.protection, &setup.space.pagemap);
        protection.cover(&range, 4 * PAGE_SIZE, map, is_held).unwrap();
        let is_hidden = |page: usize| setup.byte(page) == Err(Errno::FAULT);
        assert!((4..PAGES).all(is_hidden));
        let stays = is_held || write_at.is_some();
        assert!((0..4).all(|page| is_hidden(page) != stays), "{is_held} {write_at:?}");
        assert_eq!((0..PAGES).any(|page| setup.is_there(page)), stays);
        write_at.iter().for_each(|page| assert_eq!(setup.byte(*page), Ok(7)));
    }
}
