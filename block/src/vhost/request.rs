//! A request as a driver lays it out: a chain of descriptors, none of which is trusted.
use super::spans::{GuestMap, GuestSpans, OutOfMemory};
use virtio_bindings::virtio_blk as blk;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress};

/// Most descriptors of a request: a full ring of the largest size. A longer request is refused.
pub(super) const DESCRIPTORS_MAX: usize = 1024;
const HEADER_BYTES: usize = 16;

/// The status of a request, with its number in the protocol.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum RequestStatus {
    Ok = blk::VIRTIO_BLK_S_OK as u8,
    /// It failed, or is invalid.
    Error = blk::VIRTIO_BLK_S_IOERR as u8,
    /// The request or one of its flags is unknown.
    Unsupported = blk::VIRTIO_BLK_S_UNSUPP as u8,
}

impl From<OutOfMemory> for RequestStatus {
    fn from(_: OutOfMemory) -> RequestStatus {
        RequestStatus::Error
    }
}

/// The operation of a request.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum RequestKind {
    Read,
    Write,
    Flush,
    /// The device's name is requested.
    Identify,
    Discard,
    WriteZeroes,
}

/// The header of every request.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) struct RequestHeader {
    pub kind: RequestKind,
    /// In sectors of 512 bytes, whatever the logical sector size.
    pub sector: u64,
}

impl RequestHeader {
    fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<RequestHeader, RequestStatus> {
        let [k0, k1, k2, k3, _, _, _, _, sector @ ..] = *bytes;
        let kind = match u32::from_le_bytes([k0, k1, k2, k3]) {
            blk::VIRTIO_BLK_T_IN => RequestKind::Read,
            blk::VIRTIO_BLK_T_OUT => RequestKind::Write,
            blk::VIRTIO_BLK_T_FLUSH => RequestKind::Flush,
            blk::VIRTIO_BLK_T_GET_ID => RequestKind::Identify,
            blk::VIRTIO_BLK_T_DISCARD => RequestKind::Discard,
            blk::VIRTIO_BLK_T_WRITE_ZEROES => RequestKind::WriteZeroes,
            _ => return Err(RequestStatus::Unsupported),
        };
        Ok(RequestHeader { kind, sector: u64::from_le_bytes(sector) })
    }
}

/// The memory of one request: what the driver sends, and where it wants the answer.
pub(super) struct VhostRequest {
    /// The driver's bytes; the data, after [`VhostRequest::header`].
    pub readable: GuestSpans,
    /// Where the requested data goes.
    pub writable: GuestSpans,
    status: Option<GuestAddress>,
}

impl VhostRequest {
    /// Makes one and allocates all memory that any request needs.
    pub fn new() -> VhostRequest {
        let spans = || GuestSpans::with_capacity(DESCRIPTORS_MAX);
        VhostRequest { readable: spans(), writable: spans(), status: None }
    }

    /// Returns whether its capacity is unchanged, for tests.
    #[cfg(any(test, fuzzing))]
    pub fn is_of_fixed_size(&self) -> bool {
        [&self.readable, &self.writable]
            .into_iter()
            .all(|spans| spans.capacity() == DESCRIPTORS_MAX)
    }

    /// Reads a chain. Afterwards there is a place for the status if the guest has left any.
    ///
    /// # Errors
    /// The chain breaks off, has too many descriptors, no room for a status, or says something
    /// after it has left room for the answer.
    pub fn fill(&mut self, chain: impl Iterator<Item = Descriptor>) -> Result<(), RequestStatus> {
        self.readable.clear();
        self.writable.clear();
        let (mut right, mut has_ended) = (true, false);
        for part in chain {
            right &= self.add(&part);
            has_ended = !part.has_next();
        }
        self.status = self.writable.take_last_byte();
        if right && has_ended && self.status.is_some() { Ok(()) } else { Err(RequestStatus::Error) }
    }

    fn add(&mut self, part: &Descriptor) -> bool {
        if part.is_write_only() {
            self.writable.push(part.addr(), part.len())
        } else {
            self.writable.len() == 0 && self.readable.push(part.addr(), part.len())
        }
    }

    /// Reads the header.
    ///
    /// # Errors
    /// There is none, or its operation is unknown.
    pub fn header(&mut self, memory: &GuestMap) -> Result<RequestHeader, RequestStatus> {
        let mut bytes = [0; HEADER_BYTES];
        self.readable.read(memory, &mut bytes)?;
        RequestHeader::parse(&bytes)
    }

    /// Writes the status, if there is room for it. Returns its length.
    pub fn answer(&self, memory: &GuestMap, status: RequestStatus) -> u32 {
        let is_written = self.status.is_some_and(|at| memory.write_obj(status as u8, at).is_ok());
        u32::from(is_written)
    }
}

/// A range to discard or to zero, as a driver writes it.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) struct DriverRange {
    pub sector: u64,
    pub sectors: u32,
    /// Its memory may be freed.
    pub unmap: bool,
}

/// Bytes of a range in a request.
pub(super) const RANGE_BYTES: usize = 16;
/// The most ranges of a request.
pub(super) const RANGES_MAX: usize = 256;

impl DriverRange {
    /// # Errors
    /// A flag that is not known.
    pub fn parse(bytes: &[u8; RANGE_BYTES]) -> Result<DriverRange, RequestStatus> {
        let [s0, s1, s2, s3, s4, s5, s6, s7, n0, n1, n2, n3, flags @ ..] = *bytes;
        let flags = u32::from_le_bytes(flags);
        if flags & !blk::VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0 {
            return Err(RequestStatus::Unsupported);
        }
        Ok(DriverRange {
            sector: u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]),
            sectors: u32::from_le_bytes([n0, n1, n2, n3]),
            unmap: flags != 0,
        })
    }
}
