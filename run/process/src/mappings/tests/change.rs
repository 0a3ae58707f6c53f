//! `mmap`, `munmap`, `mremap`, `mprotect`, `mlock`: the managed ranges, the marks, and the contents
//! afterwards.
use crate::adoption::Adoption;
use crate::fixture::{Calls, Room, each_paging, each_paging_alone, error, numbers};
use crate::mappings::change::ChangeCalls;
use crate::marks::state::{MemoryMark, ProgramState};
use memfold_engine::known::TOP;
use memfold_os::Errno;
use memfold_os::units::PAGE_SIZE;
use std::vec::Vec;

const PLAIN: i32 = libc::PROT_READ | libc::PROT_WRITE;

#[test]
fn new_memory_is_managed_from_the_start() {
    each_paging(|program| {
        let (calls, room) = (Calls(program), Room::new(64));
        let all = room.pages(0..64);
        assert_eq!(calls.map_with(&all, PLAIN, 0), all.start as isize);
        assert_eq!(calls.managed(&all), [all.clone()]);
        assert!(program.memory().known().is_set(&all));
    });
}

#[test]
fn lowest_page_of_growing_memory_stays_unmanaged() {
    each_paging(|program| {
        let (calls, room) = (Calls(program), Room::remote(128));
        let all = room.pages(64..128);
        assert_eq!(calls.unmap(&room.pages(0..128)), 0);
        assert_eq!(calls.map_with(&all, PLAIN, libc::MAP_GROWSDOWN), all.start as isize);
        assert_eq!(calls.managed(&all), [room.pages(65..128)]);
        // The addresses into which it grows.
        let marks_of =
            |state: &mut ProgramState| state.marked(MemoryMark::Other).within(&room.pages(0..128));
        assert_eq!(calls.with_state(marks_of), [room.pages(0..65)]);
        calls.map(&room.pages(0..32));
    });
}

#[test]
fn special_memory_stays_unmanaged() {
    each_paging(|program| {
        let (calls, room) = (Calls(program), Room::new(64));
        let all = room.pages(0..64);
        for (access, flags) in
            [(libc::PROT_READ, 0), (libc::PROT_NONE, 0), (PLAIN, libc::MAP_STACK)]
        {
            assert_eq!(calls.map_with(&all, access, flags), all.start as isize);
            assert!(calls.managed(&all).is_empty(), "{access} {flags}");
        }
        // The last mapping had a mark, which ends with the mapping.
        calls.map(&all);
        let small = room.pages(0..8);
        calls.unmap(&all);
        assert_eq!(calls.map_with(&small, PLAIN, 0), small.start as isize);
        assert!(calls.managed(&small).is_empty(), "it is small, and continues nothing");
    });
}

#[test]
fn unmapped_middle_leaves_the_ends_managed() {
    each_paging(|program| {
        let (calls, room) = (Calls(program), Room::new(96));
        let all = room.pages(0..96);
        calls.map(&all);
        calls.fold(&room.pages(20..60));
        assert_eq!(calls.unmap(&room.pages(32..64)), 0);
        assert_eq!(calls.managed(&all), [room.pages(0..32), room.pages(64..96)]);
        assert_eq!(calls.read(&room.pages(0..32)), numbers(0..32));
        assert_eq!(calls.read(&room.pages(64..96)), numbers(64..96));
    });
}

#[test]
fn refused_unmap_changes_nothing() {
    each_paging(|program| {
        let (calls, room) = (Calls(program), Room::new(64));
        let all = room.pages(0..64);
        calls.map(&all);
        calls.fold(&all);
        let args = [all.start, all.len(), 0, 0, 0, 0];
        let refusal = error(Errno::NOMEM);
        let result =
            ChangeCalls::of(program).change(libc::SYS_munmap as usize, &args, &mut |_| refusal);
        assert_eq!((result, calls.managed(&all)), (refusal, [all.clone()].to_vec()));
        assert_eq!(calls.read(&all), numbers(0..64));
    });
}

#[test]
fn mapping_over_marked_memory_ends_the_mark() {
    each_paging(|program| {
        let (calls, room) = (Calls(program), Room::new(64));
        let all = room.pages(0..64);
        calls.map(&all);
        assert_eq!(calls.call(libc::SYS_mlock, [all.start, 2 * PAGE_SIZE, 0, 0, 0, 0]), 0);
        assert_eq!(calls.managed(&all), [room.pages(2..64)]);
        calls.map(&all);
        assert!(calls.with_state(|state| state.marked(MemoryMark::Locked).within(&all)).is_empty());
    });
}

#[test]
fn moved_memory_is_managed_at_its_new_place() {
    each_paging(|program| {
        let (calls, from, to) = (Calls(program), Room::new(64), Room::new(64));
        let (all, target) = (from.pages(0..64), to.pages(0..64));
        calls.map(&all);
        calls.fold(&from.pages(8..40));
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        let at = calls.remap(&all, all.len(), flags, target.start);
        assert_eq!(at, target.start as isize);
        assert_eq!(
            (calls.managed(&all), calls.managed(&target)),
            (Vec::new(), [target.clone()].to_vec())
        );
        assert_eq!(calls.read(&target), numbers(0..64));
    });
}

#[test]
fn memory_that_is_moved_and_kept_is_managed_at_both_places() {
    each_paging(|program| {
        let (calls, from, to) = (Calls(program), Room::new(64), Room::new(64));
        let (all, target) = (from.pages(0..64), to.pages(0..64));
        calls.map(&all);
        calls.fold(&from.pages(0..64));
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
        assert_eq!(calls.remap(&all, all.len(), flags, target.start), target.start as isize);
        assert_eq!(calls.managed(&target), [target.clone()]);
        assert_eq!(calls.read(&target), numbers(0..64));
        assert_eq!(calls.read(&all), [0; 64], "what is left is new");
    });
}

#[test]
fn refused_move_changes_nothing() {
    each_paging(|program| {
        let (calls, room) = (Calls(program), Room::new(80));
        let (all, next_part) = (room.pages(0..64), room.pages(64..80));
        calls.map(&all);
        calls.map_with(&next_part, libc::PROT_READ, 0);
        calls.fold(&all);
        // The mapping may not move, and has no room to grow.
        let refusal = calls.remap(&all, 70 * PAGE_SIZE, 0, 0);
        assert_eq!((refusal, calls.managed(&all)), (error(Errno::NOMEM), [all.clone()].to_vec()));
        assert_eq!(calls.read(&all), numbers(0..64));
    });
}

#[test]
fn shrunk_memory_is_managed_as_far_as_it_is_there() {
    each_paging(|program| {
        let (calls, room) = (Calls(program), Room::new(64));
        let all = room.pages(0..64);
        calls.map(&all);
        calls.fold(&all);
        assert_eq!(calls.remap(&all, 24 * PAGE_SIZE, 0, 0), all.start as isize);
        assert_eq!(calls.managed(&all), [room.pages(0..24)]);
        assert_eq!(calls.read(&room.pages(0..24)), numbers(0..24));
    });
}

#[test]
fn grown_memory_has_the_marks_of_its_end() {
    each_paging(|program| {
        let (calls, room) = (Calls(program), Room::new(128));
        let all = room.pages(0..64);
        calls.map(&all);
        assert_eq!(calls.unmap(&room.pages(64..128)), 0);
        assert_eq!(calls.advise(&room.pages(48..64), libc::MADV_DONTDUMP), 0);
        // The kernel lets only one mapping grow, the last one.
        let last = room.pages(48..64);
        assert_eq!(calls.remap(&last, 32 * PAGE_SIZE, 0, 0), last.start as isize);
        let marks = calls
            .with_state(|state| state.marked(MemoryMark::DontDump).within(&room.pages(0..128)));
        assert_eq!(marks, [room.pages(48..80)]);
        assert_eq!(calls.managed(&room.pages(0..128)), [room.pages(0..48)]);
    });
}

#[test]
fn marks_move_with_the_memory_but_locks_end_where_it_was() {
    each_paging(|program| {
        let (calls, from, to) = (Calls(program), Room::new(64), Room::new(64));
        let (all, target) = (from.pages(0..32), to.pages(0..32));
        calls.map(&all);
        assert_eq!(calls.advise(&all, libc::MADV_DONTDUMP), 0);
        assert_eq!(calls.call(libc::SYS_mlock, [all.start, all.len(), 0, 0, 0, 0]), 0);
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        assert_eq!(calls.remap(&all, all.len(), flags, target.start), target.start as isize);
        let marks_of = |mark, range: &core::ops::Range<usize>| {
            calls.with_state(|state| state.marked(mark).within(range))
        };
        for mark in [MemoryMark::DontDump, MemoryMark::Locked] {
            assert_eq!(marks_of(mark, &target), [target.clone()]);
            assert!(marks_of(mark, &all).is_empty());
        }
        assert!(calls.managed(&target).is_empty());
        calls.call(libc::SYS_munlock, [target.start, target.len(), 0, 0, 0, 0]);
        assert!(calls.managed(&target).is_empty(), "it is kept from dumps");
        assert_eq!(calls.advise(&target, libc::MADV_DODUMP), 0);
        assert_eq!(calls.managed(&target), [target.clone()]);
    });
}

#[test]
fn mappings_that_are_moved_together_keep_what_lies_between() {
    each_paging(|program| {
        let (calls, from, to) = (Calls(program), Room::new(96), Room::new(96));
        let (all, target) = (from.pages(0..96), to.pages(0..96));
        calls.map(&from.pages(0..32));
        calls.map(&from.pages(64..96));
        assert_eq!(calls.unmap(&from.pages(32..64)), 0);
        calls.map(&target);
        calls.fold(&from.pages(0..96));
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        assert_eq!(calls.remap(&all, all.len(), flags, target.start), target.start as isize);
        assert_eq!(calls.managed(&all), [] as [core::ops::Range<usize>; 0]);
        assert_eq!(calls.read(&to.pages(0..32)), numbers(0..32));
        assert_eq!(calls.read(&to.pages(32..64)), numbers(32..64), "what was there, at the gap");
        assert_eq!(calls.read(&to.pages(64..96)), numbers(0..32));
    });
}

#[test]
fn read_only_memory_stays_managed_unless_it_is_hidden() {
    each_paging(|program| {
        let (calls, room) = (Calls(program), Room::new(64));
        let all = room.pages(0..64);
        calls.map(&all);
        calls.fold(&room.pages(16..48));
        let protect = |range: &core::ops::Range<usize>, access: i32| {
            calls.call(libc::SYS_mprotect, [range.start, range.len(), access as usize, 0, 0, 0])
        };
        assert_eq!(protect(&room.pages(0..32), libc::PROT_READ), 0);
        let managed =
            if program.memory().paging().hides() { room.pages(32..64) } else { all.clone() };
        assert_eq!(calls.managed(&all), [managed]);
        assert_eq!(protect(&room.pages(0..32), PLAIN), 0);
        calls.with_state(|state| Adoption::of(program).adopt_later(state, &(0..0)));
        assert_eq!(calls.read(&all), numbers(0..64));
    });
}

#[test]
fn locked_memory_is_home_until_it_is_unlocked() {
    each_paging(|program| {
        let (calls, room) = (Calls(program), Room::new(64));
        let (all, part) = (room.pages(0..64), room.pages(8..16));
        calls.map(&all);
        calls.fold(&all);
        assert_eq!(calls.call(libc::SYS_mlock, [part.start, part.len(), 0, 0, 0, 0]), 0);
        assert_eq!(calls.managed(&all), [room.pages(0..8), room.pages(16..64)]);
        assert!(
            part.clone()
                .step_by(PAGE_SIZE)
                .all(|page| program.memory().pagemap().is_populated(page))
        );
        assert_eq!(calls.call(libc::SYS_munlock, [part.start, part.len(), 0, 0, 0, 0]), 0);
        assert_eq!(calls.managed(&all), [all.clone()]);
        assert_eq!(calls.read(&all), numbers(0..64));
    });
}

/// The kernel locks one mapping after the other, up to unmapped memory.
#[test]
fn lock_that_fails_at_a_gap_has_locked_what_is_before_it() {
    each_paging(|program| {
        let (calls, room) = (Calls(program), Room::new(96));
        let all = room.pages(0..96);
        calls.map(&all);
        assert_eq!(calls.unmap(&room.pages(32..64)), 0);
        let result = calls.call(libc::SYS_mlock, [all.start, all.len(), 0, 0, 0, 0]);
        assert_eq!(result, error(Errno::NOMEM));
        assert_eq!(calls.managed(&all), [room.pages(64..96)]);
        let marks = calls.with_state(|state| state.marked(MemoryMark::Locked).within(&all));
        assert_eq!(marks, [room.pages(0..32)]);
    });
}

#[test]
fn refused_lock_leaves_memory_managed() {
    each_paging(|program| {
        let (calls, room) = (Calls(program), Room::new(64));
        let all = room.pages(0..64);
        calls.map(&all);
        let args = [all.start, all.len(), 0, 0, 0, 0];
        let refusal = error(Errno::PERM);
        assert_eq!(
            ChangeCalls::of(program).change(libc::SYS_mlock as usize, &args, &mut |_| refusal),
            refusal
        );
        assert_eq!(calls.managed(&all), [all.clone()]);
        assert!(calls.with_state(|state| state.marked(MemoryMark::Locked).within(&all)).is_empty());
    });
}

/// The setting is for the whole process, so the kernel isn't asked.
#[test]
fn memory_that_may_be_merged_leaves_management() {
    each_paging_alone(|program| {
        let (calls, room) = (Calls(program), Room::new(64));
        let all = room.pages(0..64);
        calls.map(&all);
        // At the end all memory that may be managed is adopted. The memory of other tests must not
        // be.
        calls.with_state(|state| {
            state.marked(MemoryMark::Own).add(0..all.start);
            state.marked(MemoryMark::Own).add(all.end..TOP);
        });
        let merge = |on: usize, answer: isize| {
            let args = [libc::PR_SET_MEMORY_MERGE as usize, on, 0, 0, 0, 0];
            ChangeCalls::of(program).change(libc::SYS_prctl as usize, &args, &mut |_| answer)
        };
        assert_eq!(merge(1, error(Errno::PERM)), error(Errno::PERM));
        assert!(calls.with_state(|state| state.takes()));
        assert_eq!(merge(1, 0), 0);
        assert!(calls.managed(&all).is_empty() && !calls.with_state(|state| state.takes()));
        let marks = calls.with_state(|state| state.marked(MemoryMark::Mergeable).within(&all));
        assert_eq!(marks, [all.clone()]);
    });
}

/// The kernel may wait in the call for a fault that the program itself handles, so the call is made
/// with no lock held.
#[test]
fn call_made_apart_leaves_what_another_thread_maps_meanwhile() {
    each_paging(|program| {
        let (calls, room) = (Calls(program), Room::new(96));
        let (all, middle) = (room.pages(0..96), room.pages(32..64));
        calls.map(&all);
        calls.with_state(|state| {
            state.has_userfault = true;
            state.marked(MemoryMark::Other).add(room.pages(0..1));
        });
        let args = [all.start, all.len(), 0, 0, 0, 0];
        let result =
            ChangeCalls::of(program).change(libc::SYS_munmap as usize, &args, &mut |args| {
                assert!(calls.managed(&all).is_empty(), "nothing of it is managed meanwhile");
                let result = crate::fixture::raw(libc::SYS_munmap, *args);
                calls.map_with(&middle, PLAIN, 0);
                result
            });
        assert_eq!(result, 0);
        calls.with_state(|state| Adoption::of(program).adopt(state, &all));
        assert_eq!(calls.managed(&all), [middle]);
        let marks = calls.with_state(|state| state.marked(MemoryMark::Other).within(&all));
        assert!(marks.is_empty() || marks == [room.pages(32..64)], "{marks:?}");
    });
}

#[test]
fn refused_interfaces_say_that_they_are_not_there() {
    each_paging(|program| {
        for nr in [libc::SYS_io_uring_setup, libc::SYS_io_setup] {
            let result = ChangeCalls::of(program)
                .change(nr as usize, &[0; 6], &mut |_| panic!("it isn't made"));
            assert_eq!(result, error(Errno::NOSYS));
        }
    });
}
