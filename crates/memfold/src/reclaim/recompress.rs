//! Recompression (M9): cold blocks, and those that did not shrink, are compressed again by a
//! stronger codec.
//!
//! While a block is at it, its folio is `Loading`: a touch waits, as for a load, and then loads the
//! block.
use crate::area::{Area, Areas};
use crate::backing::BlockSlot;
use crate::folio::FolioState;
use crate::folio::index::FolioId;
use crate::folio::lru::LruList;
use crate::parts::walk;
use crate::residency::Residency;
use crate::stats;
use memfold_store::{Cold, Handle, Worker};
use memfold_sys::sync::atomic::Ordering::Relaxed;
use memfold_sys::thread::{now_ns, sleep_ns};
use memfold_sys::units::Order;

/// Time from one turn to the next.
const TURN_NS: u64 = 20_000_000;
/// Turns of a second, which is the store's tick.
const TURNS_A_TICK: u64 = 1_000_000_000 / TURN_NS;
/// Entries looked at, and blocks taken, at a time.
const SCAN: usize = 512;
const FEW: usize = 8;

/// A block at which recompression is.
pub(crate) struct BlockClaim {
    id: FolioId,
    /// Which block of its folio.
    at: usize,
}

walk! {
    /// Compresses cold blocks again.
    pub struct Recompress
}

impl Recompress<'_> {
    /// What the background thread for recompression does, until the queue is stopped.
    pub(crate) fn until_stopped(&self) {
        let Some(spec) = self.recompress else { return };
        let mut w = self.backing.store().worker_for(spec);
        let budget_ns = TURN_NS * self.config.recompress_cpu_percent as u64 / 100;
        let mut turn = 0;
        while !self.requests.is_stopped() {
            sleep_ns(TURN_NS);
            turn += 1;
            if turn % TURNS_A_TICK == 0 {
                self.backing.store().tick();
            }
            let _open = self.gates.background();
            self.some(&mut w, budget_ns);
        }
    }

    /// Works for about `budget_ns`, or until a look finds nothing. Returns blocks that became
    /// smaller.
    pub fn some(&self, w: &mut Worker, budget_ns: u64) -> u64 {
        let (start, mut smaller) = (now_ns(), 0);
        let mut cold = [Cold::NONE; FEW];
        while now_ns() - start < budget_ns {
            let found = self.backing.store().to_recompress(
                self.config.recompress_after_s as u16,
                SCAN,
                &mut cold,
            );
            for cold in &cold[..found] {
                smaller += self.recompress_block(&self.areas.read(), w, cold) as u64;
            }
            if found == 0 {
                break;
            }
        }
        smaller
    }

    /// Whether the block became smaller. Does nothing if the object is no longer the block's, or
    /// its folio is in use.
    fn recompress_block(&self, areas: &Areas, w: &mut Worker, cold: &Cold) -> bool {
        let Some(area) = areas.find_key(cold.key) else { return false };
        let Some(claim) = self.claim(cold) else { return false };
        // SAFETY: the folio is `Loading` by this thread, so nobody else frees its blocks.
        let new = unsafe { self.backing.store().recompress(w, cold.handle, cold.order) };
        // A damaged block stays as it is: its load will say so.
        let new = new.ok().flatten();
        self.end_claim(area, claim, cold, new);
        new.is_some()
    }

    /// Makes the folio of a block `Loading` if the object still is the block's;
    /// [`Recompress::end_claim`] must follow.
    pub(crate) fn claim(&self, cold: &Cold) -> Option<BlockClaim> {
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

    /// Puts `new`, if there is one, in the place of the claimed block's object, and makes the folio
    /// `Stored` again.
    pub(crate) fn end_claim(
        &self,
        area: &Area,
        claim: BlockClaim,
        cold: &Cold,
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
        // Writeback takes a folio that it meets `Loading` off its list; and one whose old object it
        // is writing is on none.
        if self.backing.swap().is_some() && self.table.lists().is_on(claim.id, LruList::None) {
            self.table.lists().push_tail(
                claim.id,
                folio.key(),
                folio.order().get(),
                LruList::Folded,
            );
        }
        let (start, end) = (folio.key(), folio.end());
        Residency(self.0).wake_waiters(&guard, area, start, end);
    }
}
