//! Faults that need the device are passed on: what is in the pool is served meanwhile. Rows C2, C6.
use memfold_engine::fault::{FaultOutcome, PageFault};
use memfold_stats::Stats;
use memfold_testkit::disk::MemoryDisk;
use memfold_testkit::fill::partly_random;
use memfold_testkit::program::{Setup, small_config};
use memfold_testkit::random::{Random, seed};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Longer than anything takes that does not wait for the device.
const LONG: Duration = Duration::from_secs(600);

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Relaxed)
}

fn stats(setup: &Setup) -> &Stats {
    setup.pager.stats()
}

/// Of every 64 pages the first 16 are random bytes, which go to the file; the others stay in the
/// pool.
fn content(number: usize, version: u64) -> Vec<u8> {
    partly_random((number as u64) << 32 | version, if number % 64 < 16 { 0 } else { 3 })
}

fn write(setup: &Setup, number: usize, version: u64) {
    setup.program.write(number, |page| page.copy_from_slice(&content(number, version)));
}

fn assert_holds(setup: &Setup, number: usize, version: u64) {
    setup.program.read(number, |page| assert!(*page == *content(number, version), "page {number}"));
}

/// Pages `0..count`, folded, and a thread that reads.
fn folded(disk: &MemoryDisk, count: usize) -> (Arc<Setup>, JoinHandle<()>) {
    let setup = Arc::new(Setup::with_disk(small_config(), count, Some(disk)));
    (0..count).for_each(|n| write(&setup, n, 1));
    setup.pager.mappings().page_out_at(setup.addrs(0..count));
    assert_eq!(setup.space.present_pages(), 0, "all is away");
    (setup.clone(), reader(&setup))
}

fn reader(setup: &Setup) -> JoinHandle<()> {
    setup.pager.faults().expect_readers();
    let pager = setup.pager.clone();
    std::thread::spawn(move || while pager.faults().serve_passed() {})
}

/// One handler, which serves these pages in order; tells of each when it is done with it.
fn handler(setup: &Arc<Setup>, pages: Vec<usize>) -> Receiver<(usize, FaultOutcome)> {
    let (tell, answers) = channel();
    let setup = setup.clone();
    std::thread::spawn(move || {
        for page in pages {
            let fault = PageFault { addr: setup.program.page(page), ..PageFault::default() };
            let _ = tell.send((page, setup.pager.faults().fault(fault)));
        }
    });
    answers
}

#[test]
fn pool_fault_is_served_while_a_device_read_is_stalled() {
    let disk = MemoryDisk::default();
    let (setup, reader) = folded(&disk, 64);
    disk.hold_reads();
    let beginnings = disk.begun();
    let answers = handler(&setup, vec![3, 40]);
    // Unless it is passed on, the handler sleeps here until the read ends, which it doesn't.
    let first = answers.recv_timeout(LONG).expect("the handler waits for the device");
    assert_eq!(first, (3, FaultOutcome::Yes));
    assert_eq!(answers.recv_timeout(LONG), Ok((40, FaultOutcome::Yes)));
    assert_eq!(setup.space.present_pages() % 4, 0);
    assert!(setup.space.present_pages() >= 4, "the page from the pool is there");
    assert_holds(&setup, 40, 1);
    while disk.begun() == beginnings {
        std::thread::yield_now();
    }
    assert_eq!(get(&stats(&setup).pswpin), 0, "the read is held");
    disk.release_reads();
    (0..64).for_each(|n| assert_holds(&setup, n, 1));
    setup.pager.stop();
    reader.join().unwrap();
    assert!(get(&stats(&setup).pswpin) >= 16);
    setup.assert_sound();
}

#[test]
fn a_window_of_the_pool_ends_where_the_file_begins() {
    const PAGES: usize = 256;
    let disk = MemoryDisk::default();
    let setup = Arc::new(Setup::with_disk(small_config(), PAGES, Some(&disk)));
    // Of every folio's four blocks the first goes to the file, as a folio of its own.
    let content = |n: usize| partly_random(n as u64, if n % 16 < 4 { 0 } else { 3 });
    for part in [0..4, 4..16] {
        for start in (0..PAGES).step_by(16) {
            let pages = start + part.start..start + part.end;
            pages
                .clone()
                .for_each(|n| setup.program.write(n, |page| page.copy_from_slice(&content(n))));
            setup.pager.mappings().page_out_at(setup.addrs(pages));
        }
    }
    let reader = reader(&setup);
    disk.hold_reads();
    // A stream upwards through the pool, whose windows would grow to whole folios.
    let pages: Vec<usize> = (0..PAGES).step_by(4).filter(|n| n % 16 >= 4).collect();
    let answers = handler(&setup, pages.clone());
    for page in pages {
        assert_eq!(answers.recv_timeout(LONG), Ok((page, FaultOutcome::Yes)));
        setup.program.read(page, |bytes| assert!(*bytes == *content(page), "page {page}"));
    }
    assert_eq!(setup.space.present_pages(), PAGES / 4 * 3);
    let merges = get(&stats(&setup).zswpin_folio[3]);
    assert!(merges > 0, "windows grow as far as the pool goes");
    disk.release_reads();
    (0..PAGES)
        .for_each(|n| setup.program.read(n, |page| assert!(*page == *content(n), "page {n}")));
    setup.pager.stop();
    reader.join().unwrap();
    setup.assert_sound();
}

#[test]
fn handler_reads_itself_when_the_queue_of_reads_is_full() {
    let disk = MemoryDisk::default();
    let pages = 64 * 100;
    let (setup, reader) = folded(&disk, pages);
    disk.set_delay_us(300);
    let threads: Vec<_> = (0..100)
        .map(|n| {
            let setup = setup.clone();
            std::thread::spawn(move || {
                (0..16).for_each(|page| assert_holds(&setup, n * 64 + page, 1))
            })
        })
        .collect();
    threads.into_iter().for_each(|t| t.join().unwrap());
    setup.pager.stop();
    reader.join().unwrap();
    setup.assert_sound();
}

/// Threads of a program, each with its own pages, beside readers, a writer, a worker and a device
/// that takes its time.
#[test]
fn every_byte_comes_back_beside_threads_that_read() {
    const THREADS: usize = 4;
    // 12 MiB in all, in a limit of 8.
    const EACH: usize = 64 * 12;
    let seed = seed(31);
    let disk = MemoryDisk::default();
    let setup = Arc::new(Setup::with_disk(small_config(), THREADS * EACH, Some(&disk)));
    setup.troubles.strike_at_random(20, seed);
    let pager = &setup.pager;
    let readers = [reader(&setup), reader(&setup)];
    std::thread::scope(|scope| {
        scope.spawn(|| while pager.work() {});
        let program = |thread: usize| {
            let (setup, disk) = (&setup, &disk);
            move || {
                let mut random = Random::new(seed + thread as u64);
                let mut shadow = vec![0; EACH];
                for step in 0..4_000u64 {
                    let n = random.below(EACH);
                    let page = thread * EACH + n;
                    match random.below(100) {
                        0 => disk.set_delay_us(random.below(200) as u64),
                        1..3 => {
                            let end = (n + 16).min(EACH);
                            let addrs = setup.addrs(page..thread * EACH + end);
                            // SAFETY: only this thread uses the pages.
                            unsafe { setup.pager.mappings().discard_at(addrs) };
                            shadow[n..end].fill(0);
                        }
                        3..6 => drop(
                            setup
                                .pager
                                .mappings()
                                .page_out_at(setup.addrs(thread * EACH..(thread + 1) * EACH)),
                        ),
                        6..50 => {
                            shadow[n] = step + 1;
                            write(setup, page, step + 1);
                        }
                        _ if shadow[n] == 0 => {
                            setup.program.read(page, |page| assert!(page.iter().all(|b| *b == 0)));
                        }
                        _ => assert_holds(setup, page, shadow[n]),
                    }
                }
            }
        };
        let threads: Vec<_> = (0..THREADS).map(|thread| scope.spawn(program(thread))).collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
        pager.stop();
    });
    readers.into_iter().for_each(|t| t.join().unwrap());
    setup.troubles.clear();
    assert!(get(&stats(&setup).pswpin) > 0 && get(&stats(&setup).zswpin) > 0);
    setup.assert_sound();
}
