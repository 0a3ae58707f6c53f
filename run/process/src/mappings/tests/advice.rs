//! `madvise`: discarded memory, marked memory, and errors in the middle of a range.
use crate::fixture::{Calls, Room, each_paging, each_paging_alone, error, numbers, raw};
use crate::mappings::change::ChangeCalls;
use crate::marks::state::MemoryMark;
use core::ops::Range;
use memfold_os::Errno;
use memfold_os::units::PAGE_SIZE;

const GUARD_INSTALL: i32 = 102;
const GUARD_REMOVE: i32 = 103;

fn marked(calls: Calls, mark: MemoryMark, range: &Range<usize>) -> std::vec::Vec<Range<usize>> {
    calls.with_state(|state| state.marked(mark).within(range))
}

/// Fills pages 0..32 and 64..96 of the room with folded memory. Between them lies a file, for which
/// the kernel refuses advice about anonymous memory.
fn around_a_file(calls: Calls, room: &Room) {
    let between = room.pages(32..64);
    calls.map(&room.pages(0..32));
    calls.map(&room.pages(64..96));
    let file = rustix::fs::memfd_create(c"between", rustix::fs::MemfdFlags::empty()).unwrap();
    rustix::fs::ftruncate(&file, between.len() as u64).unwrap();
    let flags = libc::MAP_PRIVATE | libc::MAP_FIXED;
    let fd = rustix::fd::AsRawFd::as_raw_fd(&file) as usize;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let args = [between.start, between.len(), access as usize, flags as usize, fd, 0];
    assert_eq!(calls.call(libc::SYS_mmap, args), between.start as isize);
    assert!(calls.managed(&between).is_empty());
    calls.fold(&room.pages(0..96));
}

#[test]
fn discarded_memory_is_zeros_folded_or_not() {
    each_paging(|program| {
        let (calls, room) = (Calls(program), Room::new(64));
        let all = room.pages(0..64);
        for advice in [libc::MADV_DONTNEED, libc::MADV_FREE] {
            calls.map(&all);
            calls.fold(&room.pages(0..32));
            assert_eq!(calls.advise(&room.pages(16..48), advice), 0);
            assert_eq!(calls.managed(&all), [all.clone()]);
            let now = calls.read(&all);
            assert_eq!((&now[..16], &now[48..]), (&numbers(0..16)[..], &numbers(48..64)[..]));
            assert_eq!(now[16..48], [0; 32], "{advice}");
        }
    });
}

#[test]
fn refused_discard_keeps_contents() {
    each_paging(|program| {
        let (calls, room) = (Calls(program), Room::new(64));
        let all = room.pages(0..64);
        calls.map(&all);
        calls.fold(&all);
        let refusal = error(Errno::INVAL);
        // If the kernel refuses the advice itself, not even the first mapping is done.
        let odd = all.start + 1..all.end;
        let args = [odd.start, odd.len(), libc::MADV_DONTNEED as usize, 0, 0, 0];
        assert_eq!(calls.call(libc::SYS_madvise, args), refusal);
        assert_eq!(calls.read(&all), numbers(0..64));
    });
}

/// The kernel handles one mapping after the other.
#[test]
fn discard_refused_in_the_middle_has_dropped_the_start() {
    each_paging(|program| {
        let (calls, room) = (Calls(program), Room::new(96));
        around_a_file(calls, &room);
        assert_eq!(calls.advise(&room.pages(0..96), libc::MADV_FREE), error(Errno::INVAL));
        assert_eq!(calls.read(&room.pages(0..32)), [0; 32]);
        assert_eq!(calls.read(&room.pages(64..96)), numbers(0..32));
    });
}

#[test]
fn discard_over_a_gap_goes_on_behind_it() {
    each_paging(|program| {
        let (calls, room) = (Calls(program), Room::new(96));
        calls.map(&room.pages(0..96));
        assert_eq!(calls.unmap(&room.pages(32..64)), 0);
        calls.fold(&room.pages(0..96));
        let all = room.pages(0..96);
        assert_eq!(calls.advise(&all, libc::MADV_DONTNEED), error(Errno::NOMEM));
        assert_eq!(calls.managed(&all), [room.pages(0..32), room.pages(64..96)]);
        assert_eq!(calls.read(&room.pages(0..32)), [0; 32]);
        assert_eq!(calls.read(&room.pages(64..96)), [0; 32]);
    });
}

#[test]
fn mark_refused_in_the_middle_is_on_the_start() {
    each_paging(|program| {
        let (calls, room) = (Calls(program), Room::new(96));
        around_a_file(calls, &room);
        let all = room.pages(0..96);
        assert_eq!(calls.advise(&all, libc::MADV_WIPEONFORK), error(Errno::INVAL));
        assert_eq!(marked(calls, MemoryMark::Wiped, &all), [room.pages(0..32)]);
        assert_eq!(calls.managed(&all), [room.pages(64..96)]);
        assert_eq!(calls.read(&room.pages(0..32)), numbers(0..32));
        assert_eq!(calls.read(&room.pages(64..96)), numbers(0..32));
    });
}

#[test]
fn mark_over_a_gap_is_on_both_sides() {
    each_paging(|program| {
        let (calls, room) = (Calls(program), Room::new(96));
        let all = room.pages(0..96);
        calls.map(&all);
        assert_eq!(calls.unmap(&room.pages(32..64)), 0);
        assert_eq!(calls.advise(&all, libc::MADV_DONTDUMP), error(Errno::NOMEM));
        assert!(calls.managed(&all).is_empty());
        assert_eq!(calls.advise(&all, libc::MADV_DODUMP), error(Errno::NOMEM));
        assert_eq!(calls.managed(&all), [room.pages(0..32), room.pages(64..96)]);
        assert!(marked(calls, MemoryMark::DontDump, &all).is_empty());
    });
}

#[test]
fn each_mark_ends_with_its_counterpart() {
    each_paging(|program| {
        for (begin, end, mark) in [
            (libc::MADV_WIPEONFORK, libc::MADV_KEEPONFORK, MemoryMark::Wiped),
            (libc::MADV_DONTDUMP, libc::MADV_DODUMP, MemoryMark::DontDump),
        ] {
            let (calls, room) = (Calls(program), Room::new(64));
            let (all, part) = (room.pages(0..64), room.pages(16..32));
            calls.map(&all);
            calls.fold(&all);
            assert_eq!(calls.advise(&part, begin), 0);
            assert_eq!(calls.managed(&all), [room.pages(0..16), room.pages(32..64)]);
            assert_eq!(marked(calls, mark, &all), [part.clone()]);
            assert_eq!(calls.advise(&part, end), 0);
            assert_eq!(calls.managed(&all), [all.clone()]);
            assert_eq!(calls.read(&all), numbers(0..64));
        }
    });
}

#[test]
fn memory_open_to_merging_stays_managed() {
    each_paging(|program| {
        let (calls, room) = (Calls(program), Room::remote(64));
        let (all, part) = (room.pages(0..32), room.pages(8..16));
        calls.map(&all);
        calls.fold(&all);
        // A kernel without KSM refuses the advice.
        let result = calls.advise(&part, libc::MADV_MERGEABLE);
        assert!([0, error(Errno::INVAL)].contains(&result), "{result}");
        assert_eq!(calls.managed(&all), [all.clone()]);
        assert!(marked(calls, MemoryMark::Mergeable, &all).is_empty());
        calls.unmap(&room.pages(32..64));
        let refusal = calls.advise(&room.pages(30..40), libc::MADV_MERGEABLE);
        assert_eq!(refusal, if result == 0 { error(Errno::NOMEM) } else { result });
        assert_eq!(calls.read(&all), numbers(0..32));
    });
}

#[test]
fn memory_that_is_not_for_children_stays_managed() {
    each_paging(|program| {
        let (calls, room) = (Calls(program), Room::new(64));
        let all = room.pages(0..64);
        calls.map(&all);
        assert_eq!(calls.advise(&all, libc::MADV_DONTFORK), 0);
        assert_eq!(calls.managed(&all), [all.clone()]);
        assert_eq!(marked(calls, MemoryMark::DontFork, &all), [all.clone()]);
        assert_eq!(calls.advise(&all, libc::MADV_DOFORK), 0);
        assert!(marked(calls, MemoryMark::DontFork, &all).is_empty());
    });
}

/// The kernel's own accesses must still find pages there.
#[test]
fn discarded_memory_that_a_call_holds_stays_and_is_overwritten() {
    each_paging(|program| {
        let (calls, room) = (Calls(program), Room::new(64));
        let (all, hold_range) = (room.pages(0..64), room.pages(8..10));
        calls.map(&all);
        let hold = program.pager().holds().hold(0, hold_range.clone()).expect("there is room");
        assert_eq!(calls.advise(&all, libc::MADV_DONTNEED), 0);
        let is_there = |page| program.memory().pagemap().is_populated(page);
        assert!(hold_range.clone().step_by(PAGE_SIZE).all(is_there));
        assert!(!is_there(room.pages(20..21).start));
        program.pager().holds().release(hold);
        assert_eq!(calls.read(&all), [0; 64]);
    });
}

#[test]
fn memory_that_a_call_holds_is_not_freed() {
    each_paging(|program| {
        let (calls, room) = (Calls(program), Room::new(64));
        let (all, hold_range) = (room.pages(0..64), room.pages(8..10));
        calls.map(&all);
        let hold = program.pager().holds().hold(0, hold_range).expect("there is room");
        assert_eq!(calls.advise(&all, libc::MADV_FREE), 0);
        program.pager().holds().release(hold);
        let now = calls.read(&all);
        assert_eq!(now[8..10], numbers(8..10));
        assert_eq!((&now[..8], &now[10..]), (&[0; 8][..], &[0; 54][..]));
    });
}

#[test]
fn guarded_memory_is_dropped_and_nothing_else() {
    each_paging(|program| {
        let (calls, room) = (Calls(program), Room::new(64));
        let (all, part) = (room.pages(0..64), room.pages(16..32));
        calls.map(&all);
        calls.fold(&all);
        if calls.advise(&part, GUARD_INSTALL) == error(Errno::INVAL) {
            // This kernel is older than Linux 6.13.
            return;
        }
        let outer_parts = [room.pages(0..16), room.pages(32..64)];
        if program.memory().paging().hides() {
            assert_eq!(calls.managed(&all), outer_parts, "a guard can't be hidden");
        }
        assert_eq!(calls.advise(&part, GUARD_REMOVE), 0);
        assert_eq!(calls.managed(&all), [all.clone()]);
        let now = calls.read(&all);
        assert_eq!((&now[..16], &now[32..]), (&numbers(0..16)[..], &numbers(32..64)[..]));
        assert_eq!(now[16..32], [0; 16]);
    });
}

#[test]
fn advice_that_concerns_nothing_passes() {
    each_paging(|program| {
        let (calls, room) = (Calls(program), Room::new(64));
        let all = room.pages(0..64);
        calls.map(&all);
        for advice in [libc::MADV_NORMAL, libc::MADV_RANDOM, libc::MADV_SEQUENTIAL, 12345] {
            let args = [all.start, all.len(), advice as usize, 0, 0, 0];
            let result =
                ChangeCalls::of(program).change(libc::SYS_madvise as usize, &args, &mut |args| {
                    assert_eq!(args[2], advice as usize);
                    77
                });
            assert_eq!(result, 77);
        }
        // MADV_REMOVE removes nothing from private memory.
        let args = [0x1000, PAGE_SIZE, libc::MADV_REMOVE as usize, 0, 0, 0];
        assert_eq!(
            ChangeCalls::of(program).change(libc::SYS_madvise as usize, &args, &mut |_| 78),
            78
        );
    });
}

#[test]
fn process_madvise_stops_at_the_first_range_that_fails() {
    each_paging(|program| {
        let (calls, room) = (Calls(program), Room::new(96));
        calls.map(&room.pages(0..96));
        assert_eq!(calls.unmap(&room.pages(32..64)), 0);
        calls.fold(&room.pages(0..96));
        let me = raw(libc::SYS_pidfd_open, [std::process::id() as usize, 0, 0, 0, 0, 0]);
        let ranges = [room.pages(0..16), room.pages(16..48), room.pages(64..96)];
        let words = ranges.each_ref().map(|range| [range.start, range.len()]);
        let advice = libc::MADV_DONTNEED as usize;
        let args = [me as usize, words.as_ptr() as usize, words.len(), advice, 0, 0];
        let result = calls.call(libc::SYS_process_madvise, args);
        raw(libc::SYS_close, [me as usize, 0, 0, 0, 0, 0]);
        if result == error(Errno::INVAL) || result == error(Errno::PERM) {
            // Before Linux 6.13 no process could give this advice.
            return assert_eq!(calls.read(&room.pages(0..32)), numbers(0..32));
        }
        assert_eq!(result, 16 * PAGE_SIZE as isize);
        assert_eq!(calls.read(&room.pages(0..32)), [0; 32]);
        assert_eq!(calls.read(&room.pages(64..96)), numbers(64..96));
    });
}

#[test]
fn advice_in_memory_that_the_program_serves_is_given_apart() {
    each_paging_alone(|program| {
        let (calls, room) = (Calls(program), Room::new(64));
        let all = room.pages(0..64);
        calls.map(&all);
        calls.with_state(|state| {
            state.has_userfault = true;
            state.marked(MemoryMark::Other).add(room.pages(60..64));
        });
        let args = [all.start, all.len(), libc::MADV_DONTNEED as usize, 0, 0, 0];
        let result =
            ChangeCalls::of(program).change(libc::SYS_madvise as usize, &args, &mut |args| {
                assert!(
                    program.memory().state().try_lock().is_some(),
                    "another thread may change mappings"
                );
                assert!(calls.managed(&all).is_empty());
                raw(libc::SYS_madvise, *args)
            });
        assert_eq!((result, calls.managed(&all)), (0, [room.pages(0..60)].to_vec()));
        assert_eq!(marked(calls, MemoryMark::Other, &all), [room.pages(60..64)]);
    });
}
