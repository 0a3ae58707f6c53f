//! The undo journal: how to restore the kernel's settings.
//!
//! Every change is recorded, with its undo, **before** it is made. The file on disk is the only
//! copy. The normal end, an error, a signal, a panic and the next start after a kill all replay it
//! in the same way, newest first. Undoing a change that was never made, or was already undone, does
//! nothing.

use crate::common::refusal::Refusal;
use anyhow::Context;
use serde::{Deserialize, Serialize};
use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The path of the journal. A reboot removes it, as it resets the settings.
pub const JOURNAL_PATH: &str = "/run/memfold-bench.journal";
/// The prefix of our cgroups' names, before a number. No other cgroup is ever emptied or removed.
pub const CGROUP_PREFIX: &str = "memfold-bench-";

/// The prefix of our swap files' names, before a number. No other file is ever removed.
pub const FILE_PREFIX: &str = "memfold-bench-swap-";

/// How to undo one change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Undo {
    /// Write `value` back to the kernel setting `path`.
    Write {
        /// A file of /proc or /sys.
        path: PathBuf,
        /// Its previous value.
        value: String,
    },
    /// Stop swapping to this device.
    SwapOff {
        /// For example /dev/zram0.
        device: PathBuf,
    },
    /// Reset a zram device.
    ResetZram {
        /// N of zramN.
        index: u32,
    },
    /// Reset a zram device that was added, and remove it.
    RemoveZram {
        /// N of zramN.
        index: u32,
    },
    /// Remove a file of this benchmark.
    RemoveFile {
        /// A path whose name begins with [`FILE_PREFIX`].
        path: PathBuf,
    },
    /// Kill all members of a cgroup of this benchmark, and remove it.
    RemoveCgroup {
        /// Its directory.
        dir: PathBuf,
    },
}

/// The open, locked journal. Only one benchmark at a time can have it.
pub struct Journal {
    path: PathBuf,
    file: File,
}

impl Journal {
    /// Opens the journal, and replays what a killed benchmark left in it. Returns what could not be
    /// undone.
    pub fn open(path: &Path) -> anyhow::Result<(Journal, Vec<String>)> {
        loop {
            let file =
                File::options().create(true).truncate(false).read(true).write(true).open(path);
            let mut file = file.with_context(|| format!("journal {}", path.display()))?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    return Err(Refusal::Machine(
                        "another memfold bench is changing kernel settings now".into(),
                    )
                    .into());
                }
                Err(TryLockError::Error(error)) => return Err(error.into()),
            }
            if file.metadata()?.nlink() == 0 {
                continue; // Its last owner removed it between our open and our lock.
            }
            let mut text = String::new();
            file.read_to_string(&mut text)?;
            let problems = replay(&text);
            let mut journal = Journal { path: path.to_path_buf(), file };
            if problems.is_empty() {
                journal.clear()?;
            }
            return Ok((journal, problems));
        }
    }

    /// Records the undo of a change that the caller is about to make.
    pub fn record(&mut self, undo: &Undo) -> anyhow::Result<()> {
        let mut line = serde_json::to_string(undo)?;
        line.push('\n');
        self.file.seek(SeekFrom::End(0))?;
        self.file.write_all(line.as_bytes())?;
        Ok(self.file.sync_data()?)
    }

    /// Writes a setting after recording its previous value. Does nothing if it has the value
    /// already.
    pub fn set(&mut self, path: &Path, value: &str) -> anyhow::Result<()> {
        let before = current_value(path).with_context(|| format!("reading {}", path.display()))?;
        if before == value {
            return Ok(());
        }
        self.record(&Undo::Write { path: path.to_path_buf(), value: before })?;
        fs::write(path, value).with_context(|| format!("writing '{value}' to {}", path.display()))
    }

    /// Undoes all recorded changes, newest first. Changes that can't be undone stay recorded and
    /// are returned.
    pub fn undo_all(&mut self) -> Vec<String> {
        let mut text = String::new();
        let outcome =
            self.file.seek(SeekFrom::Start(0)).and_then(|_| self.file.read_to_string(&mut text));
        let mut problems = match outcome {
            Ok(_) => replay(&text),
            Err(error) => vec![format!("can't read {}: {error}", self.path.display())],
        };
        if problems.is_empty()
            && let Err(error) = self.clear()
        {
            problems.push(format!("can't clear {}: {error}", self.path.display()));
        }
        problems
    }

    /// Undoes all changes, and removes the file if that succeeded.
    pub fn close(mut self) -> Vec<String> {
        let problems = self.undo_all();
        if problems.is_empty() {
            let _ = fs::remove_file(&self.path);
        }
        problems
    }

    fn clear(&mut self) -> std::io::Result<()> {
        self.file.set_len(0)?;
        self.file.sync_data()
    }
}

/// Undoes the changes recorded in `text`, newest first, and returns those that failed. An
/// incomplete last line belongs to a change that was never made.
pub fn replay(text: &str) -> Vec<String> {
    let undos: Vec<Undo> =
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let mut problems = Vec::new();
    for undo in undos.iter().rev() {
        if let Err(error) = apply(undo) {
            problems.push(format!("{undo:?}: {error}"));
        }
    }
    problems
}

/// Returns the value of a setting. For a choice (`always [madvise] never`) it is the one in
/// brackets.
pub fn current_value(path: &Path) -> std::io::Result<String> {
    let text = fs::read_to_string(path)?;
    let choice = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    Ok(choice.map_or(text.trim(), |(value, _)| value).to_string())
}

fn apply(undo: &Undo) -> std::io::Result<()> {
    match undo {
        Undo::Write { path, value } => absent_is_done(fs::write(path, value)),
        Undo::SwapOff { device } => swap_off(device),
        Undo::ResetZram { index } => reset_zram(*index),
        Undo::RemoveZram { index } => {
            reset_zram(*index)?;
            if !Path::new(&format!("/sys/block/zram{index}")).exists() {
                return Ok(());
            }
            retry(|| {
                absent_is_done(fs::write("/sys/class/zram-control/hot_remove", index.to_string()))
            })
        }
        Undo::RemoveFile { path } => remove_file(path),
        Undo::RemoveCgroup { dir } => remove_cgroup(dir),
    }
}

fn swap_off(device: &Path) -> std::io::Result<()> {
    let swaps = fs::read_to_string("/proc/swaps")?;
    if !swaps.lines().any(|line| line.split_whitespace().next() == device.to_str()) {
        return Ok(());
    }
    let name = std::ffi::CString::new(device.as_os_str().as_encoded_bytes())?;
    // SAFETY: swapoff reads a NUL-terminated path, which `name` is.
    if unsafe { libc::swapoff(name.as_ptr()) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(())
}

fn remove_file(path: &Path) -> std::io::Result<()> {
    if !path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(FILE_PREFIX)) {
        return Err(std::io::Error::other("not a file of memfold bench"));
    }
    absent_is_done(fs::remove_file(path))
}

fn reset_zram(index: u32) -> std::io::Result<()> {
    retry(|| absent_is_done(fs::write(format!("/sys/block/zram{index}/reset"), "1")))
}

fn remove_cgroup(dir: &Path) -> std::io::Result<()> {
    if !dir.file_name().is_some_and(|name| name.to_string_lossy().starts_with(CGROUP_PREFIX)) {
        return Err(std::io::Error::other("not a cgroup of memfold bench"));
    }
    retry(|| {
        let members = match fs::read_to_string(dir.join("cgroup.procs")) {
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            read => read?,
        };
        for pid in members.lines().filter_map(|line| line.parse::<i32>().ok()) {
            // SAFETY: kill touches no memory; the pid is a member of the benchmark's own cgroup.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        absent_is_done(fs::remove_dir(dir))
    })
}

fn absent_is_done(result: std::io::Result<()>) -> std::io::Result<()> {
    match result {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Retries for up to 20 seconds while the kernel returns EBUSY, because a killed process takes time
/// to free its memory.
fn retry(mut job: impl FnMut() -> std::io::Result<()>) -> std::io::Result<()> {
    let start = Instant::now();
    loop {
        match job() {
            Err(error)
                if error.kind() == ErrorKind::ResourceBusy
                    && start.elapsed() < Duration::from_secs(20) =>
            {
                std::thread::sleep(Duration::from_millis(10));
            }
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Dir(PathBuf);

    impl Dir {
        fn new(name: &str) -> Dir {
            let dir =
                std::env::temp_dir().join(format!("memfold-journal-{name}-{}", std::process::id()));
            fs::create_dir_all(&dir).unwrap();
            Dir(dir)
        }

        fn setting(&self, name: &str, value: &str) -> PathBuf {
            let path = self.0.join(name);
            fs::write(&path, value).unwrap();
            path
        }
    }

    impl Drop for Dir {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// Another test may be starting a child, which has a copy of our descriptor, and so of the
    /// lock, until it executes its program.
    fn open_again(path: &Path) -> (Journal, Vec<String>) {
        let start = Instant::now();
        loop {
            match Journal::open(path) {
                Err(_) if start.elapsed() < Duration::from_secs(5) => {
                    std::thread::sleep(Duration::from_millis(5))
                }
                opened => return opened.unwrap(),
            }
        }
    }

    #[test]
    fn a_killed_runs_journal_is_replayed_at_the_next_start() {
        let dir = Dir::new("stale");
        let setting = dir.setting("swappiness", "60\n");
        let choice = dir.setting("enabled", "always [madvise] never\n");
        let path = dir.0.join("journal");
        let (mut journal, problems) = Journal::open(&path).unwrap();
        assert!(problems.is_empty());
        journal.set(&setting, "100").unwrap();
        journal.set(&setting, "0").unwrap();
        journal.set(&choice, "never").unwrap();
        drop(journal); // As after a kill: the file and its records stay.
        assert_eq!(fs::read_to_string(&setting).unwrap(), "0");

        let (journal, problems) = open_again(&path);
        assert_eq!((problems, current_value(&setting).unwrap().as_str()), (vec![], "60"));
        assert_eq!(current_value(&choice).unwrap(), "madvise");
        assert!(journal.close().is_empty());
        assert!(!path.exists());
    }

    #[test]
    fn a_torn_last_line_and_undone_changes_do_nothing() {
        let dir = Dir::new("torn");
        let setting = dir.setting("a", "new");
        let whole =
            serde_json::to_string(&Undo::Write { path: setting.clone(), value: "old".into() })
                .unwrap();
        let undo =
            serde_json::to_string(&Undo::Write { path: dir.0.join("x/y"), value: "old".into() })
                .unwrap();
        let off =
            serde_json::to_string(&Undo::SwapOff { device: "/dev/no-such-swap".into() }).unwrap();
        let cgroup = dir.0.join("memfold-bench-77");
        fs::create_dir(&cgroup).unwrap();
        let group = serde_json::to_string(&Undo::RemoveCgroup { dir: cgroup.clone() }).unwrap();
        let text = format!("{whole}\n{undo}\n{off}\n{group}\n{}", &whole[..whole.len() / 2]);
        assert_eq!(replay(&text), Vec::<String>::new());
        assert_eq!(fs::read_to_string(&setting).unwrap(), "old");
        assert!(!cgroup.exists());
    }

    #[test]
    fn only_our_own_cgroups_are_removed() {
        let dir = Dir::new("group");
        let foreign = dir.0.join("system");
        fs::create_dir(&foreign).unwrap();
        assert!(apply(&Undo::RemoveCgroup { dir: foreign.clone() }).is_err());
        assert!(foreign.exists());
    }

    #[test]
    fn only_our_own_swap_files_are_removed() {
        let dir = Dir::new("file");
        let (foreign, own) =
            (dir.setting("precious", "data"), dir.setting("memfold-bench-swap-7", ""));
        assert!(apply(&Undo::RemoveFile { path: foreign.clone() }).is_err());
        assert!(foreign.exists());
        assert!(apply(&Undo::RemoveFile { path: own.clone() }).is_ok() && !own.exists());
        assert!(apply(&Undo::RemoveFile { path: own }).is_ok());
    }

    #[test]
    fn one_benchmark_at_a_time() {
        let dir = Dir::new("lock");
        let path = dir.0.join("journal");
        let first = Journal::open(&path).unwrap();
        assert!(Journal::open(&path).is_err());
        assert!(first.0.close().is_empty());
        open_again(&path);
    }
}
