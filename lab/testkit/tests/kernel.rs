//! Compares the fake address space with the kernel: the same calls on both give the same results
//! and pages.
use memfold_os::maps::pagemap::Pagemap;
use memfold_os::memory::zone::{Zone, set_inherited};
use memfold_os::uffd::space::{Space, UffdSpace};
use memfold_os::uffd::{Uffd, feature};
use memfold_os::units::PAGE_SIZE;
use memfold_testkit::fake::FakeSpace;
use memfold_testkit::random::{Random, seed};
use std::sync::Arc;

const PAGES: usize = 64;
const STEPS: usize = 5000;

/// An area and frames, in a fake space or a real one.
struct Side {
    space: Box<dyn Space>,
    area: usize,
    frames: Zone,
    _area: Option<Zone>,
}

impl Side {
    fn fake() -> (Side, FakeSpace) {
        let fake = FakeSpace::new(PAGES);
        fake.set_border(PAGES / 2);
        let frames = Zone::reserve(PAGES * PAGE_SIZE, PAGE_SIZE).unwrap();
        (Side { area: fake.area().start, space: Box::new(fake.clone()), frames, _area: None }, fake)
    }

    fn real() -> Side {
        let uffd = Arc::new(
            Uffd::open(feature::MOVE | feature::SIGBUS, true).expect("userfaultfd with MOVE"),
        );
        let pagemap = Arc::new(Pagemap::open().expect("/proc"));
        let zone = |len| Zone::reserve(len, PAGE_SIZE).unwrap();
        let (area, frames) = (zone(PAGES * PAGE_SIZE), zone(PAGES * PAGE_SIZE));
        for zone in [&area, &frames] {
            // SAFETY: the test touches only present pages.
            unsafe { uffd.register(zone.start(), zone.len(), false) }.unwrap();
        }
        // Two halves that differ in their treatment by fork are two areas to the kernel.
        set_inherited(area.start(), area.start() + PAGES / 2 * PAGE_SIZE, false);
        Side {
            space: Box::new(UffdSpace::new(uffd, Some(pagemap))),
            area: area.start(),
            frames,
            _area: Some(area),
        }
    }

    /// Returns the address of page `n`: first the area's, then the frames'.
    fn page(&self, n: usize) -> usize {
        if n < PAGES {
            self.area + n * PAGE_SIZE
        } else {
            self.frames.start() + (n - PAGES) * PAGE_SIZE
        }
    }
}

#[test]
fn the_fake_answers_as_the_kernel_does() {
    let mut random = Random::new(seed(5));
    let ((fake, space), real) = (Side::fake(), Side::real());
    let mut source = vec![0u8; PAGES * PAGE_SIZE];
    let (mut steps_done, mut refusals) = (0, 0);
    for step in 0..STEPS {
        let pages = 1 + random.below(8);
        let [dst, src] = [0; 2].map(|_| random.below(2) * PAGES + random.below(PAGES - pages));
        let len = pages * PAGE_SIZE;
        let call = random.below(5);
        if call < 2 && dst < src + pages && src < dst + pages {
            continue;
        }
        source
            .chunks_mut(PAGE_SIZE)
            .enumerate()
            .for_each(|(n, page)| page.fill((step * 7 + n) as u8 | 1));
        let [a, b] = [&fake, &real].map(|side| {
            let (to, from) = (side.page(dst), side.page(src));
            // SAFETY: both ranges are the test's own; `source` has room for 8 pages.
            unsafe {
                match call {
                    0 | 1 => side.space.move_pages(to, from, len, true),
                    2 | 3 => side.space.copy(to, source.as_ptr(), len, true),
                    _ => {
                        side.space.discard(to, len).expect("a discard");
                        Ok(())
                    }
                }
            }
        });
        assert_eq!(a, b, "step {step}: call {call} of {pages} pages, {src} to {dst}");
        *if a.is_ok() { &mut steps_done } else { &mut refusals } += 1;
        for n in (0..2 * PAGES).filter(|n| space.is_present(fake.page(*n))) {
            // SAFETY: the page is present in the fake, and so in the kernel, because every call so
            // far agreed.
            let [x, y] = [&fake, &real]
                .map(|s| unsafe { std::slice::from_raw_parts(s.page(n) as *const u8, PAGE_SIZE) });
            assert!(x == y, "step {step}: page {n}");
        }
    }
    assert!(steps_done > 500 && refusals > 500, "{steps_done} calls done, {refusals} refused");
}
