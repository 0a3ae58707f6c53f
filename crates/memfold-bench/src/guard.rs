//! Brings the machine back whatever happens: the one holder of the journal and of the running child.
//!
//! Every change of a kernel setting and every start of a child happens under one lock. A signal thread that takes the
//! lock for good therefore sees a finished step, and no step follows.

use crate::journal::{JOURNAL_PATH, Journal, replay};
use std::io::Error;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

#[derive(Default)]
struct State {
    journal: Option<Journal>,
    child: Option<i32>,
}

static STATE: Mutex<State> = Mutex::new(State { journal: None, child: None });

/// For the panic hook, which can't wait for the lock.
static JOURNAL_IS_OURS: AtomicBool = AtomicBool::new(false);

const SIGNALS: [i32; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];

/// From here on SIGINT, SIGTERM, SIGHUP and SIGQUIT kill the child, restore all settings and end the process with
/// 128 + the signal; a panic restores too. Call it once, before the process has other threads.
pub fn install() -> anyhow::Result<()> {
    let set = signal_set();
    mask(libc::SIG_BLOCK, &set)?;
    std::thread::Builder::new().name("signals".into()).spawn(move || wait_for_signal(&set))?;
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        report(info);
        // The lock may be held by the panicking thread: the file on disk has it all.
        if JOURNAL_IS_OURS.load(Ordering::SeqCst)
            && let Ok(text) = std::fs::read_to_string(JOURNAL_PATH)
        {
            tell(&replay(&text));
        }
    }));
    Ok(())
}

/// Takes the journal, and first restores what a killed run left. Needs root.
pub fn open_journal() -> anyhow::Result<()> {
    let (journal, problems) = Journal::open(std::path::Path::new(JOURNAL_PATH))?;
    tell(&problems);
    if !problems.is_empty() {
        anyhow::bail!("the settings of an earlier, killed run can't be restored (see {JOURNAL_PATH})");
    }
    state().journal = Some(journal);
    JOURNAL_IS_OURS.store(true, Ordering::SeqCst);
    Ok(())
}

/// Changes kernel settings in `job`, which records each change in the journal first.
pub fn change<T>(job: impl FnOnce(&mut Journal) -> anyhow::Result<T>) -> anyhow::Result<T> {
    let mut state = state();
    job(state.journal.as_mut().expect("the journal is opened before anything is changed"))
}

/// Undoes all changes so far; prints what can't be undone.
pub fn restore() {
    if let Some(journal) = state().journal.as_mut() {
        tell(&journal.undo_all());
    }
}

/// Undoes everything and gives the journal back.
pub fn close_journal() {
    if let Some(journal) = state().journal.take() {
        JOURNAL_IS_OURS.store(false, Ordering::SeqCst);
        tell(&journal.close());
    }
}

/// Starts `command` in a process group of its own, which dies with this process.
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
    state.child = Some(child.id() as i32);
    Ok(child)
}

/// Kills the child's process group, if it still runs, and waits for it.
pub fn end_child(mut child: Child) -> std::io::Result<std::process::ExitStatus> {
    let mut state = state();
    kill_group(child.id() as i32);
    state.child = None;
    child.wait()
}

/// Prints problems of an undo, each on a line.
pub fn tell(problems: &[String]) {
    for problem in problems {
        eprintln!("memfold bench: NOT restored: {problem}");
    }
}

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn kill_group(leader: i32) {
    // SAFETY: kill touches no memory. The group is our child's: it is its leader, and not yet waited for.
    unsafe { libc::kill(-leader, libc::SIGKILL) };
}

fn wait_for_signal(set: &libc::sigset_t) {
    let mut signal = 0;
    // SAFETY: both point to live values of the right type.
    while unsafe { libc::sigwait(set, &mut signal) } != 0 {}
    let mut state = state();
    if let Some(child) = state.child {
        kill_group(child);
    }
    let changed = state.journal.is_some();
    let problems = state.journal.take().map_or(Vec::new(), Journal::close);
    tell(&problems);
    if changed && problems.is_empty() {
        eprintln!("memfold bench: interrupted; all kernel settings are restored");
    }
    // The lock is kept: no other thread can change anything before the end.
    std::process::exit(128 + signal);
}

fn signal_set() -> libc::sigset_t {
    // SAFETY: an all-zero sigset_t is a valid value, which sigemptyset then initialises; both calls only write to it.
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
