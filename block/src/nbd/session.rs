//! The second phase of a connection: requests and replies.
//!
//! Requests are answered in order. The requests of one read are answered by one write, so a client
//! with many requests costs few system calls. After [`NbdSession::new`] nothing is allocated, unless
//! the link does, because the device may hold the swap of its own machine.
use super::buffers::{ReadBuffer, ReplyBuffer};
use super::negotiate::AgreedOptions;
use super::wire::{CONTEXT_ID, command as cmd};
use super::wire::{
    NbdError, NbdRequest, PAYLOAD_MAX, REQUEST_BYTES, ReplyHead, allocation, chunk, command, flag,
};
use crate::device::{Device, DeviceIo, IoError, RangeStatus, ZeroPolicy};
use std::io::{self, Read, Write};

/// Most runs of one answer to a block status request.
const RUNS_MAX: usize = 512;

/// A connection in its second phase.
pub struct NbdSession<'a, L> {
    link: &'a mut L,
    agreed: &'a AgreedOptions,
    io: DeviceIo,
    input: ReadBuffer,
    output: ReplyBuffer,
}

impl<'a, L: Read + Write> NbdSession<'a, L> {
    /// Makes a session and allocates all memory that it will need.
    pub fn new(link: &'a mut L, agreed: &'a AgreedOptions) -> NbdSession<'a, L> {
        let device = agreed.export.device();
        let block = device.block_bytes();
        NbdSession {
            link,
            agreed,
            io: device.io(),
            input: ReadBuffer::new(block),
            output: ReplyBuffer::new(block),
        }
    }

    /// Answers requests until the client leaves.
    ///
    /// # Errors
    /// The connection's, or the client no longer speaks the protocol.
    pub fn run(&mut self) -> io::Result<()> {
        loop {
            if !self.wait_for_request()? {
                return Ok(());
            }
            let bytes = self.input.bytes().first_chunk::<REQUEST_BYTES>().expect("waited for");
            let Some(request) = NbdRequest::parse(bytes) else {
                return self.end(io::ErrorKind::InvalidData.into());
            };
            self.input.consume(REQUEST_BYTES);
            if request.command == command::DISCONNECT {
                return self.output.send(self.link);
            }
            self.answer(&request)?;
        }
    }

    /// Answers the valid requests before, and ends the connection.
    fn end(&mut self, error: io::Error) -> io::Result<()> {
        self.output.send(self.link)?;
        Err(error)
    }

    /// Returns `false` if the client has left and no partial request is there.
    fn wait_for_request(&mut self) -> io::Result<bool> {
        while self.input.bytes().len() < REQUEST_BYTES {
            self.output.send(self.link)?;
            if !self.input.fill(self.link, REQUEST_BYTES)? {
                return if self.input.bytes().is_empty() {
                    Ok(false)
                } else {
                    Err(io::ErrorKind::UnexpectedEof.into())
                };
            }
        }
        Ok(true)
    }

    /// Waits until `count` bytes are available.
    fn wait_for_bytes(&mut self, count: usize) -> io::Result<()> {
        while self.input.bytes().len() < count {
            self.output.send(self.link)?;
            if !self.input.fill(self.link, count)? {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(())
    }

    fn answer(&mut self, request: &NbdRequest) -> io::Result<()> {
        match request.command {
            cmd::READ => self.read(request),
            cmd::WRITE => self.write(request),
            cmd::BLOCK_STATUS => self.block_status(request),
            _ => {
                let outcome = self.other(request);
                self.simple(request, outcome)
            }
        }
    }

    /// Answers requests that carry no data in either direction.
    fn other(&mut self, request: &NbdRequest) -> Result<(), NbdError> {
        let (export, len) = (&self.agreed.export, u64::from(request.len));
        let allowed = match request.command {
            cmd::WRITE_ZEROES => flag::FUA | flag::NO_HOLE | flag::FAST_ZERO,
            _ => flag::FUA,
        };
        if request.flags & !allowed != 0 {
            return Err(NbdError::Invalid);
        }
        match request.command {
            cmd::FLUSH if request.offset == 0 && request.len == 0 => self.flush(),
            // A hint has no effect.
            cmd::CACHE => export
                .device()
                .check_range(request.offset, len)
                .map_err(|e| error_of(e, NbdError::Invalid)),
            cmd::TRIM | cmd::WRITE_ZEROES => {
                let zeros = if request.flags & flag::NO_HOLE != 0 {
                    ZeroPolicy::Written
                } else {
                    ZeroPolicy::Hole
                };
                let beyond = if request.command == cmd::TRIM {
                    NbdError::Invalid
                } else {
                    NbdError::NoSpace
                };
                self.check_writable()?;
                let outcome = export.device().zero(&mut self.io, request.offset, len, zeros);
                outcome.map_err(|e| error_of(e, beyond))?;
                self.force(request)
            }
            _ => Err(NbdError::Invalid),
        }
    }

    fn check_writable(&self) -> Result<(), NbdError> {
        if self.agreed.export.is_read_only() { Err(NbdError::Permission) } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<(), NbdError> {
        self.agreed.export.flush().map_err(|e| error_of(e, NbdError::Io))
    }

    /// Makes a write durable if the client requested that.
    fn force(&mut self, request: &NbdRequest) -> Result<(), NbdError> {
        if request.flags & flag::FUA != 0 { self.flush() } else { Ok(()) }
    }

    /// Pushes a reply without data.
    fn simple(&mut self, request: &NbdRequest, done: Result<(), NbdError>) -> io::Result<()> {
        self.push(ReplyHead::simple(request.cookie, done.err()), 0)
    }

    fn push(&mut self, head: ReplyHead, len: usize) -> io::Result<()> {
        if !self.output.has_room() {
            // Only replies without data are pushed without asking for room first.
            debug_assert!(len == 0);
            self.output.send(self.link)?;
        }
        self.output.push(head, len);
        Ok(())
    }

    // Writes.

    /// Uses the payload as it comes, block by block, so no more of it is kept than fits the input.
    fn write(&mut self, request: &NbdRequest) -> io::Result<()> {
        if request.len > PAYLOAD_MAX {
            return self.end(io::ErrorKind::InvalidData.into());
        }
        let mut outcome = self.check_write(request);
        let (mut offset, mut rest) = (request.offset, request.len as usize);
        while rest > 0 {
            let count = piece(self.agreed.export.device(), offset, rest, self.input.room());
            self.wait_for_bytes(count)?;
            if outcome.is_ok() {
                let write_outcome = self.agreed.export.device().write(
                    &mut self.io,
                    offset,
                    &self.input.bytes()[..count],
                );
                outcome = write_outcome.map_err(|e| error_of(e, NbdError::NoSpace));
            }
            self.input.consume(count);
            offset = offset.wrapping_add(count as u64);
            rest -= count;
        }
        let outcome = outcome.and_then(|()| self.force(request));
        self.simple(request, outcome)
    }

    fn check_write(&self, request: &NbdRequest) -> Result<(), NbdError> {
        self.check_writable()?;
        if request.flags & !flag::FUA != 0 {
            return Err(NbdError::Invalid);
        }
        // A write beyond the end changes nothing.
        if is_beyond(self.agreed.export.device(), request) {
            Err(NbdError::NoSpace)
        } else {
            Ok(())
        }
    }

    // Reads.

    fn read(&mut self, request: &NbdRequest) -> io::Result<()> {
        let is_structured = self.agreed.structured;
        let allowed = flag::FUA | if is_structured { flag::DF } else { 0 };
        let is_whole = request.flags & flag::DF != 0;
        let makes_sense = request.flags & !allowed == 0 && request.len <= PAYLOAD_MAX;
        let error = if !makes_sense || is_beyond(self.agreed.export.device(), request) {
            Some(NbdError::Invalid)
        } else if is_whole && request.len as usize > self.output.room() {
            Some(NbdError::Overflow)
        } else {
            None
        };
        match error {
            Some(error) => self.refuse_read(request, error),
            None if is_structured => self.read_structured(request, is_whole),
            None => self.read_simple(request),
        }
    }

    fn refuse_read(&mut self, request: &NbdRequest, error: NbdError) -> io::Result<()> {
        let head = match self.agreed.structured {
            true => ReplyHead::error(request.cookie, error),
            false => ReplyHead::simple(request.cookie, Some(error)),
        };
        self.push(head, 0)
    }

    /// Pushes chunks of data and of zeros; an error in the place of the last chunk if a read fails.
    fn read_structured(&mut self, request: &NbdRequest, is_whole: bool) -> io::Result<()> {
        let (mut offset, mut rest) = (request.offset, request.len as usize);
        if rest == 0 {
            return self.push(ReplyHead::chunk(request.cookie, true, chunk::NONE, 0), 0);
        }
        while rest > 0 {
            let count = match is_whole {
                true => rest,
                false => piece(self.agreed.export.device(), offset, rest, self.output.room()),
            };
            let is_last = count == rest;
            let head = |kind, len| {
                ReplyHead::chunk(request.cookie, is_last, kind, 8 + len).with(&offset.to_be_bytes())
            };
            if !is_whole && self.is_zero(offset, count) {
                let head = head(chunk::OFFSET_HOLE, 4).with(&(count as u32).to_be_bytes());
                self.push(head, 0)?;
            } else {
                let head = head(chunk::OFFSET_DATA, count);
                match self.load(offset, count)? {
                    Ok(()) => self.output.push(head, count),
                    Err(error) => return self.refuse_read(request, error),
                }
            }
            offset += count as u64;
            rest -= count;
        }
        Ok(())
    }

    /// Pushes one head for all data. A read that fails after that ends the connection, because no
    /// error can be sent any more.
    fn read_simple(&mut self, request: &NbdRequest) -> io::Result<()> {
        let (mut offset, mut rest) = (request.offset, request.len as usize);
        let mut head = ReplyHead::simple(request.cookie, None);
        if rest == 0 {
            return self.push(head, 0);
        }
        while rest > 0 {
            let count = piece(self.agreed.export.device(), offset, rest, self.output.room());
            match self.load(offset, count)? {
                Ok(()) => self.output.push(head, count),
                Err(error) if offset == request.offset => return self.refuse_read(request, error),
                Err(_) => return self.end(io::ErrorKind::InvalidData.into()),
            }
            head = ReplyHead::EMPTY;
            offset += count as u64;
            rest -= count;
        }
        Ok(())
    }

    /// Returns whether these bytes are known to be zeros without reading them.
    fn is_zero(&self, offset: u64, len: usize) -> bool {
        let mut zeros = 0;
        let each = |count, status| {
            zeros += if status == RangeStatus::Data { 0 } else { count };
            status != RangeStatus::Data
        };
        self.agreed.export.device().status(offset, len as u64, each).is_ok() && zeros == len as u64
    }

    /// Reads bytes to the place of the next reply's data.
    fn load(&mut self, offset: u64, len: usize) -> io::Result<Result<(), NbdError>> {
        if !self.output.has_room() || self.output.data(len).is_none() {
            self.output.send(self.link)?;
        }
        let to = self.output.data(len).expect("at most its room");
        let outcome = self.agreed.export.device().read(&mut self.io, offset, to);
        Ok(outcome.map_err(|e| error_of(e, NbdError::Invalid)))
    }

    // Block status.

    fn block_status(&mut self, request: &NbdRequest) -> io::Result<()> {
        let device = self.agreed.export.device();
        let is_known = self.agreed.allocation && request.flags & !(flag::REQ_ONE | flag::FUA) == 0;
        if !is_known || request.len == 0 || is_beyond(device, request) {
            return self.refuse_read(request, NbdError::Invalid);
        }
        let most = if request.flags & flag::REQ_ONE != 0 { 1 } else { RUNS_MAX };
        if !self.output.has_room() || self.output.data(4 + 8 * RUNS_MAX).is_none() {
            self.output.send(self.link)?;
        }
        let to = self.output.data(4 + 8 * RUNS_MAX).expect("far less than its room");
        let len = 4 + 8 * runs(device, request, most, &mut to[4..]);
        to[..4].copy_from_slice(&CONTEXT_ID.to_be_bytes());
        self.output.push(ReplyHead::chunk(request.cookie, true, chunk::BLOCK_STATUS, len), len);
        Ok(())
    }
}

/// Writes up to `most` runs of one status each to `to`, 8 bytes each. Returns their number.
fn runs(device: &Device, request: &NbdRequest, most: usize, to: &mut [u8]) -> usize {
    let (mut count, mut run, mut last) = (0, 0u32, None);
    let each = |len: u64, status| {
        if last == Some(status) {
            run += len as u32;
        } else if count == most {
            return false;
        } else {
            (count, run, last) = (count + 1, len as u32, Some(status));
        }
        let bits = match status {
            RangeStatus::Data => 0,
            RangeStatus::Zeros => allocation::ZERO,
            RangeStatus::Hole => allocation::HOLE | allocation::ZERO,
        };
        let at = 8 * (count - 1);
        to[at..at + 4].copy_from_slice(&run.to_be_bytes());
        to[at + 4..at + 8].copy_from_slice(&bits.to_be_bytes());
        true
    };
    device.status(request.offset, request.len.into(), each).expect("within the device");
    count
}

/// Returns how many of `left` bytes from `offset` on are processed at once, at most `room`: up to
/// the end of a block, so that no block is cut.
fn piece(device: &Device, offset: u64, left: usize, room: usize) -> usize {
    if left <= room {
        return left;
    }
    let block = device.block_bytes() as u64;
    let beyond = (offset.wrapping_add(room as u64) % block) as usize;
    if beyond < room { room - beyond } else { room }
}

fn is_beyond(device: &Device, request: &NbdRequest) -> bool {
    device.check_range(request.offset, request.len.into()).is_err()
}

fn error_of(error: IoError, beyond: NbdError) -> NbdError {
    match error {
        IoError::OutOfRange => beyond,
        IoError::NoSpace => NbdError::NoSpace,
        IoError::Damaged(_) | IoError::Refused(_) | IoError::Unread | IoError::NotDurable => {
            NbdError::Io
        }
    }
}
