//! The NBD protocol's numbers and messages, after
//! <https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md>. All integers are
//! big-endian.

/// First magic of the greeting.
pub const GREETING_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Second magic of the greeting, and of each option: the newstyle negotiation.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Magic of each reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Magic of each request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Magic of each simple reply.
pub const SIMPLE_MAGIC: u32 = 0x6744_6698;
/// Magic of each chunk of a structured reply.
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;

/// Flags of the greeting, and of the client's answer.
pub mod handshake {
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// Options that a client may send.
pub mod option {
    pub const EXPORT_NAME: u32 = 1;
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    pub const STARTTLS: u32 = 5;
    pub const INFO: u32 = 6;
    pub const GO: u32 = 7;
    pub const STRUCTURED_REPLY: u32 = 8;
    pub const LIST_META_CONTEXT: u32 = 9;
    pub const SET_META_CONTEXT: u32 = 10;
}

/// Replies to options.
pub mod reply {
    pub const ACK: u32 = 1;
    pub const SERVER: u32 = 2;
    pub const INFO: u32 = 3;
    pub const META_CONTEXT: u32 = 4;
    const ERROR: u32 = 1 << 31;
    pub const UNSUP: u32 = ERROR + 1;
    pub const POLICY: u32 = ERROR + 2;
    pub const INVALID: u32 = ERROR + 3;
    pub const TLS_REQD: u32 = ERROR + 5;
    pub const UNKNOWN: u32 = ERROR + 6;
    pub const TOO_BIG: u32 = ERROR + 9;
}

/// Information about an export.
pub mod info {
    pub const EXPORT: u16 = 0;
    pub const NAME: u16 = 1;
    pub const DESCRIPTION: u16 = 2;
    pub const BLOCK_SIZE: u16 = 3;
}

/// Flags of an export.
pub mod export {
    pub const HAS_FLAGS: u16 = 1 << 0;
    pub const READ_ONLY: u16 = 1 << 1;
    pub const SEND_FLUSH: u16 = 1 << 2;
    pub const SEND_FUA: u16 = 1 << 3;
    pub const SEND_TRIM: u16 = 1 << 5;
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub const SEND_DF: u16 = 1 << 7;
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    pub const SEND_CACHE: u16 = 1 << 10;
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Requests.
pub mod command {
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    pub const DISCONNECT: u16 = 2;
    pub const FLUSH: u16 = 3;
    pub const TRIM: u16 = 4;
    pub const CACHE: u16 = 5;
    pub const WRITE_ZEROES: u16 = 6;
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of requests.
pub mod flag {
    pub const FUA: u16 = 1 << 0;
    pub const NO_HOLE: u16 = 1 << 1;
    pub const DF: u16 = 1 << 2;
    pub const REQ_ONE: u16 = 1 << 3;
    pub const FAST_ZERO: u16 = 1 << 4;
}

/// Chunks of structured replies.
pub mod chunk {
    pub const DONE: u16 = 1 << 0;
    pub const NONE: u16 = 0;
    pub const OFFSET_DATA: u16 = 1;
    pub const OFFSET_HOLE: u16 = 2;
    pub const BLOCK_STATUS: u16 = 5;
    pub const ERROR: u16 = (1 << 15) + 1;
}

/// Errors, as the protocol numbers them.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum NbdError {
    /// The export is read-only.
    Permission = 1,
    /// Stored data can't be read, or could not be written to disk.
    Io = 5,
    /// The request is invalid.
    Invalid = 22,
    /// There is no room for the data, or it lies beyond the end.
    NoSpace = 28,
    /// The answer is too long for one reply.
    Overflow = 75,
}

/// Bits of `base:allocation`.
pub mod allocation {
    pub const HOLE: u32 = 1 << 0;
    pub const ZERO: u32 = 1 << 1;
}

/// The only metadata context.
pub const CONTEXT: &[u8] = b"base:allocation";
/// Its number in replies.
pub const CONTEXT_ID: u32 = 1;

/// Most bytes that a request may read or write, for clients that don't ask for block sizes.
pub const PAYLOAD_MAX: u32 = 32 << 20;
/// Bytes of a request without its payload.
pub const REQUEST_BYTES: usize = 28;

/// A request.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct NbdRequest {
    pub flags: u16,
    pub command: u16,
    /// The client's identifier of it.
    pub cookie: [u8; 8],
    pub offset: u64,
    pub len: u32,
}

impl NbdRequest {
    /// Parses a request; `None` if it is invalid. The connection is then out of step.
    pub fn parse(bytes: &[u8; REQUEST_BYTES]) -> Option<NbdRequest> {
        let (magic, rest) = bytes.split_first_chunk::<4>()?;
        let (flags, rest) = rest.split_first_chunk::<2>()?;
        let (command, rest) = rest.split_first_chunk::<2>()?;
        let (cookie, rest) = rest.split_first_chunk::<8>()?;
        let (offset, rest) = rest.split_first_chunk::<8>()?;
        let (len, _) = rest.split_first_chunk::<4>()?;
        (u32::from_be_bytes(*magic) == REQUEST_MAGIC).then(|| NbdRequest {
            flags: u16::from_be_bytes(*flags),
            command: u16::from_be_bytes(*command),
            cookie: *cookie,
            offset: u64::from_be_bytes(*offset),
            len: u32::from_be_bytes(*len),
        })
    }

    /// Returns its bytes, as a client sends them.
    #[cfg(any(test, fuzzing))]
    pub fn bytes(&self) -> Vec<u8> {
        let mut all = REQUEST_MAGIC.to_be_bytes().to_vec();
        all.extend(self.flags.to_be_bytes());
        all.extend(self.command.to_be_bytes());
        all.extend(self.cookie);
        all.extend(self.offset.to_be_bytes());
        all.extend(self.len.to_be_bytes());
        all
    }
}

/// Bytes of a simple reply, or of a chunk without its payload; the longest head of [`ReplyHead`].
const HEAD_MAX: usize = 48;

/// The bytes before a reply's data.
#[derive(Copy, Clone)]
pub struct ReplyHead {
    bytes: [u8; HEAD_MAX],
    len: usize,
}

impl ReplyHead {
    /// An empty head.
    pub const EMPTY: ReplyHead = ReplyHead { bytes: [0; HEAD_MAX], len: 0 };

    /// Makes a simple reply.
    pub fn simple(cookie: [u8; 8], error: Option<NbdError>) -> ReplyHead {
        let mut head = ReplyHead::EMPTY;
        head.push(&SIMPLE_MAGIC.to_be_bytes());
        head.push(&error.map_or(0, |e| e as u32).to_be_bytes());
        head.push(&cookie);
        head
    }

    /// Makes a chunk of a structured reply, with `len` bytes after its own 20.
    pub fn chunk(cookie: [u8; 8], done: bool, kind: u16, len: usize) -> ReplyHead {
        let mut head = ReplyHead::EMPTY;
        head.push(&CHUNK_MAGIC.to_be_bytes());
        head.push(&if done { chunk::DONE } else { 0 }.to_be_bytes());
        head.push(&kind.to_be_bytes());
        head.push(&cookie);
        head.push(&(len as u32).to_be_bytes());
        head
    }

    /// Makes the last chunk of a request that failed.
    pub fn error(cookie: [u8; 8], error: NbdError) -> ReplyHead {
        ReplyHead::chunk(cookie, true, chunk::ERROR, 6)
            .with(&(error as u32).to_be_bytes())
            .with(&[0; 2])
    }

    /// Adds bytes.
    ///
    /// # Panics
    /// If they don't fit.
    pub fn with(mut self, bytes: &[u8]) -> ReplyHead {
        self.push(bytes);
        self
    }

    /// Returns all bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    fn push(&mut self, bytes: &[u8]) {
        self.bytes[self.len..self.len + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_come_back_and_other_bytes_are_none() {
        let request = NbdRequest {
            flags: flag::FUA,
            command: command::WRITE,
            cookie: *b"12345678",
            offset: 1 << 40,
            len: 512,
        };
        let mut bytes: [u8; REQUEST_BYTES] = request.bytes().try_into().unwrap();
        assert_eq!(NbdRequest::parse(&bytes), Some(request));
        bytes[3] ^= 1;
        assert_eq!(NbdRequest::parse(&bytes), None);
    }
}
