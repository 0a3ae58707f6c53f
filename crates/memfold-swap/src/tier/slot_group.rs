//! Groups of slots: what of the swap file lies in the remote store. The table, and each change of
//! it.
//!
//! Equations: `remote_slots` = sum of the bits of `remote`; `backed` = sum of those of `backed`, and of what
//! is being given back; no slot is in both; `remote` is a part of `stored`, and `written` of
//! `backed`; a group has an object if `remote` is not 0.
use alloc::vec::Vec;
use core::ops::Range;
use memfold_sys::Errno;
use memfold_sys::memory::zone::Zone;
use memfold_sys::units::PAGE_SIZE;

/// Slots of a group.
pub const GROUP_SLOTS: usize = 16;
/// Objects to be deleted that are remembered; of others the store is rid at the end of the run.
const GARBAGE_MAX: usize = 1 << 20;

/// All zero: no slot has bytes anywhere.
#[derive(Copy, Clone)]
#[repr(C)]
pub struct SlotGroup {
    /// Its object; 0 for none.
    pub number: u64,
    /// Slots whose bytes the object has, one behind the other.
    pub stored: u16,
    /// Those of them that count.
    pub remote: u16,
    /// Slots that take space of the file.
    pub backed: u16,
    /// Those of them whose bytes have been written.
    pub written: u16,
    /// Slots that are being moved and were not taken for other data since.
    pub moving: u16,
    /// Read since the hand's last pass.
    pub used: bool,
    /// Space of the file is being given back.
    pub punching: bool,
}

/// A group that is being moved.
pub struct Demotion {
    pub group: u64,
    pub number: u64,
    /// Its present object, and which slots that has.
    pub old: (u64, u16),
    /// Slots that come from the file.
    pub local: u16,
    /// Slots that come from its present object.
    pub keep: u16,
    /// Copies of the process that were made before.
    copies: u64,
}

/// All groups. Whoever has it may change it: callers keep it under a lock.
pub struct SlotGroups {
    table: Zone,
    /// Slots whose bytes lie in the remote store.
    pub remote_slots: u64,
    /// Slots that take space of the file.
    pub backed: u64,
    /// Objects to be deleted.
    pub garbage: Vec<u64>,
    /// The last number that was given to an object.
    number: u64,
    /// Copies of the process that were made.
    copies: u64,
}

impl SlotGroups {
    /// SlotGroups for `slots` slots, all zero.
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

    /// The process is about to be copied: moves that have begun come to nothing, as the copy may
    /// read what they would take away.
    pub fn begin_copy(&mut self) {
        self.copies += 1;
    }

    /// In the copy: all groups there are, are the parent's.
    pub fn begin_in_child(&mut self) {
        (self.remote_slots, self.backed) = (0, 0);
        self.garbage.clear();
    }

    /// A group.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn group(&mut self, index: u64) -> &mut SlotGroup {
        assert!((index as usize + 1) * size_of::<SlotGroup>() <= self.table.len());
        // SAFETY: the group lies in the zone, all zero at first, which is a valid group; `&mut
        // self` makes the borrow unique.
        unsafe { &mut *self.table.as_ptr().cast::<SlotGroup>().add(index as usize) }
    }

    /// The bytes of some slots in the remote store count no more.
    pub fn forget(&mut self, index: u64, mask: u16) {
        let group = self.group(index);
        let gone = ones(group.remote & mask);
        group.remote &= !mask;
        let number = if group.remote == 0 { core::mem::take(&mut group.number) } else { 0 };
        self.remote_slots -= gone;
        if number != 0 {
            self.discard(&[number]);
        }
    }

    /// Objects that nobody needs any more.
    pub fn discard(&mut self, numbers: &[u64]) {
        if self.garbage.len() < GARBAGE_MAX {
            self.garbage.extend_from_slice(numbers);
        }
    }

    /// Begins the move of a group, if it is cold and something of it can move.
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

    /// Ends a move that has failed: everything stays where it is.
    pub fn cancel(&mut self, batch: &[Demotion]) {
        for demotion in batch {
            self.group(demotion.group).moving = 0;
            // It may have arrived all the same.
            self.discard(&[demotion.number]);
        }
    }

    /// Ends a move: from now on the new object counts, as far as slots were not taken for other
    /// data meanwhile. Returns the slots that have moved; none, if the process was copied.
    pub fn finish(&mut self, demotion: &Demotion, live: u16) -> u64 {
        if demotion.copies != self.copies {
            self.cancel(core::slice::from_ref(demotion));
            return 0;
        }
        let group = self.group(demotion.group);
        let moved = core::mem::take(&mut group.moving) & demotion.local & live;
        let remote = moved | group.remote & demotion.keep;
        let (before, old) = (ones(group.remote), group.number);
        (group.remote, group.stored) = (remote, demotion.local | demotion.keep);
        group.number = if remote == 0 { 0 } else { demotion.number };
        self.remote_slots = self.remote_slots + ones(remote) - before;
        let gone = [old, if remote == 0 { demotion.number } else { 0 }];
        gone.iter().filter(|n| **n != 0).for_each(|n| self.discard(&[*n]));
        ones(moved)
    }

    /// Takes slots out of the file, whose space the caller then gives back. Until it has, nobody
    /// can claim them.
    pub fn begin_punch(&mut self, index: u64, mask: u16) {
        let group = self.group(index);
        debug_assert!(!group.punching, "only the demoter punches, one after the other");
        (group.backed, group.written) = (group.backed & !mask, group.written & !mask);
        group.punching = true;
    }
}

/// The groups of a run of slots, each with the bits of those that belong to the run.
pub fn each_group(slot: u64, count: usize) -> impl Iterator<Item = (u64, u16)> {
    let end = slot + count as u64;
    let size = GROUP_SLOTS as u64;
    (slot / size..end.div_ceil(size)).map(move |group| {
        let first = slot.saturating_sub(group * size).min(size);
        let last = (end - group * size).min(size);
        (group, (((1u32 << last) - 1) & !((1u32 << first) - 1)) as u16)
    })
}

/// The runs of set bits.
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

/// How many of the bits below `at` are set.
pub fn rank(mask: u16, at: u64) -> usize {
    (mask as u32 & ((1 << at) - 1)).count_ones() as usize
}
