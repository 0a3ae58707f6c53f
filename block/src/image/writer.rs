//! Writes records at the end of an image, a group at a time.
use super::format::{
    self, DeviceEntry, GROUP_UNIT, GroupHash, ImageError, ImageRecord, ImageSums, SUM_BYTES, UNIT,
};
use crate::device::{BlockChoice, Device, DirtyPiece, IoError, ZeroPolicy};
use memfold_os::Errno;
use memfold_os::random;
use memfold_swap::disk::durable::File;
use std::sync::Arc;

/// Records are gathered up to this many bytes and then written.
const GATHER_BYTES: usize = 1 << 20;

/// Which blocks of its devices a group holds.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum GroupContent {
    /// Changes, which are then in progress.
    Changed,
    /// Everything; changes are then in progress.
    All,
    /// Everything, for a file that does not follow the devices.
    Copy,
}

/// Why a group was not written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GroupFailure {
    /// A device could not be read.
    Device(IoError),
    /// The file could not be written.
    File(Errno),
}

impl From<IoError> for GroupFailure {
    fn from(error: IoError) -> GroupFailure {
        GroupFailure::Device(error)
    }
}

impl From<Errno> for GroupFailure {
    fn from(error: Errno) -> GroupFailure {
        GroupFailure::File(error)
    }
}

impl From<GroupFailure> for ImageError {
    fn from(failed: GroupFailure) -> ImageError {
        match failed {
            GroupFailure::Device(error) => error.into(),
            GroupFailure::File(error) => error.into(),
        }
    }
}

/// Gathers records and writes them at the end of a file.
pub struct ImageWriter {
    /// The file. A new one becomes the image with its name.
    pub file: Box<dyn File>,
    /// Position of the next group. Everything before is on disk and never written again.
    pub end: u64,
    sums: ImageSums,
    /// Position of the gathered records.
    at: u64,
    gathered: Vec<u8>,
    hash: GroupHash,
    payload: Vec<u8>,
    /// Zeros of an export that may still continue.
    zeros: Option<(u32, u64, u64, ZeroPolicy)>,
}

impl ImageWriter {
    /// Makes a writer that continues at `end`.
    pub fn new(
        file: Box<dyn File>,
        sums: ImageSums,
        end: u64,
        devices: &[Arc<Device>],
    ) -> ImageWriter {
        let most = devices.iter().map(|device| device.payload_max()).max().unwrap_or(0);
        ImageWriter {
            file,
            end,
            sums,
            at: end,
            gathered: Vec::with_capacity(GATHER_BYTES + most + 2 * GROUP_UNIT as usize),
            hash: GroupHash::default(),
            payload: vec![0; most],
            zeros: None,
        }
    }

    /// Writes a whole image of devices to an empty file, and waits until it is on disk.
    ///
    /// # Errors
    /// [`GroupFailure`]; the file holds a part of it then.
    pub fn begin(
        file: Box<dyn File>,
        entries: &[DeviceEntry],
        devices: &[Arc<Device>],
        content: GroupContent,
    ) -> Result<ImageWriter, GroupFailure> {
        let mut number = [0; SUM_BYTES];
        random::fill(&mut number)?;
        let mut writer = ImageWriter::new(file, ImageSums { random: Some(number) }, 0, devices);
        writer.gathered.extend(format::head(entries, number));
        writer.write()?;
        writer.end = writer.at;
        writer.put_group(0, devices, content)?;
        Ok(writer)
    }

    /// Writes a group, and waits until it is on disk. Returns `false` if it would be empty, and
    /// nothing was written.
    ///
    /// # Errors
    /// [`GroupFailure`]: nothing of it counts, and the next group takes its place.
    pub fn put_group(
        &mut self,
        number: u64,
        devices: &[Arc<Device>],
        content: GroupContent,
    ) -> Result<bool, GroupFailure> {
        let outcome = self.try_group(number, devices, content);
        match outcome {
            Ok(true) => {
                self.end = self.at;
                self.mark_acknowledged(number);
            }
            Ok(false) => {}
            Err(_) if content == GroupContent::Changed => {
                // This only frees space; the data there does not count anyway.
                let _ = self.file.set_len(self.end);
            }
            Err(_) => {}
        }
        outcome
    }

    fn try_group(
        &mut self,
        number: u64,
        devices: &[Arc<Device>],
        content: GroupContent,
    ) -> Result<bool, GroupFailure> {
        self.gathered.clear();
        (self.at, self.hash, self.zeros) = (self.end, GroupHash::default(), None);
        self.put_record(&ImageRecord::begin(number), &[]);
        self.put_devices(devices, content)?;
        let is_empty =
            self.at == self.end && self.gathered.len() == ImageRecord::begin(number).bytes();
        if is_empty && content == GroupContent::Changed {
            return Ok(false);
        }
        let GroupHash(hash) = self.hash;
        self.put_record(&ImageRecord::end(number), &hash);
        let end = (self.at + self.gathered.len() as u64).next_multiple_of(GROUP_UNIT);
        self.gathered.resize((end - self.at) as usize, 0);
        self.write()?;
        self.file.sync()?;
        Ok(true)
    }

    /// Notes in the file that a group is on disk, by the begin of the next one, which is written
    /// again with that group. If this fails, damage to this group may look like a power cut.
    pub fn mark_acknowledged(&mut self, number: u64) {
        self.gathered.clear();
        ImageRecord::begin(number + 1).put(&self.sums, self.end, &[], &mut self.gathered);
        let _ = self.file.write(self.end, &self.gathered);
        self.gathered.clear();
    }

    fn put_devices(
        &mut self,
        devices: &[Arc<Device>],
        content: GroupContent,
    ) -> Result<(), GroupFailure> {
        for (export, device) in (0..).zip(devices) {
            let mut payload = std::mem::take(&mut self.payload);
            let each =
                |block| device.describe(block, &mut payload, |piece| self.put(export, &piece));
            let outcome = match content {
                GroupContent::Changed => device.each_changed(BlockChoice::Changed, each),
                GroupContent::All => device.each_changed(BlockChoice::All, each),
                GroupContent::Copy => device.each_written(each),
            };
            self.payload = payload;
            outcome?;
        }
        self.put_zeros()
    }

    fn put(&mut self, export: u32, piece: &DirtyPiece) -> Result<(), GroupFailure> {
        match *piece {
            DirtyPiece::Zeros { offset, len, zeros } => match &mut self.zeros {
                Some((of, start, so_far, kind))
                    if *of == export && *kind == zeros && *start + *so_far == offset =>
                {
                    *so_far += len;
                    Ok(())
                }
                _ => {
                    self.put_zeros()?;
                    self.zeros = Some((export, offset, len, zeros));
                    Ok(())
                }
            },
            DirtyPiece::Object { payload, .. } => {
                self.put_zeros()?;
                self.put_record(&ImageRecord::of(export, piece), payload);
                self.write_some()
            }
        }
    }

    fn put_zeros(&mut self) -> Result<(), GroupFailure> {
        let Some((export, offset, len, zeros)) = self.zeros.take() else { return Ok(()) };
        self.put_record(&ImageRecord::of(export, &DirtyPiece::Zeros { offset, len, zeros }), &[]);
        self.write_some()
    }

    fn put_record(&mut self, record: &ImageRecord, payload: &[u8]) {
        let at = self.at + self.gathered.len() as u64;
        debug_assert!(at.is_multiple_of(UNIT as u64));
        let sum = record.put(&self.sums, at, payload, &mut self.gathered);
        self.hash.add(sum);
    }

    fn write_some(&mut self) -> Result<(), GroupFailure> {
        if self.gathered.len() < GATHER_BYTES { Ok(()) } else { self.write() }
    }

    fn write(&mut self) -> Result<(), GroupFailure> {
        let mut rest = &self.gathered[..];
        while !rest.is_empty() {
            match self.file.write(self.at, rest)? {
                0 => return Err(Errno::IO.into()),
                count => {
                    self.at += count as u64;
                    rest = &rest[count..];
                }
            }
        }
        self.gathered.clear();
        Ok(())
    }
}
