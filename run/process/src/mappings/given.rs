//! `ioctl`s that give ranges of the program's memory to a user that accesses them at any time by
//! other means: a userfaultfd of the program's own, a virtual machine, a device. These ranges leave
//! management first.
//!
//! The kernel would let a userfaultfd of the program change memory that is registered with the
//! engine's. Such a request is answered as if the memory were not registered.
use crate::diagnostics::warn_once;
use crate::marks::state::{MemoryMark, ProgramState};
use crate::program::{MARK, ManagedProgram, ProgramMemory, ProgramRelations, ProgramThreads};
use core::ops::Range;
use memfold_engine::known::TOP;
use memfold_engine::pager::Pager;
use memfold_gate::{read_bytes, write_bytes};
use memfold_os::units::PAGE_SIZE;

const UFFDIO_API: usize = 0xc018_aa3f;
/// Offset of the requested features in the argument. `EVENT_FORK` is the feature that reports
/// forks.
const FEATURES_AT: usize = 8;
const EVENT_FORK: usize = 1 << 1;
const UFFDIO_REGISTER: usize = 0xc020_aa00;
const UFFDIO_UNREGISTER: usize = 0x8010_aa01;
/// Words of the argument: to, from, length.
const UFFDIO_MOVE: usize = 0xc028_aa05;
/// COPY, MOVE, ZEROPAGE, WRITEPROTECT, CONTINUE and POISON change memory where it is registered.
/// The length is the second word; for COPY and MOVE it is the third.
const UFFDIO_PUTS: [usize; 6] =
    [UFFDIO_COPY, UFFDIO_MOVE, 0xc020_aa04, UFFDIO_WRITEPROTECT, 0xc020_aa07, 0xc020_aa08];
const UFFDIO_COPY: usize = 0xc028_aa03;
const UFFDIO_WRITEPROTECT: usize = 0xc018_aa06;
const KVM_SET_USER_MEMORY_REGION: usize = 0x4020_ae46;
const KVM_SET_USER_MEMORY_REGION2: usize = 0x40a0_ae49;
const VFIO_IOMMU_MAP_DMA: usize = 0x3b71;
const VHOST_SET_MEM_TABLE: usize = 0x4008_af03;
/// Ranges of one VHOST_SET_MEM_TABLE, at most (`vhost.max_mem_regions`).
const RANGES_MAX: usize = 509;

fn word(at: usize) -> Option<usize> {
    let mut bytes = [0u8; 8];
    read_bytes(at, &mut bytes).ok().map(|()| usize::from_ne_bytes(bytes))
}

/// Calls `each` with the start and the length of each range that is given.
fn each_given(request: usize, arg: usize, mut each: impl FnMut(usize, usize)) -> Option<()> {
    let mut pair = |start: usize, len: usize| {
        each(word(start)?, word(len)?);
        Some(())
    };
    match request {
        UFFDIO_REGISTER | UFFDIO_UNREGISTER => pair(arg, arg + 8),
        UFFDIO_MOVE => pair(arg + 8, arg + 16),
        KVM_SET_USER_MEMORY_REGION | KVM_SET_USER_MEMORY_REGION2 => pair(arg + 24, arg + 16),
        VFIO_IOMMU_MAP_DMA => pair(arg + 8, arg + 24),
        VHOST_SET_MEM_TABLE => {
            let count = word(arg)? & u32::MAX as usize;
            (0..count.min(RANGES_MAX))
                .map(|n| arg + 8 + n * 32)
                .try_for_each(|range| pair(range + 16, range + 8))
        }
        _ => Some(()),
    }
}

/// Returns whether an `ioctl` is one of those that this module handles.
pub fn gives(request: usize) -> bool {
    let all = [
        UFFDIO_API,
        UFFDIO_REGISTER,
        UFFDIO_UNREGISTER,
        UFFDIO_MOVE,
        KVM_SET_USER_MEMORY_REGION,
        KVM_SET_USER_MEMORY_REGION2,
        VFIO_IOMMU_MAP_DMA,
        VHOST_SET_MEM_TABLE,
    ];
    all.contains(&(request & u32::MAX as usize))
}

/// Prepares the `ioctl`s that give memory away, and refuses those that would change managed memory.
#[derive(Copy, Clone)]
pub struct GivenCalls<'a> {
    pager: &'a Pager,
    memory: &'a ProgramMemory,
    threads: &'a ProgramThreads,
    relations: &'a ProgramRelations,
}

impl GivenCalls<'_> {
    /// Returns the walk over the parts of `program`.
    pub fn of(program: &ManagedProgram) -> GivenCalls<'_> {
        GivenCalls {
            pager: program.pager(),
            memory: program.memory(),
            threads: program.threads(),
            relations: program.relations(),
        }
    }

    /// Returns the answer to an `ioctl` of a userfaultfd of the program that would change managed
    /// memory. Returns `None` for all others.
    pub fn refuse(&self, request: usize, arg: usize) -> Option<isize> {
        const REFUSED: isize = -(libc::ENOENT as isize);
        let request = request & u32::MAX as usize;
        if !UFFDIO_PUTS.contains(&request) {
            return None;
        }
        let has_source = [UFFDIO_COPY, UFFDIO_MOVE].contains(&request);
        let len_at = if has_source { arg + 16 } else { arg + 8 };
        let range = pages_of(word(arg)?, word(len_at)?);
        if range.is_empty() || !self.threads.on_behalf(|| self.pager.mappings().touches(&range)) {
            return None;
        }
        // The last word of the argument is for the kernel's progress, or its error.
        if request != UFFDIO_WRITEPROTECT {
            let last = if has_source { arg + 32 } else { arg + 24 };
            // SAFETY: the program expects the kernel to write this word of its argument.
            let _ = unsafe { write_bytes(last, &REFUSED.to_ne_bytes()) };
        }
        Some(REFUSED)
    }

    /// Prepares an `ioctl`: the ranges that it gives leave management. Each range is recorded
    /// separately, because the argument is read with no lock held.
    pub fn give(&self, request: usize, arg: usize) {
        let request = request & u32::MAX as usize;
        if !gives(request) {
            return;
        }
        match request {
            UFFDIO_REGISTER => warn_once!(
                "warning: Memory that the program registers with its own userfaultfd, as libmemfold does, is not folded"
            ),
            UFFDIO_API => {
                self.pager.mappings().fill_touched_pages_only();
                if word(arg + FEATURES_AT).is_some_and(|features| features & EVENT_FORK != 0) {
                    self.note_copies();
                }
                return;
            }
            // Memory that leaves the program's userfaultfd is like any other from now on.
            UFFDIO_UNREGISTER | UFFDIO_MOVE => {}
            VFIO_IOMMU_MAP_DMA => {
                warn_once!(
                    "warning: Memory that the program maps for a device (VFIO) is not folded"
                )
            }
            VHOST_SET_MEM_TABLE => {
                warn_once!("warning: Memory that the program gives to vhost is not folded")
            }
            _ => warn_once!("warning: Memory that the program gives to KVM is not folded"),
        }
        each_given(request, arg, |start, len| {
            let range = pages_of(start, len);
            if !range.is_empty() {
                self.threads
                    .on_behalf(|| self.give_range(&mut self.memory.state().lock(), request, range));
            }
        });
    }

    fn give_range(&self, state: &mut ProgramState, request: usize, range: Range<usize>) {
        state.has_userfault |= request == UFFDIO_REGISTER;
        state.note_new(&range);
        match request {
            UFFDIO_REGISTER => self.memory.add_faults(range.clone()),
            UFFDIO_UNREGISTER => self.memory.forget_faults(&range),
            _ => {}
        }
        if request != UFFDIO_UNREGISTER {
            state.marked(MemoryMark::Other).add(range.clone());
        }
        self.memory.leave(&range);
    }

    /// Prepares for a userfaultfd of the program that gets an event for each copy of the process.
    fn note_copies(&self) {
        MARK.lock();
        self.threads.start_serving(self.memory.state());
        self.relations.tell_of_copies();
    }
}

fn pages_of(start: usize, len: usize) -> Range<usize> {
    let end = start.saturating_add(len).min(TOP);
    start & !(PAGE_SIZE - 1)..end.next_multiple_of(PAGE_SIZE)
}
