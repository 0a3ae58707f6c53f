//! The swap file: where objects lie in it, how they are sealed, written and read. It knows no
//! folio.
//!
//! Two kinds of content. A **raw** object is one block of a folio that was written whole: it fills
//! its slots, and its number and tag are kept in memory (`marks`). A **packed** object is a
//! compressed block as the store had it; it lies anywhere among others in a run of slots:
//!
//! ```text
//! number 8 | fields 4 | zero 4 | tag 16 | payload, padded to 16
//! ```
//!
//! Where an object lies is told by its handle alone. A slot is held by each object that lies in it,
//! wholly or partly, and by the write that is under way to it.
//!
//! # The swap file
//! `swap.rs`, `reclaim/writeback.rs`, `pager/fetch.rs`. A handle names either an object of the pool
//! or a place in the file (`Handle::foreign`), block by block, so one folio may have both, and
//! nothing else in the engine needs to know.
//!
//! - **Raw**: a folio that the store refuses goes whole into one run of slots of its order, in one
//!   write. Meanwhile it is `Cached` with a ticket (`Folio::writing`), on no list. A touch takes it
//!   home and ends the ticket. No run of its order: it is halved (`swpout_fallback`).
//! - **Packed**: when the pool holds more than half of the limit, the coldest `Stored` folios (list
//!   `Folded`) have their blocks copied as they are stored, 512 KiB to a write, until the pool
//!   holds an eighth less. Meanwhile the pool's copies are authoritative. At the end a block
//!   changes over only if its folio is still `Stored` and its handle and fingerprint are those that
//!   were copied; then the pool's copy is freed.
//! - **Reading**: blocks that lie one behind the other are read at once, raw ones into the frame.
//!   Each object is opened by its own tag and bound to its place, and the block must have the
//!   fingerprint that was taken when it left memory. Anything else ends the program with a message
//!   that names file and slot.
//! - **Who sleeps**: a handler never reads the file while there are threads that do (four,
//!   `memfold-read`); with 64 faults waiting for them it does. So a fault on memory that is in the
//!   pool waits for no device; its window ends where the file begins (`form_window`). Handing a
//!   fault over costs two wakes from idle, about 60 us of a read of 200. A thread that reads holds
//!   `areas` for reading, so a change of mappings or a new region still waits for a read that is under way.
//! - **Failing writes** change nothing: the copy before stays, the slots are let go, no write is
//!   tried for 100 ms, and what doesn't shrink goes to the pool meanwhile.
//! - **Nonces**: one counter, one number for each object sealed, a key for each engine
//!   (`swap/seal.rs` argues it).
//! - **The writer** (thread `memfold-swap`) takes shard locks only. Whoever waits for it (for a
//!   buffer, for the pool to shrink, for a write to end) may hold `areas` for reading and a
//!   context, but no shard. Readers have buffers of their own.
mod fork;

use crate::cluster::{CLUSTER_SLOTS, Clusters, Reach};
use crate::disk::Disk;
use crate::lent::{Lent, OLDER_MAX};
use crate::location::{Place, SLOTS_MAX, UNIT_BYTES};
use crate::remote::Remote;
use crate::seal::{Bound, Seal, TAG_BYTES};
use crate::tier::{Tier, TierBounds, Why};
use crate::write_queue::{Outbox, WRITES_MAX};
use alloc::boxed::Box;
use alloc::string::String;
use alloc::sync::Arc;
use core::ops::Range;
use core::time::Duration;
use memfold_store::Handle;
use memfold_sys::Errno;
use memfold_sys::memory::zone::{NoPromise, Zone, ZoneEdge};
use memfold_sys::page::Page;
use memfold_sys::sync::atomic::{
    AtomicBool, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};
use memfold_sys::sync::{Condvar, Mutex};
use memfold_sys::thread::errands::DelegateQueue;
use memfold_sys::transfer::{Direction, Transfer};
use memfold_sys::units::{Order, PAGE_SIZE};

/// Bytes before the payload of a packed object.
pub const HEAD_BYTES: usize = 16 + TAG_BYTES;
/// The file grows by this many clusters at a time, fewer near its bounds.
const GROWTH_CLUSTERS: usize = 32;
/// After a failed write or growth, none is tried for this long.
const RETRY_NS: u64 = 100_000_000;
/// Buffers for writes, and others for reads, which never wait for a write.
const WRITE_BUFFERS: usize = WRITES_MAX;
const READ_BUFFERS: usize = 2;
const BUFFERS: usize = WRITE_BUFFERS + READ_BUFFERS;
/// Buffers take at most one part in this many of the limit, each.
const BUFFER_SHARE: u64 = 64;
const BUFFER_MIN_BYTES: usize = 64 << 10;
/// What packed objects are best written in, bytes: buffers are this large also where folios are
/// small.
const PACK_BYTES: usize = 512 << 10;
/// Slots that became free before emptied clusters are discarded.
const DISCARD_SLOTS: u64 = 8 * CLUSTER_SLOTS as u64;

/// An object could not be read. Displays as one line that names file and slot, or the remote store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadError {
    name: String,
    slot: u64,
    /// The object of the remote store that has the slot.
    object: Option<u64>,
    /// `None`: what was read is not what was written.
    why: Option<String>,
}

impl core::fmt::Display for ReadError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self.object {
            Some(number) => {
                write!(f, "remote store {}, object {number} (slot {}): ", self.name, self.slot)?
            }
            None => write!(
                f,
                "swap file {}, slot {} (byte {}): ",
                self.name,
                self.slot,
                self.slot * PAGE_SIZE as u64
            )?,
        }
        match &self.why {
            Some(why) => write!(f, "reading failed: {why}"),
            None => write!(f, "what is there is not what was written"),
        }
    }
}

#[repr(C)]
#[derive(Copy, Clone)]
struct Mark {
    number: u64,
    tag: [u8; TAG_BYTES],
}

/// Sizes and bounds of a swap file.
#[derive(Copy, Clone, Debug)]
pub struct Bounds {
    /// The most that it may take, bytes.
    pub size_bytes: u64,
    /// What must stay free on its file system, bytes.
    pub keep_free_bytes: u64,
    /// The most that may lie in the remote store, bytes.
    pub remote_bytes: u64,
    /// The file may be so full before its cold end moves there, percent.
    pub mark_percent: u64,
    /// What lies there is gone when nobody refreshes it for so long.
    pub remote_expiry: Duration,
    /// The engine's limit, bytes: buffers are a small part of it.
    pub limit_bytes: u64,
    /// The largest folio.
    pub folio: Order,
}

/// A swap file with its slots, seals and buffers.
pub struct Swap {
    disk: Box<dyn Disk>,
    seal: Seal,
    clusters: Clusters,
    tier: Option<Tier>,
    marks: Zone,
    edge: ZoneEdge,
    buffers: Zone,
    buffer_bytes: usize,
    free: Mutex<[bool; BUFFERS]>,
    /// The disk knows the buffers, which then hold memory.
    registered: AtomicBool,
    given: Condvar,
    bounds: Bounds,
    growth: Mutex<()>,
    retry_at: AtomicU64,
    objects: AtomicU64,
    freed: AtomicU64,
    warned: AtomicBool,
    /// Nothing more goes to the file.
    is_shut: AtomicBool,
    /// What children of fork read.
    lent: Lent,
    /// Files of ancestors that are read here.
    copies: AtomicU64,
    /// In gate delivery: who has the engine's descriptors.
    errands: Option<Arc<DelegateQueue>>,
    /// What the writer is to do.
    pub outbox: Outbox,
}

impl Swap {
    /// An empty swap file on `disk`, whose cold end moves to `remote`.
    ///
    /// # Errors
    /// No random bytes for the key, or no address space.
    pub fn new(
        disk: Box<dyn Disk>,
        remote: Option<Box<dyn Remote>>,
        encrypt: bool,
        mut bounds: Bounds,
    ) -> Result<Swap, Errno> {
        bounds.size_bytes = bounds.size_bytes.min(SLOTS_MAX * PAGE_SIZE as u64);
        bounds.remote_bytes =
            bounds.remote_bytes.min(SLOTS_MAX * PAGE_SIZE as u64 - bounds.size_bytes);
        let tier_bounds = TierBounds {
            file_bytes: bounds.size_bytes,
            remote_bytes: bounds.remote_bytes,
            mark_percent: bounds.mark_percent,
            expiry: bounds.remote_expiry,
            limit_bytes: bounds.limit_bytes,
        };
        let tier = remote.map(|remote| Tier::new(remote, tier_bounds)).transpose()?;
        let slots =
            tier.as_ref().map_or(bounds.size_bytes / PAGE_SIZE as u64, Tier::slots_max) as usize;
        let share = (bounds.limit_bytes / BUFFER_SHARE).max(1).ilog2();
        let buffer_bytes =
            (1usize << share).clamp(BUFFER_MIN_BYTES, bounds.folio.bytes().max(PACK_BYTES));
        let buffers = Zone::reserve(buffer_bytes * BUFFERS, PAGE_SIZE)?;
        Ok(Swap {
            disk,
            seal: Seal::new(encrypt)?,
            clusters: Clusters::new(),
            tier,
            marks: Zone::reserve_growing(
                // In a child of fork, slots of its ancestors too.
                ((OLDER_MAX as usize + 1) * slots.max(1) * size_of::<Mark>())
                    .next_multiple_of(PAGE_SIZE),
                PAGE_SIZE,
            )?,
            edge: ZoneEdge::new(),
            buffers,
            buffer_bytes,
            free: Mutex::new([true; BUFFERS]),
            registered: AtomicBool::new(false),
            given: Condvar::new(),
            bounds,
            growth: Mutex::new(()),
            retry_at: AtomicU64::new(0),
            objects: AtomicU64::new(0),
            freed: AtomicU64::new(0),
            warned: AtomicBool::new(false),
            is_shut: AtomicBool::new(false),
            lent: Lent::default(),
            copies: AtomicU64::new(0),
            errands: None,
            outbox: Outbox::default(),
        })
    }

    /// Has what needs a descriptor of the engine's done by errands.
    pub fn with_errands(self, errands: Option<Arc<DelegateQueue>>) -> Swap {
        Swap { errands, ..self }
    }

    /// Whether a write may be tried now: none has failed lately.
    pub fn accepts(&self) -> bool {
        if self.is_shut.load(SeqCst) {
            return false;
        }
        let retry_at = self.retry_at.load(Relaxed);
        retry_at == 0 || memfold_sys::thread::now_ns() >= retry_at
    }

    /// The largest run that one buffer holds.
    pub fn largest(&self) -> Order {
        Order::covering(self.buffer_bytes).unwrap_or(Order::MAX)
    }

    /// Objects in the file.
    pub fn objects(&self) -> u64 {
        self.objects.load(Relaxed)
    }

    /// Bytes of the file in use.
    pub fn used_bytes(&self) -> u64 {
        (self.clusters.used() * PAGE_SIZE as u64).saturating_sub(self.remote_bytes())
    }

    /// Bytes that lie in the remote store.
    pub fn remote_bytes(&self) -> u64 {
        self.tier.as_ref().map_or(0, |tier| tier.far() * PAGE_SIZE as u64)
    }

    /// The remote tier, if there is one.
    pub fn tier(&self) -> Option<&Tier> {
        self.tier.as_ref()
    }

    /// Whether any slot is free.
    pub fn has_room(&self) -> bool {
        self.clusters.used() < self.clusters.slots() - self.clusters.inherited()
    }

    /// Whether more than half of what file and remote store may hold is in use.
    pub fn is_half_full(&self) -> bool {
        let most =
            self.tier.as_ref().map_or(self.bounds.size_bytes / PAGE_SIZE as u64, Tier::slots_max);
        self.clusters.used() > most / 2
    }

    /// Bytes of memory that buffers and tables take, at most.
    pub fn memory_bytes(&self) -> u64 {
        let buffers = if self.registered.load(Relaxed) { self.buffer_bytes_max() } else { 0 };
        buffers + self.table_bytes()
    }

    /// The part of it that is buffers, from the first write on.
    pub fn buffer_bytes_max(&self) -> u64 {
        self.buffers.len() as u64
    }

    /// The part of it that is tables.
    pub fn table_bytes(&self) -> u64 {
        let per_cluster = (CLUSTER_SLOTS + 128) as u64;
        let slots = self.clusters.slots();
        let tier = self.tier.as_ref().map_or(0, |tier| tier.memory_bytes(slots));
        tier + slots / CLUSTER_SLOTS as u64 * per_cluster
    }

    /// Verifies the slots.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check(&self) -> Result<(), String> {
        self.clusters.check()?;
        self.tier.as_ref().map_or(Ok(()), |tier| tier.check(&self.clusters))
    }

    // Slots.

    /// Takes a run of slots, growing the file if it may. `None`: there is none of this order.
    pub fn take(&self, order: Order) -> Option<u64> {
        let cpu = memfold_sys::thread::current_cpu();
        loop {
            let slots = self.clusters.slots();
            if let Some(slot) = self.clusters.take(order, cpu, Reach::Own) {
                return self.claim(slot, order);
            }
            if !self.grow(slots) {
                return self
                    .clusters
                    .take(order, cpu, Reach::All)
                    .and_then(|slot| self.claim(slot, order));
            }
        }
    }

    /// Makes a run that was taken the file's. Gives it back if the file may not hold more.
    fn claim(&self, slot: u64, order: Order) -> Option<u64> {
        let Some(tier) = &self.tier else { return Some(slot) };
        let free = self.disk.free_bytes().unwrap_or(0).saturating_sub(self.bounds.keep_free_bytes);
        if tier.claim(&self.clusters, slot, order.pages(), free) {
            return Some(slot);
        }
        self.clusters.put(slot, order.pages());
        None
    }

    /// Takes slots back that no child reads any more. Returns whether there were any.
    fn take_back(&self) -> bool {
        let collect = || self.lent.collect(&self.clusters);
        self.lent.is_any() && self.errands.as_ref().is_some_and(|errands| errands.run(collect))
    }

    /// Makes the file larger than `slots`, unless somebody else has. `false`: it may not grow.
    fn grow(&self, slots: u64) -> bool {
        let _growing = self.growth.lock();
        if self.clusters.slots() != slots || self.take_back() {
            return true;
        }
        let cluster = (CLUSTER_SLOTS * PAGE_SIZE) as u64;
        let now = slots * PAGE_SIZE as u64;
        if let Some(tier) = &self.tier {
            // Slots only: the file's space is taken and given back one by one, as slots move.
            let own = slots - self.clusters.inherited();
            let room = (tier.slots_max() - own) / CLUSTER_SLOTS as u64;
            let count = room.min(GROWTH_CLUSTERS as u64);
            let done = count > 0 && self.disk.stretch(now + count * cluster).is_ok();
            if done {
                self.clusters.grow(count as usize);
            }
            return done;
        }
        let own = now - self.clusters.inherited() * PAGE_SIZE as u64;
        let room = (self.bounds.size_bytes.saturating_sub(own) / cluster)
            .min((SLOTS_MAX - slots) / CLUSTER_SLOTS as u64);
        let free = self.disk.free_bytes().unwrap_or(0).saturating_sub(self.bounds.keep_free_bytes)
            / cluster;
        let mut count = room.min(free).min(GROWTH_CLUSTERS as u64) as usize;
        while count > 0 {
            if self.disk.grow(now + count as u64 * cluster).is_ok() {
                self.clusters.grow(count);
                return true;
            }
            count /= 4;
        }
        false
    }

    /// Lets go of a run that was taken.
    pub fn put(&self, slot: u64, count: usize) {
        let freed = self.clusters.put(slot, count) as u64;
        if self.freed.fetch_add(freed, Relaxed) + freed >= DISCARD_SLOTS {
            self.freed.store(0, Relaxed);
            self.outbox.discard();
        }
    }

    /// Enters an object at a place whose slots the caller holds.
    pub fn enter(&self, place: Place) {
        self.clusters.hold(place.slot, place.slots());
        self.objects.fetch_add(1, Relaxed);
    }

    /// Frees the object that a handle names, if it names one of the file.
    pub fn free(&self, handle: Handle) {
        if let Some(place) = Place::of(handle) {
            self.objects.fetch_sub(1, Relaxed);
            self.put(place.slot, place.slots());
        }
    }

    /// Gives the space of emptied clusters back to the file system.
    pub fn discard(&self) {
        let mut ranges = [const { 0..0 }; 32];
        let found = self.clusters.begin_discard(&mut ranges);
        for range in &ranges[..found] {
            let (start, len) =
                (range.start * PAGE_SIZE as u64, (range.end - range.start) * PAGE_SIZE as u64);
            let _ = self.disk.punch(start, len);
            if let Some(tier) = &self.tier {
                tier.discarded(range);
            }
            self.clusters.discarded(range);
        }
        if let Some(tier) = &self.tier {
            tier.tidy();
        }
    }

    /// One round of the mover: see `Tier::step`. `false` without a tier.
    pub fn move_out(&self, wait: bool) -> bool {
        self.tier.as_ref().is_some_and(|tier| {
            if wait {
                tier.await_work();
            }
            tier.step(&*self.disk, &self.clusters, &self.lent, wait)
        })
    }

    // Buffers.

    fn take_buffer(&self, range: Range<usize>, wait: bool) -> Option<usize> {
        let mut free = self.free.lock();
        if !self.registered.swap(true, Relaxed) {
            // Not before they are needed: most processes of a run never write.
            // SAFETY: the zone is dropped after the disk, as the fields are in this order.
            unsafe { self.disk.register(self.buffers.as_ptr(), self.buffers.len()) };
        }
        loop {
            if let Some(buffer) = range.clone().find(|b| free[*b]) {
                free[buffer] = false;
                return Some(buffer);
            }
            if !wait {
                return None;
            }
            free = self.given.wait(free);
        }
    }

    /// A buffer to write from. With `wait`, sleeps until there is one.
    pub fn write_buffer(&self, wait: bool) -> Option<usize> {
        self.take_buffer(0..WRITE_BUFFERS, wait)
    }

    /// Gives a buffer back.
    pub fn give_buffer(&self, buffer: usize) {
        self.free.lock()[buffer] = true;
        self.given.notify_all();
    }

    /// The bytes of a buffer that the caller has.
    ///
    /// # Safety
    /// - The caller has taken the buffer, and makes no second slice of it.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn buffer(&self, buffer: usize) -> &mut [u8] {
        // SAFETY: the buffer lies in the zone and belongs to the caller alone.
        unsafe {
            let at = self.buffers.as_ptr().add(buffer * self.buffer_bytes);
            core::slice::from_raw_parts_mut(at, self.buffer_bytes)
        }
    }

    // Sealing and writing.

    /// Seals `blocks` of `block` bytes each, which fill the start of `bytes` and go to the run at
    /// `slot`.
    pub fn seal_raw(&self, slot: u64, bytes: &mut [u8], block: Order) {
        for (i, bytes) in bytes.chunks_exact_mut(block.bytes()).enumerate() {
            let slot = slot + (i * block.pages()) as u64;
            let number = self.seal.number();
            let tag = self.seal.close(raw_bound(slot, number, block), bytes);
            // SAFETY: the slots are the caller's, so nobody reads or writes their marks.
            unsafe { self.mark(slot).write(Mark { number, tag }) };
        }
    }

    /// Seals one packed object, whose payload of `len` bytes lies behind the head in `bytes`; it
    /// goes to `place`.
    pub fn seal_packed(&self, place: Place, fields: u32, len: usize, bytes: &mut [u8]) {
        let number = self.seal.number();
        let (head, payload) = bytes.split_at_mut(HEAD_BYTES);
        let tag = self.seal.close(packed_bound(place, number, fields), &mut payload[..len]);
        payload[len..].fill(0);
        head[..8].copy_from_slice(&number.to_le_bytes());
        head[8..12].copy_from_slice(&fields.to_le_bytes());
        head[12..16].copy_from_slice(&(len as u32).to_le_bytes());
        head[16..].copy_from_slice(&tag);
    }

    /// A write of the first `len` bytes of a buffer to the run at `slot`.
    pub fn write_of(&self, buffer: usize, slot: u64, len: usize) -> Transfer {
        debug_assert!(len <= self.buffer_bytes && buffer < WRITE_BUFFERS);
        // SAFETY: the buffer lies in the zone.
        let at = unsafe { self.buffers.as_ptr().add(buffer * self.buffer_bytes) };
        Transfer::new(Direction::Write, slot * PAGE_SIZE as u64, Page::at(at), len)
    }

    /// Does writes that [`Swap::write_of`] made.
    ///
    /// # Safety
    /// - The caller has taken the buffers and the runs.
    pub unsafe fn write(&self, writes: &mut [Transfer]) {
        // SAFETY: as the caller says; slots are read only through handles, which nobody has for a
        // run that is written to.
        unsafe { self.disk.transfer(writes) };
        let Some(tier) = &self.tier else { return };
        for write in writes.iter().filter(|w| w.result.is_ok()) {
            tier.written(write.offset / PAGE_SIZE as u64, write.len / PAGE_SIZE);
        }
    }

    /// Notes that the file is full: no write is tried for a while.
    pub fn note_full(&self) {
        self.retry_at.store(memfold_sys::thread::now_ns() + RETRY_NS, Relaxed);
    }

    /// Notes that a write has failed: none is tried for a while. Warns once.
    pub fn note_failure(&self, errno: Errno) {
        self.note_full();
        if !self.warned.swap(true, Relaxed) {
            let why = alloc::format!("{errno}");
            memfold_sys::raw::warn(&[
                "memfold: warning: swap file ",
                self.disk.name(),
                ": a write failed (",
                &why,
                "); the data stays in memory\n",
            ]);
        }
    }

    // Reading.

    /// Reads a run of raw blocks, which lie one behind the other from `place`, to `to`, and opens
    /// them.
    ///
    /// # Errors
    /// [`ReadError`]; what is at `to` is not to be used then.
    ///
    /// # Safety
    /// - `to` has room for `count` blocks that nobody else touches; the objects are not freed
    ///   meanwhile.
    pub unsafe fn read_raw(
        &self,
        place: Place,
        count: usize,
        block: Order,
        to: *mut Page,
    ) -> Result<(), ReadError> {
        let len = count * block.bytes();
        // SAFETY: the caller vouches for the memory.
        unsafe { self.read(place.slot, to, len)? };
        for i in 0..count {
            let slot = place.slot + (i * block.pages()) as u64;
            // SAFETY: the mark was written before the object was entered; `to` has room, as the
            // caller says.
            let opened = unsafe {
                let mark = self.mark(slot).read();
                let bytes = core::slice::from_raw_parts_mut(
                    to.add(i * block.pages()).cast(),
                    block.bytes(),
                );
                self.seal.open(raw_bound(slot, mark.number, block), bytes, &mark.tag)
            };
            if !opened {
                return Err(self.damaged(slot));
            }
        }
        Ok(())
    }

    /// Reads the bytes of the file from `first` to `last`, which hold packed objects, and calls
    /// `each` with a function that opens one of them: it gives fields and payload.
    ///
    /// # Errors
    /// [`ReadError`].
    ///
    /// # Panics
    /// If they don't fit a buffer.
    pub fn read_packed<R>(
        &self,
        first: Place,
        last: Place,
        each: impl FnOnce(&mut Packed<'_>) -> Result<R, ReadError>,
    ) -> Result<R, ReadError> {
        let len = ((last.slot - first.slot) as usize + last.slots()) * PAGE_SIZE;
        assert!(len <= self.buffer_bytes);
        let buffer = self.take_buffer(WRITE_BUFFERS..BUFFERS, true).expect("it waits");
        // SAFETY: the buffer is this thread's.
        let result = unsafe {
            let bytes = self.buffer(buffer);
            self.read(first.slot, Page::at(bytes.as_mut_ptr()), len).and_then(|()| {
                each(&mut Packed { swap: self, slot: first.slot, bytes: &mut bytes[..len] })
            })
        };
        self.give_buffer(buffer);
        result
    }

    /// The most bytes that [`Swap::read_packed`] reads at once.
    pub fn packed_max(&self) -> usize {
        self.buffer_bytes
    }

    /// # Safety
    /// - As for [`Disk::transfer`].
    unsafe fn read(&self, slot: u64, to: *mut Page, len: usize) -> Result<(), ReadError> {
        if let Some(tier) = &self.tier {
            // SAFETY: as the caller says.
            let result = unsafe { tier.read(&*self.disk, slot, len / PAGE_SIZE, to) };
            return result.map_err(|why| match why {
                Why::File(e) => self.unread(slot, e),
                Why::Remote(number, failure) => {
                    let why = Some(alloc::format!("{failure}"));
                    ReadError { name: tier.name().into(), slot, object: Some(number), why }
                }
            });
        }
        let mut read = [Transfer::new(Direction::Read, slot * PAGE_SIZE as u64, to, len)];
        // SAFETY: as the caller says. Whoever reads holds a handle, so no write goes to these
        // slots.
        unsafe { self.disk.transfer(&mut read) };
        read[0].result.map_err(|e| self.unread(slot, e))
    }

    fn unread(&self, slot: u64, errno: Errno) -> ReadError {
        ReadError {
            name: self.disk.name().into(),
            slot,
            object: None,
            why: Some(alloc::format!("{errno}")),
        }
    }

    /// The error for an object that is not what was written.
    pub fn damaged(&self, slot: u64) -> ReadError {
        let far = self.tier.as_ref().and_then(|tier| Some((tier.name(), tier.object_of(slot)?)));
        let (name, object) =
            far.map_or((self.disk.name(), None), |(name, number)| (name, Some(number)));
        ReadError { name: name.into(), slot, object, why: None }
    }

    fn mark(&self, slot: u64) -> *mut Mark {
        let end = (slot as usize + 1) * size_of::<Mark>();
        assert!(end <= self.marks.len());
        let done = self.marks.need(&self.edge, 0, self.marks.len(), end);
        if done.is_err() {
            NoPromise::end("the table of the swap file");
        }
        // SAFETY: the mark lies in the zone.
        unsafe { self.marks.as_ptr().cast::<Mark>().add(slot as usize) }
    }
}

/// Packed objects that were read.
pub struct Packed<'a> {
    swap: &'a Swap,
    slot: u64,
    bytes: &'a mut [u8],
}

impl Packed<'_> {
    /// Opens one object; gives its fields and its payload.
    ///
    /// # Errors
    /// [`ReadError`]: it is not what was written.
    pub fn open(&mut self, place: Place) -> Result<(u32, &[u8]), ReadError> {
        let start = (place.start() - self.slot * PAGE_SIZE as u64) as usize;
        let (head, payload) = self.bytes[start..start + place.len].split_at_mut(HEAD_BYTES);
        let word = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().expect("4 bytes"));
        let number = u64::from_le_bytes(head[..8].try_into().expect("8 bytes"));
        let (fields, len) = (word(8), word(12) as usize);
        let tag: &[u8; TAG_BYTES] = head[16..].try_into().expect("16 bytes");
        if len > payload.len() || payload.len() - len >= UNIT_BYTES {
            return Err(self.swap.damaged(place.slot));
        }
        let payload = &mut payload[..len];
        if !self.swap.seal.open(packed_bound(place, number, fields), payload, tag) {
            return Err(self.swap.damaged(place.slot));
        }
        Ok((fields, payload))
    }
}

fn raw_bound(slot: u64, number: u64, block: Order) -> Bound {
    Bound { place: slot * PAGE_SIZE as u64, number, header: 1 << 32 | block.get() as u64 }
}

fn packed_bound(place: Place, number: u64, fields: u32) -> Bound {
    Bound { place: place.start(), number, header: 2 << 32 | fields as u64 }
}
