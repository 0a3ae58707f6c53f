//! `ioctl`s that give memory away. The device is a fake, because only the named ranges matter.
use crate::fixture::{Calls, Room, each_paging, error, numbers};
use crate::mappings::change::ChangeCalls;
use crate::marks::state::MemoryMark;
use memfold_os::Errno;
use memfold_os::units::PAGE_SIZE;

const UFFDIO_API: usize = 0xc018_aa3f;
const UFFDIO_REGISTER: usize = 0xc020_aa00;
const UFFDIO_UNREGISTER: usize = 0x8010_aa01;
const UFFDIO_COPY: usize = 0xc028_aa03;
const UFFDIO_ZEROPAGE: usize = 0xc020_aa04;
const UFFDIO_MOVE: usize = 0xc028_aa05;
const UFFDIO_WRITEPROTECT: usize = 0xc018_aa06;
const KVM_SET_USER_MEMORY_REGION: usize = 0x4020_ae46;
const VFIO_IOMMU_MAP_DMA: usize = 0x3b71;
const VHOST_SET_MEM_TABLE: usize = 0x4008_af03;

impl Calls {
    /// Makes an `ioctl` that a fake answers. Returns `None` if the fake wasn't asked.
    fn control(self, request: usize, arg: &[usize]) -> Option<isize> {
        let mut is_asked = false;
        let args = [3, request, arg.as_ptr() as usize, 0, 0, 0];
        let result = ChangeCalls::of(self.0).change(libc::SYS_ioctl as usize, &args, &mut |_| {
            is_asked = true;
            77
        });
        is_asked.then_some(result)
    }
}

#[test]
fn given_memory_leaves_management_whoever_it_is_given_to() {
    each_paging(|program| {
        type Words = fn(usize, usize) -> [usize; 6];
        // Start and length are at their places in each struct.
        let all: [(usize, Words); 4] = [
            (UFFDIO_REGISTER, |at, len| [at, len, 0, 0, 0, 0]),
            (KVM_SET_USER_MEMORY_REGION, |at, len| [0, 0, len, at, 0, 0]),
            (VFIO_IOMMU_MAP_DMA, |at, len| [0, at, 0, len, 0, 0]),
            (VHOST_SET_MEM_TABLE, |at, len| [1, 0, len, at, 0, 0]),
        ];
        for (request, words) in all {
            let (calls, room) = (Calls(program), Room::new(64));
            let (all, part) = (room.pages(0..64), room.pages(16..32));
            calls.map(&all);
            calls.fold(&all);
            assert_eq!(calls.control(request, &words(part.start, part.len())), Some(77));
            assert_eq!(
                calls.managed(&all),
                [room.pages(0..16), room.pages(32..64)],
                "{request:#x}"
            );
            assert_eq!(
                calls.with_state(|state| state.marked(MemoryMark::Other).within(&all)),
                [part]
            );
            assert_eq!(calls.read(&all), numbers(0..64));
        }
    });
}

#[test]
fn each_range_of_a_table_is_given() {
    each_paging(|program| {
        let (calls, room) = (Calls(program), Room::new(64));
        let all = room.pages(0..64);
        calls.map(&all);
        let (a, b) = (room.pages(0..16), room.pages(48..64));
        let table = [2, 0, a.len(), a.start, 0, 0, b.len() - 5, b.start + 1, 0];
        assert_eq!(calls.control(VHOST_SET_MEM_TABLE, &table), Some(77));
        assert_eq!(calls.managed(&all), [room.pages(16..48)], "whole pages");
    });
}

#[test]
fn faults_are_the_programs_own_while_it_has_registered_for_them() {
    each_paging(|program| {
        let (calls, room) = (Calls(program), Room::new(64));
        let (all, part) = (room.pages(0..64), room.pages(16..32));
        calls.map(&all);
        let own = || calls.own_faults(&all);
        calls.control(UFFDIO_REGISTER, &[part.start, part.len(), 1, 0]);
        assert!(own() == [part.clone()] && calls.with_state(|state| state.has_userfault));
        calls.control(UFFDIO_UNREGISTER, &[part.start, 8 * PAGE_SIZE]);
        assert_eq!(own(), [room.pages(24..32)]);
        // Unmapped memory has no owner.
        assert_eq!(calls.unmap(&part), 0);
        assert!(own().is_empty());
    });
}

#[test]
fn faults_of_the_program_move_with_its_memory() {
    each_paging(|program| {
        let (calls, from, to) = (Calls(program), Room::new(32), Room::new(32));
        let (all, target, part) = (from.pages(0..32), to.pages(0..32), from.pages(8..16));
        calls.map(&all);
        calls.control(UFFDIO_REGISTER, &[part.start, part.len(), 1, 0]);
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        assert_eq!(calls.remap(&all, all.len(), flags, target.start), target.start as isize);
        let own = |range| calls.own_faults(range);
        assert_eq!((own(&all), own(&target)), ([].to_vec(), [to.pages(8..16)].to_vec()));
        let marks = calls.with_state(|state| state.marked(MemoryMark::Other).within(&target));
        assert_eq!(marks, [to.pages(8..16)]);
    });
}

/// The kernel would let a userfaultfd of the program fill memory that is registered with the
/// engine's.
#[test]
fn managed_memory_is_filled_by_no_userfaultfd_of_the_program() {
    each_paging(|program| {
        let (calls, room) = (Calls(program), Room::new(64));
        let all = room.pages(0..64);
        calls.map(&all);
        let refusal = error(Errno::NOENT);
        let page = all.start + 5 * PAGE_SIZE;
        for (request, last) in [(UFFDIO_COPY, 4), (UFFDIO_MOVE, 4), (UFFDIO_ZEROPAGE, 3)] {
            let mut words = [page, PAGE_SIZE, PAGE_SIZE, 0, 0, 0];
            words[1] = if last == 4 { all.start } else { PAGE_SIZE };
            let args = [3, request, words.as_mut_ptr() as usize, 0, 0, 0];
            let make = &mut |_: &[usize; 6]| panic!("it isn't made");
            assert_eq!(
                ChangeCalls::of(program).change(libc::SYS_ioctl as usize, &args, make),
                refusal
            );
            // SAFETY: `words` is still alive. It was written through its address, so it is read as
            // volatile.
            assert_eq!(unsafe { (&raw const words[last]).read_volatile() }, refusal as usize);
        }
        let protect = [page, PAGE_SIZE, 1];
        assert_eq!(calls.control(UFFDIO_WRITEPROTECT, &protect), None);
        let range_outside = [0x10000, PAGE_SIZE, PAGE_SIZE, 0, 0];
        assert_eq!(calls.control(UFFDIO_ZEROPAGE, &range_outside), Some(77));
    });
}

#[test]
fn other_requests_pass() {
    each_paging(|program| {
        let (calls, room) = (Calls(program), Room::new(64));
        let all = room.pages(0..64);
        calls.map(&all);
        assert_eq!(calls.control(UFFDIO_API, &[0xaa, 0, 0]), Some(77));
        assert_eq!(calls.control(0x5401, &[all.start, all.len()]), Some(77));
        assert_eq!(calls.managed(&all), [all.clone()]);
        assert!(!program.relations().tells_of_copies());
    });
}
