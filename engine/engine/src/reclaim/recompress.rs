//! Recompression (M9): a stronger codec compresses cold blocks again, and blocks that did not
//! shrink.
//!
//! Meanwhile the block's folio is `Loading`. A touch waits, as for a load, and then loads the
//! block.
use crate::area::lock::AreaLock;
use crate::area::{Area, Areas};
use crate::backing::{Backing, BlockSlot};
use crate::config::Config;
use crate::folio::FolioState;
use crate::folio::index::FolioId;
use crate::folio::lru::LruList;
use crate::folio::table::FolioTable;
use crate::memory::budget::Budget;
use crate::parts::EngineParts;
use crate::requests::background::RequestQueue;
use crate::requests::pause::ForkPauses;
use crate::residency::Residency;
use crate::stats_place::StatsPlace;
use memfold_os::sync::atomic::Ordering::Relaxed;
use memfold_os::thread::now_ns;
use memfold_os::units::Order;
use memfold_stats as stats;
use memfold_store::{CodecSpec, CodecWorker, ColdObject, Handle};

/// Time from one turn to the next.
const TURN_NS: u64 = 20_000_000;
/// The store's tick.
const TICK_NS: u64 = 1_000_000_000;
/// The longest time from one turn to the next.
const REST_MOST_NS: u64 = 10_000_000_000;
/// Entries scanned, and blocks taken, at a time.
const SCAN: usize = 512;
const FEW: usize = 8;

/// A block that is being recompressed.
pub(crate) struct BlockClaim {
    id: FolioId,
    /// Index of the block in its folio.
    at: usize,
}

/// Compresses cold blocks again.
#[derive(Copy, Clone)]
pub struct Recompress<'a> {
    config: &'a Config,
    stats: &'a StatsPlace,
    table: &'a FolioTable,
    backing: &'a Backing,
    budget: &'a Budget,
    areas: &'a AreaLock,
    requests: &'a RequestQueue,
    pauses: &'a ForkPauses,
    recompress: Option<CodecSpec>,
    engine: &'a EngineParts,
}

impl<'a> Recompress<'a> {
    /// Returns the walk over the parts of an engine.
    #[inline]
    pub(crate) fn new(engine: &'a EngineParts) -> Recompress<'a> {
        Recompress {
            config: &engine.config,
            stats: &engine.stats,
            table: &engine.table,
            backing: &engine.backing,
            budget: &engine.budget,
            areas: &engine.areas,
            requests: &engine.requests,
            pauses: &engine.pauses,
            recompress: engine.recompress,
            engine,
        }
    }

    /// Runs recompression in a background thread until the queue is stopped.
    pub(crate) fn until_stopped(&self) {
        let Some(spec) = self.recompress else { return };
        let mut w = self.backing.store().worker_for(spec);
        let (mut rest_ns, mut ticked_ns, mut saved) = (TURN_NS, now_ns(), 0);
        while self.requests.rest(rest_ns) {
            while now_ns() >= ticked_ns + TICK_NS {
                ticked_ns += TICK_NS;
                self.backing.store().tick();
            }
            let _open = self.pauses.background();
            let smaller = self.due().map_or(0, |(after_s, percent)| {
                self.some(&mut w, after_s, TURN_NS * percent / 100)
            });
            // If no block became smaller, most likely all that are due have been tried. Blocks that
            // were stored meanwhile are due later.
            let before = core::mem::replace(&mut saved, self.stats.blocks_saved.load(Relaxed));
            let most = if saved == before { REST_MOST_NS } else { TICK_NS };
            rest_ns = if smaller > 0 { TURN_NS } else { (rest_ns * 2).min(most) };
        }
    }

    /// Returns the seconds after which a block is recompressed now, and the share of a core that
    /// this may take, percent. For a slowdown, only idle processes are recompressed, at once: in
    /// others it would take time that folding takes too.
    pub(crate) fn due(&self) -> Option<(u16, u64)> {
        let config = self.config;
        match config.slowdown {
            0 => Some((config.recompress_after_s as u16, config.recompress_cpu_percent as u64)),
            _ => self.budget.is_idle().then_some((0, 100)),
        }
    }

    /// Recompresses blocks that were not used for `after_s` seconds. Works for about `budget_ns`, or
    /// until a scan finds no block. Returns the number of blocks that became smaller.
    pub fn some(&self, w: &mut CodecWorker, after_s: u16, budget_ns: u64) -> u64 {
        let (start, mut smaller) = (now_ns(), 0);
        let mut cold = [ColdObject::NONE; FEW];
        while now_ns() - start < budget_ns {
            let count = self.backing.store().to_recompress(after_s, SCAN, &mut cold);
            for cold in &cold[..count] {
                smaller += self.recompress_block(&self.areas.read(), w, cold) as u64;
            }
            if count == 0 {
                break;
            }
        }
        smaller
    }

    /// Recompresses a block, and returns whether it became smaller. Does nothing if the object is
    /// no longer the block's, or its folio is in use.
    fn recompress_block(&self, areas: &Areas, w: &mut CodecWorker, cold: &ColdObject) -> bool {
        let Some(area) = areas.find_key(cold.key) else { return false };
        let Some(claim) = self.claim(cold) else { return false };
        // SAFETY: this thread has made the folio `Loading`, so no other thread frees its blocks.
        let new = unsafe { self.backing.store().recompress(w, cold.handle, cold.order) };
        // A damaged block stays as it is: its load will report it.
        let new = new.ok().flatten();
        self.end_claim(area, claim, cold, new);
        new.is_some()
    }

    /// Makes the folio of a block `Loading` if the object still is the block's. The caller must
    /// call [`Recompress::end_claim`] after that.
    pub(crate) fn claim(&self, cold: &ColdObject) -> Option<BlockClaim> {
        if self.budget.is_frozen() {
            return None;
        }
        let guard = self.table.lock(cold.key);
        let id = self.table.find(&guard, cold.key)?;
        let folio = self.table.get(&guard, id);
        let order: Order = self.table.block_order(folio.order());
        let at = (cold.key - folio.key()) as usize / order.pages();
        if folio.state.get() != FolioState::Stored
            || order != cold.order
            || self.table.slots(folio)[at].get().handle != cold.handle
            || !self.backing.store().is_still(cold)
        {
            return None;
        }
        folio.state.set(FolioState::Loading);
        Some(BlockClaim { id, at })
    }

    /// Replaces the claimed block's object by `new`, if there is one, and makes the folio `Stored`
    /// again.
    pub(crate) fn end_claim(
        &self,
        area: &Area,
        claim: BlockClaim,
        cold: &ColdObject,
        new: Option<Handle>,
    ) {
        let guard = self.table.lock(cold.key);
        let folio = self.table.get(&guard, claim.id);
        if let Some(new) = new {
            let before = self.backing.store().payload_bytes(cold.handle);
            let slot = &self.table.slots(folio)[claim.at];
            slot.set(BlockSlot { handle: new, ..slot.get() });
            let gained = before.saturating_sub(self.backing.store().payload_bytes(new));
            self.backing.store().free(cold.handle);
            stats::add(&self.stats.blocks_recompressed, 1);
            stats::add(&self.stats.recompress_gained_bytes, gained);
        }
        folio.state.set(FolioState::Stored);
        folio.wanted.store(false, Relaxed);
        // Writeback takes `Loading` folios off their list. A folio whose old object is being
        // written is on no list either.
        if self.backing.swap().is_some() && self.table.lists().is_on(claim.id, LruList::None) {
            self.table.lists().push_tail(
                claim.id,
                folio.key(),
                folio.order().get(),
                LruList::Folded,
            );
        }
        let (start, end) = (folio.key(), folio.end());
        Residency::new(self.engine).wake_waiters(&guard, area, start, end);
    }
}
