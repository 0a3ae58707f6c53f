//! How much is loaded for a fault, and what is requested ahead of the next ones.
use crate::area::Area;
use crate::backing::Backing;
use crate::config::Config;
use crate::folio::Folio;
use crate::folio::table::FolioTable;
use crate::limits::Limits;
use crate::memory::budget::Budget;
use crate::parts::EngineParts;
use crate::policy::stream_readahead::{Streams, WindowAdvice};
use crate::policy::swap_readahead::SwapReadahead;
use crate::requests::background::{LoadWindow, RequestQueue};
use crate::stats_place::StatsPlace;
use memfold_os::sync::atomic::Ordering::Relaxed;
use memfold_os::units::Order;
use memfold_stats as stats;
use memfold_swap::ObjectLocation;

/// A window is at most one part in this many of the available memory.
const WINDOW_SHARE: u64 = 32;

/// Decides how much is loaded, and requests windows ahead.
#[derive(Copy, Clone)]
pub(crate) struct Readahead<'a> {
    config: &'a Config,
    stats: &'a StatsPlace,
    table: &'a FolioTable,
    backing: &'a Backing,
    budget: &'a Budget,
    streams: &'a Streams,
    swap_readahead: &'a SwapReadahead,
    requests: &'a RequestQueue,
    engine: &'a EngineParts,
}

impl<'a> Readahead<'a> {
    /// Returns the walk over the parts of an engine.
    #[inline]
    pub(crate) fn new(engine: &'a EngineParts) -> Readahead<'a> {
        Readahead {
            config: &engine.config,
            stats: &engine.stats,
            table: &engine.table,
            backing: &engine.backing,
            budget: &engine.budget,
            streams: &engine.streams,
            swap_readahead: &engine.swap_readahead,
            requests: &engine.requests,
            engine,
        }
    }

    /// Returns how much to fill for a fault, as the streams advise.
    pub(crate) fn advise(&self, key: u64) -> WindowAdvice {
        self.bound(self.streams.advise(key))
    }

    /// Returns how much to load for a fault, as the streams advise, or more where the process works
    /// again after it was idle.
    pub(crate) fn advise_load(&self, key: u64) -> WindowAdvice {
        let s = self.stats;
        self.budget.note_loaded(s.zswpin.load(Relaxed) + s.pswpin.load(Relaxed));
        let advice = self.streams.advise(key);
        self.bound(if self.budget.is_waking() { advice.for_waking() } else { advice })
    }

    fn bound(&self, advice: WindowAdvice) -> WindowAdvice {
        WindowAdvice { order: self.bound_order(advice.order), ..advice }
    }

    /// Bounds a window to a small part of the available memory.
    pub(crate) fn bound_order(&self, mut order: Order) -> Order {
        while order > self.config.block_order
            && order.pages() as u64 > Limits::new(self.engine).target() / WINDOW_SHARE
        {
            order = order.smaller().expect("above another order");
        }
        order
    }

    /// Advances a stream: the window `[start, end)` was loaded ahead, and is being used at `key`.
    pub(crate) fn advance_stream(
        &self,
        area: &Area,
        key: u64,
        start: u64,
        end: u64,
        in_file: bool,
    ) {
        stats::add(&self.stats.readahead_hits, 1);
        if in_file {
            stats::add(&self.stats.swap_ra_hit, end - start);
            self.swap_readahead.hit(key);
        }
        let advice = self.advise_load(key);
        self.streams.loaded(key, start, end);
        self.ask_ahead(area, start, end, advice, in_file);
    }

    /// Returns whether a folio's stored copy begins in the swap file.
    pub(crate) fn is_in_file(&self, folio: &Folio) -> bool {
        self.location_in_file(folio).is_some()
    }

    /// Returns where in the swap file a folio's stored copy begins, if it does.
    pub(crate) fn location_in_file(&self, folio: &Folio) -> Option<ObjectLocation> {
        let has_copy = self.backing.swap().is_some() && folio.has_copy.get();
        let handle = has_copy.then(|| self.table.slots(folio)[0].get().handle)?;
        ObjectLocation::from_handle(handle)
    }

    /// Records that the pages with keys `[start, end)` were loaded or filled for a fault on `key`.
    pub(crate) fn note_loaded(&self, key: u64, start: u64, end: u64) {
        self.streams.loaded(key, start, end);
    }

    /// Requests the window beside a block that was loaded from the swap file for a fault on `key`,
    /// if neighbours are likely to be needed.
    pub(crate) fn ask_beside(&self, area: &Area, key: u64) {
        let Some(beside) = self.swap_readahead.touched(key) else { return };
        if self.config.readahead && beside.key >= area.key && beside.key < area.key_end() {
            self.requests.load(LoadWindow { key: beside.key, order: beside.order });
        }
    }

    /// Requests the windows that a stream reaches after `[start, end)`.
    pub(crate) fn ask_ahead(
        &self,
        area: &Area,
        start: u64,
        end: u64,
        advice: WindowAdvice,
        in_file: bool,
    ) {
        let WindowAdvice { order, backward, ahead, .. } = advice;
        if !self.config.readahead || order <= self.config.block_order {
            return;
        }
        // In thread delivery a handler works too, and a second window only takes CPU time from it
        // (13% slower on two CPUs). But while one window is read from the file, another can be
        // decrypted.
        let windows =
            if self.config.delivery.is_inline() || in_file { ahead } else { ahead.min(1) };
        for n in 0..windows as u64 {
            let far = n * order.pages() as u64;
            let key = if backward { start.wrapping_sub(1 + far) } else { end + far };
            if key >= area.key && key < area.key_end() {
                self.requests.load(LoadWindow { key, order });
            }
        }
    }
}
