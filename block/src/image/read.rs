//! Reads an image: how much of it counts, and its bytes for the devices.
use super::format::{
    DeviceEntry, GROUP_UNIT, GroupHash, HEAD_BYTES_MAX, ImageError, ImageHead, ImageRecord,
    ImageSums, RECORD_BYTES, RecordKind, SUM_BYTES, UNIT, parse_head,
};
use super::place::ImagePlace;
use crate::device::{Device, DeviceIo, IoError};
use memfold_os::page::PageBuffer;
use memfold_os::units::Order;
use memfold_swap::disk::durable::{File, FileAccess};
use std::sync::Arc;

const READ_BYTES: usize = 1 << 20;

/// How much of an image counts.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) struct ImageExtent {
    /// Position of its first record.
    pub start: u64,
    /// End of its first group: the length after the last rewrite.
    pub first_end: u64,
    /// End of the data that counts, where the next group begins.
    pub end: u64,
    /// Begin of its last group.
    pub last_start: u64,
    /// Groups in it.
    pub groups: u64,
    /// Whether the last group is known to be on disk.
    pub is_acknowledged: bool,
}

/// A verified image.
pub struct VerifiedImage {
    pub(super) file: Box<dyn File>,
    pub(super) head: ImageHead,
    pub(super) extent: ImageExtent,
}

impl VerifiedImage {
    /// Opens the image at a place for reading; `None` if there is no file.
    ///
    /// # Errors
    /// [`ImageError`]
    pub fn open(place: &ImagePlace) -> Result<Option<VerifiedImage>, ImageError> {
        place.file(FileAccess::Read)?.map(VerifiedImage::read).transpose()
    }

    /// Checks the head of the file at a place, if there is one.
    ///
    /// # Errors
    /// [`ImageError`]
    pub fn check_head(place: &ImagePlace) -> Result<(), ImageError> {
        match place.file(FileAccess::Read)? {
            Some(file) => read_head(&*file).map(drop),
            None => Ok(()),
        }
    }

    pub(super) fn read(file: Box<dyn File>) -> Result<VerifiedImage, ImageError> {
        let head = read_head(&*file)?;
        let extent = scan(&*file, &head)?;
        // A file gets its name when its first group is on disk.
        if extent.groups == 0 {
            return Err(ImageError::Damaged(extent.start));
        }
        Ok(VerifiedImage { file, head, extent })
    }

    /// Returns its devices.
    pub fn entries(&self) -> &[DeviceEntry] {
        &self.head.entries
    }

    /// Puts all data that counts into devices, in the order of the image's exports.
    ///
    /// # Errors
    /// [`ImageError`]; the devices hold a part of it then.
    pub fn restore(&self, devices: &[Arc<Device>]) -> Result<(), ImageError> {
        let Some(first) = devices.first() else { return Ok(()) };
        let mut io = first.io();
        let mut records = RecordReader::new(&*self.file, &self.head.sums, self.extent.start);
        let mut block = PageBuffer::new(Order::PAGE);
        while records.at < self.extent.end {
            let at = records.at;
            let record = records.next()?.ok_or(ImageError::Damaged(at))?;
            match record.record.what {
                RecordKind::Begin => continue,
                RecordKind::End => {
                    records.end_group();
                    continue;
                }
                RecordKind::Object { .. } | RecordKind::Zeros(_) => {}
            }
            let device =
                devices.get(record.record.export as usize).ok_or(ImageError::Damaged(at))?;
            let outcome = put(device, &mut io, &mut block, &record.record, record.payload);
            outcome.map_err(|error| match error {
                IoError::NoSpace => ImageError::NoSpace,
                _ => ImageError::Damaged(at),
            })?;
        }
        Ok(())
    }
}

fn read_head(file: &dyn File) -> Result<ImageHead, ImageError> {
    let mut bytes = Vec::new();
    // Most heads are short.
    let mut most = GROUP_UNIT as usize;
    loop {
        let len = bytes.len();
        bytes.resize(most, 0);
        let count = file.read(len as u64, &mut bytes[len..])?;
        bytes.truncate(len + count);
        match parse_head(&bytes) {
            Err(ImageError::Short) if count > 0 && bytes.len() < HEAD_BYTES_MAX => {
                most = (4 * bytes.len()).min(HEAD_BYTES_MAX);
            }
            other => return other,
        }
    }
}

/// Bytes of a file, in order.
struct FileSource<'a> {
    file: &'a dyn File,
    /// Position of the next bytes in the file.
    next: u64,
    bytes: Vec<u8>,
    used: usize,
    most: usize,
}

impl<'a> FileSource<'a> {
    fn new(file: &'a dyn File, at: u64, most: usize) -> FileSource<'a> {
        FileSource { file, next: at, bytes: Vec::new(), used: 0, most }
    }

    /// Makes `count` bytes available. Returns `false` if the file ends before.
    fn read(&mut self, mut to: &mut [u8]) -> Result<bool, ImageError> {
        while !to.is_empty() {
            if self.used == self.bytes.len() && !self.fill()? {
                return Ok(false);
            }
            let count = to.len().min(self.bytes.len() - self.used);
            to[..count].copy_from_slice(&self.bytes[self.used..][..count]);
            self.used += count;
            to = &mut to[count..];
        }
        Ok(true)
    }

    /// Skips to `at`, which lies further on.
    fn skip_to(&mut self, at: u64) {
        let rest = (self.bytes.len() - self.used) as u64;
        let position = self.next - rest;
        if at - position <= rest {
            self.used += (at - position) as usize;
        } else {
            (self.next, self.used) = (at, self.bytes.len());
        }
    }

    /// Reads more. Returns `false` at the end of the file.
    fn fill(&mut self) -> Result<bool, ImageError> {
        self.bytes.resize(self.most, 0);
        self.used = self.bytes.len();
        let count = self.file.read(self.next, &mut self.bytes)?;
        self.bytes.truncate(count);
        self.next += count as u64;
        self.used = 0;
        Ok(count > 0)
    }
}

/// Records in order, each verified.
struct RecordReader<'a> {
    source: FileSource<'a>,
    sums: &'a ImageSums,
    at: u64,
    bytes: Vec<u8>,
}

struct ImageScan<'a> {
    record: ImageRecord,
    sum: [u8; SUM_BYTES],
    payload: &'a [u8],
}

impl<'a> RecordReader<'a> {
    fn new(file: &'a dyn File, sums: &'a ImageSums, at: u64) -> RecordReader<'a> {
        RecordReader { source: FileSource::new(file, at, READ_BYTES), sums, at, bytes: Vec::new() }
    }

    /// Returns the next record; `None` if it is not intact, or at the end of the file.
    fn next(&mut self) -> Result<Option<ImageScan<'_>>, ImageError> {
        self.bytes.resize(RECORD_BYTES, 0);
        if !self.source.read(&mut self.bytes)? {
            return Ok(None);
        }
        let Some(record) = ImageRecord::parse(&self.bytes) else { return Ok(None) };
        self.bytes.resize(record.bytes(), 0);
        if !self.source.read(&mut self.bytes[RECORD_BYTES..])? {
            return Ok(None);
        }
        let sum = ImageRecord::checksum(self.sums, self.at, &self.bytes, record.payload_len);
        let Some(sum) = sum else { return Ok(None) };
        self.at += record.bytes() as u64;
        let payload = &self.bytes[RECORD_BYTES..][..record.payload_len];
        Ok(Some(ImageScan { record, sum, payload }))
    }

    /// Skips to the begin of the next group.
    fn end_group(&mut self) {
        if self.sums.random.is_some() {
            self.skip_to(self.at.next_multiple_of(GROUP_UNIT));
        }
    }

    fn skip_to(&mut self, at: u64) {
        self.source.skip_to(at);
        self.at = at;
    }
}

/// Verifies an image, and returns how much counts: up to the end of the last complete group.
///
/// # Errors
/// A byte before that is damaged: a group that was acknowledged can't be read.
fn scan(file: &dyn File, head: &ImageHead) -> Result<ImageExtent, ImageError> {
    let (start, sums) = (head.start, &head.sums);
    let mut extent = ImageExtent {
        start,
        first_end: start,
        end: start,
        last_start: start,
        groups: 0,
        is_acknowledged: false,
    };
    let mut records = RecordReader::new(file, sums, start);
    let is_old = sums.random.is_none();
    let read_group = if is_old { read_old_group } else { read_group };
    while read_group(&mut records, extent.groups)? {
        records.end_group();
        extent.groups += 1;
        (extent.last_start, extent.end) = (extent.end, records.at);
        if extent.groups == 1 {
            extent.first_end = records.at;
        }
    }
    let is_followed = match is_old {
        true => has_end_after(file, sums, records.at, extent.groups)?,
        false => is_followed(file, sums, &extent)?,
    };
    if is_followed {
        return Err(ImageError::Damaged(records.at));
    }
    let next = RecordReader::new(file, sums, extent.end).next()?.map(|record| record.record);
    extent.is_acknowledged = next == Some(ImageRecord::begin(extent.groups));
    Ok(extent)
}

/// Returns whether the next group is complete: from its begin to its end, with the right hash.
fn read_group(records: &mut RecordReader, number: u64) -> Result<bool, ImageError> {
    let mut hash = GroupHash::default();
    let mut is_first = true;
    while let Some(record) = records.next()? {
        let is_begin = record.record.what == RecordKind::Begin;
        if is_begin != is_first {
            return Ok(false);
        }
        let is_own = record.record.offset == number;
        if record.record.what == RecordKind::End {
            return Ok(is_own && *record.payload == hash.0);
        }
        if is_begin && !is_own {
            return Ok(false);
        }
        is_first = false;
        hash.add(record.sum);
    }
    Ok(false)
}

/// Returns whether the begin of a later group follows the end. It is written when the group before
/// it is on disk.
fn is_followed(
    file: &dyn File,
    sums: &ImageSums,
    extent: &ImageExtent,
) -> Result<bool, ImageError> {
    let mut records = RecordReader::new(file, sums, extent.end);
    let mut at = extent.end;
    let mut window = [0; RECORD_BYTES];
    loop {
        at += GROUP_UNIT;
        records.skip_to(at);
        if !records.source.read(&mut window)? {
            return Ok(false);
        }
        let is_later = |r: ImageRecord| r.what == RecordKind::Begin && r.offset > extent.groups;
        if ImageRecord::parse(&window).is_some_and(is_later)
            && ImageRecord::checksum(sums, at, &window, 0).is_some()
        {
            return Ok(true);
        }
    }
}

/// Returns whether the next group of version 1 has an end.
fn read_old_group(records: &mut RecordReader, number: u64) -> Result<bool, ImageError> {
    while let Some(ImageScan { record, .. }) = records.next()? {
        if record.what == RecordKind::End {
            return if record.offset == number {
                Ok(true)
            } else {
                Err(ImageError::Damaged(records.at))
            };
        }
    }
    Ok(false)
}

/// Returns whether the end of this or a later group of version 1 lies anywhere after `at`. It was
/// written when everything before it was on disk.
fn has_end_after(
    file: &dyn File,
    sums: &ImageSums,
    at: u64,
    next: u64,
) -> Result<bool, ImageError> {
    let mut source = FileSource::new(file, at, READ_BYTES);
    let mut window = [0; RECORD_BYTES];
    if !source.read(&mut window)? {
        return Ok(false);
    }
    loop {
        let is_end = ImageRecord::parse(&window)
            .is_some_and(|r| r.what == RecordKind::End && r.offset >= next && r.payload_len == 0);
        if is_end && ImageRecord::checksum(sums, at, &window, 0).is_some() {
            return Ok(true);
        }
        window.copy_within(UNIT.., 0);
        if !source.read(&mut window[RECORD_BYTES - UNIT..])? {
            return Ok(false);
        }
    }
}

fn put(
    device: &Device,
    io: &mut DeviceIo,
    block: &mut PageBuffer,
    record: &ImageRecord,
    payload: &[u8],
) -> Result<(), IoError> {
    match record.what {
        RecordKind::Zeros(zeros) => device.zero(io, record.offset, record.len, zeros),
        RecordKind::Object { order, fields } => {
            if block.len() < order.bytes() {
                *block = PageBuffer::new(order);
            }
            let bytes = &mut block.bytes_mut()[..order.bytes()];
            io.decode(fields, payload, order, bytes)?;
            // A block may reach beyond the end of its device.
            let len = order.bytes().min(device.size().saturating_sub(record.offset) as usize);
            device.write(io, record.offset, &bytes[..len])
        }
        RecordKind::Begin | RecordKind::End => Ok(()),
    }
}
