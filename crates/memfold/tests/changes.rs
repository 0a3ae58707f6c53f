//! A program changes its address space while its memory is folded: maps, unmaps, moves, grows,
//! drops and protects parts, by several threads, against shadow buffers. This is what `memfold run`
//! does, inside the test's own process. Row B1.
use memfold::config::Config;
use memfold::delivery::background;
use memfold::delivery::program::Watcher;
use memfold::pager::{Pager, Parts, StatsPlace};
use memfold_sys::maps::pagemap::Pagemap;
use memfold_sys::maps::private_anonymous_at;
use memfold_sys::thread::{cpus, memory_bytes, yield_now};
use memfold_sys::uffd::bin::Bin;
use memfold_sys::uffd::space::UffdSpace;
use memfold_sys::uffd::{Uffd, feature};
use memfold_sys::units::PAGE_SIZE;
use memfold_testkit::fill::fill;
use memfold_testkit::random::{Random, seed};
use rustix::mm::{Advice, MapFlags, MprotectFlags, MremapFlags, ProtFlags};
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

const THREADS: usize = 3;
const STEPS: usize = 1500;
const AREA_PAGES: usize = 1200;

static WATCHER: OnceLock<&'static Watcher> = OnceLock::new();
static ENGINE: OnceLock<Arc<Pager>> = OnceLock::new();
/// A test counts what is mapped.
static ALONE: Mutex<()> = Mutex::new(());

fn engine() -> Arc<Pager> {
    let uffd = Arc::new(Uffd::open(feature::HANDLERS, false).expect("userfaultfd"));
    let pagemap = Arc::new(Pagemap::open().expect("/proc"));
    let bin = Arc::new(Bin::new(pagemap.clone()).expect("userfaultfd"));
    let mut config = Config::new(memory_bytes());
    config.resident_bytes = Some(8 << 20);
    let parts = Parts {
        space: Box::new(UffdSpace::with_bin(uffd.clone(), pagemap.clone(), bin)),
        has_move: true,
        has_events: true,
        reports_limit: false,
        stats: StatsPlace::Own(Box::new(memfold::Stats::new())),
        cpus: cpus(),
        disk: None,
        remote: None,
        errands: None,
    };
    let pager = Arc::new(Pager::new(config, parts).expect("an engine"));
    let (start, len) = pager.frames_zone();
    // SAFETY: the engine never touches a frame that is empty.
    unsafe { uffd.register(start, len, false) }.expect("registering frames");
    let watcher = Watcher::new(&pager, &uffd, &pagemap, private_anonymous_at).expect("a watcher");
    for start in background::threads(&pager, 2).into_iter().chain(watcher.threads()) {
        start.by_libc().expect("an engine thread");
    }
    assert!(WATCHER.set(watcher).is_ok(), "one engine in this process");
    pager
}

/// A mapping and what it must hold.
struct Mapping {
    start: usize,
    shadow: Vec<u8>,
    writable: bool,
}

impl Mapping {
    fn pages(&self) -> usize {
        self.shadow.len() / PAGE_SIZE
    }

    fn addrs(&self, pages: &Range<usize>) -> (*mut u8, usize) {
        ((self.start + pages.start * PAGE_SIZE) as *mut u8, pages.len() * PAGE_SIZE)
    }

    fn shadow(&mut self, pages: &Range<usize>) -> &mut [u8] {
        &mut self.shadow[pages.start * PAGE_SIZE..pages.end * PAGE_SIZE]
    }

    fn read(&self, page: usize) {
        let (at, len) = self.addrs(&(page..page + 1));
        // SAFETY: the page is mapped for reading and is this thread's own.
        let bytes = unsafe { std::slice::from_raw_parts(at, len) };
        assert!(
            *bytes == self.shadow[page * PAGE_SIZE..][..PAGE_SIZE],
            "page {page} at {at:?} is wrong"
        );
    }

    fn write(&mut self, page: usize, random: &mut Random) {
        let (at, _) = self.addrs(&(page..page + 1));
        let shadow = self.shadow(&(page..page + 1));
        fill(random, shadow);
        // SAFETY: the page is mapped for writing and is this thread's own.
        unsafe { std::ptr::copy_nonoverlapping(shadow.as_ptr(), at, PAGE_SIZE) };
    }
}

/// One thread of the program.
struct Owner {
    pager: Arc<Pager>,
    random: Random,
    mappings: Vec<Mapping>,
}

impl Owner {
    fn map(&mut self) {
        let pages = 1 + self.random.below(AREA_PAGES);
        let (prot, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let at = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), pages * PAGE_SIZE, prot, flags)
        };
        let start = at.expect("a mapping") as usize;
        let mut mapping = Mapping { start, shadow: vec![0; pages * PAGE_SIZE], writable: true };
        // Some of it is there already when it is adopted.
        for _ in 0..self.random.below(40) {
            mapping.write(self.random.below(pages), &mut self.random);
        }
        let range = [(start, start + pages * PAGE_SIZE)];
        while !WATCHER.get().expect("set at the start").adopt(&range, &mut |_, _| true) {
            yield_now();
        }
        self.mappings.push(mapping);
    }

    fn span(&mut self, at: usize) -> Range<usize> {
        let pages = self.mappings[at].pages();
        let from = self.random.below(pages);
        from..(from + 1 + self.random.below(200)).min(pages)
    }

    /// Unmaps a part; what was behind it becomes a mapping of its own.
    fn unmap(&mut self, at: usize) {
        let span = self.span(at);
        let mapping = &mut self.mappings[at];
        let (addr, len) = mapping.addrs(&span);
        // SAFETY: the pages are this thread's own, and no reference into them is alive.
        unsafe { rustix::mm::munmap(addr.cast(), len) }.expect("munmap");
        let behind = mapping.shadow.split_off(span.end * PAGE_SIZE);
        mapping.shadow.truncate(span.start * PAGE_SIZE);
        let (start, writable) = (mapping.start + span.end * PAGE_SIZE, mapping.writable);
        if !behind.is_empty() {
            self.mappings.push(Mapping { start, shadow: behind, writable });
        }
        self.mappings.retain(|m| !m.shadow.is_empty());
    }

    /// Moves a whole mapping, and makes it longer or shorter by some pages.
    fn remap(&mut self, at: usize) {
        let mapping = &mut self.mappings[at];
        let (addr, len) = mapping.addrs(&(0..mapping.pages()));
        let new_pages = match self.random.below(3) {
            0 => mapping.pages(),
            1 => mapping.pages() + 1 + self.random.below(64),
            _ => 1 + self.random.below(mapping.pages()),
        };
        let new_len = new_pages * PAGE_SIZE;
        // SAFETY: the old mapping is this thread's own; the new place is one that it has just
        // reserved.
        let new = unsafe {
            if self.random.below(2) == 0 {
                let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
                let to = rustix::mm::mmap_anonymous(
                    std::ptr::null_mut(),
                    new_len,
                    ProtFlags::empty(),
                    flags,
                );
                let to = to.expect("a place to move to");
                rustix::mm::mremap_fixed(addr.cast(), len, new_len, MremapFlags::MAYMOVE, to)
            } else {
                rustix::mm::mremap(addr.cast(), len, new_len, MremapFlags::MAYMOVE)
            }
        };
        mapping.start = new.expect("mremap") as usize;
        mapping.shadow.resize(new_len, 0);
    }

    fn drop_part(&mut self, at: usize) {
        let span = self.span(at);
        let mapping = &mut self.mappings[at];
        let (addr, len) = mapping.addrs(&span);
        // SAFETY: the pages are this thread's own, and it gives up their bytes.
        unsafe { rustix::mm::madvise(addr.cast(), len, Advice::LinuxDontNeed) }.expect("madvise");
        mapping.shadow(&span).fill(0);
    }

    fn protect(&mut self, at: usize) {
        let mapping = &mut self.mappings[at];
        mapping.writable = !mapping.writable;
        let flags = if mapping.writable {
            MprotectFlags::READ | MprotectFlags::WRITE
        } else {
            MprotectFlags::READ
        };
        let (addr, len) = mapping.addrs(&(0..mapping.pages()));
        // SAFETY: the pages are this thread's own; it writes to them only while they are writable.
        unsafe { rustix::mm::mprotect(addr.cast(), len, flags) }.expect("mprotect");
    }

    fn step(&mut self) {
        if self.mappings.len() < 2 || (self.mappings.len() < 8 && self.random.below(20) == 0) {
            self.map();
        }
        let at = self.random.below(self.mappings.len());
        let span = self.span(at);
        let mapping = &mut self.mappings[at];
        match self.random.below(100) {
            0..30 if mapping.writable => mapping.write(span.start, &mut self.random),
            30..45 if mapping.writable => {
                span.for_each(|page| mapping.write(page, &mut self.random))
            }
            0..60 => mapping.read(span.start),
            60..74 => span.for_each(|page| mapping.read(page)),
            74..82 => {
                let (addr, len) = mapping.addrs(&span);
                self.pager.page_out_at(addr as usize..addr as usize + len);
            }
            82..88 => self.drop_part(at),
            88..92 => self.unmap(at),
            92..97 => self.remap(at),
            _ => self.protect(at),
        }
    }

    fn finish(mut self) {
        for mapping in &self.mappings {
            (0..mapping.pages()).for_each(|page| mapping.read(page));
        }
        while !self.mappings.is_empty() {
            self.unmap(0);
        }
    }
}

/// The kernel registers what is mapped and says nothing of holes. Between that and the adoption the
/// program may map something there, or move its break: to take that for managed would be to read
/// zeros where it was folded.
#[test]
fn what_is_mapped_after_the_rest_was_registered_is_not_managed_before_it_is_registered_too() {
    let _alone = ALONE.lock().unwrap();
    let pager = ENGINE.get_or_init(engine);
    let watcher = WATCHER.get().expect("set at the start");
    const LEN: usize = 1 << 20;
    let map = |at: usize, len: usize, fixed: MapFlags| {
        let (prot, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE | fixed);
        // SAFETY: a fresh mapping, at an address of the kernel's choice or in a hole that was part
        // of one.
        unsafe { rustix::mm::mmap_anonymous(at as *mut _, len, prot, flags) }.expect("a mapping")
            as usize
    };
    let start = map(0, 3 * LEN, MapFlags::empty());
    let (hole, behind, end) = (start + LEN, start + 2 * LEN, start + 3 * LEN);
    // SAFETY: the test's own, and it has no reference into it.
    unsafe { rustix::mm::munmap(hole as *mut _, LEN) }.expect("munmap");
    let mut parts: Vec<Mapping> = [start, hole, behind]
        .map(|start| Mapping { start, shadow: vec![0; LEN], writable: true })
        .into();
    let mut random = Random::new(seed(20_261_123));
    let mut write =
        |part: &mut Mapping| (0..part.pages()).for_each(|page| part.write(page, &mut random));
    write(&mut parts[0]);
    write(&mut parts[2]);
    let mut asked = false;
    let mut still = |_, _| {
        if !std::mem::replace(&mut asked, true) {
            map(hole, LEN, MapFlags::FIXED);
            write(&mut parts[1]);
        }
        true
    };
    assert!(!watcher.adopt(&[(start, end)], &mut still), "a part is not registered");
    assert!(!pager.manages(hole) && !pager.manages(behind - 1));
    assert!(pager.manages(start) && pager.manages(behind), "what is registered is taken");
    while !watcher.adopt(&[(start, end)], &mut |_, _| true) {
        yield_now();
    }
    pager.page_out_at(start..end);
    for part in &parts {
        (0..part.pages()).for_each(|page| part.read(page));
    }
    // SAFETY: as above.
    unsafe { rustix::mm::munmap(start as *mut _, 3 * LEN) }.expect("munmap");
}

#[test]
fn b1_changes_of_the_address_space_keep_every_byte() {
    let _alone = ALONE.lock().unwrap();
    let pager = ENGINE.get_or_init(engine);
    let mut random = Random::new(seed(20_261_121));
    let threads: Vec<_> = (0..THREADS)
        .map(|_| {
            let mut owner =
                Owner { pager: pager.clone(), random: random.fork(), mappings: Vec::new() };
            std::thread::spawn(move || {
                (0..STEPS).for_each(|_| owner.step());
                owner.finish();
            })
        })
        .collect();
    let results: Vec<_> = threads.into_iter().map(|t| t.join()).collect();
    assert!(results.iter().all(|r| r.is_ok()), "a thread saw wrong bytes");
    // An event is applied soon after it was read, which is when munmap returns.
    let start = Instant::now();
    while pager.mapped_bytes() > 0 && start.elapsed() < Duration::from_secs(600) {
        yield_now();
    }
    pager.check().unwrap();
    assert_eq!(pager.mapped_bytes(), 0, "all was unmapped");
    assert_eq!(pager.stats().check_sums(), Ok(()));
    assert!(pager.stats().events.load(Relaxed) > 0 && pager.stats().zswpin.load(Relaxed) > 0);
}
