//! Valid and invalid requests of a guest to a device.
use super::config::QUEUE_SIZE_MAX;
use super::request::{DESCRIPTORS_MAX, RANGES_MAX};
use super::ring::{SharedGuestMap, VhostRing};
use super::session::{PUT_OFF, VhostDisk, VhostSession};
use super::spans::GuestMap;
use super::worker::{NextRequest, QueueWorker};
use crate::device::{Device, DeviceMemory, MemorySettings, RangeStatus, SECTOR_BYTES};
use crate::export::Export;
use std::sync::Arc;
use std::time::Duration;
use vhost_user_backend::{VhostUserBackend, VringT};
use virtio_bindings::virtio_blk as blk;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, Le16, Le32};
use vmm_sys_util::epoll::EventSet;

const SIZE: u64 = 1 << 20;
/// The guest's memory: its queue, and then the bytes of requests.
const MEMORY: usize = 4 << 20;
const DESCRIPTORS: u64 = 0;
const AVAILABLE: u64 = 0x10000;
const USED: u64 = 0x20000;
const DATA: u64 = 0x100000;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

const OK: u8 = blk::VIRTIO_BLK_S_OK as u8;
const ERROR: u8 = blk::VIRTIO_BLK_S_IOERR as u8;
const UNSUPPORTED: u8 = blk::VIRTIO_BLK_S_UNSUPP as u8;
/// The byte of a status before there is one.
const NONE: u8 = 0xee;

/// A guest with a queue, and the thread that serves it.
struct Guest {
    export: Export,
    worker: QueueWorker,
    memory: GuestMap,
    queue: Queue,
    sent: u16,
    /// Position of the next bytes.
    free: u64,
}

/// A part of a request.
enum Part<'a> {
    Says(&'a [u8]),
    /// Room of this many bytes for the answer.
    Takes(u32),
    /// A descriptor with any content.
    Raw(u64, u32, u16),
}
use Part::{Raw, Says, Takes};

impl Guest {
    fn new() -> Guest {
        Guest::with(false)
    }

    fn with(read_only: bool) -> Guest {
        let backing =
            DeviceMemory::new(&MemorySettings { pools: 1, ..MemorySettings::default() }).unwrap();
        let device = Device::new(&backing, SIZE).unwrap();
        let export = Export::new("a disk with quite a long name", device, read_only, 512);
        let memory = GuestMap::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap();
        let mut queue = Queue::new(QUEUE_SIZE_MAX as u16).unwrap();
        queue.try_set_desc_table_address(GuestAddress(DESCRIPTORS)).unwrap();
        queue.try_set_avail_ring_address(GuestAddress(AVAILABLE)).unwrap();
        queue.try_set_used_ring_address(GuestAddress(USED)).unwrap();
        queue.set_ready(true);
        Guest { worker: QueueWorker::new(&export), export, memory, queue, sent: 0, free: DATA }
    }

    fn put(&mut self, bytes: &[u8]) -> u64 {
        let at = self.free;
        self.memory.write_slice(bytes, GuestAddress(at)).unwrap();
        self.free += bytes.len() as u64;
        at
    }

    fn descriptor(&self, table: u64, index: u16, descriptor: Descriptor) {
        self.memory.write_obj(descriptor, GuestAddress(table + u64::from(index) * 16)).unwrap();
    }

    /// Writes the parts as a chain from the table's first descriptor on. Returns the positions of
    /// the answer's parts.
    fn lay_out(&mut self, table: u64, parts: &[Part]) -> Vec<(u64, u32)> {
        let mut answers = Vec::new();
        for (index, part) in parts.iter().enumerate() {
            let index = index as u16;
            let next = if usize::from(index) + 1 < parts.len() { NEXT } else { 0 };
            let (at, len, flags) = match *part {
                Says(bytes) => (self.put(bytes), bytes.len() as u32, next),
                Takes(len) => {
                    let at = self.put(&vec![NONE; len as usize]);
                    answers.push((at, len));
                    (at, len, next | WRITE)
                }
                Raw(at, len, flags) => (at, len, flags | next),
            };
            self.descriptor(table, index, Descriptor::new(at, len, flags, index + 1));
        }
        answers
    }

    /// Offers the chain that begins with a descriptor, and serves it.
    fn offer(&mut self, head: u16) -> NextRequest {
        let slot = u64::from(self.sent) % QUEUE_SIZE_MAX as u64;
        self.memory.write_obj(Le16::from(head), GuestAddress(AVAILABLE + 4 + 2 * slot)).unwrap();
        self.sent += 1;
        self.memory.write_obj(Le16::from(self.sent), GuestAddress(AVAILABLE + 2)).unwrap();
        self.worker.serve_next(&self.export, &self.memory, &mut self.queue)
    }

    /// Serves a request in parts. Returns the answer: all bytes that were to be written, the status
    /// last.
    fn ask(&mut self, parts: &[Part]) -> Vec<u8> {
        self.free = DATA;
        let answers = self.lay_out(DESCRIPTORS, parts);
        assert_eq!(self.offer(0), NextRequest::Served);
        self.bytes(&answers)
    }

    fn bytes(&self, answers: &[(u64, u32)]) -> Vec<u8> {
        let mut all = Vec::new();
        for (at, len) in answers {
            let start = all.len();
            all.resize(start + *len as usize, 0);
            self.memory.read_slice(&mut all[start..], GuestAddress(*at)).unwrap();
        }
        all
    }

    fn status(&mut self, parts: &[Part]) -> u8 {
        *self.ask(parts).last().unwrap()
    }

    /// Returns what the device reports as written by the last request.
    fn used_bytes(&self) -> u32 {
        let slot = u64::from(self.sent - 1) % QUEUE_SIZE_MAX as u64;
        u32::from(self.memory.read_obj::<Le32>(GuestAddress(USED + 4 + 8 * slot + 4)).unwrap())
    }

    fn device(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.export.device().read(&mut self.export.device().io(), at, &mut bytes).unwrap();
        bytes
    }

    fn fill(&self) {
        let bytes: Vec<u8> = (0..SIZE).map(|at| (at / 7) as u8 | 1).collect();
        self.export.device().write(&mut self.export.device().io(), 0, &bytes).unwrap();
    }
}

fn header(kind: u32, sector: u64) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat()
}

fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
}

const READ: u32 = blk::VIRTIO_BLK_T_IN;
const WRITES: u32 = blk::VIRTIO_BLK_T_OUT;
const FLUSH: u32 = blk::VIRTIO_BLK_T_FLUSH;
const IDENTIFY: u32 = blk::VIRTIO_BLK_T_GET_ID;
const DISCARD: u32 = blk::VIRTIO_BLK_T_DISCARD;
const ZEROES: u32 = blk::VIRTIO_BLK_T_WRITE_ZEROES;

#[test]
fn written_data_is_read_back() {
    let mut guest = Guest::new();
    let bytes: Vec<u8> = (0..3 * 512_u32).map(|n| (n * 7 + n / 256) as u8).collect();
    assert_eq!(guest.ask(&[Says(&header(WRITES, 5)), Says(&bytes), Takes(1)]), [OK]);
    assert_eq!(guest.used_bytes(), 1);
    assert_eq!(guest.device(5 * 512, bytes.len()), bytes);
    let answer = guest.ask(&[Says(&header(READ, 5)), Takes(3 * 512), Takes(1)]);
    assert_eq!(guest.used_bytes(), 3 * 512 + 1);
    assert_eq!(answer, [&bytes[..], &[OK]].concat());
}

#[test]
fn a_request_may_be_cut_anywhere() {
    let mut guest = Guest::new();
    let bytes: Vec<u8> = (0..1024_u32).map(|n| (n * 13) as u8).collect();
    let says = [header(WRITES, 9), bytes.clone()].concat();
    let (first, second, third) = (&says[..3], &says[3..700], &says[700..]);
    assert_eq!(guest.status(&[Says(first), Says(&[]), Says(second), Says(third), Takes(1)]), OK);
    // The status is the last byte, wherever that is.
    let answer =
        guest.ask(&[Says(&header(READ, 9)), Takes(1), Takes(600), Takes(1025 - 601), Takes(0)]);
    assert_eq!(answer, [&bytes[..], &[OK]].concat());
}

#[test]
fn an_indirect_table_is_a_chain() {
    let mut guest = Guest::new();
    guest.fill();
    let table = 0x30000;
    let answers = guest.lay_out(table, &[Says(&header(READ, 1)), Takes(512), Takes(1)]);
    guest.descriptor(DESCRIPTORS, 7, Descriptor::new(table, 3 * 16, INDIRECT, 0));
    assert_eq!(guest.offer(7), NextRequest::Served);
    assert_eq!(guest.bytes(&answers), [&guest.device(512, 512)[..], &[OK]].concat());
}

#[test]
fn a_request_larger_than_what_is_copied_at_once_is_whole() {
    let mut guest = Guest::new();
    let bytes: Vec<u8> = (0..SIZE - 1024).map(|n| (n / 100) as u8).collect();
    assert_eq!(guest.status(&[Says(&header(WRITES, 1)), Says(&bytes), Takes(1)]), OK);
    let stats = guest.export.device().stats();
    // No block was split except the first and the last, which the request does not cover.
    assert_eq!(stats.block_writes, SIZE / guest.export.device().block_bytes() as u64 - 2);
    let answer = guest.ask(&[Says(&header(READ, 1)), Takes(bytes.len() as u32), Takes(1)]);
    assert!(answer == [&bytes[..], &[OK]].concat());
}

#[test]
fn beyond_the_end_nothing_is_read_or_written() {
    let mut guest = Guest::new();
    guest.fill();
    let (before, end) = (guest.device(0, SIZE as usize), SIZE / SECTOR_BYTES);
    let data = [0x55; 1024];
    for sector in [
        end,
        end - 1,
        end + 1,
        u64::MAX,
        u64::MAX / 512,
        u64::MAX / 512 + 1,
        1 << 55,
        (1 << 55) - 1,
    ] {
        assert_eq!(
            guest.status(&[Says(&header(WRITES, sector)), Says(&data), Takes(1)]),
            ERROR,
            "{sector}"
        );
        let answer = guest.ask(&[Says(&header(READ, sector)), Takes(1024), Takes(1)]);
        assert_eq!(answer, [&[NONE; 1024][..], &[ERROR]].concat(), "{sector}");
        let zeroes = range(sector, 2, 0);
        assert_eq!(
            guest.status(&[Says(&header(ZEROES, 0)), Says(&zeroes), Takes(1)]),
            ERROR,
            "{sector}"
        );
    }
    assert!(guest.device(0, SIZE as usize) == before);
    assert_eq!(guest.export.device().stats().invalid, 8 * 3);
}

#[test]
fn parts_of_sectors_are_refused() {
    let mut guest = Guest::new();
    for len in [1, 511, 513, 1000] {
        assert_eq!(guest.status(&[Says(&header(WRITES, 0)), Says(&vec![1; len]), Takes(1)]), ERROR);
        assert_eq!(guest.status(&[Says(&header(READ, 0)), Takes(len as u32), Takes(1)]), ERROR);
    }
    assert_eq!(guest.device(0, 2048), [0; 2048]);
}

#[test]
fn memory_that_the_guest_does_not_have_is_an_error() {
    let mut guest = Guest::new();
    guest.fill();
    let end = MEMORY as u64;
    for (at, len) in
        [(end, 512), (end - 256, 512), (u64::MAX - 511, 512), (u64::MAX - 5, 512), (1 << 40, 1024)]
    {
        assert_eq!(
            guest.status(&[Says(&header(WRITES, 0)), Raw(at, len, 0), Takes(1)]),
            ERROR,
            "{at:x}"
        );
        assert_eq!(
            guest.status(&[Says(&header(READ, 0)), Raw(at, len, WRITE), Takes(1)]),
            ERROR,
            "{at:x}"
        );
        assert_eq!(
            guest.status(&[Raw(at.max(end - 8), 16, 0), Says(&[0; 512]), Takes(1)]),
            ERROR,
            "{at:x}"
        );
        // There is no room for a status, so only the used ring shows the end.
        assert_eq!(guest.ask(&[Says(&header(READ, 0)), Raw(at, len, WRITE)]), [0_u8; 0]);
        assert_eq!(guest.used_bytes(), 0);
    }
}

#[test]
fn lengths_of_gigabytes_take_no_memory() {
    let mut guest = Guest::new();
    for len in [u32::MAX - 1000, !511, 1 << 31] {
        assert_eq!(guest.status(&[Says(&header(WRITES, 0)), Raw(0, len, 0), Takes(1)]), ERROR);
        assert_eq!(guest.status(&[Says(&header(READ, 0)), Raw(0, len, WRITE), Takes(1)]), ERROR);
        assert_eq!(guest.status(&[Says(&header(DISCARD, 0)), Raw(0, len, 0), Takes(1)]), ERROR);
    }
    // More than 2^32 bytes: the chain ends before its status.
    let parts =
        [Says(&header(READ, 0)), Raw(DATA, u32::MAX, WRITE), Raw(DATA, u32::MAX, WRITE), Takes(1)];
    assert_eq!(guest.ask(&parts), [NONE]);
}

#[test]
fn a_chain_that_never_ends_is_an_error() {
    let mut guest = Guest::new();
    let at = guest.put(&header(READ, 0));
    guest.descriptor(DESCRIPTORS, 0, Descriptor::new(at, 16, NEXT, 1));
    guest.descriptor(DESCRIPTORS, 1, Descriptor::new(DATA + 512, 512, NEXT | WRITE, 2));
    guest.descriptor(DESCRIPTORS, 2, Descriptor::new(DATA + 1024, 1, NEXT | WRITE, 1));
    assert_eq!(guest.offer(0), NextRequest::Served);
    // A chain through its own tail, into itself, or to an invalid descriptor.
    for next in [0, 2, QUEUE_SIZE_MAX as u16, u16::MAX] {
        guest.descriptor(DESCRIPTORS, 2, Descriptor::new(DATA + 1024, 1, NEXT | WRITE, next));
        assert_eq!(guest.offer(0), NextRequest::Served);
        assert_eq!(guest.bytes(&[(DATA + 1024, 1)]), [ERROR]);
    }
}

#[test]
fn a_head_that_is_no_descriptor_ends_no_queue() {
    let mut guest = Guest::new();
    for head in [QUEUE_SIZE_MAX as u16, u16::MAX] {
        assert_eq!(guest.offer(head), NextRequest::Nonsense);
    }
    guest.sent -= 2;
    guest.memory.write_obj(Le16::from(guest.sent), GuestAddress(AVAILABLE + 2)).unwrap();
    // More requests than the ring can hold.
    guest.queue.set_next_avail(guest.sent.wrapping_sub(QUEUE_SIZE_MAX as u16 + 1));
    assert_eq!(
        guest.worker.serve_next(&guest.export, &guest.memory, &mut guest.queue),
        NextRequest::Nonsense
    );
    guest.queue.set_next_avail(guest.sent);
    assert_eq!(guest.status(&[Says(&header(FLUSH, 0)), Takes(1)]), OK);
}

#[test]
fn an_indirect_table_within_another_or_of_no_size_is_an_error() {
    let mut guest = Guest::new();
    let table = 0x30000;
    for len in [0, 8, 16 * 65536, !15] {
        guest.descriptor(DESCRIPTORS, 0, Descriptor::new(table, len, INDIRECT, 0));
        guest.descriptor(table, 0, Descriptor::new(table, 16, INDIRECT, 0));
        assert_eq!(guest.offer(0), NextRequest::Served);
        assert_eq!(guest.used_bytes(), 0);
    }
}

#[test]
fn more_descriptors_than_a_queue_has_are_refused() {
    let mut guest = Guest::new();
    let (table, count) = (0x200000, DESCRIPTORS_MAX as u16 + 1);
    let at = guest.put(&header(READ, 0));
    guest.descriptor(table, 0, Descriptor::new(at, 16, NEXT, 1));
    for index in 1..=count {
        let next = if index < count { NEXT } else { 0 };
        guest.descriptor(
            table,
            index,
            Descriptor::new(DATA + 512 + u64::from(index), 1, next | WRITE, index + 1),
        );
    }
    guest.descriptor(
        DESCRIPTORS,
        0,
        Descriptor::new(table, 16 * (u32::from(count) + 1), INDIRECT, 0),
    );
    assert_eq!(guest.offer(0), NextRequest::Served);
    assert_eq!(guest.used_bytes(), 1);
}

#[test]
fn chain_without_a_request_is_an_error() {
    let mut guest = Guest::new();
    assert_eq!(guest.status(&[Takes(1)]), ERROR);
    assert_eq!(guest.status(&[Says(&[0; 15]), Takes(1)]), ERROR);
    // The driver's bytes continue after room for the answer.
    assert_eq!(
        guest.status(&[Says(&header(READ, 0)), Takes(512), Says(&[0; 512]), Takes(1)]),
        ERROR
    );
    assert_eq!(guest.ask(&[Says(&header(WRITES, 0)), Says(&[1; 512])]), [0_u8; 0]);
    assert_eq!(guest.device(0, 512), [0; 512], "a write whose end nobody would hear of");
}

#[test]
fn unknown_requests_are_reported_as_unsupported() {
    let mut guest = Guest::new();
    for kind in
        [2, 3, 5, 12, blk::VIRTIO_BLK_T_SECURE_ERASE, blk::VIRTIO_BLK_T_ZONE_REPORT, u32::MAX]
    {
        assert_eq!(guest.status(&[Says(&header(kind, 0)), Takes(1)]), UNSUPPORTED, "{kind}");
    }
    for (kind, flags) in [(ZEROES, 2), (ZEROES, u32::MAX), (DISCARD, 1), (DISCARD, 2)] {
        let range = range(0, 1, flags);
        assert_eq!(
            guest.status(&[Says(&header(kind, 0)), Says(&range), Takes(1)]),
            UNSUPPORTED,
            "{kind}, {flags}"
        );
    }
}

#[test]
fn discarding_and_zeroing_are_exact_to_the_sector() {
    for (kind, flags, status) in [
        (DISCARD, 0, RangeStatus::Hole),
        (ZEROES, 1, RangeStatus::Hole),
        (ZEROES, 0, RangeStatus::Zeros),
    ] {
        let mut guest = Guest::new();
        guest.fill();
        let mut expected = guest.device(0, SIZE as usize);
        let ranges = [
            range(3, 5, flags),
            range(64, 64, flags),
            range(SIZE / 512 - 1, 1, flags),
            range(7, 0, flags),
        ];
        assert_eq!(guest.status(&[Says(&header(kind, 0)), Says(&ranges.concat()), Takes(1)]), OK);
        for range in [3..8, 64..128, SIZE as usize / 512 - 1..SIZE as usize / 512] {
            expected[range.start * 512..range.end * 512].fill(0);
        }
        assert!(guest.device(0, SIZE as usize) == expected);
        let check = |run, run_status| {
            assert_eq!((run, run_status), (64 * 512, status));
            false
        };
        guest.export.device().status(64 * 512, 64 * 512, check).unwrap();
    }
}

#[test]
fn nothing_is_zeroed_if_one_range_makes_no_sense() {
    let mut guest = Guest::new();
    guest.fill();
    let before = guest.device(0, SIZE as usize);
    for bad in
        [range(SIZE / 512, 1, 0), range(0, u32::MAX, 0), range(u64::MAX, 1, 0), range(1, 1, 2)]
    {
        let ranges = [range(0, 8, 0), bad].concat();
        assert_ne!(guest.status(&[Says(&header(ZEROES, 0)), Says(&ranges), Takes(1)]), OK);
    }
    for len in [0, 15, 17, 16 * (RANGES_MAX + 1)] {
        assert_eq!(
            guest.status(&[Says(&header(DISCARD, 0)), Says(&vec![0; len]), Takes(1)]),
            ERROR,
            "{len}"
        );
    }
    assert!(guest.device(0, SIZE as usize) == before);
}

#[test]
fn a_disk_for_reading_only_is_not_changed() {
    let mut guest = Guest::with(true);
    guest.fill();
    let before = guest.device(0, SIZE as usize);
    assert_eq!(guest.status(&[Says(&header(WRITES, 0)), Says(&[1; 512]), Takes(1)]), ERROR);
    for kind in [DISCARD, ZEROES] {
        assert_eq!(guest.status(&[Says(&header(kind, 0)), Says(&range(0, 1, 0)), Takes(1)]), ERROR);
    }
    assert_eq!(guest.status(&[Says(&header(FLUSH, 0)), Takes(1)]), OK);
    assert_eq!(
        guest.ask(&[Says(&header(READ, 0)), Takes(512), Takes(1)]),
        [&before[..512], &[OK]].concat()
    );
    assert!(guest.device(0, SIZE as usize) == before);
}

#[test]
fn a_disk_says_its_name() {
    let mut guest = Guest::new();
    let answer = guest.ask(&[Says(&header(IDENTIFY, 0)), Takes(20), Takes(1)]);
    assert_eq!(answer, [&b"a disk with quite a "[..], &[OK]].concat());
    assert_eq!(guest.status(&[Says(&header(IDENTIFY, 0)), Takes(19), Takes(1)]), ERROR);
}

#[test]
fn turn_of_a_queue_ends_although_it_has_more() {
    let mut guest = Guest::new();
    // One request many times, all offered before any is served.
    let answers = guest.lay_out(DESCRIPTORS, &[Says(&header(READ, 1)), Takes(512), Takes(1)]);
    let count = 5_u16;
    for n in 0..u64::from(count) {
        guest.memory.write_obj(Le16::from(0), GuestAddress(AVAILABLE + 4 + 2 * n)).unwrap();
    }
    guest.memory.write_obj(Le16::from(count), GuestAddress(AVAILABLE + 2)).unwrap();
    let memory = SharedGuestMap::new(guest.memory.clone());
    let ring = VhostRing::new(memory.clone(), QUEUE_SIZE_MAX as u16).unwrap();
    *ring.get_mut().get_queue_mut() = guest.queue;
    ring.set_enabled(true);
    let disk = Arc::new(VhostDisk::new(Arc::new(guest.export), 1, Duration::ZERO));
    let session = VhostSession::new(disk, memory).unwrap();
    let rings = [ring];
    let serve = |event| session.handle_event(event, EventSet::IN, &rings, 0).unwrap();
    let used_count = || guest.memory.read_obj::<Le16>(GuestAddress(USED + 2)).unwrap();
    serve(0);
    for n in 1..=count {
        assert_eq!(used_count(), n, "one request for each turn");
        serve(PUT_OFF);
    }
    assert_eq!(used_count(), count);
    let mut status = [NONE];
    guest.memory.read_slice(&mut status, GuestAddress(answers[1].0)).unwrap();
    assert_eq!(status, [OK]);
}

#[test]
fn a_full_device_is_an_error_and_takes_writes_again() {
    let backing = DeviceMemory::new(&MemorySettings {
        limit_bytes: 8 << 20,
        pools: 1,
        ..MemorySettings::default()
    })
    .unwrap();
    let device = Device::new(&backing, 64 << 20).unwrap();
    let mut guest = Guest::new();
    guest.export = Export::new("", device, false, 512);
    guest.worker = QueueWorker::new(&guest.export);
    let noise = memfold_testkit::random::Random::new(1).noise(1 << 20);
    let write = |guest: &mut Guest, at: u64| {
        guest.status(&[Says(&header(WRITES, at)), Says(&noise), Takes(1)])
    };
    let full =
        (0..32).find(|n| write(&mut guest, n * 2048) != OK).expect("more than the limit was held");
    assert_eq!(guest.status(&[Says(&header(DISCARD, 0)), Says(&range(0, 8192, 0)), Takes(1)]), OK);
    assert_eq!(write(&mut guest, full * 2048), OK);
}
