//! `mremap`.
//!
//! Other threads may touch the memory at every moment of the call, so it is always registered or
//! hidden. A shrink gives up only the end. Growth in place changes nothing that is there. With a
//! userfaultfd, moved memory stays registered ([`crate::paging`]). Where memory is hidden by
//! protection, all of the source is hidden until the areas have moved. But if the source is several
//! mappings for the program too, the kernel must find them and refuse to move them.
use crate::adoption::Adoption;
use crate::mappings::call::{MakeCall, NO_MEMORY, end_of, whole};
use crate::marks::ranges::{RangeSet, common, without};
use crate::marks::state::{FoundRanges, MemoryMark, ProgramState, RemappedTo};
use crate::program::{ManagedProgram, PLAIN, ProgramMemory};
use alloc::vec::Vec;
use core::ops::Range;
use memfold_engine::fault::{FaultOutcome, PageFault};
use memfold_engine::holds::LeavingPages;
use memfold_engine::mappings::calls::{RemapCall, failed};
use memfold_engine::pager::Pager;
use memfold_os::memory::zone::unless_own;
use memfold_os::thread::yield_now;
use memfold_os::units::PAGE_SIZE;

impl RemappedTo {
    /// Returns the effect of an mremap with these arguments that has returned `at`, or `None` if it
    /// moves nothing.
    fn of(args: &[usize; 6], at: usize) -> Option<RemappedTo> {
        let [start, old, new, flags, ..] = *args;
        let (from, after) = (whole(start, old)?, whole(start, new)?);
        let keeps_source = flags as i32 & libc::MREMAP_DONTUNMAP != 0;
        let rest = match (at == start, keeps_source) {
            (true, _) => after.end..from.end.max(after.end),
            (false, true) => 0..0,
            (false, false) => from.clone(),
        };
        let source = start..(start + old.min(new)).next_multiple_of(PAGE_SIZE);
        Some(RemappedTo { target: at..at + after.len(), from, taken: source, gone: rest })
    }
}

/// Makes `mremap`.
#[derive(Copy, Clone)]
pub struct RemapCalls<'a> {
    pager: &'a Pager,
    memory: &'a ProgramMemory,
    adoption: Adoption<'a>,
}

impl RemapCalls<'_> {
    /// Returns the walk over the parts of `program`.
    pub fn of(program: &ManagedProgram) -> RemapCalls<'_> {
        RemapCalls {
            pager: program.pager(),
            memory: program.memory(),
            adoption: Adoption::of(program),
        }
    }

    /// Returns the mappings that an mremap moves, if its range has several mappings or a gap, and
    /// the engine is concerned.
    pub fn moved_apart(&self, args: &[usize; 6]) -> Option<Vec<Range<usize>>> {
        const FLAGS: i32 = libc::MREMAP_FIXED | libc::MREMAP_MAYMOVE;
        let [start, old, new, flags, to, _] = *args;
        let (from, to) = (whole(start, old)?, whole(to, new)?);
        let overlaps = from.start < to.end && to.start < from.end;
        if flags as i32 & FLAGS != FLAGS || from.len() != to.len() || overlaps {
            return None;
        }
        if !self.pager.mappings().touches(&from) && !self.pager.mappings().touches(&to) {
            return None;
        }
        let parts = self.memory.mappings(&from);
        let begins = parts.first().is_some_and(|first| first.start == from.start);
        (begins && parts[0] != from).then_some(parts)
    }

    /// Makes an mremap.
    pub fn remap(&self, state: &mut ProgramState, args: &[usize; 6], make: MakeCall) -> isize {
        const PLACED: i32 = libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
        let [start, old, new, flags, ..] = *args;
        let (Some(from), Some(after)) = (whole(start, old), whole(start, new)) else {
            return make(args);
        };
        let stays = flags as i32 & PLACED == 0;
        self.adoption.expect_new(state, after.len().saturating_sub(from.len()));
        let result = if stays && after.len() <= from.len() {
            let is_done = |made: isize| !failed(made);
            self.pager.mappings().end_with(after.end..from.end, || make(args), is_done)
        } else {
            let grows = stays && self.memory.paging().hides() && self.is_one(state, &from);
            let growth = if grows { self.grow_hidden(&from, after.end, make) } else { None };
            if !self.memory.paging().hides() {
                self.join_parts(&from);
            }
            growth.unwrap_or_else(|| self.move_managed(state, args, (&from, &after), make))
        };
        if !failed(result) {
            let before = self.memory.before(state, core::slice::from_ref(&from));
            self.note_remapped(state, args, before, result);
        }
        result
    }

    /// Returns whether a range is managed in part, and the rest has the access of managed memory.
    /// Also returns the rest.
    fn plain_rest(&self, range: &Range<usize>) -> Option<Vec<Range<usize>>> {
        let managed = self.pager.mappings().managed_parts(range);
        let rest = if managed.is_empty() { return None } else { without(range, &managed) };
        let is_plain = |part: &Range<usize>| {
            let mut end = part.start;
            let outcome = self.memory.maps().each(part.start, part.end, |mapping| {
                let continues =
                    mapping.anonymous && mapping.access == PLAIN && mapping.start <= end;
                end = if continues { mapping.end } else { usize::MAX };
            });
            outcome.is_ok() && (part.end..usize::MAX).contains(&end)
        };
        rest.iter().all(is_plain).then_some(rest)
    }

    /// Joins the parts of a range that is managed in part and is one mapping for the program. For
    /// the kernel its managed parts are others than the rest, and it resizes and moves only one. So
    /// the rest is registered too, for good.
    fn join_parts(&self, from: &Range<usize>) {
        for part in self.plain_rest(from).unwrap_or_default() {
            let outcome = unless_own(part.start, part.end, || self.memory.register(&part, false));
            if outcome.is_ok() {
                self.memory.note_registered();
            }
        }
    }

    /// Returns whether a range that is managed in part is one mapping for the program. Where memory
    /// is hidden, the kernel has more.
    fn is_one(&self, state: &mut ProgramState, range: &Range<usize>) -> bool {
        /// Marks of memory that the kernel keeps in mappings of its own.
        const SPLITTING: [MemoryMark; 6] = [
            MemoryMark::Locked,
            MemoryMark::DontFork,
            MemoryMark::Wiped,
            MemoryMark::DontDump,
            MemoryMark::Mergeable,
            MemoryMark::Other,
        ];
        let mut is_whole = |mark: &MemoryMark| {
            let ranges = state.marked(*mark).within(range);
            ranges.is_empty() || ranges == [range.clone()]
        };
        self.plain_rest(range).is_some() && SPLITTING.iter().all(&mut is_whole)
    }

    /// Makes sure that the kernel finds several mappings in a range that is several for the program.
    /// Memory that the program has without access looks like hidden memory beside it. So the managed
    /// page at their border is loaded, and no longer managed.
    fn part_from_shut(&self, range: &Range<usize>) {
        for managed in self.pager.mappings().managed_parts(range) {
            let mut edges = Vec::new();
            let _ = self.memory.maps().each(range.start, range.end, |mapping| {
                let is_shut = mapping.anonymous && mapping.access == libc::PROT_NONE;
                if is_shut && mapping.start < managed.start && managed.start <= mapping.end {
                    edges.push(managed.start);
                }
                if is_shut && mapping.start <= managed.end && managed.end < mapping.end {
                    edges.push(managed.end - PAGE_SIZE);
                }
            });
            edges.into_iter().for_each(|page| self.memory.leave(&(page..page + PAGE_SIZE)));
        }
    }

    /// Makes an mremap that may move its memory.
    fn move_managed(
        &self,
        state: &mut ProgramState,
        args: &[usize; 6],
        (from, after): (&Range<usize>, &Range<usize>),
        make: MakeCall,
    ) -> isize {
        let [.., flags, to, _] = *args;
        let has = |flag: i32| flags as i32 & flag != 0;
        let target = if has(libc::MREMAP_FIXED) { to..end_of(to, after.len()) } else { 0..0 };
        let remap = RemapCall {
            from: from.clone(),
            len: after.len(),
            to: has(libc::MREMAP_FIXED).then_some(to),
            keeps_source: has(libc::MREMAP_DONTUNMAP),
        };
        let mappings = self.pager.mappings();
        // The kernel cuts off the rest before it moves memory.
        let source = from.start..from.start + from.len().min(after.len());
        let may_hide = self.memory.paging().hides() && mappings.touches(&source);
        let is_hidden = may_hide && self.is_one(state, &source);
        if may_hide && !is_hidden {
            self.part_from_shut(&source);
        }
        let departure = self.pager.holds().mark_leaving([from.clone(), target.clone()].into_iter());
        if is_hidden && (departure.is_held(source.clone()) || departure.is_held(target.clone())) {
            // Memory that is hidden for a moment would be missing for the kernel in another call.
            return NO_MEMORY;
        }
        let remake =
            || if is_hidden { self.remap_hidden(&source, || make(args)) } else { make(args) };
        let pins = if self.memory.paging().hides() {
            Vec::new()
        } else {
            self.pin_held(&departure, from, &target)
        };
        let result = mappings.remap_with(&remap, remake);
        let pinned_at = if failed(result) { from.start } else { result as usize };
        for part in pins {
            mappings.unpin_at(part.start + pinned_at..part.end + pinned_at);
        }
        if is_hidden && (failed(result) || remap.keeps_source) {
            self.show_unmanaged(&source);
        }
        if is_hidden && !failed(result) {
            self.show_unmanaged(&(result as usize..result as usize + after.len()));
        }
        if failed(result) {
            self.forget_unmapped(state, from);
            self.forget_unmapped(state, &target);
            if may_hide && !is_hidden {
                self.adoption.adopt(state, &source);
            }
        }
        result
    }

    /// Loads and pins the memory that is about to move to held parts of `target`, because the call
    /// that holds them can't fault it in. Returns its offsets from the start of `from`.
    fn pin_held(
        &self,
        leaving: &LeavingPages,
        from: &Range<usize>,
        target: &Range<usize>,
    ) -> Vec<Range<usize>> {
        let mut held_ranges = RangeSet::default();
        leaving.each_held(target.clone(), |part| held_ranges.add(part));
        let offsets = |part: Range<usize>| {
            part.start - target.start..(part.end - target.start).min(from.len())
        };
        let held_parts =
            held_ranges.within(target).into_iter().map(offsets).filter(|part| !part.is_empty());
        let held_parts: Vec<Range<usize>> = held_parts.collect();
        for part in &held_parts {
            let part = part.start + from.start..part.end + from.start;
            self.pager.mappings().pin_at(part.clone());
            for addr in part.step_by(PAGE_SIZE) {
                let fault = PageFault { addr, write: true, ..PageFault::default() };
                while !self.memory.pagemap().is_populated(addr)
                    && self.pager.faults().fault(fault) != FaultOutcome::NotManaged
                {
                    yield_now();
                }
            }
        }
        held_parts
    }

    /// Ends the management of parts of a range that a failed mremap has unmapped: the kernel cuts
    /// off the end of the source, and unmaps the target, before it moves.
    fn forget_unmapped(&self, state: &mut ProgramState, range: &Range<usize>) {
        for part in self.pager.mappings().managed_parts(range) {
            for range in without(&part, &self.memory.mappings(&part)) {
                self.pager.mappings().end(range.clone());
                state.forget(&range);
            }
        }
    }

    /// Lengthens a range in place, to `end`, where memory is hidden. The kernel lengthens only the
    /// last of the mappings that the range consists of; nothing else changes. Returns `None`, and
    /// changes nothing, if it refuses.
    fn grow_hidden(&self, from: &Range<usize>, end: usize, make: MakeCall) -> Option<isize> {
        let mut last = None;
        let _ = self.memory.maps().each(from.end - PAGE_SIZE, from.end, |mapping| {
            last = Some((mapping.start.max(from.start), mapping.end, mapping.access));
        });
        let (start, _, access) = last.filter(|(_, last_end, _)| *last_end == from.end)?;
        let growth = from.end..end;
        let mut grow = || make(&[start, from.end - start, end - start, 0, 0, 0]);
        let result = match access & (libc::PROT_READ | libc::PROT_WRITE) {
            libc::PROT_NONE => self.pager.mappings().grow_hidden_with(growth, grow),
            // It is readable, and managed once it is hidden.
            _ => grow(),
        };
        (!failed(result)).then_some(from.start as isize)
    }

    /// Records an mremap that was made. Marks, and the program's own faults, move with the memory.
    pub fn note_remapped(
        &self,
        state: &mut ProgramState,
        args: &[usize; 6],
        before: FoundRanges,
        result: isize,
    ) {
        let Some(remap) = RemappedTo::of(args, result as usize) else { return };
        state.note_moved(&remap, &before);
        if remap.is_elsewhere() {
            self.memory.forget_faults(&remap.target);
            before
                .parts
                .iter()
                .for_each(|part| self.memory.forget_faults(&common(part, &remap.taken)));
            let faults = before.faults.iter().map(|part| remap.there(part));
            faults.for_each(|part| self.memory.add_faults(part));
        }
        self.memory.known().set(&remap.target);
        // What is managed already needs no look, so the cost of growth is that of what is new.
        let target =
            remap.target.start..remap.target.start + remap.taken.len().min(remap.target.len());
        let is_managed = self.pager.mappings().managed_parts(&target) == [target.clone()];
        let rest = if is_managed { target.end..remap.target.end } else { remap.target };
        self.adoption.adopt(state, &rest);
    }

    /// Makes an mremap where memory is hidden. The program sees the range as one mapping.
    fn remap_hidden(&self, from: &Range<usize>, make: impl FnOnce() -> isize) -> isize {
        if self.memory.paging().hide(from).is_err() {
            return NO_MEMORY;
        }
        // It is one mapping for the program. In a child of fork, the range may stay split into several mappings for good.
        Some(make()).filter(|result| *result != -(libc::EFAULT as isize)).unwrap_or(NO_MEMORY)
    }

    /// Shows the program the unmanaged parts of a range that was hidden.
    fn show_unmanaged(&self, range: &Range<usize>) {
        for part in without(range, &self.pager.mappings().managed_parts(range)) {
            let _ = self.memory.paging().unregister(&part);
        }
    }
}
