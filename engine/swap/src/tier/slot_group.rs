//! Groups of slots: which slots of the swap file are in the remote store. The table, and each
//! change of it.
//!
//! Equations:
//! - `remote_slots` = sum of the bits of `remote`.
//! - `backed` = sum of the bits of `backed`, and of the slots whose space is being given back.
//! - No slot is in both.
//! - `remote` is a part of `stored`, and `written` of `backed`.
//! - A group has an object if `remote` is not 0.
use alloc::vec::Vec;
use core::ops::Range;
use memfold_os::Errno;
use memfold_os::memory::zone::Zone;
use memfold_os::units::PAGE_SIZE;

/// Slots of a group.
pub const GROUP_SLOTS: usize = 16;
/// Objects to be deleted that are remembered, at most. The store drops others at the end of the
/// run.
const GARBAGE_MAX: usize = 1 << 20;

/// A group of slots. All zeros mean that no slot has bytes in file or store.
#[derive(Copy, Clone)]
#[repr(C)]
pub struct SlotGroup {
    /// Number of the group's object; 0 for none.
    pub number: u64,
    /// Slots whose bytes are in the object, consecutively.
    pub stored: u16,
    /// The part of `stored` whose bytes are still valid.
    pub remote: u16,
    /// Slots that take space of the file.
    pub backed: u16,
    /// The part of `backed` that has been written.
    pub written: u16,
    /// Slots that are being moved and were not claimed since.
    pub moving: u16,
    /// Whether the group was read since the hand's last pass.
    pub used: bool,
    /// Whether space of the group in the file is being given back.
    pub punching: bool,
}

/// A group that is being moved.
pub struct Demotion {
    pub group: u64,
    pub number: u64,
    /// The number of the group's present object, and the slots in it.
    pub old: (u64, u16),
    /// Slots that come from the file.
    pub local: u16,
    /// Slots that come from its present object.
    pub keep: u16,
    /// Number of copies of the process when the move began.
    copies: u64,
}

/// All groups. Callers keep them under a lock.
pub struct SlotGroups {
    table: Zone,
    /// Slots whose bytes are in the remote store.
    pub remote_slots: u64,
    /// Slots that take space of the file.
    pub backed: u64,
    /// Objects to be deleted.
    pub garbage: Vec<u64>,
    /// The number of the newest object.
    number: u64,
    /// Number of copies of the process.
    copies: u64,
}

impl SlotGroups {
    /// Makes groups for `slots` slots, all zero.
    ///
    /// # Errors
    /// No address space.
    pub fn new(slots: u64) -> Result<SlotGroups, Errno> {
        let bytes = (slots as usize / GROUP_SLOTS + 1) * size_of::<SlotGroup>();
        let table = Zone::reserve(bytes.next_multiple_of(PAGE_SIZE), PAGE_SIZE)?;
        Ok(SlotGroups {
            table,
            remote_slots: 0,
            backed: 0,
            garbage: Vec::new(),
            number: 0,
            copies: 0,
        })
    }

    /// Cancels moves in progress, because the process is about to be copied. The copy may read
    /// slots that they would remove.
    pub fn begin_copy(&mut self) {
        self.copies += 1;
    }

    /// Makes all present groups the parent's, in the copy.
    pub fn begin_in_child(&mut self) {
        (self.remote_slots, self.backed) = (0, 0);
        self.garbage.clear();
    }

    /// Returns a group.
    ///
    /// # Panics
    /// If the table has no such group.
    pub fn group(&mut self, index: u64) -> &mut SlotGroup {
        assert!((index as usize + 1) * size_of::<SlotGroup>() <= self.table.len());
        // SAFETY: the assertion keeps the group within the zone, which is mapped and aligned to a
        // page. Its bytes are zeros at first, which are a valid group. `&mut self` makes the borrow
        // unique.
        unsafe { &mut *self.table.as_ptr().cast::<SlotGroup>().add(index as usize) }
    }

    /// Drops the bytes of some slots in the remote store.
    pub fn forget(&mut self, index: u64, mask: u16) {
        let group = self.group(index);
        let slots = ones(group.remote & mask);
        group.remote &= !mask;
        let number = if group.remote == 0 { core::mem::take(&mut group.number) } else { 0 };
        self.remote_slots -= slots;
        if number != 0 {
            self.discard(&[number]);
        }
    }

    /// Queues objects for deletion that are not needed any more.
    pub fn discard(&mut self, numbers: &[u64]) {
        if self.garbage.len() < GARBAGE_MAX {
            self.garbage.extend_from_slice(numbers);
        }
    }

    /// Begins the move of a group, if it is cold and has slots that can move.
    pub fn begin_demotion(&mut self, index: u64, live: u16) -> Option<Demotion> {
        let group = self.group(index);
        let local = group.written & live & !group.remote;
        if local == 0 || group.moving != 0 || core::mem::take(&mut group.used) {
            return None;
        }
        group.moving = local;
        let (old, keep) = ((group.number, group.stored), group.remote & live);
        self.number += 1;
        let (number, copies) = (self.number, self.copies);
        Some(Demotion { group: index, number, old, local, keep, copies })
    }

    /// Cancels a failed move: all slots stay where they are.
    pub fn cancel(&mut self, batch: &[Demotion]) {
        for demotion in batch {
            self.group(demotion.group).moving = 0;
            // The failed put may have stored the object.
            self.discard(&[demotion.number]);
        }
    }

    /// Ends a move. From now on the new object has the bytes, except those of slots that were
    /// claimed meanwhile. Returns the number of slots that have moved; 0 if the process was copied.
    pub fn finish(&mut self, demotion: &Demotion, live: u16) -> u64 {
        if demotion.copies != self.copies {
            self.cancel(core::slice::from_ref(demotion));
            return 0;
        }
        let group = self.group(demotion.group);
        let slots = core::mem::take(&mut group.moving) & demotion.local & live;
        let remote = slots | group.remote & demotion.keep;
        let (before, old) = (ones(group.remote), group.number);
        (group.remote, group.stored) = (remote, demotion.local | demotion.keep);
        group.number = if remote == 0 { 0 } else { demotion.number };
        self.remote_slots = self.remote_slots + ones(remote) - before;
        let objects = [old, if remote == 0 { demotion.number } else { 0 }];
        objects.iter().filter(|n| **n != 0).for_each(|n| self.discard(&[*n]));
        ones(slots)
    }

    /// Takes slots out of the file. The caller gives their space back next. Until it has, no thread
    /// can claim them.
    pub fn begin_punch(&mut self, index: u64, mask: u16) {
        let group = self.group(index);
        debug_assert!(!group.punching, "only the demoter punches, one after the other");
        (group.backed, group.written) = (group.backed & !mask, group.written & !mask);
        group.punching = true;
    }
}

/// Returns the groups of a run of slots, each with the bits of its slots in the run.
pub fn each_group(slot: u64, count: usize) -> impl Iterator<Item = (u64, u16)> {
    let end = slot + count as u64;
    let size = GROUP_SLOTS as u64;
    (slot / size..end.div_ceil(size)).map(move |group| {
        let first = slot.saturating_sub(group * size).min(size);
        let last = (end - group * size).min(size);
        (group, (((1u32 << last) - 1) & !((1u32 << first) - 1)) as u16)
    })
}

/// Returns the runs of set bits.
pub fn runs(mask: u16) -> impl Iterator<Item = Range<usize>> {
    let mut at = 0;
    core::iter::from_fn(move || {
        let rest = (mask as u32) >> at;
        if rest == 0 {
            return None;
        }
        let start = at + rest.trailing_zeros();
        at = start + (mask as u32 >> start).trailing_ones();
        Some(start as usize..at as usize)
    })
}

pub fn ones(mask: u16) -> u64 {
    mask.count_ones() as u64
}

/// Returns the number of set bits below `at`.
pub fn rank(mask: u16, at: u64) -> usize {
    (mask as u32 & ((1 << at) - 1)).count_ones() as usize
}
