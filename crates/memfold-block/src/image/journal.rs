//! An image that follows its devices: what has changed is appended, group by group, and an image
//! that has grown far beyond what it holds is written anew beside it and takes its place at once.
//!
//! ```text
//! flush:  write a group: its begin, the records of all that changed, its end with their hash; sync
//! anew:   write all to a file without a name; sync; give it the name; sync the directory
//! ```
//! When a flush returns, all that was written before it began is in a group that is on disk, in the
//! file that the name leads to after a power cut. A group that is not whole was never acknowledged,
//! and is cut off when the image is opened again.
//!
//! What fails costs only itself. A group that failed does not count, the next one takes its place,
//! and what was in it has changed still. An image that can't be written anew goes on as it is. From
//! the moment the name leads to a new image only that counts, and nothing is acknowledged before
//! the name is on disk.
use super::format::{Entry, ImageError};
use super::place::Place;
use super::read::Image;
use super::writer::{Content, Failed, Writer};
use crate::device::{Device, Which};
use memfold_swap::disk::durable::{File, FileAccess};
use memfold_sys::Errno;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

/// An image is written anew when it is this much larger than twice what it was when it was last
/// new, bytes.
const SLACK_BYTES: u64 = 64 << 20;

/// Bytes of a file that are written over themselves at a time.
const PIECE_BYTES: usize = 1 << 20;

/// An image that follows its devices.
pub struct Journal {
    place: Place,
    entries: Vec<Entry>,
    devices: Vec<Arc<Device>>,
    /// [`SLACK_BYTES`], but for tests.
    slack_bytes: u64,
    state: Mutex<State>,
}

struct State {
    writer: Writer,
    groups: u64,
    /// Bytes of the image when it was written anew.
    bytes_new: u64,
    /// It can't be written anew before it is longer.
    anew_above: u64,
    /// Nothing can be appended: it is of an old version.
    is_old: bool,
    /// The name leads to this image after a power cut, too.
    is_settled: bool,
    /// Why the last flush failed.
    error: Option<ImageError>,
}

/// Writes an image of devices to a place in one step: a file that is there is replaced when all is
/// on disk.
///
/// # Errors
/// [`ImageError::System`]: the old file is as it was, or the new one is there and a power cut may
/// bring the old one back.
pub fn save(place: &Place, entries: &[Entry], devices: &[Arc<Device>]) -> Result<(), ImageError> {
    write_anew(place, entries, devices, Content::Copy)?;
    place.settle()
}

fn write_anew(
    place: &Place,
    entries: &[Entry],
    devices: &[Arc<Device>],
    content: Content,
) -> Result<Writer, ImageError> {
    let (file, draft) = place.draft()?;
    match Writer::begin(file, entries, devices, content) {
        Ok(writer) => place.put(&*writer.file, draft).map(|()| writer),
        Err(failed) => {
            place.forget(draft);
            Err(failed.into())
        }
    }
}

/// Writes bytes of a file over themselves. After a sync that failed the system has what is not on
/// disk, and takes it for what is there: so would the next process.
fn write_again(file: &dyn File, bytes: Range<u64>) -> Result<(), Errno> {
    let mut piece = vec![0; PIECE_BYTES];
    let mut at = bytes.start;
    while at < bytes.end {
        let most = piece.len().min((bytes.end - at) as usize);
        let there = file.read(at, &mut piece[..most])?;
        let written = file.write(at, &piece[..there])?;
        // Of what fills up the last group nothing may be there.
        if written == 0 {
            break;
        }
        at += written as u64;
    }
    Ok(())
}

impl Journal {
    /// The image at a place, locked against other processes; `None` if there is no file.
    ///
    /// # Errors
    /// [`ImageError`]; the file is as it was.
    pub fn look(place: &Place) -> Result<Option<Image>, ImageError> {
        place.file(FileAccess::Write)?.map(Image::read).transpose()
    }

    /// Goes on with an image whose bytes the devices hold: what lies beyond what counts is cut off.
    ///
    /// # Errors
    /// [`ImageError::System`]
    pub fn resume(
        place: Place,
        image: Image,
        devices: &[Arc<Device>],
    ) -> Result<Journal, ImageError> {
        let Image { file, head, extent } = image;
        let is_old = head.sums.random.is_none();
        if !is_old {
            file.set_len(extent.end)?;
        }
        if !extent.is_acknowledged {
            write_again(&*file, extent.last_start..extent.end)?;
        }
        // All that counts may be there only because the process that wrote it was killed.
        file.sync()?;
        place.settle()?;
        for device in devices {
            device.each_changed(Which::Changed, |_| Ok::<(), ImageError>(()))?;
        }
        devices.iter().for_each(|device| device.end_changed(true));
        let mut writer = Writer::new(file, head.sums, extent.end, devices);
        if !is_old {
            writer.mark_acknowledged(extent.groups - 1);
        }
        let mut state = State::new(writer, extent.first_end, extent.groups);
        (state.is_old, state.is_settled) = (is_old, true);
        Ok(Journal::with(place, head.entries, devices, state))
    }

    /// Begins a new image at a place, with all that the devices hold.
    ///
    /// # Errors
    /// [`ImageError::System`]
    pub fn create(
        place: Place,
        entries: &[Entry],
        devices: &[Arc<Device>],
    ) -> Result<Journal, ImageError> {
        let done = write_anew(&place, entries, devices, Content::All);
        devices.iter().for_each(|device| device.end_changed(done.is_ok()));
        let writer = done?;
        place.settle()?;
        let mut state = State::new_image(writer);
        state.is_settled = true;
        Ok(Journal::with(place, entries.to_vec(), devices, state))
    }

    fn with(place: Place, entries: Vec<Entry>, devices: &[Arc<Device>], state: State) -> Journal {
        let (devices, state) = (devices.to_vec(), Mutex::new(state));
        Journal { place, entries, devices, slack_bytes: SLACK_BYTES, state }
    }

    /// Returns when all that was written before is on disk.
    ///
    /// # Errors
    /// It can't be written; the next flush tries again.
    pub fn flush(&self) -> Result<(), ImageError> {
        let mut state = self.lock();
        let done = self.flush_with(&mut state);
        state.error = done.clone().err();
        done
    }

    fn flush_with(&self, state: &mut State) -> Result<(), ImageError> {
        self.settle(state)?;
        let long = 2 * state.bytes_new + self.slack_bytes;
        let is_long = state.writer.end > long.max(state.anew_above);
        if is_long || state.is_old && self.devices.iter().any(|device| device.has_changed()) {
            match self.replace(state) {
                Ok(()) => return self.settle(state),
                Err(error) if state.is_old => return Err(error),
                // Where there is no room for a second one, the first one goes on.
                Err(_) => state.anew_above = state.writer.end + self.slack_bytes,
            }
        }
        if state.is_old {
            return Ok(());
        }
        let done = state.writer.put_group(state.groups, &self.devices, Content::Changed);
        self.devices.iter().for_each(|device| device.end_changed(done.is_ok()));
        match done {
            Ok(is_written) => {
                state.groups += u64::from(is_written);
                Ok(())
            }
            // A new image needs more room than a group, and reads the same devices.
            Err(Failed::File(error)) if !matches!(error, Errno::NOSPC | Errno::DQUOT) => {
                self.replace(state).map_err(|_| error)?;
                self.settle(state)
            }
            Err(failed) => Err(failed.into()),
        }
    }

    /// Why the last flush failed, if it did.
    pub fn error(&self) -> Option<String> {
        self.lock().error.as_ref().map(|error| format!("{}: {error}", self.place))
    }

    /// Bytes of the image.
    pub fn bytes(&self) -> u64 {
        self.lock().writer.end
    }

    /// Writes it anew when it is so many bytes longer than twice what it was when it was new.
    #[cfg(test)]
    pub(super) fn with_slack(mut self, bytes: u64) -> Journal {
        self.slack_bytes = bytes;
        self
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nobody panics with the lock")
    }

    /// Writes the image anew. After an error the one that was there goes on.
    fn replace(&self, state: &mut State) -> Result<(), ImageError> {
        let done = write_anew(&self.place, &self.entries, &self.devices, Content::All);
        self.devices.iter().for_each(|device| device.end_changed(done.is_ok()));
        *state = State::new_image(done?);
        Ok(())
    }

    /// Returns when the name leads to this image after a power cut, too.
    fn settle(&self, state: &mut State) -> Result<(), ImageError> {
        if !state.is_settled {
            self.place.settle()?;
            state.is_settled = true;
        }
        Ok(())
    }
}

impl State {
    fn new_image(writer: Writer) -> State {
        let bytes = writer.end;
        State::new(writer, bytes, 1)
    }

    /// Of an image that was so long when it was new.
    fn new(writer: Writer, bytes_new: u64, groups: u64) -> State {
        State {
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
