//! `PAGEMAP_SCAN` (Linux 6.7, `include/uapi/linux/fs.h`): which pages of a range are populated. On
//! older kernels it reads the page map (`Documentation/admin-guide/mm/pagemap.rst`).
//!
//! A page is populated if it is in memory or in the kernel's swap. `mincore` reports only memory,
//! so a swapped-out page looks like one that was never touched.
//!
//! A child of fork may be unable to open its own: it isn't dumpable any more, or sees no /proc.
//! Then it asks the kernel to populate page by page for reading. Where missing pages belong to a
//! userfaultfd that serves only the program's own accesses, that fails for a missing page, and
//! loads a swapped-out one.
use crate::Errno;
use crate::maps::own::OwnFile;
use crate::raw::{ioctl, populates};
use crate::units::PAGE_SIZE;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
use rustix::fd::{AsRawFd, OwnedFd};

/// The request number.
pub const PAGEMAP_SCAN: u64 = 0xc060_6610;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
const PAGE_IS_HUGE: u64 = 1 << 6;
/// Guard pages (Linux 6.16). Otherwise they are shown as swapped.
const PAGE_IS_GUARD: u64 = 1 << 8;
/// The categories of populated pages.
const THERE: u64 = PAGE_IS_PRESENT | PAGE_IS_SWAPPED;
/// Bits of a word of the map: only this mapping has the page; it is a guard page (Linux 6.15); it is
/// in the kernel's swap; in memory.
const WORD_EXCLUSIVE: u64 = 1 << 56;
const WORD_GUARD: u64 = 1 << 58;
const WORD_SWAPPED: u64 = 1 << 62;
const WORD_PRESENT: u64 = 1 << 63;
/// Words that are read at once.
const WORDS: usize = 256;

/// Whether the kernel has not refused [`PAGE_IS_GUARD`] yet.
static KNOWS_GUARDS: AtomicBool = AtomicBool::new(true);

#[repr(C)]
#[derive(Copy, Clone, Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

#[repr(C)]
#[derive(Default)]
struct ScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `/proc/self/pagemap`, open.
pub struct Pagemap {
    file: OwnFile,
}

impl Pagemap {
    /// Opens the page map of the calling process.
    ///
    /// # Errors
    /// The errors of `open`: ENOENT without /proc.
    pub fn open() -> Result<Pagemap, Errno> {
        Ok(Pagemap { file: OwnFile::open(c"/proc/self/pagemap")? })
    }

    /// Moves the descriptor to a number from `least` on.
    ///
    /// # Errors
    /// EMFILE: no number is free.
    pub fn at_least(self, least: i32) -> Result<Pagemap, Errno> {
        Ok(Pagemap { file: self.file.at_least(least)? })
    }

    /// Returns the descriptor.
    pub fn fd(&self) -> &OwnedFd {
        self.file.fd()
    }

    /// Opens its own page map in a child of fork, in place of its parent's, under the same number.
    ///
    /// # Errors
    /// The errors of [`Pagemap::open`]. From then on answers are right only for readable pages of a
    /// userfaultfd that serves only the program's own accesses.
    pub fn reopen(&self) -> Result<(), Errno> {
        self.file.reopen()
    }

    /// Calls `each(start, end)` for every run of pages in `[start, end)` that holds data (present
    /// or in the kernel's swap), in ascending order. Addresses are page-aligned.
    ///
    /// # Errors
    /// The kernel's: EFAULT when the range leaves the address space.
    pub fn for_each_populated(
        &self,
        start: usize,
        end: usize,
        mut each: impl FnMut(usize, usize),
    ) -> Result<(), Errno> {
        debug_assert!(start.is_multiple_of(PAGE_SIZE) && end.is_multiple_of(PAGE_SIZE));
        if self.file.get().is_none() {
            (start..end)
                .step_by(PAGE_SIZE)
                .filter(|page| populates(*page, false))
                .for_each(|page| each(page, page + PAGE_SIZE));
            return Ok(());
        }
        match self.scan_populated(start, end, &mut each) {
            Err(Errno::NOTTY) => self.read_populated(start..end, each),
            scanned => scanned,
        }
    }

    /// Calls `each` with these runs by PAGEMAP_SCAN.
    ///
    /// # Errors
    /// ENOTTY before Linux 6.7, of the first page.
    pub fn scan_populated(
        &self,
        start: usize,
        end: usize,
        mut each: impl FnMut(usize, usize),
    ) -> Result<(), Errno> {
        let mut regions = [PageRegion::default(); 64];
        let mut at = start as u64;
        while at < end as u64 {
            let (count, walked) = self.scan(at, end as u64, THERE, &mut regions)?;
            for run in &regions[..count] {
                each(run.start as usize, run.end as usize);
            }
            if walked <= at {
                break;
            }
            at = walked;
        }
        Ok(())
    }

    /// Returns whether the page at `addr` is populated, in memory or in the kernel's swap. Returns
    /// `false` also where nothing is mapped. Touches no page, and takes about as long as any other
    /// system call.
    ///
    /// # Panics
    /// If the kernel doesn't answer, for example after the program has closed descriptors that it
    /// doesn't know. A wrong answer would lose data.
    pub fn is_populated(&self, addr: usize) -> bool {
        let start = (addr & !(PAGE_SIZE - 1)) as u64;
        if self.file.get().is_none() {
            return populates(start as usize, false);
        }
        let outcome =
            self.scan(start, start + PAGE_SIZE as u64, THERE, &mut [PageRegion::default()]);
        let is_there = match outcome {
            Err(Errno::NOTTY) => self.word(start as usize).map(is_there),
            outcome => outcome.map(|(count, _)| count > 0),
        };
        match is_there {
            Ok(is_there) => is_there,
            Err(e) => {
                panic!(
                    "memfold: Reading /proc/self/pagemap failed ({e}). Has the program closed all descriptors?"
                )
            }
        }
    }

    /// Returns whether the page at `addr` belongs to a huge page that is mapped whole. Returns `false`
    /// before Linux 6.7, and without /proc.
    pub fn is_huge(&self, addr: usize) -> bool {
        let start = (addr & !(PAGE_SIZE - 1)) as u64;
        let mut regions = [PageRegion::default()];
        self.file.get().is_some()
            && self
                .scan(start, start + PAGE_SIZE as u64, PAGE_IS_HUGE, &mut regions)
                .is_ok_and(|(count, _)| count > 0)
    }

    /// Calls `each` like [`Pagemap::for_each_populated`], before Linux 6.7.
    fn read_populated(
        &self,
        range: Range<usize>,
        mut each: impl FnMut(usize, usize),
    ) -> Result<(), Errno> {
        let (mut run, mut words) = (range.start..range.start, [0; WORDS]);
        let mut at = range.start;
        while at < range.end {
            let count = self.words(at, range.end, &mut words)?;
            for (n, _) in words[..count].iter().enumerate().filter(|(_, word)| is_there(**word)) {
                let page = at + n * PAGE_SIZE;
                if page != run.end {
                    if !run.is_empty() {
                        each(run.start, run.end);
                    }
                    run.start = page;
                }
                run.end = page + PAGE_SIZE;
            }
            at += count * PAGE_SIZE;
        }
        if !run.is_empty() {
            each(run.start, run.end);
        }
        Ok(())
    }

    /// Returns how many bytes from `start`, a page's address, are not shared, at most `len`. A page
    /// is shared if it is in memory and another process has it too, as after a fork. Pages from the
    /// first one on that the map doesn't tell of count as shared.
    pub fn unshared_bytes(&self, start: usize, len: usize) -> usize {
        self.bytes_before(start, len, is_shared)
    }

    /// Returns how many bytes from `start`, a page's address, are shared, at most `len`. Pages from the
    /// first one on that the map doesn't tell of count as not shared.
    pub fn shared_bytes(&self, start: usize, len: usize) -> usize {
        self.bytes_before(start, len, |word| !is_shared(word))
    }

    /// Returns how many bytes lie before the first page from `start` on that `ends`, or that the map
    /// doesn't tell of, at most `len`.
    fn bytes_before(&self, start: usize, len: usize, ends: impl Fn(u64) -> bool) -> usize {
        let (mut at, end, mut words) = (start, start + len, [0; WORDS]);
        while at < end {
            let Ok(count) = self.words(at, end, &mut words) else { break };
            if let Some(last) = words[..count].iter().position(|word| ends(*word)) {
                return at - start + last * PAGE_SIZE;
            }
            at += count * PAGE_SIZE;
        }
        at - start
    }

    /// Returns how many bytes before `end` are not shared, at most `len`, which is at most 1 MiB.
    /// Returns 0 if the map can't be read.
    pub fn unshared_bytes_before(&self, end: usize, len: usize) -> usize {
        let mut words = [0; WORDS];
        let pages = len / PAGE_SIZE;
        match self.words(end - len, end, &mut words) {
            Ok(count) if count == pages => {
                let index = words[..count].iter().rposition(|word| is_shared(*word));
                index.map_or(len, |last| (count - 1 - last) * PAGE_SIZE)
            }
            _ => 0,
        }
    }

    /// Returns whether the page at an address is in memory, and another process has it too. Without
    /// /proc, returns `false`.
    pub fn is_shared(&self, page: usize) -> bool {
        self.word(page).is_ok_and(is_shared)
    }

    /// Returns whether the page at an address is in memory and private to this process, or in the
    /// kernel's swap. The page of zeros that a read maps is neither. Without /proc, returns `false`.
    pub fn is_private(&self, page: usize) -> bool {
        self.word(page).is_ok_and(|word| {
            word & (WORD_SWAPPED | WORD_GUARD) == WORD_SWAPPED
                || word & (WORD_PRESENT | WORD_EXCLUSIVE) == WORD_PRESENT | WORD_EXCLUSIVE
        })
    }

    /// Returns whether the page at an address is a guard page. Before Linux 6.15 none is known.
    pub fn is_guard(&self, page: usize) -> bool {
        self.word(page).is_ok_and(|word| word & WORD_GUARD != 0)
    }

    /// Reads words of the map for pages from `start` on, before `end`. Returns their number, at
    /// least one.
    fn words(&self, start: usize, end: usize, words: &mut [u64; WORDS]) -> Result<usize, Errno> {
        let file = self.file.get().ok_or(Errno::NOENT)?;
        let count = ((end - start) / PAGE_SIZE).min(WORDS);
        let mut bytes = [0u8; WORDS * size_of::<u64>()];
        let room = &mut bytes[..count * size_of::<u64>()];
        let len = rustix::io::pread(file, room, (start / PAGE_SIZE * size_of::<u64>()) as u64)?;
        let whole = bytes[..len].chunks_exact(size_of::<u64>());
        let count = whole.len();
        for (word, bytes) in words.iter_mut().zip(whole) {
            *word = u64::from_ne_bytes(bytes.try_into().expect("eight bytes"));
        }
        if count == 0 { Err(Errno::FAULT) } else { Ok(count) }
    }

    fn word(&self, page: usize) -> Result<u64, Errno> {
        let mut words = [0; WORDS];
        self.words(page, page + PAGE_SIZE, &mut words).map(|_| words[0])
    }

    /// Records runs of pages in `[start, end)` of one of the `categories` in `found`, without guard pages where the
    /// kernel tells them. Returns their number, and the end of the scanned range.
    fn scan(
        &self,
        start: u64,
        end: u64,
        categories: u64,
        found: &mut [PageRegion],
    ) -> Result<(usize, u64), Errno> {
        let omitted = if KNOWS_GUARDS.load(Relaxed) { PAGE_IS_GUARD } else { 0 };
        let mut arg = ScanArg {
            size: size_of::<ScanArg>() as u64,
            start,
            end,
            vec: found.as_mut_ptr() as u64,
            vec_len: found.len() as u64,
            category_inverted: omitted,
            category_mask: omitted,
            category_anyof_mask: categories,
            return_mask: categories,
            ..Default::default()
        };
        // SAFETY: `arg` is the struct of this request. It is local, and names a vector that is
        // borrowed for the call, with its length.
        match unsafe { ioctl(self.fd().as_raw_fd(), PAGEMAP_SCAN, (&raw mut arg).cast()) } {
            Err(Errno::INVAL) if omitted != 0 => {
                KNOWS_GUARDS.store(false, Relaxed);
                self.scan(start, end, categories, found)
            }
            count => Ok((count? as usize, arg.walk_end)),
        }
    }
}

/// A guard page is shown as one in the kernel's swap.
fn is_there(word: u64) -> bool {
    word & (WORD_PRESENT | WORD_SWAPPED) != 0 && word & WORD_GUARD == 0
}

fn is_shared(word: u64) -> bool {
    word & WORD_PRESENT != 0 && word & WORD_EXCLUSIVE == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::zone::Zone;

    #[test]
    fn private_pages_beside_shared_ones_are_counted_from_either_side() {
        let zone = Zone::reserve(32 * PAGE_SIZE, PAGE_SIZE).unwrap();
        let at = |page: usize| zone.start() + page * PAGE_SIZE;
        let fill = |pages: Range<usize>| {
            // SAFETY: the pages are inside the zone, which only this thread uses.
            pages.for_each(|page| unsafe { *(at(page) as *mut u8) += 1 });
        };
        fill(0..24);
        // SAFETY: the child only sleeps until it is killed.
        let child = unsafe { libc::fork() };
        if child == 0 {
            loop {
                // SAFETY: `pause` has no preconditions.
                unsafe { libc::pause() };
            }
        }
        fill(4..8);
        let map = Pagemap::open().unwrap();
        let before = [4, 8, 10, 28].map(|end| map.unshared_bytes_before(at(end), 4 * PAGE_SIZE));
        let after = [0, 4, 6, 24].map(|start| map.unshared_bytes(at(start), 4 * PAGE_SIZE));
        let shared = [0, 2, 4, 22].map(|start| map.shared_bytes(at(start), 4 * PAGE_SIZE));
        // SAFETY: the child of above, which nothing else waits for.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, core::ptr::null_mut(), 0);
        }
        // Pages that were never touched are not shared either.
        assert_eq!(before.map(|bytes| bytes / PAGE_SIZE), [0, 4, 0, 4]);
        assert_eq!(after.map(|bytes| bytes / PAGE_SIZE), [0, 4, 2, 4]);
        assert_eq!(shared.map(|bytes| bytes / PAGE_SIZE), [4, 2, 0, 2]);
    }

    #[test]
    fn reading_the_map_tells_the_same_as_a_scan() {
        let pages = 3 * WORDS;
        let zone = Zone::reserve(pages * PAGE_SIZE, PAGE_SIZE).unwrap();
        for page in [0, 1, 5, WORDS - 1, WORDS, WORDS + 1, 2 * WORDS - 1, pages - 2] {
            // SAFETY: the page is inside the zone.
            unsafe { *zone.as_ptr().add(page * PAGE_SIZE) = 1 };
        }
        let map = Pagemap::open().unwrap();
        let range = zone.start()..zone.start() + zone.len();
        let (mut by_scan, mut by_text) = (Vec::new(), Vec::new());
        map.for_each_populated(range.start, range.end, |s, e| by_scan.push(s..e)).unwrap();
        map.read_populated(range.clone(), |s, e| by_text.push(s..e)).unwrap();
        assert!(by_scan == by_text && by_text.len() == 5, "{by_scan:?} {by_text:?}");
        for page in range.clone().step_by(PAGE_SIZE) {
            assert_eq!(map.word(page).map(is_there), Ok(map.is_populated(page)));
        }
        assert_eq!(map.unshared_bytes(range.start, range.len()), range.len());
    }

    #[test]
    fn scan_finds_the_pages_that_were_touched() {
        let zone = Zone::reserve(1 << 20, 4096).unwrap();
        for page in [1usize, 2, 7] {
            // SAFETY: the page is inside the zone.
            unsafe { *zone.as_ptr().add(page * 4096) = 1 };
        }
        let mut pages = Vec::new();
        let map = Pagemap::open().unwrap();
        map.for_each_populated(zone.start(), zone.start() + zone.len(), |s, e| {
            pages.extend((s..e).step_by(4096).map(|a| (a - zone.start()) / 4096));
        })
        .unwrap();
        assert_eq!(pages, [1, 2, 7]);
        let populated_pages =
            (0..256).filter(|page| map.is_populated(zone.start() + page * 4096 + 100));
        assert_eq!(populated_pages.collect::<Vec<_>>(), [1, 2, 7]);
        let start = zone.start();
        drop(zone);
        assert!(!map.is_populated(start + 4096), "nothing is mapped there");
    }
}
