//! [`Swap`]: objects in the swap file. It allocates slots, seals, writes and reads objects, and
//! passes the cold end of the file to the remote store.
mod buffers;
mod fork;
mod objects;
mod slots;

pub use objects::{HEAD_BYTES, PackedObjects, ReadError};

use crate::ObjectLocation;
use crate::cluster::{CLUSTER_SLOTS, Clusters};
use crate::disk::Disk;
use crate::lent::{ANCESTORS_MAX, LentSlots};
use crate::location::SLOTS_MAX;
use crate::remote::Remote;
use crate::seal::{RawSeal, Sealer};
use crate::swap::buffers::{BufferPurpose, Buffers};
use crate::tier::{RemoteCounts, Tier, TierBounds};
use crate::write_queue::WriteQueue;
use alloc::boxed::Box;
use alloc::string::String;
use alloc::sync::Arc;
use core::time::Duration;
use memfold_os::Errno;
use memfold_os::memory::zone::{Zone, ZoneEdge};
use memfold_os::sync::Mutex;
use memfold_os::sync::atomic::{
    AtomicBool, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};
use memfold_os::thread::delegate_queue::DelegateQueue;
use memfold_os::units::{Order, PAGE_SIZE};

/// After a failed write or growth, no other is tried for this long.
const RETRY_NS: u64 = 100_000_000;

/// Sizes and bounds of a swap file.
#[derive(Copy, Clone, Debug)]
pub struct SwapBounds {
    /// Maximum size of the file, bytes.
    pub size_bytes: u64,
    /// Bytes that must stay free on its file system.
    pub keep_free_bytes: u64,
    /// Bytes in the remote store, at most.
    pub remote_bytes: u64,
    /// Percent of the file in use above which its cold end moves there.
    pub mark_percent: u64,
    /// Data in the remote store is lost if the service doesn't refresh it for this long.
    pub remote_expiry: Duration,
    /// The caller's limit, bytes. Buffers take a small part of it.
    pub limit_bytes: u64,
    /// The largest run of raw objects.
    pub run_order_max: Order,
}

/// A swap file with its slots, seals and buffers.
///
/// Equation: each slot in use has one reference for each of these:
/// - an object in it,
/// - the caller that has allocated it and not released it yet,
/// - a set of slots that children of fork read.
pub struct Swap {
    // Declared first, so that it is dropped before the buffers that it knows.
    disk: Box<dyn Disk>,
    sealer: Sealer,
    clusters: Clusters,
    tier: Option<Tier>,
    /// A [`RawSeal`] for each slot.
    raw_seals: Zone,
    edge: ZoneEdge,
    buffers: Buffers,
    bounds: SwapBounds,
    growth: Mutex<()>,
    retry_at: AtomicU64,
    objects: AtomicU64,
    /// Slots that became free since emptied clusters were last discarded.
    freed: AtomicU64,
    warned: AtomicBool,
    warned_of_full_disk: AtomicBool,
    /// Whether the file is closed to further writes.
    is_closed: AtomicBool,
    /// The slots that children of fork read.
    lent: LentSlots,
    /// Number of ancestors' files that are read here.
    ancestors: AtomicU64,
    /// In gate delivery: the queue to the threads that have the engine's descriptors.
    delegate_queue: Option<Arc<DelegateQueue>>,
    queue: WriteQueue,
}

impl Swap {
    /// Makes an empty swap file on `disk`, whose cold end moves to `remote`.
    ///
    /// # Errors
    /// No random bytes for the key, or no address space.
    pub fn new(
        disk: Box<dyn Disk>,
        remote: Option<Box<dyn Remote>>,
        encrypt: bool,
        mut bounds: SwapBounds,
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
        Ok(Swap {
            disk,
            sealer: Sealer::new(encrypt)?,
            clusters: Clusters::new(),
            tier,
            raw_seals: Zone::reserve_growing(
                // A child of fork has slots of its ancestors too.
                ((ANCESTORS_MAX as usize + 1) * slots.max(1) * size_of::<RawSeal>())
                    .next_multiple_of(PAGE_SIZE),
                PAGE_SIZE,
            )?,
            edge: ZoneEdge::new(),
            buffers: Buffers::new(bounds.limit_bytes, bounds.run_order_max)?,
            bounds,
            growth: Mutex::new(()),
            retry_at: AtomicU64::new(0),
            objects: AtomicU64::new(0),
            freed: AtomicU64::new(0),
            warned: AtomicBool::new(false),
            warned_of_full_disk: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
            lent: LentSlots::default(),
            ancestors: AtomicU64::new(0),
            delegate_queue: None,
            queue: WriteQueue::default(),
        })
    }

    /// Makes calls that need a descriptor of the engine go through the queue.
    pub fn with_delegate_queue(self, queue: Option<Arc<DelegateQueue>>) -> Swap {
        Swap { delegate_queue: queue, ..self }
    }

    /// Returns the queue of the thread that writes.
    pub fn queue(&self) -> &WriteQueue {
        &self.queue
    }

    /// Ends the threads that write and that demote, when they have finished queued work.
    pub fn stop(&self) {
        self.queue.stop();
        self.tier.iter().for_each(Tier::stop);
    }

    /// Undoes [`Swap::stop`]: the threads are about to be started again.
    pub fn resume(&self) {
        self.queue.resume();
        self.tier.iter().for_each(Tier::resume);
    }

    // The remote store.

    /// Notes that a thread calls [`Swap::demote`] from now on. Returns `false`, and notes nothing,
    /// if there is no remote store.
    pub fn set_demoter(&self) -> bool {
        self.tier.iter().for_each(Tier::set_demoter);
        self.tier.is_some()
    }

    /// Runs one round of demotion: moves the coldest slots to the remote store until the file is
    /// below its mark. With `wait`, sleeps until there is work, and after failures. Returns `false`
    /// after [`Swap::stop`], without a remote store, or, without `wait`, if there was no work.
    pub fn demote(&self, wait: bool) -> bool {
        self.tier.as_ref().is_some_and(|tier| {
            if wait {
                tier.wait_for_work();
            }
            tier.run_round(&*self.disk, &self.clusters, &self.lent, wait)
        })
    }

    /// Returns the counts of pages moved to and read from the remote store, and resets them.
    pub fn take_remote_counts(&self) -> RemoteCounts {
        self.tier.as_ref().map_or(RemoteCounts::default(), Tier::take_counts)
    }

    // Writes that fail.

    /// Returns whether a write may be tried now: no write has failed lately.
    pub fn accepts_writes(&self) -> bool {
        if self.is_closed.load(SeqCst) {
            return false;
        }
        let retry_at = self.retry_at.load(Relaxed);
        retry_at == 0 || memfold_os::thread::now_ns() >= retry_at
    }

    /// Records that the file is full: no write is tried for a while.
    pub fn note_full(&self) {
        self.retry_at.store(memfold_os::thread::now_ns() + RETRY_NS, Relaxed);
    }

    /// Records that a write has failed: no write is tried for a while. Warns once.
    pub fn note_failure(&self, errno: Errno) {
        self.note_full();
        if slots::is_lack_of_space(errno) {
            self.warn_of_full_disk();
        } else if !self.warned.swap(true, Relaxed) {
            let why = alloc::format!("{errno}");
            memfold_os::raw::warn(&[
                "memfold: warning: Writing to the swap file ",
                self.disk.name(),
                " failed (",
                &why,
                "). The data stays in memory\n",
            ]);
        }
    }

    // Buffers.

    /// Takes a buffer to write from. With `wait`, sleeps until there is one.
    pub fn take_write_buffer(&self, wait: bool) -> Option<usize> {
        self.take_buffer(BufferPurpose::Write, wait)
    }

    fn take_buffer(&self, purpose: BufferPurpose, wait: bool) -> Option<usize> {
        // SAFETY: the disk is the same each time. Fields are dropped in the order of their
        // declaration, so it is dropped before the buffers.
        unsafe { self.buffers.take(&*self.disk, purpose, wait) }
    }

    /// Gives a buffer back.
    pub fn give_buffer_back(&self, buffer: usize) {
        self.buffers.give_back(buffer);
    }

    /// Returns the bytes of a buffer.
    ///
    /// # Safety
    /// - The caller has taken the buffer, and makes no second slice of it.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn buffer_mut(&self, buffer: usize) -> &mut [u8] {
        // SAFETY: the buffer has this length, and is mapped as long as `self` lives. By the
        // caller's promise no other slice of it exists.
        unsafe {
            core::slice::from_raw_parts_mut(
                self.buffers.start_of(buffer),
                self.buffers.buffer_bytes(),
            )
        }
    }

    // Figures.

    /// Returns the order of the largest run of slots that one buffer holds.
    pub fn run_order_max(&self) -> Order {
        Order::covering(self.buffers.buffer_bytes()).unwrap_or(Order::MAX)
    }

    /// Returns the number of objects in the file.
    pub fn objects(&self) -> u64 {
        self.objects.load(Relaxed)
    }

    /// Returns the bytes of the file in use.
    pub fn used_bytes(&self) -> u64 {
        (self.clusters.used() * PAGE_SIZE as u64).saturating_sub(self.remote_bytes())
    }

    /// Returns the bytes in the remote store.
    pub fn remote_bytes(&self) -> u64 {
        self.tier.as_ref().map_or(0, |tier| tier.remote_slots() * PAGE_SIZE as u64)
    }

    /// Returns whether the first bytes of an object are in the remote store.
    pub fn is_remote(&self, location: ObjectLocation) -> bool {
        self.tier.as_ref().is_some_and(|tier| tier.object_of(location.slot).is_some())
    }

    /// Returns whether any slot is free.
    pub fn has_room(&self) -> bool {
        self.clusters.used() < self.clusters.slots() - self.clusters.inherited()
    }

    /// Returns whether more than half of the room in file and remote store is in use.
    pub fn is_half_full(&self) -> bool {
        let most =
            self.tier.as_ref().map_or(self.bounds.size_bytes / PAGE_SIZE as u64, Tier::slots_max);
        self.clusters.used() > most / 2
    }

    /// Returns the bytes of memory that buffers and tables take, at most.
    pub fn memory_bytes(&self) -> u64 {
        self.buffers.memory_bytes() + self.table_bytes()
    }

    /// Returns the bytes of memory that buffers take from the first write on.
    pub fn buffer_bytes_max(&self) -> u64 {
        self.buffers.bytes_max()
    }

    /// Returns the bytes of memory that tables take, at most.
    pub fn table_bytes(&self) -> u64 {
        let per_cluster = (CLUSTER_SLOTS + 128) as u64;
        let slots = self.clusters.slots();
        let tier = self.tier.as_ref().map_or(0, |tier| tier.memory_bytes(slots));
        tier + slots / CLUSTER_SLOTS as u64 * per_cluster
    }

    /// Verifies the slots.
    ///
    /// # Errors
    /// The first condition that does not hold.
    pub fn check(&self) -> Result<(), String> {
        self.clusters.check()?;
        self.tier.as_ref().map_or(Ok(()), |tier| tier.check(&self.clusters))
    }
}
