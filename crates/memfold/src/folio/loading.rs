//! The token of a load.
use crate::backing::BlockSlot;
use crate::folio::index::FolioId;
use core::ops::Range;
use memfold_sys::units::Order;

/// A `Loading` folio, for the one thread that loads it: from `FolioTable::begin_load` until it is
/// mapped, rests in the swap cache, or is as it was before. What it says of the folio stays true
/// meanwhile without a lock: no other thread changes the key, order, slots or pages of a `Loading` folio.
///
/// Invariant: there is one token for each folio that is loaded for the program.
#[must_use = "the folio is `Loading` until the load ends, and whoever touches it waits"]
pub struct LoadingFolio {
    id: FolioId,
    key: u64,
    order: Order,
    first: BlockSlot,
    here: u16,
}

impl LoadingFolio {
    /// The token of a folio that has just become `Loading`.
    pub(super) fn new(
        id: FolioId,
        key: u64,
        order: Order,
        first: BlockSlot,
        here: u16,
    ) -> LoadingFolio {
        LoadingFolio { id, key, order, first, here }
    }

    /// Its id.
    pub fn id(&self) -> FolioId {
        self.id
    }

    /// Its first page's key.
    pub fn key(&self) -> u64 {
        self.key
    }

    /// Its order.
    pub fn order(&self) -> Order {
        self.order
    }

    /// The keys of its pages.
    pub fn keys(&self) -> Range<u64> {
        self.key..self.key + self.order.pages() as u64
    }

    /// The slot of its first block.
    pub fn first_slot(&self) -> BlockSlot {
        self.first
    }

    /// Returns whether some of its pages are in the program's page table: it was `Partial`.
    pub fn is_partial(&self) -> bool {
        self.here != 0
    }

    /// Ends the load. The caller has locked its shard, and gives the folio another state.
    pub fn end(self) -> FolioId {
        self.id
    }
}
