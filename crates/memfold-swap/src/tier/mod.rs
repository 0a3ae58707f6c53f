//! The remote tier: the cold end of the swap file lies in a remote store.
//!
//! It works below objects, on slots. A slot number names the same data wherever the data lies, so
//! handles and seals stay as they are when data moves. Slots move in aligned **groups** of 16. A
//! group has at most one object in the remote store, which holds its slots one behind the other as
//! they lay in the file: sealed, so the servers learn nothing, and a change is detected. The number
//! of an object is never used twice, so a command that arrives late harms no later object.
//!
//! - **Slots**: there are more than the file may hold (`--swap-size` + `--remote-size`). The file is
//!   sparse, and the space that it takes is counted by slot (`backed`). A thread that allocates
//!   slots claims them for the file first ([`Tier::claim`]), as a write always goes to the file. At
//!   the bound the claim fails, and is tried again later.
//! - **One place**: for each slot in use exactly one of `backed` and `remote` is set (`locate`
//!   asserts it, `check` verifies it). The demoter reads written slots from the file and puts them
//!   as a new object. When the store has acknowledged it, the bits change under the lock, except
//!   for slots that were claimed meanwhile (`moving`). Then the demoter punches the file; until
//!   that is done, no thread can claim these slots. Slots of the group that lay in an older object
//!   are fetched and put again with them.
//! - **Readers** take no lock across a read. They look up where the slots are, read, and look again.
//!   If that has changed, they begin anew. So bytes that were punched or deleted meanwhile are
//!   never judged.
//! - **Cold** groups are found by a clock with a second chance: those that were not read since the
//!   hand's last pass. The demoter's walk over the groups also finds slots that became free, and
//!   deletes objects of which no slot counts any more.
//! - **A fork**: groups of which a child may read a slot don't move. A move that is under way when
//!   the process forks comes to nothing. The child names its ancestors' objects by how many forks
//!   ago they were stored.
//! - **Failures** of a put or delete change nothing; the demoter pauses, 100 ms to 5 s. The service
//!   tries reads again for `--remote-timeout`; after that a failed read is like one of the file.
//! - **The service** (`memfold-remote`) is a process of `memfold run`, as a client of such servers
//!   needs `std`. An engine reaches it by a Unix socket, with one connection for all its threads
//!   (`remote/socket.rs`). The service refreshes the expiry of the objects, and warns if it can't.
//!   If the service is silent itself, the demoter warns (`expiry.rs`).
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
use memfold_sys::Errno;
use memfold_sys::memory::witness::DescendantWatch;
use memfold_sys::memory::zone::Zone;
use memfold_sys::page::Page;
use memfold_sys::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use memfold_sys::sync::{Condvar, Mutex, MutexGuard};
use memfold_sys::transfer::{Direction, Transfer};
use memfold_sys::units::PAGE_SIZE;

/// Bytes of a group.
pub(crate) const GROUP_BYTES: usize = GROUP_SLOTS * PAGE_SIZE;
/// SlotGroups that move at once, at most: what the buffer for them takes.
const BATCH_GROUPS: usize = 16;
/// The buffer takes at most one part in this many of the limit.
const BUFFER_SHARE: u64 = 64;
/// Whose slots are read, at most: a child's own, and its ancestors'.
const GENERATIONS: u64 = ANCESTORS_MAX + 1;
/// Rounds of the demoter that a claim waits for.
const CLAIM_TURNS: u32 = 16;

/// Bounds of the tier.
#[derive(Copy, Clone, Debug)]
pub struct TierBounds {
    /// The most that the file may take, bytes.
    pub file_bytes: u64,
    /// The most that may lie in the remote store, bytes.
    pub remote_bytes: u64,
    /// The file may be so full before its cold end moves, percent.
    pub mark_percent: u64,
    /// What lies in the remote store is gone when nobody refreshes it for so long.
    pub expiry: Duration,
    /// The engine's limit, bytes: the buffer is a small part of it.
    pub limit_bytes: u64,
}

/// What the tier's lock guards.
struct TierState {
    pub groups: SlotGroups,
    pub hand: u64,
    /// There may be something to do.
    pub woken: bool,
    /// Free space of the file is to be given back, as it holds all that it may.
    pub trim: bool,
    pub stop: bool,
    /// A thread moves.
    has_demoter: bool,
    /// Its last round has brought nothing.
    pub stalled: bool,
    /// Rounds that it has ended.
    pub rounds: u64,
    /// In a child of fork: where the slots of each generation end that is read here, oldest first.
    /// They are read and released, and no group of them moves.
    inherited: Vec<u64>,
}

impl TierState {
    /// Nothing lies in `slots` slots, nor in those of as many generations as may be read.
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

    /// Whether anything lies in the store that this process reads.
    fn is_used(&self) -> bool {
        self.groups.remote_slots > 0 || !self.inherited.is_empty()
    }

    /// By how many forks a slot is an ancestor's.
    fn forks(&self, slot: u64) -> usize {
        self.inherited.iter().filter(|end| slot < **end).count()
    }
}

/// The first group that isn't inherited.
pub(crate) fn first_own(clusters: &Clusters) -> u64 {
    clusters.inherited() / GROUP_SLOTS as u64
}

/// Pages that went to the remote store and came back, since they were last asked for.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct RemoteCounts {
    /// Pages that moved to the remote store.
    pub pages_out: u64,
    /// Pages that were read from it.
    pub pages_in: u64,
    /// Requests that failed.
    pub failed: u64,
}

/// What has been done since it was last asked.
#[derive(Default)]
struct TierCounts {
    /// Pages that moved to the remote store.
    out: AtomicU64,
    /// Pages that were read from it.
    back: AtomicU64,
    /// Requests that failed.
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
    /// The last request of the demoter has failed, which was told.
    has_failed: AtomicBool,
    watched: ExpiryWatch,
    counts: TierCounts,
}

/// Where a run of slots lies: in the file, or in an object.
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

/// SlotReadError slots could not be read.
pub enum SlotReadError {
    /// The file can't be read.
    File(Errno),
    /// The object's number, and what the remote store has said.
    Remote(u64, RemoteError),
}

impl Tier {
    /// A tier in which nothing lies.
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

    /// Nothing of what its lock guards changes until [`Tier::unfreeze`]: for a fork. What is on its
    /// way stays where it is.
    pub fn freeze(&self) {
        let mut state = self.state.lock();
        state.groups.begin_copy();
        core::mem::forget(state);
    }

    /// Ends [`Tier::freeze`].
    ///
    /// # Safety
    /// - `freeze` has returned, in this process or in the parent that it is a copy of, and this is
    ///   called once for it.
    pub unsafe fn unfreeze(&self) {
        // SAFETY: the guard was forgotten.
        unsafe { self.state.unlock() };
    }

    /// In a child of fork, frozen: what its parent's demoter was doing, and what is still to be
    /// deleted, is the parent's. The slots before `inherited` are its ancestors'; 0: nothing of
    /// them is read.
    ///
    /// # Errors
    /// No address space.
    ///
    /// # Safety
    /// - The caller is the only thread of the process.
    pub unsafe fn begin_in_child(&self, inherited: u64) -> Result<(), Errno> {
        // SAFETY: by the caller's promise.
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

    /// Whether a child would read anything of the store.
    ///
    /// # Safety
    /// - [`Tier::freeze`] has returned, and [`Tier::unfreeze`] is not called meanwhile.
    pub unsafe fn is_used_at_rest(&self) -> bool {
        // SAFETY: frozen: nobody changes it.
        unsafe { self.state.peek() }.is_used()
    }

    /// In a child of fork: connects to the store's service, if it is of use. Who can't do it later
    /// goes on with that.
    ///
    /// # Safety
    /// - As [`Tier::is_used_at_rest`].
    pub unsafe fn connect(&self) {
        // SAFETY: by the caller's promise.
        if unsafe { self.is_used_at_rest() } {
            let _ = self.remote.get(&mut []);
        }
    }

    /// Has the objects kept for copies of the process: see [`Remote::lend`].
    ///
    /// # Errors
    /// They may be gone when this process has ended.
    pub fn lend(&self, copies: &DescendantWatch) -> Result<(), RemoteError> {
        self.remote.lend(copies)
    }

    /// Takes the counts, and begins anew at 0.
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

    /// What to call the store in messages.
    pub fn name(&self) -> &str {
        self.remote.name()
    }

    /// Slots there may be: in the file and in the store.
    pub fn slots_max(&self) -> u64 {
        (self.bounds.file_bytes + self.bounds.remote_bytes) / PAGE_SIZE as u64
    }

    /// Whether anything lies in the remote store that this process reads.
    fn is_used(&self) -> bool {
        self.state.lock().is_used()
    }

    /// Own slots whose bytes lie in the remote store.
    pub fn remote_slots(&self) -> u64 {
        self.state.lock().groups.remote_slots
    }

    /// Bytes of memory that the table of groups and the buffer take for `slots` slots, at most.
    pub fn memory_bytes(&self, slots: u64) -> u64 {
        slots / GROUP_SLOTS as u64 * size_of::<SlotGroup>() as u64 + self.buffer.len() as u64
    }

    /// The object that has the bytes of a slot.
    pub fn object_of(&self, slot: u64) -> Option<u64> {
        let mut state = self.state.lock();
        let group = state.groups.group(slot / GROUP_SLOTS as u64);
        (group.remote >> (slot % GROUP_SLOTS as u64) & 1 != 0).then_some(group.number)
    }

    // Slots.

    /// Tells that a thread moves.
    pub fn set_demoter(&self) {
        self.state.lock().has_demoter = true;
    }

    /// Makes slots that the caller has taken the file's, to be written. `free_bytes` is what the
    /// file system has. Where the file may not hold so much, waits for the demoter while it makes room.
    /// `false`: it doesn't.
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

    /// Notes that claimed slots have been written.
    pub fn written(&self, slot: u64, count: usize) {
        let mut state = self.state.lock();
        for (group, mask) in each_group(slot, count) {
            let group = state.groups.group(group);
            assert!(group.backed & mask == mask, "slots that nobody has claimed were written");
            group.written |= mask;
        }
    }

    /// Notes that the file's space of free slots was given back, while nobody can take them.
    pub fn discarded(&self, range: &Range<u64>) {
        let mut state = self.state.lock();
        for (group, mask) in each_group(range.start, (range.end - range.start) as usize) {
            state.groups.forget(group, mask);
            let backed = ones(state.groups.group(group).backed & mask);
            state.groups.backed -= backed;
            let group = state.groups.group(group);
            (group.backed, group.written, group.moving) =
                (group.backed & !mask, group.written & !mask, group.moving & !mask);
        }
    }

    /// Asks for objects that nobody needs any more to be deleted.
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

    /// Reads slots that objects are in, wherever their bytes lie.
    ///
    /// # Errors
    /// [`SlotReadError`]; what is at `to` is not to be used then.
    ///
    /// # Safety
    /// - `to` has room for `count` pages that nobody else touches; an object is in each slot and is
    ///   not freed meanwhile.
    pub unsafe fn read(
        &self,
        disk: &dyn Disk,
        slot: u64,
        count: usize,
        to: *mut Page,
    ) -> Result<(), SlotReadError> {
        loop {
            let parts = self.locate(slot, count);
            // SAFETY: as the caller says.
            let result = unsafe { self.read_parts(disk, slot, &parts, to) };
            // What has moved meanwhile was read in part from where it is no more.
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

    /// # Safety
    /// - As for [`Tier::read`]; the parts are of the run at `slot`.
    unsafe fn read_parts(
        &self,
        disk: &dyn Disk,
        slot: u64,
        parts: &[SlotRun],
        to: *mut Page,
    ) -> Result<(), SlotReadError> {
        // SAFETY: a part lies within the run, for which there is room.
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
        // SAFETY: as the caller says.
        unsafe { disk.transfer(&mut reads) };
        reads.iter().try_for_each(|read| read.result.map_err(SlotReadError::File))?;
        let far = parts.iter().filter_map(|p| Some((p, p.object?)));
        let mut fetches: Vec<ObjectFetch<'_>> = far
            .map(|(p, ObjectPart { forks, number, offset })| {
                // SAFETY: as above; parts don't overlap, and the memory is the caller's alone.
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

    /// Takes back [`Tier::stop`]: it is about to be started again.
    pub fn resume(&self) {
        self.state.lock().stop = false;
    }

    /// Verifies every group.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check(&self, clusters: &Clusters) -> Result<(), String> {
        let mut state = self.state.lock();
        let (mut far, mut backed, first_own) = (0, 0, first_own(clusters));
        for id in 0..clusters.slots() / GROUP_SLOTS as u64 {
            let live = clusters.used_bits(id * GROUP_SLOTS as u64);
            let group = state.groups.group(id);
            let wrong = match *group {
                SlotGroup { remote, backed, .. } if remote & backed != 0 => {
                    "a slot is in two places"
                }
                SlotGroup { remote, backed, .. } if live & !(remote | backed) != 0 => {
                    "a slot is nowhere"
                }
                SlotGroup { remote, stored, .. } if remote & !stored != 0 => {
                    "its object never had a slot that counts"
                }
                SlotGroup { number, remote, .. } if (number == 0) != (remote == 0) => {
                    "object and slots don't fit"
                }
                SlotGroup { written, backed, .. } if written & !backed != 0 => {
                    "a slot was written that is not there"
                }
                _ => "",
            };
            if !wrong.is_empty() {
                return Err(alloc::format!("group {id}: {wrong}"));
            }
            if id >= first_own {
                far += ones(group.remote);
                backed += ones(group.backed);
            }
        }
        let (counted_far, counted_backed) = (state.groups.remote_slots, state.groups.backed);
        if (far, backed) != (counted_far, counted_backed) {
            return Err(alloc::format!(
                "{far} slots are in the store and {backed} in the file; counted are {counted_far}, {counted_backed}"
            ));
        }
        Ok(())
    }
}
