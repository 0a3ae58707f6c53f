//! Huge pages that were folded become huge pages again.
//!
//! A fold takes a huge page apart, and the loads that follow bring small pages. Random touches of small
//! pages take up to twice as long, for as long as the program lives. So a folio keeps the mark of the
//! huge page that it was evicted from ([`crate::folio::Folio::was_huge`]), and its parts keep it too.
//! When all parts are in memory again, a background thread joins them and asks the kernel for a huge page.
//!
//! The kernel copies 2 MiB for it, about 0.4 ms, and refuses where pages are write-protected. So the
//! stored copies of the parts are dropped. Where memory is short not all parts come back, and nothing
//! is joined.
use crate::area::lock::AreaLock;
use crate::backing::Backing;
use crate::folio::FolioState;
use crate::folio::index::{FolioId, ShardGuard};
use crate::folio::lru::LruList;
use crate::folio::table::FolioTable;
use crate::memory::mapper::Mapper;
use crate::memory::unshare::ToUnshare;
use crate::parts::EngineParts;
use crate::requests::background::RequestQueue;
use crate::stats_place::StatsPlace;
use core::ops::Range;
use memfold_os::memory::huge;
use memfold_os::units::{MAX_BYTES, MAX_PAGES, Order};
use memfold_stats as stats;

/// Brings back huge pages.
#[derive(Copy, Clone)]
pub(crate) struct HugePages<'a> {
    stats: &'a StatsPlace,
    table: &'a FolioTable,
    mapper: &'a Mapper,
    backing: &'a Backing,
    areas: &'a AreaLock,
    requests: &'a RequestQueue,
    to_unshare: &'a ToUnshare,
}

impl<'a> HugePages<'a> {
    /// Returns the walk over the parts of an engine.
    #[inline]
    pub(crate) fn new(engine: &'a EngineParts) -> HugePages<'a> {
        HugePages {
            stats: &engine.stats,
            table: &engine.table,
            mapper: &engine.mapper,
            backing: &engine.backing,
            areas: &engine.areas,
            requests: &engine.requests,
            to_unshare: &engine.to_unshare,
        }
    }

    /// Marks a folio of the largest order that is about to be evicted if it is a huge page. Costs a
    /// system call, little beside what it costs to compress the folio.
    pub(crate) fn mark(&self, guard: &ShardGuard<'_>, id: FolioId, home: usize) {
        let folio = self.table.get(guard, id);
        if folio.order() == Order::MAX && folio.state.get() == FolioState::Resident {
            folio.was_huge.set(self.mapper.space().is_huge(home));
        }
    }

    /// Notes that a folio is `Resident` after a load. Asks a background thread for a huge page if all
    /// of the huge page that it was a part of is in memory.
    pub(crate) fn note_load(&self, guard: &ShardGuard<'_>, id: FolioId) {
        let folio = self.table.get(guard, id);
        let start = folio.key() & !(MAX_PAGES as u64 - 1);
        if folio.was_huge.get() && self.is_whole(guard, start) {
            self.requests.collapse(start);
        }
    }

    /// Returns whether all pages of the chunk from `start` are in memory, and may be joined. Mostly it
    /// ends at one of the first folios that aren't.
    fn is_whole(&self, guard: &ShardGuard<'_>, start: u64) -> bool {
        if self.to_unshare.charges_copies() && self.to_unshare.is_shared() {
            // The kernel would copy 2 MiB of shared pages that the process hasn't paid for. A child
            // of fork finds requests of its parent.
            return false;
        }
        let (mut at, end) = (start, start + MAX_PAGES as u64);
        while at < end {
            let Some(id) = self.table.find(guard, at) else { return false };
            let folio = self.table.get(guard, id);
            if folio.state.get() != FolioState::Resident
                || folio.refused.get() != LruList::None
                || !folio.was_huge.get()
            {
                return false;
            }
            at = folio.end();
        }
        true
    }

    /// Makes a huge page of the chunk with its first page at `start`, a key, if all of it is still
    /// in memory.
    pub(crate) fn collapse(&self, start: u64) {
        let Some(home) = self.join(start) else { return };
        // No lock is held: the kernel may wait for all CPUs. It changes no byte, whatever other
        // threads do there, and fails if a page is missing where memory is registered.
        if huge::collapse(home) {
            stats::add(&self.stats.huge_pages, 1);
        }
    }

    /// Joins the folios of a chunk into one that isn't protected, and returns its addresses. Returns
    /// `None` if a part isn't in memory, is pinned, or lies outside of the area.
    fn join(&self, start: u64) -> Option<Range<usize>> {
        let (areas, end) = (self.areas.read(), start + MAX_PAGES as u64);
        let area = areas.find_key(start).filter(|area| end <= area.key_end())?;
        let address = area.addr_of(start);
        if !address.is_multiple_of(MAX_BYTES) || areas.is_pinned(start, end) {
            return None;
        }
        let mut guard = self.table.lock(start);
        // A huge page whose fold was called off has moved back whole.
        if !self.is_whole(&guard, start) || self.mapper.space().is_huge(address) {
            return None;
        }
        let (mut at, mut active) = (start, false);
        while at < end {
            let id = self.table.find(&guard, at).expect("the chunk is whole");
            let folio = self.table.get(&guard, id);
            active |= folio.active.get();
            at = folio.end();
            self.table.remove(&mut guard, id, self.backing);
        }
        let id = self.table.add(&guard, start, Order::MAX, FolioState::Resident);
        let folio = self.table.get(&guard, id);
        folio.active.set(active);
        self.table.list_by_state(&guard, id);
        // A page that stays protected is written to later, as one of a folio that isn't clean.
        let _ = self.mapper.space().protect(address, MAX_BYTES, false);
        Some(address..address + MAX_BYTES)
    }
}
