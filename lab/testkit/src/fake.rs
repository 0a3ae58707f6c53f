//! A fake address space: the bytes are at real addresses, and a map notes which pages are present.
//!
//! It acts as the kernel does on the pages of one process, one call at a time. A move carries bytes
//! and presence. A page is at one address or at none. Nothing present is overwritten. A call that
//! did only a part returns EAGAIN with the count. An absent page has poison bytes, which are
//! checked when the page returns: a read of them gets wrong data, and a write to them is detected.
//! The fake has no limits, forks or DMA; [`crate::trouble`] simulates those.
use memfold_os::Errno;
use memfold_os::memory::zone::Zone;
use memfold_os::sync::{Condvar, Mutex};
use memfold_os::uffd::Partial;
use memfold_os::uffd::drop::AddressSpan;
use memfold_os::uffd::space::Space;
use memfold_os::units::PAGE_SIZE;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

const POISON: u8 = 0xDB;

/// A fake address space with one area for the program. Clones are the same space.
#[derive(Clone)]
pub struct FakeSpace {
    inner: Arc<FakeState>,
}

struct FakeState {
    zone: Zone,
    /// Folded memory is hidden from the program, as without a userfaultfd. The kernel makes a page of
    /// zeros where one is missing and not hidden.
    hides: bool,
    table: Mutex<FakeTable>,
    changed: Condvar,
    is_leaving: AtomicBool,
    /// How often the engine has asked which pages are shared.
    map_reads: AtomicUsize,
}

#[derive(Default)]
struct FakeTable {
    /// Pages that were ever present, by address.
    pages: HashMap<usize, FakePage>,
    waiters: Vec<Waiter>,
    /// Border between two of the kernel's areas; 0: none.
    border: usize,
    next_ticket: u64,
    /// Why protection can't be changed.
    refusal: Option<Errno>,
    /// Pages of the area that are hidden.
    hidden: HashSet<usize>,
}

#[derive(Copy, Clone, PartialEq, Eq, Debug)]
enum FakePage {
    Present,
    Protected,
    /// It was present once; its bytes are poison.
    Gone,
    /// Nothing is mapped there; its bytes are poison.
    Unmapped,
}

struct Waiter {
    ticket: u64,
    page: usize,
    woken: bool,
}

/// A thread that touched an absent page, queued as in the kernel: from here on no wake-up is lost.
#[derive(Debug)]
pub struct TouchTicket {
    number: u64,
    /// The page is present, but write-protected.
    pub protected: bool,
}

impl FakeSpace {
    /// Makes a space whose area has `pages` absent pages (aligned to 2 MiB).
    pub fn new(pages: usize) -> FakeSpace {
        FakeSpace::with(pages, false)
    }

    fn with(pages: usize, hides: bool) -> FakeSpace {
        let zone =
            Zone::reserve(pages * PAGE_SIZE, memfold_os::units::MAX_BYTES).expect("address space");
        let (table, condition) = (Mutex::new(FakeTable::default()), Condvar::new());
        let (is_leaving, map_reads) = (AtomicBool::new(false), AtomicUsize::new(0));
        let inner = FakeState { zone, hides, table, changed: condition, is_leaving, map_reads };
        FakeSpace { inner: Arc::new(inner) }
    }

    /// Makes a space without a userfaultfd, in which folded memory is hidden. Its area is hidden.
    pub fn hiding(pages: usize) -> FakeSpace {
        let space = FakeSpace::with(pages, true);
        space.inner.table.lock().hidden.extend(space.area().step_by(PAGE_SIZE));
        space
    }

    /// Makes absent pages look present, as if they were evicted right after the question.
    pub fn seem_populated(&self) {
        self.inner.is_leaving.store(true, SeqCst);
    }

    /// Returns how often the engine has asked which pages are shared.
    pub fn map_reads(&self) -> usize {
        self.inner.map_reads.load(SeqCst)
    }

    /// Makes the kernel refuse to change the protection of pages, with this error.
    pub fn refuse_protection(&self, error: Errno) {
        self.inner.table.lock().refusal = Some(error);
    }

    /// Returns the program's area: its first address and the first one after it.
    pub fn area(&self) -> Range<usize> {
        self.inner.zone.start()..self.inner.zone.start() + self.inner.zone.len()
    }

    /// Splits the program's area in two: no move or copy crosses page `page` of it.
    pub fn set_border(&self, page: usize) {
        self.inner.table.lock().border = self.area().start + page * PAGE_SIZE;
    }

    /// Reads a page of the area, if it is present.
    ///
    /// # Errors
    /// The page is missing; the caller is queued and must end that by [`FakeSpace::sleep`] or
    /// [`FakeSpace::leave`].
    pub fn read<R>(&self, page: usize, read: impl FnOnce(&[u8]) -> R) -> Result<R, TouchTicket> {
        let mut table = self.inner.table.lock();
        if self.inner.hides {
            table.touch_shown(page);
        }
        if !table.is_present(page) || table.hidden.contains(&page) {
            return Err(table.enqueue(page));
        }
        // SAFETY: the page lies in the zone. No thread writes it while it is present and the table
        // is locked: its writers hold the lock, and the engine writes only frames.
        Ok(read(unsafe { std::slice::from_raw_parts(self.in_area(page), PAGE_SIZE) }))
    }

    /// Writes a page of the area, if it is present and not protected.
    ///
    /// # Errors
    /// The page is missing or protected; the caller is queued as in [`FakeSpace::read`].
    pub fn write<R>(
        &self,
        page: usize,
        write: impl FnOnce(&mut [u8]) -> R,
    ) -> Result<R, TouchTicket> {
        let mut table = self.inner.table.lock();
        if self.inner.hides {
            table.touch_shown(page);
        }
        if table.pages.get(&page) != Some(&FakePage::Present) || table.hidden.contains(&page) {
            return Err(table.enqueue(page));
        }
        // SAFETY: the page lies in the zone, and its readers and writers hold the lock. The engine
        // reads a page in place only after it has protected it, under the lock.
        Ok(write(unsafe { std::slice::from_raw_parts_mut(self.in_area(page), PAGE_SIZE) }))
    }

    /// Sleeps until the page of the ticket is woken, which may already have happened.
    pub fn sleep(&self, ticket: TouchTicket) {
        let mut table = self.inner.table.lock();
        loop {
            let at = table
                .waiters
                .iter()
                .position(|w| w.ticket == ticket.number)
                .expect("a ticket is used once");
            if table.waiters[at].woken {
                table.waiters.swap_remove(at);
                return;
            }
            table = self.inner.changed.wait(table);
        }
    }

    /// Returns a ticket without waiting.
    pub fn leave(&self, ticket: TouchTicket) {
        self.inner.table.lock().waiters.retain(|w| w.ticket != ticket.number);
    }

    /// Drops a present page, as the program does with `MADV_DONTNEED`. Returns whether it was
    /// present.
    pub fn punch(&self, page: usize) -> bool {
        let mut table = self.inner.table.lock();
        let present = table.is_present(page);
        if present {
            // SAFETY: the page is present, and the program gives up its bytes.
            unsafe { table.remove(page) };
        }
        present
    }

    /// Unmaps a range of the area, as `munmap` does. The engine must put nothing there.
    pub fn unmap(&self, range: Range<usize>) {
        let mut table = self.inner.table.lock();
        for page in range.step_by(PAGE_SIZE) {
            // SAFETY: the page lies in the zone, and the program gives up its bytes.
            unsafe { self.in_area(page).write_bytes(POISON, PAGE_SIZE) };
            table.pages.insert(page, FakePage::Unmapped);
            table.hidden.remove(&page);
        }
    }

    /// Maps an unmapped range of the area. Its pages are missing, and hidden where memory is.
    pub fn map(&self, range: Range<usize>) {
        let mut table = self.inner.table.lock();
        for page in range.step_by(PAGE_SIZE) {
            let before = table.pages.insert(page, FakePage::Gone);
            assert_eq!(before, Some(FakePage::Unmapped), "{page:#x} is mapped twice");
            table.set_hidden(page, self.inner.hides);
        }
    }

    /// Moves a mapping of the area and its pages, as `mremap` with `MREMAP_FIXED` does. With
    /// `keeps_source` the source stays mapped, and its pages are missing.
    pub fn remap(&self, from: Range<usize>, to: usize, keeps_source: bool) {
        let mut table = self.inner.table.lock();
        for offset in (0..from.len()).step_by(PAGE_SIZE) {
            let (source, target) = (from.start + offset, to + offset);
            let left = if keeps_source { FakePage::Gone } else { FakePage::Unmapped };
            let page = table.pages.insert(source, left).unwrap_or(FakePage::Gone);
            assert!(page != FakePage::Unmapped, "{source:#x} isn't mapped");
            table.pages.insert(target, page);
            let is_hidden = table.hidden.contains(&source);
            table.set_hidden(target, is_hidden);
            table.set_hidden(source, is_hidden && keeps_source);
            // SAFETY: both pages lie in the zone, and differ. The program gives up the bytes of the
            // target, and moves those of the source.
            unsafe {
                let (source, target) = (self.in_area(source), self.in_area(target));
                match page {
                    FakePage::Gone => target.write_bytes(POISON, PAGE_SIZE),
                    _ => target.copy_from_nonoverlapping(source, PAGE_SIZE),
                }
                source.write_bytes(POISON, PAGE_SIZE);
            }
        }
    }

    /// Returns whether a page of the area or of a frame is present.
    pub fn is_present(&self, page: usize) -> bool {
        self.inner.table.lock().is_present(page)
    }

    /// Calls `read` with the bytes of a page of the area, if it is present, also if it is hidden.
    /// Returns whether it is.
    pub fn peek(&self, page: usize, read: impl FnOnce(&[u8])) -> bool {
        let table = self.inner.table.lock();
        let is_present = table.is_present(page);
        if is_present {
            // SAFETY: the page lies in the zone, and its writers hold the lock.
            read(unsafe { std::slice::from_raw_parts(self.in_area(page), PAGE_SIZE) });
        }
        is_present
    }

    /// Returns whether a page is present and write-protected.
    pub fn is_protected(&self, page: usize) -> bool {
        self.inner.table.lock().pages.get(&page) == Some(&FakePage::Protected)
    }

    /// Returns the present pages of the area.
    pub fn present_pages(&self) -> usize {
        let table = self.inner.table.lock();
        self.area().step_by(PAGE_SIZE).filter(|page| table.is_present(*page)).count()
    }

    fn in_area(&self, page: usize) -> *mut u8 {
        assert!(
            self.inner.zone.contains(page) && page.is_multiple_of(PAGE_SIZE),
            "{page:#x} is no page of the area"
        );
        page as *mut u8
    }

    /// Repeats `step` for each page of a range, and counts as the kernel does: the work done, or
    /// why nothing was done.
    fn each(
        &self,
        table: &mut FakeTable,
        dst: usize,
        len: usize,
        wake: bool,
        step: impl Fn(&mut FakeTable, usize) -> Result<(), Errno>,
    ) -> Result<(), Partial> {
        assert!(
            dst.is_multiple_of(PAGE_SIZE) && len.is_multiple_of(PAGE_SIZE) && len > 0,
            "{dst:#x} + {len:#x}"
        );
        let mut result = Ok(());
        for offset in (0..len).step_by(PAGE_SIZE) {
            if let Err(errno) = step(table, offset) {
                result = Err(Partial {
                    done: offset,
                    errno: if offset > 0 { Errno::AGAIN } else { errno },
                });
                break;
            }
        }
        let done_bytes = result.map_or_else(|partial| partial.done, |()| len);
        if wake {
            self.wake_locked(table, dst, done_bytes);
        }
        result
    }

    fn wake_locked(&self, table: &mut FakeTable, start: usize, len: usize) {
        let mut is_woken = false;
        for waiter in table.waiters.iter_mut().filter(|w| w.page.wrapping_sub(start) < len) {
            waiter.woken = true;
            is_woken = true;
        }
        if is_woken {
            self.inner.changed.notify_all();
        }
    }
}

impl FakeTable {
    /// Returns whether a range crosses the border.
    fn is_across(&self, start: usize, len: usize) -> bool {
        start < self.border && self.border < start + len
    }

    fn is_present(&self, page: usize) -> bool {
        matches!(self.pages.get(&page), Some(FakePage::Present | FakePage::Protected))
    }

    fn set_hidden(&mut self, page: usize, is_hidden: bool) {
        match is_hidden {
            true => _ = self.hidden.insert(page),
            false => _ = self.hidden.remove(&page),
        }
    }

    /// Does what the kernel does for a touch of a missing page that isn't hidden.
    fn touch_shown(&mut self, page: usize) {
        if !self.is_present(page) && !self.hidden.contains(&page) {
            // SAFETY: the page is one of the area, and the array is readable.
            let outcome = unsafe { self.install(page, [0; PAGE_SIZE].as_ptr()) };
            outcome.expect("it is missing");
        }
    }

    fn enqueue(&mut self, page: usize) -> TouchTicket {
        let number = self.next_ticket;
        self.next_ticket += 1;
        self.waiters.push(Waiter { ticket: number, page, woken: false });
        TouchTicket { number, protected: self.pages.get(&page) == Some(&FakePage::Protected) }
    }

    /// Puts the bytes at `src` into an absent page.
    ///
    /// # Safety
    /// - `page` is a mapped page of the area or the frames, and `src` is readable for a page.
    unsafe fn install(&mut self, page: usize, src: *const u8) -> Result<(), Errno> {
        // SAFETY: the caller promises that the page is mapped; no thread may be using an absent
        // page.
        let bytes = unsafe { std::slice::from_raw_parts_mut(page as *mut u8, PAGE_SIZE) };
        let clean = match self.pages.get(&page) {
            Some(FakePage::Present | FakePage::Protected) => return Err(Errno::EXIST),
            Some(FakePage::Gone) => &[POISON; PAGE_SIZE],
            Some(FakePage::Unmapped) => panic!("{page:#x} is filled, but nothing is mapped there"),
            None => &[0; PAGE_SIZE],
        };
        assert!(bytes == clean, "page {page:#x} was written while it was not there");
        assert!(
            self.pages.get(&(src as usize)) != Some(&FakePage::Gone),
            "{src:?} is read, but no page is there"
        );
        // SAFETY: the caller promises that `src` is readable; this page was absent, so it is
        // another one.
        unsafe { std::ptr::copy_nonoverlapping(src, bytes.as_mut_ptr(), PAGE_SIZE) };
        self.pages.insert(page, FakePage::Present);
        Ok(())
    }

    /// Removes a page.
    ///
    /// # Safety
    /// - The page is there, and its bytes are not needed.
    unsafe fn remove(&mut self, page: usize) {
        // SAFETY: a present page is mapped, and the caller gives up its bytes.
        unsafe { std::ptr::write_bytes(page as *mut u8, POISON, PAGE_SIZE) };
        self.pages.insert(page, FakePage::Gone);
    }
}

impl Space for FakeSpace {
    unsafe fn move_pages(
        &self,
        dst: usize,
        src: usize,
        len: usize,
        wake: bool,
    ) -> Result<(), Partial> {
        let mut table = self.inner.table.lock();
        if table.is_across(src, len) || table.is_across(dst, len) {
            return Err(Partial { done: 0, errno: Errno::INVAL });
        }
        self.each(&mut table, dst, len, wake, |table, at| {
            if table.is_present(dst + at) {
                return Err(Errno::EXIST);
            }
            if !table.is_present(src + at) {
                return Err(Errno::NOENT);
            }
            // SAFETY: the page at the source is present, so it is mapped; the caller has the right
            // to both ranges.
            unsafe {
                table.install(dst + at, (src + at) as *const u8)?;
                table.remove(src + at);
            }
            Ok(())
        })
    }

    unsafe fn copy(
        &self,
        dst: usize,
        src: *const u8,
        len: usize,
        wake: bool,
    ) -> Result<(), Partial> {
        let mut table = self.inner.table.lock();
        if table.is_across(dst, len) {
            return Err(Partial { done: 0, errno: Errno::NOENT });
        }
        let is_shown = self.inner.hides && self.inner.zone.contains(dst);
        let outcome = self.each(&mut table, dst, len, wake, |table, at| {
            assert!(!is_shown || table.hidden.contains(&(dst + at)), "{dst:#x} is filled in sight");
            // SAFETY: the caller vouches for both ranges.
            unsafe { table.install(dst + at, src.add(at)) }
        });
        if is_shown && outcome.is_ok() {
            (dst..dst + len).step_by(PAGE_SIZE).for_each(|page| table.set_hidden(page, false));
        }
        outcome
    }

    unsafe fn copy_protected(&self, dst: usize, src: *const u8, len: usize) -> Result<(), Partial> {
        let mut table = self.inner.table.lock();
        if table.is_across(dst, len) {
            return Err(Partial { done: 0, errno: Errno::NOENT });
        }
        self.each(&mut table, dst, len, false, |table, at| {
            // SAFETY: the caller vouches for both ranges.
            unsafe { table.install(dst + at, src.add(at))? };
            table.pages.insert(dst + at, FakePage::Protected);
            Ok(())
        })
    }

    unsafe fn map_zeros(&self, dst: usize, len: usize) -> Result<(), Partial> {
        let mut table = self.inner.table.lock();
        if table.is_across(dst, len) {
            return Err(Partial { done: 0, errno: Errno::NOENT });
        }
        let zeros = [0u8; PAGE_SIZE];
        let mapped_bytes = self.each(&mut table, dst, len, false, |table, at| {
            // SAFETY: the caller vouches for the range; the array is readable.
            unsafe { table.install(dst + at, zeros.as_ptr())? };
            table.pages.insert(dst + at, FakePage::Protected);
            Ok(())
        });
        mapped_bytes.map_err(|partial| Partial { done: 0, ..partial })
    }

    fn protect(&self, start: usize, len: usize, on: bool) -> Result<(), Errno> {
        let mut table = self.inner.table.lock();
        if let Some(refusal) = table.refusal {
            return Err(refusal);
        }
        for page in (start..start + len).step_by(PAGE_SIZE) {
            if self.inner.hides {
                table.set_hidden(page, on);
            } else if let Some(FakePage::Present | FakePage::Protected) = table.pages.get(&page) {
                table.pages.insert(page, if on { FakePage::Protected } else { FakePage::Present });
            }
        }
        if !on {
            self.wake_locked(&mut table, start, len);
        }
        Ok(())
    }

    unsafe fn take_by_copy(&self, address: usize, to: *mut u8, len: usize) -> usize {
        let mut table = self.inner.table.lock();
        for at in (0..len).step_by(PAGE_SIZE) {
            if self.inner.hides {
                table.set_hidden(address + at, true);
            }
            // SAFETY: the caller promises room at `to`. The page is present, and is removed.
            unsafe {
                if table.is_present(address + at) {
                    to.add(at).copy_from_nonoverlapping((address + at) as *const u8, PAGE_SIZE);
                    table.remove(address + at);
                } else {
                    to.add(at).write_bytes(0, PAGE_SIZE);
                }
            }
        }
        len
    }

    unsafe fn discard(&self, start: usize, len: usize) -> Result<(), Errno> {
        let mut table = self.inner.table.lock();
        for page in (start..start + len).step_by(PAGE_SIZE) {
            if table.is_present(page) {
                // SAFETY: the page is present, and the caller gives up its bytes.
                unsafe { table.remove(page) };
            }
        }
        Ok(())
    }

    fn can_drop(&self) -> bool {
        !self.hides()
    }

    fn hides(&self) -> bool {
        self.inner.hides
    }

    unsafe fn drop_spans(&self, spans: &[AddressSpan]) -> Result<(), Partial> {
        let mut table = self.inner.table.lock();
        for page in spans.iter().flat_map(|s| (s.start..s.start + s.len).step_by(PAGE_SIZE)) {
            if table.is_present(page) {
                // SAFETY: the page is present, and the caller gives up its bytes.
                unsafe { table.remove(page) };
            }
        }
        Ok(())
    }

    fn unshare(&self, start: usize, len: usize) -> Result<(), Errno> {
        for page in (start..start + len).step_by(PAGE_SIZE) {
            if self.is_present(page) {
                continue;
            }
            let seems = self.inner.is_leaving.load(SeqCst);
            assert!(!seems, "zeros may come to {page:#x}, which isn't there");
            // It was evicted since the caller asked. The kernel would wait for a handler.
            return Err(Errno::FAULT);
        }
        Ok(())
    }

    fn unshared_bytes(&self, range: Range<usize>, _from_end: bool) -> usize {
        self.inner.map_reads.fetch_add(1, SeqCst);
        range.len()
    }

    fn shared_bytes(&self, _range: Range<usize>) -> usize {
        0
    }

    fn is_populated(&self, addr: usize) -> bool {
        self.is_present(addr) || self.inner.is_leaving.load(SeqCst)
    }

    unsafe fn keep(&self, start: usize, len: usize) {
        let is_kept = (start..start + len).step_by(PAGE_SIZE).all(|page| self.is_present(page));
        assert!(is_kept, "a page that should have been moved to {start:#x} isn't there");
    }

    fn wake(&self, start: usize, len: usize) {
        let mut table = self.inner.table.lock();
        self.wake_locked(&mut table, start, len);
    }
}
