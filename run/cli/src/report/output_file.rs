//! A file of a flag such as `--stats-file`. It is opened before the program starts, filled after its
//! end, and never half written.
use crate::failure::CommandFailure;
use crate::program::plain;
use std::fs::{self, File};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};

/// A file that can be written. Dropped without [`OutputFile::write`], it leaves no trace.
pub struct OutputFile {
    /// The flag that names the file, for messages.
    flag: &'static str,
    /// The path as the user gave it, for messages.
    name: PathBuf,
    out: File,
    /// The temporary file and the one it will replace; `None` for a device, a pipe or a
    /// descriptor, which is written in place.
    replace: Option<(PathBuf, PathBuf)>,
}

impl OutputFile {
    /// Checks that `name` can be written. An existing file stays unchanged until
    /// [`OutputFile::write`].
    ///
    /// # Errors
    /// 125: the file can't be written.
    pub fn open(flag: &'static str, name: &Path) -> Result<OutputFile, CommandFailure> {
        let fail = |e: io::Error| {
            CommandFailure::own(format!("{flag}: {}: {}", name.display(), plain(&e)))
        };
        if ["/dev/stdout", "/dev/stderr", "/dev/fd", "/proc/self/fd"]
            .iter()
            .any(|open| name.starts_with(open))
        {
            let out = File::options().append(true).open(name).map_err(fail)?;
            return Ok(OutputFile { flag, name: name.into(), out, replace: None });
        }
        // The path is absolute and without links, because the rename must replace the file itself.
        let target = match fs::canonicalize(name) {
            Ok(path) => path,
            Err(e) if e.kind() == ErrorKind::NotFound => std::path::absolute(name).map_err(fail)?,
            Err(e) => return Err(fail(e)),
        };
        match fs::metadata(&target) {
            Ok(found) if found.is_dir() => return Err(fail(ErrorKind::IsADirectory.into())),
            Ok(found) if !found.is_file() => {
                let out = File::options().write(true).open(&target).map_err(fail)?;
                return Ok(OutputFile { flag, name: name.into(), out, replace: None });
            }
            // A file that can't be written must not be replaced either.
            Ok(_) => drop(File::options().write(true).open(&target).map_err(fail)?),
            Err(_) => {}
        }
        let Some(file_name) = target.file_name() else {
            return Err(fail(ErrorKind::InvalidInput.into()));
        };
        let mut temporary = std::ffi::OsString::from(".");
        temporary.push(file_name);
        temporary.push(format!(".{}.tmp", std::process::id()));
        let temporary = target.with_file_name(temporary);
        let out = File::options().write(true).create_new(true).open(&temporary).map_err(fail)?;
        Ok(OutputFile { flag, name: name.into(), out, replace: Some((temporary, target)) })
    }

    /// Returns the path as the user gave it.
    pub fn name(&self) -> &Path {
        &self.name
    }

    /// Renames the file that the new one would replace: `.old` is added to its name. Returns the
    /// path as the user would write it, or `None` if there is no such file.
    ///
    /// # Errors
    /// 125: it can't be renamed.
    pub fn keep_old(&self) -> Result<Option<PathBuf>, CommandFailure> {
        let Some((_, target)) = self.replace.as_ref().filter(|(_, target)| target.exists()) else {
            return Ok(None);
        };
        let old = |path: &Path| {
            let mut name = path.as_os_str().to_os_string();
            name.push(".old");
            PathBuf::from(name)
        };
        fs::rename(target, old(target)).map_err(|e| {
            CommandFailure::own(format!("{}: {}: {}", self.flag, self.name.display(), plain(&e)))
        })?;
        Ok(Some(old(&self.name)))
    }

    /// Writes the whole text and puts the file in its place.
    ///
    /// # Errors
    /// 125: the disk is full, or the file's directory is gone.
    pub fn write(self, text: &str) -> Result<(), CommandFailure> {
        self.write_by(|out| out.write_all(text.as_bytes()))
    }

    /// Writes what `write` writes, as [`OutputFile::write`] does.
    ///
    /// # Errors
    /// Those of [`OutputFile::write`], and of `write`.
    pub fn write_by(
        mut self,
        write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<(), CommandFailure> {
        let mut out = BufWriter::new(&self.out);
        let outcome = write(&mut out).and_then(|()| out.flush());
        let outcome = outcome.and_then(|()| match &self.replace {
            Some((from, to)) => fs::rename(from, to),
            None => Ok(()),
        });
        let outcome = outcome.map_err(|e| {
            CommandFailure::own(format!("{}: {}: {}", self.flag, self.name.display(), plain(&e)))
        });
        if outcome.is_ok() {
            self.replace = None;
        }
        outcome
    }
}

impl Drop for OutputFile {
    fn drop(&mut self) {
        if let Some((temporary, _)) = &self.replace {
            let _ = fs::remove_file(temporary);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("memfold-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        path
    }

    fn names(path: &Path) -> Vec<String> {
        fs::read_dir(path).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn a_file_appears_whole_and_only_when_written() {
        let dir = directory("whole");
        let path = dir.join("s.json");
        drop(OutputFile::open("--stats-file", &path).unwrap());
        assert!(names(&dir).is_empty());
        fs::write(&path, "old").unwrap();
        let file = OutputFile::open("--stats-file", &path).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        file.write("new").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(names(&dir), ["s.json"]);
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_link_keeps_pointing_and_a_device_stays_a_device() {
        let dir = directory("link");
        fs::write(dir.join("real"), "old").unwrap();
        std::os::unix::fs::symlink("real", dir.join("link")).unwrap();
        OutputFile::open("--stats-file", &dir.join("link")).unwrap().write("new").unwrap();
        assert!(fs::symlink_metadata(dir.join("link")).unwrap().is_symlink());
        assert_eq!(fs::read_to_string(dir.join("real")).unwrap(), "new");
        fs::remove_dir_all(&dir).unwrap();
        OutputFile::open("--stats-file", Path::new("/dev/null")).unwrap().write("gone").unwrap();
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
    }

    #[test]
    fn directories_and_missing_parents_are_refused() {
        for bad in ["/tmp", "/nonexistent/s.json", "/", ""] {
            assert_eq!(
                OutputFile::open("--stats-file", Path::new(bad)).err().map(|f| f.status),
                Some(125),
                "{bad}"
            );
        }
    }
}
