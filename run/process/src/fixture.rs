//! A managed program for tests. Its memory is that of the test's process. Its engine is a real one
//! without threads, so the kernel itself shows the result of each call.
//!
//! There is no gate and no run: a test makes each call as the gate would, with a closure for the
//! call itself. No thread handles faults, so a test loads memory before it reads it.
use crate::adoption::Adoption;
use crate::mappings::change::ChangeCalls;
use crate::marks::state::ProgramState;
use crate::program::{ManagedProgram, managed};
use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use memfold_engine::Delivery;
use memfold_engine::config::{Config, PagingKind};
use memfold_os::Errno;
use memfold_os::raw::system_call;
use memfold_os::units::PAGE_SIZE;
use std::sync::{OnceLock, PoisonError, RwLock};
use std::vec::Vec;

/// The limit of each program, bytes.
pub const LIMIT: u64 = 1 << 29;

/// Pages on both sides of a test's memory that are left inaccessible.
const GUARD: usize = 16;

/// Write-locked by tests that fork. Read-locked by tests whose pages no fork may share meanwhile,
/// because shared pages can't be moved.
static FORKS: RwLock<()> = RwLock::new(());

/// Runs code that forks.
pub fn forking<T>(what: impl FnOnce() -> T) -> T {
    let _alone = FORKS.write().unwrap_or_else(PoisonError::into_inner);
    what()
}

/// Runs code that a fork would disturb.
fn unforked<T>(what: impl FnOnce() -> T) -> T {
    let _shared = FORKS.read().unwrap_or_else(PoisonError::into_inner);
    what()
}

const PAGINGS: [PagingKind; 3] =
    [PagingKind::Guard, PagingKind::Protection, PagingKind::Userfaultfd];

fn program(paging: PagingKind) -> Option<&'static ManagedProgram> {
    let mut config = Config::new(1 << 30);
    config.limit_bytes = Some(LIMIT);
    config.delivery = Delivery::Gate;
    config.paging = paging;
    let program = managed(config);
    assert!(program.is_some() || paging != PagingKind::Protection, "/proc/self/mem can be opened");
    if let Some(program) = program {
        std::thread::spawn(|| program.memory().paging().read_moves());
    }
    program
}

/// Runs a test with each kind of paging that works here. Paging by protection always does. The
/// programs are shared by all tests, each of which has memory of its own in them.
pub fn each_paging(test: impl Fn(&'static ManagedProgram)) {
    static PROGRAMS: [OnceLock<Option<&ManagedProgram>>; 3] = [const { OnceLock::new() }; 3];
    for (place, paging) in PROGRAMS.iter().zip(PAGINGS) {
        let program = place.get_or_init(|| program(paging));
        program.iter().for_each(|program| unforked(|| test(program)));
    }
}

/// Runs a test as [`each_paging`] does, but with programs of its own, for properties of a whole
/// program.
pub fn each_paging_alone(test: impl Fn(&'static ManagedProgram)) {
    PAGINGS.into_iter().filter_map(program).for_each(|program| unforked(|| test(program)));
}

/// Makes a raw system call. Returns its value, or the negative error number.
pub fn raw(nr: i64, args: [usize; 6]) -> isize {
    // SAFETY: tests name only their own memory.
    unsafe { system_call(nr, args) }
        .map_or_else(|e| -(e.raw_os_error() as isize), |value| value as isize)
}

/// Returns the result of a call that fails with `e`.
pub fn error(e: Errno) -> isize {
    -(e.raw_os_error() as isize)
}

/// Addresses of a test, at first inaccessible.
pub struct Room {
    start: usize,
    pages: usize,
}

impl Room {
    /// Reserves a room of so many pages.
    pub fn new(pages: usize) -> Room {
        Room::reserve(0, pages, 0)
    }

    /// Reserves a room where the kernel maps nothing unasked. So a test may unmap a part of it.
    pub fn remote(pages: usize) -> Room {
        static NEXT: AtomicUsize = AtomicUsize::new(0x1000_0000_0000);
        let at = NEXT.fetch_add(1 << 30, Relaxed);
        Room::reserve(at, pages, libc::MAP_FIXED_NOREPLACE)
    }

    fn reserve(at: usize, pages: usize, flags: i32) -> Room {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | flags;
        let len = (pages + 2 * GUARD) * PAGE_SIZE;
        let args = [at, len, libc::PROT_NONE as usize, flags as usize, usize::MAX, 0];
        let at = raw(libc::SYS_mmap, args);
        assert!(at > 0, "{at}");
        Room { start: at as usize + GUARD * PAGE_SIZE, pages }
    }

    /// Returns the addresses of some of its pages.
    pub fn pages(&self, pages: Range<usize>) -> Range<usize> {
        assert!(pages.end <= self.pages);
        self.start + pages.start * PAGE_SIZE..self.start + pages.end * PAGE_SIZE
    }
}

/// A program, and calls that it makes.
#[derive(Copy, Clone)]
pub struct Calls(pub &'static ManagedProgram);

impl Calls {
    /// Makes a call as the gate does.
    pub fn call(self, nr: i64, args: [usize; 6]) -> isize {
        ChangeCalls::of(self.0).change(nr as usize, &args, &mut |args| raw(nr, *args))
    }

    /// Maps fresh memory at a place, with additional flags.
    pub fn map_with(self, range: &Range<usize>, access: i32, flags: i32) -> isize {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | flags;
        let args = [range.start, range.len(), access as usize, flags as usize, usize::MAX, 0];
        self.call(libc::SYS_mmap, args)
    }

    /// Maps fresh memory at a place, writes to each page of it, and has it managed.
    pub fn map(self, range: &Range<usize>) {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        assert_eq!(self.map_with(range, access, 0), range.start as isize);
        // New managed memory is filled by faults, which no thread handles here. So it is written
        // while it is unmanaged.
        self.0.memory().leave(range);
        self.write(range, 0);
        self.with_state(|state| Adoption::of(self.0).adopt(state, range));
        assert_eq!(self.managed(range), [range.clone()]);
    }

    pub fn unmap(self, range: &Range<usize>) -> isize {
        self.call(libc::SYS_munmap, [range.start, range.len(), 0, 0, 0, 0])
    }

    pub fn advise(self, range: &Range<usize>, advice: i32) -> isize {
        self.call(libc::SYS_madvise, [range.start, range.len(), advice as usize, 0, 0, 0])
    }

    /// Moves memory, or changes its length.
    pub fn remap(self, from: &Range<usize>, len: usize, flags: i32, to: usize) -> isize {
        self.call(libc::SYS_mremap, [from.start, from.len(), len, flags as usize, to, 0])
    }

    /// Folds the managed parts of a range. The kernel may use a page for a moment, so folding is
    /// repeated until no page is resident.
    pub fn fold(self, range: &Range<usize>) {
        let is_home = |page: usize| self.0.memory().pagemap().is_populated(page);
        let managed = self.managed(range);
        while managed.iter().any(|part| part.clone().step_by(PAGE_SIZE).any(is_home)) {
            self.0.pager().mappings().page_out_at(range.clone());
        }
    }

    /// Returns the managed parts of a range.
    pub fn managed(self, range: &Range<usize>) -> Vec<Range<usize>> {
        self.0.pager().mappings().managed_parts(range)
    }

    /// Returns the parts of a range where the program handles faults itself.
    pub fn own_faults(self, range: &Range<usize>) -> Vec<Range<usize>> {
        let memory = self.0.memory();
        self.with_state(|state| memory.before(state, core::slice::from_ref(range)).faults)
    }

    /// Calls `with` with the locked state.
    pub fn with_state<T>(self, with: impl FnOnce(&mut ProgramState) -> T) -> T {
        with(&mut self.0.memory().state().lock())
    }

    /// Writes a distinct number to each page of a range that is not managed, from `first + 1` on.
    pub fn write(self, range: &Range<usize>, first: usize) {
        for (n, page) in range.clone().step_by(PAGE_SIZE).enumerate() {
            // SAFETY: the page is the test's own and writable, and `page` is aligned.
            unsafe { (page as *mut usize).write_volatile(first + n + 1) };
        }
    }

    /// Loads a range into memory, and returns the numbers in its pages.
    pub fn read(self, range: &Range<usize>) -> Vec<usize> {
        self.0.memory().leave(range);
        let pages = range.clone().step_by(PAGE_SIZE);
        // SAFETY: the page is the test's own and readable, and `page` is aligned.
        pages.map(|page| unsafe { (page as *const usize).read_volatile() }).collect()
    }
}

/// Returns the numbers that [`Calls::map`] wrote to these pages.
pub fn numbers(pages: Range<usize>) -> Vec<usize> {
    pages.map(|n| n + 1).collect()
}
