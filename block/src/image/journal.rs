//! An image that follows its devices. Changes are appended group by group. An image that has grown
//! far beyond its content is rewritten beside itself and replaced in one step.
//!
//! ```text
//! flush:  write a group: its begin, the records of all that changed, its end with their hash; sync
//! anew:   write all to a file without a name; sync; give it the name; sync the directory
//! ```
//! When a flush returns, everything written before it began is in a group on disk, in the file that
//! the name leads to after a power cut. An incomplete group was never acknowledged, and is cut off
//! when the image is opened again.
//!
//! A failure affects only its own operation. A failed group does not count, the next one takes its
//! place, and its changes count as changes again. An image that can't be rewritten stays in use.
//! Once the name leads to a new image only that counts, and no flush is acknowledged before the
//! name is on disk.
use super::format::{DeviceEntry, ImageError};
use super::place::ImagePlace;
use super::read::VerifiedImage;
use super::writer::{GroupContent, GroupFailure, ImageWriter};
use crate::device::{BlockChoice, Device};
use memfold_os::Errno;
use memfold_swap::disk::durable::{File, FileAccess};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

/// An image is rewritten when it is this much longer than twice its length after the last rewrite,
/// bytes.
const SLACK_BYTES: u64 = 64 << 20;

/// Bytes of a file that are overwritten with themselves at a time.
const PIECE_BYTES: usize = 1 << 20;

/// An image that follows its devices.
pub struct ImageJournal {
    place: ImagePlace,
    entries: Vec<DeviceEntry>,
    devices: Vec<Arc<Device>>,
    /// [`SLACK_BYTES`], which tests change.
    slack_bytes: u64,
    state: Mutex<JournalState>,
}

struct JournalState {
    writer: ImageWriter,
    groups: u64,
    /// Bytes of the image when it was last rewritten.
    bytes_new: u64,
    /// The next rewrite is tried at this length.
    anew_above: u64,
    /// Nothing can be appended, because the image is of an old version.
    is_old: bool,
    /// The name leads to this image also after a power cut.
    is_settled: bool,
    /// The error of the last flush.
    error: Option<ImageError>,
}

/// Writes an image of devices to a place in one step: an existing file is replaced when everything
/// is on disk.
///
/// # Errors
/// [`ImageError::System`]: the old file is as it was, or the new one is there and a power cut may
/// bring the old one back.
pub fn save(
    place: &ImagePlace,
    entries: &[DeviceEntry],
    devices: &[Arc<Device>],
) -> Result<(), ImageError> {
    write_anew(place, entries, devices, GroupContent::Copy)?;
    place.settle()
}

fn write_anew(
    place: &ImagePlace,
    entries: &[DeviceEntry],
    devices: &[Arc<Device>],
    content: GroupContent,
) -> Result<ImageWriter, ImageError> {
    let (file, draft) = place.draft()?;
    match ImageWriter::begin(file, entries, devices, content) {
        Ok(writer) => place.put(&*writer.file, draft).map(|()| writer),
        Err(failed) => {
            place.forget(draft);
            Err(failed.into())
        }
    }
}

/// Overwrites bytes of a file with themselves. After a failed sync the page cache may hold data
/// that is not on disk, as if it were. The next process would believe it.
fn write_again(file: &dyn File, bytes: Range<u64>) -> Result<(), Errno> {
    let mut piece = vec![0; PIECE_BYTES];
    let mut at = bytes.start;
    while at < bytes.end {
        let most = piece.len().min((bytes.end - at) as usize);
        let count = file.read(at, &mut piece[..most])?;
        let written_bytes = file.write(at, &piece[..count])?;
        // The padding of the last group may be missing.
        if written_bytes == 0 {
            break;
        }
        at += written_bytes as u64;
    }
    Ok(())
}

impl ImageJournal {
    /// Opens the image at a place, locked against other processes; `None` if there is no file.
    ///
    /// # Errors
    /// [`ImageError`]; the file is as it was.
    pub fn look(place: &ImagePlace) -> Result<Option<VerifiedImage>, ImageError> {
        place.file(FileAccess::Write)?.map(VerifiedImage::read).transpose()
    }

    /// Continues an image whose bytes the devices hold. Cuts off what does not count.
    ///
    /// # Errors
    /// [`ImageError::System`]
    pub fn resume(
        place: ImagePlace,
        image: VerifiedImage,
        devices: &[Arc<Device>],
    ) -> Result<ImageJournal, ImageError> {
        let VerifiedImage { file, head, extent } = image;
        let is_old = head.sums.random.is_none();
        if !is_old {
            file.set_len(extent.end)?;
        }
        if !extent.is_acknowledged {
            write_again(&*file, extent.last_start..extent.end)?;
        }
        // The data may be only in the page cache, if the process that wrote it was killed.
        file.sync()?;
        place.settle()?;
        for device in devices {
            device.each_changed(BlockChoice::Changed, |_| Ok::<(), ImageError>(()))?;
        }
        devices.iter().for_each(|device| device.end_changed(true));
        let mut writer = ImageWriter::new(file, head.sums, extent.end, devices);
        if !is_old {
            writer.mark_acknowledged(extent.groups - 1);
        }
        let mut state = JournalState::new(writer, extent.first_end, extent.groups);
        (state.is_old, state.is_settled) = (is_old, true);
        Ok(ImageJournal::with(place, head.entries, devices, state))
    }

    /// Starts a new image at a place, with the content of the devices.
    ///
    /// # Errors
    /// [`ImageError::System`]
    pub fn create(
        place: ImagePlace,
        entries: &[DeviceEntry],
        devices: &[Arc<Device>],
    ) -> Result<ImageJournal, ImageError> {
        let outcome = write_anew(&place, entries, devices, GroupContent::All);
        devices.iter().for_each(|device| device.end_changed(outcome.is_ok()));
        let writer = outcome?;
        place.settle()?;
        let mut state = JournalState::new_image(writer);
        state.is_settled = true;
        Ok(ImageJournal::with(place, entries.to_vec(), devices, state))
    }

    fn with(
        place: ImagePlace,
        entries: Vec<DeviceEntry>,
        devices: &[Arc<Device>],
        state: JournalState,
    ) -> ImageJournal {
        let (devices, state) = (devices.to_vec(), Mutex::new(state));
        ImageJournal { place, entries, devices, slack_bytes: SLACK_BYTES, state }
    }

    /// Waits until everything that was written before is on disk.
    ///
    /// # Errors
    /// It can't be written; the next flush tries again.
    pub fn flush(&self) -> Result<(), ImageError> {
        let mut state = self.lock();
        let outcome = self.flush_with(&mut state);
        state.error = outcome.clone().err();
        outcome
    }

    fn flush_with(&self, state: &mut JournalState) -> Result<(), ImageError> {
        self.settle(state)?;
        let long = 2 * state.bytes_new + self.slack_bytes;
        let is_long = state.writer.end > long.max(state.anew_above);
        if is_long || state.is_old && self.devices.iter().any(|device| device.has_changed()) {
            match self.replace(state) {
                Ok(()) => return self.settle(state),
                Err(error) if state.is_old => return Err(error),
                // Where there is no room for a second image, the first one stays in use.
                Err(_) => state.anew_above = state.writer.end + self.slack_bytes,
            }
        }
        if state.is_old {
            return Ok(());
        }
        let outcome = state.writer.put_group(state.groups, &self.devices, GroupContent::Changed);
        self.devices.iter().for_each(|device| device.end_changed(outcome.is_ok()));
        match outcome {
            Ok(is_written) => {
                state.groups += u64::from(is_written);
                Ok(())
            }
            // A rewrite needs more room than a group, and reads the same devices.
            Err(GroupFailure::File(error)) if !matches!(error, Errno::NOSPC | Errno::DQUOT) => {
                self.replace(state).map_err(|_| error)?;
                self.settle(state)
            }
            Err(failed) => Err(failed.into()),
        }
    }

    /// Returns the error of the last flush, if it failed.
    pub fn error(&self) -> Option<String> {
        self.lock().error.as_ref().map(|error| format!("{}: {error}", self.place))
    }

    /// Returns the bytes of the image.
    pub fn bytes(&self) -> u64 {
        self.lock().writer.end
    }

    /// Sets how much longer than twice its first length the image may be before it is rewritten.
    #[cfg(test)]
    pub(super) fn with_slack(mut self, bytes: u64) -> ImageJournal {
        self.slack_bytes = bytes;
        self
    }

    fn lock(&self) -> MutexGuard<'_, JournalState> {
        self.state.lock().expect("nobody panics with the lock")
    }

    /// Rewrites the image. After an error the old one stays in use.
    fn replace(&self, state: &mut JournalState) -> Result<(), ImageError> {
        let outcome = write_anew(&self.place, &self.entries, &self.devices, GroupContent::All);
        self.devices.iter().for_each(|device| device.end_changed(outcome.is_ok()));
        *state = JournalState::new_image(outcome?);
        Ok(())
    }

    /// Waits until the name leads to this image also after a power cut.
    fn settle(&self, state: &mut JournalState) -> Result<(), ImageError> {
        if !state.is_settled {
            self.place.settle()?;
            state.is_settled = true;
        }
        Ok(())
    }
}

impl JournalState {
    fn new_image(writer: ImageWriter) -> JournalState {
        let bytes = writer.end;
        JournalState::new(writer, bytes, 1)
    }

    /// Returns the length at which an image of this first length is rewritten.
    fn new(writer: ImageWriter, bytes_new: u64, groups: u64) -> JournalState {
        JournalState {
            writer,
            groups,
            bytes_new,
            anew_above: 0,
            is_old: false,
            is_settled: false,
            error: None,
        }
    }
}
