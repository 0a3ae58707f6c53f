//! A guest's driver: the crate `virtio-driver`, which is independent of the server's crates.
use crate::served::Served;
use std::ffi::CString;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::Arc;
use virtio_driver::{EventFd, QueueNotifier, VhostUser, VirtioBlkConfig, VirtioBlkQueue};
use virtio_driver::{VirtioBlkReqBuf, VirtioBlkTransport, VirtioFeatureFlags, VirtioTransport};
use vm_memory::{FileOffset, MmapRegion, VolatileMemory};

/// Bytes that a queue has for data: this many slots of `SLOT`.
pub const SLOT: usize = 1 << 20;
pub const SLOTS: usize = 4;
pub const QUEUE_SIZE: u16 = 64;

/// Makes memory that a VMM shares.
pub fn shared(bytes: usize) -> (File, MmapRegion) {
    let name = CString::new("guest").unwrap();
    // SAFETY: the name ends with a zero, and only the call reads it.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    assert!(fd >= 0);
    // SAFETY: the call has just opened it, and nothing else has it.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(bytes as u64).unwrap();
    let region =
        MmapRegion::from_file(FileOffset::new(file.try_clone().unwrap(), 0), bytes).unwrap();
    (file, region)
}

/// A queue, its events, and its part of the memory. May move to its own thread.
pub struct Line {
    queue: VirtioBlkQueue<'static, usize>,
    kick: Box<dyn QueueNotifier>,
    done: Arc<EventFd>,
    memory: Arc<MmapRegion>,
    first: usize,
    under_way: usize,
}

/// A connection with queues. The queues' memory is freed with it, so they must not be used after
/// that.
pub struct Client {
    pub lines: Vec<Line>,
    pub transport: Box<VhostUser<VirtioBlkConfig, VirtioBlkReqBuf>>,
    _memory: (File, Arc<MmapRegion>),
}

pub const ALL: VirtioFeatureFlags = VirtioFeatureFlags::all();

impl Client {
    pub fn new(served: &Served, queues: usize) -> Client {
        Client::with(served, queues, ALL)
    }

    pub fn with(served: &Served, queues: usize, features: VirtioFeatureFlags) -> Client {
        // All of the device's own features, below bit 24, are accepted.
        let features = features.bits() | VirtioFeatureFlags::VERSION_1.bits() | 0xff_ffff;
        let mut transport =
            Box::new(VhostUser::new(served.path().to_str().unwrap(), features).unwrap());
        let bytes = queues * SLOTS * SLOT;
        let (file, memory) = shared(bytes);
        transport.map_mem_region(memory.as_ptr() as usize, bytes, file.as_raw_fd(), 0).unwrap();
        let memory = Arc::new(memory);
        let transport_ref: &mut VirtioBlkTransport = &mut *transport;
        let mut all = VirtioBlkQueue::setup_queues(transport_ref, queues, QUEUE_SIZE).unwrap();
        all.iter_mut().for_each(|queue| queue.set_used_notif_enabled(true));
        let line = |(n, queue)| Line {
            queue,
            kick: transport.get_submission_notifier(n),
            done: transport.get_completion_fd(n),
            memory: memory.clone(),
            first: n * SLOTS * SLOT,
            under_way: 0,
        };
        Client {
            lines: all.into_iter().enumerate().map(line).collect(),
            transport,
            _memory: (file, memory),
        }
    }

    pub fn config(&self) -> VirtioBlkConfig {
        self.transport.get_config().unwrap()
    }

    pub fn line(&mut self) -> &mut Line {
        &mut self.lines[0]
    }
}

impl Line {
    fn at(&self, slot: usize) -> *mut u8 {
        assert!(slot < SLOTS);
        self.memory.as_ptr().wrapping_add(self.first + slot * SLOT)
    }

    pub fn put(&self, slot: usize, bytes: &[u8]) {
        self.memory.get_slice(self.first + slot * SLOT, bytes.len()).unwrap().copy_from(bytes);
    }

    pub fn get(&self, slot: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.get_slice(self.first + slot * SLOT, len).unwrap().copy_to(&mut bytes);
        bytes
    }

    /// Sends a request to read `len` bytes into a slot; its answer names the slot.
    pub fn send_read(&mut self, at: u64, slot: usize, len: usize) {
        assert!(len <= SLOT);
        let to = self.at(slot);
        // SAFETY: the slot is shared memory without references, and is mapped as long as the line
        // lives.
        unsafe { self.queue.read_raw(at, to, len, slot) }.unwrap();
        self.sent();
    }

    /// Sends a request to write the first `len` bytes of a slot.
    pub fn send_write(&mut self, at: u64, slot: usize, len: usize) {
        assert!(len <= SLOT);
        let from = self.at(slot);
        // SAFETY: the slot is shared memory without references, and is mapped as long as the line
        // lives.
        unsafe { self.queue.write_raw(at, from, len, slot) }.unwrap();
        self.sent();
    }

    fn sent(&mut self) {
        self.under_way += 1;
        // The kick is sent only if the server wants it. If the server were wrong in that, this
        // would wait forever.
        if self.queue.avail_notif_needed() {
            self.kick.notify().unwrap();
        }
    }

    /// Waits for an answer. Returns its slot, and 0 or an error.
    pub fn answer(&mut self) -> (usize, i32) {
        loop {
            if let Some(completion) = self.queue.completions().next() {
                self.under_way -= 1;
                return (completion.context, completion.ret);
            }
            self.done.read().unwrap();
        }
    }

    fn only(&mut self) -> Result<(), i32> {
        assert_eq!(self.under_way, 1);
        match self.answer().1 {
            0 => Ok(()),
            error => Err(error),
        }
    }

    pub fn read(&mut self, at: u64, len: usize) -> Result<Vec<u8>, i32> {
        self.send_read(at, 0, len);
        self.only().map(|()| self.get(0, len))
    }

    pub fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), i32> {
        self.put(0, bytes);
        self.send_write(at, 0, bytes.len());
        self.only()
    }

    pub fn discard(&mut self, at: u64, len: u64) -> Result<(), i32> {
        self.queue.discard(at, len, 0).unwrap();
        self.sent();
        self.only()
    }

    pub fn write_zeroes(&mut self, at: u64, len: u64, unmap: bool) -> Result<(), i32> {
        self.queue.write_zeroes(at, len, unmap, 0).unwrap();
        self.sent();
        self.only()
    }

    pub fn flush(&mut self) -> Result<(), i32> {
        self.queue.flush(0).unwrap();
        self.sent();
        self.only()
    }
}
