//! The arena: a general allocator over one zone, for set-up and rare paths, in place of the host's
//! `malloc`.
//!
//! Sizes up to 8 KiB come from size classes, four to a doubling, each with a list of free objects.
//! Larger ones are runs of whole pages. A size class keeps its memory. Free runs are merged with
//! their neighbours and their pages are given back to the kernel. One lock guards everything, so
//! this is not for hot paths.
use crate::Errno;
use crate::memory::zone::{NoPromise, Zone, ZoneEdge};
use crate::sync::Mutex;
use crate::units::PAGE_SIZE;
use core::alloc::{GlobalAlloc, Layout};
use core::ptr::null_mut;

/// Address space that an arena reserves at its first use, bytes; less if a limit on address space
/// forbids it.
const RESERVE_BYTES: usize = 16 << 30;
/// The least address space that an arena accepts, bytes.
const RESERVE_MIN_BYTES: usize = 64 << 20;

/// Buffers of a block are runs: their unused part takes no memory.
const SMALL_BYTES_MAX: usize = 8 << 10;
const SMALL_BYTES_MIN: usize = 16;
/// 16, 32, 48, 64, then four classes to each doubling: 80, 96, 112, 128, 160, ... 8192.
const CLASSES: usize = class_of(SMALL_BYTES_MAX) + 1;
/// Memory that a class takes at a time.
const CHUNK_BYTES: usize = 32 << 10;
/// Free runs up to this size are cleared by a loop. A system call costs more, and makes other
/// threads flush their TLBs.
const CLEAR_BYTES_MAX: usize = 64 << 10;

const _: () = assert!(CHUNK_BYTES.is_multiple_of(PAGE_SIZE) && CHUNK_BYTES >= SMALL_BYTES_MAX);
const _: () = assert!(size_of::<FreeRun>() <= PAGE_SIZE && size_of::<*mut u8>() <= SMALL_BYTES_MIN);

/// An allocator of its own, usable as `#[global_allocator]`. It reserves address space at the first
/// allocation.
///
/// Invariants, which [`ZoneAllocator::check`] verifies:
/// - Free runs are in ascending order, touch neither each other nor the top, and are all zeros
///   except for their headers.
/// - Everything from the top on is untouched.
/// - Used + free bytes = top.
pub struct ZoneAllocator {
    inner: Mutex<AllocatorState>,
}

struct AllocatorState {
    zone: Option<Zone>,
    edge: ZoneEdge,
    /// Offset of the first page that is not in use by callers, classes or free runs.
    top: usize,
    /// The free run with the lowest address.
    runs: *mut FreeRun,
    free_bytes: usize,
    classes: [FreeObjects; CLASSES],
}

/// The free objects of a size class.
#[derive(Copy, Clone)]
struct FreeObjects {
    /// Freed objects, linked through their first word.
    back: *mut u8,
    /// The next object of the class's last chunk that was never used, and the number of these:
    /// untouched memory.
    fresh: *mut u8,
    count: usize,
}

impl FreeObjects {
    const NONE: FreeObjects = FreeObjects { back: null_mut(), fresh: null_mut(), count: 0 };
}

/// Header of a free run, in its first bytes.
struct FreeRun {
    next: *mut FreeRun,
    len: usize,
}

// SAFETY: the pointers lead only into the zone, which `Inner` owns.
unsafe impl Send for AllocatorState {}

impl Default for ZoneAllocator {
    fn default() -> Self {
        ZoneAllocator::new()
    }
}

impl ZoneAllocator {
    /// Makes an arena that has reserved nothing yet.
    pub const fn new() -> ZoneAllocator {
        let inner = AllocatorState {
            zone: None,
            edge: ZoneEdge::new(),
            top: 0,
            runs: null_mut(),
            free_bytes: 0,
            classes: [FreeObjects::NONE; CLASSES],
        };
        ZoneAllocator { inner: Mutex::new(inner) }
    }

    /// Returns the bytes of whole pages in use, by callers or size classes.
    pub fn used_bytes(&self) -> usize {
        let inner = self.inner.lock();
        inner.top - inner.free_bytes
    }

    /// Blocks allocation and freeing until [`ZoneAllocator::unfreeze`]. It is for a fork, whose
    /// child must not get an arena that another thread is changing.
    pub fn freeze(&self) {
        core::mem::forget(self.inner.lock());
    }

    /// Returns whether a thread allocates or frees, or has ended while it did.
    pub fn is_held(&self) -> bool {
        self.inner.is_held()
    }

    /// Ends [`ZoneAllocator::freeze`].
    ///
    /// # Safety
    /// - [`ZoneAllocator::freeze`] has returned, in this process or in the parent that it is a copy of, and
    ///   this is called once for it.
    pub unsafe fn unfreeze(&self) {
        // SAFETY: the guard was forgotten by `freeze`, so the lock is held.
        unsafe { self.inner.unlock() };
    }

    /// Verifies the free runs and the sums.
    ///
    /// # Errors
    /// The first condition that does not hold.
    pub fn check(&self) -> Result<(), &'static str> {
        let inner = self.inner.lock();
        let Some(zone) = &inner.zone else {
            return if inner.top == 0 && inner.runs.is_null() {
                Ok(())
            } else {
                Err("runs without a zone")
            };
        };
        let (mut at, mut end, mut free) = (inner.runs, zone.start(), 0);
        while !at.is_null() {
            // SAFETY: every pointer in the list leads to the header of a free run in the zone; the
            // lock is held.
            let (next, len) = unsafe { ((*at).next, (*at).len) };
            let start = at as usize;
            if start < end || (start == end && free > 0) {
                return Err("free runs overlap, touch or are out of order");
            }
            if len == 0 || !len.is_multiple_of(PAGE_SIZE) || !start.is_multiple_of(PAGE_SIZE) {
                return Err("a free run is not whole pages");
            }
            // SAFETY: a free run is `len` readable bytes that no other thread uses.
            let bytes = unsafe { core::slice::from_raw_parts(at.cast::<u8>(), len) };
            if bytes[size_of::<FreeRun>()..].iter().any(|&b| b != 0) {
                return Err("a free run is not all zeros");
            }
            (at, end, free) = (next, start + len, free + len);
        }
        if end > zone.start() && end >= zone.start() + inner.top && inner.top > 0 {
            return Err("a free run touches the top");
        }
        if free != inner.free_bytes { Err("the sum of the free runs is off") } else { Ok(()) }
    }
}

/// Returns the class of objects of `size` bytes, `1..=SMALL_BYTES_MAX`.
const fn class_of(size: usize) -> usize {
    if size <= 4 * SMALL_BYTES_MIN {
        return size.div_ceil(SMALL_BYTES_MIN).saturating_sub(1);
    }
    // Within (2^n, 2^(n+1)], steps are 2^n / 4.
    let n = (size - 1).ilog2() as usize;
    let step = (size - 1) >> (n - 2) & 3;
    4 + (n - 6) * 4 + step
}

/// Returns the bytes of an object of `class`.
const fn class_bytes(class: usize) -> usize {
    if class < 4 {
        return (class + 1) * SMALL_BYTES_MIN;
    }
    let n = 6 + (class - 4) / 4;
    (1 << n) + ((class - 4) % 4 + 1) * (1 << n) / 4
}

/// Returns the class that serves `layout`: its objects are large enough and, by their size, aligned
/// well enough.
fn class_for(layout: &Layout) -> Option<usize> {
    let size = layout.size().max(1);
    if layout.align() <= SMALL_BYTES_MIN {
        return (size <= SMALL_BYTES_MAX).then(|| class_of(size));
    }
    // Chunks are page-aligned, so objects whose size is a power of two are aligned to it, up to a
    // page.
    let size = size.max(layout.align()).next_power_of_two();
    (size <= SMALL_BYTES_MAX && layout.align() <= PAGE_SIZE).then(|| class_of(size))
}

fn run_bytes(layout: &Layout) -> Option<usize> {
    layout.size().checked_next_multiple_of(PAGE_SIZE)
}

// SAFETY: allocated memory comes from a zone that lives as long as the arena, is aligned as asked,
// and belongs to one caller until it is freed. The lock keeps the lists consistent. Sizes are
// derived only from the layout, which the caller must pass again.
unsafe impl GlobalAlloc for ZoneAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let mut inner = self.inner.lock();
        match class_for(&layout) {
            Some(class) => inner.take_object(class),
            None => {
                run_bytes(&layout).map_or(null_mut(), |len| inner.take_run(len, layout.align()))
            }
        }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        let mut inner = self.inner.lock();
        match class_for(&layout) {
            // SAFETY: `at` is an object of this class that its owner gives up.
            Some(class) => unsafe { inner.put_object(at, class) },
            // SAFETY: `at` is a run of this length that its owner gives up.
            None => unsafe { inner.put_run(at, layout.size().next_multiple_of(PAGE_SIZE)) },
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: `alloc` needs a layout with a size, which the caller promises.
        let at = unsafe { self.alloc(layout) };
        // Runs are zeroed already, so that large tables stay untouched.
        if !at.is_null() && class_for(&layout).is_some() {
            // SAFETY: `at` was just allocated with this size.
            unsafe { at.write_bytes(0, layout.size()) };
        }
        at
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let Ok(new_layout) = Layout::from_size_align(size, layout.align()) else {
            return null_mut();
        };
        let is_same_class = match (class_for(&layout), class_for(&new_layout)) {
            (Some(old), Some(new)) => old == new,
            (None, None) => run_bytes(&layout) == run_bytes(&new_layout),
            _ => false,
        };
        if is_same_class {
            return at;
        }
        // SAFETY: both blocks are distinct, and as long as the shorter of the sizes; the caller
        // gives up the old one.
        unsafe {
            let to = self.alloc(new_layout);
            if !to.is_null() {
                to.copy_from_nonoverlapping(at, layout.size().min(size));
                self.dealloc(at, layout);
            }
            to
        }
    }
}

impl AllocatorState {
    /// Takes an object of a class; returns null if there is no room.
    fn take_object(&mut self, class: usize) -> *mut u8 {
        let size = class_bytes(class);
        let back = self.classes[class].back;
        if !back.is_null() {
            // SAFETY: the first word of a freed object is the pointer to the next, written by
            // `put_object`.
            self.classes[class].back = unsafe { back.cast::<*mut u8>().read() };
            return back;
        }
        if self.classes[class].count == 0 {
            let chunk = self.take_run(CHUNK_BYTES, PAGE_SIZE);
            if chunk.is_null() {
                return chunk;
            }
            (self.classes[class].fresh, self.classes[class].count) = (chunk, CHUNK_BYTES / size);
        }
        let class = &mut self.classes[class];
        let object = class.fresh;
        class.count -= 1;
        // SAFETY: the pointer is at most one past the last object of the chunk.
        class.fresh = unsafe { object.add(size) };
        object
    }

    /// Puts an object on the list of its class.
    ///
    /// # Safety
    /// - `at` is an object of `class`, 16-aligned, that no thread uses any more.
    unsafe fn put_object(&mut self, at: *mut u8, class: usize) {
        // SAFETY: the object is free and at least a word long.
        unsafe { at.cast::<*mut u8>().write(self.classes[class].back) };
        self.classes[class].back = at;
    }

    /// Takes a zeroed run of `len` bytes (whole pages) aligned to `align`; returns null if there is
    /// no room.
    fn take_run(&mut self, len: usize, align: usize) -> *mut u8 {
        let align = align.max(PAGE_SIZE);
        let mut link = &raw mut self.runs;
        // SAFETY: `link` points to `self.runs` or to the `next` of a free run's header. Every
        // non-null pointer in the list leads to a header. The lock is held, so no other thread
        // changes them meanwhile.
        unsafe {
            while !(*link).is_null() {
                let run = *link;
                let (start, end) = (run as usize, run as usize + (*run).len);
                let at = start.next_multiple_of(align);
                if at.checked_add(len).is_some_and(|new_end| new_end <= end) {
                    return self.cut(link, at, len);
                }
                link = &raw mut (*run).next;
            }
        }
        self.grow(len, align)
    }

    /// Takes `[at, at + len)` out of the free run that `link` leads to. The parts on both sides
    /// stay free.
    ///
    /// # Safety
    /// - `link` is a link of the list to a run that contains the range.
    unsafe fn cut(&mut self, link: *mut *mut FreeRun, at: usize, len: usize) -> *mut u8 {
        // SAFETY: the caller vouches for `link`; the headers written lie in parts of the run that
        // stay free.
        unsafe {
            let run = *link;
            let (start, end, mut next) = (run as usize, run as usize + (*run).len, (*run).next);
            let (head, tail) = (at - start, end - (at + len));
            run.write(FreeRun { next: null_mut(), len: 0 });
            if tail > 0 {
                let rest = (at + len) as *mut FreeRun;
                rest.write(FreeRun { next, len: tail });
                next = rest;
            }
            if head > 0 {
                run.write(FreeRun { next, len: head });
                next = run;
            }
            *link = next;
        }
        self.free_bytes -= len;
        at as *mut u8
    }

    /// Takes a run from the top.
    fn grow(&mut self, len: usize, align: usize) -> *mut u8 {
        if self.zone.is_none() {
            self.zone = reserve().ok();
        }
        let Some(zone) = &self.zone else { return null_mut() };
        let (base, old_top) = (zone.start(), self.top);
        let Some(at) = (base + old_top).checked_next_multiple_of(align) else { return null_mut() };
        let Some(end) = at.checked_add(len).filter(|end| *end <= base + zone.len()) else {
            return null_mut();
        };
        if zone.need(&self.edge, 0, zone.len(), end - base).is_err() {
            NoPromise::end("The engine's own memory");
        }
        self.top = end - base;
        let gap = at - (base + old_top);
        if gap > 0 {
            // SAFETY: the gap lies between the old top and the run, so it is untouched, and no
            // thread uses it.
            unsafe { self.insert((base + old_top) as *mut u8, gap) };
        }
        at as *mut u8
    }

    /// Frees a run: clears it and lists it, or lowers the top.
    ///
    /// # Safety
    /// - `at` is a run of `len` bytes that no thread uses any more.
    unsafe fn put_run(&mut self, at: *mut u8, len: usize) {
        let Some(zone) = &self.zone else { return };
        // SAFETY: the run lies in the zone and is given up, so its bytes may be cleared and its
        // header written.
        unsafe {
            if len <= CLEAR_BYTES_MAX {
                at.write_bytes(0, len);
            } else {
                zone.release(at as usize - zone.start(), len);
            }
            self.insert(at, len);
        }
    }

    /// Puts a cleared run on the list, merged with its neighbours.
    ///
    /// # Safety
    /// - `at` is `len` zeroed bytes of whole pages in the zone, on no list, not in use.
    unsafe fn insert(&mut self, at: *mut u8, len: usize) {
        self.free_bytes += len;
        let (mut before, mut next) = (null_mut::<FreeRun>(), self.runs);
        // SAFETY: every pointer in the list leads to a header of a free run; the lock is held. The
        // headers written lie in free memory, and the header of a merged run is cleared.
        unsafe {
            while !next.is_null() && (next as usize) < at as usize {
                (before, next) = (next, (*next).next);
            }
            let run = at.cast::<FreeRun>();
            run.write(FreeRun { next, len });
            if !next.is_null() && at as usize + len == next as usize {
                let merged_run = next.replace(FreeRun { next: null_mut(), len: 0 });
                run.write(FreeRun { next: merged_run.next, len: len + merged_run.len });
            }
            let mut last = run;
            if before.is_null() {
                self.runs = run;
            } else if before as usize + (*before).len == at as usize {
                let merged_run = run.replace(FreeRun { next: null_mut(), len: 0 });
                before
                    .write(FreeRun { next: merged_run.next, len: (*before).len + merged_run.len });
                last = before;
            } else {
                (*before).next = run;
            }
            self.lower_top(last);
        }
    }

    /// Takes `run` off the list and lowers the top to its start, if it ends at the top.
    ///
    /// # Safety
    /// - `run` is on the list.
    unsafe fn lower_top(&mut self, run: *mut FreeRun) {
        let Some(zone) = &self.zone else { return };
        // SAFETY: the caller vouches for `run`, and the list's links lead to headers; the lock is
        // held.
        unsafe {
            if run as usize + (*run).len != zone.start() + self.top {
                return;
            }
            let mut link = &raw mut self.runs;
            while *link != run {
                link = &raw mut (**link).next;
            }
            *link = null_mut();
            let top_run = run.replace(FreeRun { next: null_mut(), len: 0 });
            self.free_bytes -= top_run.len;
            self.top -= top_run.len;
        }
    }
}

fn reserve() -> Result<Zone, Errno> {
    let mut len = RESERVE_BYTES;
    loop {
        match Zone::reserve_growing(len, PAGE_SIZE) {
            Err(Errno::NOMEM) if len > RESERVE_MIN_BYTES => len /= 2,
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_cover_every_small_size_and_waste_little() {
        for size in 1..=SMALL_BYTES_MAX {
            let class = class_of(size);
            assert!(class < CLASSES && class_bytes(class) >= size, "{size}");
            assert!(class == 0 || class_bytes(class - 1) < size, "{size} fits a smaller class");
            assert!(
                class_bytes(class).is_multiple_of(16)
                    && class_bytes(class) < size + 16.max(size / 4 + 1),
                "{size}"
            );
        }
    }

    /// Every block is filled with bytes of its own. None may change while others are allocated and
    /// freed.
    #[test]
    fn blocks_never_overlap_are_aligned_and_come_zeroed_when_asked() {
        let arena = ZoneAllocator::new();
        let mut random = 1u64;
        let mut next = move |below: usize| {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (random >> 33) as usize % below
        };
        let mut live: Vec<(*mut u8, Layout, u8)> = Vec::new();
        for round in 0..6000 {
            if live.len() > 60 || (!live.is_empty() && next(3) == 0) {
                let (at, layout, fill) = live.swap_remove(next(live.len()));
                // SAFETY: the block is a live one of this arena, `layout.size()` bytes long.
                unsafe {
                    let bytes = core::slice::from_raw_parts(at, layout.size());
                    assert!(bytes.iter().all(|&b| b == fill));
                    arena.dealloc(at, layout);
                }
            } else {
                let size = 1 + [next(200), next(20_000), next(400_000)][next(3)];
                let layout = Layout::from_size_align(size, 1 << next(15)).unwrap();
                let is_zeroed = next(2) == 0;
                let fill = round as u8 | 1;
                // SAFETY: the layout has a size; the block is filled within it.
                unsafe {
                    let at =
                        if is_zeroed { arena.alloc_zeroed(layout) } else { arena.alloc(layout) };
                    assert!(!at.is_null() && (at as usize).is_multiple_of(layout.align()));
                    let bytes = core::slice::from_raw_parts_mut(at, size);
                    assert!(!is_zeroed || bytes.iter().all(|&b| b == 0));
                    bytes.fill(fill);
                    live.push((at, layout, fill));
                }
            }
            if round % 50 == 0 {
                arena.check().unwrap();
            }
        }
        for (at, layout, _) in live {
            // SAFETY: the block is a live one of this arena.
            unsafe { arena.dealloc(at, layout) };
        }
        arena.check().unwrap();
        assert!(arena.used_bytes() <= CLASSES * CHUNK_BYTES * 30, "{}", arena.used_bytes());
    }

    #[test]
    fn runs_come_back_whole() {
        let arena = ZoneAllocator::new();
        let layout = Layout::from_size_align(100 << 10, 8).unwrap();
        // SAFETY: each layout has a size, and each block is freed once.
        unsafe {
            let blocks: Vec<_> = (0..8).map(|_| arena.alloc(layout)).collect();
            for index in [1, 3, 2, 6, 0, 7, 5, 4] {
                blocks[index].write_bytes(7, layout.size());
                arena.dealloc(blocks[index], layout);
                arena.check().unwrap();
            }
            assert_eq!(arena.used_bytes(), 0);
            let whole = Layout::from_size_align(800 << 10, 2 << 20).unwrap();
            let at = arena.alloc_zeroed(whole);
            assert_eq!(at.addr() % (2 << 20), 0);
            assert!(core::slice::from_raw_parts(at, whole.size()).iter().all(|&b| b == 0));
        }
        arena.check().unwrap();
    }

    #[test]
    fn a_block_keeps_its_bytes_when_it_grows_and_shrinks() {
        let arena = ZoneAllocator::new();
        let mut layout = Layout::from_size_align(10, 1).unwrap();
        // SAFETY: each layout has a size; every access lies within the block's present size.
        unsafe {
            let mut at = arena.alloc(layout);
            (0..10).for_each(|i| *at.add(i) = i as u8);
            for size in [16, 17, 5000, 40_000, 40_001, 900_000, 30, 10] {
                at = arena.realloc(at, layout, size);
                layout = Layout::from_size_align(size, 1).unwrap();
                assert!((0..10).all(|i| *at.add(i) == i as u8), "{size}");
                arena.check().unwrap();
            }
        }
    }

    #[test]
    fn too_much_is_refused_not_fatal() {
        let arena = ZoneAllocator::new();
        let layout = Layout::from_size_align(RESERVE_BYTES * 2, 8).unwrap();
        // SAFETY: the layout has a size.
        assert!(unsafe { arena.alloc(layout) }.is_null());
        arena.check().unwrap();
    }
}
