//! The format of an image. All numbers are little-endian.
//!
//! ```text
//! head:    magic 16 | version 4 | exports 4 | random number 16 | for each export: size 8, length of the name 4, the name
//!          | padding to 16 | checksum 16
//! group:   its begin | records | its end; each group begins at a multiple of 4096
//! record:  kind 4 | export 4 | offset 8 | covered bytes 8 | fields 4 | payload bytes 4 | checksum 16 | payload | padding to 16
//! ```
//! A record is bytes of a device as they are stored, or zeros, or the begin or end of a group. A
//! begin or end has the group's number in place of the offset. The payload of an end is the hash of
//! its group: of the checksums of all records before it.
//!
//! A checksum covers the bytes before it, the payload, the image's random number, and its position.
//! So bytes that look like a record count only where this image has written them: not within a
//! payload, whatever a client writes, and not as a rest of another file.
//!
//! Data before a group's end counts if the hash is right. Data after the last such end was never
//! acknowledged. The begin of the next group is written once a group is on disk. So a group with a
//! begin behind it was acknowledged, and damage to it is an error. Without one, a power cut may
//! have torn the group.
//!
//! Version 1 had neither a random number nor begins. Its checksums covered only the bytes, its
//! groups began anywhere, and an end had no payload. Images of version 1 are read but never
//! written.
use crate::device::{DirtyPiece, IoError, ZeroPolicy};
use crate::plain::plain;
use memfold_os::Errno;
use memfold_os::units::Order;
use memfold_store::xxh3_128;
use std::fmt;
use std::io;

const MAGIC: &[u8; 16] = b"memfold image\r\n\0";
/// The version that is written.
const VERSION: u32 = 2;
/// The version without a random number, which is only read.
const VERSION_OLD: u32 = 1;
/// Groups begin at multiples of this. So acknowledged data is never written again, even by a disk
/// that writes whole pages.
pub const GROUP_UNIT: u64 = 4096;
/// Heads and records begin at multiples of this.
pub const UNIT: usize = 16;
/// Bytes of a checksum.
pub const SUM_BYTES: usize = 16;
/// Bytes of a record before its payload.
pub const RECORD_BYTES: usize = 32 + SUM_BYTES;
/// An image with more exports, or a longer head, is invalid.
const EXPORTS_MAX: usize = 1024;
/// The longest head.
pub const HEAD_BYTES_MAX: usize = 8 << 20;

/// Why a file is not a usable image. Displays as a part of a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageError {
    /// Its magic is another one.
    NoImage,
    /// It was written by a newer version; holds it.
    Version(u32),
    /// One of its bytes differs from what was written; holds the position.
    Damaged(u64),
    /// It ends too early.
    Short,
    /// Its exports are not the ones that were requested.
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
            ImageError::NoImage => write!(f, "the file is no image of memfold blk"),
            ImageError::Version(n) => {
                write!(
                    f,
                    "the image has version {n}, which a newer memfold wrote. This memfold reads versions \
                     {VERSION_OLD} and {VERSION}. Use the newer one."
                )
            }
            ImageError::Damaged(at) => {
                write!(f, "the image is damaged at byte {at}. Restore it from a backup.")
            }
            ImageError::Short => write!(f, "the image is cut short. Restore it from a backup."),
            ImageError::Exports(why) => write!(f, "{why}"),
            ImageError::NoSpace => {
                write!(f, "the data of the image does not fit in memory. Raise --limit.")
            }
            ImageError::InUse => write!(f, "another memfold blk uses the image. Stop it first."),
            ImageError::System(why) => write!(f, "{why}"),
        }
    }
}

impl From<Errno> for ImageError {
    fn from(error: Errno) -> ImageError {
        ImageError::System(plain(io::Error::from_raw_os_error(error.raw_os_error())))
    }
}

impl From<IoError> for ImageError {
    fn from(error: IoError) -> ImageError {
        ImageError::System(error.to_string())
    }
}

/// A device of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceEntry {
    /// The export's name.
    pub name: String,
    /// Bytes of the device.
    pub size: u64,
}

/// How the checksums of an image are made.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct ImageSums {
    /// The image's random number; `None` in version 1.
    pub random: Option<[u8; SUM_BYTES]>,
}

impl ImageSums {
    /// Returns the checksum at position `at`, of two parts.
    fn of(&self, at: u64, head: &[u8], payload: &[u8]) -> [u8; SUM_BYTES] {
        // The checksum of their checksums, so that nothing must be copied together.
        let (head, payload) = (sum_of(head), sum_of(payload));
        match &self.random {
            Some(random) => sum_of(&[&head[..], &payload, random, &at.to_le_bytes()].concat()),
            None => sum_of(&[head, payload].concat()),
        }
    }

    /// Returns the checksum of the head.
    fn of_head(&self, head: &[u8]) -> [u8; SUM_BYTES] {
        match &self.random {
            Some(_) => self.of(0, head, &[]),
            None => sum_of(&[sum_of(head), [0; SUM_BYTES]].concat()),
        }
    }
}

/// The hash of a group so far: of the checksums of its records.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupHash(pub [u8; SUM_BYTES]);

impl GroupHash {
    /// Adds a record's checksum.
    pub fn add(&mut self, sum: [u8; SUM_BYTES]) {
        self.0 = sum_of(&[self.0, sum].concat());
    }
}

/// Returns the head of an image of these devices.
pub fn head(entries: &[DeviceEntry], random: [u8; SUM_BYTES]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend((entries.len() as u32).to_le_bytes());
    bytes.extend(random);
    for entry in entries {
        bytes.extend(entry.size.to_le_bytes());
        bytes.extend((entry.name.len() as u32).to_le_bytes());
        bytes.extend(entry.name.as_bytes());
    }
    bytes.resize(bytes.len().next_multiple_of(UNIT), 0);
    let sum = ImageSums { random: Some(random) }.of_head(&bytes);
    bytes.extend(sum);
    bytes.resize(bytes.len().next_multiple_of(GROUP_UNIT as usize), 0);
    bytes
}

/// Returns the head of an image of version 1.
#[cfg(any(test, fuzzing))]
pub fn old_head(entries: &[DeviceEntry]) -> Vec<u8> {
    let mut bytes = head(entries, [0; SUM_BYTES]);
    bytes[16..20].copy_from_slice(&VERSION_OLD.to_le_bytes());
    bytes.drain(24..24 + SUM_BYTES);
    let name_bytes: usize = entries.iter().map(|entry| 12 + entry.name.len()).sum();
    bytes.truncate((24 + name_bytes).next_multiple_of(UNIT));
    let sum = ImageSums { random: None }.of_head(&bytes);
    bytes.extend(sum);
    bytes
}

/// The content of a head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageHead {
    /// The devices of the image.
    pub entries: Vec<DeviceEntry>,
    /// How its checksums are made.
    pub sums: ImageSums,
    /// Position of its first record.
    pub start: u64,
}

/// Reads a head.
///
/// # Errors
/// It is none, or damaged.
pub fn parse_head(bytes: &[u8]) -> Result<ImageHead, ImageError> {
    let mut parts = RecordParts(bytes);
    if parts.take(16) != Some(&MAGIC[..]) {
        return Err(ImageError::NoImage);
    }
    let version = parts.u32().ok_or(ImageError::Short)?;
    if !(VERSION_OLD..=VERSION).contains(&version) {
        return Err(ImageError::Version(version));
    }
    let count = parts.u32().ok_or(ImageError::Short)? as usize;
    if count > EXPORTS_MAX {
        return Err(ImageError::Damaged(20));
    }
    let random = match version {
        VERSION_OLD => None,
        _ => Some(*parts.take(SUM_BYTES).and_then(<[u8]>::first_chunk).ok_or(ImageError::Short)?),
    };
    let sums = ImageSums { random };
    let mut entries = Vec::new();
    for _ in 0..count {
        let size = parts.u64().ok_or(ImageError::Short)?;
        let len = parts.u32().ok_or(ImageError::Short)? as usize;
        let name = parts.take(len).ok_or(ImageError::Short)?;
        let name = String::from_utf8(name.to_vec()).map_err(|_| ImageError::Damaged(24))?;
        entries.push(DeviceEntry { name, size });
    }
    let used_bytes = (bytes.len() - parts.0.len()).next_multiple_of(UNIT);
    let sum = bytes.get(used_bytes..used_bytes + SUM_BYTES).ok_or(ImageError::Short)?;
    if sums.of_head(&bytes[..used_bytes]) != *sum {
        return Err(ImageError::Damaged(0));
    }
    let end = (used_bytes + SUM_BYTES) as u64;
    let start = if random.is_some() { end.next_multiple_of(GROUP_UNIT) } else { end };
    Ok(ImageHead { entries, sums, start })
}

/// The kind of a record.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum RecordKind {
    /// Bytes, as they are stored.
    Object { order: Order, fields: u32 },
    /// Zeros.
    Zeros(ZeroPolicy),
    /// The begin of a group.
    Begin,
    /// The end of a group.
    End,
}

/// A record without its payload.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct ImageRecord {
    /// Its kind.
    pub what: RecordKind,
    /// The export that it belongs to.
    pub export: u32,
    /// The offset in the device; for a begin or end, the group's number.
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
const BEGIN: u32 = 5;

impl ImageRecord {
    /// Returns the record of a piece of an export.
    pub fn of(export: u32, piece: &DirtyPiece) -> ImageRecord {
        match *piece {
            DirtyPiece::Object { offset, order, fields, payload } => ImageRecord {
                what: RecordKind::Object { order, fields },
                export,
                offset,
                len: order.bytes() as u64,
                payload_len: payload.len(),
            },
            DirtyPiece::Zeros { offset, len, zeros } => {
                ImageRecord { what: RecordKind::Zeros(zeros), export, offset, len, payload_len: 0 }
            }
        }
    }

    /// Returns the begin of group `number`.
    pub fn begin(number: u64) -> ImageRecord {
        ImageRecord { what: RecordKind::Begin, export: 0, offset: number, len: 0, payload_len: 0 }
    }

    /// Returns the end of group `number`, whose payload is its hash.
    pub fn end(number: u64) -> ImageRecord {
        ImageRecord {
            what: RecordKind::End,
            export: 0,
            offset: number,
            len: 0,
            payload_len: SUM_BYTES,
        }
    }

    /// Returns the bytes of the record with its payload.
    pub fn bytes(&self) -> usize {
        RECORD_BYTES + self.payload_len.next_multiple_of(UNIT)
    }

    /// Appends it to `out`, for position `at` of the image. Returns its checksum.
    pub fn put(
        &self,
        sums: &ImageSums,
        at: u64,
        payload: &[u8],
        out: &mut Vec<u8>,
    ) -> [u8; SUM_BYTES] {
        let start = out.len();
        let (kind, fields) = match self.what {
            RecordKind::Object { fields, .. } => (OBJECT, fields),
            RecordKind::Zeros(ZeroPolicy::Hole) => (HOLE, 0),
            RecordKind::Zeros(ZeroPolicy::Written) => (ZEROS, 0),
            RecordKind::Begin => (BEGIN, 0),
            RecordKind::End => (END, 0),
        };
        out.extend(kind.to_le_bytes());
        out.extend(self.export.to_le_bytes());
        out.extend(self.offset.to_le_bytes());
        out.extend(self.len.to_le_bytes());
        out.extend(fields.to_le_bytes());
        out.extend((self.payload_len as u32).to_le_bytes());
        let sum = sums.of(at, &out[start..], payload);
        out.extend(sum);
        out.extend(payload);
        out.resize(start + self.bytes(), 0);
        sum
    }

    /// Parses a record from its first [`RECORD_BYTES`]. It checks only the fields; the checksum is
    /// verified with the payload.
    pub fn parse(bytes: &[u8]) -> Option<ImageRecord> {
        let mut parts = RecordParts(bytes);
        let (kind, export) = (parts.u32()?, parts.u32()?);
        let (offset, len) = (parts.u64()?, parts.u64()?);
        let (fields, payload_len) = (parts.u32()?, parts.u32()? as usize);
        let what = match kind {
            OBJECT => {
                let order = Order::covering(usize::try_from(len).ok()?)
                    .filter(|order| order.bytes() as u64 == len)?;
                RecordKind::Object { order, fields }
            }
            HOLE => RecordKind::Zeros(ZeroPolicy::Hole),
            ZEROS => RecordKind::Zeros(ZeroPolicy::Written),
            BEGIN => RecordKind::Begin,
            END => RecordKind::End,
            _ => return None,
        };
        let most = match kind {
            OBJECT => 2 * len as usize + 64,
            END => SUM_BYTES,
            _ => 0,
        };
        (payload_len <= most).then_some(ImageRecord { what, export, offset, len, payload_len })
    }

    /// Corrects the checksum of a record at position `at`.
    #[cfg(any(test, fuzzing))]
    pub fn seal(
        sums: &ImageSums,
        at: u64,
        bytes: &mut [u8],
        payload_len: usize,
    ) -> [u8; SUM_BYTES] {
        let (before, payload) =
            (RECORD_BYTES - SUM_BYTES, RECORD_BYTES..RECORD_BYTES + payload_len);
        let sum = sums.of(at, &bytes[..before], &bytes[payload]);
        bytes[before..RECORD_BYTES].copy_from_slice(&sum);
        sum
    }

    /// Verifies a record with its payload as written at position `at`. Returns its checksum.
    pub fn checksum(
        sums: &ImageSums,
        at: u64,
        bytes: &[u8],
        payload_len: usize,
    ) -> Option<[u8; SUM_BYTES]> {
        let (before, rest) = bytes.split_at(RECORD_BYTES - SUM_BYTES);
        let (sum, rest) = rest.split_first_chunk()?;
        (sums.of(at, before, &rest[..payload_len]) == *sum).then_some(*sum)
    }
}

fn sum_of(bytes: &[u8]) -> [u8; SUM_BYTES] {
    let [low, high] = xxh3_128(bytes);
    let mut sum = [0; SUM_BYTES];
    sum[..8].copy_from_slice(&low.to_le_bytes());
    sum[8..].copy_from_slice(&high.to_le_bytes());
    sum
}

struct RecordParts<'a>(&'a [u8]);

impl<'a> RecordParts<'a> {
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
