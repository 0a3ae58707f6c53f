//! What is managed: folios of memory that is adopted, parts that aren't managed, and all of it brought
//! home.
use crate::address_space::ranges::largest_aligned;
use crate::area::Areas;
use crate::folio::State;
use crate::pager::Pager;
use alloc::vec::Vec;
use memfold_sys::sync::atomic::Ordering::SeqCst;
use memfold_sys::thread::yield_now;
use memfold_sys::units::PAGE_SHIFT;

impl Pager {
    /// No folio reaches across either end of `[start, end)` (page numbers).
    pub(crate) fn cut(&self, areas: &Areas, start: u64, end: u64) {
        for page in [start, end] {
            if let Some(area) = areas.iter().find(|a| a.start < page && page < a.end) {
                self.unfold_across(page - area.start + area.key);
            }
        }
    }

    pub(crate) fn note_resident(&self, mut key: u64, end: u64) {
        while key < end {
            let order = largest_aligned(key, end, self.config.folio_order);
            let guard = self.shards.lock(key);
            let id = self.folios.create(&guard, key, order, State::Resident);
            self.index.insert(&guard, key, order, id);
            self.tally.map(order.pages() as u64);
            // It was counted as unmanaged until now.
            self.quota.sub_outside(order.bytes() as u64);
            self.list_by_state(&guard, id);
            drop(guard);
            key += order.pages() as u64;
        }
    }

    /// Whether an address is under management.
    pub fn manages(&self, addr: usize) -> bool {
        self.areas.read().find(addr).is_some()
    }

    /// The parts of `[start, end)` that are not under management.
    pub fn unmanaged_parts(&self, start: usize, end: usize) -> Vec<(usize, usize)> {
        let areas = self.areas.read();
        let mut parts = Vec::new();
        let mut at = start;
        for area in areas.iter() {
            let (s, e) = ((area.start as usize) << PAGE_SHIFT, (area.end as usize) << PAGE_SHIFT);
            if e <= at || s >= end {
                continue;
            }
            if s > at {
                parts.push((at, s));
            }
            at = e;
        }
        if at < end {
            parts.push((at, end));
        }
        parts
    }

    /// Brings every folded page back and keeps all in place until [`Pager::thaw`]: for a fork,
    /// whose child gets copies of the page table and no engine. Goes past the limit if it must.
    ///
    /// Called by a thread of the program, whose handlers still run; for a fork, no area may be
    /// added until `thaw`. No lock is held on return, so other threads of the program go on
    /// faulting: what they can get is first touches only.
    pub fn freeze(&self) {
        self.frozen.store(true, SeqCst);
        loop {
            self.need_at(0..usize::MAX);
            // Written: whoever was evicting or saving when the freeze began has ended.
            let areas = self.areas.write();
            if areas.iter().all(|a| self.is_home(a.key, a.key_end())) {
                return;
            }
            drop(areas);
            yield_now();
        }
    }

    /// Whether every folio of a range of keys is in the page table.
    pub(crate) fn is_home(&self, start: u64, end: u64) -> bool {
        let mut home = true;
        self.each_folio(start..end, |guard, id| {
            home &= self.folios.get(guard, id).state.get() == State::Resident;
        });
        home
    }

    /// Ends [`Pager::freeze`].
    pub fn thaw(&self) {
        self.to_unshare.note_fork();
        self.frozen.store(false, SeqCst);
        self.queue.reclaim();
    }
}
