//! The calls that change mappings or give memory up.
use crate::adoption::Adoption;
use crate::diagnostics::warn_once;
use crate::limits;
use crate::mappings::advice::AdviceCalls;
use crate::mappings::call::{HeapLoan, MakeCall, NO_MEMORY, end_of, whole};
use crate::mappings::given::GivenCalls;
use crate::mappings::locks::LockCalls;
use crate::mappings::remap::RemapCalls;
use crate::marks::state::{ApartCall, MemoryMark, ProgramState};
use crate::program::{ManagedProgram, PLAIN, ProgramMemory, ProgramThreads, lost, moves_lost};
use core::ops::Range;
use memfold_engine::known::TOP;
use memfold_engine::mappings::calls::failed;
use memfold_engine::pager::Pager;
use memfold_gate::child;
use memfold_os::memory::zone::lock_again;
use memfold_os::raw::{program_break, system_call};
use memfold_os::units::PAGE_SIZE;

/// Linux 6.10.
const SYS_MSEAL: i64 = 462;
const TYPE: i32 = 0x0f;
const SHM_REMAP: usize = 0o40000;

/// Flags of mappings that aren't managed at once.
const UNUSUAL: i32 = libc::MAP_HUGETLB | libc::MAP_LOCKED | libc::MAP_STACK;

fn is_private_anonymous(flags: i32) -> bool {
    flags & TYPE == libc::MAP_PRIVATE && flags & libc::MAP_ANONYMOUS != 0
}

/// Returns whether a mapping may be private anonymous memory, by its flags or because it is of
/// `/dev/zero`.
fn may_be_anonymous(access: i32, flags: i32) -> bool {
    let is_of_file = flags & libc::MAP_ANONYMOUS == 0 && access & libc::PROT_WRITE != 0;
    is_private_anonymous(flags) || flags & TYPE == libc::MAP_PRIVATE && is_of_file
}

/// Returns the length of a segment of shared memory that has just been attached; 0 if it can't be
/// read.
fn segment_bytes(id: usize) -> usize {
    // SAFETY: the struct has only integers, for which zeros are valid.
    let mut about: libc::shmid_ds = unsafe { core::mem::zeroed() };
    let args = [id, libc::IPC_STAT as usize, &raw mut about as usize, 0, 0, 0];
    // SAFETY: the kernel writes one `shmid_ds` to `about`, which has that type.
    let result = unsafe { system_call(libc::SYS_shmctl, args) };
    result.map_or(0, |_| about.shm_segsz)
}

/// Returns the range that an mmap replaces if it succeeds.
fn replaced(args: &[usize; 6]) -> Range<usize> {
    let (at, len, flags) = (args[0], args[1], args[3] as i32);
    if flags & libc::MAP_FIXED != 0 { at..end_of(at, len) } else { 0..0 }
}

/// Returns the range that a brk gives up if it succeeds.
fn given_up(before: usize, wanted: usize) -> Range<usize> {
    let page = |at: usize| at.next_multiple_of(PAGE_SIZE);
    if wanted != 0 && wanted < before { page(wanted)..page(before) } else { 0..0 }
}

/// Returns whether a call of a child of vfork changes only memory. Another task may make such a
/// call, because both share the memory. Other calls need nothing from the engine while its locks
/// are held; its work is done before and after them.
fn is_of_memory(nr: usize, args: &[usize; 6]) -> bool {
    match nr as i64 {
        libc::SYS_mmap => args[3] as i32 & libc::MAP_ANONYMOUS != 0,
        libc::SYS_munmap
        | libc::SYS_mremap
        | libc::SYS_brk
        | libc::SYS_mprotect
        | libc::SYS_pkey_mprotect
        | libc::SYS_munlock
        | libc::SYS_munlockall
        | SYS_MSEAL => true,
        _ => false,
    }
}

/// Returns the result of `io_uring_setup` or `io_setup`. Submitted buffers are read and written at any
/// time. Programs have another way, because containers often forbid these calls.
fn refuse_submission(nr: usize) -> isize {
    if nr as i64 == libc::SYS_io_uring_setup {
        warn_once!(
            "warning: io_uring_setup fails with ENOSYS, because memfold does not support io_uring"
        );
    } else {
        warn_once!(
            "warning: io_setup fails with ENOSYS, because memfold does not support Linux AIO"
        );
    }
    -(libc::ENOSYS as isize)
}

/// Returns the result of a call that a thread has made for a child of vfork before it ended. The
/// engine may have begun to manage the memory of an mmap. If the engine is lost, a mapping in its
/// place has none of that.
fn unmanaged(nr: usize, args: &[usize; 6], made: isize, make: MakeCall) -> isize {
    if nr as i64 != libc::SYS_mmap || failed(made) || lost().is_none() {
        return made;
    }
    let flags = args[3] & !(libc::MAP_FIXED_NOREPLACE as usize) | libc::MAP_FIXED as usize;
    make(&[made as usize, args[1], args[2], flags, args[4], args[5]])
}

/// Makes the calls that change mappings or give memory up.
#[derive(Copy, Clone)]
pub struct ChangeCalls<'a> {
    pager: &'a Pager,
    memory: &'a ProgramMemory,
    threads: &'a ProgramThreads,
    adoption: Adoption<'a>,
    advice: AdviceCalls<'a>,
    locks: LockCalls<'a>,
    remaps: RemapCalls<'a>,
    given: GivenCalls<'a>,
}

impl ChangeCalls<'_> {
    /// Returns the walk over the parts of `program`.
    pub fn of(program: &ManagedProgram) -> ChangeCalls<'_> {
        ChangeCalls {
            pager: program.pager(),
            memory: program.memory(),
            threads: program.threads(),
            adoption: Adoption::of(program),
            advice: AdviceCalls::of(program),
            locks: LockCalls::of(program),
            remaps: RemapCalls::of(program),
            given: GivenCalls::of(program),
        }
    }

    /// Makes a call that changes mappings.
    pub fn change(&self, nr: usize, args: &[usize; 6], make: MakeCall) -> isize {
        let [start, len, third, ..] = *args;
        if [libc::SYS_mmap, libc::SYS_mremap, libc::SYS_brk].contains(&(nr as i64)) {
            limits::renew();
        }
        match nr as i64 {
            libc::SYS_ioctl => {
                if let Some(refusal) = self.given.refuse(len, third) {
                    return refusal;
                }
                self.given.give(len, third);
                return make(args);
            }
            libc::SYS_madvise => {
                return self.advice.advise(start, len, third as i32, &mut || make(args));
            }
            libc::SYS_process_madvise => return self.advice.advise_process(args, make),
            libc::SYS_mlock | libc::SYS_mlock2 => return self.locks.lock(args, make),
            libc::SYS_mlockall => return self.locks.lock_all(args, make),
            libc::SYS_mremap => {
                let parts = HeapLoan::new(
                    self.threads,
                    self.threads.try_on_behalf(|| self.remaps.moved_apart(args)).flatten(),
                );
                if let Some(parts) = &*parts {
                    return self.remap_each(args, parts, make);
                }
            }
            libc::SYS_prctl if start as i32 == libc::PR_SET_MEMORY_MERGE => {
                return self.locks.merge(args, make);
            }
            libc::SYS_io_uring_setup | libc::SYS_io_setup => return refuse_submission(nr),
            _ => {}
        }
        let child = child();
        let by_itself = child.is_some() && !is_of_memory(nr, args);
        if by_itself && ![libc::SYS_mmap, libc::SYS_shmat].contains(&(nr as i64)) {
            // No managed memory comes or goes by this call.
            return make(args);
        }
        // In a child of vfork whose parent's process ends meanwhile, the call is made once.
        let mut raw_result = None;
        let mut note = |args: &[usize; 6]| *raw_result.insert(make(args));
        let outcome = self
            .threads
            .try_on_behalf(|| self.change_locked(nr, args, &mut note, (child, by_itself)));
        let apart = match (outcome, raw_result) {
            (Some(Ok(result)), _) => return result,
            (Some(Err(apart)), _) => apart,
            (None, Some(raw_result)) => return unmanaged(nr, args, raw_result, make),
            (None, None) if moves_lost(nr, args) => return NO_MEMORY,
            (None, None) => return make(args),
        };
        let result = make(args);
        self.threads.try_on_behalf(|| self.end_apart(nr, args, apart, result));
        result
    }

    /// Returns the ranges of a call that must be made with no lock held, or `None` for other calls.
    /// The kernel may wait in such a call until another thread of the program has done something.
    /// Or a child that may be killed meanwhile makes it (`by_itself`).
    fn ranges_apart(
        &self,
        state: &mut ProgramState,
        nr: usize,
        args: &[usize; 6],
        by_itself: bool,
    ) -> Option<[Range<usize>; 2]> {
        let [start, len, third, flags, to, _] = *args;
        let (ranges, waits) = match nr as i64 {
            libc::SYS_munmap => ([start..end_of(start, len), 0..0], false),
            libc::SYS_mremap => {
                let is_fixed = flags as i32 & libc::MREMAP_FIXED != 0;
                let target = if is_fixed { to..end_of(to, third) } else { 0..0 };
                ([start..end_of(start, len), target], false)
            }
            libc::SYS_brk if state.has_userfault => {
                ([given_up(program_break(), start), 0..0], false)
            }
            libc::SYS_mmap => {
                let flags = flags as i32;
                let fills = flags & (libc::MAP_POPULATE | libc::MAP_LOCKED) != 0;
                let fills_file = flags & libc::MAP_ANONYMOUS == 0 && (fills || state.locks_future);
                ([replaced(args), 0..0], fills_file)
            }
            libc::SYS_shmat if third & SHM_REMAP != 0 => {
                let at = len & !(PAGE_SIZE - 1);
                ([at..end_of(at, segment_bytes(start)), 0..0], true)
            }
            _ => ([0..0, 0..0], false),
        };
        let waits = by_itself || waits || ranges.iter().any(|range| state.is_watched(range));
        waits.then_some(ranges)
    }

    /// Makes a call with the state locked. If the call must be made with no lock held, only
    /// prepares it and returns the apart call.
    fn change_locked(
        &self,
        nr: usize,
        args: &[usize; 6],
        make: MakeCall,
        (child, by_itself): (Option<usize>, bool),
    ) -> Result<isize, ApartCall> {
        let [start, len, third, ..] = *args;
        let mut state = self.memory.state().lock();
        let state = &mut *state;
        if let Some(ranges) = self.ranges_apart(state, nr, args, by_itself) {
            return Err(self.memory.begin_apart(state, child, ranges));
        }
        Ok(match nr as i64 {
            libc::SYS_mmap => self.map(state, args, make),
            libc::SYS_munmap => self.unmap(state, args, make),
            libc::SYS_mremap => self.remaps.remap(state, args, make),
            libc::SYS_brk => self.set_break(state, args, make),
            libc::SYS_mprotect | libc::SYS_pkey_mprotect => {
                if self.memory.paging().hides()
                    && let Some(range) = whole(start, len)
                {
                    let is_plain = third as i32 == PLAIN && nr as i64 == libc::SYS_mprotect;
                    if is_plain && self.pager.mappings().managed_parts(&range) == [range.clone()] {
                        // The access is already so.
                        return Ok(0);
                    }
                    // The program controls the access to this memory from now on.
                    self.memory.leave(&range);
                }
                if self.memory.suits(third as i32) && self.adoption.may_pass(state, len as u64) {
                    self.adoption.begin_managing(state);
                }
                let result = make(args);
                if result == 0 && self.memory.suits(third as i32) {
                    self.adoption.adopt_later(state, &(start..end_of(start, len)));
                }
                result
            }
            SYS_MSEAL if self.memory.paging().hides() && third == 0 => {
                self.locks.seal(state, args, make)
            }
            libc::SYS_munlock => {
                let result = make(args);
                let range = start & !(PAGE_SIZE - 1)..end_of(start, len);
                state.marked(MemoryMark::Locked).remove(&range);
                self.adoption.adopt(state, &range);
                result
            }
            libc::SYS_munlockall => {
                let result = make(args);
                lock_again();
                state.locks_future = false;
                state.marked(MemoryMark::Locked).clear();
                self.adoption.adopt(state, &(0..TOP));
                result
            }
            _ => make(args),
        })
    }

    /// Ends a call that was made with no lock held.
    fn end_apart(&self, nr: usize, args: &[usize; 6], apart: ApartCall, result: isize) {
        let mut state = self.memory.state().lock();
        let state = &mut *state;
        let before = state.end_apart(apart);
        let parts = &before.parts;
        let is_failed = match nr as i64 {
            libc::SYS_brk => result as usize != args[0],
            _ => failed(result),
        };
        if is_failed {
            return parts.iter().for_each(|part| self.adoption.adopt(state, part));
        }
        for part in parts {
            // Faults there are no longer the program's to handle, except where mremap moves them.
            if nr as i64 != libc::SYS_mremap {
                state.forget(part);
                self.memory.forget_faults(part);
            }
        }
        match nr as i64 {
            libc::SYS_mmap => {
                self.note_mapped(state, args, result);
                if may_be_anonymous(args[2] as i32, args[3] as i32) {
                    self.adoption
                        .adopt(state, &(result as usize..end_of(result as usize, args[1])));
                }
            }
            libc::SYS_mremap => self.remaps.note_remapped(state, args, before, result),
            _ => {}
        }
    }

    fn map(&self, state: &mut ProgramState, args: &[usize; 6], make: MakeCall) -> isize {
        let len = args[1];
        let (access, flags) = (args[2] as i32, args[3] as i32);
        let is_usual = is_private_anonymous(flags) && flags & UNUSUAL == 0;
        let could = is_usual && self.memory.suits(access) && state.takes();
        // Memory with MAP_NORESERVE that is larger than the bound is mostly used only in small part,
        // unless the kernel is to fill it at once.
        let is_reserved = flags & (libc::MAP_NORESERVE | libc::MAP_POPULATE) != libc::MAP_NORESERVE;
        let is_sparse = !is_reserved && len as u64 > self.pager.limits().bound_bytes();
        if could && !is_sparse {
            self.adoption.expect_new(state, len);
        }
        let suits = could && self.memory.is_managing();
        let mut args = *args;
        if suits {
            // MAP_POPULATE would fill pages that are about to be folded. It guarantees nothing, so
            // it can be dropped.
            args[3] &= !(libc::MAP_POPULATE as usize);
        }
        let result = self.pager.mappings().end_with(
            replaced(&args),
            || make(&args),
            |result| !failed(result),
        );
        self.note_mapped(state, &args, result);
        let range = result as usize..end_of(result as usize, len);
        match failed(result) {
            true => {}
            false if suits => self.adoption.take_new(state, &range),
            false if could && is_sparse => state.sparse.add(range),
            // Of memory with a file, only that of /dev/zero is taken.
            false if !is_private_anonymous(flags) && may_be_anonymous(access, flags) => {
                self.adoption.adopt(state, &range);
            }
            false => {}
        }
        result
    }

    /// Marks the lowest page of a mapping that grows downwards, and the free addresses below it.
    /// These are not managed, so the kernel lets only unmanaged memory grow.
    fn note_growing(&self, state: &mut ProgramState, range: &Range<usize>) {
        let mut free_from = 0;
        let _ = self
            .memory
            .maps()
            .each(0, range.start, |mapping| free_from = mapping.end.min(range.start));
        let lowest = range.start + PAGE_SIZE;
        state.marked(MemoryMark::Other).add(free_from..lowest);
    }

    /// Records an mmap that was made.
    fn note_mapped(&self, state: &mut ProgramState, args: &[usize; 6], result: isize) {
        if failed(result) {
            return self.adoption.adopt(state, &replaced(args));
        }
        let range = result as usize..end_of(result as usize, args[1]);
        let flags = args[3] as i32;
        state.note_new(&range);
        state.forget(&range);
        self.memory.forget_faults(&range);
        if self.pager.mappings().touches(&range) {
            // The former mapping was unmapped without the gate.
            self.pager.mappings().end(range.clone());
        }
        if is_private_anonymous(flags) {
            self.memory.known().set(&range);
            if flags & libc::MAP_GROWSDOWN != 0 {
                self.note_growing(state, &range);
            }
            if flags & UNUSUAL != 0 {
                let mark = match flags {
                    _ if flags & libc::MAP_LOCKED != 0 => MemoryMark::Locked,
                    _ if flags & libc::MAP_HUGETLB != 0 => MemoryMark::Own,
                    _ => MemoryMark::Stack,
                };
                state.marked(mark).add(range);
            }
        }
    }

    fn unmap(&self, state: &mut ProgramState, args: &[usize; 6], make: MakeCall) -> isize {
        let Some(range) = whole(args[0], args[1]) else { return make(args) };
        let result =
            self.pager.mappings().end_with(range.clone(), || make(args), |result| result == 0);
        if result == 0 {
            state.forget(&range);
            self.memory.forget_faults(&range);
            state.mapped_since = state.mapped_since.saturating_sub(range.len());
        }
        result
    }

    fn set_break(&self, state: &mut ProgramState, args: &[usize; 6], make: MakeCall) -> isize {
        let (before, address) = (program_break(), args[0]);
        let ends = given_up(before, address);
        if !ends.is_empty() {
            let is_done = |made: isize| made as usize == address;
            let result = self.pager.mappings().end_with(ends.clone(), || make(args), is_done);
            if result as usize == address {
                state.forget(&ends);
            }
            return result;
        }
        let page = |at: usize| at.next_multiple_of(PAGE_SIZE);
        self.adoption.expect_new(state, address.saturating_sub(before));
        let result = make(args);
        let range = page(before)..page(result as usize);
        if !failed(result) && !range.is_empty() {
            state.forget(&range);
            self.memory.known().set(&range);
            self.adoption.adopt_later(state, &range);
        }
        result
    }

    /// Moves several mappings to one place (Linux 6.17), one by one in their order, as the kernel
    /// does. At a gap between them, the memory at the new place stays. If one can't be moved, those
    /// before it remain moved.
    fn remap_each(&self, args: &[usize; 6], parts: &[Range<usize>], make: MakeCall) -> isize {
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
}
