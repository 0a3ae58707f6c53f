//! The remote tier: the cold end of the swap file lies in a remote store.
//!
//! It works below objects, on slots: a slot number names the same data wherever it lies, so handles
//! and seals stay as they are when data moves. Slots move in aligned **groups** of 16, each with
//! one object in the remote store, which holds the bytes that lay in the file: sealed, so the
//! servers see nothing and what they change is found. The number of an object is never used twice,
//! so a command that arrives late harms no later object.
//!
//! **A slot's bytes are in one place that counts**: in the file (bit in `backed`) or in the object
//! of its group (bit in `remote`). To move a group: its bytes are read and put into a new object;
//! when the store has said that it has them, and as far as no slot was taken for other data
//! meanwhile (`leaving`), the bits change, under the lock. Only then the file's space is given
//! back, and whoever has read from the file meanwhile sees that the bits have changed and reads
//! again. A write goes to the file always: whoever takes slots makes them the file's
//! ([`Tier::claim`]).
//!
//! Which groups are cold: a clock with a second chance, over groups that were not read since the
//! hand's last pass.
//!
//! # The remote tier
//! `swap/remote/mod.rs`, `swap/remote/demote.rs`, `swap/remote/slot_group.rs`,
//! `memfold-sys/remote.rs`, `memfold-remote`. It lies below objects: slots move, and what a slot's
//! number names stays the same, so handles, seals and everything above know nothing of it. Slots
//! move in aligned groups of 16; a group has at most one object in the store, with the slots that
//! were in use one behind the other. Objects have numbers that are never used twice, so a command
//! that arrives late can harm no later object.
//!
//! - **Slots** are more than the file may hold (`--swap-size` + `--remote-size`); the file is
//!   sparse, and what it takes is counted by slot (`backed`). Who takes slots claims them for the
//!   file first (`claim`); at the bound that fails, and is tried again later.
//! - **One place that counts**: for each slot in use exactly one of `backed` and `remote` is set
//!   (`locate` asserts it, `check` verifies it). The mover reads written slots from the file, puts
//!   them as a new object, and when the store has acknowledged it, changes the bits under the lock,
//!   as far as no slot was claimed meanwhile (`leaving`). Then it punches the file; nobody can
//!   claim these slots until that is done. Slots of the group that lay in an older object are
//!   fetched and put again with them.
//! - **Readers** take no lock across a read: they look where the slots are, read, and look again.
//!   If that has changed, they begin anew; so what was punched or deleted meanwhile is not judged.
//! - **Cold** is what the clock's hand finds unread since its last pass. Slots that became free are
//!   found by the mover's walk over the groups, which then deletes objects of which nothing counts
//!   any more.
//! - **A fork**: groups of which a copy of the process reads a slot don't move, and a move under way
//!   when the copy is made comes to nothing. The copy names its ancestors' objects by how many
//!   forks ago they were stored.
//! - **Failures** of a put or delete change nothing; the mover pauses, 100 ms to 5 s. Reads are
//!   tried again by the service for `--remote-timeout`; a failure then is as one of the file. The
//!   store is believed nothing: seals and fingerprints tell.
//! - **The service** is part of `memfold run`, as a client of such servers needs `std`, in a
//!   process and a session of its own: so it goes on while `memfold run` or its job is stopped, and
//!   has as many descriptors as it may, of which CMD learns nothing. It ends when `memfold run`
//!   does. An engine reaches it by a Unix socket, with one connection for all its threads: requests
//!   have numbers, and of the threads that wait one reads the next answer's head and leaves the
//!   rest to its owner (`memfold-sys/src/remote/socket.rs`). In the service up to four threads of a
//!   connection take turns to read a request, which each does and answers itself (`line.rs`). They
//!   share up to 16 connections to the store, half of them kept for reads (`links.rs`). When
//!   engines take more than half of the descriptors, the connection that was idle longest is
//!   closed; its engine connects again.
//! - It gives a connection to the store up after any error, since answers may be under way on it,
//!   and tells the engine `Ok` only of what was acknowledged. It knows the key names of the run,
//!   and deletes them when the run has ended, or their process and the copies of it that read them
//!   (`swap/copied.rs`). It refreshes their expiry four times in it, by a clock that counts the
//!   machine's sleep, and warns if it could not for half of it (`kept.rs`). If it is silent itself,
//!   the engine's mover warns, which asks eight times in that time (`expiry.rs`).
pub(crate) mod slot_group;
pub(crate) mod expiry;
mod demote;

use crate::cluster::Clusters;
use crate::disk::Disk;
use crate::lent::OLDER_MAX;
use crate::remote::{ENTRIES_MAX, Failure, Fetch, Remote};
use crate::tier::expiry::Watched;
use crate::tier::slot_group::{GROUP_SLOTS, Group, Groups, each_group, ones, rank};
use alloc::string::String;
use alloc::vec::Vec;
use core::ops::Range;
use core::time::Duration;
use memfold_sys::Errno;
use memfold_sys::memory::zone::Zone;
use memfold_sys::page::Page;
use memfold_sys::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use memfold_sys::sync::{Condvar, Mutex, MutexGuard};
use memfold_sys::transfer::{Direction, Transfer};
use memfold_sys::units::PAGE_SIZE;

/// Bytes of a group.
pub(crate) const GROUP_BYTES: usize = GROUP_SLOTS * PAGE_SIZE;
/// Groups that move at once, at most: what the buffer for them takes.
const BATCH_GROUPS: usize = 16;
/// The buffer takes at most one part in this many of the limit.
const BUFFER_SHARE: u64 = 64;
/// Whose slots are read, at most: a child's own, and its ancestors'.
const GENERATIONS: u64 = OLDER_MAX + 1;
/// Rounds of the mover that a write waits for.
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
pub(crate) struct Inner {
    pub groups: Groups,
    pub hand: u64,
    /// There may be something to do.
    pub woken: bool,
    /// Free space of the file is to be given back, as it holds all that it may.
    pub trim: bool,
    pub stop: bool,
    /// A thread moves.
    has_mover: bool,
    /// Its last round has brought nothing.
    pub stalled: bool,
    /// Rounds that it has ended.
    pub rounds: u64,
    /// In a child of fork: where the slots of each generation end that is read here, oldest first.
    /// They are read and let go, and nothing of them moves.
    inherited: Vec<u64>,
}

impl Inner {
    /// Nothing lies in `slots` slots, nor in those of as many generations as may be read.
    fn new(slots: u64) -> Result<Inner, Errno> {
        Ok(Inner {
            groups: Groups::new(GENERATIONS * slots)?,
            hand: 0,
            woken: false,
            trim: false,
            stop: false,
            has_mover: false,
            stalled: false,
            rounds: 0,
            inherited: Vec::new(),
        })
    }

    /// Whether anything lies in the store that this process reads.
    fn is_used(&self) -> bool {
        self.groups.far > 0 || !self.inherited.is_empty()
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

/// What has been done since it was last asked.
#[derive(Default)]
pub struct TierCounts {
    /// Pages that moved to the remote store.
    pub out: AtomicU64,
    /// Pages that were read from it.
    pub back: AtomicU64,
    /// Requests that failed.
    pub failed: AtomicU64,
}

/// The remote tier of a swap file.
pub struct Tier {
    pub(crate) remote: alloc::boxed::Box<dyn Remote>,
    pub(crate) bounds: TierBounds,
    pub(crate) inner: Mutex<Inner>,
    pub(crate) changed: Condvar,
    pub(crate) buffer: Zone,
    pub(crate) pause_ns: AtomicU64,
    /// The last request of the mover has failed, which was told.
    pub(crate) has_failed: AtomicBool,
    pub(crate) watched: Watched,
    /// What was done.
    pub counts: TierCounts,
}

/// Where a run of slots lies: in the file, or in an object.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
struct Part {
    slot: u64,
    count: usize,
    object: Option<PartOf>,
}

/// A part of an object, from an offset on.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
struct PartOf {
    forks: usize,
    number: u64,
    offset: usize,
}

/// Why slots could not be read.
pub enum Why {
    /// The file can't be read.
    File(Errno),
    /// The object's number, and what the remote store has said.
    Remote(u64, Failure),
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
            inner: Mutex::new(Inner::new(slots)?),
            changed: Condvar::default(),
            buffer: Zone::reserve(batch * GROUP_BYTES, PAGE_SIZE)?,
            pause_ns: AtomicU64::new(0),
            has_failed: AtomicBool::new(false),
            watched: Watched::new(bounds.expiry),
            counts: TierCounts::default(),
        })
    }

    /// Nothing of what its lock guards changes until [`Tier::unfreeze`]: for a fork. What is on its
    /// way stays where it is.
    pub fn freeze(&self) {
        let mut inner = self.inner.lock();
        inner.groups.begin_copy();
        core::mem::forget(inner);
    }

    /// Ends [`Tier::freeze`].
    ///
    /// # Safety
    /// - `freeze` has returned, in this process or in the parent that it is a copy of, and this is
    ///   called once for it.
    pub unsafe fn unfreeze(&self) {
        // SAFETY: the guard was forgotten.
        unsafe { self.inner.unlock() };
    }

    /// In a child of fork, frozen: what its parent's mover was doing, and what is still to be
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
        let inner = unsafe { self.inner.peek_mut() };
        if inherited == 0 {
            inner.groups = Groups::new(GENERATIONS * self.slots_max())?;
            inner.inherited.clear();
        } else {
            inner.groups.begin_in_child();
            inner.inherited.push(inherited);
        }
        (inner.hand, inner.trim, inner.stalled) = (0, false, false);
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
        unsafe { self.inner.peek() }.is_used()
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

    /// What to call the store in messages.
    pub fn name(&self) -> &str {
        self.remote.name()
    }

    /// Slots there may be: in the file and in the store.
    pub fn slots_max(&self) -> u64 {
        (self.bounds.file_bytes + self.bounds.remote_bytes) / PAGE_SIZE as u64
    }

    /// Whether anything lies in the remote store that this process reads.
    pub(crate) fn is_used(&self) -> bool {
        self.inner.lock().is_used()
    }

    /// Own slots whose bytes lie in the remote store.
    pub fn far(&self) -> u64 {
        self.inner.lock().groups.far
    }

    /// Bytes of memory that the table of groups and the buffer take for `slots` slots, at most.
    pub fn memory_bytes(&self, slots: u64) -> u64 {
        slots / GROUP_SLOTS as u64 * size_of::<Group>() as u64 + self.buffer.len() as u64
    }

    /// The object that has the bytes of a slot.
    pub fn object_of(&self, slot: u64) -> Option<u64> {
        let mut inner = self.inner.lock();
        let group = inner.groups.group(slot / GROUP_SLOTS as u64);
        (group.remote >> (slot % GROUP_SLOTS as u64) & 1 != 0).then_some(group.number)
    }

    // Slots.

    /// Tells that a thread moves.
    pub fn set_mover(&self) {
        self.inner.lock().has_mover = true;
    }

    /// Makes slots that the caller has taken the file's, to be written. `free_bytes` is what the
    /// file system has. Where the file may not hold so much, waits for the mover while it gets on.
    /// `false`: it doesn't.
    pub fn claim(&self, clusters: &Clusters, slot: u64, count: usize, free_bytes: u64) -> bool {
        let mut inner = self.inner.lock();
        let mut more = 0;
        for turn in 0.. {
            while each_group(slot, count).any(|(group, _)| inner.groups.group(group).punching) {
                inner = self.changed.wait(inner);
            }
            let lacks = |(group, mask): (u64, u16), inner: &mut Inner| {
                ones(mask & !inner.groups.group(group).backed)
            };
            more = each_group(slot, count).map(|part| lacks(part, &mut inner)).sum();
            let bytes = (inner.groups.backed + more) * PAGE_SIZE as u64;
            if bytes <= self.bounds.file_bytes && more * PAGE_SIZE as u64 <= free_bytes {
                break;
            }
            inner.trim = true;
            self.wake(&mut inner);
            if turn == CLAIM_TURNS || !inner.has_mover || inner.stalled || inner.stop {
                return false;
            }
            let round = inner.rounds;
            while inner.rounds == round && !inner.stop {
                inner = self.changed.wait(inner);
            }
        }
        inner.groups.backed += more;
        for (group, mask) in each_group(slot, count) {
            inner.groups.forget(group, mask);
            let group = inner.groups.group(group);
            group.backed |= mask;
            group.written &= !mask;
            group.leaving &= !mask;
        }
        if self.is_above_mark(&inner, clusters) {
            self.wake(&mut inner);
        }
        true
    }

    /// Notes that claimed slots have been written.
    pub fn written(&self, slot: u64, count: usize) {
        let mut inner = self.inner.lock();
        for (group, mask) in each_group(slot, count) {
            let group = inner.groups.group(group);
            assert!(group.backed & mask == mask, "slots that nobody has claimed were written");
            group.written |= mask;
        }
    }

    /// Notes that the file's space of free slots was given back, while nobody can take them.
    pub fn discarded(&self, range: &Range<u64>) {
        let mut inner = self.inner.lock();
        for (group, mask) in each_group(range.start, (range.end - range.start) as usize) {
            inner.groups.forget(group, mask);
            let backed = ones(inner.groups.group(group).backed & mask);
            inner.groups.backed -= backed;
            let group = inner.groups.group(group);
            (group.backed, group.written, group.leaving) =
                (group.backed & !mask, group.written & !mask, group.leaving & !mask);
        }
    }

    /// Asks for objects that nobody needs any more to be deleted.
    pub fn tidy(&self) {
        self.wake(&mut self.inner.lock());
    }

    pub(crate) fn wake(&self, inner: &mut MutexGuard<'_, Inner>) {
        if !inner.woken {
            inner.woken = true;
            self.changed.notify_all();
        }
    }

    fn is_above_mark(&self, inner: &Inner, clusters: &Clusters) -> bool {
        self.is_above(inner, clusters, self.bounds.file_bytes / 100 * self.bounds.mark_percent)
    }

    pub(crate) fn is_above(&self, inner: &Inner, clusters: &Clusters, bytes: u64) -> bool {
        clusters.used().saturating_sub(inner.groups.far) * PAGE_SIZE as u64 > bytes
    }

    // Reading.

    /// Reads slots that are held, wherever their bytes lie.
    ///
    /// # Errors
    /// [`Why`]; what is at `to` is not to be used then.
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
    ) -> Result<(), Why> {
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

    fn locate(&self, slot: u64, count: usize) -> Vec<Part> {
        let mut inner = self.inner.lock();
        let mut parts: Vec<Part> = Vec::new();
        for slot in slot..slot + count as u64 {
            let group = inner.groups.group(slot / GROUP_SLOTS as u64);
            group.used = true;
            let at = slot % GROUP_SLOTS as u64;
            let (is_far, is_near) = (group.remote >> at & 1 != 0, group.backed >> at & 1 != 0);
            assert!(is_far != is_near, "slot {slot} is in {} places", is_far as u8 + is_near as u8);
            let (number, offset) = (group.number, rank(group.stored, at) * PAGE_SIZE);
            let object = is_far.then(|| PartOf { forks: inner.forks(slot), number, offset });
            let end = |p: &Part| {
                p.object.map(|of| PartOf { offset: of.offset + p.count * PAGE_SIZE, ..of })
            };
            let follows = |p: &Part| end(p) == object;
            match parts.last_mut().filter(|p| follows(p)) {
                Some(part) => part.count += 1,
                None => parts.push(Part { slot, count: 1, object }),
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
        parts: &[Part],
        to: *mut Page,
    ) -> Result<(), Why> {
        // SAFETY: a part lies within the run, for which there is room.
        let place = |p: &Part| unsafe { to.add((p.slot - slot) as usize) };
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
        reads.iter().try_for_each(|read| read.result.map_err(Why::File))?;
        let far = parts.iter().filter_map(|p| Some((p, p.object?)));
        let mut fetches: Vec<Fetch<'_>> = far
            .map(|(p, PartOf { forks, number, offset })| {
                // SAFETY: as above; parts don't overlap, and the memory is the caller's alone.
                let to = unsafe {
                    core::slice::from_raw_parts_mut(place(p).cast(), p.count * PAGE_SIZE)
                };
                Fetch { forks, number, offset, to }
            })
            .collect();
        for some in fetches.chunks_mut(ENTRIES_MAX) {
            self.remote.get(some).map_err(|failure| {
                self.counts.failed.fetch_add(1, Relaxed);
                Why::Remote(some[0].number, failure)
            })?;
        }
        Ok(())
    }

    /// Ends the mover.
    pub fn stop(&self) {
        self.inner.lock().stop = true;
        self.changed.notify_all();
    }

    /// Takes back [`Tier::stop`]: it is about to be started again.
    pub fn resume(&self) {
        self.inner.lock().stop = false;
    }

    /// Verifies every group.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check(&self, clusters: &Clusters) -> Result<(), String> {
        let mut inner = self.inner.lock();
        let (mut far, mut backed, first_own) = (0, 0, first_own(clusters));
        for id in 0..clusters.slots() / GROUP_SLOTS as u64 {
            let live = clusters.used_bits(id * GROUP_SLOTS as u64);
            let group = inner.groups.group(id);
            let wrong = match *group {
                Group { remote, backed, .. } if remote & backed != 0 => "a slot is in two places",
                Group { remote, backed, .. } if live & !(remote | backed) != 0 => {
                    "a slot is nowhere"
                }
                Group { remote, stored, .. } if remote & !stored != 0 => {
                    "its object never had a slot that counts"
                }
                Group { number, remote, .. } if (number == 0) != (remote == 0) => {
                    "object and slots don't fit"
                }
                Group { written, backed, .. } if written & !backed != 0 => {
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
        let (counted_far, counted_backed) = (inner.groups.far, inner.groups.backed);
        if (far, backed) != (counted_far, counted_backed) {
            return Err(alloc::format!(
                "{far} slots are far and {backed} in the file; counted are {counted_far}, {counted_backed}"
            ));
        }
        Ok(())
    }
}
