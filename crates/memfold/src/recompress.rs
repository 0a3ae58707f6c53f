//! Recompression (M9): cold blocks, and those that did not shrink, are compressed again by a stronger codec.
//!
//! While a block is at it, its folio is `Loading`: a touch waits, as for a load, and then loads the block.
use crate::area::Areas;
use crate::folio::State;
use crate::pager::Pager;
use crate::stats;
use memfold_store::{Cold, Worker};
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

impl Pager {
    /// What the background thread for recompression does, until the queue is stopped.
    pub(crate) fn recompress_until_stopped(&self) {
        let Some(spec) = self.recompress else { return };
        let mut w = self.store.worker_for(spec);
        let budget_ns = TURN_NS * self.config.recompress_cpu_percent as u64 / 100;
        let mut turn = 0;
        while !self.queue.is_stopped() {
            sleep_ns(TURN_NS);
            turn += 1;
            if turn % TURNS_A_TICK == 0 {
                self.store.tick();
            }
            self.recompress_some(&mut w, budget_ns);
        }
    }

    /// Works for about `budget_ns`, or until a look finds nothing. Returns blocks that became smaller.
    pub fn recompress_some(&self, w: &mut Worker, budget_ns: u64) -> u64 {
        let (start, mut smaller) = (now_ns(), 0);
        let mut cold = [Cold::NONE; FEW];
        while now_ns() - start < budget_ns {
            let found = self.store.to_recompress(self.config.recompress_after_s as u16, SCAN, &mut cold);
            for cold in &cold[..found] {
                smaller += self.recompress_block(&self.areas.read(), w, cold) as u64;
            }
            if found == 0 {
                break;
            }
        }
        smaller
    }

    /// Whether the block became smaller. Does nothing if the object is no longer the block's, or its folio is in use.
    fn recompress_block(&self, areas: &Areas, w: &mut Worker, cold: &Cold) -> bool {
        if self.frozen.load(Relaxed) {
            return false;
        }
        let Some(area) = areas.find_key(cold.key) else { return false };
        let guard = self.shards.lock(cold.key);
        let Some(id) = self.index.find(&guard, cold.key) else { return false };
        // SAFETY: the guard is that of the folio's shard.
        let folio = unsafe { self.folios.get(id) };
        let order: Order = self.folios.block_order(folio.order);
        let at = (cold.key - folio.key) as usize / order.pages();
        if folio.state != State::Stored || order != cold.order || self.folios.slots(folio)[at].handle != cold.handle {
            return false;
        }
        folio.state = State::Loading;
        drop(guard);
        let before = self.store.payload_bytes(cold.handle);
        // SAFETY: the folio is `Loading` by this thread, so nobody else frees its blocks.
        let new = unsafe { self.store.recompress(w, cold.handle, order) };
        let guard = self.shards.lock(cold.key);
        // SAFETY: as above; a `Loading` folio is not destroyed.
        let folio = unsafe { self.folios.get(id) };
        // A damaged block stays as it is: its load will say so.
        let new = new.ok().flatten();
        if let Some(new) = new {
            self.folios.slots(folio)[at].handle = new;
            let gained = before.saturating_sub(self.store.payload_bytes(new));
            self.store.free(cold.handle);
            stats::add(&self.stats.blocks_recompressed, 1);
            stats::add(&self.stats.recompress_gained_bytes, gained);
        }
        folio.state = State::Stored;
        folio.wanted.store(false, Relaxed);
        let (start, end) = (folio.key, folio.key + folio.order.pages() as u64);
        self.wake_waiters(&guard, area, start, end);
        new.is_some()
    }
}
