//! The requests of a guest are carried out.
use crate::client::{ALL, Client, QUEUE_SIZE, SLOT, SLOTS};
use crate::served::{SIZE, Served};
use memfold_testkit::random::{Random, seed};
use std::thread;
use virtio_driver::{VirtioBlkFeatureFlags as Feature, VirtioFeatureFlags, VirtioTransport};

const EIO: i32 = -libc::EIO;

fn noise(random: &mut Random, len: usize) -> Vec<u8> {
    // Every other 64 bytes are zeros, so that there is something to compress.
    (0..len / 8)
        .flat_map(|n| if n / 8 % 2 == 0 { random.word() } else { 0 }.to_le_bytes())
        .collect()
}

/// Compares random requests of all kinds with a vector of bytes.
fn compare(features: VirtioFeatureFlags) {
    let server = Served::new();
    let mut client = Client::with(&server, 1, features);
    let (mut random, mut expected) = (Random::new(seed(1)), vec![0; SIZE as usize]);
    for _ in 0..600 {
        let len = match random.below(4) {
            0 => 512 * (1 + random.below(16)),
            1 => 4096 * (1 + random.below(8)),
            2 => 512 * (1 + random.below(SLOT / 512)),
            _ => 16384,
        };
        let grain = random.pick(&[512, 4096, 16384]);
        let at = random.below((SIZE as usize - len) / grain) * grain;
        let (line, part) = (client.line(), &mut expected[at..at + len]);
        match random.below(8) {
            0 => {
                line.discard(at as u64, len as u64).unwrap();
                part.fill(0);
            }
            1 => {
                line.write_zeroes(at as u64, len as u64, random.below(2) == 0).unwrap();
                part.fill(0);
            }
            2 | 3 => assert!(line.read(at as u64, len).unwrap() == part, "{len} bytes at {at}"),
            4 => line.flush().unwrap(),
            _ => {
                part.copy_from_slice(&noise(&mut random, len));
                line.write(at as u64, part).unwrap();
            }
        }
    }
    assert!(server.bytes(0, SIZE as usize) == expected);
}

#[test]
fn every_byte_is_what_was_last_written() {
    compare(ALL);
}

#[test]
fn driver_without_event_indices_or_indirect_tables_works() {
    compare(VirtioFeatureFlags::VERSION_1);
}

#[test]
fn queues_are_served_at_the_same_time() {
    let server = Served::with(false, 3);
    // More queues than threads: two of them share one.
    let mut client = Client::new(&server, 4);
    let part = SIZE / 4;
    thread::scope(|scope| {
        for (n, line) in client.lines.iter_mut().enumerate() {
            scope.spawn(move || {
                let (first, mut random) = (n as u64 * part, Random::new(n as u64 + 7));
                let blocks = part / 8192;
                // Slots are reused when their request has its answer, in any order.
                let mut free: Vec<usize> = (0..SLOTS).collect();
                for block in 0..blocks {
                    if free.is_empty() {
                        let (slot, error) = line.answer();
                        assert_eq!(error, 0);
                        free.push(slot);
                    }
                    let slot = free.pop().unwrap();
                    let mut bytes = noise(&mut random, 8192);
                    bytes[..8].copy_from_slice(&(first + block).to_le_bytes());
                    line.put(slot, &bytes);
                    line.send_write(first + block * 8192, slot, 8192);
                }
                while free.len() < SLOTS {
                    free.push(line.answer().0);
                }
                let mut random = Random::new(n as u64 + 7);
                for block in 0..blocks {
                    let mut block_bytes = noise(&mut random, 8192);
                    block_bytes[..8].copy_from_slice(&(first + block).to_le_bytes());
                    assert!(
                        line.read(first + block * 8192, 8192).unwrap() == block_bytes,
                        "queue {n}, block {block}"
                    );
                }
            });
        }
    });
}

#[test]
fn a_queue_full_of_requests_is_answered_whole() {
    let server = Served::new();
    let mut client = Client::new(&server, 1);
    client.line().write(0, &[7; 4096]).unwrap();
    for _ in 0..200 {
        for _ in 0..QUEUE_SIZE / 3 {
            client.line().send_read(0, 1, 4096);
        }
        for _ in 0..QUEUE_SIZE / 3 {
            assert_eq!(client.line().answer(), (1, 0));
        }
    }
    assert_eq!(client.line().get(1, 4096), [7; 4096]);
}

#[test]
fn the_disk_says_what_it_is() {
    let server = Served::new();
    let client = Client::new(&server, 1);
    let config = client.config();
    assert_eq!(u64::from(config.capacity), SIZE / 512);
    assert_eq!(u32::from(config.blk_size), 512);
    assert_eq!(
        (config.physical_block_exp, u32::from(config.opt_io_size)),
        (3, 32),
        "4 KiB; blocks of 16 KiB"
    );
    assert_eq!(u32::from(config.seg_max), 126);
    assert_eq!((u32::from(config.max_discard_seg), config.write_zeroes_may_unmap), (256, 1));
    assert_eq!((u16::from(config.num_queues), client.transport.max_queues()), (64, Some(64)));
    let features = Feature::from_bits_truncate(client.transport.get_features());
    assert!(
        features.contains(Feature::FLUSH | Feature::DISCARD | Feature::WRITE_ZEROES | Feature::MQ)
    );
    assert!(!features.contains(Feature::RO));
}

#[test]
fn a_disk_for_reading_only_says_so_and_refuses_writes() {
    let server = Served::with(true, 1);
    let mut client = Client::new(&server, 1);
    let features = Feature::from_bits_truncate(client.transport.get_features());
    assert!(
        features.contains(Feature::RO)
            && !features.intersects(Feature::DISCARD | Feature::WRITE_ZEROES)
    );
    assert_eq!(client.line().write(0, &[1; 512]), Err(EIO));
    assert_eq!(client.line().discard(0, 512), Err(EIO));
    assert_eq!(client.line().write_zeroes(0, 512, true), Err(EIO));
    assert_eq!(client.line().read(0, 512), Ok(vec![0; 512]));
}

#[test]
fn beyond_the_end_is_an_error_and_the_next_request_is_none() {
    let server = Served::new();
    let mut client = Client::new(&server, 1);
    assert_eq!(client.line().write(SIZE - 512, &[1; 1024]), Err(EIO));
    assert_eq!(client.line().read(SIZE, 512), Err(EIO));
    assert_eq!(client.line().read(SIZE - 512, 512), Ok(vec![0; 512]));
}

#[test]
fn discarded_memory_comes_back() {
    let server = Served::new();
    let mut client = Client::new(&server, 1);
    let mut random = Random::new(3);
    for block in 0..8 {
        client.line().write(block * SLOT as u64, &random.noise(SLOT)).unwrap();
    }
    client.line().discard(0, 8 * SLOT as u64).unwrap();
    assert_eq!(server.device.check().unwrap(), (0, 0), "objects are left");
}
