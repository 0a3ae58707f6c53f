//! In gate delivery the program's own calls change the address space here, with the areas locked.
//! No thread serves a fault, evicts or adopts between a call and the change of the areas that
//! follows from it. So there is no order to be argued, and no event to be handled later.
//!
//! The caller (`memfold-process`) admits one thread at a time. So its earlier queries of areas stay
//! true.
use crate::area::{Area, Areas, page_of};
use crate::folio::FolioState;
use crate::mappings::Mappings;
use crate::mappings::ranges::KeyRanges;
use alloc::vec::Vec;
use core::iter::once;
use core::ops::Range;
use memfold_os::Errno;
use memfold_os::maps::pagemap::Pagemap;
use memfold_os::units::{PAGE_SHIFT, PAGE_SIZE};
use memfold_stats as stats;

/// Returns whether a system call's result is one of its errors.
pub fn failed(result: isize) -> bool {
    (-4095..0).contains(&result)
}

fn pages(range: &Range<usize>) -> Range<u64> {
    page_of(range.start)..range.end.div_ceil(PAGE_SIZE) as u64
}

/// An mremap of the program, addresses and lengths in whole pages.
#[derive(Clone, Debug)]
pub struct RemapCall {
    /// The range that is to be moved or resized.
    pub from: Range<usize>,
    /// Its new length.
    pub len: usize,
    /// Its new address (MREMAP_FIXED).
    pub to: Option<usize>,
    /// The source stays mapped, and empty (MREMAP_DONTUNMAP).
    pub keeps_source: bool,
}

/// A block of which less than one part in so many is present is adopted page by page. Otherwise
/// sparse memory would count as much more than it is.
const SPARSE: usize = 2;

/// The present parts of a range, in runs that end where blocks do.
struct PresentRuns<'a> {
    range: &'a Range<usize>,
    block: usize,
    runs: Vec<Range<usize>>,
}

impl PresentRuns<'_> {
    fn new(range: &Range<usize>, block: usize) -> PresentRuns<'_> {
        PresentRuns { range, block, runs: Vec::new() }
    }

    fn block_of(&self, at: usize) -> Range<usize> {
        let start = at & !(self.block - 1);
        start.max(self.range.start)..(start + self.block).min(self.range.end)
    }

    /// Adds a run, which lies above all earlier ones.
    fn add(&mut self, run: Range<usize>) {
        let first = self.block_of(run.start);
        let last = self.block_of(run.end - 1);
        let middle = first.end..last.start;
        match middle.start > middle.end {
            true => self.runs.push(run),
            false => {
                self.runs.push(run.start..middle.start);
                self.runs.push(middle.clone());
                self.runs.push(middle.end..run.end);
            }
        }
    }

    /// Returns whole blocks of which one part in `least` is present, and the runs of the others.
    /// Neighbours are joined.
    fn into_blocks(self, least: usize) -> Vec<Range<usize>> {
        let (mut all, mut at): (Vec<Range<usize>>, _) = (Vec::new(), 0);
        let mut push = |run: Range<usize>| match all.last_mut() {
            Some(last) if last.end == run.start => last.end = run.end,
            _ if !run.is_empty() => all.push(run),
            _ => {}
        };
        while let Some(first) = self.runs.get(at) {
            let block = self.block_of(first.start);
            let count = self.runs[at..].iter().take_while(|run| run.end <= block.end).count();
            let inside = &self.runs[at..at + count.max(1)];
            let there: usize = inside.iter().map(Range::len).sum();
            match there > 0 && count > 0 && there.saturating_mul(least) >= block.len() {
                true => push(block),
                false => inside.iter().cloned().for_each(&mut push),
            }
            at += inside.len();
        }
        all
    }
}

impl Mappings<'_> {
    /// Fills only what the program touches from now on, because it has a userfaultfd of its own and
    /// expects a fault for each page that it has not touched.
    pub fn fill_touched_pages_only(&self) {
        self.engine.first_touches.be_exact();
    }

    /// Returns whether any part of a range of addresses is managed.
    pub fn touches(&self, range: &Range<usize>) -> bool {
        let pages = pages(range);
        self.areas.read().touch(pages.start, pages.end)
    }

    /// Returns whether an address is managed, and the end of the run for which that is so.
    pub fn run_at(&self, at: usize) -> (bool, usize) {
        let areas = self.areas.read();
        let (is_managed, end) = areas.run_at(page_of(at));
        (is_managed, (end as usize) << PAGE_SHIFT)
    }

    /// Returns the managed parts of a range of addresses. Neighbours are joined.
    pub fn managed_parts(&self, range: &Range<usize>) -> Vec<Range<usize>> {
        let (areas, pages) = (self.areas.read(), pages(range));
        let mut all = parts(&areas, &pages);
        all.dedup_by(|next, last| {
            let joins = last.end == next.start;
            last.end = if joins { next.end } else { last.end };
            joins
        });
        all
    }

    /// Manages a range that touches no area, and calls `register` to register it, with whether a
    /// part of it is held. Calls that name a part of it either wait, or hold it already. `bring`
    /// loads the held parts, because the kernel can't fault them in from then on. Faults of the
    /// program in the range wait meanwhile. Threads that touch it before it is registered make
    /// pages, which are found afterwards.
    ///
    /// # Errors
    /// The error of `register` or of the page-map scan; then the range may be registered, but is
    /// not managed. ENOMEM: all records are in use.
    pub fn take(
        &self,
        range: Range<usize>,
        pagemap: &Pagemap,
        mut bring: impl FnMut(Range<usize>),
        register: impl FnOnce(bool) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        self.table.room_for_more()?;
        let leaving = self.holds.mark_leaving(once(range.clone()));
        leaving.each_held(range.clone(), &mut bring);
        let mut areas = self.areas.write();
        register(leaving.is_held(range.clone()))?;
        let mut present = PresentRuns::new(&range, self.config.block_order.bytes());
        pagemap.for_each_populated(range.start, range.end, |s, e| present.add(s..e))?;
        let runs = match self.config.paging.hides() {
            // Blocks are hidden whole.
            true => present.into_blocks(usize::MAX),
            false => present.into_blocks(SPARSE),
        };
        areas.add(page_of(range.start), page_of(range.end));
        for run in runs {
            let area = areas.find(run.start).expect("just added");
            KeyRanges::new(self.engine)
                .note_resident(area.key_of(run.start), area.key_of(run.start) + page_of(run.len()));
        }
        stats::add(&self.stats.adopted_bytes, range.len() as u64);
        Ok(())
    }

    /// Makes a call that ends or replaces all mappings in a range, or puts guards there. If
    /// `is_done` of its result, management of the range has ended.
    pub fn end_with(
        &self,
        range: Range<usize>,
        make: impl FnOnce() -> isize,
        is_done: impl FnOnce(isize) -> bool,
    ) -> isize {
        if !self.touches(&range) {
            return make();
        }
        let mut areas = self.areas.write();
        let result = make();
        if is_done(result) {
            KeyRanges::new(self.engine).forget(
                &mut areas,
                range.start,
                range.end.next_multiple_of(PAGE_SIZE),
                false,
            );
        }
        result
    }

    /// Ends the management of a range whose mappings have ended.
    pub fn end(&self, range: Range<usize>) {
        self.end_with(range, || 0, |_| true);
    }

    /// Makes a call that discards the contents of `ranges`, none of which is held. If `is_done` of
    /// its result, they read as zeros. Where memory is hidden, `make` hides it first.
    pub fn discard_with(
        &self,
        ranges: &[Range<usize>],
        make: impl FnOnce() -> isize,
        is_done: fn(isize) -> bool,
    ) -> isize {
        if !ranges.iter().any(|range| self.touches(range)) {
            return make();
        }
        let areas = self.areas.write();
        let result = make();
        if is_done(result) {
            for (area, keys) in ranges.iter().flat_map(|range| areas.parts(&pages(range))) {
                KeyRanges::new(self.engine).discard_keys(&area, keys, false);
            }
        } else {
            ranges.iter().for_each(|range| self.show_resident(&areas, &pages(range)));
        }
        result
    }

    /// Makes an mremap, and moves the areas if it succeeds. Other threads may touch all of the
    /// memory meanwhile:
    /// - With a userfaultfd, the kernel keeps the registration of memory that it moves
    ///   (UFFD_FEATURE_EVENT_REMAP), also of a source that stays mapped. So a folded page raises a
    ///   fault at every moment, and the fault waits for the areas.
    /// - Where memory is hidden, the caller has hidden the source. What moves stays hidden until
    ///   the areas have moved.
    pub fn remap_with(&self, remap: &RemapCall, make: impl FnOnce() -> isize) -> isize {
        let RemapCall { from, len, to, keeps_source } = remap.clone();
        let target = to.map_or(0..0, |to| to..to + len);
        if !self.touches(&from) && (target.is_empty() || !self.touches(&target)) {
            return make();
        }
        let key_ranges = KeyRanges::new(self.engine);
        let mut areas = self.areas.write();
        let (old, new) = (pages(&from), (len >> PAGE_SHIFT) as u64);
        let moved_bytes = (old.end - old.start).min(new);
        for edge in [old.start, old.start + moved_bytes, old.end] {
            key_ranges.cut(&areas, edge, edge);
        }
        let result = make();
        if failed(result) {
            self.show_resident(&areas, &old);
            return result;
        }
        if !target.is_empty() {
            key_ranges.forget(&mut areas, target.start, target.end, false);
        }
        let at = page_of(result as usize);
        let source = parts(&areas, &(old.start..old.start + moved_bytes));
        if old.start + moved_bytes < old.end {
            let cut_off = ((old.start + moved_bytes) as usize) << PAGE_SHIFT;
            key_ranges.forget(&mut areas, cut_off, from.end, false);
        }
        if at != old.start {
            areas.relocate(old.start, at, moved_bytes);
        }
        if keeps_source {
            source.iter().for_each(|part| areas.add(page_of(part.start), page_of(part.end)));
        }
        // The new part belongs to the mapping before it, so it is registered or hidden as that is.
        let is_managed = moved_bytes > 0 && areas.touch(at + moved_bytes - 1, at + moved_bytes);
        if is_managed && moved_bytes < new && !areas.touch(at + moved_bytes, at + new) {
            areas.add(at + moved_bytes, at + new);
        }
        self.show_resident(&areas, &(at..at + new));
        result
    }

    /// Makes a call that lengthens a hidden mapping by `added`. If it succeeds, that is managed.
    pub fn grow_hidden_with(&self, added: Range<usize>, make: impl FnOnce() -> isize) -> isize {
        let mut areas = self.areas.write();
        let result = make();
        if !failed(result) {
            areas.add(page_of(added.start), page_of(added.end));
        }
        result
    }

    /// Shows the program's pages of a range that was hidden as a whole.
    fn show_resident(&self, areas: &Areas, range: &Range<u64>) {
        if !self.mapper.space().hides() {
            return;
        }
        let show = |run: Range<usize>| {
            let outcome = self.mapper.space().protect(run.start, run.len(), false);
            outcome.expect("memfold: Showing hidden pages failed");
        };
        let mut run = 0..0;
        for (area, keys) in areas.parts(range) {
            self.table.each(keys.clone(), |guard, id| {
                let folio = self.table.get(guard, id);
                if folio.state.get() != FolioState::Resident {
                    return;
                }
                let own = folio.key().max(keys.start)..folio.end().min(keys.end);
                let own = area.addr_of(own.start)..area.addr_of(own.end);
                if run.end != own.start && !run.is_empty() {
                    show(run.clone());
                }
                run = if run.end == own.start { run.start..own.end } else { own };
            });
        }
        if !run.is_empty() {
            show(run);
        }
    }

    /// Drops stray pages of a range in a child of fork: they are in its page table though the engine
    /// has their bytes. No thread of the program can have mapped them, because the child has only
    /// the one that calls this. But the child's memory was not registered at first, and khugepaged
    /// may have mapped zeros there, where a part of a huge page is missing. The caller has
    /// registered the range.
    ///
    /// # Panics
    /// If the kernel doesn't report which pages are present.
    pub(crate) fn drop_strays(&self, areas: &Areas, range: &Range<u64>, pagemap: &Pagemap) {
        if !self.mapper.drops_clean() && self.config.fallback_percent > 0 {
            // A load that is undone half-way leaves pages, which may have been written to.
            return;
        }
        for (area, keys) in areas.parts(range) {
            let mut there: Vec<Range<u64>> = Vec::new();
            let key_of = |addr: usize| area.key + (page_of(addr) - area.start);
            let outcome = pagemap.for_each_populated(
                area.addr_of(keys.start),
                area.addr_of(keys.end),
                |start, end| there.push(key_of(start)..key_of(end)),
            );
            outcome.expect("memfold: Reading /proc/self/pagemap failed");
            there.into_iter().for_each(|keys| self.drop_strays_among(&area, keys));
        }
    }

    /// Drops stray pages among keys of pages that are present. If no folio covers a page, zeros
    /// belong there, and the page gets a folio.
    fn drop_strays_among(&self, area: &Area, there: Range<u64>) {
        let (mut at, mut new) = (there.start, Vec::new());
        self.table.each(there.clone(), |guard, id| {
            let folio = self.table.get(guard, id);
            if at < folio.key() {
                new.push(at..folio.key());
            }
            at = folio.end();
            if folio.state.get() == FolioState::Resident {
                return;
            }
            let keys = folio.key().max(there.start)..folio.end().min(there.end);
            for key in keys.filter(|key| !folio.is_here(*key)) {
                // SAFETY: the engine has the bytes, and no thread has written to a stray page.
                let outcome = unsafe { self.mapper.space().discard(area.addr_of(key), PAGE_SIZE) };
                outcome.expect("memfold: Dropping a stray page failed");
            }
        });
        if at < there.end {
            new.push(at..there.end);
        }
        new.into_iter()
            .for_each(|keys| KeyRanges::new(self.engine).note_resident(keys.start, keys.end));
    }
}

/// Returns the managed parts of a range of pages, as addresses.
fn parts(areas: &Areas, pages: &Range<u64>) -> Vec<Range<usize>> {
    let addrs = |(area, keys): (Area, Range<u64>)| area.addr_of(keys.start)..area.addr_of(keys.end);
    areas.parts(pages).into_iter().map(addrs).collect()
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use memfold_testkit::random::Random;

    /// Expects page by page, or a block whole if enough of it is present.
    fn expected(range: &Range<usize>, there: &[bool], block: usize, least: usize) -> Vec<bool> {
        let mut taken = there.to_vec();
        let mut at = range.start;
        while at < range.end {
            let end = ((at & !(block - 1)) + block).min(range.end);
            let part = (at - range.start) / PAGE_SIZE..(end - range.start) / PAGE_SIZE;
            let count = there[part.clone()].iter().filter(|there| **there).count();
            if count > 0 && count * least >= part.len() {
                taken[part].fill(true);
            }
            at = end;
        }
        taken
    }

    #[test]
    fn a_block_is_taken_whole_if_enough_of_it_is_there() {
        let mut random = Random::new(5);
        for round in 0..3000 {
            let start = (64 + random.below(40)) * PAGE_SIZE;
            let range = start..start + (1 + random.below(200)) * PAGE_SIZE;
            let chance = random.below(1000) as u32;
            let mut is_there = random.per_mille(chance);
            let there: Vec<bool> = range
                .clone()
                .step_by(PAGE_SIZE)
                .map(|_| {
                    is_there ^= random.per_mille(300);
                    is_there
                })
                .collect();
            for least in [SPARSE, 1 << 20] {
                let mut present = PresentRuns::new(&range, 16 * PAGE_SIZE);
                let mut at = 0;
                for run in there.chunk_by(|a, b| a == b) {
                    let run_start = range.start + at * PAGE_SIZE;
                    if run[0] {
                        present.add(run_start..run_start + run.len() * PAGE_SIZE);
                    }
                    at += run.len();
                }
                let runs = present.into_blocks(least);
                let mut taken = vec![false; there.len()];
                for run in &runs {
                    let part =
                        (run.start - range.start) / PAGE_SIZE..(run.end - range.start) / PAGE_SIZE;
                    assert!(!part.is_empty() && taken[part.clone()].iter().all(|taken| !taken));
                    taken[part].fill(true);
                }
                assert_eq!(taken, expected(&range, &there, 16 * PAGE_SIZE, least), "{round}");
                assert!(runs.windows(2).all(|two| two[0].end < two[1].start));
            }
        }
    }
}
