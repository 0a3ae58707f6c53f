//! Serves one request in a thread: from the guest's memory to the device, or back.
use super::request::{
    DriverRange, RANGE_BYTES, RANGES_MAX, RequestKind, RequestStatus, VhostRequest,
};
use super::spans::GuestMap;
use crate::device::{DeviceIo, IoError, SECTOR_BYTES, ZeroPolicy};
use crate::export::Export;
use memfold_os::page::PageBuffer;
use memfold_os::units::Order;
use virtio_bindings::virtio_blk::VIRTIO_BLK_ID_BYTES;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueOwnedT, QueueT};

/// Bytes that are copied between guest and device at once: 128 KiB, or a block if that is larger.
const COPY_ORDER: Order = Order::new(5).expect("an order");

/// The result for the next request of a queue.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum NextRequest {
    /// It was answered.
    Served,
    /// There is none.
    Nothing,
    /// The queue is invalid.
    Nonsense,
}

impl From<IoError> for RequestStatus {
    fn from(_: IoError) -> RequestStatus {
        RequestStatus::Error
    }
}

/// Codec state and buffers of a thread that serves requests. Allocates nothing after its creation.
pub(super) struct QueueWorker {
    io: DeviceIo,
    request: VhostRequest,
    /// The guest's memory changes at any time, so no reference may point into it, and everything is
    /// copied.
    buffer: PageBuffer,
}

impl QueueWorker {
    pub fn new(export: &Export) -> QueueWorker {
        let device = export.device();
        let block = Order::covering(device.block_bytes()).expect("a block has an order");
        QueueWorker {
            io: device.io(),
            request: VhostRequest::new(),
            buffer: PageBuffer::new(block.max(COPY_ORDER)),
        }
    }

    /// Returns whether no request has enlarged it, for tests.
    #[cfg(any(test, fuzzing))]
    pub fn is_of_fixed_size(&self) -> bool {
        self.request.is_of_fixed_size()
    }

    /// Serves the next request of a queue, if there is one.
    pub fn serve_next(
        &mut self,
        export: &Export,
        memory: &GuestMap,
        queue: &mut Queue,
    ) -> NextRequest {
        let Ok(mut heads) = queue.iter(memory) else { return NextRequest::Nonsense };
        let Some(chain) = heads.next() else { return NextRequest::Nothing };
        let head = chain.head_index();
        let length = self.serve(export, memory, chain);
        // Fails for a head that is not a descriptor, whose chain was empty.
        if queue.add_used(memory, head, length).is_ok() {
            NextRequest::Served
        } else {
            NextRequest::Nonsense
        }
    }

    /// Serves the request of a chain of descriptors, whatever it contains. Returns how many bytes
    /// of the guest's memory may have been written: data, and the status.
    fn serve(
        &mut self,
        export: &Export,
        memory: &GuestMap,
        chain: impl Iterator<Item = Descriptor>,
    ) -> u32 {
        let outcome = self.request.fill(chain);
        let room = self.request.writable.len();
        let status = outcome
            .and_then(|()| self.carry_out(export, memory))
            .err()
            .unwrap_or(RequestStatus::Ok);
        // This fits, because a chain has at most 2^32 - 1 bytes.
        (room - self.request.writable.len()) as u32 + self.request.answer(memory, status)
    }

    fn carry_out(&mut self, export: &Export, memory: &GuestMap) -> Result<(), RequestStatus> {
        let header = self.request.header(memory)?;
        let changes = matches!(
            header.kind,
            RequestKind::Write | RequestKind::Discard | RequestKind::WriteZeroes
        );
        if changes && export.is_read_only() {
            return Err(RequestStatus::Error);
        }
        match header.kind {
            RequestKind::Read => self.read(export, memory, header.sector),
            RequestKind::Write => self.write(export, memory, header.sector),
            RequestKind::Flush => Ok(export.flush()?),
            RequestKind::Identify => {
                Ok(self.request.writable.write(memory, &serial(export.name()))?)
            }
            RequestKind::Discard | RequestKind::WriteZeroes => {
                self.zero(export, memory, header.kind)
            }
        }
    }

    fn read(
        &mut self,
        export: &Export,
        memory: &GuestMap,
        sector: u64,
    ) -> Result<(), RequestStatus> {
        let (mut at, end) = bytes(export, sector, self.request.writable.len())?;
        while at < end {
            let count = self.copied_at_once(at, end);
            let buffer = &mut self.buffer.bytes_mut()[..count];
            export.device().read(&mut self.io, at, buffer)?;
            self.request.writable.write(memory, buffer)?;
            at += count as u64;
        }
        Ok(())
    }

    fn write(
        &mut self,
        export: &Export,
        memory: &GuestMap,
        sector: u64,
    ) -> Result<(), RequestStatus> {
        let (mut at, end) = bytes(export, sector, self.request.readable.len())?;
        while at < end {
            let count = self.copied_at_once(at, end);
            let buffer = &mut self.buffer.bytes_mut()[..count];
            self.request.readable.read(memory, buffer)?;
            export.device().write(&mut self.io, at, buffer)?;
            at += count as u64;
        }
        Ok(())
    }

    /// Returns the end of a step: the next multiple of the buffer's size, so that no block is cut
    /// that the request covers.
    fn copied_at_once(&self, at: u64, end: u64) -> usize {
        let len = self.buffer.len() as u64;
        (len - at % len).min(end - at) as usize
    }

    /// Does nothing unless all ranges are valid.
    fn zero(
        &mut self,
        export: &Export,
        memory: &GuestMap,
        kind: RequestKind,
    ) -> Result<(), RequestStatus> {
        let len = self.request.readable.len() as usize;
        if len == 0 || !len.is_multiple_of(RANGE_BYTES) || len > RANGES_MAX * RANGE_BYTES {
            return Err(RequestStatus::Error);
        }
        let all = &mut self.buffer.bytes_mut()[..len];
        self.request.readable.read(memory, all)?;
        let ranges = || all.as_chunks().0.iter().map(DriverRange::parse);
        for range in ranges() {
            let range = range?;
            if kind == RequestKind::Discard && range.unmap {
                return Err(RequestStatus::Unsupported);
            }
            bytes(export, range.sector, u64::from(range.sectors) * SECTOR_BYTES)?;
        }
        for range in ranges().flatten() {
            let zeros = if kind == RequestKind::Discard || range.unmap {
                ZeroPolicy::Hole
            } else {
                ZeroPolicy::Written
            };
            let (at, len) = (range.sector * SECTOR_BYTES, u64::from(range.sectors) * SECTOR_BYTES);
            export.device().zero(&mut self.io, at, len, zeros)?;
        }
        Ok(())
    }
}

/// Returns the begin and end of `len` bytes from a sector on.
fn bytes(export: &Export, sector: u64, len: u64) -> Result<(u64, u64), RequestStatus> {
    if !len.is_multiple_of(SECTOR_BYTES) {
        return Err(RequestStatus::Error);
    }
    // An overflow lies beyond the end of any device.
    let start = sector.saturating_mul(SECTOR_BYTES);
    export.device().check_range(start, len)?;
    Ok((start, start + len))
}

/// Returns a device's name for the driver: so many bytes, with zeros at the end.
fn serial(name: &str) -> [u8; VIRTIO_BLK_ID_BYTES as usize] {
    let name = if name.is_empty() { "memfold" } else { name };
    let mut serial = [0; VIRTIO_BLK_ID_BYTES as usize];
    serial.iter_mut().zip(name.bytes()).for_each(|(to, from)| *to = from);
    serial
}
