//! Reclaim by background threads, ahead of what the program's own threads need.
use crate::area::lock::{AreaLock, AreasAccess};
use crate::backing::Backing;
use crate::config::Config;
use crate::folio::index::{FolioId, ShardGuard};
use crate::folio::lru::LruList;
use crate::folio::table::FolioTable;
use crate::limits::Limits;
use crate::limits::gauges::Gauges;
use crate::memory::budget::Budget;
use crate::memory::mapper::Mapper;
use crate::memory::unshare::ToUnshare;
use crate::parts::EngineParts;
use crate::reclaim::save::Saver;
use crate::reclaim::{Reclaim, ReclaimProgress};
use crate::stats_place::StatsPlace;
use memfold_os::raw::read_if_there;
use memfold_os::units::PAGE_SIZE;
use memfold_stats as stats;
use memfold_store::looks_dense;
use memfold_swap::Swap;

/// The rounds of a background thread.
#[derive(Copy, Clone)]
pub struct Background<'a> {
    config: &'a Config,
    stats: &'a StatsPlace,
    table: &'a FolioTable,
    mapper: &'a Mapper,
    backing: &'a Backing,
    budget: &'a Budget,
    areas: &'a AreaLock,
    to_unshare: &'a ToUnshare,
    engine: &'a EngineParts,
}

impl<'a> Background<'a> {
    /// Returns the walk over the parts of an engine.
    #[inline]
    pub(crate) fn new(engine: &'a EngineParts) -> Background<'a> {
        Background {
            config: &engine.config,
            stats: &engine.stats,
            table: &engine.table,
            mapper: &engine.mapper,
            backing: &engine.backing,
            budget: &engine.budget,
            areas: &engine.areas,
            to_unshare: &engine.to_unshare,
            engine,
        }
    }

    /// Runs one background round: saves a dirty folio, or gives back memory past the target.
    /// Returns whether more may be due.
    pub fn reclaim_in_background(&self) -> bool {
        let (limits, reclaim) = (Limits::new(self.engine), Reclaim::new(self.engine));
        self.unshare();
        let saver = Saver::new(self.engine);
        let is_saved = saver.save_next(AreasAccess::Work(&self.areas.work()), LruList::Dirty, true);
        let over = limits.excess();
        // A denser pool is worth the time if the bounds cannot be kept or folding saves nothing.
        let dense = if limits.is_below_least() || limits.stored_takes_more() {
            self.backing.store().tidy() + self.backing.store().trim()
        } else {
            0
        };
        if over > 0 && self.trim(over) == 0 {
            let (frames, slack) =
                if self.mapper.drops_clean() { (0, 1) } else { (over.min(512), 0) };
            let progress = reclaim.reclaim(AreasAccess::Work(&self.areas.work()), frames, slack);
            if self.mapper.drops_clean() {
                // A round may end before it has freed enough.
                return progress == ReclaimProgress::Freed || is_saved || limits.excess() < over;
            }
            return (progress == ReclaimProgress::Freed && self.trim(over) > 0) || is_saved;
        }
        if over == 0 && limits.is_retry_due() {
            return reclaim.evict(&self.areas.read()) == ReclaimProgress::Freed || is_saved;
        }
        // With nothing else to do, compaction takes one step at a time. So a thread that needs a
        // window gets it in between.
        let tidied =
            if over == 0 && !is_saved && dense == 0 { self.backing.store().tidy() } else { dense };
        stats::add(&self.stats.compacted_bytes, tidied);
        Gauges::new(self.engine).publish();
        over > 0 || is_saved || tidied > 0
    }

    /// Makes pages private that could not be evicted because a fork shares them. Pages that are
    /// missing by now are folded, or were never touched. They must not be loaded for this. A range
    /// that has ended, or that a device has pinned, stays shared.
    fn unshare(&self) {
        let pages = self.to_unshare.take();
        // More processes may share them than at the time at which they were met.
        if self.to_unshare.stays() {
            return;
        }
        for page in pages {
            if self.config.delivery.is_inline() {
                self.unshare_managed(page);
            } else if self.mapper.space().is_populated(page) {
                // No lock is held: if the page goes missing now, this waits for a handler.
                let _ = self.mapper.space().unshare(page, PAGE_SIZE);
            }
        }
    }

    /// Makes a managed page private. It locks the shard, so that the page is not folded meanwhile.
    /// While mremap moves a page, the page is not registered, and zeros would be mapped in its
    /// place. No fault is waited for here. A page that no store would take stays shared.
    fn unshare_managed(&self, page: usize) {
        let areas = self.areas.read();
        let Some(area) = areas.find(page) else { return };
        let key = area.key_of(page);
        let mut guard = self.table.lock(key);
        let folio_id = self.table.find(&guard, key);
        let Some(id) = folio_id.filter(|id| self.table.get(&guard, *id).is_here(key)) else {
            return;
        };
        if !self.mapper.space().is_populated(page) {
            return;
        }
        if self.is_private_in_vain(page) {
            return self.keep_shared(&mut guard, id, key, LruList::Dense);
        }
        // A clean page is private, and stays protected.
        let is_clean = self.table.is_clean(self.table.get(&guard, id));
        let is_charged = self.to_unshare.charges_copies() && !is_clean;
        if is_charged {
            let _ = self.mapper.space().protect(page, PAGE_SIZE, false);
        }
        match self.mapper.space().unshare(page, PAGE_SIZE) {
            Ok(()) if is_charged => self.budget.quota().sub_others(PAGE_SIZE as u64),
            Ok(()) => {}
            // The program has made it read-only, and the kernel copies it only for a write.
            Err(_) => self.keep_shared(&mut guard, id, key, LruList::Pinned),
        }
    }

    /// Refuses the block of a page that stays shared, for the reason that `list` names.
    fn keep_shared(&self, guard: &mut ShardGuard<'_>, id: FolioId, key: u64, list: LruList) {
        let order = self.table.get(guard, id).order().min(self.config.block_order);
        let id = self.table.carve(guard, id, key, order, self.backing);
        self.table.get(guard, id).refused.set(list);
        self.table.list_by_state(guard, id);
        self.budget.note_refusal();
    }

    /// Returns whether a mapped page, shared by a fork, would be refused once it was private. Then
    /// a copy of it would be made for nothing, in each of the processes that share it.
    fn is_private_in_vain(&self, page: usize) -> bool {
        if !self.backing.store().refuses_incompressible()
            || self.backing.swap().is_some_and(Swap::accepts_writes)
        {
            return false;
        }
        let mut bytes = [0; PAGE_SIZE];
        // SAFETY: `bytes` has this length, and belongs to this function.
        let outcome = unsafe { read_if_there(page, bytes.as_mut_ptr(), PAGE_SIZE) };
        outcome == Ok(PAGE_SIZE) && looks_dense(&bytes)
    }

    /// Gives free frames back to the kernel. `areas` must not be locked. Where discards are
    /// reported, this waits until a handler has read the report, and that handler may be waiting
    /// for `areas` to apply an earlier one.
    fn trim(&self, pages: u64) -> u64 {
        self.mapper.trim(pages)
    }
}
