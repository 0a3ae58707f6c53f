//! Tests of what a child of fork reads in the remote store. Row B3.
use super::objects::{bounds, read_raw, write_raw};
use memfold_os::thread::delegate_queue::DelegateQueue;
use memfold_os::units::PAGE_SIZE;
use memfold_swap::{ANCESTORS_MAX, ObjectLocation, Swap, SwapBounds};
use memfold_testkit::disk::MemoryDisk;
use memfold_testkit::remote::{Ask, MemoryRemote, RemoteTrouble};
use memfold_testkit::sharer::Sharer;
use std::sync::Arc;
use std::time::Duration;

/// A file of 4 MiB whose cold end moves when it is half full.
fn tiers() -> (Swap, MemoryDisk, MemoryRemote) {
    let (disk, remote) = (MemoryDisk::default(), MemoryRemote::default());
    let of = SwapBounds {
        size_bytes: 4 << 20,
        remote_bytes: 64 << 20,
        mark_percent: 50,
        remote_expiry: Duration::from_secs(86400),
        ..bounds()
    };
    let swap = Swap::new(Box::new(disk.clone()), Some(Box::new(remote.clone())), true, of).unwrap();
    (swap.with_delegate_queue(Some(Arc::new(DelegateQueue::new(|| true)))), disk, remote)
}

/// Objects of 16 KiB, which move on as they fill the file.
fn fill(swap: &Swap, fills: impl Iterator<Item = u8>) -> Vec<(ObjectLocation, u8)> {
    let write = |fill| {
        let place = write_raw(swap, fill);
        while swap.demote(false) {}
        (place, fill)
    };
    fills.map(write).collect()
}

#[track_caller]
fn assert_holds(swap: &Swap, all: &[(ObjectLocation, u8)]) {
    for (place, fill) in all {
        assert_eq!(read_raw(swap, *place), Ok(vec![*fill; 4 * PAGE_SIZE]));
    }
    swap.check().unwrap();
}

/// The same object stands for parent and child, one after the other.
#[test]
fn a_child_reads_what_each_ancestor_has_moved_and_moves_its_own() {
    let (swap, _disk, remote) = tiers();
    let mut all = Vec::new();
    for generation in 0..=ANCESTORS_MAX as u8 {
        let before = swap.remote_bytes();
        assert_eq!(before, 0, "of what is inherited nothing counts");
        all.extend(fill(&swap, generation..generation + 250));
        assert!(swap.remote_bytes() > 1 << 20 && swap.used_bytes() <= 4 << 20);
        assert_holds(&swap, &all);
        if generation == ANCESTORS_MAX as u8 {
            break;
        }
        assert!(swap.begin_copy(|| true));
        // SAFETY: nobody else uses it, as in a child.
        unsafe {
            swap.allow_requests();
            remote.begin_in_child();
            swap.begin_in_child().unwrap();
            // A child that can have no engine reads everything at this point.
            swap.allow_reads();
        }
        assert_holds(&swap, &all);
        swap.forbid_reads();
        // SAFETY: begun above.
        unsafe { swap.end_copy(true) };
        assert_holds(&swap, &all);
    }
    assert!(!swap.begin_copy(|| true), "files are stacked deep enough");
    all.iter().for_each(|(place, _)| swap.free(place.handle()));
    while swap.demote(false) {}
    assert_eq!((swap.objects(), swap.used_bytes(), swap.remote_bytes()), (0, 0, 0));
    swap.check().unwrap();
}

/// A child of fork that reads what is in `swap`.
fn child_of(swap: &Swap) -> Sharer {
    assert!(swap.begin_copy(|| true));
    let child = Sharer::fork();
    // SAFETY: begun above.
    unsafe {
        swap.allow_requests();
        swap.end_copy(false);
    }
    child
}

#[test]
fn service_keeps_few_watches_for_many_children() {
    let (swap, _disk, remote) = tiers();
    let all = fill(&swap, 0..200);
    let before = remote.asked();
    let _children: Vec<_> = (0..24).map(|_| child_of(&swap)).collect();
    assert_eq!(remote.asked() - before, 16);
    assert_holds(&swap, &all);
}

#[test]
fn slots_that_a_child_reads_stay_until_the_child_has_ended() {
    let (swap, disk, remote) = tiers();
    let all = fill(&swap, 0..200);
    let child = child_of(&swap);
    let (file, bytes_remote) = (disk.bytes(), remote.bytes());
    // All of it is free in the parent, which goes on.
    all.iter().for_each(|(place, _)| swap.free(place.handle()));
    let later = fill(&swap, 0..60);
    let now = disk.bytes();
    let pages = file.chunks(PAGE_SIZE).zip(now.chunks(PAGE_SIZE));
    let was_there: Vec<_> = pages.filter(|(page, _)| page.iter().any(|b| *b != 0)).collect();
    assert!(was_there.len() > 256 && was_there.iter().all(|(page, now)| page == now));
    assert!(
        bytes_remote > 1 << 20 && remote.bytes() >= bytes_remote,
        "what the child reads is there"
    );
    assert_holds(&swap, &later);
    drop(child);
    while swap.used_bytes() + swap.remote_bytes() > 60 * 4 * PAGE_SIZE as u64 {
        swap.demote(false);
        std::thread::yield_now();
    }
    assert!(remote.bytes() < 60 * 4 * PAGE_SIZE, "{} bytes are left", remote.bytes());
    assert_holds(&swap, &later);
}

#[test]
fn where_a_child_couldnt_read_nothing_is_lent() {
    let (swap, _disk, remote) = tiers();
    let all = fill(&swap, 0..10);
    assert!(swap.begin_copy(|| panic!("nothing is there")));
    // SAFETY: begun above.
    unsafe {
        swap.allow_requests();
        swap.end_copy(false);
    }
    let more = fill(&swap, 10..250);
    assert!(!swap.begin_copy(|| false), "the child couldn't reach it");
    remote.strike(Ask::Lend, 1, RemoteTrouble::Away);
    assert!(!swap.begin_copy(|| true), "the service wouldn't keep it");
    assert_holds(&swap, &all);
    assert_holds(&swap, &more);
}
