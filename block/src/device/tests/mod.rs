//! Compares the device with a vector of bytes, and checks its promises one by one.
mod cold;

use super::table::SlotTable;
use super::*;
use memfold_os::units::Order;
use memfold_store::{CodecSpec, InjectedFault};
use memfold_testkit::fill::fill;
use memfold_testkit::random::{Random, seed};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

const PAGE: u64 = PAGE_SIZE as u64;

fn backing(block_order: u8, limit_bytes: u64, codec: &str) -> Arc<DeviceMemory> {
    let block_order = Order::new(block_order).unwrap();
    let codec = CodecSpec::parse(codec).unwrap();
    DeviceMemory::new(&MemorySettings {
        limit_bytes,
        codec,
        block_order,
        pools: 2,
        ..MemorySettings::default()
    })
    .unwrap()
}

pub(crate) fn spill_settings(size_bytes: u64, limit_bytes: Option<u64>) -> SpillSettings {
    let path = std::env::temp_dir().to_str().unwrap().to_string();
    SpillSettings { path, size_bytes, keep_free_bytes: 0, encrypt: true, limit_bytes }
}

/// Makes a backing with lz4, two pools and a file.
pub(crate) fn spilling(order: u8, limit_bytes: u64, spill: SpillSettings) -> Arc<DeviceMemory> {
    let settings = MemorySettings {
        limit_bytes,
        codec: CodecSpec::parse("lz4").unwrap(),
        block_order: Order::new(order).unwrap(),
        pools: 2,
        spill: Some(spill),
        ..MemorySettings::default()
    };
    DeviceMemory::new(&settings).unwrap()
}

pub(super) fn noise(seed: u64, len: usize) -> Vec<u8> {
    Random::new(seed).noise(len)
}

/// A device and the expected value of each of its bytes.
pub(super) struct Pair {
    pub device: Arc<Device>,
    io: DeviceIo,
    bytes: Vec<u8>,
}

impl Pair {
    pub fn new(backing: &Arc<DeviceMemory>, size: u64) -> Pair {
        let device = Device::new(backing, size).unwrap();
        Pair { io: device.io(), device, bytes: vec![0; size as usize] }
    }

    /// Writes. A refused write has left each page of each byte range unchanged, or changed it.
    pub fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), IoError> {
        let to = offset as usize..offset as usize + from.len();
        let outcome = self.device.write(&mut self.io, offset, from);
        if outcome.is_err() {
            self.adopt(offset, from);
        } else {
            self.bytes[to].copy_from_slice(from);
        }
        outcome
    }

    fn adopt(&mut self, offset: u64, from: &[u8]) {
        let mut at = 0;
        while at < from.len() {
            let start = offset as usize + at;
            let len = (PAGE_SIZE - start % PAGE_SIZE).min(from.len() - at);
            let bytes = self.read(start as u64, len);
            let (old, new) = (&mut self.bytes[start..start + len], &from[at..at + len]);
            assert!(
                bytes == *old || bytes == new,
                "a refused write left something else at {start}"
            );
            old.copy_from_slice(&bytes);
            at += len;
        }
    }

    pub fn zero(&mut self, offset: u64, len: u64, zeros: ZeroPolicy) {
        self.device.zero(&mut self.io, offset, len, zeros).unwrap();
        self.bytes[offset as usize..(offset + len) as usize].fill(0);
    }

    fn read(&mut self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0xa5; len];
        self.device.read(&mut self.io, offset, &mut bytes).unwrap();
        bytes
    }

    #[track_caller]
    pub fn compare(&mut self, offset: u64, len: usize) {
        let bytes = self.read(offset, len);
        let expected = &self.bytes[offset as usize..][..len];
        let difference = bytes.iter().zip(expected).position(|(a, b)| a != b);
        assert_eq!(difference.map(|at| offset + at as u64), None, "a wrong byte");
    }

    /// Compares every byte, and verifies the table, the store, and the status.
    #[track_caller]
    pub fn check(&mut self) {
        self.compare(0, self.bytes.len());
        let (objects, spilled_objects) = self.device.check().unwrap();
        self.device.backing.store.check().unwrap();
        assert_eq!(
            objects,
            self.device.backing.store.stats().objects,
            "an object that no slot knows"
        );
        assert_eq!(
            spilled_objects,
            self.device.backing.stats().spill.map_or(0, |spill| spill.objects)
        );
        let (mut at, bytes) = (0, &self.bytes);
        let each = |len, status| {
            let run = &bytes[at as usize..(at + len) as usize];
            assert!(
                len > 0 && (status == RangeStatus::Data || run.iter().all(|b| *b == 0)),
                "{status:?} at {at}"
            );
            at += len;
            true
        };
        self.device.status(0, bytes.len() as u64, each).unwrap();
        assert_eq!(at, bytes.len() as u64);
    }

    pub fn any_request(&mut self, random: &mut Random, around: Range<u64>) {
        let block = self.device.block_bytes() as u64;
        // Large blocks are rarely written whole, because filling them takes most of the time.
        let most =
            if random.per_mille(200) { 3 * block } else { random.pick(&[700, 2 * PAGE, 60_000]) };
        let unit = random.pick(&[1, 1, 512, PAGE, if most > block { block } else { PAGE }]);
        let offset =
            around.start + random.below((around.end - around.start) as usize) as u64 / unit * unit;
        let offset = offset.min(around.end - 1);
        let len = (1 + random.below(most as usize) as u64)
            .next_multiple_of(unit)
            .min(around.end - offset);
        match random.below(9) {
            0..3 => self.compare(offset, len as usize),
            3..7 => {
                let mut from = vec![0; len as usize];
                fill(random, &mut from);
                let _ = self.write(offset, &from);
            }
            7 => self.zero(offset, len, ZeroPolicy::Hole),
            _ => self.zero(offset, len, ZeroPolicy::Written),
        }
    }
}

#[test]
fn m10_random_unaligned_requests_match_a_byte_vector() {
    let mut random = Random::new(seed(20));
    for (order, codec) in
        [(0, "lz4"), (1, "zstd:1"), (2, "delta"), (4, "lz4"), (9, "lz4"), (2, "none")]
    {
        // It ends within a page, and its blocks lie in two chunks of the table.
        let chunk = table::CHUNK_PAGES as u64 * PAGE;
        let mut pair = Pair::new(&backing(order, 0, codec), chunk + (1 << 20) + 1536);
        let (end, around) = (pair.device.size(), 600_000);
        for (turn, area) in
            [chunk - around..chunk + around, end - around..end].into_iter().enumerate()
        {
            for _ in 0..if order == 9 { 60 } else { 400 } {
                pair.any_request(&mut random, area.clone());
            }
            println!("order {order} {codec}, turn {turn}: {:?}", pair.device.stats());
            pair.check();
        }
    }
}

#[test]
fn a_device_refused_memory_at_random_has_no_wrong_byte() {
    let mut random = Random::new(seed(21));
    for (kind, every) in [(InjectedFault::PoolFull, 3), (InjectedFault::Codec, 5)] {
        let mut pair = Pair::new(&backing(2, 0, "lz4"), (1 << 20) + 512);
        let end = pair.device.size();
        for _ in 0..2000 {
            // The limit must not refuse zeroing the edge of a page, but a fault may strike it.
            let faulty = random.below(2) == 0;
            if faulty {
                pair.device.backing.store.faults().strike_every(kind, every);
                let mut from = vec![0; 1 + random.below(60_000)];
                fill(&mut random, &mut from);
                let offset = random.below(end as usize - from.len()) as u64;
                let _ = pair.write(offset, &from);
                pair.device.backing.store.faults().clear();
            } else {
                pair.any_request(&mut random, 0..end);
            }
        }
        assert!(pair.device.stats().failed_writes > 50, "{:?}", pair.device.stats());
        pair.check();
    }
}

#[test]
fn threads_sharing_blocks_and_pages_lose_no_byte() {
    const THREADS: u64 = 4;
    let first = seed(22);
    for stripe in [700, 1536, 5 * PAGE + 512] {
        let backing = backing(2, 0, "lz4");
        let size = (THREADS * stripe * 24).next_multiple_of(SECTOR_BYTES);
        let device = Device::new(&backing, size).unwrap();
        let work = |thread: u64| {
            let (mut io, mut random) = (device.io(), Random::new(first + thread));
            let mut own = vec![vec![0u8; stripe as usize]; 24];
            for _ in 0..1500 {
                let row = random.below(24);
                let start = random.below(stripe as usize);
                let end = start + 1 + random.below(stripe as usize - start);
                let at = (row as u64 * THREADS + thread) * stripe + start as u64;
                let own = &mut own[row][start..end];
                match random.below(5) {
                    0 => {
                        device
                            .zero(
                                &mut io,
                                at,
                                own.len() as u64,
                                random.pick(&[ZeroPolicy::Hole, ZeroPolicy::Written]),
                            )
                            .unwrap();
                        own.fill(0);
                    }
                    1 | 2 => {
                        fill(&mut random, own);
                        device.write(&mut io, at, own).unwrap();
                    }
                    _ => {
                        let mut bytes = vec![0; own.len()];
                        device.read(&mut io, at, &mut bytes).unwrap();
                        assert!(bytes == *own, "thread {thread}, {at}");
                    }
                }
            }
            for (row, own) in own.iter().enumerate() {
                let mut bytes = vec![0; own.len()];
                device.read(&mut io, (row as u64 * THREADS + thread) * stripe, &mut bytes).unwrap();
                assert!(bytes == *own, "thread {thread}, row {row}, at the end");
            }
        };
        thread::scope(|scope| (0..THREADS).for_each(|t| drop(scope.spawn(move || work(t)))));
        assert_eq!(device.check().unwrap(), (backing.store.stats().objects, 0));
        backing.store.check().unwrap();
    }
}

#[test]
fn overlapping_writes_of_a_block_leave_one_of_them_whole() {
    let backing = backing(2, 0, "lz4");
    let device = Device::new(&backing, 4 * 16384).unwrap();
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let writers: Vec<_> = (1..4u8)
            .map(|n| {
                let device = &device;
                scope.spawn(move || {
                    let (mut io, mut random) = (device.io(), Random::new(n.into()));
                    for _ in 0..3000 {
                        // Unaligned in memory, and across two blocks.
                        let from = vec![n; 2 * 16384 + 1];
                        device.write(&mut io, random.below(3) as u64 * 16384, &from[1..]).unwrap();
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            let (mut io, mut bytes) = (device.io(), vec![0; 16384]);
            while !over.load(Relaxed) {
                for block in 0..4 {
                    device.read(&mut io, block * 16384, &mut bytes).unwrap();
                    assert!(
                        bytes.iter().all(|b| *b == bytes[0]),
                        "block {block} is of several writes"
                    );
                }
            }
        });
        writers.into_iter().for_each(|w| w.join().unwrap());
        over.store(true, Relaxed);
    });
    assert_eq!(device.check().unwrap(), (backing.store.stats().objects, 0));
}

#[test]
fn m3_whole_block_write_reads_nothing_and_part_changes_its_page() {
    let mut pair = Pair::new(&backing(2, 0, "lz4"), 1 << 20);
    pair.write(16384, &noise(1, 16384)).unwrap();
    let stats = pair.device.stats();
    assert_eq!(
        (stats.writes, stats.block_writes, stats.page_writes, stats.partial_writes),
        (1, 1, 0, 0)
    );
    pair.write(3 * 16384, &noise(2, 8192)).unwrap();
    let stats = pair.device.stats();
    assert_eq!(
        (stats.block_writes, stats.page_writes, stats.partial_writes),
        (1, 2, 0),
        "below a block: pages"
    );
    assert_eq!(
        (stats.block_reads, stats.partial_reads, stats.page_reads),
        (0, 0, 0),
        "nothing was read for it"
    );
    pair.write(3 * 16384 + 100, b"change").unwrap();
    pair.write(16384 + 100, b"change").unwrap();
    let stats = pair.device.stats();
    assert_eq!((stats.partial_writes, stats.page_reads, stats.partial_reads), (2, 1, 1));
    pair.compare(16384, 16384);
    pair.compare(2 * 16384, 16384);
    pair.compare(16384 + 4096, 100);
    // A whole block is one decompression. In a mixed block, the part in the block's object is one.
    let stats = pair.device.stats();
    assert_eq!((stats.block_reads, stats.partial_reads), (0, 3));
    pair.write(0, &noise(3, 16384)).unwrap();
    pair.compare(0, 16384);
    assert_eq!(pair.device.stats().block_reads, 1);
    pair.check();
}

#[test]
fn m4_a_blocks_object_goes_with_its_last_page() {
    let mut pair = Pair::new(&backing(2, 0, "lz4"), 1 << 20);
    pair.write(0, &noise(1, 16384)).unwrap();
    for page in 0..3 {
        pair.zero(page * PAGE, PAGE, ZeroPolicy::Hole);
        assert_eq!(pair.device.backing.store.stats().objects, 1);
        pair.compare(0, 16384);
    }
    assert_eq!(pair.device.stats().deferred_frees, 3);
    pair.zero(3 * PAGE, PAGE, ZeroPolicy::Hole);
    assert_eq!(
        (pair.device.backing.store.stats().objects, pair.device.stats().deferred_frees),
        (0, 3)
    );
    pair.check();
}

#[test]
fn block_rewritten_by_pages_drops_its_old_object_early() {
    let mut pair = Pair::new(&backing(4, 0, "lz4"), 1 << 20);
    pair.write(0, &noise(1, 65536)).unwrap();
    for page in 0..8 {
        assert_eq!(pair.device.stats().blocks_cut, 0);
        pair.write(page * PAGE, &noise(page, PAGE_SIZE)).unwrap();
    }
    let store = &pair.device.backing.store;
    assert_eq!((pair.device.stats().blocks_cut, store.stats().objects), (1, 16));
    assert_eq!(store.stats().stored_bytes, 65536, "the old object is still there");
    pair.check();
    // If the block can't be split, nothing changes.
    pair.write(65536, &noise(2, 65536)).unwrap();
    for page in 16..24 {
        let faults = pair.device.backing.store.faults();
        if page == 23 {
            faults.strike_at(InjectedFault::PoolFull, 3);
        }
        pair.write(page * PAGE, &noise(page, PAGE_SIZE)).unwrap();
    }
    pair.device.backing.store.faults().clear();
    assert_eq!(pair.device.stats().blocks_cut, 1);
    pair.check();
}

#[test]
fn discard_gives_the_memory_back_and_is_exact_to_the_byte() {
    let mut pair = Pair::new(&backing(2, 0, "lz4"), 32 << 20);
    pair.write(0, &noise(1, 32 << 20)).unwrap();
    let full = pair.device.backing.held_bytes();
    assert!(full >= 32 << 20, "{full}");
    pair.zero(1, (32 << 20) - 2, ZeroPolicy::Hole);
    while pair.device.backing.tidy() > 0 {}
    let rest = pair.device.backing.held_bytes();
    assert!(rest < 3 << 20, "{full} -> {rest}");
    let (first, last) = (pair.bytes[0], *pair.bytes.last().unwrap());
    assert!(first != 0 && last != 0);
    pair.check();
    let mut runs = Vec::new();
    let each = |len, status| {
        runs.push((len, status));
        true
    };
    pair.device.status(0, 32 << 20, each).unwrap();
    let hole = (32 << 20) - 2 * PAGE;
    assert_eq!(
        runs,
        [(PAGE, RangeStatus::Data), (hole, RangeStatus::Hole), (PAGE, RangeStatus::Data)]
    );
}

#[test]
fn zeros_that_were_written_hold_no_memory_and_are_no_hole() {
    let mut pair = Pair::new(&backing(2, 0, "lz4"), 1 << 20);
    pair.write(0, &[0; 16384]).unwrap();
    pair.write(16384, &[0; 4096]).unwrap();
    pair.zero(5 * PAGE, 100, ZeroPolicy::Written);
    pair.zero(6 * PAGE, PAGE, ZeroPolicy::Hole);
    let mut runs = Vec::new();
    pair.device
        .status(0, 8 * PAGE, |len, status| {
            runs.push((len / PAGE, status));
            true
        })
        .unwrap();
    assert_eq!(runs, [(6, RangeStatus::Zeros), (2, RangeStatus::Hole)]);
    assert_eq!(pair.device.backing.store.stats().objects, 0);
}

#[test]
fn full_device_fails_writes_keeps_data_and_recovers_with_room() {
    let limit = 8 << 20;
    let mut pair = Pair::new(&backing(2, limit, "lz4"), 64 << 20);
    let mut at = 0;
    while pair.write(at, &noise(at, 100_000)).is_ok() {
        at += 100_000;
    }
    assert!(at > 6 << 20 && at < 9 << 20, "{at}");
    assert_eq!(pair.device.write(&mut pair.io, 40 << 20, &noise(9, 16384)), Err(IoError::NoSpace));
    let held_bytes = pair.device.backing.held_bytes();
    assert!(held_bytes <= limit + (64 << 10), "{held_bytes} bytes held");
    pair.check();
    // A discard is never refused, even of parts of pages.
    pair.zero(1000, (2 << 20) - 999, ZeroPolicy::Hole);
    pair.write(40 << 20, &noise(9, 1 << 20)).unwrap();
    pair.check();
}

#[test]
fn damaged_block_is_an_error_until_it_is_rewritten() {
    let mut pair = Pair::new(&backing(2, 0, "lz4"), 1 << 20);
    pair.device.backing.store.faults().strike_at(InjectedFault::Stored, 1);
    pair.write(0, &noise(1, 16384)).unwrap();
    pair.device.backing.store.faults().clear();
    let mut bytes = vec![0; 16384];
    for len in [16384, 100] {
        let outcome = pair.device.read(&mut pair.io, 0, &mut bytes[..len]);
        assert!(matches!(outcome, Err(IoError::Damaged(_))), "{outcome:?}");
    }
    // A change of a part needs the rest.
    assert!(matches!(pair.device.write(&mut pair.io, 10, b"x"), Err(IoError::Damaged(_))));
    assert_eq!((pair.device.stats().failed_reads, pair.device.stats().failed_writes), (2, 1));
    pair.write(0, &noise(2, 16384)).unwrap();
    pair.check();
}

#[test]
fn devices_of_one_backing_share_its_limit_and_no_byte() {
    let backing = backing(2, 8 << 20, "lz4");
    let (mut a, mut b) =
        (Device::new(&backing, 16 << 20).unwrap(), Device::new(&backing, 16 << 20).unwrap());
    let mut io = a.io();
    a.write(&mut io, 4096, &noise(1, 6 << 20)).unwrap();
    let mut bytes = vec![1; 1 << 20];
    b.read(&mut io, 0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0));
    assert_eq!(b.write(&mut io, 0, &noise(2, 4 << 20)), Err(IoError::NoSpace));
    // A device that ends frees its memory.
    (a, b) = (b, Device::new(&backing, 16 << 20).unwrap());
    a.write(&mut io, 0, &noise(2, 4 << 20)).unwrap();
    drop((a, b));
    backing.store.check().unwrap();
    assert_eq!((backing.store.stats().objects, backing.stats().table_bytes), (0, 0));
}

#[test]
fn nonsense_is_refused() {
    let memory_limited = backing(2, LIMIT_BYTES_MIN, "lz4");
    let refusal = |size: u64| {
        Device::new(&memory_limited, size).err().map(|e| e.to_string()).unwrap_or_default()
    };
    assert!(refusal(0).contains("size"), "{}", refusal(0));
    assert!(refusal(1000).contains("multiple of 512"), "{}", refusal(1000));
    assert!(refusal(SIZE_BYTES_MAX + 512).contains("at most"));
    assert!(
        SlotTable::bytes(SIZE_BYTES_MAX / PAGE) > LIMIT_BYTES_MIN
            && refusal(SIZE_BYTES_MAX).contains("Raise the limit")
    );
    let settings = MemorySettings { limit_bytes: 1 << 20, ..MemorySettings::default() };
    assert_eq!(DeviceMemory::new(&settings).err(), Some(DeviceError::Limit(1 << 20)));
    let device = Device::new(&memory_limited, 1536).unwrap();
    let (mut io, mut byte) = (device.io(), [0]);
    for offset in [1536, 1 << 40, u64::MAX] {
        assert_eq!(device.read(&mut io, offset, &mut byte), Err(IoError::OutOfRange));
        assert_eq!(device.write(&mut io, offset, &byte), Err(IoError::OutOfRange));
        assert_eq!(device.zero(&mut io, offset, 1, ZeroPolicy::Hole), Err(IoError::OutOfRange));
        assert_eq!(device.status(offset, 1, |_, _| true), Err(IoError::OutOfRange));
    }
    assert_eq!(device.stats().invalid, 12);
    device.write(&mut io, 1535, &[7]).unwrap();
    device.read(&mut io, 1535, &mut byte).unwrap();
    assert_eq!(byte, [7]);
    let mut names = Vec::new();
    device.stats().each(|name, help, value| names.push((name, help.ends_with('.'), value)));
    assert!(
        names.contains(&("invalid", true, 12)) && names.iter().all(|(_, has_help, _)| *has_help)
    );
}
