//! Writes to pages that a fork shares.
//!
//! The kernel copies a shared page when a process writes to it, and no event reports that. Where a
//! run has no room for copies of all that a child of fork has, the child's memory is
//! write-protected before the child begins ([`crate::fork::Fork::charge_copies`]). A write then
//! faults, and the thread that writes pays: it charges the copy, and evicts other memory of its
//! process if there is no room, before the kernel makes it.
//!
//! A write that continues a run of private pages makes as many private as there are before it, at
//! most [`COPIED`]. So a scan pays once for 64 KiB, and the program has at most twice the copies that
//! it would have without memfold. Measured for 96 MiB, in multiples of the time that the kernel's
//! copies take alone: 3.7 with a fault for each page, 1.2 with one for 64 KiB.
use crate::area::{Area, Areas};
use crate::fault::load::align;
use crate::fault::{FaultOutcome, Faults, PageFault};
use crate::folio::index::ShardGuard;
use crate::folio::lru::LruList;
use crate::folio::{Folio, FolioState};
use crate::parts::bytes;
use crate::reclaim::Reclaim;
use crate::residency::Residency;
use crate::stats;
use core::ops::Range;
use memfold_os::Errno;
use memfold_os::units::Order;

/// So many pages are copied at once at most: 64 KiB.
const COPIED: Order = match Order::new(4) {
    Some(order) => order,
    None => unreachable!(),
};

impl Faults<'_> {
    /// Returns how many pages the kernel is going to copy for this fault. Returns `None` if it isn't a
    /// write to a shared page. Pages that were loaded since the fork, and are clean, are not shared.
    pub(super) fn copied_order(
        &self,
        guard: &ShardGuard<'_>,
        area: &Area,
        folio: &Folio,
        fault: PageFault,
    ) -> Option<Order> {
        if !fault.protected || !self.to_unshare.charges_copies() || self.table.is_clean(folio) {
            return None;
        }
        let key = area.key_of(fault.addr);
        match folio.state.get() {
            FolioState::Resident => {}
            FolioState::Partial if folio.is_here(key) => return Some(Order::PAGE),
            _ => return None,
        }
        let mut order = COPIED;
        while order > Order::PAGE && !self.continues_run(guard, area, key, order) {
            order = order.smaller().expect("above order 0");
        }
        Some(order)
    }

    /// Returns whether a block of this order begins at `key`, or ends there, after a run of as many
    /// private pages, and can be made private as a whole.
    fn continues_run(&self, guard: &ShardGuard<'_>, area: &Area, key: u64, order: Order) -> bool {
        let (start, pages) = (align(key, order), order.pages() as u64);
        let run = match key - start {
            0 => start.checked_sub(pages),
            last if last == pages - 1 => Some(start + pages),
            _ => None,
        };
        let lies = |at: u64| at >= area.key && at + pages <= area.key_end();
        let Some(run) = run.filter(|run| lies(*run) && lies(start)) else { return false };
        self.is_written(guard, start..start + pages)
            && self.mapper.space().is_unshared(area.addr_of(run), bytes(order.pages()))
    }

    /// Returns whether all these pages, of one shard, are resident and not clean.
    fn is_written(&self, guard: &ShardGuard<'_>, mut keys: Range<u64>) -> bool {
        while !keys.is_empty() {
            let Some(id) = self.table.find(guard, keys.start) else { return false };
            let folio = self.table.get(guard, id);
            if folio.state.get() != FolioState::Resident || self.table.is_clean(folio) {
                return false;
            }
            keys.start = folio.end();
        }
        true
    }

    /// Charges this process with the copies that the kernel is going to make, and makes room for
    /// them.
    pub(super) fn charge_copies(&self, areas: &Areas, order: Order) {
        self.budget.quota().sub_others(order.bytes() as u64);
        Reclaim(self.0).make_room_for_copies(areas, order.pages() as u64);
    }

    /// Makes the block of this order around the address `addr` private, after it was charged. It may
    /// be evicted from now on.
    pub(super) fn make_private(
        &self,
        guard: &mut ShardGuard<'_>,
        area: &Area,
        addr: usize,
        order: Order,
    ) -> FaultOutcome {
        stats::add(&self.stats.faults_write, 1);
        let start = align(area.key_of(addr), order);
        let mut at = start;
        while at < start + order.pages() as u64 {
            let id = self.table.find(guard, at).expect("the pages are in memory");
            let folio = self.table.get(guard, id);
            if folio.state.get() == FolioState::Partial {
                break;
            }
            let id = self.table.carve(guard, id, at, folio.order().min(order), &self.backing);
            let folio = self.table.get(guard, id);
            if folio.refused.get() != LruList::None {
                folio.refused.set(LruList::None);
                folio.active.set(true);
            }
            self.table.list_by_state(guard, id);
            Residency(self.0).note_write(guard, id);
            at = folio.end();
        }
        let (start, len) = (area.addr_of(start), bytes(order.pages()));
        match self.mapper.space().protect(start, len, false) {
            Ok(()) if order > Order::PAGE => {
                // Where that fails, the program's own writes make the copies.
                let _ = self.mapper.space().unshare(start, len);
                FaultOutcome::Yes
            }
            Ok(()) => FaultOutcome::Yes,
            Err(Errno::AGAIN) => FaultOutcome::Again,
            // A thread past the gate may have unmapped a page. The touch finds that.
            Err(_) => {
                self.mapper.space().wake(start, len);
                FaultOutcome::Yes
            }
        }
    }
}
