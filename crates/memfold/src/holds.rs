//! Holds: memory that a system call of the program names stays in the page table until the call is
//! over, though no lock is held meanwhile.
//!
//! In inline delivery the kernel serves itself nothing: a system call that meets a page which isn't
//! there fails. So whoever makes a call holds what it names:
//!
//! | the holder | the evictor |
//! |---|---|
//! | writes its ranges into a slot ([`Holds::publish`]) | marks the pages as leaving ([`Holds::leave`]) |
//! | looks whether any of them is leaving, and waits for that to end ([`Holds::wait`]) | looks at all slots ([`Leaving::is_held`]), and passes over what is held |
//! | touches every page, and makes the call | takes the rest out of the page table, and ends the mark |
//!
//! Writes before looks on both sides, all sequentially consistent: one of the two sees the other. If
//! it is the evictor, the page stays. If it is the holder, the page is gone by the time of the
//! touch, which brings it back, and no later evictor takes it. `tests/holds.rs` explores it, also
//! with a step left out.
//!
//! "Leaving" is not only eviction: also write-protecting a page, as a write of the kernel to such a
//! page fails too; a discard by the program; and adoption, at which missing pages begin to need
//! somebody who serves them.
//!
//! Marks are counters, one for each of 256 classes of 2 MiB chunks, so a holder may wait for
//! somebody else's chunk; that is short. Slots are few, and dense, so that evictors have few to look
//! at. Who finds none holds everything.
use alloc::boxed::Box;
use core::ops::Range;
use memfold_sys::sync::atomic::{
    AtomicPtr, AtomicU32, AtomicUsize,
    Ordering::{Relaxed, SeqCst},
};
use memfold_sys::sync::{Condvar, Mutex};
use memfold_sys::units::{MAX_BYTES, PAGE_SIZE};

/// Ranges of one call.
pub const RANGES_MAX: usize = 32;
/// Calls at the same time that hold what they name, and not everything; classes of chunks; and
/// slots that a thread looks at first. A model has few, as each is made anew for each run.
#[cfg(not(shuttle))]
const SIZES: [usize; 3] = [256, 256, 16];
#[cfg(shuttle)]
const SIZES: [usize; 3] = [4, 64, 2];
const SLOTS: usize = SIZES[0];
const CELLS: usize = SIZES[1];
const NEAR: usize = SIZES[2];

/// From here on a hold counts.
const LARGE: usize = 64 << 10;

const FREE: u32 = 0;
/// The slot is somebody's, and has this less many ranges.
const TAKEN: u32 = 1;

/// Ranges held by one call.
struct Slot {
    /// [`FREE`], or [`TAKEN`] and the number of ranges that count.
    state: AtomicU32,
    ranges: [(AtomicUsize, AtomicUsize); RANGES_MAX],
    /// What it adds to `Holds::bytes`.
    bytes: AtomicUsize,
}

#[derive(Default)]
struct Cell {
    /// Evictors at work on chunks of this class.
    leaving: AtomicU32,
    /// Holders that wait for the end of that.
    waiting: AtomicU32,
    lock: Mutex<()>,
    ended: Condvar,
}

/// All holds of a process.
pub struct Holds {
    /// Empty where nobody ever holds.
    slots: Box<[Slot]>,
    cells: Box<[Cell]>,
    /// Slots from here on were never used.
    used: AtomicUsize,
    /// Holds of everything.
    everything: AtomicU32,
    /// Of holds of [`LARGE`] and more: of smaller ones all threads would have to tell.
    bytes: AtomicUsize,
}

/// Those of the process, once there are any, and none.
static USED: AtomicPtr<Holds> = AtomicPtr::new(core::ptr::null_mut());
static UNUSED: AtomicPtr<Holds> = AtomicPtr::new(core::ptr::null_mut());

/// A hold, until [`Holds::release`].
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Hold(pub u32);

impl Hold {
    const EVERYTHING: Hold = Hold(u32::MAX);
}

/// Slots that nobody has.
#[cfg(not(shuttle))]
fn free_slots(count: usize) -> Box<[Slot]> {
    const { assert!(FREE == 0) };
    // SAFETY: zeros are a free slot. They come as zeros, so what is never used has no page.
    unsafe { Box::new_zeroed_slice(count).assume_init() }
}

/// Likewise; a model's atomics are no plain numbers.
#[cfg(shuttle)]
fn free_slots(count: usize) -> Box<[Slot]> {
    let slot = |_| Slot {
        state: AtomicU32::new(FREE),
        ranges: core::array::from_fn(|_| (AtomicUsize::new(0), AtomicUsize::new(0))),
        bytes: AtomicUsize::new(0),
    };
    (0..count).map(slot).collect()
}

/// Pages that are marked as leaving, until it is dropped.
pub struct Leaving<'a> {
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

impl Holds {
    /// None. With `used`, there will be some.
    pub fn new(used: bool) -> Holds {
        let count = |n: usize| if used { n } else { 0 };
        Holds {
            slots: free_slots(count(SLOTS)),
            cells: (0..count(CELLS)).map(|_| Cell::default()).collect(),
            used: AtomicUsize::new(0),
            everything: AtomicU32::new(0),
            bytes: AtomicUsize::new(0),
        }
    }

    /// Those of all engines of the process, as a call may name memory of several; or, without `used`,
    /// none.
    #[cfg(not(shuttle))]
    pub fn of_process(used: bool) -> &'static Holds {
        let place = if used { &USED } else { &UNUSED };
        if place.load(SeqCst).is_null() {
            let new = Box::into_raw(Box::new(Holds::new(used)));
            if place.compare_exchange(core::ptr::null_mut(), new, SeqCst, SeqCst).is_err() {
                // SAFETY: made above, and nobody else has it.
                drop(unsafe { Box::from_raw(new) });
            }
        }
        // SAFETY: a leaked box.
        unsafe { &*place.load(SeqCst) }
    }

    /// Of a model each run has its own.
    #[cfg(shuttle)]
    pub fn of_process(used: bool) -> &'static Holds {
        Box::leak(Box::new(Holds::new(used)))
    }

    /// Bytes that are held by holds of 64 KiB and more.
    pub fn held_bytes(&self) -> u64 {
        self.bytes.load(Relaxed) as u64
    }

    /// Whether anybody ever holds.
    pub fn are_used(&self) -> bool {
        !self.slots.is_empty()
    }

    /// Holds and waits: [`Holds::publish`], [`Holds::wait`]. The caller then touches every page.
    pub fn hold(&self, near: usize, ranges: impl Iterator<Item = Range<usize>> + Clone) -> Hold {
        let hold = self.publish(near, ranges.clone());
        self.wait(ranges);
        hold
    }

    /// The first step: whoever looks from now on sees these ranges (of bytes; at most
    /// [`RANGES_MAX`], or everything is held). `near` should differ between threads.
    pub fn publish(&self, near: usize, ranges: impl Iterator<Item = Range<usize>>) -> Hold {
        let Some(at) = self.take(near) else { return self.hold_everything() };
        let slot = &self.slots[at];
        let (mut count, mut bytes) = (0, 0);
        for range in ranges {
            if count == RANGES_MAX {
                slot.state.store(FREE, SeqCst);
                return self.hold_everything();
            }
            let end = range.end.checked_next_multiple_of(PAGE_SIZE).unwrap_or(usize::MAX);
            slot.ranges[count].0.store(range.start & !(PAGE_SIZE - 1), Relaxed);
            slot.ranges[count].1.store(end, Relaxed);
            bytes += range.len();
            count += 1;
        }
        if bytes >= LARGE {
            slot.bytes.store(bytes, Relaxed);
            self.bytes.fetch_add(bytes, Relaxed);
        }
        slot.state.store(TAKEN + count as u32, SeqCst);
        Hold(at as u32)
    }

    /// Holds everything, until [`Holds::release_all`]. What was leaving has left by then.
    pub fn hold_all(&self) {
        self.hold_everything();
        self.wait(core::iter::once(0..usize::MAX));
    }

    /// Ends a hold of everything.
    pub fn release_all(&self) {
        self.release(Hold::EVERYTHING);
    }

    fn hold_everything(&self) -> Hold {
        self.everything.fetch_add(1, SeqCst);
        Hold::EVERYTHING
    }

    fn take(&self, near: usize) -> Option<usize> {
        let order = (0..NEAR).map(|n| (near + n) % NEAR).chain(NEAR..SLOTS);
        for at in order {
            let state = &self.slots[at].state;
            if state.load(Relaxed) == FREE
                && state.compare_exchange(FREE, TAKEN, SeqCst, Relaxed).is_ok()
            {
                // Before the ranges count.
                self.used.fetch_max(at + 1, SeqCst);
                return Some(at);
            }
        }
        None
    }

    /// The second step, after [`Holds::publish`] of the same ranges: waits until no page of them is
    /// leaving that an evictor has found free.
    pub fn wait(&self, ranges: impl Iterator<Item = Range<usize>>) {
        for range in ranges {
            each_class(&range, |class| self.cells[class].wait());
        }
    }

    /// Ends a hold.
    pub fn release(&self, hold: Hold) {
        if hold == Hold::EVERYTHING {
            // In a child of fork, a hold of its parent's is ended that isn't there.
            let less = |count: u32| count.checked_sub(1);
            let _ = self.everything.fetch_update(SeqCst, SeqCst, less);
        } else {
            let slot = &self.slots[hold.0 as usize];
            if slot.bytes.load(Relaxed) > 0 {
                self.bytes.fetch_sub(slot.bytes.swap(0, Relaxed), Relaxed);
            }
            slot.state.store(FREE, SeqCst);
        }
    }

    /// Marks the pages of some ranges as leaving.
    pub fn leave(&self, ranges: impl Iterator<Item = Range<usize>>) -> Leaving<'_> {
        let mut leaving = Leaving { holds: self, cells: [0; CELLS / 64] };
        if self.slots.is_empty() {
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

    /// What a copy of the process has in a model; locks apart, which the child makes free.
    #[cfg(shuttle)]
    pub fn copied(&self) -> Holds {
        let copy = Holds::new(self.are_used());
        for (from, to) in self.slots.iter().zip(&copy.slots) {
            to.state.store(from.state.load(SeqCst), SeqCst);
            to.bytes.store(from.bytes.load(SeqCst), SeqCst);
            for (from, to) in from.ranges.iter().zip(&to.ranges) {
                to.0.store(from.0.load(SeqCst), SeqCst);
                to.1.store(from.1.load(SeqCst), SeqCst);
            }
        }
        for (from, to) in self.cells.iter().zip(&copy.cells) {
            to.leaving.store(from.leaving.load(SeqCst), SeqCst);
            to.waiting.store(from.waiting.load(SeqCst), SeqCst);
        }
        copy.used.store(self.used.load(SeqCst), SeqCst);
        copy.everything.store(self.everything.load(SeqCst), SeqCst);
        copy.bytes.store(self.bytes.load(SeqCst), SeqCst);
        copy
    }

    /// In a child of fork: the caller's thread is the only one, and it holds nothing.
    ///
    /// # Safety
    /// - That is so.
    pub unsafe fn reset_in_child(&self) {
        for slot in &self.slots[..self.used.load(SeqCst).min(self.slots.len())] {
            slot.bytes.store(0, Relaxed);
            slot.state.store(FREE, SeqCst);
        }
        self.bytes.store(0, Relaxed);
        self.everything.store(0, SeqCst);
        for cell in &self.cells {
            cell.leaving.store(0, SeqCst);
            cell.waiting.store(0, SeqCst);
            // SAFETY: by the caller's promise nobody holds it.
            #[cfg(not(shuttle))]
            unsafe {
                cell.lock.reset();
            }
        }
    }
}

impl Cell {
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
        // Who waits has said so before it looked for the last time.
        if self.leaving.fetch_sub(1, SeqCst) == 1 && self.waiting.load(SeqCst) != 0 {
            let _guard = self.lock.lock();
            self.ended.notify_all();
        }
    }
}

impl Leaving<'_> {
    /// Whether any page of a range, which was marked, is held.
    pub fn is_held(&self, range: Range<usize>) -> bool {
        let mut held = false;
        self.each_held(range, |_| held = true);
        held
    }

    /// Calls `each` with the parts of a range, which was marked, that are held: whole pages, maybe
    /// some more than once.
    pub fn each_held(&self, range: Range<usize>, mut each: impl FnMut(Range<usize>)) {
        let holds = self.holds;
        if holds.slots.is_empty() || range.is_empty() {
            return;
        }
        if holds.everything.load(SeqCst) != 0 {
            return each(range);
        }
        for slot in &holds.slots[..holds.used.load(SeqCst)] {
            let count = slot.state.load(SeqCst).saturating_sub(TAKEN) as usize;
            for (start, end) in &slot.ranges[..count] {
                let (start, end) = (start.load(Relaxed), end.load(Relaxed));
                let part = start.max(range.start)..end.min(range.end);
                if !part.is_empty() {
                    each(part);
                }
            }
        }
    }
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        for class in (0..CELLS).filter(|class| self.cells[class / 64] >> (class % 64) & 1 != 0) {
            self.holds.cells[class].end();
        }
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;
    use core::iter::once;

    #[test]
    fn what_is_held_is_seen_page_by_page_and_no_longer_than_that() {
        let holds = Holds::new(true);
        let hold = holds.hold(3, once(0x5001..0x6001));
        let leaving = holds.leave(once(0..0x100000));
        let mut held = alloc::vec::Vec::new();
        leaving.each_held(0..0x100000, |part| held.push(part));
        let held: alloc::vec::Vec<_> = held.iter().map(|part| (part.start, part.end)).collect();
        assert_eq!(held, [(0x5000, 0x7000)]);
        assert!(leaving.is_held(0x6000..0x7000) && !leaving.is_held(0x7000..0x8000));
        holds.release(hold);
        assert!(!leaving.is_held(0..0x100000));
    }

    #[test]
    fn without_a_slot_or_with_too_many_ranges_everything_is_held() {
        let holds = Holds::new(true);
        let all: alloc::vec::Vec<_> = (0..SLOTS).map(|_| holds.hold(0, once(0..1))).collect();
        let leaving = holds.leave(once(1 << 30..2 << 30));
        assert!(!leaving.is_held(1 << 30..2 << 30));
        drop(leaving);
        let more = holds.hold(7, once(0..1));
        let leaving = holds.leave(once(1 << 30..2 << 30));
        assert!(leaving.is_held(1 << 30..2 << 30));
        holds.release(more);
        all.into_iter().for_each(|hold| holds.release(hold));
        assert!(!leaving.is_held(0..2 << 30));
        drop(leaving);
        let many = holds.hold(1, (0..=RANGES_MAX).map(|n| n << 20..(n << 20) + 1));
        assert!(holds.leave(once(7 << 40..(7 << 40) + 1)).is_held(7 << 40..(7 << 40) + 1));
        holds.release(many);
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
