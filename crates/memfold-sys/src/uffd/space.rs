//! The address space as the engine sees it: the seam where tests put a fake or inject faults.
use crate::Errno;
use crate::maps::pagemap::Pagemap;
use crate::raw::{is_resident, write_if_there};
use crate::uffd::copy_out::take;
use crate::uffd::drop::{AddressSpan, SPANS_MAX, drop_spans, is_offered};
use crate::uffd::{Partial, Uffd, feature};
use crate::units::PAGE_SIZE;
use alloc::sync::Arc;
use core::ops::Range;
use rustix::mm::{Advice, madvise};

/// What the pager does to page tables. All addresses and lengths are multiples of the page size.
///
/// What an implementation must keep: a page is at one address or at none; `move_pages` and `copy`
/// never overwrite a page that is there; every error leaves the pages past `Partial::done` as they
/// were.
pub trait Space: Send + Sync {
    /// Moves the pages at `src` to the empty range `dst`, and if `wake` is set wakes whoever waits
    /// at `dst`.
    ///
    /// # Errors
    /// As [`Uffd::move_pages`].
    ///
    /// # Safety
    /// - The caller holds the right to change both ranges for the whole process.
    unsafe fn move_pages(
        &self,
        dst: usize,
        src: usize,
        len: usize,
        wake: bool,
    ) -> Result<(), Partial>;

    /// Makes fresh pages at the empty range `dst` with the bytes at `src`, and if `wake` is set
    /// wakes whoever waits there.
    ///
    /// # Errors
    /// As [`Uffd::copy`].
    ///
    /// # Safety
    /// - `src` is readable for `len` bytes, and the caller holds the right to define the bytes at
    ///   `dst`.
    unsafe fn copy(
        &self,
        dst: usize,
        src: *const u8,
        len: usize,
        wake: bool,
    ) -> Result<(), Partial>;

    /// Makes fresh pages at the empty range `dst` with the bytes at `src`, write-protected from the
    /// first moment on. Wakes nobody.
    ///
    /// # Errors
    /// As [`Uffd::copy_protected`].
    ///
    /// # Safety
    /// - As [`Space::copy`].
    unsafe fn copy_protected(&self, dst: usize, src: *const u8, len: usize) -> Result<(), Partial>;

    /// Write-protects a range (`on`), or ends the protection and wakes the writers. Where memory is
    /// hidden ([`Space::hides`]): keeps all of it from the program, or lets it have it.
    ///
    /// # Errors
    /// As [`Uffd::protect`].
    fn protect(&self, start: usize, len: usize, on: bool) -> Result<(), Errno>;

    /// Copies the pages of a range to `to` and takes them away. Returns how many bytes went, from
    /// the first on; what was missing of them is zeros. The rest is as it was, as far as one who
    /// writes there can tell: no write is lost, whoever makes it.
    ///
    /// # Safety
    /// - The range is registered for write protection. `to` is writable for `len` bytes, and the
    ///   caller's alone.
    /// - Nobody else changes what is mapped there, or serves faults of its pages.
    unsafe fn take_by_copy(&self, home: usize, to: *mut u8, len: usize) -> usize;

    /// Drops the pages of a range.
    ///
    /// # Errors
    /// What `madvise` says.
    ///
    /// # Safety
    /// - The bytes there are needed no longer.
    unsafe fn discard(&self, start: usize, len: usize) -> Result<(), Errno>;

    /// As [`Space::discard`], but never waits for a handler of discards, so that handlers may call
    /// it. Returns how many bytes are gone, counted from the first range on; the rest is as it was.
    ///
    /// # Safety
    /// - As [`Space::discard`], and every page of the ranges holds memory.
    unsafe fn discard_now(&self, ranges: &[Range<usize>]) -> usize {
        // SAFETY: by the caller's promise.
        unsafe { discard_each(self, ranges) }
    }

    /// Whether [`Space::copy_protected`] and [`Space::drop_spans`] can be had.
    fn can_drop(&self) -> bool;

    /// Whether what is away is kept from the program by its access: then whole folios come and go, as
    /// a page that is missing where there is access is made by the kernel, and each border between the
    /// two costs a mapping.
    fn hides(&self) -> bool {
        false
    }

    /// Drops the pages of at most [`SPANS_MAX`] ranges, all at one go.
    ///
    /// # Errors
    /// As [`drop_spans`].
    ///
    /// # Safety
    /// - As [`Space::discard`].
    unsafe fn drop_spans(&self, spans: &[AddressSpan]) -> Result<(), Partial>;

    /// Makes every page of a range private to this process again, after a fork had shared it.
    ///
    /// # Errors
    /// What `madvise(MADV_POPULATE_WRITE)` says.
    fn unshare(&self, start: usize, len: usize) -> Result<(), Errno>;

    /// Whether there is a page at `addr`, in memory, in the kernel's swap, or on its way. Touches
    /// nothing.
    fn is_populated(&self, addr: usize) -> bool;

    /// Keeps the pages of a range, which were moved there from memory of the program's: what that
    /// has given up with MADV_FREE comes along as it is, and the kernel may drop it until it is
    /// written to. Afterwards all of them are there for good; what had been dropped by then is
    /// zeros. Never waits for a fault to be served.
    ///
    /// # Safety
    /// - The range is registered, the engine's own, and nobody else uses it.
    unsafe fn keep(&self, start: usize, len: usize);

    /// Wakes whoever waits for pages of a range; they look again.
    fn wake(&self, start: usize, len: usize);
}

/// [`Space::discard_now`] where [`Space::discard`] waits for nobody.
///
/// # Safety
/// - As there.
unsafe fn discard_each<S: Space + ?Sized>(space: &S, ranges: &[Range<usize>]) -> usize {
    // SAFETY: by the caller's promise.
    let is_gone =
        |range: &&Range<usize>| unsafe { space.discard(range.start, range.len()) }.is_ok();
    ranges.iter().take_while(is_gone).map(Range::len).sum()
}

/// The same with few calls.
///
/// # Safety
/// - As there.
unsafe fn discard_at_once(ranges: &[Range<usize>]) -> usize {
    let mut gone = 0;
    for part in ranges.chunks(SPANS_MAX) {
        let mut spans = [AddressSpan::default(); SPANS_MAX];
        spans.iter_mut().zip(part).for_each(|(span, range)| *span = range.into());
        // SAFETY: by the caller's promise.
        match unsafe { drop_spans(&spans[..part.len()]) } {
            Ok(()) => gone += part.iter().map(Range::len).sum::<usize>(),
            Err(partial) => return gone + partial.done,
        }
    }
    gone
}

/// The real address space of this process, through a userfaultfd.
pub struct UffdSpace {
    uffd: Arc<Uffd>,
    pagemap: Option<Arc<Pagemap>>,
    /// The program may give up memory with MADV_FREE.
    frees: bool,
    can_drop: bool,
}

impl UffdSpace {
    /// The process's address space, changed through `uffd`; `pagemap` is this process's. Without
    /// one, pages may be copied, but not moved: nobody could tell what a move that failed has done.
    /// Nobody gives up memory in it with MADV_FREE.
    pub fn new(uffd: Arc<Uffd>, pagemap: Option<Arc<Pagemap>>) -> UffdSpace {
        let can_drop = uffd.features() & feature::WP != 0 && is_offered();
        UffdSpace { uffd, pagemap, frees: false, can_drop }
    }

    /// The same with memory of a program's, which may do that.
    pub fn with_free(uffd: Arc<Uffd>, pagemap: Arc<Pagemap>) -> UffdSpace {
        UffdSpace { frees: true, ..UffdSpace::new(uffd, Some(pagemap)) }
    }

    /// Makes a page of zeros where there is none, also while an event waits to be read, when the
    /// kernel copies nothing.
    ///
    /// # Safety
    /// - The page is registered, the engine's own, and nobody else uses it.
    unsafe fn refill(&self, page: usize) {
        // A page that isn't registered comes by itself when it is touched.
        let made = self.uffd.unregister(page, PAGE_SIZE).map(|()| write_if_there(page));
        // SAFETY: it was registered before, so whoever serves it is there. It holds a page, and
        // none is missing.
        let done = made
            .and_then(|made| unsafe { self.uffd.register(page, PAGE_SIZE, false) }.map(|()| made));
        assert_eq!(
            done,
            Ok(true),
            "memfold: The kernel has dropped a page, and gives none in its place"
        );
    }
}

impl Space for UffdSpace {
    unsafe fn move_pages(
        &self,
        dst: usize,
        src: usize,
        len: usize,
        wake: bool,
    ) -> Result<(), Partial> {
        debug_assert!(self.pagemap.is_some());
        // SAFETY: the caller's promise is the callee's condition.
        unsafe { self.uffd.move_pages(dst, src, len, wake) }
    }

    unsafe fn copy(
        &self,
        dst: usize,
        src: *const u8,
        len: usize,
        wake: bool,
    ) -> Result<(), Partial> {
        // SAFETY: the caller's promise is the callee's condition.
        unsafe { self.uffd.copy(dst, src, len, wake) }
    }

    unsafe fn copy_protected(&self, dst: usize, src: *const u8, len: usize) -> Result<(), Partial> {
        // SAFETY: the caller's promise is the callee's condition.
        unsafe { self.uffd.copy_protected(dst, src, len) }
    }

    fn protect(&self, start: usize, len: usize, on: bool) -> Result<(), Errno> {
        self.uffd.protect(start, len, on)
    }

    unsafe fn take_by_copy(&self, home: usize, to: *mut u8, len: usize) -> usize {
        // SAFETY: by the caller's promise.
        unsafe { take(&self.uffd, self.pagemap.as_deref(), home, to, len) }
    }

    unsafe fn discard(&self, start: usize, len: usize) -> Result<(), Errno> {
        // SAFETY: the caller gives up the bytes.
        unsafe { madvise(start as *mut _, len, Advice::LinuxDontNeed) }
    }

    unsafe fn discard_now(&self, ranges: &[Range<usize>]) -> usize {
        // SAFETY: by the caller's promise.
        unsafe { if self.can_drop { discard_at_once(ranges) } else { discard_each(self, ranges) } }
    }

    fn can_drop(&self) -> bool {
        self.can_drop
    }

    unsafe fn drop_spans(&self, spans: &[AddressSpan]) -> Result<(), Partial> {
        // SAFETY: the caller's promise is the callee's condition.
        unsafe { drop_spans(spans) }
    }

    fn unshare(&self, start: usize, len: usize) -> Result<(), Errno> {
        // SAFETY: MADV_POPULATE_WRITE changes no byte.
        unsafe { madvise(start as *mut _, len, Advice::LinuxPopulateWrite) }
    }

    fn is_populated(&self, addr: usize) -> bool {
        match &self.pagemap {
            Some(pagemap) => pagemap.is_populated(addr),
            // Who doesn't move pages asks this to save work, or to check.
            None => is_resident(addr),
        }
    }

    unsafe fn keep(&self, start: usize, len: usize) {
        if !self.frees {
            return;
        }
        for page in (start..start + len).step_by(PAGE_SIZE) {
            if !write_if_there(page) {
                // SAFETY: by the caller's promise.
                unsafe { self.refill(page) };
            }
        }
    }

    fn wake(&self, start: usize, len: usize) {
        self.uffd.wake(start, len);
    }
}
