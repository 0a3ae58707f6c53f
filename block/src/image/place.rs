//! The path of an image, and its replacement by a new one.
use super::format::ImageError;
use crate::plain::plain;
use memfold_os::Errno;
use memfold_os::random;
use memfold_swap::disk::durable::{Directory, File, FileAccess, Folder};
use std::fmt::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The name of an image in its directory. The directory is open from the start, so no lack of
/// descriptors can come between a new image and its name.
pub struct ImagePlace {
    path: PathBuf,
    folder: Box<dyn Folder>,
    name: Vec<u8>,
}

/// The temporary name of a new image, if it has one.
pub(super) struct DraftImage(Option<Vec<u8>>);

impl ImagePlace {
    /// Opens the place that a path names.
    ///
    /// # Errors
    /// It names no file, or its directory can't be opened.
    pub fn open(path: &Path) -> Result<ImagePlace, ImageError> {
        let name = path.file_name().ok_or(ImageError::System("the path names no file".into()))?;
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let folder = Directory::open(parent.unwrap_or(Path::new(".")).as_os_str().as_bytes());
        let folder = folder.map_err(|e| {
            let why = plain(std::io::Error::from_raw_os_error(e.raw_os_error()));
            ImageError::System(format!("the directory can't be opened: {why}"))
        })?;
        Ok(ImagePlace::new(path, Box::new(folder), name.as_bytes()))
    }

    /// Makes a place from a name in a directory. The path is for messages.
    pub(super) fn new(path: &Path, folder: Box<dyn Folder>, name: &[u8]) -> ImagePlace {
        ImagePlace { path: path.to_path_buf(), folder, name: name.to_vec() }
    }

    /// Opens the file there, locked if it is to be written; `None` if there is none.
    ///
    /// # Errors
    /// [`ImageError::InUse`], or the system's.
    pub(super) fn file(&self, access: FileAccess) -> Result<Option<Box<dyn File>>, ImageError> {
        loop {
            let file = match self.folder.open(&self.name, access) {
                Err(Errno::NOENT) => return Ok(None),
                other => other?,
            };
            if access == FileAccess::Read {
                return Ok(Some(file));
            }
            lock(&*file)?;
            // A newer image may have taken its name before it was locked.
            match self.folder.identity(&self.name) {
                Err(Errno::NOENT) => return Ok(None),
                other if other? == file.identity()? => return Ok(Some(file)),
                _ => {}
            }
        }
    }

    /// Makes a new file, locked, that takes the place later.
    ///
    /// # Errors
    /// The system's; nothing is left behind.
    pub(super) fn draft(&self) -> Result<(Box<dyn File>, DraftImage), ImageError> {
        let outcome = match self.folder.create_nameless() {
            // Not every file system has O_TMPFILE.
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT) => None,
            other => Some(other?),
        };
        let (file, draft) = match outcome {
            Some(file) => (file, DraftImage(None)),
            None => {
                let name = self.hidden_name()?;
                (self.folder.create(&name)?, DraftImage(Some(name)))
            }
        };
        if let Err(error) = lock(&*file) {
            self.forget(draft);
            return Err(error);
        }
        Ok((file, draft))
    }

    /// Puts a new file, whose content is on disk, in the place. It counts from then on. After a
    /// power cut it counts once [`ImagePlace::settle`] has returned.
    ///
    /// # Errors
    /// The system's; the former file is still there.
    pub(super) fn put(&self, file: &dyn File, draft: DraftImage) -> Result<(), ImageError> {
        let name = match draft.0 {
            Some(hidden) => hidden,
            None => {
                let name = self.hidden_name()?;
                file.link(&name)?;
                name
            }
        };
        if let Err(error) = self.folder.rename(&name, &self.name) {
            let _ = self.folder.remove(&name);
            return Err(error.into());
        }
        Ok(())
    }

    /// Removes a draft that is not used.
    pub(super) fn forget(&self, draft: DraftImage) {
        if let Some(name) = draft.0 {
            let _ = self.folder.remove(&name);
        }
    }

    /// Waits until the name leads to this file also after a power cut.
    ///
    /// # Errors
    /// It may lead to the one that was there before.
    pub(super) fn settle(&self) -> Result<(), ImageError> {
        Ok(self.folder.sync()?)
    }

    /// Returns a free name, whatever earlier processes have left behind.
    fn hidden_name(&self) -> Result<Vec<u8>, ImageError> {
        let mut number = [0; 8];
        random::fill(&mut number)?;
        let mut end = String::from(".");
        for byte in number {
            write!(end, "{byte:02x}").expect("into a string");
        }
        // A name has at most 255 bytes.
        let prefix_len = self.name.len().min(200);
        Ok([b".", &self.name[..prefix_len], end.as_bytes(), b".new"].concat())
    }
}

/// Shows its path.
impl fmt::Display for ImagePlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())
    }
}

/// Locks an image against other processes.
fn lock(file: &dyn File) -> Result<(), ImageError> {
    file.lock().map_err(|error| match error {
        Errno::WOULDBLOCK => ImageError::InUse,
        other => other.into(),
    })
}
