//! Restores the machine in all cases. This module owns the journal, the running children and their
//! files.
//!
//! Every change of a kernel setting and every start of a child happens under one lock. The signal
//! thread takes the lock and keeps it, so it sees only completed steps, and no further step starts.

use crate::host::journal::{Journal, replay};
use anyhow::Context;
use std::io::Error;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

#[derive(Default)]
struct GuardState {
    journal: Option<Journal>,
    children: Vec<i32>,
    scratch: Option<PathBuf>,
}

static STATE: Mutex<GuardState> =
    Mutex::new(GuardState { journal: None, children: Vec::new(), scratch: None });

/// The journal's path. The panic hook reads that file, because it can't wait for the lock.
static JOURNAL_FILE: OnceLock<PathBuf> = OnceLock::new();
static JOURNAL_IS_OURS: AtomicBool = AtomicBool::new(false);

const SIGNALS: [i32; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];

/// Installs handlers: from here on SIGINT, SIGTERM, SIGHUP and SIGQUIT kill the children, restore
/// all settings, remove the scratch directory and end the process with 128 + the signal. A panic
/// restores too. Call it once, before the process has other threads.
pub fn install() -> anyhow::Result<()> {
    let set = signal_set();
    mask(libc::SIG_BLOCK, &set)?;
    std::thread::Builder::new().name("signals".into()).spawn(move || wait_for_signal(&set))?;
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        report(info);
        // The panicking thread may hold the lock. The file on disk is complete.
        if JOURNAL_IS_OURS.load(Ordering::SeqCst)
            && let Some(Ok(text)) = JOURNAL_FILE.get().map(std::fs::read_to_string)
        {
            tell(&replay(&text));
        }
    }));
    Ok(())
}

/// Opens the journal at `path` (always the same in one process), after restoring what a killed run
/// left in it.
pub fn open_journal(path: &Path) -> anyhow::Result<()> {
    let (journal, problems) = Journal::open(path)?;
    tell(&problems);
    if !problems.is_empty() {
        anyhow::bail!(
            "the settings of an earlier, killed run can't be restored (see {})",
            path.display()
        );
    }
    let _ = JOURNAL_FILE.set(path.to_path_buf());
    state().journal = Some(journal);
    JOURNAL_IS_OURS.store(true, Ordering::SeqCst);
    Ok(())
}

/// Runs `job`, which changes kernel settings and records each change in the journal first.
pub fn change<T>(job: impl FnOnce(&mut Journal) -> anyhow::Result<T>) -> anyhow::Result<T> {
    let mut state = state();
    job(state.journal.as_mut().expect("the journal is opened before anything is changed"))
}

/// Undoes all changes so far, and prints those that can't be undone.
pub fn restore() {
    if let Some(journal) = state().journal.as_mut() {
        tell(&journal.undo_all());
    }
}

/// Undoes all changes and closes the journal.
pub fn close_journal() {
    if let Some(journal) = state().journal.take() {
        JOURNAL_IS_OURS.store(false, Ordering::SeqCst);
        tell(&journal.close());
    }
}

/// Starts `command` in a process group of its own, which is killed with this process.
pub fn spawn(command: &mut Command) -> std::io::Result<Child> {
    let mut state = state();
    // SAFETY: between fork and exec only async-signal-safe calls are made: setpgid, prctl, sigmask.
    unsafe {
        command.pre_exec(|| {
            mask(libc::SIG_UNBLOCK, &signal_set())?;
            if libc::setpgid(0, 0) != 0 || libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                return Err(Error::last_os_error());
            }
            Ok(())
        })
    };
    let child = command.spawn()?;
    state.children.push(child.id() as i32);
    Ok(child)
}

/// Kills the child's process group and waits for the child. Also kills processes that outlived the
/// child.
pub fn end_child(mut child: Child) -> std::io::Result<()> {
    let mut state = state();
    kill_group(child.id() as i32);
    state.children.retain(|&pid| pid != child.id() as i32);
    child.wait().map(drop)
}

/// A directory in the system's temporary directory. Dropping it removes it; so does a signal that
/// ends the process.
pub struct GuardedDirectory(PathBuf);

impl GuardedDirectory {
    /// Makes the directory. At most one exists at a time.
    pub fn new(name: &str) -> anyhow::Result<GuardedDirectory> {
        let path = std::env::temp_dir().join(format!("memfold-{name}-{}", std::process::id()));
        let mut state = state();
        std::fs::create_dir_all(&path).with_context(|| format!("making {}", path.display()))?;
        state.scratch = Some(path.clone());
        Ok(GuardedDirectory(path))
    }

    /// Returns the directory's path.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for GuardedDirectory {
    fn drop(&mut self) {
        let mut state = state();
        let _ = std::fs::remove_dir_all(&self.0);
        state.scratch = None;
    }
}

/// Prints the problems of an undo, one per line.
pub fn tell(problems: &[String]) {
    for problem in problems {
        eprintln!("memfold bench: NOT restored: {problem}");
    }
}

fn state() -> MutexGuard<'static, GuardState> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn kill_group(leader: i32) {
    // SAFETY: kill touches no memory. The group was made by our child. The number of a process
    // group is not reused while a member lives, and the call fails if none lives.
    unsafe { libc::kill(-leader, libc::SIGKILL) };
}

fn wait_for_signal(set: &libc::sigset_t) {
    let mut signal = 0;
    // SAFETY: both point to live values of the right type.
    while unsafe { libc::sigwait(set, &mut signal) } != 0 {}
    let mut state = state();
    state.children.iter().for_each(|&child| kill_group(child));
    let has_changes = state.journal.is_some();
    let problems = state.journal.take().map_or(Vec::new(), Journal::close);
    tell(&problems);
    if let Some(scratch) = state.scratch.take() {
        // Killed processes may still be closing files.
        let is_removed = (0..100).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            std::fs::remove_dir_all(&scratch).is_ok()
        });
        if !is_removed {
            tell(&[format!("{} is still there", scratch.display())]);
        }
    }
    if has_changes && problems.is_empty() {
        eprintln!("memfold bench: interrupted; all kernel settings are restored");
    }
    // The lock is kept, so that no other thread can change anything before the end.
    std::process::exit(128 + signal);
}

fn signal_set() -> libc::sigset_t {
    // SAFETY: an all-zero sigset_t is a valid value, which sigemptyset then initialises; both calls
    // only write to it.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        SIGNALS.iter().for_each(|&signal| {
            libc::sigaddset(&mut set, signal);
        });
        set
    }
}

fn mask(how: i32, set: &libc::sigset_t) -> std::io::Result<()> {
    // SAFETY: reads a live set; a null old set is allowed.
    match unsafe { libc::pthread_sigmask(how, set, std::ptr::null_mut()) } {
        0 => Ok(()),
        error => Err(Error::from_raw_os_error(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::process::Stdio;
    use std::time::Instant;

    const DIR: &str = "MEMFOLD_BENCH_GUARD_TEST";

    /// The tests below run this in a process of its own, with `DIR` in the environment. Without
    /// `DIR` it tests nothing.
    #[test]
    fn a_guarded_process() {
        let Some(dir) = std::env::var_os(DIR).map(PathBuf::from) else { return };
        install().unwrap();
        open_journal(&dir.join("journal")).unwrap();
        let setting = dir.join("setting");
        change(|journal| journal.set(&setting, "changed")).unwrap();
        let mut child = spawn(Command::new("sleep").arg("600")).unwrap();
        let mut second = spawn(Command::new("sleep").arg("600")).unwrap();
        let scratch = GuardedDirectory::new("guarded").unwrap();
        fs::write(scratch.path().join("file"), "text").unwrap();
        fs::write(dir.join("scratch"), scratch.path().to_str().unwrap()).unwrap();
        fs::write(dir.join("children"), format!("{} {}", child.id(), second.id())).unwrap();
        if dir.join("panic").exists() {
            change(|_| -> anyhow::Result<()> { panic!("in the middle of a change") }).unwrap();
        }
        fs::write(dir.join("ready"), "").unwrap();
        // The child is killed by the signal. As in a real run, the next step needs the lock, and
        // must not get it.
        child.wait().unwrap();
        second.wait().unwrap();
        end_child(child).unwrap();
        unreachable!("a step followed the signal");
    }

    fn guarded(name: &str, panic: bool, end: impl FnOnce(i32)) -> Option<i32> {
        let dir = std::env::temp_dir().join(format!("memfold-guard-{name}-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("setting"), "as it was").unwrap();
        if panic {
            fs::write(dir.join("panic"), "").unwrap();
        }
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "host::guard::tests::a_guarded_process"]).env(DIR, &dir);
        // The test runner has threads before `install` runs; in the real program there are none.
        // SAFETY: between fork and exec only pthread_sigmask is called, which is async-signal-safe.
        unsafe { command.pre_exec(|| mask(libc::SIG_BLOCK, &signal_set())) };
        let mut process = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let start = Instant::now();
        while !panic && !dir.join("ready").exists() {
            assert!(start.elapsed() < Duration::from_secs(20));
            std::thread::sleep(Duration::from_millis(5));
        }
        if !panic {
            assert_eq!(fs::read_to_string(dir.join("setting")).unwrap(), "changed");
        }
        end(process.id() as i32);
        let status = process.wait().unwrap();
        assert_eq!(fs::read_to_string(dir.join("setting")).unwrap(), "as it was");
        let start = Instant::now();
        for child in fs::read_to_string(dir.join("children")).unwrap().split(' ') {
            let child: i32 = child.parse().unwrap();
            // SAFETY: signal 0 only checks whether the process exists.
            while unsafe { libc::kill(child, 0) } == 0 && !is_zombie(child) {
                assert!(start.elapsed() < Duration::from_secs(20), "a child outlived its parent");
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        let scratch = fs::read_to_string(dir.join("scratch")).unwrap();
        assert!(panic || !Path::new(&scratch).exists(), "{scratch} is still there");
        let _ = fs::remove_dir_all(scratch);
        fs::remove_dir_all(dir).unwrap();
        status.code()
    }

    fn is_zombie(pid: i32) -> bool {
        fs::read_to_string(format!("/proc/{pid}/stat")).map_or(true, |stat| stat.contains(") Z "))
    }

    #[test]
    fn a_signal_restores_kills_the_child_and_is_the_exit_status() {
        for signal in SIGNALS {
            // SAFETY: a signal to the process that this test started and has not waited for.
            let status = guarded(&format!("signal-{signal}"), false, |pid| unsafe {
                assert_eq!(libc::kill(pid, signal), 0);
            });
            assert_eq!(status, Some(128 + signal));
        }
    }

    #[test]
    fn a_panic_in_the_middle_of_a_change_restores() {
        assert_ne!(guarded("panic", true, |_| ()), Some(0));
    }
}
