//! The address space as the engine sees it. Tests replace it with a fake, or inject faults.
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

/// Operations of the pager on page tables. All addresses and lengths are multiples of the page
/// size.
///
/// Conditions for an implementation:
/// - A page is at one address or at none.
/// - `move_pages` and `copy` never overwrite a page that is present.
/// - Every error leaves the pages past `Partial::done` unchanged.
pub trait Space: Send + Sync {
    /// Moves the pages at `src` to the empty range `dst`. With `wake`, wakes the threads that wait
    /// at `dst`.
    ///
    /// # Errors
    /// The errors of [`Uffd::move_pages`].
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

    /// Makes fresh pages at the empty range `dst` with the bytes at `src`. With `wake`, wakes the
    /// threads that wait there.
    ///
    /// # Errors
    /// The errors of [`Uffd::copy`].
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
    /// first moment on. Wakes no thread.
    ///
    /// # Errors
    /// The errors of [`Uffd::copy_protected`].
    ///
    /// # Safety
    /// - The conditions of [`Space::copy`].
    unsafe fn copy_protected(&self, dst: usize, src: *const u8, len: usize) -> Result<(), Partial>;

    /// Maps the kernel's page of zeros at the empty range `dst`, write-protected. A thread that
    /// writes there meanwhile gets a page of its own, which is protected too.
    ///
    /// # Errors
    /// The errors of [`Uffd::zero`] and [`Uffd::protect`]. Unlike elsewhere, [`Partial::done`] is
    /// the start of the range in which pages are mapped that are not protected.
    ///
    /// # Safety
    /// - The caller holds the right to define the bytes at `dst`, and the range is registered for
    ///   write protection.
    unsafe fn map_zeros(&self, dst: usize, len: usize) -> Result<(), Partial>;

    /// Write-protects a range (`on`), or ends the protection and wakes the writers. Where memory is
    /// hidden ([`Space::hides`]), it hides or shows all of the range.
    ///
    /// # Errors
    /// The errors of [`Uffd::protect`].
    fn protect(&self, start: usize, len: usize, on: bool) -> Result<(), Errno>;

    /// Copies the pages of a range to `to` and evicts them. Returns the number of evicted bytes,
    /// from the first on. Missing pages among them are zeros at `to`. The rest is unchanged as far
    /// as a writer can notice: no write is lost, from any source.
    ///
    /// # Safety
    /// - The range is registered for write protection. `to` is writable for `len` bytes, and no
    ///   other thread uses it.
    /// - No other thread changes the mapping of these pages, or serves their faults.
    unsafe fn take_by_copy(&self, address: usize, to: *mut u8, len: usize) -> usize;

    /// Drops the pages of a range.
    ///
    /// # Errors
    /// The errors of `madvise`.
    ///
    /// # Safety
    /// - The bytes there are not needed any more.
    unsafe fn discard(&self, start: usize, len: usize) -> Result<(), Errno>;

    /// Drops pages like [`Space::discard`], but never waits for a handler of discards, so that
    /// handlers may call it. Returns the number of dropped bytes, counted from the first range on.
    /// The rest is unchanged.
    ///
    /// # Safety
    /// - The conditions of [`Space::discard`], and every page of the ranges holds memory.
    unsafe fn discard_now(&self, ranges: &[Range<usize>]) -> usize {
        // SAFETY: the caller promises that the bytes are not needed.
        unsafe { discard_each(self, ranges) }
    }

    /// Returns whether [`Space::copy_protected`] and [`Space::drop_spans`] are available.
    fn can_drop(&self) -> bool;

    /// Returns whether folded memory is hidden from the program by its access. Then whole folios
    /// are evicted and loaded, because the kernel would make a page that is missing in accessible
    /// memory.
    fn hides(&self) -> bool {
        false
    }

    /// Returns whether each border between folded and resident memory takes a mapping.
    fn takes_mappings(&self) -> bool {
        false
    }

    /// Drops the pages of at most [`SPANS_MAX`] ranges at once.
    ///
    /// # Errors
    /// The errors of [`drop_spans`].
    ///
    /// # Safety
    /// - The conditions of [`Space::discard`].
    unsafe fn drop_spans(&self, spans: &[AddressSpan]) -> Result<(), Partial>;

    /// Makes every page of a range private to this process again, after a fork had shared it.
    ///
    /// # Errors
    /// The errors of `madvise(MADV_POPULATE_WRITE)`.
    fn unshare(&self, start: usize, len: usize) -> Result<(), Errno>;

    /// Returns how many bytes of a range, from its start or from its end, are on no page that is in
    /// memory and shared with another process. The range has at most 1 MiB. Touches no page.
    fn unshared_bytes(&self, range: Range<usize>, from_end: bool) -> usize;

    /// Returns how many bytes of a range, from its start, are on pages that are in memory and shared
    /// with another process. Touches no page.
    fn shared_bytes(&self, range: Range<usize>) -> usize;

    /// Returns whether there is a page at `addr`, in memory, in the kernel's swap, or being read
    /// from there. Touches no page.
    fn is_populated(&self, addr: usize) -> bool;

    /// Returns whether the aligned 2 MiB at `addr` are one huge page. Returns `false` where the kernel
    /// doesn't tell.
    fn is_huge(&self, _addr: usize) -> bool {
        false
    }

    /// Keeps the pages of a range, which were moved there from memory of the program. Pages to
    /// which the program has applied MADV_FREE move as they are, and the kernel may drop them until
    /// they are written to. Afterwards all of them stay. Pages that had been dropped by then are
    /// zeros. Never waits for a fault to be served.
    ///
    /// # Safety
    /// - The range is registered, belongs to the engine, and no other thread uses it.
    unsafe fn keep(&self, start: usize, len: usize);

    /// Wakes the threads that wait for pages of a range; they look again.
    fn wake(&self, start: usize, len: usize);
}

/// Implements [`Space::discard_now`] where [`Space::discard`] doesn't wait.
///
/// # Safety
/// - The conditions of [`Space::discard_now`].
unsafe fn discard_each<S: Space + ?Sized>(space: &S, ranges: &[Range<usize>]) -> usize {
    // SAFETY: by the caller's promise the bytes are not needed.
    let is_gone =
        |range: &&Range<usize>| unsafe { space.discard(range.start, range.len()) }.is_ok();
    ranges.iter().take_while(is_gone).map(Range::len).sum()
}

/// Implements [`Space::discard_now`] with few calls.
///
/// # Safety
/// - The conditions of [`Space::discard_now`].
unsafe fn discard_at_once(ranges: &[Range<usize>]) -> usize {
    let mut dropped_bytes = 0;
    for part in ranges.chunks(SPANS_MAX) {
        let mut spans = [AddressSpan::default(); SPANS_MAX];
        spans.iter_mut().zip(part).for_each(|(span, range)| *span = range.into());
        // SAFETY: by the caller's promise the bytes are not needed.
        match unsafe { drop_spans(&spans[..part.len()]) } {
            Ok(()) => dropped_bytes += part.iter().map(Range::len).sum::<usize>(),
            Err(partial) => return dropped_bytes + partial.done,
        }
    }
    dropped_bytes
}

/// The real address space of this process, through a userfaultfd.
pub struct UffdSpace {
    uffd: Arc<Uffd>,
    pagemap: Option<Arc<Pagemap>>,
    /// Whether the program may apply MADV_FREE to its memory.
    frees: bool,
    can_drop: bool,
}

impl UffdSpace {
    /// Makes the process's address space, changed through `uffd`; `pagemap` is this process's.
    /// Without `pagemap`, pages may be copied, but not moved, because the effect of a failed move
    /// would be unknown. No thread applies MADV_FREE to its memory.
    pub fn new(uffd: Arc<Uffd>, pagemap: Option<Arc<Pagemap>>) -> UffdSpace {
        let can_drop = uffd.features() & feature::WP != 0 && is_offered();
        UffdSpace { uffd, pagemap, frees: false, can_drop }
    }

    /// Makes it for memory of a program that may apply MADV_FREE.
    pub fn with_free(uffd: Arc<Uffd>, pagemap: Arc<Pagemap>) -> UffdSpace {
        UffdSpace { frees: true, ..UffdSpace::new(uffd, Some(pagemap)) }
    }

    /// Makes a page of zeros if there is none, also while an event must be read, when the kernel
    /// copies nothing.
    ///
    /// # Safety
    /// - The page is registered, belongs to the engine, and no other thread uses it.
    unsafe fn refill(&self, page: usize) {
        // The kernel makes a page that isn't registered when it is touched.
        let fill = self.uffd.unregister(page, PAGE_SIZE).map(|()| write_if_there(page));
        // SAFETY: it was registered before, so there is a thread that serves it. The page is
        // present, so none is missing.
        let outcome = fill
            .and_then(|fill| unsafe { self.uffd.register(page, PAGE_SIZE, false) }.map(|()| fill));
        assert_eq!(
            outcome,
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
        // SAFETY: the caller holds the right to change both ranges, as the callee asks.
        unsafe { self.uffd.move_pages(dst, src, len, wake) }
    }

    unsafe fn copy(
        &self,
        dst: usize,
        src: *const u8,
        len: usize,
        wake: bool,
    ) -> Result<(), Partial> {
        // SAFETY: the caller promises that `src` is readable, and holds the right to define the
        // bytes.
        unsafe { self.uffd.copy(dst, src, len, wake) }
    }

    unsafe fn copy_protected(&self, dst: usize, src: *const u8, len: usize) -> Result<(), Partial> {
        // SAFETY: the caller promises that `src` is readable, and holds the right to define the
        // bytes.
        unsafe { self.uffd.copy_protected(dst, src, len) }
    }

    unsafe fn map_zeros(&self, dst: usize, len: usize) -> Result<(), Partial> {
        // SAFETY: the caller holds the right to define the bytes.
        let outcome = unsafe { self.uffd.zero(dst, len) };
        let mapped_bytes = outcome.map_or_else(|partial| partial.done, |()| len);
        if mapped_bytes > 0 {
            self.uffd
                .protect(dst, mapped_bytes, true)
                .map_err(|errno| Partial { done: mapped_bytes, errno })?;
        }
        outcome.map_err(|partial| Partial { done: 0, ..partial })
    }

    fn protect(&self, start: usize, len: usize, on: bool) -> Result<(), Errno> {
        self.uffd.protect(start, len, on)
    }

    unsafe fn take_by_copy(&self, address: usize, to: *mut u8, len: usize) -> usize {
        // SAFETY: the caller promises the conditions of `take_by_copy`, which are those of `take`.
        unsafe { take(&self.uffd, self.pagemap.as_deref(), address, to, len) }
    }

    unsafe fn discard(&self, start: usize, len: usize) -> Result<(), Errno> {
        // SAFETY: the caller gives up the bytes.
        unsafe { madvise(start as *mut _, len, Advice::LinuxDontNeed) }
    }

    unsafe fn discard_now(&self, ranges: &[Range<usize>]) -> usize {
        // SAFETY: the caller promises that the bytes are not needed, and that every page holds
        // memory.
        unsafe { if self.can_drop { discard_at_once(ranges) } else { discard_each(self, ranges) } }
    }

    fn can_drop(&self) -> bool {
        self.can_drop
    }

    unsafe fn drop_spans(&self, spans: &[AddressSpan]) -> Result<(), Partial> {
        // SAFETY: the caller promises that the bytes are not needed.
        unsafe { drop_spans(spans) }
    }

    fn unshare(&self, start: usize, len: usize) -> Result<(), Errno> {
        // SAFETY: MADV_POPULATE_WRITE changes no byte.
        unsafe { madvise(start as *mut _, len, Advice::LinuxPopulateWrite) }
    }

    fn unshared_bytes(&self, range: Range<usize>, from_end: bool) -> usize {
        match (&self.pagemap, from_end) {
            (Some(map), true) => map.unshared_bytes_before(range.end, range.len()),
            (Some(map), false) => map.unshared_bytes(range.start, range.len()),
            (None, _) => 0,
        }
    }

    fn shared_bytes(&self, range: Range<usize>) -> usize {
        self.pagemap.as_ref().map_or(0, |map| map.shared_bytes(range.start, range.len()))
    }

    fn is_populated(&self, addr: usize) -> bool {
        match &self.pagemap {
            Some(pagemap) => pagemap.is_populated(addr),
            // Without moves this is called only to save work, or to check.
            None => is_resident(addr),
        }
    }

    fn is_huge(&self, addr: usize) -> bool {
        self.pagemap.as_ref().is_some_and(|pagemap| pagemap.is_huge(addr))
    }

    unsafe fn keep(&self, start: usize, len: usize) {
        if !self.frees {
            return;
        }
        for page in (start..start + len).step_by(PAGE_SIZE) {
            if !write_if_there(page) {
                // SAFETY: the caller promises that the page is registered, the engine's, and has no
                // other user.
                unsafe { self.refill(page) };
            }
        }
    }

    fn wake(&self, start: usize, len: usize) {
        self.uffd.wake(start, len);
    }
}
