//! Adoption: which memory comes under management, and when. It begins when the program's size nears
//! its bounds.
use crate::adoption::Adoption;
use crate::marks::state::{FLAGS, MemoryMark, ProgramState};
use crate::size::process_size;
use crate::{diagnostics, engine};
use alloc::vec;
use alloc::vec::Vec;
use core::ops::ControlFlow::Continue;
use core::ops::Range;
use memfold_engine::known::TOP;
use memfold_os::maps::flag;
use memfold_os::memory::zone::{overlaps_own, unless_own};
use memfold_os::raw::{populates, system_call};
use memfold_os::units::PAGE_SIZE;

/// Smaller areas are left unmanaged unless they continue a managed one.
const SMALL_BYTES: usize = 64 << 10;
/// A mapping of this size or more is reported to the other processes of the run at once.
const LARGE_BYTES: usize = 1 << 20;
/// Small ranges that wait for adoption are taken once they have this many bytes.
const LATE_BYTES: usize = 1 << 20;

impl Adoption<'_> {
    /// Prepares for a call that maps `bytes` more. If the program could exceed the limit before the
    /// next look at its size, takes its present memory under management now. The new memory is
    /// taken with the call.
    pub fn expect(&self, state: &mut ProgramState, bytes: usize) {
        engine::end_rest();
        state.mapped_since = state.mapped_since.saturating_add(bytes);
        let most = state.level.anonymous.saturating_add(state.mapped_since as u64);
        if self.memory.is_managing() {
            return;
        }
        let is_large = bytes >= LARGE_BYTES;
        let has_room = most <= self.pager.limits().bound_bytes();
        if has_room && (!is_large || self.account.has_room(&mut state.level, most)) {
            return;
        }
        self.begin_managing(state);
    }

    /// Prepares for a call that makes `bytes` more writable, as [`Adoption::expect`] does.
    /// None of them may be writable already.
    pub fn expect_new(&self, state: &mut ProgramState, bytes: usize) {
        self.expect(state, bytes);
        if self.may_pass(state, bytes as u64) {
            self.begin_managing(state);
        }
    }

    /// Takes all memory under management now.
    pub fn begin_managing(&self, state: &mut ProgramState) {
        state.mapped_since = 0;
        engine::have_done(|| {
            self.threads.start(state, self.memory.paging(), true);
            if state.threads.is_complete() {
                self.adopt_all(state);
            }
        });
    }

    /// Takes all suitable memory under management, in one step. No mapping changes meanwhile.
    pub fn adopt_all(&self, state: &mut ProgramState) {
        let (mut all, mut mergeable): (Vec<Range<usize>>, Vec<Range<usize>>) = Default::default();
        let dump = if self.account.folds_dont_dump() { Some(MemoryMark::DontDump) } else { None };
        let outcome = self.account.each_mapping(|area, about| {
            let range = area.start..area.end;
            if !area.is_private_anonymous() || area.end > TOP || overlaps_own(area.start, area.end)
            {
                return Continue(());
            }
            self.memory.known().set(&range);
            for (flags, mark) in FLAGS {
                if about.has(flags) && Some(mark) != dump && !state.is_undone(flags, &range) {
                    state.marked(mark).add(range.clone());
                }
            }
            let suits = self.memory.suits(area.access()) && !area.is_stack();
            if suits && about.has(flag::MERGEABLE) && !state.merges {
                mergeable.push(range.clone());
            }
            match all.last_mut() {
                _ if !suits => {}
                Some(last) if last.end == range.start => last.end = range.end,
                _ => all.push(range),
            }
            Continue(())
        });
        if outcome.is_err() && !self.account.is_blind() {
            return;
        }
        if outcome.is_err() {
            diagnostics::warn(format_args!(
                "warning: A child of fork has no /proc, so memory that it inherited stays uncompressed"
            ));
        }
        mergeable.iter().for_each(end_merging);
        // Set before the first range is registered. A thread that makes a call from now on touches
        // the buffers of the call. Buffers of earlier calls are found by their holds.
        self.memory.set_managing(true);
        self.take_parts(state, all);
    }

    /// Takes a range as [`Adoption::adopt`] does. A small range waits until enough have come
    /// together, or until the next look. libc's heap and arenas grow in small ranges. If each were
    /// taken at once, it would be filled by faults of its own, and would end the folios before and
    /// after it.
    pub fn adopt_later(&self, state: &mut ProgramState, range: &Range<usize>) {
        if self.memory.is_managing() {
            state.late.add(range.clone());
            if state.late.bytes() >= LATE_BYTES {
                self.adopt_late(state);
            }
        }
    }

    pub fn adopt_late(&self, state: &mut ProgramState) {
        for range in state.late.take() {
            self.adopt(state, &range);
        }
    }

    /// Takes the memory that was mapped as a stack and that no thread uses as one: no mapping of it
    /// holds what the gate has reported for a thread. A thread's stack stays unmanaged, so that its
    /// mapping isn't split.
    pub fn adopt_stacks(&self, state: &mut ProgramState) {
        if !self.memory.is_managing() {
            return;
        }
        for range in state.marked(MemoryMark::Stack).take() {
            let mut parts = Vec::new();
            let _ = self.memory.maps().each(range.start, range.end, |mapping| {
                parts.push(mapping.start.max(range.start)..mapping.end.min(range.end));
            });
            for part in parts {
                let own = state.marked(MemoryMark::Own);
                match own.within(&part).is_empty() {
                    true => self.adopt(state, &part),
                    false => own.add(part),
                }
            }
        }
    }

    /// Takes the suitable mappings in a range that are not managed yet, each as a whole. Small ranges that continue no managed one are taken once they have
    /// [`LATE_BYTES`] together.
    pub fn adopt(&self, state: &mut ProgramState, range: &Range<usize>) {
        if !self.memory.is_managing() || !state.takes() {
            return;
        }
        let all = self.memory.suitable(range);
        self.take_parts(state, all);
    }

    /// Loads everything into memory and keeps it there, for a task that is about to be traced; or
    /// ends that. Returns `false` if the machine has too little free memory.
    pub fn keep_home(&self, keep: bool) -> bool {
        let mut state = self.memory.state().lock();
        if keep {
            let available = process_size::available_bytes();
            if available > 0 && self.pager.gauges().away_bytes() > available {
                return false;
            }
            state.traced += 1;
            self.memory.leave_with_guards(&mut state, &(0..TOP));
        } else {
            state.traced -= 1;
            self.adopt(&mut state, &(0..TOP));
        }
        true
    }

    /// Ends the apart call of a child of vfork that is gone, if one was in progress: the child may
    /// have been killed in it. `child` is its number.
    pub fn end_child(&self, child: usize) {
        if !self.memory.had_apart() {
            return;
        }
        let state = &mut *self.memory.state().lock();
        if let Some(apart) = state.apart_of(child) {
            // It is unknown whether the call was made, so the present mappings are adopted.
            let parts = state.end_apart(apart).parts;
            parts.iter().for_each(|part| self.adopt(state, part));
        }
    }

    fn take_parts(&self, state: &mut ProgramState, all: Vec<Range<usize>>) {
        if state.traced > 0 {
            return;
        }
        for range in self.unmanaged_of(state, all) {
            match self.is_worth(&range) {
                true => self.take_range(range),
                false => state.small.add(range),
            }
        }
        if state.small.bytes() >= LATE_BYTES {
            for range in state.small.take() {
                let all = self.memory.suitable(&range);
                self.unmanaged_of(state, all).into_iter().for_each(|part| self.take_range(part));
            }
        }
    }

    /// Returns the parts of `all` that may be managed and aren't yet.
    fn unmanaged_of(&self, state: &ProgramState, all: Vec<Range<usize>>) -> Vec<Range<usize>> {
        let unmanaged_parts =
            |range: &Range<usize>| self.pager.mappings().unmanaged_parts(range.start, range.end);
        let parts = state.unmarked(all);
        parts.iter().flat_map(unmanaged_parts).map(|(start, end)| start..end).collect()
    }

    /// Takes a range under management. Memory that the kernel refuses to register stays unmanaged.
    fn take_range(&self, range: Range<usize>) {
        self.memory.known().set(&range);
        let mut is_registered = false;
        let register = |is_held: bool| {
            let outcome =
                unless_own(range.start, range.end, || self.memory.register(&range, is_held));
            is_registered = outcome.is_ok();
            outcome
        };
        let outcome =
            self.pager.mappings().take(range.clone(), self.memory.pagemap(), bring, register);
        if outcome.is_err() && is_registered {
            self.memory.note_registered();
        }
    }

    /// Returns whether a range is large enough to be managed, or continues a managed range.
    pub fn is_worth(&self, range: &Range<usize>) -> bool {
        range.len() >= SMALL_BYTES
            || self.pager.mappings().manages(range.start - 1)
            || self.pager.mappings().manages(range.end)
    }

    /// Takes memory that the program has just mapped, readable and writable. Without a limit it is
    /// taken only when memory begins to sink, because memory that is soon unmapped is then never
    /// filled by faults of the engine.
    pub fn take_new(&self, state: &mut ProgramState, range: &Range<usize>) {
        if self.memory.is_managing()
            && state.takes()
            && range.end <= TOP
            && !self.account.is_unbounded()
        {
            self.take_parts(state, vec![range.clone()]);
        }
    }

    /// Excludes a range from folding for good.
    pub fn never_fold(&self, range: Range<usize>) {
        let mut state = self.memory.state().lock();
        state.marked(MemoryMark::Own).add(range.clone());
        if self.memory.is_managing() && self.pager.mappings().touches(&range) {
            self.memory.leave(&range);
        }
    }
}

/// Makes the kernel merge no page of a range, and separate those that it has merged: merged pages
/// can't be moved. The advice before was given when there was no engine.
fn end_merging(range: &Range<usize>) {
    let args = [range.start, range.len(), libc::MADV_UNMERGEABLE as usize, 0, 0, 0];
    // SAFETY: the advice changes no byte.
    let _ = unsafe { system_call(libc::SYS_madvise, args) };
}

/// Makes the pages of a range present that a call in progress is about to use. Unmapped pages are
/// left as they are. Pages that aren't writable are made present for reading.
fn bring(range: Range<usize>) {
    for page in range.step_by(PAGE_SIZE) {
        let _ = populates(page, true) || populates(page, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{Calls, Room, each_paging, each_paging_alone, numbers};
    use crate::program::PLAIN;

    const RESERVED: i32 = libc::MAP_NORESERVE;

    /// Maps memory that is not managed, as if the call had bypassed the gate.
    fn unmanaged(calls: Calls, range: &Range<usize>) {
        calls.map(range);
        calls.0.memory().leave(range);
    }

    #[test]
    fn memory_is_taken_as_it_is() {
        each_paging(|program| {
            let (calls, room) = (Calls(program), Room::new(64));
            let all = room.pages(0..64);
            unmanaged(calls, &all);
            calls.with_state(|state| Adoption::of(program).adopt(state, &all));
            assert_eq!(calls.managed(&all), [all.clone()]);
            calls.fold(&all);
            assert_eq!(calls.read(&all), numbers(0..64));
        });
    }

    #[test]
    fn small_memory_is_taken_where_it_continues_what_is_managed() {
        each_paging(|program| {
            let (calls, room) = (Calls(program), Room::new(96));
            let (all, small) = (room.pages(0..64), room.pages(64..66));
            assert_eq!(calls.map_with(&small, PLAIN, RESERVED), small.start as isize);
            calls.with_state(|state| Adoption::of(program).adopt(state, &small));
            assert!(calls.managed(&small).is_empty());
            calls.map_with(&all, PLAIN, RESERVED);
            calls.with_state(|state| Adoption::of(program).adopt(state, &room.pages(0..66)));
            assert_eq!(calls.managed(&room.pages(0..96)), [room.pages(0..66)]);
        });
    }

    #[test]
    fn marked_memory_is_passed_over() {
        each_paging(|program| {
            let (calls, room) = (Calls(program), Room::new(96));
            let all = room.pages(0..96);
            unmanaged(calls, &all);
            calls.with_state(|state| {
                state.marked(MemoryMark::Own).add(room.pages(32..40));
                state.marked(MemoryMark::DontFork).add(room.pages(40..48));
                Adoption::of(program).adopt(state, &all);
            });
            assert_eq!(calls.managed(&all), [room.pages(0..32), room.pages(40..96)]);
        });
    }

    #[test]
    fn memory_of_other_access_is_not_taken() {
        each_paging(|program| {
            let rwx = program.memory().suits(PLAIN | libc::PROT_EXEC);
            assert_eq!(rwx, !program.memory().paging().hides());
            assert!(program.memory().suits(PLAIN) && !program.memory().suits(libc::PROT_READ));
            let (calls, room) = (Calls(program), Room::new(96));
            let all = room.pages(0..96);
            unmanaged(calls, &all);
            calls.map_with(&room.pages(32..64), libc::PROT_READ, 0);
            calls.with_state(|state| Adoption::of(program).adopt(state, &all));
            assert_eq!(calls.managed(&all), [room.pages(0..32), room.pages(64..96)]);
        });
    }

    #[test]
    fn small_growth_is_taken_together() {
        each_paging_alone(|program| {
            let (calls, room) = (Calls(program), Room::new(512));
            unmanaged(calls, &room.pages(0..512));
            let managed = || calls.managed(&room.pages(0..512));
            let later = |pages| {
                calls.with_state(|state| {
                    Adoption::of(program).adopt_later(state, &room.pages(pages))
                });
            };
            later(0..100);
            later(100..255);
            assert_eq!(managed(), []);
            later(255..256);
            assert_eq!(managed(), [room.pages(0..512)], "1 MiB, as far as the mapping reaches");
            assert_eq!(calls.with_state(|state| state.late.bytes()), 0);
        });
    }

    #[test]
    fn many_small_areas_are_taken_together() {
        each_paging_alone(|program| {
            let (calls, room) = (Calls(program), Room::new(9 * 32));
            let area = |n: usize| room.pages(n * 9..n * 9 + 8);
            for n in 0..32 {
                assert!(calls.managed(&room.pages(0..9 * 32)).is_empty(), "{n} areas");
                calls.map_with(&area(n), PLAIN, 0);
            }
            for n in 0..32 {
                assert_eq!(calls.managed(&area(n)), [area(n)], "1 MiB in all");
            }
            assert_eq!(calls.with_state(|state| state.small.bytes()), 0);
        });
    }

    #[test]
    fn small_areas_that_ended_do_not_count() {
        each_paging_alone(|program| {
            let (calls, room) = (Calls(program), Room::new(64));
            calls.map_with(&room.pages(0..8), PLAIN, 0);
            assert_eq!(calls.with_state(|state| state.small.bytes()), 8 * PAGE_SIZE);
            calls.unmap(&room.pages(0..8));
            assert_eq!(calls.with_state(|state| state.small.bytes()), 0);
        });
    }

    #[test]
    fn memory_mapped_as_a_stack_is_taken_if_no_thread_uses_it() {
        each_paging_alone(|program| {
            let (calls, room) = (Calls(program), Room::new(160));
            let (used_pages, spare_pages) = (room.pages(0..64), room.pages(80..144));
            for stack in [&used_pages, &spare_pages] {
                assert_eq!(calls.map_with(stack, PLAIN, libc::MAP_STACK), stack.start as isize);
            }
            calls.with_state(|state| {
                state.marked(MemoryMark::Own).add(room.pages(60..61));
                Adoption::of(program).adopt_stacks(state);
                Adoption::of(program).adopt(state, &room.pages(0..160));
                assert_eq!(state.marked(MemoryMark::Own).within(&used_pages), [used_pages.clone()]);
            });
            assert_eq!(calls.managed(&room.pages(0..160)), [spare_pages]);
        });
    }

    #[test]
    fn nothing_is_taken_while_a_task_is_traced() {
        each_paging_alone(|program| {
            let (calls, room) = (Calls(program), Room::new(64));
            let all = room.pages(0..64);
            calls.map(&all);
            calls.fold(&all);
            assert!(Adoption::of(program).keep_home(true));
            assert!(calls.managed(&all).is_empty());
            let is_home = |page| program.memory().pagemap().is_populated(page);
            assert!(all.clone().step_by(PAGE_SIZE).all(is_home));
            calls.with_state(|state| Adoption::of(program).adopt(state, &all));
            assert!(calls.managed(&all).is_empty());
        });
    }
}
