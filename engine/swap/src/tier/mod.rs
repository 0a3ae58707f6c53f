//! The remote tier: the cold end of the swap file is in a remote store.
//!
//! It works below objects, on slots. A slot number names the same data in either place, so handles
//! and seals stay as they are when data moves. Slots move in aligned **groups** of 16. A group has
//! at most one object in the remote store, which holds its slots consecutively, with the bytes of
//! the file. They are sealed, so the servers learn nothing, and a change is detected. The number of
//! an object is never used twice, so a command that arrives late harms no later object.
//!
//! - **Slots**: there are more than the file may hold (`--swap-size` + `--remote-size`). The file
//!   is sparse, and its space is counted by slot (`backed`). A write always goes to the file. So a
//!   thread that allocates slots claims them for the file first ([`Tier::claim`]). At the bound the
//!   claim fails, and is tried again later.
//! - **One place**: for each slot in use exactly one of `backed` and `remote` is set (`locate`
//!   asserts it, `check` verifies it). The demoter reads written slots from the file and puts them
//!   as a new object. When the store has acknowledged it, the bits change under the lock, except
//!   for slots that were claimed meanwhile (`moving`). Then the demoter punches the file. Until
//!   that is done, no thread can claim these slots. Slots of the group in an older object are
//!   fetched and put again with them.
//! - **Readers** take no lock across a read. They look up the slots, read, and look them up again.
//!   If the slots have moved, they start over. So bytes that were punched or deleted meanwhile are
//!   never used.
//! - **Cold** groups are found by a clock with a second chance: they were not read since the hand's
//!   last pass. The demoter's walk over the groups also finds slots that became free. It deletes
//!   objects of which no slot counts any more.
//! - **A fork**: a group doesn't move if a child may read one of its slots. A move in progress when
//!   the process forks is cancelled. The child names an ancestor's object by the number of forks
//!   since it was stored.
//! - **Failures** of a put or delete change nothing; the demoter pauses, 100 ms to 5 s. The service
//!   tries reads again for `--remote-timeout`. After that a failed read is like one of the file.
//! - **The service** (`memfold-remote`) is a process of `memfold run`, because a client of such
//!   servers needs `std`. An engine reaches it by a Unix socket, with one connection for all its
//!   threads (`remote/socket.rs`). The service refreshes the expiry of the objects, and warns if it
//!   can't. If the service is silent, the demoter warns (`expiry.rs`).
pub(crate) mod slot_group;
pub(crate) mod expiry;
mod demote;

use crate::cluster::Clusters;
use crate::disk::Disk;
use crate::lent::ANCESTORS_MAX;
use crate::remote::{ENTRIES_MAX, ObjectFetch, Remote, RemoteError};
use crate::tier::expiry::ExpiryWatch;
use crate::tier::slot_group::{GROUP_SLOTS, SlotGroup, SlotGroups, each_group, ones, rank};
use alloc::string::String;
use alloc::vec::Vec;
use core::ops::Range;
use core::time::Duration;
use memfold_os::Errno;
use memfold_os::memory::descendant_watch::DescendantWatch;
use memfold_os::memory::zone::Zone;
use memfold_os::page::Page;
use memfold_os::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use memfold_os::sync::{Condvar, Mutex, MutexGuard};
use memfold_os::transfer::{Direction, Transfer};
use memfold_os::units::PAGE_SIZE;

/// Bytes of a group.
pub(crate) const GROUP_BYTES: usize = GROUP_SLOTS * PAGE_SIZE;
/// Groups that move at once, at most. The buffer may hold fewer.
const BATCH_GROUPS: usize = 16;
/// The buffer takes at most one part in this many of the limit.
const BUFFER_SHARE: u64 = 64;
/// Generations whose slots are read: a child's own, and its ancestors'.
const GENERATIONS: u64 = ANCESTORS_MAX + 1;
/// Rounds of the demoter that a claim waits for, at most.
const CLAIM_TURNS: u32 = 16;

/// Bounds of the tier.
#[derive(Copy, Clone, Debug)]
pub struct TierBounds {
    /// Maximum size of the file, bytes.
    pub file_bytes: u64,
    /// Bytes in the remote store, at most.
    pub remote_bytes: u64,
    /// Percent of the file in use above which its cold end moves.
    pub mark_percent: u64,
    /// Data in the remote store is lost when it is not refreshed for this long.
    pub expiry: Duration,
    /// The engine's limit, bytes. The buffer takes a small part of it.
    pub limit_bytes: u64,
}

/// The state under the tier's lock.
struct TierState {
    pub groups: SlotGroups,
    pub hand: u64,
    /// There may be work.
    pub woken: bool,
    /// The file is at its bound, so the space of its free slots is to be given back.
    pub trim: bool,
    pub stop: bool,
    /// Whether a thread runs the demoter.
    has_demoter: bool,
    /// Whether the demoter's last round moved nothing.
    pub stalled: bool,
    /// Number of rounds that the demoter has ended.
    pub rounds: u64,
    /// In a child of fork: the ends of the slots of each generation that is read here, oldest
    /// first. These slots are read and released, and their groups don't move.
    inherited: Vec<u64>,
}

impl TierState {
    /// Makes a state without data. It has room for `slots` slots of each generation that may be
    /// read.
    fn new(slots: u64) -> Result<TierState, Errno> {
        Ok(TierState {
            groups: SlotGroups::new(GENERATIONS * slots)?,
            hand: 0,
            woken: false,
            trim: false,
            stop: false,
            has_demoter: false,
            stalled: false,
            rounds: 0,
            inherited: Vec::new(),
        })
    }

    /// Returns whether this process reads any object in the store.
    fn is_used(&self) -> bool {
        self.groups.remote_slots > 0 || !self.inherited.is_empty()
    }

    /// Returns the number of forks since a slot's generation; 0 for this process's own slots.
    fn forks(&self, slot: u64) -> usize {
        self.inherited.iter().filter(|end| slot < **end).count()
    }
}

/// Returns the first group that isn't inherited.
pub(crate) fn first_own(clusters: &Clusters) -> u64 {
    clusters.inherited() / GROUP_SLOTS as u64
}

/// Pages moved to and read from the remote store, since the last call.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct RemoteCounts {
    /// Pages that moved to the remote store.
    pub pages_out: u64,
    /// Pages that were read from it.
    pub pages_in: u64,
    /// Requests that failed.
    pub failed: u64,
}

/// Counts since the last call.
#[derive(Default)]
struct TierCounts {
    out: AtomicU64,
    back: AtomicU64,
    failed: AtomicU64,
}

/// The remote tier of a swap file.
pub struct Tier {
    remote: alloc::boxed::Box<dyn Remote>,
    bounds: TierBounds,
    state: Mutex<TierState>,
    changed: Condvar,
    buffer: Zone,
    pause_ns: AtomicU64,
    /// Whether the last request of the demoter has failed, and was reported.
    has_failed: AtomicBool,
    watched: ExpiryWatch,
    counts: TierCounts,
}

/// A part of a run of slots in one place: in the file, or in an object.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
struct SlotRun {
    slot: u64,
    count: usize,
    object: Option<ObjectPart>,
}

/// A part of an object, from an offset on.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
struct ObjectPart {
    forks: usize,
    number: u64,
    offset: usize,
}

/// The error of slots that could not be read.
pub enum SlotReadError {
    /// The file can't be read.
    File(Errno),
    /// The object's number, and the error of the remote store.
    Remote(u64, RemoteError),
}

impl Tier {
    /// Makes an empty tier.
    ///
    /// # Errors
    /// No address space.
    pub fn new(remote: alloc::boxed::Box<dyn Remote>, bounds: TierBounds) -> Result<Tier, Errno> {
        let slots = (bounds.file_bytes + bounds.remote_bytes) / PAGE_SIZE as u64;
        let batch = (bounds.limit_bytes / BUFFER_SHARE / GROUP_BYTES as u64)
            .clamp(1, BATCH_GROUPS as u64) as usize;
        Ok(Tier {
            remote,
            bounds,
            state: Mutex::new(TierState::new(slots)?),
            changed: Condvar::default(),
            buffer: Zone::reserve(batch * GROUP_BYTES, PAGE_SIZE)?,
            pause_ns: AtomicU64::new(0),
            has_failed: AtomicBool::new(false),
            watched: ExpiryWatch::new(bounds.expiry),
            counts: TierCounts::default(),
        })
    }

    /// Blocks changes of the state under the lock until [`Tier::unfreeze`], for a fork. Moves in
    /// progress have no effect.
    pub fn freeze(&self) {
        let mut state = self.state.lock();
        state.groups.begin_copy();
        core::mem::forget(state);
    }

    /// Returns whether a thread uses the tier at this moment, or has ended while it did.
    pub fn is_held(&self) -> bool {
        self.state.is_held()
    }

    /// Ends [`Tier::freeze`].
    ///
    /// # Safety
    /// - `freeze` has returned, in this process or in the parent that it is a copy of, and this is
    ///   called once for it.
    pub unsafe fn unfreeze(&self) {
        // SAFETY: the caller promises that `freeze` has returned and that this is the one call for
        // it. `freeze` has forgotten the guard, so the lock is held.
        unsafe { self.state.unlock() };
    }

    /// Blocks changes again after [`Tier::unfreeze`], for the rest of a fork.
    pub fn freeze_again(&self) {
        core::mem::forget(self.state.lock());
    }

    /// Begins in a child of fork, with the tier still frozen. Moves and deletes in progress belong
    /// to the parent. The slots before `inherited` are the ancestors'; 0 means that none of them is
    /// read.
    ///
    /// # Errors
    /// ENOMEM: no address space.
    ///
    /// # Safety
    /// - The caller is the only thread of the process.
    pub unsafe fn begin_in_child(&self, inherited: u64) -> Result<(), Errno> {
        // SAFETY: the caller promises that it is the only thread, so no other thread uses the
        // state.
        let state = unsafe { self.state.peek_mut() };
        if inherited == 0 {
            state.groups = SlotGroups::new(GENERATIONS * self.slots_max())?;
            state.inherited.clear();
        } else {
            state.groups.begin_in_child();
            state.inherited.push(inherited);
        }
        (state.hand, state.trim, state.stalled) = (0, false, false);
        self.pause_ns.store(0, Relaxed);
        self.has_failed.store(false, Relaxed);
        Ok(())
    }

    /// Returns whether a child would read an object in the store.
    ///
    /// # Safety
    /// - [`Tier::freeze`] has returned, and [`Tier::unfreeze`] is not called meanwhile.
    pub unsafe fn is_used_at_rest(&self) -> bool {
        // SAFETY: the caller promises that the tier is frozen, so no thread changes the state.
        unsafe { self.state.peek() }.is_used()
    }

    /// Connects to the store's service in a child of fork, if the child needs it. A child that
    /// can't connect later keeps this connection.
    ///
    /// # Safety
    /// - [`Tier::freeze`] has returned, and [`Tier::unfreeze`] is not called meanwhile.
    pub unsafe fn connect(&self) {
        // SAFETY: the caller promises that the tier is frozen until this has returned.
        if unsafe { self.is_used_at_rest() } {
            let _ = self.remote.get(&mut []);
        }
    }

    /// Keeps the objects for copies of the process, with [`Remote::lend`].
    ///
    /// # Errors
    /// The errors of [`Remote::lend`]. The objects may be gone once this process has ended.
    pub fn lend(&self, copies: &DescendantWatch) -> Result<(), RemoteError> {
        self.remote.lend(copies)
    }

    /// Returns the counts, and resets them.
    pub fn take_counts(&self) -> RemoteCounts {
        let take = |count: &AtomicU64| match count.load(Relaxed) {
            0 => 0,
            _ => count.swap(0, Relaxed),
        };
        RemoteCounts {
            pages_out: take(&self.counts.out),
            pages_in: take(&self.counts.back),
            failed: take(&self.counts.failed),
        }
    }

    /// Returns the name of the store for messages.
    pub fn name(&self) -> &str {
        self.remote.name()
    }

    /// Returns the number of slots in file and store, at most.
    pub fn slots_max(&self) -> u64 {
        (self.bounds.file_bytes + self.bounds.remote_bytes) / PAGE_SIZE as u64
    }

    /// Returns whether this process reads any object in the remote store.
    fn is_used(&self) -> bool {
        self.state.lock().is_used()
    }

    /// Returns the number of own slots whose bytes are in the remote store.
    pub fn remote_slots(&self) -> u64 {
        self.state.lock().groups.remote_slots
    }

    /// Returns the bytes of memory that the table of groups and the buffer take for `slots` slots,
    /// at most.
    pub fn memory_bytes(&self, slots: u64) -> u64 {
        slots / GROUP_SLOTS as u64 * size_of::<SlotGroup>() as u64 + self.buffer.len() as u64
    }

    /// Returns the number of the object that has the bytes of a slot, or `None` if the file has
    /// them.
    pub fn object_of(&self, slot: u64) -> Option<u64> {
        let mut state = self.state.lock();
        let group = state.groups.group(slot / GROUP_SLOTS as u64);
        (group.remote >> (slot % GROUP_SLOTS as u64) & 1 != 0).then_some(group.number)
    }

    // Slots.

    /// Notes that a thread moves groups.
    pub fn set_demoter(&self) {
        self.state.lock().has_demoter = true;
    }

    /// Claims allocated slots for the file, to be written. `free_bytes` are free on the file
    /// system. If the file is at its bound, waits for the demoter to make room. Returns `false` if
    /// it made none.
    pub fn claim(&self, clusters: &Clusters, slot: u64, count: usize, free_bytes: u64) -> bool {
        let mut state = self.state.lock();
        let mut more = 0;
        for turn in 0.. {
            while each_group(slot, count).any(|(group, _)| state.groups.group(group).punching) {
                state = self.changed.wait(state);
            }
            let lacks = |(group, mask): (u64, u16), state: &mut TierState| {
                ones(mask & !state.groups.group(group).backed)
            };
            more = each_group(slot, count).map(|part| lacks(part, &mut state)).sum();
            let bytes = (state.groups.backed + more) * PAGE_SIZE as u64;
            if bytes <= self.bounds.file_bytes && more * PAGE_SIZE as u64 <= free_bytes {
                break;
            }
            state.trim = true;
            self.wake(&mut state);
            if turn == CLAIM_TURNS || !state.has_demoter || state.stalled || state.stop {
                return false;
            }
            let round = state.rounds;
            while state.rounds == round && !state.stop {
                state = self.changed.wait(state);
            }
        }
        state.groups.backed += more;
        for (group, mask) in each_group(slot, count) {
            state.groups.forget(group, mask);
            let group = state.groups.group(group);
            group.backed |= mask;
            group.written &= !mask;
            group.moving &= !mask;
        }
        if self.is_above_mark(&state, clusters) {
            self.wake(&mut state);
        }
        true
    }

    /// Records that claimed slots have been written.
    pub fn written(&self, slot: u64, count: usize) {
        let mut state = self.state.lock();
        for (group, mask) in each_group(slot, count) {
            let group = state.groups.group(group);
            assert!(group.backed & mask == mask, "slots that no thread has claimed were written");
            group.written |= mask;
        }
    }

    /// Records that the file's space of free slots was given back. No thread may allocate them
    /// meanwhile.
    pub fn discarded(&self, range: &Range<u64>) {
        let mut state = self.state.lock();
        for (group, mask) in each_group(range.start, (range.end - range.start) as usize) {
            state.groups.forget(group, mask);
            let slots = ones(state.groups.group(group).backed & mask);
            state.groups.backed -= slots;
            let group = state.groups.group(group);
            (group.backed, group.written, group.moving) =
                (group.backed & !mask, group.written & !mask, group.moving & !mask);
        }
    }

    /// Requests that unneeded objects are deleted.
    pub fn tidy(&self) {
        self.wake(&mut self.state.lock());
    }

    fn wake(&self, state: &mut MutexGuard<'_, TierState>) {
        if !state.woken {
            state.woken = true;
            self.changed.notify_all();
        }
    }

    fn is_above_mark(&self, state: &TierState, clusters: &Clusters) -> bool {
        self.is_above(state, clusters, self.bounds.file_bytes / 100 * self.bounds.mark_percent)
    }

    fn is_above(&self, state: &TierState, clusters: &Clusters, bytes: u64) -> bool {
        clusters.used().saturating_sub(state.groups.remote_slots) * PAGE_SIZE as u64 > bytes
    }

    // Reading.

    /// Reads slots of objects, in either place.
    ///
    /// # Errors
    /// [`SlotReadError`]; the bytes at `to` must not be used then.
    ///
    /// # Safety
    /// - `to` has room for `count` pages that no other thread touches. Each slot has an object,
    ///   which is not freed meanwhile.
    pub unsafe fn read(
        &self,
        disk: &dyn Disk,
        slot: u64,
        count: usize,
        to: *mut Page,
    ) -> Result<(), SlotReadError> {
        loop {
            let parts = self.locate(slot, count);
            // SAFETY: the caller promises that `to` has room and no other user, and that the
            // objects are not freed. The parts are of this run.
            let result = unsafe { self.read_parts(disk, slot, &parts, to) };
            // If a slot has moved meanwhile, some bytes were read from its former place.
            if self.locate(slot, count) == parts {
                if result.is_ok() {
                    let far =
                        parts.iter().filter(|p| p.object.is_some()).map(|p| p.count as u64).sum();
                    self.counts.back.fetch_add(far, Relaxed);
                }
                return result;
            }
        }
    }

    fn locate(&self, slot: u64, count: usize) -> Vec<SlotRun> {
        let mut state = self.state.lock();
        let mut parts: Vec<SlotRun> = Vec::new();
        for slot in slot..slot + count as u64 {
            let group = state.groups.group(slot / GROUP_SLOTS as u64);
            group.used = true;
            let at = slot % GROUP_SLOTS as u64;
            let (is_far, is_near) = (group.remote >> at & 1 != 0, group.backed >> at & 1 != 0);
            assert!(is_far != is_near, "slot {slot} is in {} places", is_far as u8 + is_near as u8);
            let (number, offset) = (group.number, rank(group.stored, at) * PAGE_SIZE);
            let object = is_far.then(|| ObjectPart { forks: state.forks(slot), number, offset });
            let end = |p: &SlotRun| {
                p.object.map(|of| ObjectPart { offset: of.offset + p.count * PAGE_SIZE, ..of })
            };
            let follows = |p: &SlotRun| end(p) == object;
            match parts.last_mut().filter(|p| follows(p)) {
                Some(part) => part.count += 1,
                None => parts.push(SlotRun { slot, count: 1, object }),
            }
        }
        parts
    }

    /// Reads the parts of a run of slots to `to`.
    ///
    /// # Safety
    /// - The conditions of [`Tier::read`].
    /// - The parts are of the run at `slot`.
    unsafe fn read_parts(
        &self,
        disk: &dyn Disk,
        slot: u64,
        parts: &[SlotRun],
        to: *mut Page,
    ) -> Result<(), SlotReadError> {
        // SAFETY: a part lies within the run, and the caller promises that `to` has room for the
        // run.
        let place = |p: &SlotRun| unsafe { to.add((p.slot - slot) as usize) };
        let near = parts.iter().filter(|p| p.object.is_none());
        let mut reads: Vec<Transfer> = near
            .map(|p| {
                Transfer::new(
                    Direction::Read,
                    p.slot * PAGE_SIZE as u64,
                    place(p),
                    p.count * PAGE_SIZE,
                )
            })
            .collect();
        // SAFETY: the caller promises room at `to` and that it has no other user. The slots have
        // objects that are not freed meanwhile, so no transfer writes to them.
        unsafe { disk.transfer(&mut reads) };
        reads.iter().try_for_each(|transfer| transfer.result.map_err(SlotReadError::File))?;
        let far = parts.iter().filter_map(|p| Some((p, p.object?)));
        let mut fetches: Vec<ObjectFetch<'_>> = far
            .map(|(p, ObjectPart { forks, number, offset })| {
                // SAFETY: the part lies within the run, and the caller promises that `to` has room
                // for the run. Parts don't overlap, and only the caller uses the memory.
                let to = unsafe {
                    core::slice::from_raw_parts_mut(place(p).cast(), p.count * PAGE_SIZE)
                };
                ObjectFetch { forks, number, offset, to }
            })
            .collect();
        for some in fetches.chunks_mut(ENTRIES_MAX) {
            self.remote.get(some).map_err(|failure| {
                self.counts.failed.fetch_add(1, Relaxed);
                SlotReadError::Remote(some[0].number, failure)
            })?;
        }
        Ok(())
    }

    /// Ends the demoter.
    pub fn stop(&self) {
        self.state.lock().stop = true;
        self.changed.notify_all();
    }

    /// Undoes [`Tier::stop`]: the demoter is about to be started again.
    pub fn resume(&self) {
        self.state.lock().stop = false;
    }

    /// Verifies every group.
    ///
    /// # Errors
    /// The first condition that does not hold.
    pub fn check(&self, clusters: &Clusters) -> Result<(), String> {
        let mut state = self.state.lock();
        let (mut far, mut slots_backed, first_own) = (0, 0, first_own(clusters));
        for id in 0..clusters.slots() / GROUP_SLOTS as u64 {
            let live = clusters.used_bits(id * GROUP_SLOTS as u64);
            let group = state.groups.group(id);
            let complaint = match *group {
                SlotGroup { remote, backed: slots_backed, .. } if remote & slots_backed != 0 => {
                    "a slot is in two places"
                }
                SlotGroup { remote, backed: slots_backed, .. }
                    if live & !(remote | slots_backed) != 0 =>
                {
                    "a slot is nowhere"
                }
                SlotGroup { remote, stored, .. } if remote & !stored != 0 => {
                    "its object never had a slot that counts"
                }
                SlotGroup { number, remote, .. } if (number == 0) != (remote == 0) => {
                    "object and slots don't fit"
                }
                SlotGroup { written, backed: slots_backed, .. } if written & !slots_backed != 0 => {
                    "a slot was written that is not there"
                }
                _ => "",
            };
            if !complaint.is_empty() {
                return Err(alloc::format!("group {id}: {complaint}"));
            }
            if id >= first_own {
                far += ones(group.remote);
                slots_backed += ones(group.backed);
            }
        }
        let (counted_far, counted_backed) = (state.groups.remote_slots, state.groups.backed);
        if (far, slots_backed) != (counted_far, counted_backed) {
            return Err(alloc::format!(
                "{far} slots are in the store and {slots_backed} in the file; counted are {counted_far}, {counted_backed}"
            ));
        }
        Ok(())
    }
}
