//! The calls that lock memory, seal it, or open it to merging. The memory leaves management.
use crate::adoption::Adoption;
use crate::mappings::call::{HeapLoan, MakeCall, end_of, whole};
use crate::marks::ranges::without;
use crate::marks::state::{MemoryMark, ProgramState};
use crate::program::{ManagedProgram, ProgramMemory, ProgramThreads};
use alloc::vec::Vec;
use core::ops::Range;
use memfold_engine::known::TOP;
use memfold_engine::mappings::calls::failed;
use memfold_os::memory::zone::{overlaps_own, unlock_all};
use memfold_os::raw::system_call;
use memfold_os::units::PAGE_SIZE;

/// Returns whether an `mlock` with this result may have locked a part: it met memory that isn't
/// mapped or can't be filled.
fn is_partial(result: isize) -> bool {
    [libc::ENOMEM, libc::EAGAIN].map(|e| -(e as isize)).contains(&result)
}

/// Makes the kernel fill memory as if it were locked: private writable memory for writing.
fn fill(range: &Range<usize>, access: i32) {
    let args = |advice: i32| [range.start, range.len(), advice as usize, 0, 0, 0];
    let advice = |advice: i32| {
        // SAFETY: populating changes no byte.
        unsafe { system_call(libc::SYS_madvise, args(advice)) }
    };
    if access & libc::PROT_WRITE == 0 || advice(libc::MADV_POPULATE_WRITE).is_err() {
        let _ = advice(libc::MADV_POPULATE_READ);
    }
}

/// Makes the calls that lock memory, seal it, or open it to merging.
#[derive(Copy, Clone)]
pub struct LockCalls<'a> {
    memory: &'a ProgramMemory,
    threads: &'a ProgramThreads,
    adoption: Adoption<'a>,
}

impl LockCalls<'_> {
    /// Returns the walk over the parts of `program`.
    pub fn of(program: &ManagedProgram) -> LockCalls<'_> {
        LockCalls {
            memory: program.memory(),
            threads: program.threads(),
            adoption: Adoption::of(program),
        }
    }

    /// Does `mseal`. Sealed memory can't change, so it can't be hidden.
    pub fn seal(&self, state: &mut ProgramState, args: &[usize; 6], make: MakeCall) -> isize {
        let Some(range) = whole(args[0], args[1]) else { return make(args) };
        state.marked(MemoryMark::Other).add(range.clone());
        self.memory.leave(&range);
        let result = make(args);
        if failed(result) {
            state.marked(MemoryMark::Other).remove(&range);
            self.adoption.adopt(state, &range);
        }
        result
    }

    /// Does `mlock`. The memory leaves management first, because `mlock` fails on folded pages.
    pub fn lock(&self, args: &[usize; 6], make: MakeCall) -> isize {
        let range = args[0] & !(PAGE_SIZE - 1)..end_of(args[0], args[1]);
        if range.is_empty() {
            return make(args);
        }
        let ranges =
            self.threads.on_behalf(|| self.note_locked(&mut self.memory.state().lock(), &range));
        // The kernel fills the memory, and may wait for a thread that handles its faults.
        let result = make(args);
        self.threads.on_behalf(|| {
            if failed(result) {
                let rest = self.not_locked(&range, result);
                self.note_unlocked(&mut self.memory.state().lock(), &ranges, &rest);
            }
            drop(ranges);
        });
        result
    }

    /// Marks a range as locked, and makes it leave management. Returns the parts that weren't
    /// marked yet.
    fn note_locked(&self, state: &mut ProgramState, range: &Range<usize>) -> Vec<Range<usize>> {
        let marks = state.marked(MemoryMark::Locked);
        let ranges = without(range, &marks.within(range));
        marks.add(range.clone());
        self.memory.leave(range);
        ranges
    }

    /// Takes back the mark, because `range` could not be locked.
    fn note_unlocked(
        &self,
        state: &mut ProgramState,
        added: &[Range<usize>],
        range: &Range<usize>,
    ) {
        for part in added {
            state.marked(MemoryMark::Locked).remove(&(part.start.max(range.start)..part.end));
        }
        self.adoption.adopt(state, range);
    }

    /// Returns the part of a range that a failed `mlock` has not locked. The kernel may have locked
    /// the first of several mappings, up to a gap between them.
    fn not_locked(&self, range: &Range<usize>, failure: isize) -> Range<usize> {
        let lock = |part: &Range<usize>| {
            // SAFETY: mlock changes no byte.
            unsafe { system_call(libc::SYS_mlock, [part.start, part.len(), 0, 0, 0, 0]) }.is_ok()
        };
        let mut end = range.start;
        for part in self.memory.mappings(range) {
            if !is_partial(failure) || part.start != end || !lock(&part) {
                break;
            }
            end = part.end;
        }
        end..range.end
    }

    /// Does `mlockall`. Present memory is locked as it becomes resident (MCL_ONFAULT), because
    /// otherwise the kernel would fill the engine's own memory too. The program's memory is filled
    /// afterwards.
    pub fn lock_all(&self, args: &[usize; 6], make: MakeCall) -> isize {
        let flags = args[0] as i32;
        let has = |flag: i32| flags & flag != 0;
        let range = if has(libc::MCL_CURRENT) { 0..TOP } else { 0..0 };
        let (before, ranges) = self.threads.on_behalf(|| {
            let mut state = self.memory.state().lock();
            let before = state.locks_future;
            state.locks_future |= has(libc::MCL_FUTURE);
            (before, self.note_locked(&mut state, &range))
        });
        let mut own_args = *args;
        if has(libc::MCL_CURRENT) {
            own_args[0] |= libc::MCL_ONFAULT as usize;
        }
        let result = make(&own_args);
        let fills = has(libc::MCL_CURRENT) && !has(libc::MCL_ONFAULT) && !failed(result);
        let all = self.threads.on_behalf(|| {
            let mut state = self.memory.state().lock();
            if failed(result) {
                state.locks_future = before;
                self.note_unlocked(&mut state, &ranges, &range);
            } else if has(libc::MCL_CURRENT) {
                unlock_all();
                state.locks_future = has(libc::MCL_FUTURE);
            }
            drop(ranges);
            if fills { self.all_of_program() } else { Vec::new() }
        });
        let all = HeapLoan::new(self.threads, all);
        if fills && has(libc::MCL_FUTURE) {
            let args = [libc::MCL_FUTURE as usize, 0, 0, 0, 0, 0];
            // Future memory is to be filled at once after all. SAFETY: mlockall changes no byte.
            let _ = unsafe { system_call(libc::SYS_mlockall, args) };
        }
        // The kernel may wait for a thread that handles the faults. Memory that can't be filled is
        // skipped, as mlockall does.
        all.iter().for_each(|(range, access)| fill(range, *access));
        result
    }

    /// Returns all mappings that aren't the engine's, each with its access.
    fn all_of_program(&self) -> Vec<(Range<usize>, i32)> {
        let mut all = Vec::new();
        let _ = self.memory.maps().each(0, TOP, |mapping| {
            if !overlaps_own(mapping.start, mapping.end) {
                all.push((mapping.start..mapping.end, mapping.access));
            }
        });
        all
    }

    /// Does `prctl(PR_SET_MEMORY_MERGE)`.
    pub fn merge(&self, args: &[usize; 6], make: MakeCall) -> isize {
        let merges = args[1] != 0;
        let before = self.threads.on_behalf(|| {
            let mut state = self.memory.state().lock();
            let before = state.merges;
            if merges && !before {
                self.set_merging(&mut state, true);
            }
            before
        });
        let result = make(args);
        let (now, merges_after) = (merges || before, if result == 0 { merges } else { before });
        if now != merges_after {
            self.threads
                .on_behalf(|| self.set_merging(&mut self.memory.state().lock(), merges_after));
        }
        result
    }

    /// Records whether the kernel may merge equal pages of all memory from now on. Merged pages
    /// can't be moved, so the memory leaves management.
    fn set_merging(&self, state: &mut ProgramState, merges: bool) {
        state.merges = merges;
        if merges {
            state.marked(MemoryMark::Mergeable).add(0..TOP);
            self.memory.leave(&(0..TOP));
        } else {
            state.marked(MemoryMark::Mergeable).clear();
            self.adoption.adopt(state, &(0..TOP));
        }
    }
}
