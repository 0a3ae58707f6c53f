//! A program that touches memory sparsely takes what it would take without memfold: with real
//! faults, for strides and orders of touches, of readers and writers.
use memfold_engine::{Delivery, Memory, Region};
use memfold_os::units::PAGE_SIZE;
use memfold_testkit::random::{Random, seed};

const PAGES: usize = (64 << 20) / PAGE_SIZE;

/// Returns the pages that a region takes. The kernel's page of zeros is none.
fn taken(region: &Region) -> usize {
    let own = region.as_ptr() as usize..region.as_ptr() as usize + region.len();
    let (mut kib, mut is_own) = (0, false);
    for line in std::fs::read_to_string("/proc/self/smaps").unwrap().lines() {
        let mut words = line.split_whitespace();
        let (first, second) = (words.next().unwrap(), words.next());
        let number = |text| usize::from_str_radix(text, 16).ok();
        let ends = first.split_once('-').and_then(|(a, b)| Some((number(a)?, number(b)?)));
        if let Some((start, end)) = ends {
            is_own = own.start <= start && end <= own.end;
        } else if is_own && first == "Anonymous:" {
            kib += second.unwrap().parse::<usize>().unwrap();
        }
    }
    kib * 1024 / PAGE_SIZE
}

#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum Access {
    Read,
    Write,
    /// Read, and written to after that.
    ReadAndWrite,
}

/// Touches pages of a new region in this order. Asserts that it takes no more than these pages, or
/// 1 MiB or 2% more, and that it holds what was written.
fn touch(memory: &Memory, pages: &[usize], access: Access, what: &str) {
    let region = memory.region(PAGES * PAGE_SIZE).unwrap();
    let word = |page: usize| region.as_ptr().wrapping_add(page * PAGE_SIZE).cast::<u64>();
    for &page in pages {
        if access != Access::Write {
            // SAFETY: the word is inside the region and aligned, and no other thread uses it.
            assert!([0, 7].contains(&unsafe { word(page).read_volatile() }), "{what}");
        }
        if access != Access::Read {
            // SAFETY: the word is inside the region, which may be written to, and aligned. No other thread
            // uses it.
            unsafe { word(page).write_volatile(7) };
        }
    }
    let mut touches = vec![false; PAGES];
    pages.iter().for_each(|page| touches[*page] = access != Access::Read);
    let count = touches.iter().filter(|is_touched| **is_touched).count();
    let pages_taken = taken(&region);
    let most = (count + (1 << 20) / PAGE_SIZE).max(count + count / 50);
    assert!(
        pages_taken >= count && pages_taken <= most,
        "{what}: {pages_taken} pages, {count} without memfold"
    );
    memory.check().unwrap();
    for (page, is_touched) in touches.into_iter().enumerate().step_by(pages.len().div_ceil(500)) {
        // SAFETY: `touches` has PAGES entries, so the word is inside the region. It is aligned, and no
        // other thread uses it.
        assert_eq!(unsafe { word(page).read_volatile() }, is_touched as u64 * 7, "{what}, {page}");
    }
}

fn memory() -> Memory {
    Memory::builder().resident_bytes(1 << 30).delivery(Delivery::Signal).build().unwrap()
}

#[test]
fn sparse_touches_take_no_more_than_without_memfold() {
    let memory = memory();
    for stride in [1, 2, 3, 4, 5, 16, 64, 256, 512, 1024] {
        let forward: Vec<usize> = (0..PAGES).step_by(stride).collect();
        let backward: Vec<usize> = forward.iter().rev().copied().collect();
        let mut random = Random::new(seed(stride as u64));
        let mut order = forward.clone();
        (1..order.len()).for_each(|at| order.swap(at, random.below(at + 1)));
        let half = order[..order.len().div_ceil(2)].to_vec();
        let orders = [
            ("forward", forward),
            ("backward", backward),
            ("at random", order),
            ("half of it at random", half),
        ];
        for (order, pages) in orders {
            for access in [Access::Read, Access::Write, Access::ReadAndWrite] {
                touch(&memory, &pages, access, &format!("each {stride} pages {order}, {access:?}"));
            }
        }
    }
}

#[test]
fn parts_of_chunks_take_little_more_than_without_memfold() {
    let memory = memory();
    for (part, chunk) in [(2, 512), (5, 16), (15, 16), (100, 128), (500, 512), (511, 1024)] {
        let pages: Vec<usize> = (0..PAGES).filter(|page| page % chunk < part).collect();
        touch(&memory, &pages, Access::Write, &format!("{part} of {chunk} pages"));
    }
}

#[test]
fn zeros_that_were_read_may_be_written_to_by_the_kernel_once_pinned() {
    let memory = memory();
    let mut region = memory.region(1 << 20).unwrap();
    assert!(region.as_slice().iter().step_by(512).all(|byte| *byte == 0));
    assert_eq!(taken(&region), 0);
    let len = region.len();
    let pin = region.pin(0..len / 2);
    // SAFETY: the bytes are inside the region, and nothing else uses them.
    let bytes = unsafe { core::slice::from_raw_parts_mut(region.as_ptr(), len / 2) };
    std::io::Read::read_exact(&mut std::fs::File::open("/dev/urandom").unwrap(), bytes).unwrap();
    let copy = bytes.to_vec();
    drop(pin);
    memory.check().unwrap();
    assert!(region.pageout(0..len) >= (len / 2 / PAGE_SIZE) as u64);
    assert_eq!(&region.as_mut_slice()[..len / 2], copy);
    assert!(region.as_slice()[len / 2..].iter().all(|byte| *byte == 0));
}
