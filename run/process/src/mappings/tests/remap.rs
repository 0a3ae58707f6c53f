//! Moves, growth, guards and discards, where other threads may use the memory at every moment.
use crate::adoption::Adoption;
use crate::fixture::{Calls, Room, each_paging, numbers};
use crate::mappings::change::ChangeCalls;
use crate::marks::state::MemoryMark;
use core::ops::Range;
use memfold_os::units::PAGE_SIZE;
use std::vec::Vec;

const TO: i32 = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
/// Linux 6.13.
const GUARD_INSTALL: i32 = 102;
const GUARD_REMOVE: i32 = 103;

fn is_resident(calls: Calls, range: &Range<usize>) -> Vec<bool> {
    range
        .clone()
        .step_by(PAGE_SIZE)
        .map(|page| calls.0.memory().pagemap().is_populated(page))
        .collect()
}

#[test]
fn growth_in_place_makes_one_call_and_keeps_what_is_there() {
    each_paging(|program| {
        let (calls, room) = (Calls(program), Room::remote(256));
        let all = room.pages(0..64);
        calls.map(&all);
        calls.unmap(&room.pages(64..256));
        for step in 0..8 {
            let (before, pages) = (64 + step * 16, 64 + (step + 1) * 16);
            calls.fold(&room.pages(step * 8..before - 20));
            let from = room.pages(0..before);
            let mut calls_made = 0;
            let args = [from.start, from.len(), pages * PAGE_SIZE, 1, 0, 0];
            let at =
                ChangeCalls::of(program).change(libc::SYS_mremap as usize, &args, &mut |args| {
                    calls_made += 1;
                    crate::fixture::raw(libc::SYS_mremap, *args)
                });
            assert_eq!(
                (at, calls_made),
                (from.start as isize, 1),
                "{step} {}",
                program.memory().paging().hides()
            );
            assert_eq!(calls.managed(&room.pages(0..256)), [room.pages(0..pages)]);
        }
        assert_eq!(calls.read(&all), numbers(0..64));
        assert_eq!(calls.read(&room.pages(64..192)), [0; 128]);
    });
}

#[test]
fn memory_managed_in_part_grows_and_moves_as_one() {
    each_paging(|program| {
        let (calls, room, to) = (Calls(program), Room::remote(128), Room::new(128));
        let all = room.pages(0..64);
        calls.map(&all);
        calls.unmap(&room.pages(64..128));
        // As memory that is older than the engine.
        calls.with_state(|state| state.marked(MemoryMark::Own).add(room.pages(0..20)));
        program.memory().leave(&room.pages(0..20));
        calls.fold(&room.pages(20..60));
        assert_eq!(calls.remap(&all, 96 * PAGE_SIZE, 1, 0), all.start as isize);
        let all = room.pages(0..96);
        assert_eq!(calls.managed(&all), [room.pages(20..96)]);
        let target = to.pages(0..96);
        assert_eq!(calls.remap(&all, all.len(), TO, target.start), target.start as isize);
        assert_eq!(calls.managed(&to.pages(0..128)), [to.pages(20..96)]);
        assert_eq!(calls.read(&to.pages(0..64)), numbers(0..64));
        assert_eq!(calls.read(&to.pages(64..96)), [0; 32]);
    });
}

#[test]
fn memory_that_moves_to_a_held_place_is_resident_there() {
    each_paging(|program| {
        let (calls, from, to) = (Calls(program), Room::new(64), Room::new(64));
        let (all, target) = (from.pages(0..64), to.pages(0..64));
        calls.map(&all);
        calls.map(&target);
        calls.fold(&all);
        let hold_range = to.pages(8..12);
        let hold = program.pager().holds().hold(0, hold_range.clone()).unwrap();
        let at = calls.remap(&all, all.len(), TO, target.start);
        if program.memory().paging().hides() {
            // It would be missing for the other call for a moment.
            assert_eq!(at, -(libc::ENOMEM as isize));
        } else {
            assert_eq!(at, target.start as isize);
            assert_eq!(is_resident(calls, &hold_range), [true; 4]);
        }
        program.pager().holds().release(hold);
        let range_now = if program.memory().paging().hides() { &all } else { &target };
        calls.fold(range_now);
        assert_eq!(calls.read(range_now), numbers(0..64));
    });
}

#[test]
fn guards_survive_loads_of_the_pages_around_them() {
    each_paging(|program| {
        let (calls, room) = (Calls(program), Room::new(64));
        let (all, guard) = (room.pages(0..64), room.pages(24..26));
        calls.map(&all);
        calls.fold(&all);
        let result = calls.advise(&guard, GUARD_INSTALL);
        if result == -(libc::EINVAL as isize) {
            return; // Before Linux 6.13.
        }
        assert_eq!(result, 0);
        assert_eq!(calls.managed(&all), [room.pages(0..24), room.pages(26..64)]);
        assert_eq!(calls.advise(&room.pages(23..27), libc::MADV_DONTNEED), 0);
        assert_eq!(calls.read(&room.pages(0..24))[..23], numbers(0..23));
        assert_eq!(calls.read(&room.pages(26..64))[1..], numbers(27..64));
        assert_eq!(calls.advise(&guard, libc::MADV_POPULATE_READ), -(libc::EFAULT as isize));
        // A guard moves with its mapping.
        calls.with_state(|state| Adoption::of(program).adopt(state, &all));
        let to = Room::new(64);
        let target = to.pages(0..64);
        assert_eq!(calls.remap(&all, all.len(), TO, target.start), target.start as isize);
        assert_eq!(calls.managed(&target), [to.pages(0..24), to.pages(26..64)]);
        assert_eq!(calls.advise(&to.pages(24..26), GUARD_REMOVE), 0);
        assert_eq!(calls.managed(&target), [target.clone()]);
        assert_eq!(calls.read(&to.pages(23..27)), [0; 4]);
        assert_eq!(calls.read(&to.pages(27..64)), numbers(27..64));
    });
}

#[test]
fn failed_move_that_unmapped_its_target_ends_management_there() {
    each_paging(|program| {
        let (calls, from, to) = (Calls(program), Room::new(64), Room::remote(64));
        let (all, target) = (from.pages(0..64), to.pages(0..64));
        calls.map(&all);
        calls.map(&target);
        calls.fold(&all);
        let args = [all.start, all.len(), all.len(), TO as usize, target.start, 0];
        let result = ChangeCalls::of(program).change(libc::SYS_mremap as usize, &args, &mut |_| {
            crate::fixture::raw(libc::SYS_munmap, [target.start, target.len(), 0, 0, 0, 0]);
            -(libc::ENOMEM as isize)
        });
        assert_eq!(result, -(libc::ENOMEM as isize));
        assert_eq!(
            (calls.managed(&target), calls.managed(&all)),
            (Vec::new(), std::vec![all.clone()])
        );
        assert_eq!(calls.read(&all), numbers(0..64));
    });
}
