//! Zones: the engine's own reservations of address space.
//!
//! All data of the engine (frames, pool, index, arena) is in zones. Every live zone is listed, so
//! that `memfold run` can distinguish its own memory from the program's and never adopts it.
use crate::Errno;
use crate::sync::StaticMutex;
use crate::text::TextBuffer;
use crate::units::PAGE_SIZE;
use core::sync::atomic::{AtomicU8, AtomicUsize, Ordering::Relaxed};
use rustix::mm::{
    Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mlock, mmap_anonymous, mprotect, munlock,
    munmap,
};

/// A private anonymous reservation, readable and writable. It gets memory page by page as it is
/// touched, and is left out of core dumps.
pub struct Zone {
    base: *mut u8,
    len: usize,
    /// Whether writable memory counts as used, even if untouched (`vm.overcommit_memory=2`). Then
    /// [`Zone::need`] makes it writable.
    is_counted: bool,
}

/// How far a part of a zone may be written, bytes from the start of the part: see [`Zone::need`].
#[derive(Default)]
pub struct ZoneEdge(AtomicUsize);

impl ZoneEdge {
    /// Makes an edge at 0: nothing may be written yet.
    pub const fn new() -> ZoneEdge {
        ZoneEdge(AtomicUsize::new(0))
    }
}

const RESERVATION: MapFlags = MapFlags::PRIVATE.union(MapFlags::NORESERVE);

/// Bytes made writable at a time where they count.
const STEP_BYTES: usize = 256 << 10;

// SAFETY: a zone is only an address range; each user proves its own use of the memory behind it.
unsafe impl Send for Zone {}
// SAFETY: the methods take raw addresses and change nothing in the struct; each user proves its own
// use of the memory.
unsafe impl Sync for Zone {}

/// Most zones of a process.
pub const ZONES_MAX: usize = 4096;
static LIST: StaticMutex<ZoneList<ZONES_MAX>> = StaticMutex::new(ZoneList::new());

/// All live zones: first byte and end.
struct ZoneList<const MAX: usize> {
    zones: [(usize, usize); MAX],
    /// Whether the engine has locked it in memory.
    locked: [bool; MAX],
    /// Number of places that have been used.
    used: usize,
    count: usize,
}

impl<const MAX: usize> ZoneList<MAX> {
    const fn new() -> Self {
        ZoneList { zones: [(0, 0); MAX], locked: [false; MAX], used: 0, count: 0 }
    }

    fn free_place(&self) -> Option<usize> {
        self.zones.iter().position(|zone| zone.1 == 0)
    }

    fn enter(&mut self, place: usize, start: usize, end: usize) {
        self.zones[place] = (start, end);
        self.locked[place] = false;
        self.used = self.used.max(place + 1);
        self.count += 1;
    }

    fn remove(&mut self, start: usize) {
        if let Some(zone) = self.zones.iter_mut().find(|zone| zone.0 == start) {
            *zone = (0, 0);
            self.count -= 1;
        }
    }

    fn is_crowded(&self) -> bool {
        self.count >= MAX / 8 * 7
    }

    fn live(&self) -> impl Iterator<Item = &(usize, usize)> {
        self.zones[..self.used].iter().filter(|zone| zone.1 != 0)
    }

    fn overlaps(&self, start: usize, end: usize) -> bool {
        self.live().any(|zone| start < zone.1 && zone.0 < end)
    }

    fn live_where(&self, locked: bool) -> impl Iterator<Item = &(usize, usize)> {
        let all = self.zones[..self.used].iter().zip(&self.locked);
        all.filter(move |(zone, is)| zone.1 != 0 && **is == locked).map(|(zone, _)| zone)
    }
}

impl Zone {
    /// Reserves `len` bytes aligned to `align`. Pages read as zeros until written. Huge pages are
    /// switched off.
    ///
    /// # Errors
    /// The errors of `mmap` (ENOMEM: no address space, or a limit such as RLIMIT_AS); ENFILE when
    /// [`ZONES_MAX`] are alive.
    ///
    /// # Panics
    /// If `len` or `align` is not a multiple of the page size, or `align` is not a power of two.
    pub fn reserve(len: usize, align: usize) -> Result<Zone, Errno> {
        Zone::reserve_as(len, align, false)
    }

    /// Reserves a zone whose parts are filled each from its start on, after a call of
    /// [`Zone::need`]. Only the needed memory counts where the system counts writable memory
    /// (`vm.overcommit_memory=2`). All of it is readable.
    ///
    /// # Errors
    /// The errors of [`Zone::reserve`].
    ///
    /// # Panics
    /// If `len` or `align` is not a multiple of the page size, or `align` is not a power of two.
    pub fn reserve_growing(len: usize, align: usize) -> Result<Zone, Errno> {
        Zone::reserve_as(len, align, counts_reservations())
    }

    fn reserve_as(len: usize, align: usize, is_counted: bool) -> Result<Zone, Errno> {
        assert!(
            len > 0
                && len.is_multiple_of(PAGE_SIZE)
                && align.is_multiple_of(PAGE_SIZE)
                && align.is_power_of_two()
        );
        let whole = len + align - PAGE_SIZE;
        let access = if is_counted { ProtFlags::READ } else { ProtFlags::READ | ProtFlags::WRITE };
        // Locked before the mapping exists until it is listed. A thread that finds it in the
        // kernel's map meanwhile, and looks up its owner, waits.
        let mut list = LIST.lock();
        let free = list.free_place().ok_or(Errno::NFILE)?;
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice overlaps nothing.
        let at = unsafe { mmap_anonymous(core::ptr::null_mut(), whole, access, RESERVATION)? };
        let start = at as usize;
        let base = start.next_multiple_of(align);
        // SAFETY: head and tail lie inside the mapping just made and outside [base, base + len).
        unsafe {
            if base > start {
                munmap(at, base - start)?;
            }
            let end = base + len;
            if start + whole > end {
                munmap(end as *mut _, start + whole - end)?;
            }
        }
        Ok(Zone::enter(&mut list, free, base, len, is_counted))
    }

    /// Reserves `len` bytes at the address `at`.
    ///
    /// # Errors
    /// EEXIST: something is mapped there. Those of [`Zone::reserve`].
    ///
    /// # Panics
    /// If `len` or `at` is not a multiple of the page size.
    pub fn reserve_at(len: usize, at: usize) -> Result<Zone, Errno> {
        assert!(len > 0 && len.is_multiple_of(PAGE_SIZE) && at.is_multiple_of(PAGE_SIZE));
        let mut list = LIST.lock();
        let free = list.free_place().ok_or(Errno::NFILE)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = RESERVATION | MapFlags::FIXED_NOREPLACE;
        // SAFETY: the kernel replaces no mapping with this flag.
        let at = unsafe { mmap_anonymous(at as *mut _, len, access, flags)? };
        Ok(Zone::enter(&mut list, free, at as usize, len, false))
    }

    /// Lists a mapping just made as a zone.
    fn enter(
        list: &mut ZoneList<ZONES_MAX>,
        free: usize,
        base: usize,
        len: usize,
        is_counted: bool,
    ) -> Zone {
        // SAFETY: the caller has just made this mapping, and nothing uses it yet.
        unsafe {
            // Failure is harmless: a kernel without THP returns EINVAL.
            let _ = madvise(base as *mut _, len, Advice::LinuxNoHugepage);
            // A core dump looks at each page of a mapping, present or not: at terabytes it would
            // take minutes.
            let _ = madvise(base as *mut _, len, Advice::LinuxDontDump);
        }
        list.enter(free, base, base + len);
        Zone { base: base as *mut u8, len, is_counted }
    }

    /// Makes the first `end` bytes of the part of `len` bytes at `offset` writable, before they are
    /// written for the first time. Does nothing where reservations don't count. `edge` is that of
    /// the part.
    ///
    /// # Errors
    /// ENOMEM: the system promises no more memory to programs.
    ///
    /// # Panics
    /// If the part is not page-aligned or reaches past the zone, or `end` past the part.
    #[inline]
    pub fn need(
        &self,
        edge: &ZoneEdge,
        offset: usize,
        len: usize,
        end: usize,
    ) -> Result<(), Errno> {
        if self.is_counted && end > edge.0.load(Relaxed) {
            self.grow(edge, offset, len, end)
        } else {
            Ok(())
        }
    }

    #[cold]
    fn grow(&self, edge: &ZoneEdge, offset: usize, len: usize, end: usize) -> Result<(), Errno> {
        assert!(offset.is_multiple_of(PAGE_SIZE) && offset + len <= self.len && end <= len);
        let to = end.next_multiple_of(STEP_BYTES).min(len.next_multiple_of(PAGE_SIZE));
        let from = edge.0.load(Relaxed);
        if from < to {
            // SAFETY: the range lies in this zone's own mapping, whose users may write there from
            // now on. Two threads at once request the same range, or a larger one.
            unsafe {
                mprotect(
                    self.base.add(offset + from).cast(),
                    to - from,
                    MprotectFlags::READ | MprotectFlags::WRITE,
                )?;
            }
            edge.0.fetch_max(to, Relaxed);
        }
        Ok(())
    }

    /// Returns the first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base
    }

    /// Returns the address of the first byte.
    pub fn start(&self) -> usize {
        self.base as usize
    }

    /// Returns the length in bytes.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether `addr` lies in this zone.
    pub fn contains(&self, addr: usize) -> bool {
        addr.wrapping_sub(self.base as usize) < self.len
    }

    /// Includes the zone's memory in core dumps, because it holds data of the program.
    pub fn show_in_dumps(&self) {
        // SAFETY: the advice changes no byte of the zone's own mapping. Failure is harmless.
        let _ = unsafe { madvise(self.base.cast(), self.len, Advice::LinuxDoDump) };
    }

    /// Leaves the zone out of children of fork: a touch there ends the child, instead of reading
    /// zeros.
    pub fn keep_from_children(&self) {
        set_inherited(self.start(), self.start() + self.len, false);
    }

    /// Keeps the kernel from merging pages of the zone with equal ones, also where it does so for
    /// the whole process (PR_SET_MEMORY_MERGE, which is inherited). Merging silently ends a page's
    /// write protection, so writes would no longer be noticed.
    pub fn keep_from_merging(&self) {
        // SAFETY: the advice changes no byte. It fails only where the kernel can't merge.
        let _ = unsafe { madvise(self.base.cast(), self.len, Advice::LinuxUnmergeable) };
    }

    /// Makes a child of fork find zeros in place of the zone's bytes.
    ///
    /// # Errors
    /// EINVAL before Linux 4.14.
    pub fn wipe_in_children(&self) -> Result<(), Errno> {
        // SAFETY: this is the zone's own mapping; no byte of this process changes.
        unsafe { madvise(self.base.cast(), self.len, Advice::LinuxWipeOnFork) }
    }

    /// Locks all of the zone in memory, also when the program unlocks memory.
    ///
    /// # Errors
    /// The errors of `mlock`: ENOMEM past RLIMIT_MEMLOCK.
    pub fn lock(&self) -> Result<(), Errno> {
        // SAFETY: this is the zone's own mapping; no byte changes.
        unsafe { mlock(self.base.cast(), self.len)? };
        let mut list = LIST.lock();
        let own = list
            .zones
            .iter()
            .position(|slot| slot.0 == self.start())
            .expect("a live zone is listed");
        list.locked[own] = true;
        Ok(())
    }

    /// Asks the kernel for the memory of `[offset, offset + len)` in one call, which costs less
    /// than a fault for each page. Changes no byte. If the kernel refuses, pages are made when they
    /// are touched.
    ///
    /// # Panics
    /// If the range is not page-aligned or reaches past the zone.
    pub fn populate(&self, offset: usize, len: usize) {
        assert!(
            offset.is_multiple_of(PAGE_SIZE)
                && len.is_multiple_of(PAGE_SIZE)
                && offset + len <= self.len
        );
        // SAFETY: the range lies in this zone's own mapping, and MADV_POPULATE_WRITE changes no
        // byte.
        let _ = unsafe { madvise(self.base.add(offset).cast(), len, Advice::LinuxPopulateWrite) };
    }

    /// Gives the pages of `[offset, offset + len)` back to the kernel. They read as zeros
    /// afterwards.
    ///
    /// # Safety
    /// - The bytes there are not needed any more, and no reference into them is alive.
    ///
    /// # Panics
    /// If the range is not page-aligned or reaches past the zone.
    pub unsafe fn release(&self, offset: usize, len: usize) {
        assert!(
            offset.is_multiple_of(PAGE_SIZE)
                && len.is_multiple_of(PAGE_SIZE)
                && offset + len <= self.len
        );
        if len == 0 {
            return;
        }
        // SAFETY: the range lies in this zone's own mapping, and the caller gives up its bytes.
        let outcome =
            unsafe { madvise(self.base.add(offset).cast(), len, Advice::LinuxDontneedLocked) };
        outcome.expect("memfold: Releasing the engine's own pages failed");
    }
}

/// Why [`Zone::need`] fails, and what to do.
pub struct NoPromise;

impl core::fmt::Display for NoPromise {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("vm.overcommit_memory is 2, and the system promises no more memory to programs (CommitLimit in /proc/meminfo)")
    }
}

impl NoPromise {
    /// Ends the process, because one of the engine's tables can't grow. The message takes no
    /// memory.
    pub fn end(what: &str) -> ! {
        let text: TextBuffer<256> = TextBuffer::of(format_args!(
            "{what} can't grow: {NoPromise}. Raise vm.overcommit_ratio, or add swap"
        ));
        crate::raw::end(core::str::from_utf8(text.as_bytes()).unwrap_or(what))
    }
}

/// Returns whether the system counts writable memory as used (`vm.overcommit_memory=2`). The first
/// call decides, in this process or in the one that it is a copy of. Each look costs as much as
/// reserving a zone.
pub fn counts_reservations() -> bool {
    const UNKNOWN: u8 = 0;
    const NO: u8 = 1;
    const YES: u8 = 2;
    static SEEN: AtomicU8 = AtomicU8::new(UNKNOWN);
    match SEEN.load(Relaxed) {
        UNKNOWN => {
            let counts = read_overcommit() == Some(b'2');
            SEEN.store(if counts { YES } else { NO }, Relaxed);
            counts
        }
        seen => seen == YES,
    }
}

fn read_overcommit() -> Option<u8> {
    use rustix::fs::{Mode, OFlags, open};
    let mut mode = [0u8];
    let path = c"/proc/sys/vm/overcommit_memory";
    let file = open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    (rustix::io::read(file, &mut mode).ok()? == 1).then_some(mode[0])
}

impl Drop for Zone {
    fn drop(&mut self) {
        let start = self.base as usize;
        let mut list = LIST.lock();
        list.remove(start);
        // SAFETY: the zone owns this mapping, and dropping it gives up every byte.
        let _ = unsafe { munmap(self.base.cast(), self.len) };
    }
}

/// Memory that a process shares with the children it forks from then on, zeros at first. It isn't
/// private, so it is never taken for the program's.
pub struct SharedZone {
    base: *mut u8,
    len: usize,
}

// SAFETY: it is only an address range; each user proves its own use of the memory behind it.
unsafe impl Send for SharedZone {}

impl SharedZone {
    /// Reserves `len` bytes. They get memory as they are touched.
    ///
    /// # Errors
    /// The errors of `mmap`.
    pub fn reserve(len: usize) -> Result<SharedZone, Errno> {
        let (access, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::NORESERVE);
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice overlaps nothing.
        let at = unsafe { mmap_anonymous(core::ptr::null_mut(), len, access, flags)? };
        Ok(SharedZone { base: at.cast(), len })
    }

    /// Returns the first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base
    }
}

impl Drop for SharedZone {
    fn drop(&mut self) {
        // SAFETY: the zone owns this process's mapping, and dropping it gives up its bytes here.
        let _ = unsafe { munmap(self.base.cast(), self.len) };
    }
}

/// Keeps the list of zones unchanged until [`unfreeze_list`]: no zone is added or removed. It is
/// for a fork, whose child must not get a list that another thread is changing.
pub fn freeze_list() {
    core::mem::forget(LIST.lock());
}

/// Returns whether a thread uses the list of zones, or has ended while it did.
pub fn list_is_held() -> bool {
    LIST.is_held()
}

/// Ends [`freeze_list`].
///
/// # Safety
/// - [`freeze_list`] has returned, in this process or in the parent that it is a copy of, and this
///   is called once for it.
pub unsafe fn unfreeze_list() {
    // SAFETY: the guard was forgotten by `freeze_list`, so the lock is held.
    unsafe { LIST.unlock() };
}

/// Sets whether children of fork get copies of the pages of `[start, end)` (whole pages). If they
/// don't, a touch in the child ends it with SIGSEGV. Unmapped parts are skipped.
pub fn set_inherited(start: usize, end: usize, inherited: bool) {
    let advice = if inherited { Advice::LinuxDoFork } else { Advice::LinuxDontFork };
    // SAFETY: the advice changes what fork copies, and no byte. Failure is harmless: the kernel
    // refuses it for no anonymous mapping.
    let _ = unsafe { madvise(start as *mut _, end - start, advice) };
}

/// Sets or clears a mark on `[start, end)` (whole pages of private anonymous memory):
/// [`crate::maps::flag::RANDOM`]. The kernel keeps the mark when it moves the memory, and new
/// mappings don't have it. It has no effect on memory without a file.
pub fn set_marked(start: usize, end: usize, marked: bool) {
    let advice = if marked { Advice::Random } else { Advice::Normal };
    // SAFETY: the advice changes no byte. Unmapped parts are skipped.
    let _ = unsafe { madvise(start as *mut _, end - start, advice) };
}

/// Returns the bytes that the engine itself has locked ([`Zone::lock`]).
pub fn locked_bytes() -> usize {
    LIST.lock().live_where(true).map(|zone| zone.1 - zone.0).sum()
}

/// Locks the engine's zones again, after the program's munlockall.
pub fn lock_again() {
    for zone in LIST.lock().live_where(true) {
        // SAFETY: this is the engine's own mapping; no byte changes. It was possible before.
        let _ = unsafe { mlock(zone.0 as *mut _, zone.1 - zone.0) };
    }
}

/// Undoes the program's mlockall for every live zone. Locked frames could not take part in moves,
/// and the kernel would fill sparse zones.
pub fn unlock_all() {
    for zone in LIST.lock().live_where(false) {
        // SAFETY: this is the engine's own mapping; no byte changes. Failure is harmless: a locked
        // frame is copied, not moved.
        let _ = unsafe { munlock(zone.0 as *mut _, zone.1 - zone.0) };
    }
}

/// Returns the bytes of address space that all live zones reserve.
pub fn reserved_bytes() -> usize {
    LIST.lock().live().map(|zone| zone.1 - zone.0).sum()
}

/// Returns whether 7 of 8 of all possible zones are alive. The engine then refuses new regions and
/// engines. Present engines need the remaining zones to continue.
pub fn are_crowded() -> bool {
    LIST.lock().is_crowded()
}

/// Returns whether `[start, end)` touches any live zone of the engine.
pub fn overlaps_own(start: usize, end: usize) -> bool {
    LIST.lock().overlaps(start, end)
}

/// Calls `take` if `[start, end)` touches no live zone of the engine. No zone is added or removed
/// meanwhile, so the memory there is not the engine's.
///
/// # Errors
/// The error of `take`; EBUSY: a zone is there.
pub fn unless_own(
    start: usize,
    end: usize,
    take: impl FnOnce() -> Result<(), Errno>,
) -> Result<(), Errno> {
    let list = LIST.lock();
    if list.overlaps(start, end) { Err(Errno::BUSY) } else { take() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::maps::{each_area, private_anonymous_at};
    use core::ops::ControlFlow::{Break, Continue};
    use core::sync::atomic::AtomicBool;

    #[test]
    fn table_that_cant_grow_ends_the_process_with_one_line() {
        let end = std::panic::catch_unwind(|| NoPromise::end("The index")).unwrap_err();
        let text = end.downcast_ref::<std::string::String>().unwrap();
        assert!(
            text.starts_with("memfold: The index can't grow: vm.overcommit_memory is 2"),
            "{text}"
        );
        assert!(text.contains("CommitLimit") && text.ends_with("or add swap"), "{text}");
    }

    #[test]
    fn counted_zone_is_readable_and_writable_up_to_its_edge() {
        let zone = Zone::reserve_as(8 << 20, 2 << 20, true).unwrap();
        let (first, second) = (ZoneEdge::new(), ZoneEdge::new());
        // SAFETY: offsets lie inside the zone, and no other thread uses it. Written bytes were made
        // writable by `need`.
        unsafe {
            assert_eq!(zone.as_ptr().add(7 << 20).read_volatile(), 0);
            zone.need(&first, 0, 4 << 20, 5000).unwrap();
            zone.as_ptr().add(4999).write_volatile(1);
            zone.need(&second, 4 << 20, 4 << 20, 4 << 20).unwrap();
            zone.as_ptr().add((8 << 20) - 1).write_volatile(1);
        }
        assert_eq!((first.0.load(Relaxed), second.0.load(Relaxed)), (STEP_BYTES, 4 << 20));
    }

    #[test]
    fn a_zone_is_aligned_listed_and_reads_zeros_after_release() {
        let zone = Zone::reserve(8 << 20, 2 << 20).unwrap();
        assert_eq!(zone.start() % (2 << 20), 0);
        assert!(overlaps_own(zone.start() + 4096, zone.start() + 8192));
        // SAFETY: offsets lie inside the zone, and no other thread uses it.
        unsafe {
            *zone.as_ptr().add(5000) = 7;
            zone.release(4096, 4096);
            assert_eq!(*zone.as_ptr().add(5000), 0);
        }
        let start = zone.start();
        drop(zone);
        assert!(!overlaps_own(start, start + 4096));
    }

    #[test]
    fn list_is_crowded_at_seven_eighths_and_takes_all_places() {
        let mut list = ZoneList::<16>::new();
        for n in 1..=16 {
            assert_eq!(list.is_crowded(), n > 14, "{n}");
            let place = list.free_place().unwrap();
            list.enter(place, n << 12, (n + 1) << 12);
        }
        assert!(list.is_crowded() && list.free_place().is_none());
        for n in [1, 2, 16] {
            list.remove(n << 12);
            list.remove(n << 12);
        }
        assert!(!list.is_crowded() && list.free_place() == Some(0));
    }

    /// A zone that was mapped, and not listed yet, was taken for the program's.
    #[test]
    fn no_zone_is_ever_taken_for_somebody_elses() {
        const LEN: usize = 12_347 * PAGE_SIZE;
        const ALIGN: usize = 2 << 20;
        let is_over = AtomicBool::new(false);
        let is_like_a_zone = |len: usize| len == LEN || len == LEN + ALIGN - PAGE_SIZE;
        let (mut count, mut mistaken) = (0, None);
        std::thread::scope(|threads| {
            threads.spawn(|| {
                while !is_over.load(Relaxed) {
                    drop(Zone::reserve(LEN, ALIGN).unwrap());
                }
            });
            for _ in 0..5000 {
                let mut area_seen = None;
                let _ = each_area(|area| {
                    area_seen = is_like_a_zone(area.len()).then_some((area.start, area.end));
                    if area_seen.is_some() { Break(()) } else { Continue(()) }
                });
                let Some((start, end)) = area_seen else { continue };
                count += 1;
                let _ = unless_own(start, end, || {
                    let is_present = private_anonymous_at(start);
                    mistaken =
                        mistaken.or(is_present.filter(|(start, end)| is_like_a_zone(end - start)));
                    Ok(())
                });
            }
            is_over.store(true, Relaxed);
        });
        assert_eq!(mistaken, None);
        assert!(count > 0, "none was met");
    }
}
