//! The calls that change mappings, or give memory up.
use super::adopt::PLAIN;
use super::advice::whole;
use super::gated::{Gated, Mark, State};
use super::given::gives;
use super::limits;
use super::ranges::without;
use crate::say::say_once;
use alloc::vec::Vec;
use core::iter::once;
use core::ops::Range;
use memfold::address_space::calls::{Remap, failed};
use memfold::known::TOP;
use memfold_gate::read_bytes;
use memfold_sys::memory::zone::{lock_again, overlaps_own, unlock_all};
use memfold_sys::raw::{program_break, system_call};
use memfold_sys::units::PAGE_SIZE;

/// The raw call, with these arguments.
type Make<'a> = &'a mut dyn FnMut(&[usize; 6]) -> isize;

/// What a program is told that has too many mappings.
const NO_MEMORY: isize = -(libc::ENOMEM as isize);
/// Linux 6.10.
const SYS_MSEAL: i64 = 462;
const TYPE: i32 = 0x0f;
const SHM_REMAP: usize = 0o40000;

fn end_of(start: usize, len: usize) -> usize {
    start.saturating_add(len).min(TOP).next_multiple_of(PAGE_SIZE)
}

/// The length of a segment of shared memory that has just been attached.
fn segment_bytes(id: usize) -> usize {
    // SAFETY: zeros are a value of the type.
    let mut about: libc::shmid_ds = unsafe { core::mem::zeroed() };
    let args = [id, libc::IPC_STAT as usize, &raw mut about as usize, 0, 0, 0];
    // SAFETY: `about` has room for what is written.
    let asked = unsafe { system_call(libc::SYS_shmctl, args) };
    asked.map_or(0, |_| about.shm_segsz)
}

/// Whether `mlock` that has said so may have locked something: it met what isn't mapped, or can't be
/// filled.
fn is_partial(result: isize) -> bool {
    [libc::ENOMEM, libc::EAGAIN].map(|e| -(e as isize)).contains(&result)
}

/// Has the kernel fill memory as it does when that is locked: private writable memory for writing.
fn fill(range: &Range<usize>, access: i32) {
    let args = |advice: i32| [range.start, range.len(), advice as usize, 0, 0, 0];
    let advice = |advice: i32| {
        // SAFETY: changes no byte.
        unsafe { system_call(libc::SYS_madvise, args(advice)) }
    };
    if access & libc::PROT_WRITE == 0 || advice(libc::MADV_POPULATE_WRITE).is_err() {
        let _ = advice(libc::MADV_POPULATE_READ);
    }
}

impl Gated {
    /// Makes a call that changes mappings.
    pub fn change(&self, nr: usize, args: &[usize; 6], make: Make) -> isize {
        let [start, len, third, ..] = *args;
        if [libc::SYS_mmap, libc::SYS_mremap, libc::SYS_brk].contains(&(nr as i64)) {
            limits::renew();
        }
        match nr as i64 {
            libc::SYS_ioctl => {
                if let Some(refused) = self.refuse(len, third) {
                    return refused;
                }
                if gives(len) {
                    self.give(&mut self.state.lock(), len, third);
                }
                return make(args);
            }
            libc::SYS_mmap => return self.map(args, make),
            libc::SYS_madvise => {
                return self.advise(start, len, third as i32, &mut || make(args));
            }
            libc::SYS_process_madvise => return self.advise_process(args, make),
            libc::SYS_mlock | libc::SYS_mlock2 => return self.lock(args, make),
            libc::SYS_mlockall => return self.lock_all(args, make),
            libc::SYS_mremap => {
                if let Some(parts) = self.moved_apart(args) {
                    return self.remap_each(args, &parts, make);
                }
            }
            _ => {}
        }
        let mut state = self.state.lock();
        let range = start..end_of(start, len);
        let reports = [libc::SYS_munmap, libc::SYS_mremap].contains(&(nr as i64));
        if reports && self.is_watched(&mut state, &range) {
            let result = self.wait_apart(state, &range, || make(args)).1;
            if !failed(result) {
                let to = (nr as i64 == libc::SYS_mremap).then_some(result as usize);
                self.relocate_faults(&range, to);
            }
            return result;
        }
        let state = &mut *state;
        match nr as i64 {
            libc::SYS_munmap => self.unmap(state, args, make),
            libc::SYS_mremap => self.remap(state, args, make),
            libc::SYS_brk => self.set_break(state, args, make),
            libc::SYS_mprotect | libc::SYS_pkey_mprotect => {
                if self.paging.hides()
                    && let Some(range) = whole(start, len)
                {
                    let is_plain = third as i32 == PLAIN && nr as i64 == libc::SYS_mprotect;
                    if is_plain && self.pager.managed_parts(&range) == [range.clone()] {
                        // As it is already.
                        return 0;
                    }
                    // Access is the program's again.
                    self.leave(&range);
                }
                let result = make(args);
                if result == 0 && self.suits(third as i32) {
                    self.adopt_later(state, &(start..end_of(start, len)));
                }
                result
            }
            SYS_MSEAL if self.paging.hides() && third == 0 => self.seal(state, args, make),
            libc::SYS_munlock => {
                let result = make(args);
                let range = start & !(PAGE_SIZE - 1)..end_of(start, len);
                state.marked(Mark::Locked).remove(&range);
                self.adopt(state, &range);
                result
            }
            libc::SYS_munlockall => {
                let result = make(args);
                lock_again();
                state.locks_future = false;
                state.marked(Mark::Locked).clear();
                self.adopt(state, &(0..TOP));
                result
            }
            libc::SYS_prctl if start as i32 == libc::PR_SET_MEMORY_MERGE => {
                let result = make(args);
                if result == 0 {
                    self.set_merging(state, len != 0);
                }
                result
            }
            libc::SYS_shmat => {
                let result = make(args);
                if third & SHM_REMAP != 0 && !failed(result) {
                    let range = result as usize..end_of(result as usize, segment_bytes(start));
                    state.forget(&range);
                    self.pager.end_with(range, || 0);
                }
                result
            }
            // What is submitted is read and written at any time. Programs have another way, as
            // containers often forbid these.
            libc::SYS_io_uring_setup => {
                say_once!("warning: io_uring is answered ENOSYS");
                -(libc::ENOSYS as isize)
            }
            libc::SYS_io_setup => {
                say_once!("warning: AIO (io_setup) is answered ENOSYS");
                -(libc::ENOSYS as isize)
            }
            _ => make(args),
        }
    }

    fn map(&self, args: &[usize; 6], make: Make) -> isize {
        let mut state = self.state.lock();
        let (at, len) = (args[0], args[1]);
        let (access, flags) = (args[2] as i32, args[3] as i32);
        let is_private = flags & TYPE == libc::MAP_PRIVATE && flags & libc::MAP_ANONYMOUS != 0;
        let others = libc::MAP_HUGETLB | libc::MAP_LOCKED | libc::MAP_STACK | libc::MAP_GROWSDOWN;
        let could = is_private && self.suits(access) && flags & others == 0 && state.takes();
        // What promises nothing to be used is mapped to be used in small part, unless the kernel is
        // to fill it at once.
        if could && flags & (libc::MAP_NORESERVE | libc::MAP_POPULATE) != libc::MAP_NORESERVE {
            self.expect(&mut state, len);
        }
        let suits = could && self.is_managing();
        let mut args = *args;
        if suits {
            // It would fill what is about to be folded, and promises nothing.
            args[3] &= !(libc::MAP_POPULATE as usize);
        }
        // What it replaces, if it succeeds.
        let ends = if flags & libc::MAP_FIXED != 0 { at..end_of(at, len) } else { 0..0 };
        let fills = flags & (libc::MAP_POPULATE | libc::MAP_LOCKED) != 0 || state.locks_future;
        let fills_file = flags & libc::MAP_ANONYMOUS == 0 && fills;
        if fills_file {
            self.leave(&ends);
        }
        let result;
        if fills_file || self.is_watched(&mut state, &ends) {
            (state, result) = self.wait_apart(state, &ends, || make(&args));
        } else {
            result = self.pager.end_with(ends.clone(), || make(&args));
        }
        if failed(result) {
            self.adopt(&state, &ends);
            return result;
        }
        let range = result as usize..end_of(result as usize, len);
        state.forget(&range);
        self.relocate_faults(&range, None);
        if self.pager.touches(&range) {
            // What was there has gone past the gate.
            self.pager.end_with(range.clone(), || 0);
        }
        if is_private {
            self.known.set(&range);
        }
        if is_private && flags & others != 0 {
            let mark = if flags & libc::MAP_LOCKED != 0 { Mark::Locked } else { Mark::Own };
            state.marked(mark).add(range.clone());
        }
        if suits {
            self.take_new(&state, &range);
        }
        result
    }

    fn unmap(&self, state: &mut State, args: &[usize; 6], make: Make) -> isize {
        let Some(range) = whole(args[0], args[1]) else { return make(args) };
        let result = self.pager.end_with(range.clone(), || make(args));
        if result == 0 {
            state.forget(&range);
            self.relocate_faults(&range, None);
            state.mapped_since = state.mapped_since.saturating_sub(range.len());
        }
        result
    }

    /// The mappings that an mremap moves, if it names more than one, or a gap, and memfold is concerned.
    fn moved_apart(&self, args: &[usize; 6]) -> Option<Vec<Range<usize>>> {
        const FLAGS: i32 = libc::MREMAP_FIXED | libc::MREMAP_MAYMOVE;
        let [start, old, new, flags, to, _] = *args;
        let (from, to) = (whole(start, old)?, whole(to, new)?);
        let overlaps = from.start < to.end && to.start < from.end;
        if flags as i32 & FLAGS != FLAGS || from.len() != to.len() || overlaps {
            return None;
        }
        if !self.pager.touches(&from) && !self.pager.touches(&to) {
            return None;
        }
        let parts = self.mappings(&from);
        let begins = parts.first().is_some_and(|first| first.start == from.start);
        (begins && parts[0] != from).then_some(parts)
    }

    /// Moves several mappings to one place (Linux 6.17), one by one in their order, as the kernel does
    /// it: gaps between them leave what is at the new place, and one that can't be moved leaves those
    /// before it moved.
    fn remap_each(&self, args: &[usize; 6], parts: &[Range<usize>], make: Make) -> isize {
        let [start, _, _, flags, to, _] = *args;
        for part in parts {
            let its = [part.start, part.len(), part.len(), flags, to + (part.start - start), 0];
            let result = self.change(libc::SYS_mremap as usize, &its, make);
            if failed(result) {
                return result;
            }
        }
        to as isize
    }

    fn remap(&self, state: &mut State, args: &[usize; 6], make: Make) -> isize {
        let [start, old, new, flags, to, _] = *args;
        let (Some(from), Some(after)) = (whole(start, old), whole(start, new)) else {
            return make(args);
        };
        let has = |flag: i32| flags as i32 & flag != 0;
        let remap = Remap {
            from: from.clone(),
            len: after.len(),
            to: has(libc::MREMAP_FIXED).then_some(to),
            may_move: has(libc::MREMAP_MAYMOVE),
            keeps_source: has(libc::MREMAP_DONTUNMAP),
        };
        let register = |range: Range<usize>| {
            if let Err(e) = self.register_again(&range) {
                crate::say::die(format_args!("memory that mremap has moved can't be served: {e}"));
            }
        };
        let unregister = |range: Range<usize>| {
            if !self.paging.hides() {
                let _ = self.paging.unregister(&range);
            }
        };
        self.expect(state, after.len().saturating_sub(from.len()));
        let is_hidden = self.paging.hides() && self.pager.touches(&from);
        // Hidden for a moment, it would be missing for the kernel in another call.
        let leaving = is_hidden.then(|| self.pager.holds().leave(once(from.clone())));
        if leaving.as_ref().is_some_and(|leaving| leaving.is_held(from.clone())) {
            return NO_MEMORY;
        }
        let remake =
            || if is_hidden { self.remap_hidden(&from, || make(args)) } else { make(args) };
        let result = self.pager.remap_with(&remap, &self.pagemap, remake, register, unregister);
        if is_hidden {
            if failed(result) || remap.keeps_source {
                self.show_unmanaged(&from);
            }
            if !failed(result) {
                self.show_unmanaged(&(result as usize..result as usize + after.len()));
            }
        }
        if failed(result) {
            return result;
        }
        let at = result as usize;
        let here = at..at + after.len();
        if at != start {
            state.forget(&here);
            state.relocate(&(start..start + old.min(new)), at, remap.keeps_source);
            self.relocate_faults(&here, None);
            self.relocate_faults(&(start..start + old.min(new)), Some(at));
        }
        if from.len() < after.len() {
            state.extend(&(at..at + from.len()), at + from.len()..here.end);
        }
        if after.len() < from.len() || at != start && !remap.keeps_source {
            state.forget(&(if at == start { after.end..from.end } else { from.clone() }));
        }
        self.known.set(&here);
        self.adopt(state, &here);
        result
    }

    /// Makes an mremap where memory is hidden: of one mapping, as the program believes it to be.
    fn remap_hidden(&self, from: &Range<usize>, make: impl FnOnce() -> isize) -> isize {
        if self.paging.hide(from).is_err() {
            return NO_MEMORY;
        }
        // In a child of fork its parts may be several for good.
        Some(make()).filter(|result| *result != -(libc::EFAULT as isize)).unwrap_or(NO_MEMORY)
    }

    /// Lets the program have what isn't managed of a range that was hidden.
    fn show_unmanaged(&self, range: &Range<usize>) {
        for part in without(range, &self.pager.managed_parts(range)) {
            let _ = self.paging.unregister(&part);
        }
    }

    fn set_break(&self, state: &mut State, args: &[usize; 6], make: Make) -> isize {
        let before = program_break();
        let wanted = args[0];
        let page = |at: usize| at.next_multiple_of(PAGE_SIZE);
        if wanted != 0 && wanted < before && page(wanted) < page(before) {
            let mut result = 0;
            self.pager.end_with(page(wanted)..page(before), || {
                result = make(args);
                if result as usize == wanted { 0 } else { -1 }
            });
            if result as usize == wanted {
                state.forget(&(page(wanted)..page(before)));
            }
            return result;
        }
        self.expect(state, wanted.saturating_sub(before));
        let result = make(args);
        let range = page(before)..page(result as usize);
        if !failed(result) && !range.is_empty() {
            state.forget(&range);
            self.known.set(&range);
            self.adopt_later(state, &range);
        }
        result
    }

    /// `mseal`: what can't change any more can't be hidden.
    fn seal(&self, state: &mut State, args: &[usize; 6], make: Make) -> isize {
        let Some(range) = whole(args[0], args[1]) else { return make(args) };
        state.marked(Mark::Other).add(range.clone());
        self.leave(&range);
        let result = make(args);
        if failed(result) {
            state.marked(Mark::Other).remove(&range);
            self.adopt(state, &range);
        }
        result
    }

    /// `mlock`: it would meet folded pages, and fail.
    fn lock(&self, args: &[usize; 6], make: Make) -> isize {
        let range = args[0] & !(PAGE_SIZE - 1)..end_of(args[0], args[1]);
        if range.is_empty() {
            return make(args);
        }
        let mut state = self.state.lock();
        let locked = state.marked(Mark::Locked);
        let added = without(&range, &locked.within(&range));
        locked.add(range.clone());
        self.leave(&range);
        // The kernel fills it, and may wait for whoever is in charge of it.
        drop(state);
        let result = make(args);
        if failed(result) {
            // The kernel may have locked the first of several mappings.
            let lock = |part: &Range<usize>| {
                // SAFETY: changes no byte.
                unsafe { system_call(libc::SYS_mlock, [part.start, part.len(), 0, 0, 0, 0]) }
                    .is_ok()
            };
            let parts = self.mappings(&range);
            let count = parts.iter().take_while(|part| is_partial(result) && lock(part)).count();
            let rest = parts.get(count).map_or(range.end, |part| part.start)..range.end;
            let mut state = self.state.lock();
            for part in added {
                let part = part.start.max(rest.start)..part.end;
                state.marked(Mark::Locked).remove(&part);
            }
            self.adopt(&state, &rest);
        }
        result
    }

    /// `mlockall`. What there is is locked as it comes (MCL_ONFAULT), as the kernel would fill the
    /// engine's own memory too, and is filled then.
    fn lock_all(&self, args: &[usize; 6], make: Make) -> isize {
        let flags = args[0] as i32;
        let mut state = self.state.lock();
        if flags & libc::MCL_CURRENT == 0 {
            let result = make(args);
            state.locks_future |= result == 0;
            return result;
        }
        let mut marked = *args;
        marked[0] |= libc::MCL_ONFAULT as usize;
        let result = make(&marked);
        if failed(result) {
            return result;
        }
        unlock_all();
        state.marked(Mark::Locked).add(0..TOP);
        self.leave(&(0..TOP));
        state.locks_future = flags & libc::MCL_FUTURE != 0;
        if flags & libc::MCL_ONFAULT != 0 {
            return result;
        }
        let mut all: Vec<(Range<usize>, i32)> = Vec::new();
        let _ = self.maps.each(0, TOP, |found| {
            if !overlaps_own(found.start, found.end) {
                all.push((found.start..found.end, found.access));
            }
        });
        if state.locks_future {
            let args = [libc::MCL_FUTURE as usize, 0, 0, 0, 0, 0];
            // SAFETY: changes no byte. What comes later is to be brought in at once after all.
            let _ = unsafe { system_call(libc::SYS_mlockall, args) };
        }
        // The kernel may wait for whoever is in charge of it. What can't be filled is passed over,
        // as by mlockall.
        drop(state);
        all.iter().for_each(|(range, access)| fill(range, *access));
        result
    }

    /// The kernel may merge equal pages of all memory from now on, or of none any more: what it has
    /// merged can't be moved.
    fn set_merging(&self, state: &mut State, merges: bool) {
        state.merges = merges;
        if merges {
            state.marked(Mark::Mergeable).add(0..TOP);
            self.leave(&(0..TOP));
        } else {
            state.marked(Mark::Mergeable).clear();
            self.adopt(state, &(0..TOP));
        }
    }

    /// `process_madvise` on this process (Linux 6.13) is as `madvise`, range by range.
    fn advise_process(&self, args: &[usize; 6], make: Make) -> isize {
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
}
