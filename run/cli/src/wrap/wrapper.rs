//! The scripts that `memfold wrap` writes: one for each command, in one directory.
use crate::failure::CommandFailure;
use crate::program::{self, WRAPPER_BEGIN, is_wrapper, own_path, user_folder};
use std::env;
use std::ffi::OsStr;
use std::fs::{self, OpenOptions, Permissions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// The directory of the scripts.
pub struct WrapperFolder(PathBuf);

impl WrapperFolder {
    /// Returns the given directory, or this user's own.
    ///
    /// # Errors
    /// 125: none is given, and the user has none.
    pub fn of(given: Option<&PathBuf>) -> Result<WrapperFolder, CommandFailure> {
        let path = match given {
            Some(path) => std::path::absolute(path)
                .map_err(|e| CommandFailure::own(format!("--dir: {}", program::plain(&e))))?,
            None => user_folder("XDG_DATA_HOME", ".local/share")?.join("memfold/bin"),
        };
        Ok(WrapperFolder(path))
    }

    /// Writes the script of a command, in place of an earlier one. Returns its path.
    ///
    /// # Errors
    /// 125: memfold can't manage the program, or a file that isn't such a script is in the way. 126,
    /// 127: the command can't be executed, or was not found.
    pub fn wrap(&self, name: &str, flags: &[String]) -> Result<PathBuf, CommandFailure> {
        if name.contains('/') {
            return Err(CommandFailure::own(format!(
                "{name}: is a path. Give the name of a command in PATH, such as node."
            )));
        }
        let search = env::var_os("PATH");
        let path_found = program::find(OsStr::new(name), search.as_deref(), is_wrapper)?;
        program::loading(&path_found, &[name.into()])?;
        let path = self.0.join(name);
        let fail = |e| CommandFailure::own(format!("{}: {}", path.display(), program::plain(&e)));
        fs::create_dir_all(&self.0).map_err(fail)?;
        self.check_free(&path)?;
        let begin = [&own_path()?, "run", "--wrapped", "--if-possible"].map(str::to_string);
        let words = [&begin[..], flags].concat();
        let words: Vec<_> = words.iter().map(|word| quoted(word)).collect();
        let name = quoted(name);
        let text = format!(
            "{WRAPPER_BEGIN}; memfold unwrap removes it.\nexec {} -- {name} \"$@\"\n",
            words.join(" ")
        );
        // The script gets its name when it is complete, so that no process executes a part of it.
        let new = self.0.join(format!(".{}.new", std::process::id()));
        let outcome = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&new)
            .and_then(|mut file| file.write_all(text.as_bytes()))
            .and_then(|()| fs::set_permissions(&new, Permissions::from_mode(0o755)))
            .and_then(|()| fs::rename(&new, &path));
        outcome.inspect_err(|_| drop(fs::remove_file(&new))).map_err(fail)?;
        Ok(path)
    }

    fn check_free(&self, path: &Path) -> Result<(), CommandFailure> {
        if path.symlink_metadata().is_ok() && !is_wrapper(path) {
            return Err(CommandFailure::own(format!(
                "{}: is no script of memfold wrap, so it stays. Give another directory with --dir.",
                path.display()
            )));
        }
        Ok(())
    }

    /// Removes the script of a command.
    ///
    /// # Errors
    /// 125: it is not wrapped, or the script can't be removed.
    pub fn unwrap(&self, name: &str) -> Result<(), CommandFailure> {
        let path = self.0.join(name);
        if name.contains('/') || !is_wrapper(&path) {
            return Err(CommandFailure::own(format!(
                "{name}: is not wrapped in {}. `memfold wrap` lists what is.",
                self.0.display()
            )));
        }
        fs::remove_file(&path)
            .map_err(|e| CommandFailure::own(format!("{}: {}", path.display(), program::plain(&e))))
    }

    /// Returns the wrapped commands, each with the line that its script executes.
    ///
    /// # Errors
    /// 125: the directory can't be read.
    pub fn wrapped(&self) -> Result<Vec<(String, String)>, CommandFailure> {
        let fail = |e| CommandFailure::own(format!("{}: {}", self.0.display(), program::plain(&e)));
        let entries = match fs::read_dir(&self.0) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(fail)?,
        };
        let mut all = Vec::new();
        for entry in entries {
            let path = entry.map_err(fail)?.path();
            if is_wrapper(&path) {
                let text = fs::read_to_string(&path).map_err(fail)?;
                let line = text.lines().find_map(|line| line.strip_prefix("exec ")).unwrap_or("");
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                all.push((name, line.to_string()));
            }
        }
        all.sort();
        Ok(all)
    }

    /// Returns the line of a shell that makes PATH lead to the scripts of these commands, if it
    /// doesn't yet.
    pub fn line_for_path(&self, names: &[String]) -> Option<String> {
        let search = env::var_os("PATH").unwrap_or_default();
        let leads = |name: &String| {
            program::find(OsStr::new(name), Some(&search), |_| false)
                .is_ok_and(|path| path == self.0.join(name))
        };
        let path = quoted(&self.0.to_string_lossy());
        (!names.iter().all(leads)).then(|| format!("export PATH={path}:\"$PATH\""))
    }
}

/// Quotes a word for a shell, if it needs to be.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_=./:%,+@".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_string(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_a_shell() {
        for word in ["", "a", "--limit=2G", "a b", "it's", "$HOME `x` \"y\" \\", "*", "a\nb"] {
            let out = std::process::Command::new("/bin/sh")
                .args(["-c", &format!("printf %s {}", quoted(word))])
                .output()
                .unwrap();
            assert_eq!(String::from_utf8(out.stdout).unwrap(), word);
        }
    }
}
