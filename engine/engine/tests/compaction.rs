//! The kernel compacts memory meanwhile: it locks and migrates pages that are being moved.
use memfold_engine::{Delivery, Memory};
use memfold_testkit::random::{Random, seed};
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

const PAGE: usize = 4096;
const PAGES: usize = (96 << 20) / PAGE;
/// Asks the kernel to compact all memory once (`Documentation/admin-guide/sysctl/vm.rst`).
const COMPACT: &str = "/proc/sys/vm/compact_memory";

/// UFFDIO_MOVE moves pages then that it doesn't count.
#[test]
#[ignore = "compacts the machine's memory for half a minute, as root"]
fn pages_that_the_kernel_migrates_meanwhile_are_kept() {
    fs::write(COMPACT, "1").expect("root can ask for compaction");
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Relaxed) {
                fs::write(COMPACT, "1").unwrap();
            }
        });
        let mut random = Random::new(seed(1));
        for round in 0..24 {
            let memory = Memory::builder()
                .resident_bytes(24 << 20)
                .delivery(Delivery::Signal)
                .build()
                .unwrap();
            let mut region = memory.region(PAGES * PAGE).unwrap();
            let source = fs::read(std::env::current_exe().unwrap()).unwrap();
            let mut words: Vec<u64> = (0..PAGES as u64).collect();
            for (n, page) in region.as_mut_slice().chunks_mut(PAGE).enumerate() {
                page.copy_from_slice(&source[n * PAGE % (source.len() - PAGE)..][..PAGE]);
                page[..8].copy_from_slice(&words[n].to_le_bytes());
            }
            for step in 0..60_000 {
                // Streams load in large frames, which are put together from small ones.
                let n = if step % 3 == 0 { random.below(PAGES) } else { step % PAGES };
                let word = &mut region.as_mut_slice()[n * PAGE..][..8];
                assert_eq!(*word, words[n].to_le_bytes(), "round {round}, page {n}");
                words[n] = random.word();
                word.copy_from_slice(&words[n].to_le_bytes());
            }
            memory.check().unwrap();
        }
        is_over.store(true, Relaxed);
    });
}
