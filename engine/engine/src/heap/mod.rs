//! Allocations in folded memory: pieces of a few large regions, by address, like those of `malloc`.
mod extents;
pub(crate) mod vec;

use self::extents::Extents;
use crate::region::{Error, Memory, Region};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicUsize, Ordering::Acquire, Ordering::Release};
use memfold_os::Errno;
use memfold_os::memory::huge;
use memfold_os::memory::zone::set_inherited;
use memfold_os::sync::Mutex;
use memfold_os::thread::process_id;
use memfold_os::units::{MAX_BYTES, PAGE_SIZE};

/// Pieces begin at multiples of this, and take multiples of it in address space. Memory is taken by
/// the page.
pub const GRANULE_BYTES: usize = 64 << 10;
/// Pieces of at least so many bytes begin at multiples of the largest folio.
const LARGE_BYTES: usize = 1 << 20;
/// Address space of a region; a larger piece has one of its own.
const SPAN_BYTES: usize = 16 << 30;
/// Most regions of a heap.
const SPANS_MAX: usize = 256;

/// An allocator of folded memory. Clones share it; it and its pieces keep the engine alive.
///
/// A piece is named by its address. In a child of fork there are no pieces: all requests for them
/// are refused there.
///
/// ```
/// # use memfold_engine::{Heap, Hint, Memory};
/// # fn main() -> Result<(), memfold_engine::Error> {
/// let heap = Heap::new(&Memory::builder().resident_bytes(64 << 20).build()?);
/// let len = 1 << 20;
/// let piece = heap.alloc(len)?; // zeros, which take no memory yet
/// let addr = piece.as_ptr() as usize;
/// // SAFETY: the piece has so many bytes, and no other thread knows of it.
/// unsafe { piece.as_ptr().write_bytes(7, len) };
/// heap.hint(addr..addr + len, Hint::Fold)?;
/// // SAFETY: the piece has more than 1000 bytes, and no thread writes to it.
/// assert_eq!(unsafe { piece.as_ptr().add(1000).read() }, 7); // and it is back
/// // SAFETY: no thread uses it any more.
/// unsafe { heap.free(addr)? };
/// assert!(heap.hint(addr..addr + len, Hint::Fold).is_err());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Heap {
    inner: Arc<HeapShared>,
}

struct HeapShared {
    memory: Memory,
    process: u32,
    state: Mutex<HeapState>,
    /// First address and end of each region; zeros where there is none. Read without the lock,
    /// because a child of fork may have got a copy of it locked.
    bounds: [[AtomicUsize; 2]; SPANS_MAX],
}

#[derive(Default)]
struct HeapState {
    parts: Vec<HeapRegion>,
    /// Pinned ranges of addresses, which end with their piece.
    pins: Vec<Range<usize>>,
    /// Pieces that are lent to a child of fork. They are pinned; a loan ends with its piece.
    lent: Vec<Range<usize>>,
}

/// A region, and its used and free parts.
struct HeapRegion {
    span: Arc<FreeSpan>,
    extents: Extents,
    /// Its index in [`HeapShared::bounds`].
    place: usize,
}

struct FreeSpan {
    region: Region,
}

impl FreeSpan {
    fn start(&self) -> usize {
        self.region.as_ptr() as usize
    }

    /// Converts a range of addresses to offsets in the region.
    fn offsets(&self, addrs: &Range<usize>) -> Range<usize> {
        addrs.start - self.start()..addrs.end - self.start()
    }
}

/// A hint for a part of a piece.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Hint {
    /// Fold the pages wholly inside now.
    Fold,
    /// Fold them first when memory is needed.
    Cold,
    /// Load the pages that it touches.
    Prefetch,
}

const FORKED: Error = Error::System(
    "folded memory stays with the process that made it; a forked child doesn't have it",
    Errno::CHILD,
);
const NOT_OURS: Error =
    Error::System("this is not allocated in this folded memory, or was freed", Errno::INVAL);

impl Heap {
    /// Makes an empty heap.
    pub fn new(memory: &Memory) -> Heap {
        let bounds = [const { [const { AtomicUsize::new(0) }; 2] }; SPANS_MAX];
        let inner = HeapShared {
            memory: memory.clone(),
            process: process_id(),
            state: Mutex::default(),
            bounds,
        };
        Heap { inner: Arc::new(inner) }
    }

    /// Returns the engine that it lies in.
    pub fn memory(&self) -> &Memory {
        &self.inner.memory
    }

    /// Returns whether this is the process that made it, not a child of fork.
    pub fn is_at_home(&self) -> bool {
        process_id() == self.inner.process
    }

    /// Returns the first address and the end of each region. It waits for no lock, so a child of
    /// fork may call it too.
    pub fn regions(&self) -> impl Iterator<Item = Range<usize>> {
        let bounds = self.inner.bounds.iter();
        // A thread that reads the start reads the end, which was stored before it.
        bounds
            .map(|[start, end]| start.load(Acquire)..end.load(Acquire))
            .filter(|region| region.start != 0)
    }

    /// Returns whether `addr` lies in one of its regions. Waits for no lock.
    pub fn owns(&self, addr: usize) -> bool {
        self.regions().any(|region| region.contains(&addr))
    }

    /// Checks that this is the process that made the heap.
    ///
    /// # Errors
    /// ECHILD in a child of fork.
    pub fn at_home(&self) -> Result<(), Error> {
        if self.is_at_home() { Ok(()) } else { Err(FORKED) }
    }

    /// Allocates a piece of `len` bytes. It is zeros, and takes no memory until it is touched. It
    /// begins at a multiple of 64 KiB.
    ///
    /// # Errors
    /// EINVAL for a length of zero; no address space; ECHILD in a child of fork.
    pub fn alloc(&self, len: usize) -> Result<NonNull<u8>, Error> {
        self.at_home()?;
        let len = rounded(len)?;
        let mut state = self.inner.state.lock();
        let at = match state.take(len) {
            Some(at) => at,
            None => {
                let (span, place) = state.grow(&self.inner.memory, len)?;
                let [start, end] = &self.inner.bounds[place];
                end.store(span.end, Release);
                start.store(span.start, Release);
                state.take(len).expect("a new span holds what it was made for")
            }
        };
        Ok(NonNull::new(at as *mut u8).expect("no mapping begins at 0"))
    }

    /// Frees the piece that begins at `addr`, with its memory and its folded data. An empty region
    /// is given back to the system, except for one.
    ///
    /// # Errors
    /// EINVAL: no piece begins there, because it was freed, for example. ECHILD in a child of fork.
    ///
    /// # Safety
    /// - No thread uses the piece any more.
    pub unsafe fn free(&self, addr: usize) -> Result<(), Error> {
        self.at_home()?;
        let mut state = self.inner.state.lock();
        let (i, start) = state.locate(addr).ok_or(NOT_OURS)?;
        let len = state.parts[i].extents.end(start).ok_or(NOT_OURS)?;
        let span = state.parts[i].span.clone();
        state.unpin_all(addr..addr + len);
        drop(state);
        // SAFETY: the piece has ended, and its addresses are not used again before `give`.
        unsafe { span.region.discard(start..start + len) };
        let mut state = self.inner.state.lock();
        // Other regions may have been added or dropped. This one stays until its extents are given.
        let (i, _) = state.locate(addr).expect("a region stays while an extent of it is taken");
        state.parts[i].extents.give(start, len);
        let spare_part = state.spare().map(|i| state.parts.swap_remove(i));
        if let Some(part) = &spare_part {
            self.inner.bounds[part.place][0].store(0, Release);
        }
        drop(state);
        // The region is dropped with no lock held.
        drop(spare_part);
        Ok(())
    }

    /// Resizes the piece that begins at `addr`, in place or elsewhere. Its contents are kept as far
    /// as they fit. Where it grows past the pages it had, it is zeros.
    ///
    /// # Errors
    /// The errors of [`Heap::alloc`] and [`Heap::free`]; the piece is unchanged then.
    ///
    /// # Safety
    /// - No other thread uses the piece meanwhile. If the result is another address, no thread ever
    ///   uses it again.
    pub unsafe fn resize(&self, addr: usize, len: usize) -> Result<NonNull<u8>, Error> {
        self.at_home()?;
        let len = rounded(len)?;
        let (old, in_place) = {
            let mut state = self.inner.state.lock();
            let (i, start) = state.locate(addr).ok_or(NOT_OURS)?;
            let extent = state.parts[i].extents.find(start);
            let (_, old) = extent.filter(|e| e.0 == start).ok_or(NOT_OURS)?;
            if len < old {
                // SAFETY: the caller gives up the tail; it becomes free only after
                // this.
                unsafe { state.parts[i].span.region.discard(start + len..start + old) };
                state.unpin_all(addr + len..addr + old);
            }
            (old, state.parts[i].extents.resize(start, len))
        };
        if !in_place {
            let new = self.alloc(len)?;
            // SAFETY: both are pieces of at least `old` bytes that no other thread uses. They are
            // different pieces, so they don't overlap.
            unsafe { core::ptr::copy_nonoverlapping(addr as *const u8, new.as_ptr(), old) };
            // SAFETY: the caller promises that no thread uses the old piece again.
            unsafe { self.free(addr)? };
            return Ok(new);
        }
        Ok(NonNull::new(addr as *mut u8).expect("a piece is there"))
    }

    /// Returns the piece that holds `addr`: its first address and its end, in whole granules.
    /// Returns `None` in a child of fork, where another thread may have held the lock at the fork.
    pub fn piece(&self, addr: usize) -> Option<Range<usize>> {
        self.at_home().ok()?;
        let state = self.inner.state.lock();
        let (i, at) = state.locate(addr)?;
        let (start, len) = state.parts[i].extents.find(at)?;
        let base = state.parts[i].span.start();
        Some(base + start..base + start + len)
    }

    fn span_of(&self, addrs: &Range<usize>) -> Result<Arc<FreeSpan>, Error> {
        self.at_home()?;
        let piece =
            self.piece(addrs.start).filter(|p| addrs.start <= addrs.end && addrs.end <= p.end);
        piece.ok_or(NOT_OURS)?;
        let state = self.inner.state.lock();
        let (i, _) = state.locate(addrs.start).ok_or(NOT_OURS)?;
        Ok(state.parts[i].span.clone())
    }

    /// Applies a hint to a range of addresses inside one piece. Returns the number of evicted
    /// pages.
    ///
    /// # Errors
    /// EINVAL: it is not inside one piece; ECHILD in a child of fork.
    pub fn hint(&self, addrs: Range<usize>, hint: Hint) -> Result<u64, Error> {
        let span = self.span_of(&addrs)?;
        let range = span.offsets(&addrs);
        match hint {
            Hint::Fold => return Ok(span.region.pageout(range)),
            Hint::Cold => span.region.cold(range),
            Hint::Prefetch => span.region.willneed(range),
        }
        Ok(0)
    }

    /// Loads a range of addresses inside one piece (rounded outwards to pages) and keeps it in
    /// memory. It stays until [`Heap::unpin`] with the same range, or until the piece is freed.
    /// Whole 2 MiB of it become huge pages. Pins nest.
    ///
    /// # Errors
    /// The errors of [`Heap::hint`].
    pub fn pin(&self, addrs: Range<usize>) -> Result<(), Error> {
        let span = self.span_of(&addrs)?;
        core::mem::forget(span.region.pin(span.offsets(&addrs)));
        // Pinned memory stays for long, so huge pages are worth their cost.
        huge::collapse(addrs.clone());
        self.inner.state.lock().pins.push(addrs);
        Ok(())
    }

    /// Ends one pin of exactly this range.
    ///
    /// # Errors
    /// EINVAL: it has no pin, or the piece was freed; ECHILD in a child of fork.
    pub fn unpin(&self, addrs: Range<usize>) -> Result<(), Error> {
        self.at_home()?;
        let mut state = self.inner.state.lock();
        let i = state.pins.iter().position(|pin| *pin == addrs).ok_or(NOT_OURS)?;
        state.unpin(i);
        Ok(())
    }

    /// Drops the contents of the pages wholly inside a range of addresses in one piece: they read
    /// as zeros.
    ///
    /// # Errors
    /// The errors of [`Heap::hint`].
    ///
    /// # Safety
    /// - No reference into the range is alive, and no other thread is using it.
    pub unsafe fn discard(&self, addrs: Range<usize>) -> Result<(), Error> {
        let span = self.span_of(&addrs)?;
        // SAFETY: the caller promises that no reference is alive, and no other thread uses the
        // range, which lies in one piece.
        unsafe { span.region.discard(span.offsets(&addrs)) };
        Ok(())
    }

    /// Loads every piece before a fork, past the limit if needed, and keeps it in memory. So the
    /// child gets copy-on-write copies, which are ordinary memory there. Pass the result to
    /// [`Heap::take_back`] after the fork. A piece that is made or freed meanwhile isn't in the
    /// child. There may be one fork at a time.
    ///
    /// # Errors
    /// ECHILD in a child of fork.
    pub fn lend(&self) -> Result<Vec<Range<usize>>, Error> {
        self.at_home()?;
        let mut state = self.inner.state.lock();
        let mut pieces = Vec::new();
        for HeapRegion { span, extents, .. } in &state.parts {
            pieces.extend(extents.used().map(|(start, len)| (span.clone(), start..start + len)));
        }
        let addrs = |(span, range): &(Arc<FreeSpan>, Range<usize>)| {
            span.start() + range.start..span.start() + range.end
        };
        // With the lock held, because a piece that is freed from now on is no longer lent.
        for piece in &pieces {
            piece.0.region.hold(piece.1.clone());
            set_inherited(addrs(piece).start, addrs(piece).end, true);
            state.lent.push(addrs(piece));
        }
        drop(state);
        pieces.iter().for_each(|(span, range)| span.region.willneed(range.clone()));
        Ok(pieces.iter().map(addrs).collect())
    }

    /// Undoes [`Heap::lend`] after a fork, in the parent. In the child it does nothing.
    pub fn take_back(&self, lent: Vec<Range<usize>>) {
        if !self.is_at_home() {
            return;
        }
        let mut state = self.inner.state.lock();
        for addrs in lent {
            if let Some(i) = state.lent.iter().position(|piece| *piece == addrs) {
                state.end_loan(i);
            }
        }
    }

    /// Returns the bytes of address space in use by pieces. Returns 0 in a child of fork, which has
    /// none of them.
    pub fn allocated_bytes(&self) -> u64 {
        if !self.is_at_home() {
            return 0;
        }
        self.inner.state.lock().parts.iter().map(|part| part.extents.used_len() as u64).sum()
    }
}

impl HeapState {
    fn take(&mut self, len: usize) -> Option<usize> {
        let align = if len >= LARGE_BYTES { MAX_BYTES } else { GRANULE_BYTES };
        let take = |part: &mut HeapRegion| Some(part.span.start() + part.extents.take(len, align)?);
        self.parts.iter_mut().find_map(take)
    }

    /// Adds a span that holds `len` bytes, and returns its addresses and its index.
    fn grow(&mut self, memory: &Memory, len: usize) -> Result<(Range<usize>, usize), Error> {
        let is_free = |place: &usize| self.parts.iter().all(|part| part.place != *place);
        let place = (0..SPANS_MAX).find(is_free).ok_or(Error::System(
            "no more regions: free some of what is allocated",
            Errno::NOMEM,
        ))?;
        let span = len.max(SPAN_BYTES);
        // A small one, where addresses are scarce.
        let region = memory
            .region(span)
            .or_else(|e| if span > len { memory.region(len) } else { Err(e) })?;
        let start = region.as_ptr() as usize;
        let addrs = start..start + region.len();
        huge::allow(addrs.clone());
        let extents = Extents::new(region.len());
        self.parts.push(HeapRegion { span: Arc::new(FreeSpan { region }), extents, place });
        Ok((addrs, place))
    }

    /// Returns the index of a region that is wholly free, if there are other ones. The smaller ones
    /// go first.
    fn spare(&self) -> Option<usize> {
        let free = (0..self.parts.len()).filter(|i| self.parts[*i].extents.is_free());
        let smallest = free.clone().min_by_key(|i| self.parts[*i].span.region.len());
        smallest.filter(|_| free.count() > 1)
    }

    /// Returns the index of the span that holds `addr`, and the offset there.
    fn locate(&self, addr: usize) -> Option<(usize, usize)> {
        let inside =
            |part: &HeapRegion| addr.wrapping_sub(part.span.start()) < part.span.region.len();
        let i = self.parts.iter().position(inside)?;
        Some((i, addr - self.parts[i].span.start()))
    }

    fn unpin(&mut self, i: usize) {
        let addrs = self.pins.swap_remove(i);
        self.unpin_region(&addrs);
    }

    fn unpin_region(&self, addrs: &Range<usize>) {
        if let Some((i, _)) = self.locate(addrs.start) {
            let span = &self.parts[i].span;
            span.region.unpin(span.offsets(addrs));
        }
    }

    fn end_loan(&mut self, i: usize) {
        let addrs = self.lent.swap_remove(i);
        set_inherited(addrs.start, addrs.end, false);
        self.unpin_region(&addrs);
    }

    /// Ends every pin and every loan that touches a range.
    fn unpin_all(&mut self, addrs: Range<usize>) {
        while let Some(i) =
            self.lent.iter().position(|piece| piece.start < addrs.end && addrs.start < piece.end)
        {
            self.end_loan(i);
        }
        while let Some(i) =
            self.pins.iter().position(|pin| pin.start < addrs.end && addrs.start < pin.end)
        {
            self.unpin(i);
        }
    }
}

fn rounded(len: usize) -> Result<usize, Error> {
    if len == 0 {
        return Err(Error::System("An allocation must have at least 1 byte", Errno::INVAL));
    }
    let most = isize::MAX as usize - SPAN_BYTES;
    let rounded = len.checked_next_multiple_of(GRANULE_BYTES).filter(|len| *len <= most);
    rounded.ok_or(Error::System("an allocation larger than the address space", Errno::NOMEM))
}

const _: () =
    assert!(GRANULE_BYTES.is_multiple_of(PAGE_SIZE) && MAX_BYTES.is_multiple_of(GRANULE_BYTES));
