//! The span memory of a pool: one area, cut into spans by a moving edge.
//!
//! A span keeps its address and length forever. Empty spans wait in the list of their length:
//! *warm* ones still hold their memory, so that churn costs no system calls; *bare* ones returned
//! it. Address space is plentiful, memory is not: only class spans and warm spans count as held.
use crate::pool::area::{AreaTable, ZoneArea};
use crate::pool::budget::PoolBudget;
use crate::pool::size_class::SizeClass;
use crate::pool::span::PoolSpan;
use alloc::sync::Arc;
use memfold_os::sync::{Mutex, MutexGuard};
use memfold_os::units::{MAX_PAGES, PAGE_SIZE};

/// No span: ends a list.
pub(crate) const NIL: u32 = u32::MAX;

/// A list of spans, each of which names the next. Zeros are an empty list.
#[derive(Copy, Clone, Default)]
pub(crate) struct SpanList {
    /// The first span's index, all bits inverted.
    inverted: u32,
}

impl SpanList {
    /// Returns the first span, or [`NIL`].
    pub fn first(self) -> u32 {
        !self.inverted
    }

    pub fn set_first(&mut self, index: u32) {
        self.inverted = !index;
    }

    /// Puts a span, whose index is given too, before the first.
    pub fn push(&mut self, index: u32, span: &PoolSpan) {
        span.set_next(self.first());
        self.set_first(index);
    }
}

/// Warm bytes that a pool may keep however little it holds: its part of 1 MiB, at least 256 KiB.
/// With 256 KiB for a single pool, spans were often returned just before churn needed them again,
/// and saves took 3% longer.
const WARM_ALL: u64 = 1 << 20;
const WARM_MIN: u64 = 256 << 10;
/// Warm bytes that a pool may keep for each byte that it holds: 1/64.
const WARM_SHIFT: u32 = 6;
/// Spans that are returned in one step, sorted, so that neighbours share a system call.
const BATCH: usize = 64;
/// Spans that are returned by a free that finds too much warm.
const FEW: usize = 4;

pub(crate) struct SpanArena {
    data: ZoneArea,
    spans: AreaTable<PoolSpan>,
    budget: Arc<PoolBudget>,
    state: Mutex<ArenaState>,
    warm_min: u64,
}

/// `cut` spans = class spans + warm + bare + `moving`.
pub(crate) struct ArenaState {
    /// Pages that were ever cut.
    edge: u32,
    /// Spans that were ever cut.
    pub cut: u32,
    warm: [SpanList; MAX_PAGES + 1],
    bare: [SpanList; MAX_PAGES + 1],
    /// Bytes of the warm spans.
    pub warm_bytes: u64,
    /// Bytes of class spans, warm spans, and spans being returned.
    pub held: u64,
    /// Spans being returned.
    moving: u32,
}

impl SpanArena {
    /// Makes the arena of one of `pools` pools.
    pub fn new(
        data: ZoneArea,
        spans: AreaTable<PoolSpan>,
        budget: Arc<PoolBudget>,
        pools: usize,
    ) -> SpanArena {
        let lists = [SpanList::default(); MAX_PAGES + 1];
        let state = ArenaState {
            edge: 0,
            cut: 0,
            warm: lists,
            bare: lists,
            warm_bytes: 0,
            held: 0,
            moving: 0,
        };
        SpanArena {
            data,
            spans,
            budget,
            state: Mutex::new(state),
            warm_min: (WARM_ALL / pools as u64).max(WARM_MIN),
        }
    }

    /// Returns span `index`, or `None` past the table.
    #[inline]
    pub fn span(&self, index: u32) -> Option<&PoolSpan> {
        self.spans.get(index)
    }

    /// Returns the address of slot `slot`; any address, if the span has another class by now.
    #[inline]
    pub fn slot_hint(&self, span: &PoolSpan, class: &SizeClass, slot: u8) -> *const u8 {
        let offset =
            span.first_page() as usize * PAGE_SIZE + slot as usize * class.slot_bytes as usize;
        self.data.at(0).wrapping_add(offset)
    }

    /// Returns the first byte of slot `slot`.
    ///
    /// # Panics
    /// If the slot lies past the area: never for spans of this arena.
    #[inline]
    pub fn slot(&self, span: &PoolSpan, class: &SizeClass, slot: u8) -> *mut u8 {
        self.data
            .at(span.first_page() as usize * PAGE_SIZE + slot as usize * class.slot_bytes as usize)
    }

    /// Returns a span of `pages` pages without a class, and whether it has no memory yet; `None`
    /// when the limit or the address space is used up.
    pub fn allocate(&self, pages: u16) -> Option<(u32, bool)> {
        let bytes = pages as u64 * PAGE_SIZE as u64;
        let mut state = self.state.lock();
        if let Some(index) = self.pop(&mut state.warm[pages as usize]) {
            state.warm_bytes -= bytes;
            return Some((index, false));
        }
        if !self.budget.try_charge(bytes) {
            return None;
        }
        let index = match self.pop(&mut state.bare[pages as usize]) {
            Some(index) => Some(index),
            None => self.cut(&mut state, pages),
        };
        match index {
            Some(_) => state.held += bytes,
            None => self.budget.uncharge(bytes),
        }
        index.map(|index| (index, true))
    }

    /// Populates a span that has no memory yet: one call instead of a fault for each page.
    pub fn populate(&self, span: &PoolSpan) {
        if span.pages() > 1 {
            self.data.populate(
                span.first_page() as usize * PAGE_SIZE,
                span.pages() as usize * PAGE_SIZE,
            );
        }
    }

    /// Frees an empty span. Returns true if so much is warm that the caller should call
    /// [`SpanArena::trim_some`] after it has released its locks.
    pub fn free(&self, index: u32) -> bool {
        let Some(span) = self.spans.get(index) else { return false };
        span.set_class(None);
        let mut state = self.state.lock();
        let pages = span.pages();
        self.push(&mut state.warm[pages as usize], index);
        state.warm_bytes += pages as u64 * PAGE_SIZE as u64;
        state.warm_bytes > self.warm_max(&state)
    }

    /// Returns the memory of a few warm spans to the kernel. This is bounded, because it is on the
    /// path of a free. Each free empties at most one span, so a few at a time keep up.
    pub fn trim_some(&self) {
        self.trim_batch(0, FEW);
    }

    /// Returns the memory of warm spans to the kernel until at most half of the allowance is left.
    /// Returns the bytes.
    pub fn trim(&self) -> u64 {
        let keep = self.warm_max(&self.state.lock()) / 2;
        self.trim_to(keep)
    }

    /// Returns the memory of warm spans to the kernel until at most `keep` bytes are warm. Returns
    /// the bytes.
    pub fn trim_to(&self, keep: u64) -> u64 {
        let mut pages = 0;
        loop {
            match self.trim_batch(keep, BATCH) {
                0 => return pages,
                bytes => pages += bytes,
            }
        }
    }

    fn trim_batch(&self, keep: u64, count_max: usize) -> u64 {
        let mut batch = [(0u32, 0u32); BATCH];
        let count = self.take_warm(keep, &mut batch[..count_max]);
        let batch = &mut batch[..count];
        batch.sort_unstable_by_key(|(page, _)| *page);
        self.release(batch);
        let mut pages = 0;
        let mut state = self.state.lock();
        for (_, index) in batch {
            let Some(span) = self.spans.get(*index) else { continue };
            let bytes = span.pages() as u64 * PAGE_SIZE as u64;
            self.push(&mut state.bare[span.pages() as usize], *index);
            state.held -= bytes;
            state.moving -= 1;
            self.budget.uncharge(bytes);
            pages += bytes;
        }
        pages
    }

    pub fn lock(&self) -> MutexGuard<'_, ArenaState> {
        self.state.lock()
    }

    /// Returns the bytes of the spans' descriptions.
    pub fn metadata_bytes(&self, state: &ArenaState) -> u64 {
        AreaTable::<PoolSpan>::bytes(state.cut)
    }

    /// Returns start and length of everything that was ever cut.
    #[cfg(test)]
    pub fn extent(&self, state: &ArenaState) -> (usize, usize) {
        (self.data.at(0) as usize, state.edge as usize * PAGE_SIZE)
    }

    fn warm_max(&self, state: &ArenaState) -> u64 {
        self.warm_min + (state.held >> WARM_SHIFT)
    }

    /// Moves warm spans into `batch` as (first page, index), the longest first.
    fn take_warm(&self, keep: u64, batch: &mut [(u32, u32)]) -> usize {
        let mut state = self.state.lock();
        let (mut count, mut pages) = (0, MAX_PAGES);
        while count < batch.len() && pages > 0 && state.warm_bytes > keep {
            let Some(index) = self.pop(&mut state.warm[pages]) else {
                pages -= 1;
                continue;
            };
            let first_page = self.spans.get(index).map_or(0, PoolSpan::first_page);
            batch[count] = (first_page, index);
            count += 1;
            state.warm_bytes -= (pages * PAGE_SIZE) as u64;
            state.moving += 1;
        }
        count
    }

    /// Returns the memory of `batch`, sorted by page, to the kernel: one call for each run of
    /// neighbours.
    fn release(&self, batch: &[(u32, u32)]) {
        let (mut start, mut end) = (0, 0);
        for (page, index) in batch {
            let pages = self.spans.get(*index).map_or(0, |s| s.pages() as usize);
            if *page as usize != end {
                self.release_pages(start, end);
                start = *page as usize;
            }
            end = *page as usize + pages;
        }
        self.release_pages(start, end);
    }

    fn release_pages(&self, start: usize, end: usize) {
        if end > start {
            // SAFETY: these pages belong to spans that were taken out of the warm lists: they hold
            // no object, and no thread gets them until they are in a list again. A late reader pins
            // such a span but never reads it.
            unsafe { self.data.release(start * PAGE_SIZE, (end - start) * PAGE_SIZE) };
        }
    }

    fn cut(&self, state: &mut ArenaState, pages: u16) -> Option<u32> {
        let index = state.cut;
        let span = self.spans.get(index)?;
        if (state.edge as usize + pages as usize) * PAGE_SIZE > self.data.len() {
            return None;
        }
        if !self.spans.need(index + 1)
            || !self.data.need((state.edge as usize + pages as usize) * PAGE_SIZE)
        {
            return None;
        }
        self.budget
            .charge(AreaTable::<PoolSpan>::bytes(index + 1) - AreaTable::<PoolSpan>::bytes(index));
        span.set_first_page(state.edge);
        span.set_pages(pages);
        state.edge += pages as u32;
        state.cut += 1;
        Some(index)
    }

    fn pop(&self, list: &mut SpanList) -> Option<u32> {
        let index = list.first();
        list.set_first(self.spans.get(index)?.next());
        Some(index)
    }

    fn push(&self, list: &mut SpanList, index: u32) {
        if let Some(span) = self.spans.get(index) {
            list.push(index, span);
        }
    }

    /// Checks the lists against the sums, given the number and bytes of the spans that classes own.
    ///
    /// # Errors
    /// Says what does not fit.
    pub fn check(
        &self,
        state: &ArenaState,
        owned: u32,
        owned_bytes: u64,
    ) -> Result<(), &'static str> {
        let (mut count, mut warm_bytes, mut pages_seen) = (0, 0, 0);
        for pages in 1..=MAX_PAGES {
            for (is_warm, list) in [(true, state.warm[pages]), (false, state.bare[pages])] {
                let mut at = list.first();
                while let Some(span) = self.spans.get(at) {
                    if span.class().is_some()
                        || span.in_use() != 0
                        || span.pages() as usize != pages
                    {
                        return Err(
                            "a waiting span has a class, objects, or another length than its list",
                        );
                    }
                    count += 1;
                    if count > state.cut {
                        return Err("a list of waiting spans has a loop");
                    }
                    warm_bytes += if is_warm { (pages * PAGE_SIZE) as u64 } else { 0 };
                    at = span.next();
                }
            }
        }
        for index in 0..state.cut {
            let span = self.spans.get(index).ok_or("more spans cut than fit")?;
            if span.first_page() != pages_seen {
                return Err("spans overlap or leave a gap");
            }
            pages_seen += span.pages() as u32;
        }
        if pages_seen != state.edge {
            return Err("the spans' pages do not add up to the edge");
        }
        if count + owned + state.moving != state.cut {
            return Err("class spans and waiting spans do not add up");
        }
        if warm_bytes != state.warm_bytes {
            return Err("warm bytes are wrong");
        }
        if state.moving == 0 && owned_bytes + warm_bytes != state.held {
            return Err("held bytes are wrong");
        }
        Ok(())
    }
}
