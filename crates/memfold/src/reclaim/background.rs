//! What background threads reclaim, beside what the program's own threads do.
use crate::area::lock::AreasAccess;
use crate::folio::lru::LruList;
use crate::limits::Limits;
use crate::limits::gauges::Gauges;
use crate::parts::walk;
use crate::reclaim::save::Saver;
use crate::reclaim::{Reclaim, ReclaimProgress};
use crate::stats;
use memfold_store::looks_dense;
use memfold_swap::Swap;
use memfold_sys::raw::read_if_there;
use memfold_sys::units::PAGE_SIZE;

walk! {
    /// One round of a background thread.
    pub struct Background
}

impl Background<'_> {
    /// One background round: saves a dirty folio, or gives back memory past the target. Returns
    /// whether more may be due.
    pub fn reclaim_in_background(&self) -> bool {
        let limits = Limits(self.0);
        self.unshare();
        let saved =
            Saver(self.0).save_next(AreasAccess::Work(&self.areas.work()), LruList::Dirty, true);
        let over = limits.excess();
        // Where the bounds can't be kept, or folding saves nothing, a denser pool is worth the time.
        let dense = if limits.is_at_least() || limits.stored_takes_more() {
            self.backing.store().tidy() + self.backing.store().trim()
        } else {
            0
        };
        if over > 0 && self.trim(over) == 0 {
            let (frames, slack) =
                if self.mapper.drops_clean() { (0, 1) } else { (over.min(512), 0) };
            let progress =
                Reclaim(self.0).reclaim(AreasAccess::Work(&self.areas.work()), frames, slack);
            if self.mapper.drops_clean() {
                return progress == ReclaimProgress::Freed || saved;
            }
            return (progress == ReclaimProgress::Freed && self.trim(over) > 0) || saved;
        }
        if over == 0 && limits.is_retry_due() {
            return Reclaim(self.0).evict(&self.areas.read()) == ReclaimProgress::Freed || saved;
        }
        // With nothing else to do, one step of compaction at a time: whoever needs a window gets it
        // in between.
        let tidied =
            if over == 0 && !saved && dense == 0 { self.backing.store().tidy() } else { dense };
        stats::add(&self.stats.compacted_bytes, tidied);
        Gauges(self.0).publish();
        over > 0 || saved || tidied > 0
    }

    /// Makes private what could not leave because a fork shares it. What is missing by now is folded,
    /// or was never there: it must not be brought here for this. A range that has gone, or that a
    /// device has pinned, stays as it is.
    fn unshare(&self) {
        for page in self.to_unshare.take() {
            if self.is_inline() {
                self.unshare_managed(page);
            } else if self.mapper.space().is_populated(page) {
                // With no lock held: if the page goes missing now, this waits for a handler.
                let _ = self.mapper.space().unshare(page, PAGE_SIZE);
            }
        }
    }

    /// Nobody waits for a fault here. The shard is locked lest the page be folded meanwhile: while
    /// mremap moves it, it isn't registered, and zeros would come in its place. What no store would
    /// take stays shared.
    fn unshare_managed(&self, page: usize) {
        let areas = self.areas.read();
        let Some(area) = areas.find(page) else { return };
        let key = area.key_of(page);
        let mut guard = self.table.lock(key);
        let found = self.table.find(&guard, key);
        let Some(id) = found.filter(|id| self.table.get(&guard, *id).is_here(key)) else { return };
        if !self.mapper.space().is_populated(page) {
            return;
        }
        if self.is_private_in_vain(page) {
            let order = self.table.get(&guard, id).order().min(self.config.block_order);
            let id = self.table.carve(&mut guard, id, key, order, &self.backing);
            self.table.get(&guard, id).refused.set(LruList::Shared);
            self.table.list_by_state(&guard, id);
            self.budget.note_refusal();
        } else {
            let _ = self.mapper.space().unshare(page, PAGE_SIZE);
        }
    }

    /// Whether a page that is there, shared by a fork, would be refused once it was private: a copy
    /// of it would have been made for nothing, in each of the processes that share it.
    fn is_private_in_vain(&self, page: usize) -> bool {
        if !self.backing.store().refuses_incompressible()
            || self.backing.swap().is_some_and(Swap::accepts_writes)
        {
            return false;
        }
        let mut bytes = [0; PAGE_SIZE];
        // SAFETY: `bytes` is as long, and this function's own.
        let read = unsafe { read_if_there(page, bytes.as_mut_ptr(), PAGE_SIZE) };
        read == Ok(PAGE_SIZE) && looks_dense(&bytes)
    }

    /// Gives free frames back to the kernel. `areas` must not be locked: where discards are
    /// reported, this waits until a handler has read the report, and that handler may be waiting to
    /// apply another one.
    fn trim(&self, pages: u64) -> u64 {
        self.mapper.trim(pages)
    }
}
