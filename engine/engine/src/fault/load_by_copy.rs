//! Loads by copy: a block is decompressed into a buffer and mapped by UFFDIO_COPY, which allocates
//! its pages. A folio of one page is always loaded so, as a move would interrupt the program's other
//! CPUs. A small block that is read outside a stream is loaded so too, because it can be dropped
//! later. A larger block is loaded so only where there is no memory for its whole folio (the
//! small-page fallback, M6), or where `--fallback` demands it.
//!
//! Where clean folios are dropped (`reclaim/drop.rs`), of a block that is touched at random **only
//! the page that was touched** is loaded, write-protected if it is to be read. The folio is
//! `Partial` then: it keeps its stored block, from which other touches take further pages, and when
//! it is evicted clean nothing is compressed. Of a codec that can stop, only the start of the block
//! is decompressed, up to the page. Of others the whole block is, into the store's cache, from which
//! further pages come ([`memfold_store::Store::load_in_place`]).
//! Where a page was written to, the others are brought home when it is evicted
//! ([`Residency::load_rest`]).
use crate::area::lock::AreasAccess;
use crate::area::{Area, Areas};
use crate::fault::load::Loads;
use crate::folio::loading::LoadingFolio;
use crate::folio::{Folio, TouchKind};
use crate::limits::Limits;
use crate::memory::frames::FrameKind;
use crate::policy::stream_readahead::is_protected;
use crate::reclaim::block_size::BlockSize;
use crate::reclaim::{Reclaim, ReclaimProgress};
use crate::residency::Residency;
use crate::residency::copy_in::FaultAccess;
use core::ops::Range;
use memfold_os::sync::atomic::Ordering::Relaxed;
use memfold_os::units::Order;

/// Pages that are given back to the kernel at once to make room for small pages.
const BATCH_PAGES: u64 = 64;
/// That is at most one part in this many of the memory there is.
const BATCH_SHARE: u64 = 64;
/// Pages that a load evicts at most to make room for one. In the long run one is enough. But when
/// other loads have used up the batch, or the target has fallen, there is a backlog; with two a
/// load works it off, with one every later load would have to give a single page back to the
/// kernel.
const CATCH_UP_PAGES: u64 = 2;

/// The largest block that is copied although it could be moved: beyond that a copy costs more than
/// two moves.
const COPIED_MAX: Order = match Order::new(2) {
    Some(order) => order,
    None => unreachable!(),
};

impl Loads<'_> {
    /// The keys of the pages of a one-block `Loading` folio that a fault loads by copy; those of
    /// them that are there already stay as they are. `None`: it is loaded into a frame, and moved.
    pub(crate) fn pages_to_copy(
        &self,
        folio: &Folio,
        key: u64,
        access: FaultAccess,
        forced: bool,
    ) -> Option<Range<u64>> {
        let (whole, order) = (folio.key()..folio.end(), folio.order());
        // The rest of the block stays stored, although a part of it is in memory: it takes room twice.
        let only_touched = self.mapper.drops_clean()
            && !Limits::new(self.engine).stored_takes_more()
            && access.touch == TouchKind::RANDOM
            && !BlockSize::new(self.engine).is_used_together(folio.touch.get());
        if folio.here.get() != 0 {
            return Some(if only_touched { key..key + 1 } else { whole });
        }
        if order == Order::PAGE || forced && order <= self.config.block_order {
            return Some(whole);
        }
        if order > self.config.block_order {
            return None;
        }
        // What comes from the file is read there as a whole.
        let handle = self.table.slots(folio)[0].get().handle;
        let is_in_pool = handle.as_foreign().is_none();
        if only_touched && is_in_pool && BlockSize::new(self.engine).loads_parts(order) {
            return Some(key..key + 1);
        }
        // A block that is copied home protected can be dropped together with many others, until the
        // program writes to it. A block that is moved home takes a move of its own to be evicted, and
        // is then compared with its stored copy. Each move interrupts the program's other CPUs. Of
        // PHP's blocks that were moved out, 85% had not changed.
        let is_dropped = self.mapper.drops_clean() && is_protected(access.touch, access.write);
        (order <= COPIED_MAX && is_dropped).then_some(whole)
    }

    /// Whether this load is one of those that `--fallback` forces onto the small-page path.
    pub(crate) fn is_forced_small(&self) -> bool {
        let percent = self.config.fallback_percent as u64;
        percent > 0 && self.stats.pgmajfault.load(Relaxed) % 100 < percent
    }

    /// As [`Residency::copy_in`], which it makes room for.
    pub(crate) fn load_small(
        &self,
        areas: &Areas,
        area: &Area,
        load: LoadingFolio,
        keys: Range<u64>,
        access: FaultAccess,
    ) -> Result<bool, LoadingFolio> {
        let (order, is_partial) = (load.order(), load.is_partial());
        if order > self.config.block_order {
            return Err(load);
        }
        let has_room = if order == Order::PAGE && !self.mapper.drops_clean() {
            self.make_room_for_page(areas)
        } else {
            self.make_room(areas, keys.end - keys.start)
        };
        if !has_room && !is_partial {
            return Err(load);
        }
        if !has_room
            && let Ok(Some(frame)) = Reclaim::new(self.engine).frame_for(areas, Order::PAGE)
        {
            // To find this frame, memory was evicted or the excess was reported. The kernel takes a page
            // of its own for the copy, so the frame is free again, and given back later.
            self.mapper.frames().give(frame, Order::PAGE, FrameKind::Full);
        }
        Residency::new(self.engine).copy_in(areas, area, load, keys, access)
    }

    /// Makes room for one page that the kernel will allocate. What is evicted for it leaves a full
    /// frame; such frames are given back many at a time, as each time costs interrupts of all CPUs
    /// that the program runs on.
    fn make_room_for_page(&self, areas: &Areas) -> bool {
        let limits = Limits::new(self.engine);
        let target = limits.target();
        let batch = BATCH_PAGES.min(target / BATCH_SHARE);
        let free = self.mapper.frames().full_free();
        let lacking = (limits.physical() + batch).saturating_sub(target + free).min(CATCH_UP_PAGES);
        if lacking > 0
            && Reclaim::new(self.engine).reclaim(AreasAccess::Read(areas), free + lacking, 0)
                == ReclaimProgress::Again
        {
            return false;
        }
        limits.physical() < target || self.mapper.trim_now(batch) > 0
    }

    /// Makes room for pages that the kernel will allocate.
    pub(super) fn make_room(&self, areas: &Areas, pages: u64) -> bool {
        let limits = Limits::new(self.engine);
        if limits.may_hold(limits.physical() + pages) {
            return true;
        }
        let reclaim = Reclaim::new(self.engine);
        let slack = if self.mapper.drops_clean() { reclaim.batch_pages() } else { BATCH_PAGES };
        reclaim.reclaim(AreasAccess::Read(areas), 0, pages.max(slack)) == ReclaimProgress::Freed
    }
}
