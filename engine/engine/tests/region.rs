//! Regions end to end: real page faults, both deliveries, with and without UFFDIO_MOVE. Rows B2,
//! Z1, M1, C1.
use memfold_engine::{Delivery, Memory, Region};
use memfold_testkit::random::Random;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

const MIB: usize = 1 << 20;

/// Bytes that compress like real ones: the test's own executable, repeated, each page stamped.
fn page(source: &[u8], n: usize, out: &mut [u8]) {
    let at = n * 4096 % (source.len() - 4096);
    out.copy_from_slice(&source[at..at + 4096]);
    out[..8].copy_from_slice(&(n as u64).to_le_bytes());
}

#[track_caller]
fn assert_page(source: &[u8], region: &Region, n: usize) {
    let mut want = [0u8; 4096];
    page(source, n, &mut want);
    assert!(region.as_slice()[n * 4096..][..4096] == want, "page {n}");
}

fn held_bytes(memory: &Memory) -> u64 {
    let stats = memory.stats();
    stats.resident_bytes.load(Relaxed) + stats.frame_bytes.load(Relaxed)
}

fn fill_and_read(delivery: Delivery, use_move: &str, resident: u64, size: usize) {
    let source = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    let memory = Memory::builder()
        .resident_bytes(resident)
        .delivery(delivery)
        .set("move", use_move)
        .build()
        .unwrap();
    let mut region = memory.region(size).unwrap();
    let pages = size / 4096;
    for n in 0..pages {
        page(&source, n, &mut region.as_mut_slice()[n * 4096..][..4096]);
    }
    for _ in 0..2 {
        for n in 0..pages {
            assert_page(&source, &region, n);
        }
    }
    let mut random = Random::new(1);
    for _ in 0..20_000 {
        let n = random.below(pages);
        assert_page(&source, &region, n);
    }
    // Two loads at once may each find the last room; the background gives it back without another
    // fault.
    eventually("the bound is kept", || held_bytes(&memory) <= resident);
    assert_eq!(memory.stats().check_sums(), Ok(()));
    memory.check().unwrap();
}

#[test]
fn settings_of_memfold_run_are_refused_for_a_region() {
    let outcome = Memory::builder().limit_bytes(64 << 20).set("paging", "protection").build();
    let why = outcome.err().expect("refused").to_string();
    assert!(why.contains("memfold run"), "{why}");
}

#[test]
fn signal_delivery_keeps_every_byte() {
    fill_and_read(Delivery::Signal, "on", 16 << 20, 64 * MIB);
}

#[test]
fn thread_delivery_keeps_every_byte() {
    fill_and_read(Delivery::Thread, "on", 16 << 20, 64 * MIB);
}

#[test]
fn copying_instead_of_moving_keeps_every_byte() {
    fill_and_read(Delivery::Signal, "off", 16 << 20, 48 * MIB);
    fill_and_read(Delivery::Thread, "off", 16 << 20, 48 * MIB);
}

/// Text of many kinds of records, of which each page has a few: what a dictionary is for.
fn records(n: usize, out: &mut [u8]) {
    let mut state = n as u32;
    let mut text = Vec::new();
    while text.len() < out.len() {
        state = state.wrapping_mul(1664525).wrapping_add(1013904223);
        let keys = [
            "customer_identifier",
            "payment_status",
            "delivery_address",
            "measured_temperature",
            "currency",
        ];
        let key = keys[state as usize >> 16 & 3];
        text.extend(
            format!("{{\"{key}\": {}, \"source\": \"node-{}\"}}\n", state >> 5, state >> 27)
                .bytes(),
        );
    }
    out.copy_from_slice(&text[..out.len()]);
}

/// Rounds of writing at most, until a background thread has found a dictionary: on busy CPUs it
/// comes late.
const ROUNDS_MAX: usize = 40;

/// Writes everything twice, and again until the pool holds no more than `most`; returns what it
/// holds.
fn pool_bytes_with(canned: &str, size: usize, most: u64) -> u64 {
    let builder = Memory::builder()
        .resident_bytes(16 << 20)
        .codec("lz4")
        .set("block", "4K")
        .set("canned", canned);
    let memory = builder.build().unwrap();
    let mut region = memory.region(size).unwrap();
    let mut rounds = 0;
    while rounds < 2 || rounds < ROUNDS_MAX && pool_bytes(&memory) > most {
        for n in 0..size / 4096 {
            records(n + rounds, &mut region.as_mut_slice()[n * 4096..][..4096]);
        }
        rounds += 1;
    }
    let mut want = vec![0u8; 4096];
    for n in 0..size / 4096 {
        records(n + rounds - 1, &mut want);
        assert!(region.as_slice()[n * 4096..][..4096] == want[..], "page {n}");
    }
    memory.check().unwrap();
    pool_bytes(&memory)
}

#[test]
fn z8_canned_mode_makes_the_pool_smaller_and_keeps_every_byte() {
    let off = pool_bytes_with("off", 128 * MIB, u64::MAX);
    let on = pool_bytes_with("on", 128 * MIB, off / 100 * 97);
    assert!(on <= off / 100 * 97, "{on} bytes in the pool, {off} without");
    let mut content = vec![0; 16384];
    records(5_000_000, &mut content);
    let dictionary =
        memfold_store::Dictionary::new(memfold_store::DictionaryKind::Raw, content).unwrap();
    let path = std::env::temp_dir().join(format!("memfold-region-{}.dict", std::process::id()));
    std::fs::write(&path, dictionary.to_file()).unwrap();
    let from_file = pool_bytes_with(path.to_str().unwrap(), 48 * MIB, u64::MAX);
    assert!(
        from_file * 100 < pool_bytes_with("off", 48 * MIB, u64::MAX) * 97,
        "{from_file} bytes in the pool"
    );
    let mut file = dictionary.to_file();
    file[100] ^= 1;
    std::fs::write(&path, file).unwrap();
    let builder = Memory::builder().resident_bytes(16 << 20);
    let error = builder
        .set("canned", path.to_str().unwrap())
        .build()
        .err()
        .expect("a damaged file")
        .to_string();
    assert!(error.contains("checksum") && error.contains("memfold-region"), "{error}");
    std::fs::remove_file(path).unwrap();
}

fn pool_bytes(memory: &Memory) -> u64 {
    memory.stats().pool_bytes.load(Relaxed)
}

/// Waits until `holds`, for a time that no working engine needs.
fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < std::time::Duration::from_secs(600), "{what}");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

#[test]
fn m2_a_sparse_pool_is_packed_without_any_limit_being_hit() {
    let source = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    let memory =
        Memory::builder().resident_bytes(64 << 20).delivery(Delivery::Signal).build().unwrap();
    let mut region = memory.region(48 * MIB).unwrap();
    let pages = region.len() / 4096;
    (0..pages).for_each(|n| page(&source, n, &mut region.as_mut_slice()[n * 4096..][..4096]));
    region.pageout(0..region.len());
    eventually("all is folded", || {
        memory.stats().folded_bytes.load(Relaxed) == region.len() as u64
    });
    let full = pool_bytes(&memory);
    // Three of four blocks go, one by one, which leaves nearly every span a quarter full.
    for block in (0..region.len() / 16384).filter(|block| block % 4 != 0) {
        // SAFETY: nobody has a reference into the region.
        unsafe { region.discard(block * 16384..(block + 1) * 16384) };
    }
    eventually("the pool is packed", || pool_bytes(&memory) < full * 2 / 5);
    let stats = memory.stats();
    assert!(stats.compacted_bytes.load(Relaxed) > 0);
    for n in (0..pages).filter(|n| n / 4 % 4 == 0) {
        assert_page(&source, &region, n);
    }
    memory.check().unwrap();
}

#[test]
fn m9_cold_blocks_are_compressed_again_while_the_program_reads() {
    let source = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    for delivery in [Delivery::Signal, Delivery::Thread] {
        let memory = Memory::builder()
            .resident_bytes(16 << 20)
            .delivery(delivery)
            .set("recompress", "zstd:6")
            .set("recompress-after", "0")
            .set("recompress-cpu", "80")
            .build()
            .unwrap();
        let mut region = memory.region(48 * MIB).unwrap();
        let pages = region.len() / 4096;
        (0..pages).for_each(|n| page(&source, n, &mut region.as_mut_slice()[n * 4096..][..4096]));
        let mut random = Random::new(1);
        let again = |memory: &Memory| memory.stats().blocks_recompressed.load(Relaxed);
        let mut reads = 0;
        eventually("blocks are compressed again", || {
            for _ in 0..500 {
                let n = random.below(pages);
                assert_page(&source, &region, n);
                reads += 1;
            }
            reads > 5_000 && again(&memory) > 200
        });
        for n in 0..pages {
            assert_page(&source, &region, n);
        }
        assert!(memory.stats().recompress_gained_bytes.load(Relaxed) > 0);
    }
}

#[test]
fn z9_batches_keep_every_byte() {
    let source = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    for delivery in [Delivery::Signal, Delivery::Thread] {
        let memory = Memory::builder()
            .resident_bytes(16 << 20)
            .delivery(delivery)
            .set("batch", "16")
            .build()
            .unwrap();
        let mut region = memory.region(64 * MIB).unwrap();
        let pages = region.len() / 4096;
        (0..pages).for_each(|n| page(&source, n, &mut region.as_mut_slice()[n * 4096..][..4096]));
        for n in 0..pages {
            assert_page(&source, &region, n);
        }
        memory.check().unwrap();
    }
}

#[test]
fn z10_a_full_pool_refuses_and_the_bytes_stay() {
    let source = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    let memory = Memory::builder().resident_bytes(16 << 20).set("max-pool", "4M").build().unwrap();
    let mut region = memory.region(32 * MIB).unwrap();
    let pages = region.len() / 4096;
    (0..pages).for_each(|n| page(&source, n, &mut region.as_mut_slice()[n * 4096..][..4096]));
    for n in 0..pages {
        assert_page(&source, &region, n);
    }
    assert!(pool_bytes(&memory) <= (4 << 20) + (1 << 20), "{}", pool_bytes(&memory));
    assert!(memory.stats().save_refused.load(Relaxed) > 0);
    memory.check().unwrap();
}

/// A fault looks for its engine among all with signal delivery; one of the others may be dropped
/// meanwhile.
#[test]
fn an_engine_may_go_while_another_serves_faults() {
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
    let signal =
        || Memory::builder().resident_bytes(8 << 20).delivery(Delivery::Signal).build().unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // First in the list, so that every fault asks it or its place.
        let mut first = signal();
        for _ in 0..3 {
            scope.spawn(|| {
                let memory = signal();
                let mut region = memory.region(32 * MIB).unwrap();
                let mut round = 0u8;
                while !is_over.load(Relaxed) {
                    round = round.wrapping_add(1);
                    for page in region.as_mut_slice().chunks_mut(4096) {
                        assert!(page[0] == round.wrapping_sub(1) && page[4095] == 0);
                        page[0] = round;
                    }
                }
            });
        }
        for _ in 0..100 {
            drop(first);
            first = signal();
        }
        is_over.store(true, Relaxed);
    });
}

/// Random bytes, which go to the file as they are, and bytes that the pool shrinks and then packs.
fn mixed(source: &[u8], n: usize, out: &mut [u8]) {
    page(source, n, out);
    if n % 8 < 4 {
        let mut random = Random::new(n as u64);
        out.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&random.word().to_le_bytes()));
    }
}

#[test]
fn region_with_a_swap_file_keeps_bytes_at_every_block_size() {
    use std::sync::atomic::Ordering::Relaxed;
    let source = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    for (block, fallback) in
        ["4K", "16K", "64K"].into_iter().flat_map(|block| [(block, "0"), (block, "100")])
    {
        let builder =
            Memory::builder().limit_bytes(12 << 20).set("swap", env!("CARGO_TARGET_TMPDIR"));
        let memory = builder.set("block", block).set("fallback", fallback).build().unwrap();
        let mut region = memory.region(28 * MIB).unwrap();
        let (pages, mut want) = (region.len() / 4096, vec![0u8; 4096]);
        for n in 0..pages {
            mixed(&source, n, &mut region.as_mut_slice()[n * 4096..][..4096]);
        }
        // In order, and then far apart, so that pages are asked for by themselves.
        for n in (0..pages).chain((0..pages).map(|n| n * 1237 % pages)) {
            mixed(&source, n, &mut want);
            assert!(
                region.as_slice()[n * 4096..][..4096] == want[..],
                "page {n}, --block {block}, --fallback {fallback}"
            );
        }
        let s = memory.stats();
        let (out, back) = (s.pswpout.load(Relaxed), s.pswpin.load(Relaxed));
        assert!(
            out > 0 && back > pages as u64 / 8,
            "{out} pages went to the file, {back} came from it"
        );
        memory.check().unwrap();
    }
}

/// A handler of the program's touches the region while its thread is inside a call: it waited for a
/// lock that its own thread had.
#[test]
fn handler_that_touches_a_region_waits_for_no_own_call() {
    use std::sync::atomic::{AtomicBool, AtomicUsize};
    const LEN: usize = 16 * MIB;
    static AT: AtomicUsize = AtomicUsize::new(0);
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    extern "C" fn touch(_: i32) {
        let n = COUNT.fetch_add(1, Relaxed);
        let at = AT.load(Relaxed) + n.wrapping_mul(7919) * 4096 % LEN;
        // SAFETY: inside the region, which lives as long as signals are sent.
        unsafe { (at as *const u8).read_volatile() };
    }
    // SAFETY: zeros are an action; the handler does only what one may do.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = touch as *const () as usize;
        action.sa_flags = libc::SA_RESTART;
        libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut());
    }
    for delivery in [Delivery::Signal, Delivery::Thread] {
        let memory = Memory::builder().resident_bytes(8 << 20).delivery(delivery).build().unwrap();
        let mut region = memory.region(LEN).unwrap();
        for (n, word) in region.as_mut_slice().chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&(n as u64 * 31).to_le_bytes());
        }
        AT.store(region.as_ptr() as usize, Relaxed);
        let (over, before) = (AtomicBool::new(false), COUNT.load(Relaxed));
        // SAFETY: asks who calls.
        let own = unsafe { libc::pthread_self() };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Relaxed) {
                    // SAFETY: the thread lives until this one has ended.
                    unsafe { libc::pthread_kill(own, libc::SIGUSR1) };
                    std::thread::yield_now();
                }
            });
            while COUNT.load(Relaxed) < before + 800 {
                region.willneed(0..4 * MIB);
                region.pageout(0..LEN);
                region.cold(0..LEN);
                drop(region.pin(MIB..2 * MIB));
                memory.stats();
            }
            over.store(true, Relaxed);
        });
        assert!(
            region
                .as_slice()
                .chunks_exact(8)
                .enumerate()
                .all(|(n, word)| { word == (n as u64 * 31).to_le_bytes() })
        );
    }
}
