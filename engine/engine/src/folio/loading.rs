//! The token of a load.
use crate::backing::BlockSlot;
use crate::folio::index::FolioId;
use core::ops::Range;
use memfold_os::units::Order;

/// A `Loading` folio, owned by the one thread that loads it. It lives from `FolioTable::begin_load`
/// until the folio is mapped, is in the swap cache, or has its earlier state again. Its values stay
/// true meanwhile without a lock: no other thread changes the key, order, slots or pages of a
/// `Loading` folio.
///
/// Invariant: there is one token for each folio that is loaded for the program.
#[must_use = "the folio is `Loading` until the load ends, and threads that touch it wait"]
pub struct LoadingFolio {
    id: FolioId,
    key: u64,
    order: Order,
    first: BlockSlot,
    here: u16,
}

impl LoadingFolio {
    /// Makes the token of a folio that has just become `Loading`.
    pub(super) fn new(
        id: FolioId,
        key: u64,
        order: Order,
        first: BlockSlot,
        here: u16,
    ) -> LoadingFolio {
        LoadingFolio { id, key, order, first, here }
    }

    /// Returns its id.
    pub fn id(&self) -> FolioId {
        self.id
    }

    /// Returns its first page's key.
    pub fn key(&self) -> u64 {
        self.key
    }

    /// Returns its order.
    pub fn order(&self) -> Order {
        self.order
    }

    /// Returns the keys of its pages.
    pub fn keys(&self) -> Range<u64> {
        self.key..self.key + self.order.pages() as u64
    }

    /// Returns the slot of its first block.
    pub fn first_slot(&self) -> BlockSlot {
        self.first
    }

    /// Returns whether some of its pages are in the program's page table: it was `Partial`.
    pub fn is_partial(&self) -> bool {
        self.here != 0
    }

    /// Ends the load. The caller has locked its shard, and sets another state.
    pub fn end(self) -> FolioId {
        self.id
    }
}
