//! Regions end to end: real page faults, both deliveries, with and without UFFDIO_MOVE. Rows B2, Z1, M1, C1.
use memfold::{Delivery, Memory};

const MIB: usize = 1 << 20;

/// Bytes that compress like real ones: the test's own executable, repeated, each page stamped.
fn page(source: &[u8], n: usize, out: &mut [u8]) {
    let at = n * 4096 % (source.len() - 4096);
    out.copy_from_slice(&source[at..at + 4096]);
    out[..8].copy_from_slice(&(n as u64).to_le_bytes());
}

fn fill_and_read(delivery: Delivery, use_move: &str, resident: u64, size: usize) {
    let source = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    let memory = Memory::builder().resident_bytes(resident).delivery(delivery).set("move", use_move).build().unwrap();
    let mut region = memory.region(size).unwrap();
    let mut want = vec![0u8; 4096];
    let pages = size / 4096;
    for n in 0..pages {
        page(&source, n, &mut region.as_mut_slice()[n * 4096..][..4096]);
    }
    for round in 0..2 {
        for n in 0..pages {
            page(&source, n, &mut want);
            assert!(region.as_slice()[n * 4096..][..4096] == want[..], "round {round} page {n}");
        }
    }
    let mut x = 88172645463325252u64;
    for _ in 0..20_000 {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        let n = x as usize % pages;
        page(&source, n, &mut want);
        assert!(region.as_slice()[n * 4096..][..4096] == want[..], "page {n}");
    }
    let stats = memory.stats();
    let held = stats.resident_bytes.load(std::sync::atomic::Ordering::Relaxed)
        + stats.frame_bytes.load(std::sync::atomic::Ordering::Relaxed);
    assert!(held <= resident, "{held} held, {resident} allowed");
    assert_eq!(stats.check_sums(), Ok(()));
    memory.check().unwrap();
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
