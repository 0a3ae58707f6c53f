//! `ioctl`s that give ranges of the program's memory to somebody who uses them by means of his own,
//! and at any time: a userfaultfd of the program's, a virtual machine, a device. They leave
//! management first.
use super::gated::{Gated, Mark, State};
use crate::say::say_once;
use core::ops::Range;
use memfold::known::TOP;
use memfold_gate::read_bytes;
use memfold_sys::units::PAGE_SIZE;

const UFFDIO_REGISTER: usize = 0xc020_aa00;
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
        UFFDIO_REGISTER => pair(arg, arg + 8),
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

/// Whether an `ioctl` is one of these.
pub fn gives(request: usize) -> bool {
    let all = [
        UFFDIO_REGISTER,
        KVM_SET_USER_MEMORY_REGION,
        KVM_SET_USER_MEMORY_REGION2,
        VFIO_IOMMU_MAP_DMA,
        VHOST_SET_MEM_TABLE,
    ];
    all.contains(&(request & u32::MAX as usize))
}

impl Gated {
    /// An `ioctl` is about to be made.
    pub fn give(&self, state: &mut State, request: usize, arg: usize) {
        let request = request & u32::MAX as usize;
        state.has_userfault |= request == UFFDIO_REGISTER;
        match request {
            UFFDIO_REGISTER => say_once!(
                "warning: memory that the program registers with a userfaultfd, as libmemfold does, is left to it"
            ),
            VFIO_IOMMU_MAP_DMA => {
                say_once!("warning: memory that the program gives to a device (VFIO) isn't folded")
            }
            VHOST_SET_MEM_TABLE => {
                say_once!("warning: memory that the program gives to vhost isn't folded")
            }
            _ => say_once!("warning: memory that the program gives to KVM isn't folded"),
        }
        each_given(request, arg, |start, len| {
            let end = start.saturating_add(len).min(TOP);
            let range: Range<usize> = start & !(PAGE_SIZE - 1)..end.next_multiple_of(PAGE_SIZE);
            if !range.is_empty() {
                state.marked(Mark::Other).add(range.clone());
                self.leave(&range);
            }
        });
    }
}
