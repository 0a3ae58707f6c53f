//! Writeback and recompression: no byte changes, and a full file or limit fails only the writes
//! that need room.
use super::*;
use super::{Pair, noise};
use crate::device::holder::SlotHolder;
use memfold_store::{CodecSpec, Handle};
use memfold_testkit::fill::fill;
use memfold_testkit::random::{Random, seed};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

const PAGE: u64 = PAGE_SIZE as u64;

#[test]
fn random_requests_match_a_byte_vector_during_writeback() {
    let mut random = Random::new(seed(30));
    for order in [0, 2, 4] {
        let mut pair =
            Pair::new(&spilling(order, 0, spill_settings(1 << 30, None)), (2 << 20) + 1536);
        let end = pair.device.size();
        for turn in 0..8 {
            for _ in 0..60 {
                pair.any_request(&mut random, 0..end);
            }
            let pick = random.pick(&[
                ObjectPick::All,
                ObjectPick::Huge,
                ObjectPick::Idle,
                ObjectPick::All,
            ]);
            pair.device.backing.mark_idle(Duration::ZERO);
            let bytes = pair.device.backing.write_back(pick).unwrap();
            assert!(
                bytes > 0 || turn > 0 || pick == ObjectPick::Huge,
                "order {order}: nothing left memory"
            );
            if turn % 3 == 0 {
                pair.check();
            }
        }
        pair.check();
        let spill = pair.device.backing.stats().spill.unwrap();
        assert!(
            spill.objects > 0
                && spill.read_bytes > 0
                && spill.failed_reads + spill.failed_writes == 0,
            "{spill:?}"
        );
        // A dropped device holds nothing, in memory or in the file.
        let backing = pair.device.backing.clone();
        drop(pair);
        let (stats, spill) = (backing.stats(), backing.stats().spill.unwrap());
        assert_eq!(
            (stats.store.objects, stats.table_bytes, spill.objects, spill.original_bytes),
            (0, 0, 0, 0)
        );
    }
}

/// A slow writer ends its write after the object was freed and its handle reused.
#[test]
fn object_of_the_same_handle_with_other_bytes_is_not_replaced() {
    let mut pair = Pair::new(&spilling(0, 0, spill_settings(1 << 30, None)), 1 << 20);
    let backing = pair.device.backing.clone();
    let holder_handle = || {
        let mut handle = None;
        backing.store.each_object(|cold| {
            handle = Some(*cold);
            false
        });
        handle.expect("a page of noise is an object")
    };
    pair.write(0, &noise(0, PAGE_SIZE)).unwrap();
    let cold = holder_handle();
    let wraps = (1..1 << 16).any(|n| {
        pair.write(0, &noise(n, PAGE_SIZE)).unwrap();
        holder_handle().handle == cold.handle
    });
    assert!(wraps, "the generation wraps");
    assert!(!pair.device.replace(&cold, Handle::ZERO));
    pair.check();
}

#[test]
fn device_above_its_limit_takes_writes_while_the_file_has_room() {
    let limit = 8 << 20;
    let mut pair = Pair::new(&spilling(2, limit, spill_settings(1 << 30, None)), 40 << 20);
    for at in (0..40).map(|n| n << 20) {
        pair.write(at, &noise(at, 1 << 20)).unwrap();
        // This holds for single pages too.
        pair.write(at + PAGE, &noise(at, 8192)).unwrap();
    }
    let stats = pair.device.backing.stats();
    assert!(stats.held_bytes <= limit + (64 << 10), "{} bytes held", stats.held_bytes);
    assert!(stats.spill.unwrap().original_bytes > 30 << 20);
    pair.check();
}

#[test]
fn threads_past_the_limit_beside_tidying_lose_no_byte() {
    let backing = spilling(2, 8 << 20, spill_settings(1 << 30, None));
    let device = Device::new(&backing, 32 << 20).unwrap();
    thread::scope(|scope| {
        let tender = scope.spawn(|| backing.tend(Duration::from_millis(5)));
        let writers: Vec<_> = (0..4u64)
            .map(|n| {
                let device = &device;
                scope.spawn(move || {
                    let (mut io, mut random) = (device.io(), Random::new(n));
                    let mut own = vec![0u8; 8 << 20];
                    for _ in 0..250 {
                        let len = 1 + random.below(60_000);
                        let at = random.below(own.len() - len);
                        fill(&mut random, &mut own[at..at + len]);
                        device.write(&mut io, (n << 23) + at as u64, &own[at..at + len]).unwrap();
                        let at = random.below(own.len() - 5000);
                        let mut bytes = [0; 5000];
                        device.read(&mut io, (n << 23) + at as u64, &mut bytes).unwrap();
                        assert!(bytes == own[at..at + 5000]);
                    }
                    let mut bytes = vec![0; own.len()];
                    device.read(&mut io, n << 23, &mut bytes).unwrap();
                    assert!(bytes == own, "thread {n}");
                })
            })
            .collect();
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        backing.stop();
        tender.join().unwrap();
    });
    let (objects, spilled_objects) = device.check().unwrap();
    assert_eq!(
        (objects, spilled_objects),
        (backing.stats().store.objects, backing.stats().spill.unwrap().objects)
    );
    assert!(spilled_objects > 0);
}

#[test]
fn full_file_or_spent_writeback_limit_keeps_every_byte() {
    for spill in [spill_settings(4 << 20, None), spill_settings(1 << 30, Some(3 << 20))] {
        let is_limited = spill.limit_bytes.is_some();
        let mut pair = Pair::new(&spilling(2, 8 << 20, spill), 24 << 20);
        let mut at = 0;
        while pair.write(at, &noise(at, 100_000)).is_ok() {
            at += 100_000;
        }
        assert!(at > 8 << 20 && at < 14 << 20, "{at}");
        assert_eq!(
            pair.device.write(&mut pair.device.io(), 20 << 20, &noise(9, 16384)),
            Err(IoError::NoSpace)
        );
        let error = pair.device.backing.stats().spill.unwrap().error.unwrap();
        assert!(error.contains(if is_limited { "limit" } else { "full" }), "{error}");
        pair.check();
        // There is room again after a discard, or after the limit is raised.
        if is_limited {
            assert!(pair.device.backing.set_writeback_limit(None));
            pair.write(20 << 20, &noise(9, 4 << 20)).unwrap();
        } else {
            pair.zero(0, 6 << 20, ZeroPolicy::Hole);
            pair.write(20 << 20, &noise(9, 1 << 20)).unwrap();
        }
        pair.check();
    }
}

#[test]
fn full_file_system_fails_writes_and_limit_holds() {
    let limit = 8 << 20;
    let spill = SpillSettings { keep_free_bytes: u64::MAX, ..spill_settings(1 << 30, None) };
    let mut pair = Pair::new(&spilling(2, limit, spill), 24 << 20);
    let mut at = 0;
    while pair.write(at, &noise(at, 100_000)).is_ok() {
        at += 100_000;
    }
    assert!(at > 5 << 20, "{at}");
    let stats = pair.device.backing.stats();
    assert_eq!(stats.spill.unwrap().objects, 0);
    assert!(stats.held_bytes <= limit, "{}", stats.held_bytes);
    pair.check();
}

#[test]
fn idle_and_huge_blocks_are_written_back() {
    let mut pair = Pair::new(&spilling(2, 0, spill_settings(1 << 30, None)), 8 << 20);
    let soft: Vec<u8> = (0..1u32 << 20).map(|i| (i / 50) as u8).collect();
    pair.write(0, &soft).unwrap();
    pair.write(1 << 20, &noise(1, 1 << 20)).unwrap();
    let backing = pair.device.backing.clone();
    assert_eq!(backing.write_back(ObjectPick::Idle), Some(0), "nothing was marked");
    backing.mark_idle(Duration::ZERO);
    pair.compare(0, 512 << 10);
    let (soft_left, huge_left) = (64, 64);
    let spilled_objects = || backing.stats().spill.unwrap().objects;
    backing.write_back(ObjectPick::HugeIdle).unwrap();
    assert_eq!(spilled_objects(), huge_left);
    backing.write_back(ObjectPick::Idle).unwrap();
    assert_eq!(spilled_objects(), huge_left + soft_left / 2, "what was read is idle no more");
    let mut offsets = Vec::new();
    backing.each_object(&pair.device, 0, |object| {
        offsets.push((object.offset, object.is_written_back, object.is_idle));
        true
    });
    assert_eq!(offsets.len(), 128);
    assert_eq!((offsets[0], offsets[32].1, offsets[127].1), ((0, false, false), true, true));
    backing.mark_idle(Duration::from_secs(3600));
    let idle = |pair: &Pair| {
        let mut count = 0;
        backing.each_object(&pair.device, 0, |object| {
            count += u64::from(object.is_idle);
            true
        });
        count
    };
    assert_eq!(idle(&pair), 0, "nothing is that old");
    pair.check();
}

#[test]
fn recompression_makes_objects_smaller_and_changes_no_byte() {
    let settings = MemorySettings {
        codec: CodecSpec::parse("lz4").unwrap(),
        pools: 2,
        ..MemorySettings::default()
    };
    let mut pair = Pair::new(&DeviceMemory::new(&settings).unwrap(), 8 << 20);
    let text: Vec<u8> = (0..1u32 << 20)
        .flat_map(|i| (i.wrapping_mul(i) >> 7).to_string().into_bytes())
        .take(4 << 20)
        .collect();
    pair.write(0, &text).unwrap();
    pair.write(4 << 20, &noise(3, 1 << 20)).unwrap();
    let backing = pair.device.backing.clone();
    let before = backing.stats().store.stored_bytes;
    let codec = CodecSpec::parse("zstd:6").unwrap();
    assert_eq!(backing.recompress(ObjectPick::Idle, codec, 0), RecompressResult::default());
    let stop = AtomicBool::new(false);
    let outcome = thread::scope(|scope| {
        scope.spawn(|| {
            let (mut io, mut bytes) = (pair.device.io(), vec![0; 16384]);
            while !stop.load(Relaxed) {
                for block in 0..256 {
                    pair.device.read(&mut io, block * 16384, &mut bytes).unwrap();
                    assert!(bytes == text[block as usize * 16384..][..16384]);
                }
            }
        });
        let result = backing.recompress(ObjectPick::All, codec, 0);
        stop.store(true, Relaxed);
        result
    });
    assert_eq!((outcome.tried, outcome.smaller), (320, 256));
    assert_eq!(before - backing.stats().store.stored_bytes, outcome.gained_bytes);
    assert_eq!(
        backing.recompress(ObjectPick::All, codec, 0),
        RecompressResult::default(),
        "nothing is tried twice"
    );
    assert_eq!(backing.write_back(ObjectPick::All), None, "there is no file");
    pair.check();
}
