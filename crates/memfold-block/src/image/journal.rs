//! An image that follows its devices: what has changed is appended, group by group, and an image
//! that has grown far beyond what it holds is written anew beside it and takes its place at once.
//!
//! ```text
//! flush:  write the records of all that changed; sync; write the end of the group; sync
//! ```
//! When it returns, all that was written before it began is in a group whose end is on disk. A
//! group without its end was never acknowledged, and is cut off when the image is opened again.
use super::format::{self, Entry, ImageError, Record};
use super::read::{self, Extent};
use crate::device::{Device, Piece, Zeros};
use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

/// Records are gathered up to so many bytes, and then written.
const GATHER_BYTES: usize = 1 << 20;
/// An image is written anew when it is this much larger than twice what it was when it was last
/// new, bytes.
const SLACK_BYTES: u64 = 64 << 20;

/// An image that follows its devices.
pub struct Journal {
    path: PathBuf,
    devices: Vec<Arc<Device>>,
    state: Mutex<State>,
}

struct State {
    writer: Writer,
    /// Bytes of the image when it was written anew.
    base: u64,
    groups: u64,
    /// What is on disk may not be what was written: it has to be written anew.
    is_broken: bool,
    /// Why the last flush failed.
    error: Option<ImageError>,
}

/// Gathers records and writes them at the end of a file.
struct Writer {
    file: File,
    end: u64,
    gathered: Vec<u8>,
    payload: Vec<u8>,
    /// Zeros of an export that may still go on.
    zeros: Option<(u32, u64, u64, Zeros)>,
}

/// A file that is written beside another one, to take its place; it goes away if it doesn't.
struct Beside {
    path: PathBuf,
    is_done: bool,
}

impl Drop for Beside {
    fn drop(&mut self) {
        if !self.is_done {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Writes an image of devices to `path` in one step: a file that is there is replaced when all is
/// on disk.
///
/// # Errors
/// [`ImageError::System`]: the old file is as it was.
pub fn save(path: &Path, entries: &[Entry], devices: &[Arc<Device>]) -> Result<(), ImageError> {
    write_anew(path, entries, devices).map(drop)
}

fn write_anew(
    path: &Path,
    entries: &[Entry],
    devices: &[Arc<Device>],
) -> Result<Writer, ImageError> {
    let directory = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name =
        path.file_name().ok_or_else(|| ImageError::System("no name of a file".to_string()))?;
    let mut hidden = std::ffi::OsString::from(".");
    hidden.push(name);
    hidden.push(format!(".{}.new", std::process::id()));
    let mut beside = Beside { path: directory.join(hidden), is_done: false };
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&beside.path)?;
    lock(&file)?;
    let mut writer = Writer::new(file, 0, devices);
    writer.gathered.extend(format::head(entries));
    writer.put_devices(devices, true)?;
    writer.end_group(0)?;
    fs::rename(&beside.path, path)?;
    beside.is_done = true;
    // The name is on disk, too.
    File::open(directory)?.sync_all()?;
    Ok(writer)
}

/// Keeps other processes from using an image.
fn lock(file: &File) -> Result<(), ImageError> {
    // SAFETY: a descriptor of ours, and no memory.
    let done = unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) };
    if done == 0 { Ok(()) } else { Err(ImageError::InUse) }
}

impl Journal {
    /// Opens the image at `path`, locked against other processes, with what [`read::scan`] says of
    /// it; `None` if there is no file.
    ///
    /// # Errors
    /// [`ImageError`]; the file is as it was.
    pub fn look(path: &Path) -> Result<Option<(File, Vec<Entry>, Extent)>, ImageError> {
        let file = match OpenOptions::new().read(true).write(true).open(path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            other => other?,
        };
        lock(&file)?;
        let (entries, start) = read::read_head(&file)?;
        let extent = read::scan(&file, start)?;
        // It took its name when its first group was on disk.
        if extent.groups == 0 {
            return Err(ImageError::Damaged(start));
        }
        Ok(Some((file, entries, extent)))
    }

    /// Goes on with an image whose bytes the devices hold: what lies beyond what counts is cut off.
    ///
    /// # Errors
    /// [`ImageError::System`]
    pub fn resume(
        path: &Path,
        file: File,
        extent: &Extent,
        devices: &[Arc<Device>],
    ) -> Result<Journal, ImageError> {
        file.set_len(extent.end)?;
        for device in devices {
            let _ = device.each_changed(false, |_| Ok::<(), ()>(()));
        }
        let state = State {
            writer: Writer::new(file, extent.end, devices),
            base: extent.end,
            groups: extent.groups,
            is_broken: false,
            error: None,
        };
        Ok(Journal {
            path: path.to_path_buf(),
            devices: devices.to_vec(),
            state: Mutex::new(state),
        })
    }

    /// Begins a new image at `path`, with all that the devices hold.
    ///
    /// # Errors
    /// [`ImageError::System`]
    pub fn create(
        path: &Path,
        entries: &[Entry],
        devices: &[Arc<Device>],
    ) -> Result<Journal, ImageError> {
        let writer = write_anew(path, entries, devices)?;
        let state = State { base: writer.end, writer, groups: 1, is_broken: false, error: None };
        Ok(Journal {
            path: path.to_path_buf(),
            devices: devices.to_vec(),
            state: Mutex::new(state),
        })
    }

    /// Returns when all that was written before is on disk.
    ///
    /// # Errors
    /// It can't be written; the next flush tries again with all of it.
    pub fn flush(&self) -> Result<(), ImageError> {
        let mut state = self.lock();
        let done = self.flush_with(&mut state);
        state.error = done.clone().err();
        done
    }

    fn flush_with(&self, state: &mut State) -> Result<(), ImageError> {
        if state.is_broken {
            return self.write_anew(state);
        }
        // Where there is no room for a second one, the first one goes on.
        if state.writer.end > 2 * state.base + SLACK_BYTES && self.write_anew(state).is_ok() {
            return Ok(());
        }
        let end = state.writer.end;
        let groups = state.groups;
        let done = state.writer.put_devices(&self.devices, false).and_then(|()| {
            if state.writer.end == end && state.writer.gathered.is_empty() {
                return Ok(false);
            }
            state.writer.end_group(groups).map(|()| true)
        });
        match done {
            Ok(written) => state.groups += u64::from(written),
            Err(_) => self.undo(state, end),
        }
        done.map(drop)
    }

    /// Why the last flush failed, if it did.
    pub fn error(&self) -> Option<String> {
        self.lock().error.as_ref().map(|error| format!("{}: {error}", self.path.display()))
    }

    /// Bytes of the image.
    pub fn bytes(&self) -> u64 {
        self.lock().writer.end
    }

    /// Writes to another file from now on, as if the first one could no longer be written to.
    #[cfg(test)]
    pub(super) fn use_file(&self, file: File) {
        self.lock().writer.file = file;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nobody panics with the lock")
    }

    /// After a failure: nothing of the group counts, and all of it has changed still.
    fn undo(&self, state: &mut State, end: u64) {
        state.writer.discard();
        state.writer.end = end;
        let file = &state.writer.file;
        state.is_broken = file.set_len(end).and_then(|()| file.sync_all()).is_err();
        self.devices.iter().for_each(|device| device.set_all_changed());
    }

    fn write_anew(&self, state: &mut State) -> Result<(), ImageError> {
        let (entries, _) = read::read_head(&state.writer.file)?;
        let done = write_anew(&self.path, &entries, &self.devices);
        let writer =
            done.inspect_err(|_| self.devices.iter().for_each(|device| device.set_all_changed()))?;
        *state = State { base: writer.end, writer, groups: 1, is_broken: false, error: None };
        Ok(())
    }
}

impl Writer {
    fn new(file: File, end: u64, devices: &[Arc<Device>]) -> Writer {
        let most = devices.iter().map(|device| device.payload_max()).max().unwrap_or(0);
        Writer {
            file,
            end,
            gathered: Vec::with_capacity(GATHER_BYTES + most + 4096),
            payload: vec![0; most],
            zeros: None,
        }
    }

    /// What has changed of each device, or all of it.
    fn put_devices(&mut self, devices: &[Arc<Device>], all: bool) -> Result<(), ImageError> {
        for (export, device) in (0..).zip(devices) {
            let mut payload = std::mem::take(&mut self.payload);
            let done = device.each_changed(all, |block| {
                device.describe(block, &mut payload, |piece| self.put(export, &piece))
            });
            self.payload = payload;
            done?;
        }
        self.put_zeros()
    }

    fn put(&mut self, export: u32, piece: &Piece) -> Result<(), ImageError> {
        match *piece {
            Piece::Zeros { offset, len, zeros } => match &mut self.zeros {
                Some((of, start, so_far, kind))
                    if *of == export && *kind == zeros && *start + *so_far == offset =>
                {
                    *so_far += len;
                }
                _ => {
                    self.put_zeros()?;
                    self.zeros = Some((export, offset, len, zeros));
                }
            },
            Piece::Object { payload, .. } => {
                self.put_zeros()?;
                Record::of(export, piece).put(payload, &mut self.gathered);
                self.write_some()?;
            }
        }
        Ok(())
    }

    fn put_zeros(&mut self) -> Result<(), ImageError> {
        if let Some((export, offset, len, zeros)) = self.zeros.take() {
            Record::of(export, &Piece::Zeros { offset, len, zeros }).put(&[], &mut self.gathered);
            self.write_some()?;
        }
        Ok(())
    }

    fn write_some(&mut self) -> Result<(), ImageError> {
        if self.gathered.len() < GATHER_BYTES { Ok(()) } else { self.write() }
    }

    fn write(&mut self) -> Result<(), ImageError> {
        self.file.write_all_at(&self.gathered, self.end)?;
        self.end += self.gathered.len() as u64;
        self.gathered.clear();
        Ok(())
    }

    /// Its end is written when all before it is on disk, so that an end that is there says that all
    /// is.
    fn end_group(&mut self, number: u64) -> Result<(), ImageError> {
        self.write()?;
        self.file.sync_data()?;
        Record::end(number).put(&[], &mut self.gathered);
        self.write()?;
        Ok(self.file.sync_data()?)
    }

    fn discard(&mut self) {
        self.gathered.clear();
        self.zeros = None;
    }
}
