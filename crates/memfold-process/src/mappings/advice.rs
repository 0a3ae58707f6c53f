//! `madvise`: discards and marks.
//!
//! **Discards of what another call holds.** The kernel's own accesses must find pages there, so
//! nothing is dropped: zeros are written in their place afterwards, which is what a call that goes on would
//! read or overwrite had the kernel dropped them. MADV_FREE may leave pages as they are, so it
//! does. A guard ends the call, as the kernel would have it.
use crate::mappings::call::{HeapLoan, whole};
use crate::marks::ranges::{RangeSet, without};
use crate::marks::state::{ApartCall, MemoryMark};
use crate::program::ManagedProgram;
use alloc::vec::Vec;
use core::iter::once;
use core::ops::Range;
use memfold::mappings::calls::failed;
use memfold_gate::{child, read_bytes, touch, write_bytes};
use memfold_os::raw::system_call;
use memfold_os::units::PAGE_SIZE;

/// Linux 6.13, `include/uapi/asm-generic/mman-common.h`.
const MADV_GUARD_INSTALL: i32 = 102;
const MADV_GUARD_REMOVE: i32 = 103;
const MADV_DONTNEED_LOCKED: i32 = 24;

/// Discards, and marks; other advice changes nothing that the engine must know of.
const CONCERNING: [i32; 14] = [
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
    libc::MADV_MERGEABLE,
    libc::MADV_UNMERGEABLE,
];

/// What gives up contents.
const DISCARDS: [i32; 4] =
    [libc::MADV_DONTNEED, MADV_DONTNEED_LOCKED, libc::MADV_REMOVE, libc::MADV_FREE];

/// A call, made with its own arguments.
pub type MakeAdvice<'a> = &'a mut (dyn FnMut() -> isize + Send);

/// `madvise` by the engine.
fn raw(range: &Range<usize>, advice: i32) -> isize {
    // SAFETY: what the program has asked for.
    let done = unsafe {
        system_call(libc::SYS_madvise, [range.start, range.len(), advice as usize, 0, 0, 0])
    };
    done.map_or_else(|e| -(e.raw_os_error() as isize), |_| 0)
}

/// Whether the contents of what was mapped of a range are gone: ENOMEM says that something wasn't.
fn is_gone(result: isize) -> bool {
    result == 0 || result == -(libc::ENOMEM as isize)
}

impl ManagedProgram {
    /// `madvise(start, len, advice)`, which `make` makes.
    pub fn advise(&self, start: usize, len: usize, advice: i32, make: MakeAdvice) -> isize {
        let Some(range) = whole(start, len) else { return make() };
        if matches!(advice, libc::MADV_POPULATE_READ | libc::MADV_POPULATE_WRITE) {
            return self.populate(&range, advice, make);
        }
        // The kernel removes nothing of private memory, and may wait for a file system.
        let only_files = || {
            advice == libc::MADV_REMOVE && !self.on_behalf(|| self.pager.mappings().touches(&range))
        };
        if !CONCERNING.contains(&advice) || only_files() {
            return make();
        }
        let child = child();
        match self.on_behalf(|| self.advise_locked(range, advice, make, child)) {
            Ok((result, held)) => {
                if !held.is_empty() {
                    HeapLoan::new(self, held).iter().for_each(write_zeros);
                }
                result
            }
            Err(apart) => {
                let result = make();
                self.on_behalf(|| {
                    let state = &mut *self.state.lock();
                    let parts = state.end_apart(apart).parts;
                    parts.iter().for_each(|part| self.adopt(state, part));
                });
                result
            }
        }
    }

    /// Makes it with the state locked, and gives what is to be overwritten with zeros; or makes all
    /// ready for it to be made apart.
    fn advise_locked(
        &self,
        range: Range<usize>,
        advice: i32,
        make: MakeAdvice,
        child: Option<usize>,
    ) -> Result<(isize, Vec<Range<usize>>), ApartCall> {
        let mut state = self.state.lock();
        let state = &mut *state;
        if DISCARDS.contains(&advice) && self.is_watched(state, &range) {
            return Err(self.begin_apart(state, child, [range, 0..0]));
        }
        let mark = match advice {
            libc::MADV_DONTFORK | libc::MADV_DOFORK => Some(MemoryMark::DontFork),
            libc::MADV_WIPEONFORK | libc::MADV_KEEPONFORK => Some(MemoryMark::Wiped),
            libc::MADV_DONTDUMP | libc::MADV_DODUMP => Some(MemoryMark::DontDump),
            libc::MADV_MERGEABLE | libc::MADV_UNMERGEABLE => Some(MemoryMark::Mergeable),
            _ => None,
        };
        let result = match advice {
            _ if DISCARDS.contains(&advice) => return Ok(self.discard(&range, advice, make)),
            MADV_GUARD_INSTALL if self.paging.hides() => {
                // What the kernel lets nobody fill is never hidden again.
                state.marked(MemoryMark::Other).add(range.clone());
                self.leave(&range);
                make()
            }
            MADV_GUARD_REMOVE if self.paging.hides() => {
                let result = make();
                if result == 0 {
                    state.marked(MemoryMark::Other).remove(&range);
                    self.adopt(state, &range);
                }
                result
            }
            MADV_GUARD_INSTALL => {
                let _leaving = self.pager.holds().mark_leaving(once(range.clone()));
                let discard = |part: &Range<usize>, make: MakeAdvice| {
                    self.pager.mappings().discard_with(core::slice::from_ref(part), make, is_gone)
                };
                self.each_done(&range, advice, make, discard)
            }
            libc::MADV_DONTDUMP if self.config.fold_dont_dump => make(),
            libc::MADV_DONTFORK
            | libc::MADV_WIPEONFORK
            | libc::MADV_DONTDUMP
            | libc::MADV_MERGEABLE => {
                let mark = mark.expect("each of these marks");
                self.each_done(&range, advice, make, |part, make| {
                    let result = make();
                    if is_gone(result) {
                        state.marked(mark).add(part.clone());
                        if mark != MemoryMark::DontFork {
                            self.leave(part);
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
                self.adopt(state, &range);
                result
            }
            _ => make(),
        };
        Ok((result, Vec::new()))
    }

    /// Gives advice on a range by `done`, which makes the call. The kernel takes one mapping after the
    /// other, up to the one for which it refuses: then those before it are done once more, each by
    /// itself, so that `done` learns of them.
    fn each_done(
        &self,
        range: &Range<usize>,
        advice: i32,
        make: MakeAdvice,
        mut done: impl FnMut(&Range<usize>, MakeAdvice) -> isize,
    ) -> isize {
        let result = done(range, make);
        if !is_gone(result) {
            let parts = self.mappings(range);
            let _ = parts
                .iter()
                .take_while(|part| is_gone(done(part, &mut || raw(part, advice))))
                .count();
        }
        result
    }

    /// `process_madvise` on this process (Linux 6.13) is as `madvise`, range by range.
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
        // What the kernel refuses to do to another process it says without any range, too.
        // SAFETY: no range.
        let refused = || unsafe { system_call(libc::SYS_process_madvise, none) }.is_err();
        if for_others.contains(&advice) || count > libc::UIO_MAXIOV as usize || refused() {
            return make(args);
        }
        let mut done = 0;
        for n in 0..count {
            let mut range = [0u8; 16];
            if read_bytes(ranges + n * 16, &mut range).is_err() {
                return if done > 0 { done } else { -(libc::EFAULT as isize) };
            }
            let word =
                |at: usize| usize::from_ne_bytes(core::array::from_fn(|byte| range[at * 8 + byte]));
            let (start, len) = (word(0), word(1));
            let mut one = || {
                let args = [start, len, advice as usize, 0, 0, 0];
                // SAFETY: what the program has asked for.
                unsafe { system_call(libc::SYS_madvise, args) }
                    .map_or_else(|e| -(e.raw_os_error() as isize), |_| 0)
            };
            let result = self.advise(start, len, advice, &mut one);
            if failed(result) {
                return if done > 0 { done } else { result };
            }
            done += len as isize;
        }
        done
    }

    /// Drops what is in a range, and gives what is to be overwritten with zeros, as it is held. That
    /// is done with no lock taken, and not by another task: a child of vfork may be killed meanwhile.
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
        let leaving = self.pager.holds().mark_leaving(once(range.clone()));
        let mut held = RangeSet::default();
        for part in &managed {
            leaving.each_held(part.clone(), |part| held.add(part));
        }
        let held = held.within(range);
        let frees = advice == libc::MADV_FREE;
        // Pages that MADV_FREE leaves where they are would not be the engine's any more.
        let drop_all = |parts: &[Range<usize>]| {
            for part in parts.iter().flat_map(|part| self.managed_within(&managed, part)) {
                raw(&part, libc::MADV_DONTNEED);
            }
        };
        let mut drop_part = |part: &Range<usize>, make: MakeAdvice| {
            let make_part = || {
                let result = make();
                if is_gone(result) {
                    if frees {
                        drop_all(core::slice::from_ref(part));
                    }
                    self.hide_discarded(&managed, part);
                }
                result
            };
            self.pager.mappings().discard_with(core::slice::from_ref(part), make_part, is_gone)
        };
        if held.is_empty() {
            return (self.each_done(range, advice, make, drop_part), Vec::new());
        }
        let (mut result, mut zeros) = (0, Vec::new());
        for part in pieces(range, &held) {
            if held.contains(&part) {
                if !frees {
                    zeros.push(part);
                }
                continue;
            }
            let done = self.each_done(&part, advice, &mut || raw(&part, advice), &mut drop_part);
            if failed(done) {
                result = done;
            }
            if !is_gone(done) {
                break;
            }
        }
        (result, zeros)
    }

    /// What is touched next there is new.
    fn hide_discarded(&self, managed: &[Range<usize>], range: &Range<usize>) {
        for part in self.managed_within(managed, range) {
            // Where that fails, what comes there isn't counted.
            let _ = self.paging.hide(&part);
        }
    }

    fn managed_within(&self, managed: &[Range<usize>], part: &Range<usize>) -> Vec<Range<usize>> {
        let both = |m: &Range<usize>| m.start.max(part.start)..m.end.min(part.end);
        managed.iter().map(both).filter(|range| !range.is_empty()).collect()
    }

    /// Brings in what is managed of a range, page by page within the limit. The kernel does the rest.
    fn populate(&self, range: &Range<usize>, advice: i32, make: MakeAdvice) -> isize {
        // Unmanaged, all of it would be filled at once. The rest may wait for another thread.
        let (managed, parts) = self.on_behalf(|| {
            self.expect(&mut self.state.lock(), range.len());
            let managed = self.pager.mappings().managed_parts(range);
            let parts = pieces(range, &managed);
            (managed, parts)
        });
        let (managed, parts) = (HeapLoan::new(self, managed), HeapLoan::new(self, parts));
        if managed.is_empty() {
            return make();
        }
        let writes = advice == libc::MADV_POPULATE_WRITE;
        for part in parts.iter() {
            let is_managed = managed.contains(part);
            // What can't be touched the kernel refuses, and says why.
            let refused = |page: &usize| !is_managed || touch(*page, writes).is_err();
            let step = if is_managed { PAGE_SIZE } else { part.len() };
            for at in part.clone().step_by(step).filter(refused) {
                let result = raw(&(at..at + step), advice);
                if failed(result) {
                    return result;
                }
            }
        }
        0
    }
}

/// All of `range` in ascending order: those of `parts`, which lie in it and ascend, and what is
/// between them.
fn pieces(range: &Range<usize>, parts: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut all = without(range, parts);
    all.extend(parts.iter().cloned());
    all.sort_unstable_by_key(|part| part.start);
    all
}

/// Writes zeros over what is managed, and readable and writable or the kernel's own business.
fn write_zeros(range: &Range<usize>) {
    static ZEROS: [u8; PAGE_SIZE] = [0; PAGE_SIZE];
    for page in range.clone().step_by(PAGE_SIZE) {
        // SAFETY: the program has given up the bytes there, and wants zeros.
        let _ = unsafe { write_bytes(page, &ZEROS) };
    }
}
