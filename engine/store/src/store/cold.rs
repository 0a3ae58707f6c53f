//! Cold objects: candidates for writeback or recompression (M9, Z10).
use crate::format;
use crate::handle::{Handle, ObjectName};
use crate::pool::Pool;
use crate::pool::entry::ObjectHeader;
use crate::pool::mark::{HUGE, ObjectMark, REFERENCED, SweepHand, TRIED};
use crate::store::Store;
use memfold_os::sync::atomic::Ordering::*;
use memfold_os::units::Order;

/// An object that may be written back or compressed again.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct ColdObject {
    /// Its handle at the time of the look. It may be dead by now; its owner knows.
    pub handle: Handle,
    /// The page key of the block: the key of its folio at the save, plus the page of the block in
    /// it.
    pub key: u64,
    /// The block's order.
    pub order: Order,
    /// Payload bytes, and their checksum.
    pub stored_bytes: u32,
    pub(crate) checksum: u32,
    /// Ticks since it was last loaded or saved, at most 65535; [`Store::tick`] counts them.
    pub idle_ticks: u16,
    /// It did not compress and is stored raw.
    pub is_huge: bool,
    /// A stronger codec was tried on it.
    pub is_tried: bool,
    /// All its pages are one repeated word.
    pub is_same: bool,
}

impl Store {
    /// Advances the clock of idle times; the caller chooses the length of a tick. Returns the new
    /// time.
    pub fn tick(&self) -> u16 {
        self.clock.fetch_add(1, Relaxed).wrapping_add(1)
    }

    /// Returns the time of the clock of [`Store::tick`].
    pub fn now(&self) -> u16 {
        self.clock.load(Relaxed)
    }

    /// Returns what [`Store::each_object`] reports about one object; `None` if there is no such
    /// object.
    pub fn object(&self, handle: Handle) -> Option<ColdObject> {
        let name = handle.object()?;
        let (cold, ..) = self.object_at(self.pools.get(name.pool as usize)?, name.index)?;
        (cold.handle == handle).then_some(cold)
    }

    /// Returns whether the handle still names the same bytes. The handle alone does not show that:
    /// it names another object again when its entry was reused 2^14 times.
    pub fn is_still(&self, cold: &ColdObject) -> bool {
        self.object(cold.handle).is_some_and(|now| {
            (now.checksum, now.stored_bytes) == (cold.checksum, cold.stored_bytes)
        })
    }

    /// Calls `each` with every object, until it returns `false`. Objects that are added or freed
    /// meanwhile may be left out. No lock is held meanwhile, as in [`Store::coldest`].
    pub fn each_object(&self, mut each: impl FnMut(&ColdObject) -> bool) {
        for pool in &self.pools {
            let all = (0..pool.entries.used_ever()).filter_map(|index| self.object_at(pool, index));
            for (cold, ..) in all {
                if !each(&cold) {
                    return;
                }
            }
        }
    }

    /// Names objects that were not used since the last look, oldest entries first, for writeback.
    /// Examines up to `scan` entries from where the last call ended; a used one gets a second
    /// chance. Returns how many of `out` it filled. A whole turn without any takes as many entries
    /// as there were ever objects at a time.
    ///
    /// No lock is held meanwhile. Before it acts, the owner checks that the handle is still the
    /// block's.
    pub fn coldest(&self, scan: usize, out: &mut [ColdObject]) -> usize {
        self.sweep(&mut self.shrinker.lock(), scan, out, |mark, _| !mark.test_and_clear(REFERENCED))
    }

    /// Names objects that a stronger codec may make smaller: those idle for at least
    /// `idle_ticks_min` ticks, and raw ones. It skips objects that were tried before or can't get
    /// smaller. It works like [`Store::coldest`], with its own turn.
    pub fn to_recompress(&self, idle_ticks_min: u16, scan: usize, out: &mut [ColdObject]) -> usize {
        let now = self.clock.load(Relaxed);
        self.sweep(&mut self.recompressor.lock(), scan, out, |mark, header| {
            let is_due = mark.has(HUGE) || mark.idle(now) >= idle_ticks_min;
            is_due && header.format != format::SAME && !mark.has(TRIED)
        })
    }

    /// Notes a new object's key and flags.
    pub(crate) fn mark_new(&self, handle: Handle, key: u64) {
        let Some(name) = handle.object() else { return };
        let pool = &self.pools[name.pool as usize];
        if let (Some(mark), Some(entry)) =
            (pool.marks.get(name.index), pool.entries.get(name.index))
        {
            let huge = if entry.header().format == format::NONE { HUGE } else { 0 };
            mark.begin(key, self.clock.load(Relaxed), REFERENCED | huge);
        }
    }

    /// Notes that an object was used.
    #[inline]
    pub(crate) fn touch(&self, handle: Handle) {
        let Some(name) = handle.object() else { return };
        let mark = self.pools.get(name.pool as usize).and_then(|pool| pool.marks.get(name.index));
        mark.inspect(|mark| mark.touch(self.clock.load(Relaxed)));
    }

    /// Returns the payload bytes of an object, 0 for none.
    pub fn payload_bytes(&self, handle: Handle) -> u64 {
        handle.object().map_or(0, |name| self.stored_len(name) as u64)
    }

    pub(crate) fn stored_len(&self, name: ObjectName) -> usize {
        let entry =
            self.pools.get(name.pool as usize).and_then(|pool| pool.entries.get(name.index));
        entry.map_or(0, |entry| entry.header().len as usize)
    }

    fn sweep(
        &self,
        hand: &mut SweepHand,
        scan: usize,
        out: &mut [ColdObject],
        mut wanted: impl FnMut(&ObjectMark, ObjectHeader) -> bool,
    ) -> usize {
        let (mut count, mut pools_done) = (0, 0);
        for _ in 0..scan {
            if count == out.len() {
                break;
            }
            let pool = &self.pools[hand.pool % self.pools.len()];
            if hand.index >= pool.entries.used_ever() {
                *hand = SweepHand { pool: (hand.pool + 1) % self.pools.len(), index: 0 };
                pools_done += 1;
                if pools_done > self.pools.len() {
                    break;
                }
                continue;
            }
            let index = hand.index;
            hand.index += 1;
            if let Some((cold, mark, header)) = self.object_at(pool, index)
                && wanted(mark, header)
            {
                out[count] = cold;
                count += 1;
            }
        }
        count
    }

    /// Returns the object of an entry, if it has one.
    fn object_at<'a>(
        &self,
        pool: &'a Pool,
        index: u32,
    ) -> Option<(ColdObject, &'a ObjectMark, ObjectHeader)> {
        let (entry, mark) = (pool.entries.get(index)?, pool.marks.get(index)?);
        let place = entry.snapshot(index).ok()?;
        let header = entry.header();
        if !place.is_live() || header.format == format::BUILDING {
            return None;
        }
        let name = ObjectName { pool: pool.number, index, generation: place.generation() };
        let cold = ColdObject {
            handle: Handle::of_object(name),
            key: mark.key(),
            order: Order::new(header.order)?,
            stored_bytes: header.len,
            checksum: header.checksum,
            idle_ticks: mark.idle(self.clock.load(Relaxed)),
            is_huge: mark.has(HUGE),
            is_tried: mark.has(TRIED),
            is_same: header.format == format::SAME,
        };
        Some((cold, mark, header))
    }
}

impl ColdObject {
    /// Initial value for arrays.
    pub const NONE: ColdObject = ColdObject {
        handle: Handle::NONE,
        key: 0,
        order: Order::PAGE,
        stored_bytes: 0,
        checksum: 0,
        idle_ticks: 0,
        is_huge: false,
        is_tried: false,
        is_same: false,
    };
}
