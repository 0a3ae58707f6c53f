//! What an image is made of. All numbers are little-endian.
//!
//! ```text
//! head:    magic 16 | version 4 | exports 4 | for each: size 8, length of the name 4, the name | padding to 16 | checksum 16
//! record:  kind 4 | export 4 | offset 8 | covered bytes 8 | fields 4 | payload bytes 4 | checksum 16 | payload | padding to 16
//! ```
//! A record is bytes of a device as they are stored, or zeros, or the end of a group: with its
//! number in the place of the offset. What comes before such an end counts; what comes after the
//! last one was never acknowledged. The checksum is of all that stands before it and of the
//! payload.
use crate::device::{IoError, Piece, Zeros};
use crate::plain::plain;
use memfold_store::xxh3_128;
use memfold_sys::units::Order;
use std::fmt;

const MAGIC: &[u8; 16] = b"memfold image\r\n\0";
/// Other versions are refused.
const VERSION: u32 = 1;
/// Heads and records begin at multiples of this.
pub const UNIT: usize = 16;
const SUM_BYTES: usize = 16;
/// Bytes of a record before its payload.
pub const RECORD_BYTES: usize = 32 + SUM_BYTES;
/// More exports, or longer heads, are no image of ours.
const EXPORTS_MAX: usize = 1024;
/// The longest head.
pub const HEAD_BYTES_MAX: usize = 8 << 20;

/// Why a file is no image that can be used. Displays as a part of a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageError {
    /// It has another magic.
    NoImage,
    /// It was written by another version; holds it.
    Version(u32),
    /// A byte of it is not what was written; where it begins.
    Damaged(u64),
    /// It ends too early.
    Short,
    /// The exports in it are not those that are wanted.
    Exports(String),
    /// It does not fit in memory.
    NoSpace,
    /// Another process uses it.
    InUse,
    /// The system's error.
    System(String),
}

impl fmt::Display for ImageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ImageError::NoImage => write!(f, "is no image of memfold blk"),
            ImageError::Version(n) => {
                write!(f, "is an image of version {n}, and only {VERSION} can be read")
            }
            ImageError::Damaged(at) => write!(f, "the image is damaged at byte {at}"),
            ImageError::Short => write!(f, "the image ends too early"),
            ImageError::Exports(why) => write!(f, "{why}"),
            ImageError::NoSpace => {
                write!(f, "what the image holds does not fit in memory: raise --limit")
            }
            ImageError::InUse => write!(f, "another memfold blk uses the image"),
            ImageError::System(why) => write!(f, "{why}"),
        }
    }
}

impl From<std::io::Error> for ImageError {
    fn from(error: std::io::Error) -> ImageError {
        ImageError::System(plain(error))
    }
}

impl From<IoError> for ImageError {
    fn from(error: IoError) -> ImageError {
        ImageError::System(error.to_string())
    }
}

/// A device of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The export's name.
    pub name: String,
    /// Bytes of the device.
    pub size: u64,
}

/// The head of an image of these devices.
pub fn head(entries: &[Entry]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend((entries.len() as u32).to_le_bytes());
    for entry in entries {
        bytes.extend(entry.size.to_le_bytes());
        bytes.extend((entry.name.len() as u32).to_le_bytes());
        bytes.extend(entry.name.as_bytes());
    }
    bytes.resize(bytes.len().next_multiple_of(UNIT), 0);
    let sum = checksum(&[&bytes]);
    bytes.extend(sum);
    bytes
}

/// The devices of an image, and the bytes of its head.
///
/// # Errors
/// It is none, or damaged.
pub fn parse_head(bytes: &[u8]) -> Result<(Vec<Entry>, usize), ImageError> {
    let mut parts = Parts(bytes);
    if parts.take(16) != Some(&MAGIC[..]) {
        return Err(ImageError::NoImage);
    }
    let version = parts.u32().ok_or(ImageError::Short)?;
    if version != VERSION {
        return Err(ImageError::Version(version));
    }
    let count = parts.u32().ok_or(ImageError::Short)? as usize;
    if count > EXPORTS_MAX {
        return Err(ImageError::Damaged(20));
    }
    let mut entries = Vec::new();
    for _ in 0..count {
        let size = parts.u64().ok_or(ImageError::Short)?;
        let len = parts.u32().ok_or(ImageError::Short)? as usize;
        let name = parts.take(len).ok_or(ImageError::Short)?;
        let name = String::from_utf8(name.to_vec()).map_err(|_| ImageError::Damaged(24))?;
        entries.push(Entry { name, size });
    }
    let used = (bytes.len() - parts.0.len()).next_multiple_of(UNIT);
    let sum = bytes.get(used..used + SUM_BYTES).ok_or(ImageError::Short)?;
    if checksum(&[&bytes[..used]]) != *sum {
        return Err(ImageError::Damaged(0));
    }
    Ok((entries, used + SUM_BYTES))
}

/// What a record says.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// Bytes, as they are stored.
    Object { order: Order, fields: u32 },
    /// Zeros.
    Zeros(Zeros),
    /// The end of a group.
    End,
}

/// A record without its payload.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// What it says.
    pub what: What,
    /// Of which export.
    pub export: u32,
    /// From which byte on; the group's number for its end.
    pub offset: u64,
    /// Bytes of the device.
    pub len: u64,
    /// Bytes of the payload.
    pub payload_len: usize,
}

const OBJECT: u32 = 1;
const HOLE: u32 = 2;
const ZEROS: u32 = 3;
const END: u32 = 4;

impl Record {
    /// The record of a piece of an export.
    pub fn of(export: u32, piece: &Piece) -> Record {
        match *piece {
            Piece::Object { offset, order, fields, payload } => Record {
                what: What::Object { order, fields },
                export,
                offset,
                len: order.bytes() as u64,
                payload_len: payload.len(),
            },
            Piece::Zeros { offset, len, zeros } => {
                Record { what: What::Zeros(zeros), export, offset, len, payload_len: 0 }
            }
        }
    }

    /// The end of group `number`.
    pub fn end(number: u64) -> Record {
        Record { what: What::End, export: 0, offset: number, len: 0, payload_len: 0 }
    }

    /// Bytes of the record with its payload.
    pub fn bytes(&self) -> usize {
        RECORD_BYTES + self.payload_len.next_multiple_of(UNIT)
    }

    /// Appends it to `out`.
    pub fn put(&self, payload: &[u8], out: &mut Vec<u8>) {
        let start = out.len();
        let (kind, fields) = match self.what {
            What::Object { fields, .. } => (OBJECT, fields),
            What::Zeros(Zeros::Hole) => (HOLE, 0),
            What::Zeros(Zeros::Written) => (ZEROS, 0),
            What::End => (END, 0),
        };
        out.extend(kind.to_le_bytes());
        out.extend(self.export.to_le_bytes());
        out.extend(self.offset.to_le_bytes());
        out.extend(self.len.to_le_bytes());
        out.extend(fields.to_le_bytes());
        out.extend((self.payload_len as u32).to_le_bytes());
        let sum = checksum(&[&out[start..], payload]);
        out.extend(sum);
        out.extend(payload);
        out.resize(start + self.bytes(), 0);
    }

    /// A record from its first [`RECORD_BYTES`], unchecked but for what it can be; its checksum is
    /// judged with its payload.
    pub fn parse(bytes: &[u8]) -> Option<Record> {
        let mut parts = Parts(bytes);
        let (kind, export) = (parts.u32()?, parts.u32()?);
        let (offset, len) = (parts.u64()?, parts.u64()?);
        let (fields, payload_len) = (parts.u32()?, parts.u32()? as usize);
        let what = match kind {
            OBJECT => {
                let order = Order::covering(usize::try_from(len).ok()?)
                    .filter(|order| order.bytes() as u64 == len)?;
                What::Object { order, fields }
            }
            HOLE => What::Zeros(Zeros::Hole),
            ZEROS => What::Zeros(Zeros::Written),
            END => What::End,
            _ => return None,
        };
        let most = if kind == OBJECT { 2 * len as usize + 64 } else { 0 };
        (payload_len <= most).then_some(Record { what, export, offset, len, payload_len })
    }

    /// Makes the checksum of a record right.
    #[cfg(any(test, fuzzing))]
    pub fn seal(bytes: &mut [u8], payload_len: usize) {
        let (before, payload) =
            (RECORD_BYTES - SUM_BYTES, RECORD_BYTES..RECORD_BYTES + payload_len);
        let sum = checksum(&[&bytes[..before], &bytes[payload]]);
        bytes[before..RECORD_BYTES].copy_from_slice(&sum);
    }

    /// Whether `bytes`, the record's own with its payload, are what was written.
    pub fn is_intact(bytes: &[u8], payload_len: usize) -> bool {
        let (before, rest) = bytes.split_at(RECORD_BYTES - SUM_BYTES);
        let (sum, rest) = rest.split_at(SUM_BYTES);
        checksum(&[before, &rest[..payload_len]]) == *sum
    }
}

/// Of one or two parts: of their own checksums, so that nothing has to be copied together.
fn checksum(parts: &[&[u8]]) -> [u8; SUM_BYTES] {
    let mut sums = [0; 2 * SUM_BYTES];
    for (to, part) in sums.chunks_exact_mut(SUM_BYTES).zip(parts) {
        to.copy_from_slice(&sum_of(part));
    }
    sum_of(&sums)
}

fn sum_of(bytes: &[u8]) -> [u8; SUM_BYTES] {
    let [low, high] = xxh3_128(bytes);
    let mut sum = [0; SUM_BYTES];
    sum[..8].copy_from_slice(&low.to_le_bytes());
    sum[8..].copy_from_slice(&high.to_le_bytes());
    sum
}

struct Parts<'a>(&'a [u8]);

impl<'a> Parts<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (part, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(part)
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }
}
