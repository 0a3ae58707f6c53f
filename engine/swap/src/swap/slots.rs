//! Allocation and release of slots, and the growth of the file.
use crate::cluster::{CLUSTER_SLOTS, SearchScope};
use crate::location::{ObjectLocation, SLOTS_MAX};
use crate::swap::Swap;
use memfold_os::Errno;
use memfold_os::sync::atomic::Ordering::Relaxed;
use memfold_os::units::{Order, PAGE_SIZE};
use memfold_store::Handle;

/// The file grows by this many clusters at a time, and by fewer near its bounds.
const GROWTH_CLUSTERS: usize = 32;
/// Emptied clusters are discarded after this many slots became free.
const DISCARD_SLOTS: u64 = 8 * CLUSTER_SLOTS as u64;
const CLUSTER_BYTES: u64 = (CLUSTER_SLOTS * PAGE_SIZE) as u64;

/// Returns whether a file system refuses to store more.
pub(super) fn is_lack_of_space(errno: Errno) -> bool {
    matches!(errno, Errno::NOSPC | Errno::DQUOT)
}

impl Swap {
    /// Allocates a run of slots, and grows the file if it may. Returns `None` if there is no free
    /// run of this order.
    pub fn allocate(&self, order: Order) -> Option<u64> {
        let cpu = memfold_os::thread::current_cpu();
        loop {
            let slots = self.clusters.slots();
            if let Some(slot) = self.clusters.allocate(order, cpu, SearchScope::Own) {
                return self.claim(slot, order);
            }
            if !self.grow(slots) {
                return self
                    .clusters
                    .allocate(order, cpu, SearchScope::All)
                    .and_then(|slot| self.claim(slot, order));
            }
        }
    }

    /// Claims an allocated run for the file. Releases it if the file is at its bound.
    fn claim(&self, slot: u64, order: Order) -> Option<u64> {
        let Some(tier) = &self.tier else { return Some(slot) };
        let free = self.disk.free_bytes().unwrap_or(0).saturating_sub(self.bounds.keep_free_bytes);
        if tier.claim(&self.clusters, slot, order.pages(), free) {
            return Some(slot);
        }
        if free < PAGE_SIZE as u64 {
            self.warn_of_full_disk();
        }
        self.clusters.release(slot, order.pages());
        None
    }

    /// Releases slots that no child reads any more. Returns whether there were any.
    fn collect_lent(&self) -> bool {
        let collect = || self.lent.collect(&self.clusters);
        self.lent.is_any() && self.delegate_queue.as_ref().is_some_and(|queue| queue.run(collect))
    }

    /// Makes the file larger than `slots`, unless another thread did so already. Returns `false` if
    /// the file may not grow.
    fn grow(&self, slots: u64) -> bool {
        let _growing = self.growth.lock();
        if self.clusters.slots() != slots || self.collect_lent() {
            return true;
        }
        let cluster = CLUSTER_BYTES;
        let now = slots * PAGE_SIZE as u64;
        if let Some(tier) = &self.tier {
            // Only slots are added. The file's space is taken and given back slot by slot, as data
            // moves.
            let own = slots - self.clusters.inherited();
            let room = (tier.slots_max() - own) / CLUSTER_SLOTS as u64;
            let count = room.min(GROWTH_CLUSTERS as u64);
            let is_grown = count > 0 && self.disk.stretch(now + count * cluster).is_ok();
            if is_grown {
                self.clusters.grow(count as usize);
            }
            return is_grown;
        }
        let own = now - self.clusters.inherited() * PAGE_SIZE as u64;
        let room = (self.bounds.size_bytes.saturating_sub(own) / cluster)
            .min((SLOTS_MAX - slots) / CLUSTER_SLOTS as u64);
        let free = self.disk.free_bytes().unwrap_or(0).saturating_sub(self.bounds.keep_free_bytes)
            / cluster;
        let mut count = room.min(free).min(GROWTH_CLUSTERS as u64) as usize;
        let mut lacks_space = room > 0 && free == 0;
        while count > 0 {
            match self.disk.grow(now + count as u64 * cluster) {
                Ok(()) => {
                    self.clusters.grow(count);
                    return true;
                }
                Err(e) => lacks_space = is_lack_of_space(e),
            }
            count /= 4;
        }
        if lacks_space {
            self.warn_of_full_disk();
        }
        false
    }

    /// Warns once that the file system of the swap file has no space left for it.
    pub(super) fn warn_of_full_disk(&self) {
        // After an error the file is not full: the program has closed it.
        let Ok(free) = self.disk.free_bytes() else { return };
        if self.warned_of_full_disk.swap(true, Relaxed) {
            return;
        }
        let (why, other) = match free.saturating_sub(self.bounds.keep_free_bytes) < CLUSTER_BYTES
            && free >= CLUSTER_BYTES
        {
            true => (
                "has no more space than --swap-keep-free leaves free",
                ", or lower --swap-keep-free",
            ),
            false => ("is full", ""),
        };
        memfold_os::raw::warn(&[
            "memfold: warning: The file system of --swap ",
            self.disk.name(),
            " ",
            why,
            ". Data that does not fit stays in memory, so the limit may be exceeded, but no data is \
             lost. Free space there, or give a directory with more space",
            other,
            "\n",
        ]);
    }

    /// Releases a run that was allocated.
    pub fn release(&self, slot: u64, count: usize) {
        let freed_slots = self.clusters.release(slot, count) as u64;
        if self.freed.fetch_add(freed_slots, Relaxed) + freed_slots >= DISCARD_SLOTS {
            self.freed.store(0, Relaxed);
            self.queue.request_discard();
        }
    }

    /// Adds a written object at a location in a run that the caller has allocated and not released
    /// yet.
    pub fn insert(&self, location: ObjectLocation) {
        self.clusters.retain(location.slot, location.slots());
        self.objects.fetch_add(1, Relaxed);
    }

    /// Frees the object that a handle names, if it is in the file.
    pub fn free(&self, handle: Handle) {
        if let Some(location) = ObjectLocation::from_handle(handle) {
            self.objects.fetch_sub(1, Relaxed);
            self.release(location.slot, location.slots());
        }
    }

    /// Gives the space of emptied clusters back to the file system.
    pub fn discard(&self) {
        let mut ranges = [const { 0..0 }; 32];
        let count = self.clusters.begin_discard(&mut ranges);
        for range in &ranges[..count] {
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
}
