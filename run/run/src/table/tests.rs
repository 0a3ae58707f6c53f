//! Tests of the table. Threads stand for processes.
use super::*;
use crate::door::{DoorKey, HALF};
use std::boxed::Box;
use std::collections::HashSet;
use std::sync::Barrier;

const KEY: DoorKey = DoorKey { ask: [1; HALF], answer: [2; HALF] };

fn table(slots: usize) -> &'static RunTable {
    let (bounds, _) = RunBounds::create(u64::MAX, &KEY).unwrap();
    Box::leak(Box::new(RunTable::create(slots, u64::MAX, bounds, 0).unwrap().0))
}

fn set_bounds(table: &RunTable, limit: u64, resident: u64) {
    let bounds = table.portion().bounds();
    bounds.set_given(limit, resident);
    bounds.deal(&[[table.asked(true), table.asked(false)]]);
}

fn claim(table: &RunTable, pid: u32) -> Option<ProcessSlot> {
    // SAFETY: threads of these tests use no robust mutex, so their robust lists are not needed.
    unsafe { table.claim(pid) }
}

/// Claims a slot in a thread that ends, and waits until the slot is seen to be free.
fn claim_and_end(table: &'static RunTable, pid: u32) -> ProcessSlot {
    let process = std::thread::spawn(move || claim(table, pid).unwrap()).join().unwrap();
    while process.is_alive() {
        std::thread::yield_now();
    }
    process
}

/// Claims a slot in a thread that never ends.
fn claim_in_other_thread(table: &'static RunTable, pid: u32) -> ProcessSlot {
    let (to, from) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        to.send(claim(table, pid).unwrap()).unwrap();
        loop {
            std::thread::park();
        }
    });
    from.recv().unwrap()
}

#[test]
fn table_is_opened_with_its_key_only() {
    let (bounds, shown_file) = RunBounds::create(u64::MAX, &KEY).unwrap();
    let (table, file) = RunTable::create(1000, u64::MAX, bounds, 3).unwrap();
    set_bounds(&table, 5, 6);
    let other = RunTable::open(&file, RunBounds::open(&shown_file, &KEY).unwrap()).unwrap();
    assert_eq!((other.portion().bounds().given(), other.note_process()), ((5, 6), true));
    claim(&table, 77).unwrap().stats().faults.store(3, Relaxed);
    let figures: Vec<_> =
        other.processes().map(|p| (p.pid(), p.stats().faults.load(Relaxed))).collect();
    assert_eq!((figures, table.note_process()), (std::vec![(77, 3)], false));
    assert!(table.has_begun() && !table.has_gate());
    table.note_gate();
    assert!(!other.note_process() && other.has_gate());
    assert_eq!(other.has_filters(), None);
    table.note_filter(false);
    assert_eq!(other.has_filters(), Some(false));
    table.note_filter(true);
    table.note_filter(false);
    assert_eq!(other.has_filters(), Some(true), "programs inherit a filter");
    let stranger = RunBounds::create(u64::MAX, &DoorKey { answer: [3; HALF], ..KEY }).unwrap().0;
    assert!(RunTable::open(&file, stranger).is_err());
    let other = rustix::fs::open(c"/dev/null", rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty())
        .unwrap();
    assert!(RunTable::open(other, bounds).is_err());
    assert!(rustix::fs::ftruncate(&file, 0).is_err());
}

#[test]
fn charges_of_living_processes_stay_within_the_bound() {
    const MIB: u64 = 1 << 20;
    let table = table(64);
    set_bounds(table, 4 * MIB, 2 * MIB);
    let first = claim(table, 1).unwrap();
    let second = claim_and_end(table, 2);
    assert!(first.charge(MIB, true) && second.charge(3 * MIB - 4096, true));
    assert!(second.charge(3 * MIB, true), "it was charged with a whole step");
    assert!(!first.charge(MIB + 1, true) && !first.charge(MIB + 1, false));
    second.settle(2 * MIB);
    assert!(first.charge(2 * MIB, true) && !first.charge(2 * MIB + 1, true));
    table.claims_of_others(Some(first), true);
    assert!(first.charge(4 * MIB, true), "the other has ended");
    first.settle(MIB);
    assert_eq!(table.head.charges.charged_bytes.load(Relaxed), MIB);
}

#[test]
fn program_that_could_not_be_executed_is_not_unmanaged() {
    let table = table(64);
    assert_eq!(table.unmanaged(), (0, std::vec![]));
    let first = table.note_unmanaged(b"/no: static");
    table.forget_unmanaged(first);
    assert_eq!(table.unmanaged(), (0, std::vec![]));
    assert!(table.note_unmanaged(b"/a: static"));
    let second = table.note_unmanaged(b"/b: static");
    assert!(!second && table.unmanaged() == (2, b"/a: static".to_vec()));
    table.forget_unmanaged(second);
    assert_eq!(table.unmanaged(), (1, b"/a: static".to_vec()));
}

/// There are more processes at once than slots in the first mapping.
#[test]
fn each_process_has_its_slot_and_sees_what_others_need() {
    const COUNT: usize = 300;
    let (table, barrier) = (table(32768), Barrier::new(COUNT));
    let slots: Vec<_> = std::thread::scope(|scope| {
        let begin = |pid| {
            let barrier = &barrier;
            scope.spawn(move || {
                let own = claim(table, pid as u32).unwrap();
                own.set_need(1 + pid as u64);
                barrier.wait();
                let others = table.claims_of_others(Some(own), true);
                let others = others.iter().map(|claim| claim.need).sum::<u64>();
                barrier.wait();
                assert_eq!(others, (COUNT * (COUNT + 1) / 2 - pid - 1) as u64);
                own.number
            })
        };
        let threads: Vec<_> = (0..COUNT).map(begin).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(slots.iter().collect::<HashSet<_>>().len(), COUNT);
    assert_eq!(table.processes().map(|p| p.pid()).collect::<HashSet<_>>().len(), COUNT);
    while table.processes().any(|p| p.is_alive()) {
        std::thread::yield_now();
    }
    assert!(table.claims_of_others(None, true).is_empty());
}

#[test]
fn process_that_executes_a_program_keeps_its_slot() {
    let table = table(100);
    let first = claim_and_end(table, 5);
    first.stats().faults.store(9, Relaxed);
    first.stats().pool_bytes.store(8, Relaxed);
    claim_and_end(table, 6);
    let again = claim_and_end(table, 5);
    assert_eq!(first.number, again.number);
    assert_eq!(
        (again.stats().faults.load(Relaxed), again.stats().pool_bytes.load(Relaxed)),
        (9, 0)
    );
    assert_eq!(table.processes().count(), 2);
}

/// The sum of two processes that live one after the other is no peak; that of two at once is.
#[test]
fn peaks_are_of_processes_that_lived_at_once() {
    let table = table(100);
    let hold = |pid, bytes| {
        let stats = claim(table, pid).unwrap().stats();
        stats.resident_bytes.store(bytes, Relaxed);
        stats.folded_bytes.store(2 * bytes, Relaxed);
    };
    let live = |pid| {
        std::thread::spawn(move || (hold(pid, 100), table.note_totals())).join().unwrap();
        while table.processes().any(|p| p.is_alive()) {
            std::thread::yield_now();
        }
    };
    (1..4).for_each(live);
    assert_eq!(table.totals().peaks(), [100, 100, 0, 0, 200]);
    for pid in 4..6 {
        hold(pid, 70);
    }
    table.portion().bounds().set_slotless(3, 5);
    while table.totals().peaks()[0] == 100 {
        table.note_totals();
    }
    assert_eq!(table.totals().peaks(), [145, 145, 0, 0, 280]);
    for ((limit, resident), rest) in
        [((50, u64::MAX), (45, u64::MAX)), ((u64::MAX, 7), (u64::MAX, 2)), ((3, 5), (1, 1))]
    {
        set_bounds(table, limit, resident);
        assert_eq!(table.bounds_left(), rest);
    }
}

#[test]
fn short_processes_take_slots_in_turn_and_leave_counters() {
    let table = table(32768);
    for pid in 0..1000 {
        memfold_stats::add(&claim_and_end(table, pid).stats().faults, 1);
    }
    let faults = table.processes().map(|p| p.stats().faults.load(Relaxed)).sum::<u64>();
    assert_eq!((table.processes().count(), faults), (APART, 1000));
}

#[test]
fn table_that_is_given_up_stays_readable_here() {
    let (bounds, _) = RunBounds::create(u64::MAX, &KEY).unwrap();
    let (theirs, file) = RunTable::create(1000, u64::MAX, bounds, 0).unwrap();
    let ours = RunTable::open(&file, bounds).unwrap();
    (0..100).for_each(|pid| {
        drop(std::thread::scope(|s| s.spawn(|| claim(&theirs, pid).is_some()).join()))
    });
    let slots: Vec<ProcessSlot> = ours.processes().collect();
    ours.give_up().unwrap();
    slots.iter().for_each(|process| process.stats().faults.store(7, Relaxed));
    ours.note_unmanaged(b"/x: static");
    assert_eq!((ours.processes().count(), theirs.processes().count() >= APART), (0, true));
    assert_eq!(theirs.unmanaged().0, 0);
    assert!(theirs.processes().all(|process| process.stats().faults.load(Relaxed) == 0));
}

#[test]
fn full_table_has_no_slot() {
    let table = table(64);
    let slots: Vec<_> = (0..64).map(|pid| claim(table, pid)).collect();
    assert!(slots.iter().all(Option::is_some) && claim(table, 64).is_none());
    assert_eq!(table.processes().count(), 64);
    let bounds = *table.portion();
    assert!(RunTable::create(1, 4096, bounds.bounds(), 0).is_err());
}

#[test]
fn lent_memory_is_held_until_the_borrower_gives_it_back() {
    let table = table(64);
    let (lender, borrower) = (claim(table, 1).unwrap(), claim_in_other_thread(table, 2));
    assert!(!lender.take_asks() && lender.asked(0).is_none());
    let lease = lender.ask(&borrower, &[[0x1000, 7], [0x5000, 9]], true).unwrap();
    assert!(lender.take_asks() && !lender.take_asks() && lease.wait(1).is_none());
    let request = lender.asked(0).unwrap();
    assert_eq!(
        (&request.parts[..request.count], request.writes),
        (&[[0x1000, 7], [0x5000, 9]][..], true)
    );
    assert!(lender.lend(0, request.lease, 12) && lender.is_lent(0, request.lease));
    assert_eq!((lease.wait(u64::MAX), lender.asked(0)), (Some(12), None));
    drop(lease);
    assert!(!lender.is_lent(0, request.lease));
}

#[test]
fn answer_to_a_borrower_that_gave_up_reaches_no_other() {
    let table = table(64);
    let (lender, borrower) = (claim(table, 1).unwrap(), claim_in_other_thread(table, 2));
    let lease = lender.ask(&borrower, &[[0x1000, 7]], false).unwrap();
    let request = lender.asked(0).unwrap();
    drop(lease);
    assert!(!lender.lend(0, request.lease, 7), "nothing waits for it");
    let lease = lender.ask(&borrower, &[[0x9000, 3]], false).unwrap();
    assert!(!lender.lend(0, request.lease, 7) && lease.wait(1).is_none());
    let request = lender.asked(0).unwrap();
    assert!(lender.lend(0, request.lease, 3) && lease.wait(1) == Some(3));
}

#[test]
fn requests_of_ended_borrowers_are_free_again() {
    let table = table(64);
    let lender = claim(table, 1).unwrap();
    let process = claim_and_end(table, 2);
    let ended_id = process.id();
    for _ in 0..lending::REQUESTS {
        core::mem::forget(lender.ask(&process, &[[0x1000, 7]], false).unwrap());
    }
    let request = lender.asked(3).unwrap();
    assert!(lender.lend(3, request.lease, 7));
    let borrower = claim_in_other_thread(table, 2);
    assert!(lender.ask(&borrower, &[[0x1000, 7]], false).is_none());
    assert!(borrower.id() != ended_id, "the slot was reused");
    assert!(lender.is_lent(3, request.lease));
    table.free_requests(&lender);
    assert!(!lender.is_lent(3, request.lease));
    let lease = lender.ask(&borrower, &[[0x1000, 7]], false).unwrap();
    table.free_requests(&lender);
    assert!(lender.asked(0).is_some() && lease.has_lender());
}

#[test]
fn process_is_found_by_the_sign_in_its_memory() {
    let table = table(64);
    let lender = claim(table, 1).unwrap();
    static SIGN: lending::ProcessSign = lending::ProcessSign::none();
    let find = |pid: u32| {
        table.find(pid, &|at, to| {
            let is_here = at == &raw const SIGN as usize;
            to.iter_mut().zip(&SIGN.0).for_each(|(to, word)| *to = word.load(Relaxed));
            is_here
        })
    };
    assert!(find(1).is_none());
    lender.put_sign(&SIGN, table.key());
    // The number is only a hint.
    assert!([1, 77].into_iter().all(|pid| find(pid).is_some_and(|process| process.is(&lender))));
    SIGN.clear();
    assert!(find(1).is_none());
}
