//! The size of blocks: a block is cut into pages, or pages are joined into a block.
//!
//! Large blocks compress better and make streams fast. For a random touch, a whole block must be
//! decompressed and mapped, and its other pages push out pages that are in use: with blocks of 16 KiB a
//! server whose clients choose keys at random takes twice the faults of single pages, and four times
//! the time.
//!
//! `policy/stream_readahead.rs` says of each load how it was asked for, and the folio keeps that
//! ([`TouchKind`]):
//! - A block that was asked for by itself is **cut** into folios of one page when it must be compressed
//!   anyway. One that never changes is cut after [`CLEAN_LOADS`] such loads, unless its pages can be
//!   loaded alone.
//! - When a page of a cut block is evicted and all of the block is in memory, its pages are **joined** if
//!   a stream has loaded them, or if single loads have loaded all of them at about the same time. The
//!   time of eviction is no evidence, because the pages of a block that was just cut were evicted
//!   together. A joined block is cut again only after [`CLEAN_LOADS`] random loads.
//! - Blocks from the swap file stay as they are. So do all blocks while pool and metadata take more
//!   than half of `--limit`, because pages take more of both.
//!
//! Dirty blocks and pages wait in the swap cache until they are too many (`eviction::next_step`),
//! because waking a background thread for them costs more than compressing them.
use crate::area::Areas;
use crate::backing::Backing;
use crate::config::Config;
use crate::folio::index::{FolioId, ShardGuard};
use crate::folio::lru::LruList;
use crate::folio::table::FolioTable;
use crate::folio::{FolioState, PARTIAL_MAX, TouchKind};
use crate::limits::Limits;
use crate::memory::mapper::Mapper;
use crate::parts::EngineParts;
use crate::policy::workingset;
use crate::stats_place::StatsPlace;
use core::ops::Range;
use memfold_os::units::Order;
use memfold_stats as stats;

/// Pages that were loaded within the time in which one part in this many of memory is replaced
/// belong together. Were each asked for at random, that would be so by chance for one block of four
/// pages in 65,000 at most (`4 / 64^3`, if all are in memory).
const TOGETHER_SHARE: u64 = 64;
/// A block that never changes, or was joined before, is cut when it was asked for by itself so
/// often. To cut it is to compress it, 40 us; what is saved each time that it is loaded after that
/// is 5 us.
const CLEAN_LOADS: u8 = 8;

/// Blocks are cut into pages, and pages joined.
#[derive(Copy, Clone)]
pub(crate) struct BlockSize<'a> {
    config: &'a Config,
    stats: &'a StatsPlace,
    table: &'a FolioTable,
    mapper: &'a Mapper,
    backing: &'a Backing,
    engine: &'a EngineParts,
}

impl<'a> BlockSize<'a> {
    /// Returns the walk over the parts of an engine.
    #[inline]
    pub(crate) fn new(engine: &'a EngineParts) -> BlockSize<'a> {
        BlockSize {
            config: &engine.config,
            stats: &engine.stats,
            table: &engine.table,
            mapper: &engine.mapper,
            backing: &engine.backing,
            engine,
        }
    }

    /// Whether a folio that leaves memory is to be cut into pages first. `changed`: it must be
    /// compressed anyway.
    pub(crate) fn is_to_be_cut(&self, order: Order, touch: TouchKind, changed: bool) -> bool {
        order == self.config.block_order
            && order > Order::PAGE
            && (changed || !self.loads_parts(order) || !self.backing.stops_early())
            && touch.random_count() >= if changed && !touch.is_joined() { 1 } else { CLEAN_LOADS }
            && self.has_room_for_pages()
    }

    /// Whether of a block of this order pages that are asked for by themselves are loaded alone
    /// (`fault/load_by_copy.rs`). One that never changes is best as it is then, if the codec can stop
    /// early. Of other codecs, a page of its own is loaded in 16 us, and one of a block in 25 (zstd):
    /// what is hot is cut.
    pub(crate) fn loads_parts(&self, order: Order) -> bool {
        self.mapper.drops_clean() && order <= PARTIAL_MAX
    }

    /// Whether a block was joined because its pages are asked for at about the same time, and nothing
    /// has said otherwise since.
    pub(crate) fn is_used_together(&self, touch: TouchKind) -> bool {
        touch.is_joined() && touch.random_count() < CLEAN_LOADS
    }

    /// Pages take more of the pool than blocks do, and more metadata: not where these leave little
    /// of the limit already, or where each would take mappings.
    fn has_room_for_pages(&self) -> bool {
        let limits = Limits::new(self.engine);
        if self.mapper.space().takes_mappings() || self.table.is_crowded() {
            return false;
        }
        let held_bytes = limits.counted_pool_bytes() + limits.metadata_bytes();
        limits.limit_bytes().is_none_or(|limit| held_bytes <= limit / 2)
    }

    /// Cuts a `Cached` folio of one block, which is on no list, into pages that are to be saved:
    /// what was stored of it is let go, and its frame is authoritative.
    pub(crate) fn cut_into_pages(&self, guard: &mut ShardGuard<'_>, id: FolioId) {
        stats::add(&self.stats.blocks_cut, 1);
        let folio = self.table.get(guard, id);
        for page in folio.key()..folio.end() {
            let id = self.table.find(guard, page).expect("a split folio covers what it covered");
            self.table.carve(guard, id, page, Order::PAGE, self.backing);
        }
        self.table.list_by_state(guard, id);
    }

    /// Whether [`BlockSize::join_block`] would join the block that a `Resident` folio is a part of.
    pub(crate) fn is_to_be_joined(
        &self,
        areas: &Areas,
        guard: &ShardGuard<'_>,
        id: FolioId,
    ) -> bool {
        self.joined(areas, guard, id).is_some()
    }

    /// The keys of the block that a `Resident` folio is a part of, if it is to be joined, and how
    /// it was asked for.
    fn joined(
        &self,
        areas: &Areas,
        guard: &ShardGuard<'_>,
        id: FolioId,
    ) -> Option<(Range<u64>, TouchKind)> {
        let block = self.config.block_order;
        let folio = self.table.get(guard, id);
        if folio.order() >= block {
            return None;
        }
        let key = folio.key();
        let start = key & !(block.pages() as u64 - 1);
        let end = start + block.pages() as u64;
        let touch = self.touch_of_block(guard, start..end)?;
        let area = areas.find_key(key)?;
        if start < area.key || end > area.key_end() || areas.is_pinned(start, end) {
            return None;
        }
        Some((start..end, touch))
    }

    /// Where a `Resident` folio is a part of a cut block that was loaded as one, joins its parts:
    /// returns the folio of the block, on no list, and its key. `None`: it isn't.
    pub(crate) fn join_block(
        &self,
        areas: &Areas,
        guard: &mut ShardGuard<'_>,
        id: FolioId,
    ) -> Option<(FolioId, u64)> {
        let active = self.table.get(guard, id).active.get();
        let (keys, touch) = self.joined(areas, guard, id)?;
        let mut at = keys.start;
        while at < keys.end {
            let id = self.table.find(guard, at).expect("as before");
            at += self.table.get(guard, id).pages();
            self.table.remove(guard, id, self.backing);
        }
        let (start, block) = (keys.start, self.config.block_order);
        let whole = self.table.add(guard, start, block, FolioState::Resident);
        let folio = self.table.get(guard, whole);
        folio.touch.set(touch);
        folio.active.set(active);
        stats::add(&self.stats.blocks_joined, 1);
        Some((whole, start))
    }

    /// How the block with these keys was asked for, if all its parts are in memory and were asked
    /// for in the same way: by a stream, or each by itself, but at about the same time.
    fn touch_of_block(&self, guard: &ShardGuard<'_>, keys: Range<u64>) -> Option<TouchKind> {
        let (clock, mapped) = (self.table.tally().clock(), self.table.tally().mapped());
        let (mut streamed, mut first, mut last) = (true, u64::MAX, 0);
        let mut at = keys.start;
        while at < keys.end {
            let id = self.table.find(guard, at)?;
            let folio = self.table.get(guard, id);
            if folio.state.get() != FolioState::Resident
                || folio.refused.get() != LruList::None
                || folio.touch.get() == TouchKind::UNKNOWN
            {
                return None;
            }
            streamed &= folio.touch.get() == TouchKind::STREAM;
            let distance = workingset::distance(clock, folio.age.get());
            (first, last) = (first.min(distance), last.max(distance));
            at += folio.pages();
        }
        if streamed {
            return Some(TouchKind::STREAM);
        }
        (last - first <= mapped / TOGETHER_SHARE).then_some(TouchKind::JOINED)
    }
}
