//! A VMM's side of the protocol, step by step, and a queue whose every byte can be chosen.
use crate::client::shared;
use crate::served::Served;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering::{Acquire, Release};
use vhost::vhost_user::message::VhostUserProtocolFeatures;
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_queue::desc::split::Descriptor;
use vm_memory::{ByteValued, Bytes, MmapRegion, VolatileMemory};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EventFd};

pub const MEMORY: usize = 1 << 20;
pub const QUEUE_SIZE: u16 = 16;
/// Where the guest's memory begins, as the guest sees it.
pub const GUEST: u64 = 0x1_0000_0000;
const DESCRIPTORS: u64 = 0;
const AVAILABLE: u64 = 0x400;
const USED: u64 = 0x800;
/// Bytes from one queue to the next.
const QUEUE: u64 = 0x1000;
/// Headers, data and statuses.
const REQUESTS: u64 = 0x10000;

/// A guest's memory, which outlives a connection.
pub struct Memory {
    file: File,
    pub region: MmapRegion,
}

impl Memory {
    pub fn new() -> Memory {
        let (file, region) = shared(MEMORY);
        Memory { file, region }
    }

    fn info(&self) -> VhostUserMemoryRegionInfo {
        VhostUserMemoryRegionInfo {
            guest_phys_addr: GUEST,
            memory_size: MEMORY as u64,
            userspace_addr: self.region.as_ptr() as u64,
            mmap_offset: 0,
            mmap_handle: self.file.as_raw_fd(),
        }
    }

    pub fn put<T: ByteValued>(&self, at: u64, value: T) {
        self.region.as_volatile_slice().write_obj(value, at as usize).unwrap();
    }

    pub fn get<T: ByteValued>(&self, at: u64) -> T {
        self.region.as_volatile_slice().read_obj(at as usize).unwrap()
    }

    /// Lays out a request to write a sector of `byte` as the three descriptors from `3 * n` on.
    pub fn lay_out_write(&self, queue: u64, n: u16, sector: u64, byte: u8) {
        let at = REQUESTS + (queue * u64::from(QUEUE_SIZE) + u64::from(n)) * 1024;
        self.put(at, [1_u64.to_le(), sector]);
        self.region.as_volatile_slice().write_slice(&[byte; 512], at as usize + 16).unwrap();
        self.put(at + 1000, 0xee_u8);
        let first = 3 * n;
        let parts = [(at, 16, 1), (at + 16, 512, 1), (at + 1000, 1, 2)];
        for (index, (at, len, flags)) in (first..).zip(parts) {
            let to = queue * QUEUE + DESCRIPTORS + 16 * u64::from(index);
            self.put(to, Descriptor::new(GUEST + at, len, flags, index + 1));
        }
    }

    pub fn status(&self, queue: u64, n: u16) -> u8 {
        self.get(REQUESTS + (queue * u64::from(QUEUE_SIZE) + u64::from(n)) * 1024 + 1000)
    }

    /// Offers the chains that begin with these descriptors, after `before` others.
    pub fn offer(&self, queue: u64, before: u16, heads: &[u16]) {
        for (n, head) in (before..).zip(heads) {
            self.put(queue * QUEUE + AVAILABLE + 4 + 2 * u64::from(n % QUEUE_SIZE), *head);
        }
        let index = before + heads.len() as u16;
        let at = (queue * QUEUE + AVAILABLE + 2) as usize;
        self.region.as_volatile_slice().store(index, at, Release).unwrap();
    }

    /// Returns how many requests of a queue have their answer.
    pub fn used(&self, queue: u64) -> u16 {
        self.region.as_volatile_slice().load((queue * QUEUE + USED + 2) as usize, Acquire).unwrap()
    }
}

/// A connection that has shared its memory.
pub struct Vmm {
    pub frontend: Frontend,
}

impl Vmm {
    pub fn new(served: &Served, memory: &Memory) -> Vmm {
        let mut frontend = Frontend::connect(served.path(), 64).unwrap();
        frontend.set_owner().unwrap();
        let features = frontend.get_features().unwrap();
        // No event indices: every answer sends an event.
        frontend.set_features(features & !(1 << 29)).unwrap();
        let features = frontend.get_protocol_features().unwrap();
        frontend.set_protocol_features(features & !VhostUserProtocolFeatures::REPLY_ACK).unwrap();
        frontend.set_mem_table(&[memory.info()]).unwrap();
        Vmm { frontend }
    }

    /// Starts a queue, which continues at `base`. Returns its events: for requests and for answers.
    pub fn start(&mut self, memory: &Memory, queue: u64, base: u16, kick: &EventFd) -> EventFd {
        let (index, call) = (queue as usize, event());
        let at = memory.region.as_ptr() as u64 + queue * QUEUE;
        let config = VringConfigData {
            queue_max_size: QUEUE_SIZE,
            queue_size: QUEUE_SIZE,
            flags: 0,
            desc_table_addr: at + DESCRIPTORS,
            used_ring_addr: at + USED,
            avail_ring_addr: at + AVAILABLE,
            log_addr: None,
        };
        self.frontend.set_vring_num(index, QUEUE_SIZE).unwrap();
        self.frontend.set_vring_addr(index, &config).unwrap();
        self.frontend.set_vring_base(index, base).unwrap();
        self.frontend.set_vring_call(index, &call).unwrap();
        self.frontend.set_vring_kick(index, kick).unwrap();
        self.frontend.set_vring_enable(index, true).unwrap();
        call
    }
}

pub fn event() -> EventFd {
    EventFd::new(EFD_CLOEXEC).unwrap()
}

/// Waits until this many requests of a queue have their answer.
pub fn wait(memory: &Memory, queue: u64, call: &EventFd, count: u16) {
    while memory.used(queue) != count {
        call.read().unwrap();
    }
}
