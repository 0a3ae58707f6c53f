//! Slabs: fixed-size records in a zone, addressed by a 32-bit id. Ids start at 1; 0 means none.
use core::marker::PhantomData;
use core::mem::size_of;
use core::ptr::NonNull;
use memfold_os::Errno;
use memfold_os::memory::zone::{NoPromise, Zone, ZoneEdge};
use memfold_os::sync::Mutex;
use memfold_os::sync::atomic::{
    AtomicU32, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};
use memfold_os::units::PAGE_SIZE;

/// A slab of `T` records, each of `count` consecutive `T`s. Freed records are reused, most recent
/// first.
pub struct Slab<T> {
    zone: Zone,
    edge: ZoneEdge,
    stride: usize,
    limit: u32,
    /// The first free record; 0 for none. Each free record holds the id of the next.
    free: Mutex<u32>,
    /// Records from this one on were never taken and may have no memory.
    fresh: AtomicU32,
    used: AtomicUsize,
    _records: PhantomData<T>,
}

// SAFETY: the slab only hands out raw places. Its users prove for each place which thread may read
// or write it.
unsafe impl<T> Sync for Slab<T> {}
// SAFETY: the slab only hands out raw places, and is bound to no thread.
unsafe impl<T> Send for Slab<T> {}

impl<T> Slab<T> {
    /// Makes room for `limit` records of `count` consecutive `T`s. It gets memory as it is used.
    ///
    /// # Errors
    /// The errors of [`Zone::reserve`].
    pub fn new(limit: u32, count: usize) -> Result<Slab<T>, Errno> {
        let stride = (size_of::<T>() * count).max(8);
        let len = (stride * (limit as usize + 1)).next_multiple_of(PAGE_SIZE);
        Ok(Slab {
            zone: Zone::reserve_growing(len, PAGE_SIZE)?,
            edge: ZoneEdge::default(),
            stride,
            limit,
            free: Mutex::new(0),
            fresh: AtomicU32::new(1),
            used: AtomicUsize::new(0),
            _records: PhantomData,
        })
    }

    /// Takes a record. Its bytes are undefined.
    ///
    /// Ends the process if all ids are taken, because the engine cannot describe more data. Ends it
    /// also if the system promises no more memory.
    pub fn take(&self) -> u32 {
        self.used.fetch_add(1, Relaxed);
        let mut free = self.free.lock();
        let id = *free;
        if id != 0 {
            // SAFETY: the record is free, so its first bytes hold the next free id, written by
            // `give`.
            *free = unsafe { self.place(id).cast::<u32>().read() };
            return id;
        }
        let id = self.fresh.load(Relaxed);
        if id > self.limit {
            // Callers that check `is_crowded` never get here.
            memfold_os::raw::end(
                "The index is full: managed memory has taken its last record (docs/limits.md, Fixed \
                 tables). Use a larger --block, which needs fewer records",
            );
        }
        let outcome =
            self.zone.need(&self.edge, 0, self.zone.len(), self.stride * (id as usize + 1));
        if outcome.is_err() {
            NoPromise::end("The index");
        }
        // Stored after the record has memory; written only under the lock.
        self.fresh.store(id + 1, Release);
        id
    }

    /// Frees a record.
    ///
    /// # Safety
    /// - `id` was taken from this slab, is freed once, and no thread uses it any more.
    pub unsafe fn give(&self, id: u32) {
        self.used.fetch_sub(1, Relaxed);
        let mut free = self.free.lock();
        // SAFETY: the caller hands the record over, so no other thread uses its bytes. A record has
        // at least 8 of them.
        unsafe { self.place(id).cast::<u32>().write(*free) };
        *free = id;
    }

    /// Returns the place of a record that was taken at some time. It has memory from then on.
    ///
    /// # Panics
    /// If the record was never taken.
    pub fn place(&self, id: u32) -> NonNull<T> {
        assert!(id != 0 && id < self.fresh.load(Acquire), "record {id} was never taken");
        // SAFETY: `stride * (limit + 1)` bytes are inside the zone, and `fresh` is at most one past
        // the limit.
        unsafe { NonNull::new_unchecked(self.zone.as_ptr().add(self.stride * id as usize).cast()) }
    }

    /// Returns the number of records in use.
    pub fn used(&self) -> usize {
        self.used.load(Relaxed)
    }

    /// Returns whether 7 of 8 of its records are in use.
    pub fn is_crowded(&self) -> bool {
        self.used() >= self.limit as usize / 8 * 7
    }

    /// Returns the bytes of the records in use.
    pub fn used_bytes(&self) -> usize {
        self.used() * self.stride
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::AssertUnwindSafe;

    #[test]
    fn ids_are_reused_and_counted() {
        let slab = Slab::<u64>::new(100, 3).unwrap();
        let (a, b) = (slab.take(), slab.take());
        assert_ne!(a, b);
        assert_eq!(slab.used_bytes(), 48);
        // SAFETY: `a` is taken and not used again.
        unsafe { slab.give(a) };
        assert_eq!(slab.take(), a);
    }

    #[test]
    fn slab_is_crowded_from_seven_eighths_on_and_its_end_is_said() {
        let slab = Slab::<u64>::new(16, 1).unwrap();
        let ids: Vec<u32> = (0..16)
            .map(|n| {
                assert_eq!(slab.is_crowded(), n >= 14, "{n}");
                slab.take()
            })
            .collect();
        let ended = std::panic::catch_unwind(AssertUnwindSafe(|| slab.take())).unwrap_err();
        let text = ended.downcast_ref::<String>().unwrap();
        assert!(text.contains("The index is full") && text.contains("--block"), "{text}");
        // SAFETY: the ids were taken above, and are not used any more.
        ids.into_iter().for_each(|id| unsafe { slab.give(id) });
    }
}
