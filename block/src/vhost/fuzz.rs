//! The fuzz target: a guest's memory of any bytes. Built only for tests and fuzzers.
use super::spans::GuestMap;
use super::worker::{NextRequest, QueueWorker};
use crate::device::{Device, DeviceMemory, MemorySettings};
use crate::export::Export;
use std::sync::{Mutex, OnceLock};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};

/// Position of the queue of 16 descriptors.
const DESCRIPTORS: u64 = 0;
const AVAILABLE: u64 = 0x100;
const USED: u64 = 0x200;
const QUEUE_SIZE: u16 = 16;
const MEMORY: usize = 0x10000;

/// Serves a guest whose memory begins with these bytes, the queue first. All requests get an
/// answer, and the device keeps its promises.
///
/// # Panics
/// If it doesn't.
pub fn queue(data: &[u8]) {
    static DISK: OnceLock<Mutex<(Export, QueueWorker)>> = OnceLock::new();
    let mut disk = DISK.get_or_init(|| Mutex::new(disk())).lock().expect("it panics but once");
    let (export, worker) = &mut *disk;
    let memory = GuestMap::from_ranges(&[(GuestAddress(0), MEMORY)]).expect("memory");
    memory.write_slice(&data[..data.len().min(MEMORY)], GuestAddress(0)).expect("it is there");
    let mut queue = Queue::new(QUEUE_SIZE).expect("a size");
    queue.try_set_desc_table_address(GuestAddress(DESCRIPTORS)).expect("aligned");
    queue.try_set_avail_ring_address(GuestAddress(AVAILABLE)).expect("aligned");
    queue.try_set_used_ring_address(GuestAddress(USED)).expect("aligned");
    queue.set_ready(true);
    let mut count = 0;
    // The guest's own requests may write more requests into its queue.
    while count < 4 * QUEUE_SIZE
        && worker.serve_next(export, &memory, &mut queue) == NextRequest::Served
    {
        count += 1;
    }
    assert_eq!(queue.next_used(), count);
    assert!(worker.is_of_fixed_size());
    export.device().check().expect("the device's promises");
}

fn disk() -> (Export, QueueWorker) {
    let backing = DeviceMemory::new(&MemorySettings {
        limit_bytes: 16 << 20,
        pools: 1,
        ..MemorySettings::default()
    });
    let device = Device::new(&backing.expect("a backing"), 256 << 10).expect("a device");
    let export = Export::new("", device, false, 512);
    let worker = QueueWorker::new(&export);
    (export, worker)
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_testkit::random::{Random, seed};
    use virtio_queue::desc::split::Descriptor;
    use vm_memory::ByteValued;

    /// Returns requests of every kind, as a driver writes them: header, data, status.
    fn good() -> Vec<u8> {
        let mut all = vec![0; 0x8000];
        let mut copy = |at: usize, bytes: &[u8]| all[at..at + bytes.len()].copy_from_slice(bytes);
        for (n, kind) in [0_u32, 1, 4, 8, 11, 13].into_iter().enumerate() {
            let (first, header, data) = (2 * n, 0x400 + 64 * n, 0x1000 + 0x800 * n);
            let (len, flags) = [(513, 3), (512, 1), (1, 3), (21, 3), (16, 1), (16, 1)][n];
            copy(header, &kind.to_le_bytes());
            copy(header + 8, &(n as u64).to_le_bytes());
            copy(data, &(n as u64).to_le_bytes());
            copy(data + 8, &8_u32.to_le_bytes());
            let head = Descriptor::new(header as u64, 16, 1, first as u16 + 1);
            copy(16 * first, head.as_slice());
            let last = if flags & 2 != 0 { 0 } else { 1 };
            copy(
                16 * (first + 1),
                Descriptor::new(data as u64, len, flags & 2 | last, 12).as_slice(),
            );
            copy(0x104 + 2 * n, &(first as u16).to_le_bytes());
        }
        copy(16 * 12, Descriptor::new(0x700, 1, 2, 0).as_slice());
        copy(0x102, &6_u16.to_le_bytes());
        all
    }

    #[test]
    fn the_seed_is_right() {
        let memory = GuestMap::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap();
        let (export, mut worker) = disk();
        memory.write_slice(&good(), GuestAddress(0)).unwrap();
        let mut ring = Queue::new(QUEUE_SIZE).unwrap();
        ring.try_set_avail_ring_address(GuestAddress(AVAILABLE)).unwrap();
        ring.try_set_used_ring_address(GuestAddress(USED)).unwrap();
        ring.set_ready(true);
        while worker.serve_next(&export, &memory, &mut ring) == NextRequest::Served {}
        assert_eq!(ring.next_used(), 6);
        for status in [0x1000 + 512, 0x700, 0x1000 + 0x1000, 0x1000 + 0x1800 + 20] {
            assert_eq!(memory.read_obj::<u8>(GuestAddress(status)).unwrap(), 0, "{status:x}");
        }
        let stats = export.device().stats();
        assert_eq!((stats.reads, stats.writes, stats.zeroings), (1, 1, 2));
    }

    #[test]
    fn a_guests_memory_of_any_bytes_breaks_nothing() {
        let (good, mut random) = (good(), Random::new(seed(1)));
        for round in 0..4000 {
            let mut bytes = good.clone();
            for _ in 0..1 + random.below(12) {
                // Mostly the queue and the headers.
                let at = random.below(if round % 4 == 0 { 0x8000 } else { 0x600 });
                bytes[at] = match random.below(4) {
                    0 => bytes[at] ^ 1 << random.below(8),
                    1 => 0xff,
                    2 => 0,
                    _ => random.word() as u8,
                };
            }
            if round % 8 == 0 {
                bytes[..0x600].iter_mut().for_each(|byte| *byte = random.word() as u8);
            }
            queue(&bytes);
        }
    }
}
