//! Holds: buffers of a system call stay in the page table until the call returns, though no lock is
//! held meanwhile.
//!
//! In inline delivery the kernel cannot fault in folded pages: a system call that meets a missing
//! page fails. So the thread that makes a call holds the call's buffers:
//!
//! | the holder | the evictor |
//! |---|---|
//! | writes its ranges into a slot ([`HoldBuilder::publish`]) | marks the pages as leaving ([`Holds::mark_leaving`]) |
//! | looks whether any of them is marked, and waits for the end of that ([`Holds::wait`]) | looks at all slots ([`LeavingPages::may_evict`]), and skips pages that are held |
//! | touches every page, and makes the call | evicts the rest, and ends the mark |
//!
//! Both sides write before they look, and all accesses are sequentially consistent. So one of the
//! two sees the other. If the evictor does, the page stays. If the holder does, the page is gone by
//! the time of the touch, which loads it, and no later evictor takes it. `tests/holds.rs` explores
//! this, also with a step left out.
//!
//! The mark has further uses. A page is marked while it is write-protected, because a write of the
//! kernel to such a page fails too. It is marked while the program discards it. And it is marked
//! while it is adopted, because missing pages then need a thread that serves their faults.
//!
//! Marks are counters, one for each of 256 classes of 2 MiB chunks. So a holder may wait for
//! another thread's chunk, which is short.
//!
//! **Slots grow with the threads.** Each thread has the slot of its number, so threads don't meet
//! there. A call that names more ranges than fit takes further slots: a hold is a chain of slots,
//! and names exactly its ranges. Evictors look at all slots up to the last one in use. If there is
//! no memory for a slot, nothing is held, and the call fails with ENOMEM.
use alloc::boxed::Box;
use core::ops::Range;
use core::ptr::null_mut;
#[cfg(not(feature = "shuttle"))]
use memfold_os::memory::zone::Zone;
use memfold_os::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize,
    Ordering::{Relaxed, SeqCst},
};
use memfold_os::sync::{Condvar, Mutex};
use memfold_os::thread::yield_now;
use memfold_os::units::{MAX_BYTES, PAGE_SIZE};

/// Slots of the first chunk, and classes. Each further chunk has twice as many slots as the one
/// before. A model has few, because each run makes them anew.
#[cfg(not(feature = "shuttle"))]
const SIZES: [usize; 2] = [256, 256];
#[cfg(feature = "shuttle")]
const SIZES: [usize; 2] = [4, 64];
const FIRST: usize = SIZES[0];
const CELLS: usize = SIZES[1];
/// More slots than the system can have threads.
const CHUNKS: usize = 20;

/// Ranges that fit into a slot.
const RANGES: usize = 7;
/// With fewer slots than this, `trim` does nothing.
const FEW: usize = 64;

/// Holds of at least so many bytes are counted.
const LARGE: usize = 64 << 10;

const FREE: u32 = 0;
/// The slot is in use, and has this less many ranges.
const TAKEN: u32 = 1;
/// Marks the last slot of a chain.
const LAST: u32 = u32::MAX;
/// Marks a range that the kernel writes to, beside its first address.
const WRITE: usize = 1;

/// Ranges held by a call, or a part of them.
#[repr(C, align(64))]
struct HoldSlot {
    /// [`FREE`], or [`TAKEN`] plus the number of its ranges.
    state: AtomicU32,
    /// The next slot of the hold. Only its holder reads it.
    next: AtomicU32,
    /// The bytes that it has added to `Holds::bytes`.
    bytes: AtomicUsize,
    ranges: [(AtomicUsize, AtomicUsize); RANGES],
}

#[cfg(not(feature = "shuttle"))]
const _: () = assert!(size_of::<HoldSlot>() == 128);

#[derive(Default)]
struct HoldCell {
    /// Number of evictors that work on chunks of this class.
    leaving: AtomicU32,
    /// Number of holders that wait for these evictors.
    waiting: AtomicU32,
    lock: Mutex<()>,
    ended: Condvar,
}

/// All holds of a process.
pub struct Holds {
    /// Null until a chunk is made. It stays then.
    chunks: [AtomicPtr<HoldSlot>; CHUNKS],
    /// Empty where no thread ever holds.
    cells: Box<[HoldCell]>,
    /// All slots from this one on are free.
    used: AtomicUsize,
    /// Number of threads that have stopped eviction: see [`Holds::stop_eviction`].
    stops: AtomicU32,
    /// Whether an evictor waits for the end of a hold: see [`Holds::await_ending`].
    is_ending_awaited: AtomicBool,
    endings: AtomicU64,
    /// Bytes of holds of [`LARGE`] and more. Counting smaller ones would make all threads write
    /// here.
    bytes: AtomicUsize,
}

/// The holds of the process, once there are any, and the empty ones.
#[cfg(not(feature = "shuttle"))]
static USED: AtomicPtr<Holds> = AtomicPtr::new(null_mut());
#[cfg(not(feature = "shuttle"))]
static UNUSED: AtomicPtr<Holds> = AtomicPtr::new(null_mut());

/// A hold, until [`Holds::release`]: its first slot.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct HoldId(pub u32);

/// There is no memory, or no address space, for another slot.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct NoHoldSlot;

/// A hold that is being built. If it is dropped, no range is held.
pub struct HoldBuilder<'a> {
    holds: &'a Holds,
    near: usize,
    /// The first and the last slot.
    ends: Option<(u32, u32)>,
    /// Ranges in the last slot.
    count: usize,
    bytes: usize,
    lacks_room: bool,
}

/// Makes `count` free slots at `place` if there are none yet. They stay. Returns `false` without
/// memory.
#[cfg(not(feature = "shuttle"))]
fn put_slots(place: &AtomicPtr<HoldSlot>, count: usize) -> bool {
    const { assert!(FREE == 0 && (FIRST * size_of::<HoldSlot>()).is_multiple_of(PAGE_SIZE)) };
    // Zeros are a free slot, and a part that was never used has no page.
    let Ok(zone) = Zone::reserve(count * size_of::<HoldSlot>(), PAGE_SIZE) else { return false };
    let slots = zone.as_ptr().cast();
    if place.compare_exchange(null_mut(), slots, SeqCst, SeqCst).is_ok() {
        core::mem::forget(zone);
    }
    true
}

/// Makes `count` free slots at `place`, in a model, whose atomics are no plain numbers.
#[cfg(feature = "shuttle")]
fn put_slots(place: &AtomicPtr<HoldSlot>, count: usize) -> bool {
    let slot = |_| HoldSlot {
        state: AtomicU32::new(FREE),
        next: AtomicU32::new(LAST),
        bytes: AtomicUsize::new(0),
        ranges: core::array::from_fn(|_| (AtomicUsize::new(0), AtomicUsize::new(0))),
    };
    let slots: Box<[HoldSlot]> = (0..count).map(slot).collect();
    let slots = Box::leak(slots).as_mut_ptr();
    // The slots of the thread that comes second stay too, because a model is short.
    let _ = place.compare_exchange(null_mut(), slots, SeqCst, SeqCst);
    true
}

/// A mark on pages as leaving, until it is dropped.
pub struct LeavingPages<'a> {
    holds: &'a Holds,
    cells: [u64; CELLS / 64],
}

/// Calls `each` with the classes of the chunks that `[start, end)` touches.
fn each_class(range: &Range<usize>, mut each: impl FnMut(usize)) {
    if range.is_empty() {
        return;
    }
    let (first, last) = (range.start / MAX_BYTES, (range.end - 1) / MAX_BYTES);
    (first..=last.min(first + CELLS - 1)).for_each(|chunk| each(chunk % CELLS));
}

/// Returns the chunk of a slot, and its place there.
fn place_of(slot: usize) -> (usize, usize) {
    let chunk = (slot / FIRST + 1).ilog2() as usize;
    (chunk, slot + FIRST - (FIRST << chunk))
}

impl Holds {
    /// Makes an empty set. Without `used`, no thread will hold.
    pub fn new(used: bool) -> Holds {
        Holds {
            chunks: core::array::from_fn(|_| AtomicPtr::new(null_mut())),
            cells: (0..if used { CELLS } else { 0 }).map(|_| HoldCell::default()).collect(),
            used: AtomicUsize::new(0),
            stops: AtomicU32::new(0),
            is_ending_awaited: AtomicBool::new(false),
            endings: AtomicU64::new(0),
            bytes: AtomicUsize::new(0),
        }
    }

    /// Returns the holds of all engines of the process, because a call may name memory of several.
    /// Without `used`, returns an empty set that stays so.
    #[cfg(not(feature = "shuttle"))]
    pub fn of_process(used: bool) -> &'static Holds {
        let place = if used { &USED } else { &UNUSED };
        if place.load(SeqCst).is_null() {
            let new = Box::into_raw(Box::new(Holds::new(used)));
            if place.compare_exchange(null_mut(), new, SeqCst, SeqCst).is_err() {
                // SAFETY: this thread made the box above, and has not shared it.
                drop(unsafe { Box::from_raw(new) });
            }
        }
        // SAFETY: the pointer is that of a leaked box.
        unsafe { &*place.load(SeqCst) }
    }

    /// Makes a new set, because each run of a model has its own.
    #[cfg(feature = "shuttle")]
    pub fn of_process(used: bool) -> &'static Holds {
        Box::leak(Box::new(Holds::new(used)))
    }

    /// Returns the bytes that holds of 64 KiB and more hold.
    pub fn held_bytes(&self) -> u64 {
        self.bytes.load(Relaxed) as u64
    }

    /// Returns whether any thread ever holds.
    pub fn are_used(&self) -> bool {
        !self.cells.is_empty()
    }

    /// Begins a hold. `near` is the number of the calling thread, which no other has.
    pub fn begin(&self, near: usize) -> HoldBuilder<'_> {
        HoldBuilder { holds: self, near, ends: None, count: 0, bytes: 0, lacks_room: false }
    }

    /// Holds one range: publishes it, and waits. The caller then touches every page.
    ///
    /// # Errors
    /// There is no memory for a slot.
    pub fn hold(&self, near: usize, range: Range<usize>) -> Result<HoldId, NoHoldSlot> {
        let mut holding = self.begin(near);
        holding.push(range, false);
        let hold = holding.publish()?.ok_or(NoHoldSlot)?;
        self.wait(hold);
        Ok(hold)
    }

    fn slot(&self, at: usize) -> Option<&HoldSlot> {
        let (chunk, place) = place_of(at);
        let slots = self.chunks.get(chunk)?.load(SeqCst);
        // SAFETY: the chunk has `FIRST << chunk` slots, of which `place` is one, and stays.
        (!slots.is_null()).then(|| unsafe { &*slots.add(place) })
    }

    /// Returns a slot that is, or was, in use.
    fn known(&self, at: u32) -> &HoldSlot {
        self.slot(at as usize).expect("a chunk stays")
    }

    /// Calls `each` with all slots that may be in use.
    fn each_slot(&self, mut each: impl FnMut(usize, &HoldSlot)) {
        let (used, mut first) = (self.used.load(SeqCst), 0);
        for (chunk, slots) in self.chunks.iter().enumerate() {
            if first >= used {
                return;
            }
            let (slots, count) = (slots.load(SeqCst), FIRST << chunk);
            for at in 0..if slots.is_null() { 0 } else { count.min(used - first) } {
                // SAFETY: the chunk has `count` slots, and stays.
                each(first + at, unsafe { &*slots.add(at) });
            }
            first += count;
        }
    }

    /// Takes a free slot: `near`, or one that comes after it, or any.
    fn take(&self, near: usize) -> Option<u32> {
        self.grow(near);
        let used_slots = self.used.load(SeqCst);
        let mut candidates =
            core::iter::once(near).chain(near + 1..used_slots).chain(0..near.min(used_slots));
        let mut slot = candidates.find(|at| self.try_take(*at));
        let mut new = used_slots.max(near + 1);
        while slot.is_none() {
            if !self.grow(new) {
                return None;
            }
            slot = Some(new).filter(|at| self.try_take(*at));
            new += 1;
        }
        let slot = slot?;
        // Before its ranges count. No thread lowers it below a slot that is taken.
        if self.used.load(SeqCst) <= slot {
            self.used.fetch_max(slot + 1, SeqCst);
        }
        Some(slot as u32)
    }

    fn try_take(&self, at: usize) -> bool {
        self.slot(at).is_some_and(|slot| {
            slot.state.load(Relaxed) == FREE
                && slot.state.compare_exchange(FREE, TAKEN, SeqCst, Relaxed).is_ok()
        })
    }

    /// Makes the chunk of a slot. Returns `false` if there is no memory for it.
    fn grow(&self, at: usize) -> bool {
        let (chunk, _) = place_of(at);
        let place = self.chunks.get(chunk);
        place.is_some_and(|place| !place.load(SeqCst).is_null() || put_slots(place, FIRST << chunk))
    }

    /// Lowers `used` past free slots. The thread takes each of these slots meanwhile, so no other
    /// can. A thread that takes a later one raises `used` again.
    #[cold]
    fn trim(&self) {
        loop {
            let used_slots = self.used.load(SeqCst);
            if used_slots <= FEW || !self.try_take(used_slots - 1) {
                return;
            }
            let lowered =
                self.used.compare_exchange(used_slots, used_slots - 1, SeqCst, SeqCst).is_ok();
            self.known(used_slots as u32 - 1).state.store(FREE, SeqCst);
            if !lowered {
                return;
            }
        }
    }

    /// Stops evictions until [`Holds::allow_eviction`]. Evictions in progress have ended on return.
    /// It is for a process that is about to end, while the kernel reads its memory.
    pub fn stop_eviction(&self) {
        self.stops.fetch_add(1, SeqCst);
        self.cells.iter().for_each(HoldCell::wait);
    }

    /// Returns whether evictions are stopped now.
    pub fn stops_eviction(&self) -> bool {
        self.stops.load(SeqCst) > 0
    }

    /// Ends [`Holds::stop_eviction`].
    pub fn allow_eviction(&self) {
        // A child of fork may end a stop of its parent that is not counted here.
        let less = |count: u32| count.checked_sub(1);
        let _ = self.stops.fetch_update(SeqCst, SeqCst, less);
    }

    /// Runs the second step, after [`HoldBuilder::publish`]: waits until no page of the hold is
    /// marked by an evictor that did not see the hold.
    pub fn wait(&self, hold: HoldId) {
        self.each(hold, |range, _| each_class(&range, |class| self.cells[class].wait()));
    }

    /// Waits like [`Holds::wait`], but polls, so that no lock stays taken if the caller is killed.
    /// Ends early when `gives_up` returns true.
    pub fn wait_by_looking(&self, hold: HoldId, gives_up: impl Fn() -> bool) {
        self.each(hold, |range, _| {
            each_class(&range, |class| {
                while self.cells[class].leaving.load(SeqCst) != 0 && !gives_up() {
                    yield_now();
                }
            });
        });
    }

    /// Returns whether a hold of so many ranges finds slots without taking memory. With `grow`,
    /// takes memory for them.
    pub fn has_room(&self, near: usize, ranges: usize, grow: bool) -> bool {
        let last = self.used.load(SeqCst).max(near) + ranges / RANGES + 1;
        let places = (place_of(near).0..=place_of(last).0).map(|chunk| FIRST * ((1 << chunk) - 1));
        places.into_iter().all(|at| self.slot(at).is_some() || grow && self.grow(at))
    }

    /// Calls `each` with the ranges of a hold, in whole pages, and whether the kernel writes there.
    pub fn each(&self, hold: HoldId, mut each: impl FnMut(Range<usize>, bool)) {
        let mut at = hold.0;
        while at != LAST {
            let slot = self.known(at);
            for (start, end) in &slot.ranges[..slot.count()] {
                let (start, end) = (start.load(Relaxed), end.load(Relaxed));
                each(start & !WRITE..end, start & WRITE != 0);
            }
            at = slot.next.load(Relaxed);
        }
    }

    /// Ends a hold.
    pub fn release(&self, hold: HoldId) {
        let mut at = hold.0;
        while at != LAST {
            let slot = self.known(at);
            if slot.state.load(Relaxed) == FREE {
                // In a child of fork, the slot is that of its parent's hold, and is free already.
                return;
            }
            if slot.bytes.load(Relaxed) > 0 {
                self.bytes.fetch_sub(slot.bytes.swap(0, Relaxed), Relaxed);
            }
            at = slot.next.load(Relaxed);
            slot.state.store(FREE, SeqCst);
        }
        if self.is_ending_awaited.load(SeqCst) && self.is_ending_awaited.swap(false, SeqCst) {
            self.endings.fetch_add(1, SeqCst);
        }
    }

    /// Makes the next hold that ends raise [`Holds::endings`]. An evictor calls it after it has
    /// listed a page as held, and looks again then whether the page still is.
    pub fn await_ending(&self) {
        self.is_ending_awaited.store(true, SeqCst);
    }

    /// Returns how often a hold has ended that was awaited.
    pub fn endings(&self) -> u64 {
        self.endings.load(SeqCst)
    }

    /// Marks the pages of some ranges as leaving.
    pub fn mark_leaving(&self, ranges: impl Iterator<Item = Range<usize>>) -> LeavingPages<'_> {
        let mut leaving = LeavingPages { holds: self, cells: [0; CELLS / 64] };
        if !self.are_used() {
            return leaving;
        }
        for range in ranges {
            each_class(&range, |class| {
                let (word, bit) = (&mut leaving.cells[class / 64], 1 << (class % 64));
                if *word & bit == 0 {
                    *word |= bit;
                    self.cells[class].leaving.fetch_add(1, SeqCst);
                }
            });
        }
        leaving
    }

    /// Returns the state that a forked child inherits in the model. Locks are not part of it: the
    /// child re-initializes them.
    #[cfg(feature = "shuttle")]
    pub fn copied(&self) -> Holds {
        let copy = Holds::new(self.are_used());
        self.each_slot(|at, from| {
            copy.grow(at);
            let to = copy.known(at as u32);
            to.state.store(from.state.load(SeqCst), SeqCst);
            to.next.store(from.next.load(SeqCst), SeqCst);
            to.bytes.store(from.bytes.load(SeqCst), SeqCst);
            for (from, to) in from.ranges.iter().zip(&to.ranges) {
                to.0.store(from.0.load(SeqCst), SeqCst);
                to.1.store(from.1.load(SeqCst), SeqCst);
            }
        });
        for (from, to) in self.cells.iter().zip(&copy.cells) {
            to.leaving.store(from.leaving.load(SeqCst), SeqCst);
            to.waiting.store(from.waiting.load(SeqCst), SeqCst);
        }
        copy.used.store(self.used.load(SeqCst), SeqCst);
        copy.stops.store(self.stops.load(SeqCst), SeqCst);
        copy.is_ending_awaited.store(self.is_ending_awaited.load(SeqCst), SeqCst);
        copy.endings.store(self.endings.load(SeqCst), SeqCst);
        copy.bytes.store(self.bytes.load(SeqCst), SeqCst);
        copy
    }

    /// Forgets threads that have ended while they waited for an evictor. Their holds stay, so these
    /// pages are never evicted.
    ///
    /// # Safety
    /// - Only tasks that poll use the holds: children of vfork.
    #[cfg_attr(feature = "shuttle", allow(dead_code))]
    pub unsafe fn forget_waiters(&self) {
        for cell in &self.cells {
            cell.waiting.store(0, SeqCst);
            // SAFETY: by the caller's promise no living thread holds the lock or waits for it.
            unsafe { cell.lock.reset() };
        }
    }

    /// Ends all holds in a child of fork.
    ///
    /// # Safety
    /// - The caller's thread is the only one of the process, and it holds nothing.
    pub unsafe fn reset_in_child(&self) {
        self.each_slot(|_, slot| {
            slot.bytes.store(0, Relaxed);
            slot.state.store(FREE, SeqCst);
        });
        self.bytes.store(0, Relaxed);
        self.stops.store(0, SeqCst);
        self.endings.fetch_add(1, SeqCst);
        for cell in &self.cells {
            cell.leaving.store(0, SeqCst);
            cell.waiting.store(0, SeqCst);
            // SAFETY: by the caller's promise no thread holds the lock.
            #[cfg(not(feature = "shuttle"))]
            unsafe {
                cell.lock.reset();
            }
        }
    }
}

impl HoldSlot {
    /// Returns the number of its ranges.
    fn count(&self) -> usize {
        self.state.load(SeqCst).saturating_sub(TAKEN) as usize
    }
}

impl HoldBuilder<'_> {
    /// Adds a range of bytes, and whether the kernel writes to it. A range of the same pages as the
    /// last one is skipped. These are mostly the strings of an environment.
    pub fn push(&mut self, range: Range<usize>, write: bool) {
        let end = range.end.checked_next_multiple_of(PAGE_SIZE).unwrap_or(usize::MAX);
        let start = range.start & !(PAGE_SIZE - 1) | if write { WRITE } else { 0 };
        self.bytes += range.len();
        if let Some((_, last)) = self.ends
            && self.count > 0
        {
            let (start_before, end_before) = &self.holds.known(last).ranges[self.count - 1];
            if (start_before.load(Relaxed), end_before.load(Relaxed)) == (start, end) {
                return;
            }
        }
        let Some((last, at)) = self.place() else {
            self.lacks_room = true;
            return;
        };
        let (start_at, end_at) = &last.ranges[at];
        start_at.store(start, Relaxed);
        end_at.store(end, Relaxed);
        self.count += 1;
    }

    /// Returns the last slot, and a free place for a range there.
    fn place(&mut self) -> Option<(&HoldSlot, usize)> {
        let holds = self.holds;
        let (first, last) = match self.ends {
            Some((first, last)) if self.count < RANGES => (first, last),
            Some((first, last)) => {
                let new = holds.take(last as usize + 1)?;
                let full = holds.known(last);
                full.next.store(new, Relaxed);
                full.state.store(TAKEN + RANGES as u32, SeqCst);
                (first, new)
            }
            None => holds.take(self.near).map(|new| (new, new))?,
        };
        if self.ends != Some((first, last)) {
            self.ends = Some((first, last));
            self.count = 0;
            holds.known(last).next.store(LAST, Relaxed);
        }
        Some((holds.known(last), self.count))
    }

    /// Runs the first step: every evictor that looks from now on sees these ranges. Returns `None`
    /// if there are none.
    ///
    /// # Errors
    /// There was no memory for a slot; nothing is held.
    pub fn publish(mut self) -> Result<Option<HoldId>, NoHoldSlot> {
        if self.lacks_room {
            return Err(NoHoldSlot);
        }
        let Some((first, last)) = self.ends.take() else { return Ok(None) };
        if self.bytes >= LARGE {
            self.holds.known(first).bytes.store(self.bytes, Relaxed);
            self.holds.bytes.fetch_add(self.bytes, Relaxed);
        }
        self.holds.known(last).state.store(TAKEN + self.count as u32, SeqCst);
        Ok(Some(HoldId(first)))
    }
}

impl Drop for HoldBuilder<'_> {
    fn drop(&mut self) {
        if let Some((first, _)) = self.ends {
            self.holds.release(HoldId(first));
        }
    }
}

impl HoldCell {
    fn wait(&self) {
        if self.leaving.load(SeqCst) == 0 {
            return;
        }
        self.waiting.fetch_add(1, SeqCst);
        let mut guard = self.lock.lock();
        while self.leaving.load(SeqCst) != 0 {
            guard = self.ended.wait(guard);
        }
        drop(guard);
        self.waiting.fetch_sub(1, SeqCst);
    }

    fn end(&self) {
        // A waiter counts itself before it looks for the last time.
        if self.leaving.fetch_sub(1, SeqCst) == 1 && self.waiting.load(SeqCst) != 0 {
            let _guard = self.lock.lock();
            self.ended.notify_all();
        }
    }
}

impl LeavingPages<'_> {
    /// Returns whether any page of a marked range is held.
    pub fn is_held(&self, range: Range<usize>) -> bool {
        let mut is_held = false;
        self.each_held(range, |_| is_held = true);
        is_held
    }

    /// Returns whether a marked range may be evicted: it isn't held, and eviction isn't stopped.
    pub fn may_evict(&self, range: Range<usize>) -> bool {
        self.holds.stops.load(SeqCst) == 0 && !self.is_held(range)
    }

    /// Calls `each` with the held parts of a marked range: whole pages, some possibly more than
    /// once.
    pub fn each_held(&self, range: Range<usize>, mut each: impl FnMut(Range<usize>)) {
        let holds = self.holds;
        if range.is_empty() {
            return;
        }
        let (used, mut past) = (holds.used.load(SeqCst), 0);
        holds.each_slot(|at, slot| {
            let state = slot.state.load(SeqCst);
            if state != FREE {
                past = at + 1;
            }
            let count = state.saturating_sub(TAKEN) as usize;
            for (start, end) in &slot.ranges[..count] {
                let (start, end) = (start.load(Relaxed) & !WRITE, end.load(Relaxed));
                let part = start.max(range.start)..end.min(range.end);
                if !part.is_empty() {
                    each(part);
                }
            }
        });
        if used > FEW && past < used / 2 {
            holds.trim();
        }
    }
}

impl Drop for LeavingPages<'_> {
    fn drop(&mut self) {
        for (word, mut bits) in self.cells.into_iter().enumerate() {
            while bits != 0 {
                self.holds.cells[word * 64 + bits.trailing_zeros() as usize].end();
                bits &= bits - 1;
            }
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use alloc::vec::Vec;
    use core::iter::once;

    fn held_of(holds: &Holds, range: Range<usize>) -> Vec<(usize, usize)> {
        let mut held = Vec::new();
        holds
            .mark_leaving(once(range.clone()))
            .each_held(range, |part| held.push((part.start, part.end)));
        held
    }

    #[test]
    fn held_range_is_seen_page_by_page_until_it_is_released() {
        let holds = Holds::new(true);
        let hold = holds.hold(3, 0x5001..0x6001).unwrap();
        assert_eq!(held_of(&holds, 0..0x100000), [(0x5000, 0x7000)]);
        let leaving = holds.mark_leaving(once(0..0x100000));
        assert!(leaving.is_held(0x6000..0x7000) && !leaving.is_held(0x7000..0x8000));
        holds.release(hold);
        assert!(!leaving.is_held(0..0x100000));
    }

    #[test]
    fn any_number_of_holds_holds_exactly_its_ranges() {
        let holds = Holds::new(true);
        let at = |n: usize| (n + 1) << 20;
        // Two threads each have the same number: the second hold takes another slot.
        let all: Vec<_> = (0..5000).map(|n| holds.hold(n / 2, at(n)..at(n) + 1).unwrap()).collect();
        for n in [0, 1, 255, 256, 257, 4999] {
            assert_eq!(held_of(&holds, at(n)..at(n) + 0x2000), [(at(n), at(n) + 0x1000)]);
        }
        assert_eq!(held_of(&holds, at(5000)..1 << 40), []);
        all.into_iter().for_each(|hold| holds.release(hold));
        assert_eq!(held_of(&holds, 0..1 << 40), []);
    }

    #[test]
    fn any_number_of_ranges_is_held_exactly() {
        let holds = Holds::new(true);
        let mut holding = holds.begin(1);
        let at = |n: usize| (n + 1) << 20;
        (0..100_000).for_each(|n| holding.push(at(n)..at(n) + 1, n % 2 == 1));
        let hold = holding.publish().unwrap().unwrap();
        let (mut count, mut writes) = (0, 0);
        holds.each(hold, |range, write| {
            assert_eq!(range, at(count)..at(count) + 0x1000);
            (count, writes) = (count + 1, writes + usize::from(write));
        });
        assert_eq!((count, writes), (100_000, 50_000));
        let held = held_of(&holds, at(5000)..at(5002));
        assert_eq!(held, [(at(5000), at(5000) + 0x1000), (at(5001), at(5001) + 0x1000)]);
        holds.release(hold);
        assert_eq!(held_of(&holds, 0..1 << 40), []);
        // Evictors look at few slots again.
        assert!(holds.used.load(SeqCst) <= FEW);
    }

    #[test]
    fn unpublished_hold_holds_nothing_and_frees_its_slots() {
        let holds = Holds::new(true);
        let mut holding = holds.begin(0);
        (1..100).for_each(|n| holding.push(n << 20..(n << 20) + 1, false));
        drop(holding);
        assert_eq!(held_of(&holds, 0..1 << 40), []);
        assert_eq!(holds.hold(0, 0x1000..0x2000), Ok(HoldId(0)));
    }

    #[test]
    fn stopped_eviction_holds_nothing_and_evicts_nothing() {
        let holds = Holds::new(true);
        holds.stop_eviction();
        let leaving = holds.mark_leaving(once(0..0x100000));
        assert!(!leaving.may_evict(0x1000..0x2000) && !leaving.is_held(0x1000..0x2000));
        holds.allow_eviction();
        assert!(leaving.may_evict(0x1000..0x2000));
    }

    #[test]
    fn a_range_of_the_whole_address_space_has_every_class_once() {
        let mut classes = alloc::vec![0; CELLS];
        each_class(&(0..usize::MAX), |class| classes[class] += 1);
        assert!(classes.iter().all(|count| *count == 1));
        classes.fill(0);
        each_class(&(MAX_BYTES - 1..MAX_BYTES + 1), |class| classes[class] += 1);
        assert_eq!((classes[0], classes[1], classes.iter().sum::<i32>()), (1, 1, 2));
    }
}
