//! A managed program for tests. Its memory is that of the test's process, and its engine is a real one
//! without threads, so the kernel itself judges what is made of each call. There is neither gate nor
//! run: a test makes the calls, as the gate would, with a closure for the call itself. Nobody serves
//! faults: a test brings home what it looks at.
use crate::marks::state::ProgramState;
use crate::program::{ManagedProgram, managed};
use core::ops::Range;
use memfold::Delivery;
use memfold::config::Config;
use memfold_os::Errno;
use memfold_os::raw::system_call;
use memfold_os::units::PAGE_SIZE;
use std::sync::{OnceLock, PoisonError, RwLock};
use std::vec::Vec;

/// Pages of what lies unmapped, as far as the kernel is concerned, on both sides of a test's memory.
const GUARD: usize = 16;

/// Held by tests that fork, and by those whose pages no fork may share meanwhile: what is shared can't
/// be moved.
static FORKS: RwLock<()> = RwLock::new(());

/// Does what forks.
pub fn forking<T>(what: impl FnOnce() -> T) -> T {
    let _alone = FORKS.write().unwrap_or_else(PoisonError::into_inner);
    what()
}

/// Does what a fork would disturb.
fn unforked<T>(what: impl FnOnce() -> T) -> T {
    let _shared = FORKS.read().unwrap_or_else(PoisonError::into_inner);
    what()
}

fn program(by_protection: bool) -> Option<&'static ManagedProgram> {
    let mut config = Config::new(1 << 30);
    config.limit_bytes = Some(1 << 29);
    config.delivery = Delivery::Gate;
    config.by_protection = by_protection;
    let program = managed(config);
    assert!(program.is_some() || !by_protection, "/proc/self/mem can be opened");
    program
}

/// Runs a test with each kind of paging that works here: by protection always does. The programs are
/// those of all tests, which have memory of their own in them.
pub fn each_paging(test: impl Fn(&'static ManagedProgram)) {
    static PROGRAMS: [OnceLock<Option<&ManagedProgram>>; 2] = [const { OnceLock::new() }; 2];
    for (place, by_protection) in PROGRAMS.iter().zip([true, false]) {
        let program = place.get_or_init(|| program(by_protection));
        program.iter().for_each(|program| unforked(|| test(program)));
    }
}

/// As [`each_paging`], with programs of the test's own, for what is true of all of a program.
pub fn each_paging_alone(test: impl Fn(&'static ManagedProgram)) {
    [true, false].into_iter().filter_map(program).for_each(|program| unforked(|| test(program)));
}

/// The raw call.
pub fn raw(nr: i64, args: [usize; 6]) -> isize {
    // SAFETY: tests use their own memory.
    unsafe { system_call(nr, args) }
        .map_or_else(|e| -(e.raw_os_error() as isize), |value| value as isize)
}

/// What a call that fails so returns.
pub fn error(e: Errno) -> isize {
    -(e.raw_os_error() as isize)
}

/// Addresses of a test: a room in which nothing can be accessed yet.
pub struct Room {
    start: usize,
    pages: usize,
}

impl Room {
    /// One of so many pages.
    pub fn new(pages: usize) -> Room {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let len = (pages + 2 * GUARD) * PAGE_SIZE;
        let args = [0, len, libc::PROT_NONE as usize, flags as usize, usize::MAX, 0];
        let at = raw(libc::SYS_mmap, args);
        assert!(at > 0, "{at}");
        Room { start: at as usize + GUARD * PAGE_SIZE, pages }
    }

    /// Some of its pages.
    pub fn pages(&self, pages: Range<usize>) -> Range<usize> {
        assert!(pages.end <= self.pages);
        self.start + pages.start * PAGE_SIZE..self.start + pages.end * PAGE_SIZE
    }
}

/// A program, and calls of it.
#[derive(Copy, Clone)]
pub struct Calls(pub &'static ManagedProgram);

impl Calls {
    /// Makes a call as the gate does.
    pub fn call(self, nr: i64, args: [usize; 6]) -> isize {
        self.0.change(nr as usize, &args, &mut |args| raw(nr, *args))
    }

    /// Maps fresh memory at a place, with these flags more.
    pub fn map_with(self, range: &Range<usize>, access: i32, flags: i32) -> isize {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | flags;
        let args = [range.start, range.len(), access as usize, flags as usize, usize::MAX, 0];
        self.call(libc::SYS_mmap, args)
    }

    /// Maps fresh memory at a place, and writes to each page of it. It is managed then.
    pub fn map(self, range: &Range<usize>) {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        assert_eq!(self.map_with(range, access, 0), range.start as isize);
        // What is new is filled by faults, which nobody serves here.
        self.0.leave(range);
        self.write(range, 0);
        self.with_state(|state| self.0.adopt(state, range));
        assert_eq!(self.managed(range), [range.clone()]);
    }

    /// Unmaps a range.
    pub fn unmap(self, range: &Range<usize>) -> isize {
        self.call(libc::SYS_munmap, [range.start, range.len(), 0, 0, 0, 0])
    }

    /// Gives advice on a range.
    pub fn advise(self, range: &Range<usize>, advice: i32) -> isize {
        self.call(libc::SYS_madvise, [range.start, range.len(), advice as usize, 0, 0, 0])
    }

    /// Moves memory, or changes its length.
    pub fn remap(self, from: &Range<usize>, len: usize, flags: i32, to: usize) -> isize {
        self.call(libc::SYS_mremap, [from.start, from.len(), len, flags as usize, to, 0])
    }

    /// Folds what is managed of a range. A page that the kernel has in hand for a moment stays, so it
    /// is tried until all are away.
    pub fn fold(self, range: &Range<usize>) {
        let is_home = |page: usize| self.0.pagemap.is_populated(page);
        let managed = self.managed(range);
        while managed.iter().any(|part| part.clone().step_by(PAGE_SIZE).any(is_home)) {
            self.0.pager.mappings().page_out_at(range.clone());
        }
    }

    /// What of a range is managed.
    pub fn managed(self, range: &Range<usize>) -> Vec<Range<usize>> {
        self.0.pager.mappings().managed_parts(range)
    }

    /// Does something with the state.
    pub fn with_state<T>(self, with: impl FnOnce(&mut ProgramState) -> T) -> T {
        with(&mut self.0.state.lock())
    }

    /// Writes a number of its own to each page of a range that is not managed; `first`: to the first.
    pub fn write(self, range: &Range<usize>, first: usize) {
        for (n, page) in range.clone().step_by(PAGE_SIZE).enumerate() {
            // SAFETY: the test's own memory, writable.
            unsafe { (page as *mut usize).write_volatile(first + n + 1) };
        }
    }

    /// Brings a range home, and reads the numbers.
    pub fn read(self, range: &Range<usize>) -> Vec<usize> {
        self.0.leave(range);
        let pages = range.clone().step_by(PAGE_SIZE);
        // SAFETY: the test's own memory, readable.
        pages.map(|page| unsafe { (page as *const usize).read_volatile() }).collect()
    }
}

/// The numbers that [`Calls::map`] has written to so many pages.
pub fn numbers(pages: Range<usize>) -> Vec<usize> {
    pages.map(|n| n + 1).collect()
}
