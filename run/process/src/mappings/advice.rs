//! `madvise`: advice that discards memory, and advice that marks it.
//!
//! **Discards of memory that another call holds.** The kernel's own accesses must find pages there,
//! so nothing is dropped. Zeros are written to the pages afterwards. A call in progress would read
//! or overwrite such zeros if the kernel had dropped the pages. MADV_FREE may leave pages as they
//! are, so here it does. A guard ends the other call, as the kernel specifies.
use crate::adoption::Adoption;
use crate::mappings::call::{HeapLoan, whole};
use crate::marks::ranges::{RangeSet, without};
use crate::marks::state::{ApartCall, MemoryMark, ProgramState};
use crate::program::{ManagedProgram, ProgramAccount, ProgramMemory, ProgramThreads};
use alloc::vec::Vec;
use core::iter::once;
use core::ops::Range;
use memfold_engine::mappings::calls::failed;
use memfold_engine::pager::Pager;
use memfold_gate::{child, read_bytes, touch, write_bytes};
use memfold_os::raw::system_call;
use memfold_os::units::PAGE_SIZE;

/// Linux 6.13, `include/uapi/asm-generic/mman-common.h`.
const MADV_GUARD_INSTALL: i32 = 102;
const MADV_GUARD_REMOVE: i32 = 103;
const MADV_DONTNEED_LOCKED: i32 = 24;

/// Advice that discards or marks memory. Other advice changes nothing that the engine must know.
const CONCERNING: [i32; 13] = [
    libc::MADV_DONTNEED,
    MADV_DONTNEED_LOCKED,
    libc::MADV_REMOVE,
    libc::MADV_FREE,
    MADV_GUARD_INSTALL,
    MADV_GUARD_REMOVE,
    libc::MADV_DONTFORK,
    libc::MADV_DOFORK,
    libc::MADV_WIPEONFORK,
    libc::MADV_KEEPONFORK,
    libc::MADV_DONTDUMP,
    libc::MADV_DODUMP,
    libc::MADV_UNMERGEABLE,
];

/// Advice that gives up contents.
const DISCARDS: [i32; 4] =
    [libc::MADV_DONTNEED, MADV_DONTNEED_LOCKED, libc::MADV_REMOVE, libc::MADV_FREE];

/// MADV_PAGEOUT locks the areas for so many bytes at a time, because other threads that map or unmap
/// memory wait meanwhile.
const FOLDED_TOGETHER: usize = 2 << 20;

/// The result of a call that was not made.
const UNDONE: isize = -(libc::EAGAIN as isize);

/// Makes a call with its own arguments.
pub type MakeAdvice<'a> = &'a mut (dyn FnMut() -> isize + Send);

/// Makes an `madvise` of the engine. Returns 0, or the negative error number.
fn raw(range: &Range<usize>, advice: i32) -> isize {
    // SAFETY: the program has asked for this advice, so it expects its effect on the range.
    let result = unsafe {
        system_call(libc::SYS_madvise, [range.start, range.len(), advice as usize, 0, 0, 0])
    };
    result.map_or_else(|e| -(e.raw_os_error() as isize), |_| 0)
}

/// Returns whether the contents of the mapped parts of a range are gone. ENOMEM means that some
/// part wasn't mapped.
fn is_gone(result: isize) -> bool {
    result == 0 || result == -(libc::ENOMEM as isize)
}

/// Makes `madvise` and `process_madvise`.
#[derive(Copy, Clone)]
pub struct AdviceCalls<'a> {
    pager: &'a Pager,
    memory: &'a ProgramMemory,
    account: &'a ProgramAccount,
    threads: &'a ProgramThreads,
    adoption: Adoption<'a>,
}

impl AdviceCalls<'_> {
    /// Returns the walk over the parts of `program`.
    pub fn of(program: &ManagedProgram) -> AdviceCalls<'_> {
        AdviceCalls {
            pager: program.pager(),
            memory: program.memory(),
            account: program.account(),
            threads: program.threads(),
            adoption: Adoption::of(program),
        }
    }

    /// Does `madvise(start, len, advice)`, which `make` makes.
    pub fn advise(&self, start: usize, len: usize, advice: i32, make: MakeAdvice) -> isize {
        let Some(range) = whole(start, len) else { return make() };
        if matches!(advice, libc::MADV_POPULATE_READ | libc::MADV_POPULATE_WRITE) {
            return self.populate(&range, advice, make);
        }
        if advice == libc::MADV_MERGEABLE {
            // Folding saves more than merging, and merged pages can't be moved. The opposite advice
            // changes nothing, and fails for the same ranges.
            return raw(&range, libc::MADV_UNMERGEABLE);
        }
        if matches!(advice, libc::MADV_COLD | libc::MADV_PAGEOUT) {
            return self.fold(&range, advice, make);
        }
        // The kernel removes nothing from private memory, and may wait for a file system.
        let only_files = || {
            let touches = || self.pager.mappings().touches(&range);
            advice == libc::MADV_REMOVE && !self.threads.try_on_behalf(touches).unwrap_or(false)
        };
        if !CONCERNING.contains(&advice) || only_files() {
            return make();
        }
        let child = child();
        let mut raw_result = None;
        let mut note = || *raw_result.insert(make());
        let outcome =
            self.threads.try_on_behalf(|| self.advise_locked(range, advice, &mut note, child));
        // In a child of vfork whose parent's process ends meanwhile, the call is made once.
        let Some(outcome) = outcome else { return raw_result.unwrap_or_else(make) };
        match outcome {
            Ok((result, held)) => {
                if !held.is_empty() {
                    HeapLoan::new(self.threads, held).iter().for_each(write_zeros);
                }
                result
            }
            Err(apart) => {
                let result = make();
                self.threads.try_on_behalf(|| {
                    let state = &mut *self.memory.state().lock();
                    let parts = state.end_apart(apart).parts;
                    parts.iter().for_each(|part| self.adoption.adopt(state, part));
                });
                result
            }
        }
    }

    /// Makes the call with the state locked, and returns its result with the ranges to be
    /// overwritten with zeros. If the call must be made with no lock held, only prepares it and
    /// returns the apart call.
    fn advise_locked(
        &self,
        range: Range<usize>,
        advice: i32,
        make: MakeAdvice,
        child: Option<usize>,
    ) -> Result<(isize, Vec<Range<usize>>), ApartCall> {
        let mut state = self.memory.state().lock();
        let state = &mut *state;
        if DISCARDS.contains(&advice) && state.is_watched(&range) {
            return Err(self.memory.begin_apart(state, child, [range, 0..0]));
        }
        let mark = match advice {
            libc::MADV_DONTFORK | libc::MADV_DOFORK => Some(MemoryMark::DontFork),
            libc::MADV_WIPEONFORK | libc::MADV_KEEPONFORK => Some(MemoryMark::Wiped),
            libc::MADV_DONTDUMP | libc::MADV_DODUMP => Some(MemoryMark::DontDump),
            libc::MADV_UNMERGEABLE => Some(MemoryMark::Mergeable),
            _ => None,
        };
        let result = match advice {
            _ if DISCARDS.contains(&advice) => return Ok(self.discard(&range, advice, make)),
            MADV_GUARD_INSTALL => {
                self.each_done(&range, advice, make, |part, make| self.guard(state, part, make))
            }
            MADV_GUARD_REMOVE => {
                if self.memory.paging().guards() {
                    // Folded pages are guards too.
                    self.memory.leave(&range);
                }
                let result = make();
                if result == 0 {
                    state.marked(MemoryMark::Guard).remove(&range);
                }
                self.adoption.adopt(state, &range);
                result
            }
            libc::MADV_DONTDUMP if self.account.folds_dont_dump() => make(),
            libc::MADV_DONTFORK | libc::MADV_WIPEONFORK | libc::MADV_DONTDUMP => {
                let mark = mark.expect("each of these marks");
                self.each_done(&range, advice, make, |part, make| {
                    let result = make();
                    if is_gone(result) {
                        state.marked(mark).add(part.clone());
                        if mark != MemoryMark::DontFork {
                            self.memory.leave(part);
                        }
                    }
                    result
                })
            }
            libc::MADV_DOFORK
            | libc::MADV_KEEPONFORK
            | libc::MADV_DODUMP
            | libc::MADV_UNMERGEABLE => {
                let result = make();
                if let Some(mark) = mark {
                    state.marked(mark).remove(&range);
                }
                self.adoption.adopt(state, &range);
                result
            }
            _ => make(),
        };
        Ok((result, Vec::new()))
    }

    /// Puts guards in a range, which is not managed from then on: a load that fills the pages around
    /// a guard would replace it. With a userfaultfd the range stays registered, so that its mapping
    /// isn't split.
    fn guard(&self, state: &mut ProgramState, range: &Range<usize>, make: MakeAdvice) -> isize {
        let result = if self.memory.paging().hides() {
            // Guarded pages can't be filled, so they can't be hidden again.
            self.memory.leave(range);
            make()
        } else {
            let _leaving = self.pager.holds().mark_leaving(once(range.clone()));
            self.pager.mappings().end_with(range.clone(), make, is_gone)
        };
        match is_gone(result) {
            true => state.marked(MemoryMark::Guard).add(range.clone()),
            false => self.adoption.adopt(state, range),
        }
        result
    }

    /// Gives advice on a range by `done`, which makes the call. The kernel handles one mapping
    /// after the other, up to the first for which it refuses. In that case the mappings before it
    /// are done once more, each separately, so that `done` learns of them.
    fn each_done(
        &self,
        range: &Range<usize>,
        advice: i32,
        make: MakeAdvice,
        mut done: impl FnMut(&Range<usize>, MakeAdvice) -> isize,
    ) -> isize {
        let result = done(range, make);
        if !is_gone(result) {
            let parts = self.memory.mappings(range);
            let _ = parts
                .iter()
                .take_while(|part| is_gone(done(part, &mut || raw(part, advice))))
                .count();
        }
        result
    }

    /// Does `process_madvise` on this process (Linux 6.13), as one `madvise` for each range.
    pub fn advise_process(
        &self,
        args: &[usize; 6],
        make: &mut (dyn FnMut(&[usize; 6]) -> isize + Send),
    ) -> isize {
        let [process, ranges, count, advice, flags, _] = *args;
        let advice = advice as i32;
        let for_others =
            [libc::MADV_COLD, libc::MADV_PAGEOUT, libc::MADV_WILLNEED, libc::MADV_COLLAPSE];
        let none = [process, ranges, 0, advice as usize, flags, 0];
        // The kernel refuses advice to another process even if there are no ranges. SAFETY: the
        // call names no range, so it changes nothing.
        let is_refused = || unsafe { system_call(libc::SYS_process_madvise, none) }.is_err();
        if for_others.contains(&advice) || count > libc::UIO_MAXIOV as usize || is_refused() {
            return make(args);
        }
        let mut done_bytes = 0;
        for n in 0..count {
            let mut range = [0u8; 16];
            if read_bytes(ranges + n * 16, &mut range).is_err() {
                return if done_bytes > 0 { done_bytes } else { -(libc::EFAULT as isize) };
            }
            let word =
                |at: usize| usize::from_ne_bytes(core::array::from_fn(|byte| range[at * 8 + byte]));
            let (start, len) = (word(0), word(1));
            let mut one = || {
                let args = [start, len, advice as usize, 0, 0, 0];
                // SAFETY: the program has asked for this advice, so it expects its effect on the
                // range.
                unsafe { system_call(libc::SYS_madvise, args) }
                    .map_or_else(|e| -(e.raw_os_error() as isize), |_| 0)
            };
            let result = self.advise(start, len, advice, &mut one);
            if failed(result) {
                return if done_bytes > 0 { done_bytes } else { result };
            }
            done_bytes += len as isize;
        }
        done_bytes
    }

    /// Drops the contents of a range. Returns the result, and the held ranges that are to be
    /// overwritten with zeros. The caller overwrites them with no lock held, and not in another
    /// task, because a child of vfork may be killed meanwhile.
    fn discard(
        &self,
        range: &Range<usize>,
        advice: i32,
        make: MakeAdvice,
    ) -> (isize, Vec<Range<usize>>) {
        let managed = self.pager.mappings().managed_parts(range);
        if managed.is_empty() {
            return (make(), Vec::new());
        }
        let departure = self.pager.holds().mark_leaving(once(range.clone()));
        let mut held_ranges = RangeSet::default();
        for part in &managed {
            departure.each_held(part.clone(), |part| held_ranges.add(part));
        }
        let held_ranges = held_ranges.within(range);
        let frees = advice == libc::MADV_FREE;
        // MADV_FREE may leave pages where they are, and the engine would no longer own them.
        let drop_all = |parts: &[Range<usize>]| {
            for part in parts.iter().flat_map(|part| self.managed_within(&managed, part)) {
                raw(&part, libc::MADV_DONTNEED);
            }
        };
        let mut zeros = Vec::new();
        let mut drop_part = |part: &Range<usize>, make: MakeAdvice| {
            let mut is_hidden = true;
            let make_part = || {
                // Hidden first: a page that another thread made between the two would be lost.
                is_hidden = self.hides_managed(&managed, part);
                let result = if is_hidden { make() } else { UNDONE };
                if frees && is_gone(result) {
                    drop_all(core::slice::from_ref(part));
                }
                result
            };
            let parts = core::slice::from_ref(part);
            let result = self.pager.mappings().discard_with(parts, make_part, is_gone);
            if is_hidden {
                return result;
            }
            // There are too many mappings to hide it, so zeros are written instead.
            let managed_parts = self.managed_within(&managed, part);
            without(part, &managed_parts).iter().for_each(|rest| {
                raw(rest, advice);
            });
            zeros.extend(managed_parts.into_iter().filter(|_| !frees));
            0
        };
        if held_ranges.is_empty() {
            return (self.each_done(range, advice, make, &mut drop_part), zeros);
        }
        let (mut result, mut held_zeros) = (0, Vec::new());
        for part in pieces(range, &held_ranges) {
            if held_ranges.contains(&part) {
                if !frees {
                    held_zeros.push(part);
                }
                continue;
            }
            let outcome = self.each_done(&part, advice, &mut || raw(&part, advice), &mut drop_part);
            if failed(outcome) {
                result = outcome;
            }
            if !is_gone(outcome) {
                break;
            }
        }
        zeros.append(&mut held_zeros);
        (result, zeros)
    }

    /// Hides the managed parts of a range, where memory is hidden. Returns `false` if there are too
    /// many mappings; then some parts may be hidden.
    fn hides_managed(&self, managed: &[Range<usize>], range: &Range<usize>) -> bool {
        self.managed_within(managed, range)
            .iter()
            .all(|part| self.memory.paging().hide(part).is_ok())
    }

    fn managed_within(&self, managed: &[Range<usize>], part: &Range<usize>) -> Vec<Range<usize>> {
        let both = |m: &Range<usize>| m.start.max(part.start)..m.end.min(part.end);
        managed.iter().map(both).filter(|range| !range.is_empty()).collect()
    }

    /// Folds the managed parts of a range now, or with MADV_COLD before other memory. Then the kernel
    /// finds nothing there that it could swap. It serves the rest, and returns the errors.
    fn fold(&self, range: &Range<usize>, advice: i32, make: MakeAdvice) -> isize {
        self.threads.try_on_behalf(|| {
            let mappings = self.pager.mappings();
            // The range may be most of the address space.
            let managed = mappings.managed_parts(range);
            let starts = |part: &Range<usize>| {
                let end = part.end;
                part.clone().step_by(FOLDED_TOGETHER).map(move |start| start..end)
            };
            for rest in managed.iter().flat_map(starts) {
                let part = rest.start..rest.end.min(rest.start + FOLDED_TOGETHER);
                if advice == libc::MADV_COLD {
                    mappings.cool_at(part);
                } else {
                    mappings.page_out_at(part);
                }
            }
        });
        make()
    }

    /// Loads the managed parts of a range, page by page within the limit. The kernel populates the
    /// rest.
    fn populate(&self, range: &Range<usize>, advice: i32, make: MakeAdvice) -> isize {
        // `expect` may begin the management of the range, because the kernel would fill unmanaged
        // memory all at once. The rest runs with no lock held, because it may wait for another
        // thread.
        let (managed, parts) = self.threads.on_behalf(|| {
            self.adoption.expect(&mut self.memory.state().lock(), range.len());
            let managed = self.pager.mappings().managed_parts(range);
            let parts = pieces(range, &managed);
            (managed, parts)
        });
        let (managed, parts) =
            (HeapLoan::new(self.threads, managed), HeapLoan::new(self.threads, parts));
        if managed.is_empty() {
            return make();
        }
        let writes = advice == libc::MADV_POPULATE_WRITE;
        for part in parts.iter() {
            let is_managed = managed.contains(part);
            // Pages that can't be touched are left to the kernel, which returns the reason.
            let is_refused = |page: &usize| !is_managed || touch(*page, writes).is_err();
            let step = if is_managed { PAGE_SIZE } else { part.len() };
            for at in part.clone().step_by(step).filter(is_refused) {
                let result = raw(&(at..at + step), advice);
                if failed(result) {
                    return result;
                }
            }
        }
        0
    }
}

/// Returns all of `range` in ascending order, as `parts` and the gaps between them. `parts` must
/// lie in the range and ascend.
fn pieces(range: &Range<usize>, parts: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut all = without(range, parts);
    all.extend(parts.iter().cloned());
    all.sort_unstable_by_key(|part| part.start);
    all
}

/// Writes zeros over managed pages. Pages that can't be written are left to the kernel.
fn write_zeros(range: &Range<usize>) {
    static ZEROS: [u8; PAGE_SIZE] = [0; PAGE_SIZE];
    for page in range.clone().step_by(PAGE_SIZE) {
        // SAFETY: the program has given up the bytes there and expects zeros.
        let _ = unsafe { write_bytes(page, &ZEROS) };
    }
}
