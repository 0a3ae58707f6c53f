//! Reading an image: how far it counts, and putting its bytes into devices.
use super::format::{
    Entry, HEAD_BYTES_MAX, ImageError, RECORD_BYTES, Record, UNIT, What, parse_head,
};
use crate::device::{Device, Io, IoError};
use memfold_sys::page::PageBuffer;
use memfold_sys::units::Order;
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::sync::Arc;

const READ_BYTES: usize = 1 << 20;

/// How far an image counts.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Where its first record begins.
    pub start: u64,
    /// Where what counts ends.
    pub end: u64,
    /// Groups in it.
    pub groups: u64,
}

/// The devices of an image, and where its first record begins.
///
/// # Errors
/// [`ImageError`]
pub fn read_head(file: &File) -> Result<(Vec<Entry>, u64), ImageError> {
    let mut bytes = Vec::new();
    let mut from = file;
    from.seek(SeekFrom::Start(0))?;
    from.take(HEAD_BYTES_MAX as u64).read_to_end(&mut bytes)?;
    parse_head(&bytes).map(|(entries, used)| (entries, used as u64))
}

/// Records one after the other, each verified.
struct Records<'a> {
    from: BufReader<&'a File>,
    at: u64,
    bytes: Vec<u8>,
}

impl<'a> Records<'a> {
    fn new(file: &'a File, at: u64) -> Result<Records<'a>, ImageError> {
        let mut from = BufReader::with_capacity(READ_BYTES, file);
        from.seek(SeekFrom::Start(at))?;
        Ok(Records { from, at, bytes: Vec::new() })
    }

    /// The next one, and its payload. `None`: here is none that is intact, or the file ends.
    fn next(&mut self) -> Result<Option<(Record, &[u8])>, ImageError> {
        self.bytes.resize(RECORD_BYTES, 0);
        if !read_whole(&mut self.from, &mut self.bytes)? {
            return Ok(None);
        }
        let Some(record) = Record::parse(&self.bytes) else { return Ok(None) };
        self.bytes.resize(record.bytes(), 0);
        if !read_whole(&mut self.from, &mut self.bytes[RECORD_BYTES..])?
            || !Record::is_intact(&self.bytes, record.payload_len)
        {
            return Ok(None);
        }
        self.at += record.bytes() as u64;
        Ok(Some((record, &self.bytes[RECORD_BYTES..][..record.payload_len])))
    }
}

/// `false`: the file ends before.
fn read_whole(from: &mut impl Read, to: &mut [u8]) -> Result<bool, ImageError> {
    match from.read_exact(to) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// Verifies an image, and says how far it counts: up to the end of the last group whose end is
/// there.
///
/// # Errors
/// A byte before that is not what was written: a group that was acknowledged can't be read. What
/// comes after the last end may be anything, as long as no end of a group is in it: a group's end
/// is written when all before it is on disk.
pub fn scan(file: &File, start: u64) -> Result<Extent, ImageError> {
    let mut extent = Extent { start, end: start, groups: 0 };
    let mut records = Records::new(file, start)?;
    while let Some((record, _)) = records.next()? {
        if record.what == What::End {
            if record.offset != extent.groups {
                return Err(ImageError::Damaged(records.at));
            }
            extent.groups += 1;
            extent.end = records.at;
        }
    }
    if has_end_after(file, records.at, extent.groups)? {
        return Err(ImageError::Damaged(records.at));
    }
    Ok(extent)
}

/// Whether the end of a group that would come next, or later, lies anywhere after `at`.
fn has_end_after(file: &File, at: u64, next: u64) -> Result<bool, ImageError> {
    let mut from = BufReader::with_capacity(READ_BYTES, file);
    from.seek(SeekFrom::Start(at))?;
    let mut window = [0; RECORD_BYTES];
    if !read_whole(&mut from, &mut window)? {
        return Ok(false);
    }
    loop {
        let is_end =
            Record::parse(&window).is_some_and(|r| r.what == What::End && r.offset >= next);
        if is_end && Record::is_intact(&window, 0) {
            return Ok(true);
        }
        window.copy_within(UNIT.., 0);
        if !read_whole(&mut from, &mut window[RECORD_BYTES - UNIT..])? {
            return Ok(false);
        }
    }
}

/// Puts all that counts into devices, in the order of the image's exports.
///
/// # Errors
/// [`ImageError`]; the devices hold a part of it then.
pub fn restore(file: &File, extent: &Extent, devices: &[Arc<Device>]) -> Result<(), ImageError> {
    let Some(first) = devices.first() else { return Ok(()) };
    let mut io = first.io();
    let mut records = Records::new(file, extent.start)?;
    let mut block = PageBuffer::new(Order::PAGE);
    while records.at < extent.end {
        let at = records.at;
        let (record, payload) = records.next()?.ok_or(ImageError::Damaged(at))?;
        if record.what == What::End {
            continue;
        }
        let device = devices.get(record.export as usize).ok_or(ImageError::Damaged(at))?;
        put(device, &mut io, &mut block, &record, payload).map_err(|error| match error {
            IoError::NoSpace => ImageError::NoSpace,
            _ => ImageError::Damaged(at),
        })?;
    }
    Ok(())
}

fn put(
    device: &Device,
    io: &mut Io,
    block: &mut PageBuffer,
    record: &Record,
    payload: &[u8],
) -> Result<(), IoError> {
    match record.what {
        What::Zeros(zeros) => device.zero(io, record.offset, record.len, zeros),
        What::Object { order, fields } => {
            if block.len() < order.bytes() {
                *block = PageBuffer::new(order);
            }
            let bytes = &mut block.bytes_mut()[..order.bytes()];
            io.decode(fields, payload, order, bytes)?;
            // A block may reach beyond the end of its device.
            let len = order.bytes().min(device.size().saturating_sub(record.offset) as usize);
            device.write(io, record.offset, &bytes[..len])
        }
        What::End => Ok(()),
    }
}
