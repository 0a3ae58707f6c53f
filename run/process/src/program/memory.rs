//! What of the program's memory is managed, how touches of folded memory are reported, and what the
//! kernel has mapped.
use crate::marks::ranges::RangeSet;
use crate::marks::state::{ApartCall, FoundRanges, MemoryMark, ProgramState};
use crate::paging::Paging;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::mem::forget;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use memfold_engine::known::{FoldableMap, TOP};
use memfold_engine::pager::Pager;
use memfold_os::Errno;
use memfold_os::maps::lookup::Maps;
use memfold_os::maps::pagemap::Pagemap;
use memfold_os::memory::zone::overlaps_own;
use memfold_os::sync::Mutex;
use rustix::fd::OwnedFd;

/// Access of memory that is taken under management.
pub const PLAIN: i32 = libc::PROT_READ | libc::PROT_WRITE;

/// The program's memory.
pub struct ProgramMemory {
    pager: Arc<Pager>,
    paging: Paging,
    pagemap: Arc<Pagemap>,
    maps: Maps,
    known: FoldableMap,
    /// Held by a thread that changes mappings, adopts memory, or copies the process.
    state: Mutex<ProgramState>,
    /// Memory where the program handles faults itself, because it is registered with a userfaultfd
    /// of its own. This lock is taken last, and nothing else is done while it is held.
    faults_of_program: Mutex<RangeSet>,
    /// Whether the program's memory is managed, or about to be.
    managing: AtomicBool,
    /// Whether unmanaged memory may be registered, because the process had too many mappings when it
    /// left management. A missing page there is a new one ([`Paging::fills`]). The kernel can't
    /// make it, so system calls touch such memory first.
    may_stay_registered: AtomicBool,
    /// Number of calls that were made with no lock held.
    apart_calls: AtomicU64,
    /// The first address past the main thread's stack.
    stack_end: usize,
    block_bytes: usize,
}

/// Files of the process about its memory.
pub struct MemoryFiles {
    pub paging: Paging,
    pub pagemap: Arc<Pagemap>,
    pub maps: Maps,
}

impl ProgramMemory {
    /// Returns memory of which nothing is managed yet. `stack_end` is the first address past the
    /// main thread's stack.
    pub fn new(
        pager: &Arc<Pager>,
        files: MemoryFiles,
        (state, stack_end): (ProgramState, usize),
        block_bytes: usize,
    ) -> ProgramMemory {
        let MemoryFiles { paging, pagemap, maps } = files;
        ProgramMemory {
            pager: pager.clone(),
            paging,
            pagemap,
            maps,
            known: FoldableMap::default(),
            state: Mutex::new(state),
            faults_of_program: Mutex::default(),
            managing: AtomicBool::new(false),
            may_stay_registered: AtomicBool::new(false),
            apart_calls: AtomicU64::new(0),
            stack_end,
            block_bytes,
        }
    }

    pub fn paging(&self) -> &Paging {
        &self.paging
    }

    pub fn pagemap(&self) -> &Pagemap {
        &self.pagemap
    }

    pub fn maps(&self) -> &Maps {
        &self.maps
    }

    pub fn known(&self) -> &FoldableMap {
        &self.known
    }

    /// Returns the state. A thread that changes mappings, adopts memory, or copies the process
    /// locks it.
    pub fn state(&self) -> &Mutex<ProgramState> {
        &self.state
    }

    /// Returns the descriptors that are in the program's own table.
    pub fn descriptors(&self) -> [&OwnedFd; 3] {
        [self.paging.fd(), self.pagemap.fd(), self.maps.fd()]
    }

    /// Returns the bytes of a block, the unit of compression.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Returns whether any memory is managed, or about to be.
    pub fn is_managing(&self) -> bool {
        self.managing.load(SeqCst)
    }

    /// Sets whether any memory is managed. It is `true` before the first range is registered.
    pub fn set_managing(&self, is_managing: bool) {
        self.managing.store(is_managing, SeqCst);
    }

    /// Returns whether a call must hold a range that it names.
    pub fn concerns(&self, range: &Range<usize>) -> bool {
        // Before adoption, any memory may be what will be adopted.
        range.start < TOP && (!self.is_managing() || self.known.is_set(range))
    }

    /// Returns whether pages of unmanaged memory may be missing for the kernel: they are hidden, or
    /// still registered.
    pub fn may_miss_unmanaged(&self) -> bool {
        self.paging.hides() || self.may_stay_registered.load(SeqCst)
    }

    /// Records that unmanaged memory may be registered from now on.
    pub fn note_registered(&self) {
        self.may_stay_registered.store(true, SeqCst);
    }

    /// Registers a range of the program. Its contents stay as they are. `is_held` is whether a
    /// system call in progress names a part of it.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn register(&self, range: &Range<usize>, is_held: bool) -> Result<(), Errno> {
        match &self.paging {
            // SAFETY: faults of the program are handled from now on. Memory that the kernel touches
            // is held, and no engine thread touches the range.
            Paging::Userfault(uffd) => unsafe {
                uffd.register(range.start, range.len(), self.pager.protects())
            },
            Paging::Protection(protection) => {
                protection.cover(range, self.block_bytes, &self.pagemap, is_held)
            }
        }
    }

    /// Loads a range into memory, and ends its management.
    pub fn leave(&self, range: &Range<usize>) {
        self.pager.mappings().leave(range.clone(), |start, end| {
            if self.paging.unregister(&(start..end)).is_err() {
                self.note_registered();
            }
        });
    }

    /// Does as [`ProgramMemory::leave`]. Guards in the range are no longer registered either: the
    /// kernel resizes and moves one mapping only, and reports moves of registered memory.
    pub fn leave_with_guards(&self, state: &mut ProgramState, range: &Range<usize>) {
        self.leave(range);
        if self.paging.hides() {
            // Guards are neither hidden nor registered.
            return;
        }
        for guard in state.marked(MemoryMark::Guard).within(range) {
            let _ = self.paging.unregister(&guard);
        }
    }

    /// Returns whether memory with this access is taken: it must be readable and writable.
    /// Executable memory is taken too, unless memory is hidden: hidden memory is shown again with
    /// the access that most memory has.
    pub fn suits(&self, access: i32) -> bool {
        let protection = if self.paging.hides() { PLAIN | libc::PROT_EXEC } else { PLAIN };
        access & protection == PLAIN
    }

    /// Returns the suitable mappings in a range; none if the mappings can't be read.
    pub fn suitable(&self, range: &Range<usize>) -> Vec<Range<usize>> {
        self.read_suitable(range).unwrap_or_default()
    }

    /// Returns the suitable mappings in a range, or `None` if the mappings can't be read.
    pub fn read_suitable(&self, range: &Range<usize>) -> Option<Vec<Range<usize>>> {
        let mut all: Vec<Range<usize>> = Vec::new();
        let outcome = self.maps.each(range.start, range.end.min(TOP), |mapping| {
            let part = mapping.start..mapping.end;
            let suits = mapping.anonymous && self.suits(mapping.access) && mapping.end <= TOP;
            match all.last_mut() {
                _ if !suits || mapping.end == self.stack_end => {}
                _ if overlaps_own(mapping.start, mapping.end) => {}
                Some(last) if last.end == part.start => last.end = part.end,
                _ => all.push(part),
            }
        });
        outcome.is_ok().then_some(all)
    }

    /// Returns the kernel's mappings in a range, cut to the range. Where memory is hidden block by
    /// block, adjacent managed memory counts as one mapping. Hidden memory and memory of the program
    /// without access count as two.
    pub fn mappings(&self, range: &Range<usize>) -> Vec<Range<usize>> {
        let managed_parts = match self.paging.hides() {
            true => self.pager.mappings().managed_parts(range),
            false => Vec::new(),
        };
        let is_one = |at: usize| managed_parts.iter().any(|part| part.start < at && at < part.end);
        let mut all: Vec<Range<usize>> = Vec::new();
        let _ = self.maps.each(range.start, range.end, |mapping| {
            let (mut start, end) = (mapping.start.max(range.start), mapping.end.min(range.end));
            let edges = managed_parts.iter().flat_map(|part| [part.start, part.end]);
            let is_inside = |edge: &usize| start < *edge && *edge < end;
            let edges = edges.filter(|edge| mapping.access == libc::PROT_NONE && is_inside(edge));
            for end in edges.collect::<Vec<usize>>().into_iter().chain([end]) {
                match all.last_mut() {
                    Some(last) if last.end == start && is_one(start) => last.end = end,
                    _ => all.push(start..end),
                }
                start = end;
            }
        });
        all
    }

    /// Begins a call on `ranges` that is made with no lock held. Nothing in them is managed until
    /// [`ProgramState::end_apart`]. `child` is the number of the caller, if it is a child.
    ///
    /// The kernel may wait in the call until another thread of the program has done something,
    /// which may change mappings first. That is so if a userfaultfd or a file system of the program
    /// handles its faults or events. Or a child makes the call, and may be killed in it.
    pub fn begin_apart(
        &self,
        state: &mut ProgramState,
        child: Option<usize>,
        ranges: [Range<usize>; 2],
    ) -> ApartCall {
        let before = self.before(state, &ranges);
        let number = self.apart_calls.fetch_add(1, SeqCst);
        let apart = state.begin_apart(number, child, before);
        ranges.iter().for_each(|range| self.leave_with_guards(state, range));
        apart
    }

    /// Returns whether a call was ever made with no lock held.
    pub fn had_apart(&self) -> bool {
        self.apart_calls.load(SeqCst) > 0
    }

    /// Returns what there is in some ranges.
    pub fn before(&self, state: &ProgramState, ranges: &[Range<usize>]) -> FoundRanges {
        let faults = self.faults_of_program.lock();
        let faults = ranges.iter().flat_map(|range| faults.within(range)).collect();
        state.before(ranges, faults)
    }

    /// Records that the program handles faults in a range itself.
    pub fn add_faults(&self, range: Range<usize>) {
        self.faults_of_program.lock().add(range);
    }

    /// Records that the contents of a range are gone or have moved. Faults there are no longer the
    /// program's to handle.
    pub fn forget_faults(&self, range: &Range<usize>) {
        self.faults_of_program.lock().remove(range);
    }

    /// Returns whether the program handles faults in a part of a range itself.
    pub fn has_faults(&self, range: &Range<usize>) -> bool {
        !self.faults_of_program.lock().within(range).is_empty()
    }

    /// Locks the memory where the program handles faults, for a copy of the process, until
    /// [`ProgramMemory::unlock_faults`].
    pub fn lock_faults(&self) {
        forget(self.faults_of_program.lock());
    }

    /// Ends [`ProgramMemory::lock_faults`].
    ///
    /// # Safety
    /// - [`ProgramMemory::lock_faults`] was called, in this process or in the parent that it is a
    ///   copy of, and this is called once for it.
    pub unsafe fn unlock_faults(&self) {
        // SAFETY: `lock_faults` has forgotten the guard, and the caller promises that this is the
        // one call for it.
        unsafe { self.faults_of_program.unlock() };
    }

    /// Returns whether a thread is in the middle of a change, or has ended in it.
    pub fn is_in_change(&self) -> bool {
        self.state.is_held() || self.faults_of_program.is_held()
    }
}
