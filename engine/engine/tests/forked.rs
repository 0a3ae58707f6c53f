//! What a child of fork inherits of folded memory: handles that do nothing, and a parent that keeps
//! every byte. Row B2.
//!
//! Every child has SIGALRM as its end if it waits for what isn't there. Its calls take no lock of
//! another thread's.

use memfold_engine::{Delivery, Error, Heap, Memory, Region};
use std::mem::ManuallyDrop;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

const PAGES: usize = 2048;
const LEN: usize = PAGES * 4096;
/// Children share the pages of what other tests do meanwhile.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> std::sync::MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn build(delivery: Delivery) -> Memory {
    Memory::builder().resident_bytes(16 << 20).delivery(delivery).build().unwrap()
}

fn fill(region: &mut Region) {
    region.as_mut_slice().chunks_mut(4096).enumerate().for_each(|(n, page)| page.fill(n as u8 | 1));
}

#[track_caller]
fn assert_kept(memory: &Memory, region: &Region) {
    for (n, page) in region.as_slice().chunks(4096).enumerate() {
        assert!(
            page.iter().all(|byte| *byte == n as u8 | 1),
            "page {n} begins with {:?}",
            &page[..8]
        );
    }
    memory.check().unwrap();
}

/// Does `work` in a child of fork. Returns how that ends: 0 if `work` says that all is well.
fn in_child(work: impl FnOnce() -> bool) -> i32 {
    // SAFETY: what the child does besides `work` is system calls. (The tests' `work` allocates with
    // glibc's malloc at most, which is fit for use in children.)
    match unsafe { libc::fork() } {
        // SAFETY: `alarm` and `_exit` take numbers only and may be called in a child of fork. A
        // panic of `work` is caught, so the child never returns into the parent's frames.
        0 => unsafe {
            libc::alarm(60);
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            libc::_exit(!matches!(outcome, Ok(true)) as i32)
        },
        child => {
            assert!(child > 0);
            let mut status = 0;
            // SAFETY: the child of above, which nobody else waits for.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            status
        }
    }
}

/// A region of the parent's, mapped and folded by half.
fn half_folded(delivery: Delivery) -> (Memory, Region) {
    let memory = build(delivery);
    let mut region = memory.region(LEN).unwrap();
    fill(&mut region);
    region.pageout(0..LEN / 2);
    (memory, region)
}

/// The parent's region, in both deliveries, mapped and folded by half, then `work` in a child.
#[track_caller]
fn check(what: &str, work: impl Fn(&Memory, &Region) -> bool) {
    let _alone = alone();
    for delivery in [Delivery::Signal, Delivery::Thread] {
        let (memory, region) = half_folded(delivery);
        assert!(memory.stats().folded_bytes.load(Relaxed) >= LEN as u64 / 4);
        assert_eq!(in_child(|| work(&memory, &region)), 0, "{what} in a child, {delivery:?}");
        assert_kept(&memory, &region);
    }
}

#[test]
fn a_child_gets_no_region_from_its_parents_memory() {
    check("Memory::region", |memory, _| {
        memory
            .region(LEN)
            .err()
            .is_some_and(|e| e == Error::Inherited && e.to_string().contains("must build its own"))
    });
}

/// Another thread has the heap's lock at most of the forks.
#[test]
fn figures_of_a_heap_take_no_lock_in_a_child() {
    let _alone = alone();
    let memory = build(Delivery::Signal);
    let (heap, stop) = (Heap::new(&memory), AtomicBool::new(false));
    let piece = heap.alloc(1 << 20).unwrap().as_ptr() as usize;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Relaxed) {
                assert!(heap.allocated_bytes() > 0 && heap.piece(piece).is_some());
            }
        });
        for _ in 0..200 {
            let status = in_child(|| heap.piece(piece).is_none() && heap.allocated_bytes() == 0);
            stop.store(status != 0, Relaxed);
            assert_eq!(status, 0);
        }
        stop.store(true, Relaxed);
    });
}

#[test]
fn page_out_cold_and_willneed_do_nothing_in_a_child() {
    check("pageout", |_, region| region.pageout(0..LEN) == 0);
    check("cold", |_, region| {
        region.cold(0..LEN);
        true
    });
    check("willneed", |_, region| {
        region.willneed(0..LEN);
        true
    });
}

#[test]
fn discard_does_nothing_in_a_child() {
    check("discard", |_, region| {
        // SAFETY: nobody has a reference into the region.
        unsafe { region.discard(0..LEN) };
        true
    });
}

#[test]
fn pins_do_nothing_in_a_child() {
    check("pin", |_, region| {
        drop(region.pin(0..LEN));
        true
    });
    let _alone = alone();
    let memory = build(Delivery::Signal);
    let mut region = memory.region(LEN).unwrap();
    fill(&mut region);
    let mut pin = ManuallyDrop::new(region.pin(0..4096));
    let exit_code = in_child(|| {
        // SAFETY: dropped once in each process.
        unsafe { ManuallyDrop::drop(&mut pin) };
        true
    });
    assert_eq!(exit_code, 0);
    region.pageout(0..LEN);
    // It is pinned as before: the rest is folded and this page isn't.
    assert!(memory.stats().folded_bytes.load(Relaxed) >= LEN as u64 / 2);
    let mut state = 0u8;
    // SAFETY: there is room for the state of one page.
    assert_eq!(unsafe { libc::mincore(region.as_ptr().cast(), 4096, &mut state) }, 0);
    assert_eq!(state & 1, 1, "the child has ended its parent's pin");
    // SAFETY: this process has not dropped `pin` yet, and nothing uses it afterwards. The child
    // dropped a copy.
    unsafe { ManuallyDrop::drop(&mut pin) };
    assert_kept(&memory, &region);
}

#[test]
fn figures_and_checks_do_nothing_in_a_child() {
    check("stats and check", |memory, _| {
        memory.stats().faults.load(Relaxed) > 0
            && memory.check().is_err_and(|why| why.contains("must build its own"))
    });
}

#[test]
fn memory_that_a_child_drops_stays_its_parents() {
    let _alone = alone();
    for delivery in [Delivery::Signal, Delivery::Thread] {
        let memory = ManuallyDrop::new(build(delivery));
        let mut region = ManuallyDrop::new(memory.region(LEN).unwrap());
        fill(&mut region);
        region.pageout(0..LEN / 2);
        let at = region.as_ptr();
        let status = in_child(|| {
            // Something of the child's own where the region is in its parent.
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
            // SAFETY: a new mapping at a free place, which is then read and written as bytes.
            unsafe {
                let own =
                    libc::mmap(at.cast(), LEN, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
                if own != at.cast() {
                    return false;
                }
                at.write_bytes(77, LEN);
            }
            // SAFETY: dropped once in each process.
            drop(unsafe { std::ptr::read(&*region) });
            // SAFETY: the memory is dropped once in each process, too.
            drop(unsafe { std::ptr::read(&*memory) });
            // SAFETY: mapped above.
            (0..LEN).all(|byte| unsafe { *at.add(byte) } == 77)
        });
        assert_eq!(status, 0, "{delivery:?}");
        assert_kept(&memory, &region);
        drop(ManuallyDrop::into_inner(region));
        drop(ManuallyDrop::into_inner(memory));
    }
}

#[test]
fn touch_of_the_parents_region_ends_the_child_unchanged() {
    let _alone = alone();
    for delivery in [Delivery::Signal, Delivery::Thread] {
        let (memory, region) = half_folded(delivery);
        for page in [0, PAGES - 1] {
            let touch = || region.as_slice()[page * 4096] == 1;
            assert_eq!(in_child(touch) & 0x7f, libc::SIGSEGV, "{delivery:?}");
        }
        assert_kept(&memory, &region);
    }
}

/// A file that is cut off is the kernel's own reason for a SIGBUS. Its address may be one that is
/// folded in the parent.
#[test]
fn a_childs_own_bus_error_is_not_served_by_its_parents_engine() {
    let _alone = alone();
    let memory = build(Delivery::Signal);
    let mut region = memory.region(LEN).unwrap();
    fill(&mut region);
    region.pageout(0..LEN);
    let at = region.as_ptr();
    let status = in_child(|| {
        // SAFETY: a file of the child's own, mapped past its end at a free place, and read there.
        unsafe {
            let file = libc::memfd_create(c"empty".as_ptr(), 0);
            let flags = libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE;
            let own = libc::mmap(at.cast(), LEN, libc::PROT_READ, flags, file, 0);
            own == at.cast() && at.read_volatile() == 0
        }
    });
    assert_eq!(status & 0x7f, libc::SIGBUS);
    assert_kept(&memory, &region);
}

#[test]
fn a_child_builds_folded_memory_of_its_own() {
    let _alone = alone();
    for (parents, childs) in
        [(Delivery::Signal, Delivery::Signal), (Delivery::Thread, Delivery::Signal)]
    {
        let memory = build(parents);
        let mut region = memory.region(LEN).unwrap();
        fill(&mut region);
        let status = in_child(|| {
            let memory = build(childs);
            let mut region = memory.region(4 * LEN).unwrap();
            fill(&mut region);
            assert_kept(&memory, &region);
            true
        });
        assert_eq!(status, 0, "{parents:?}, {childs:?}");
        assert_kept(&memory, &region);
    }
}

/// Without /proc nobody tells which pages are there: they are copied, and not moved.
#[test]
fn without_proc_every_byte_is_kept_too() {
    let _alone = alone();
    // SAFETY: asks only.
    if unsafe { libc::geteuid() } != 0 {
        assert!(std::env::var("CI").as_deref() != Ok("true"), "CI runs as root");
        return eprintln!("SKIPPED, NOTHING WAS TESTED: hiding /proc needs root");
    }
    let status = in_child(|| {
        let (none, tmpfs) = (c"none".as_ptr(), c"tmpfs".as_ptr());
        // SAFETY: paths that end with a NUL. The namespace is the child's own.
        let is_hidden = unsafe {
            libc::unshare(libc::CLONE_NEWNS) == 0
                && libc::mount(
                    none,
                    c"/".as_ptr(),
                    none,
                    libc::MS_REC | libc::MS_PRIVATE,
                    std::ptr::null(),
                ) == 0
                && libc::mount(tmpfs, c"/proc".as_ptr(), tmpfs, 0, std::ptr::null()) == 0
        };
        assert!(is_hidden && !std::fs::exists("/proc/self/pagemap").unwrap());
        for delivery in [Delivery::Signal, Delivery::Thread] {
            let memory = build(delivery);
            let mut region = memory.region(4 * LEN).unwrap();
            fill(&mut region);
            assert_kept(&memory, &region);
            assert!(memory.stats().copies.load(Relaxed) > 0);
        }
        true
    });
    assert_eq!(status, 0);
}
