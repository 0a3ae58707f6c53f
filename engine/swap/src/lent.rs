//! Slots that children of fork read. Slots in use when a copy of the process is made keep their
//! bytes until the child, and all processes copied from it, have ended. The kernel reports that
//! (`memfold_os::memory::descendant_watch`).
use crate::cluster::{Clusters, SlotSet};
use alloc::vec::Vec;
use core::mem::forget;
use memfold_os::Errno;
use memfold_os::memory::descendant_watch::DescendantWatch;
use memfold_os::sync::Mutex;

/// Ancestors' files that a process reads, at most.
pub const ANCESTORS_MAX: u64 = 4;
/// Sets, at most. Further children at the same time share the last set. A slot has one reference
/// for each set, besides at most 86 objects, so its count is large enough.
const SETS_MAX: usize = 16;

struct LentSet {
    watch: DescendantWatch,
    slots: SlotSet,
    /// Whether the service knows the watch.
    is_known: bool,
}

/// Sets of slots, one for each copy that may still run.
#[derive(Default)]
pub struct LentSlots(Mutex<Vec<LentSet>>);

impl LentSlots {
    /// Retains the slots in use, for a copy of the process that is about to be made. The calling
    /// thread must have the engine's descriptors. `tell`, if there is one, passes a new watch to
    /// the service.
    ///
    /// # Errors
    /// The error of the kernel, or of `tell`. No slot is retained then.
    pub fn begin_copy(
        &self,
        clusters: &Clusters,
        tell: Option<impl FnOnce(&DescendantWatch) -> Result<(), Errno>>,
    ) -> Result<(), Errno> {
        self.collect(clusters);
        let mut sets = self.0.lock();
        if sets.len() < SETS_MAX {
            sets.push(LentSet {
                watch: DescendantWatch::new()?,
                slots: SlotSet::default(),
                is_known: false,
            });
        }
        let last = sets.last_mut().expect("just looked");
        let outcome = last.watch.begin_copy().and_then(|()| match tell {
            Some(tell) if !last.is_known => tell(&last.watch).inspect(|()| last.is_known = true),
            _ => Ok(()),
        });
        match outcome {
            Ok(()) => clusters.retain_used(&mut last.slots),
            // A set that retains no slot is dropped by the next `collect`.
            Err(_) => last.watch.end_copy(),
        }
        outcome
    }

    /// Ends a copy in the parent, after it was made or failed.
    pub fn end_copy(&self) {
        self.0.lock().iter().for_each(|set| set.watch.end_copy());
    }

    /// Forgets the parent's sets, in a child of fork.
    ///
    /// # Safety
    /// - The caller is the only thread of the process.
    pub unsafe fn begin_in_child(&self, clusters: &Clusters) {
        // SAFETY: the caller promises that it is the only thread, so no other thread holds the lock
        // or uses the sets.
        let sets = unsafe {
            self.0.reset();
            core::mem::take(self.0.peek_mut())
        };
        for LentSet { watch, slots, .. } in sets {
            clusters.release_set(&slots);
            // The watch's descriptor isn't in this process. Its mapping, if any, belongs to the
            // watch of this process.
            forget(watch);
        }
    }

    /// Releases slots that no child reads any more. The calling thread must have the engine's
    /// descriptors. Returns whether there were any.
    pub fn collect(&self, clusters: &Clusters) -> bool {
        let mut sets = self.0.lock();
        let before = sets.len();
        sets.retain(|set| {
            let over = set.watch.is_over();
            if over {
                clusters.release_set(&set.slots);
            }
            !over
        });
        sets.len() < before
    }

    /// Returns whether any slot of a group is lent. A group is 16 slots from a multiple of 16 on.
    pub fn has_group(&self, group: u64) -> bool {
        self.0.lock().iter().any(|set| set.slots.bits_of(group) != 0)
    }

    /// Returns whether any slot is lent.
    pub fn is_any(&self) -> bool {
        !self.0.lock().is_empty()
    }
}
