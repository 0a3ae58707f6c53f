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
use core::ops::Range;
use memfold_os::Errno;
use memfold_os::units::{Order, PAGE_SIZE};
use memfold_stats as stats;

/// So many pages are copied at once at most: 64 KiB.
const COPIED: Order = match Order::new(4) {
    Some(order) => order,
    None => unreachable!(),
};

/// Returns the largest order up to `most` for which `holds`, or order 0.
fn largest(most: Order, holds: impl Fn(Order) -> bool) -> Order {
    let smaller = core::iter::successors(Some(most), |order| order.smaller());
    smaller
        .take_while(|order| *order > Order::PAGE)
        .find(|order| holds(*order))
        .unwrap_or(Order::PAGE)
}

impl Faults<'_> {
    /// Returns how many pages the kernel is going to copy for this fault. Returns `None` if it isn't a
    /// write to a shared page. Pages that were loaded since the fork, and are clean, are not shared.
    /// Once copies are `paid`, there are no more than these, and the page map isn't read again.
    pub(super) fn copied_order(
        &self,
        guard: &ShardGuard<'_>,
        area: &Area,
        folio: &Folio,
        fault: PageFault,
        paid: Option<Order>,
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
        let most = paid.unwrap_or(COPIED);
        let order = largest(most, |order| self.may_continue(guard, area, key, order));
        if paid.is_some() || order == Order::PAGE {
            return Some(order);
        }
        let (begins, addr) = (key.is_multiple_of(2), area.addr_of(key));
        let run = match begins {
            true => addr - bytes(order.pages())..addr,
            false => addr + PAGE_SIZE..addr + PAGE_SIZE + bytes(order.pages()),
        };
        let private = self.mapper.space().unshared_bytes(run, begins);
        Some(largest(order, |order| bytes(order.pages()) <= private))
    }

    /// Returns whether a block of this order, above order 0, begins or ends at `key` and can be made
    /// private as a whole, and as many pages of the area lie before or behind it. An even key begins
    /// blocks, and an odd one ends them.
    fn may_continue(&self, guard: &ShardGuard<'_>, area: &Area, key: u64, order: Order) -> bool {
        let (start, pages) = (align(key, order), order.pages() as u64);
        let all = match key - start {
            0 => start.checked_sub(pages).map(|run| run..start + pages),
            last if last == pages - 1 => Some(start..start + 2 * pages),
            _ => None,
        };
        all.is_some_and(|all| area.key <= all.start && all.end <= area.key_end())
            && self.is_written(guard, start..start + pages)
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
        Reclaim::new(self.engine).make_room_for_copies(areas, order.pages() as u64);
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
            let id = self.table.carve(guard, id, at, folio.order().min(order), self.backing);
            let folio = self.table.get(guard, id);
            if folio.refused.get() != LruList::None {
                folio.refused.set(LruList::None);
                folio.active.set(true);
            }
            self.table.list_by_state(guard, id);
            self.note_write(guard, id);
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
