//! Asks all runs, groups and servers of block devices of this user again and again.
//!
//! Each has a thread of its own, which waits for its answer for as long as it takes. So a stopped
//! run delays no other, and no more than one request waits in its socket.
use crate::group;
use crate::run;
use crate::sockets;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

/// A request that has no answer after this time is shown as such.
const SILENCE: Duration = Duration::from_secs(2);

/// The server that is asked.
#[derive(Copy, Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WatchSource {
    /// All groups at once, from their files.
    Groups,
    /// A run, by the process ID of its `memfold run`.
    Run(u32),
    /// A server of block devices.
    Server(u32),
}

/// An answer, and when it came.
#[derive(Clone, Debug)]
pub struct Answer {
    pub at: Instant,
    pub value: Arc<Value>,
}

/// The answers of a source.
#[derive(Clone, Debug)]
pub struct Heard {
    pub source: WatchSource,
    /// The answer before the last one.
    pub before: Option<Answer>,
    /// The last answer.
    pub now: Option<Answer>,
    /// When the request was sent that has no answer yet.
    pub asked: Option<Instant>,
    /// What /proc shows of a process that does not answer.
    pub process: Option<SilentProcess>,
}

/// A process that does not answer, and so tells nothing about itself.
#[derive(Clone, Debug)]
pub struct SilentProcess {
    /// The command of a `memfold run`; empty if it can't be read.
    pub command: Vec<String>,
    /// Whether a signal has stopped it.
    pub is_stopped: bool,
}

impl SilentProcess {
    fn read(pid: u32) -> SilentProcess {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words = words.strip_suffix(b"\0").unwrap_or_default().split(|byte| *byte == 0);
        let words = words.map(|word| OsStr::from_bytes(word).to_os_string());
        let command = run::command_in(words).unwrap_or_default();
        let status = fs::read(format!("/proc/{pid}/status")).unwrap_or_default();
        let status = String::from_utf8_lossy(&status);
        let state = status.lines().find_map(|line| line.strip_prefix("State:\t"));
        SilentProcess {
            command: command.iter().map(|word| word.to_string_lossy().into_owned()).collect(),
            is_stopped: state.is_some_and(|state| state.starts_with(['T', 't'])),
        }
    }
}

impl Heard {
    fn new(source: WatchSource) -> Heard {
        Heard { source, before: None, now: None, asked: None, process: None }
    }

    /// Returns for how long it has not answered, if that is long.
    pub fn silent(&self, now: Instant) -> Option<Duration> {
        let silent = now.saturating_duration_since(self.asked?);
        (silent >= SILENCE).then_some(silent)
    }

    fn answered(&mut self, value: Value) {
        let now = Answer { at: Instant::now(), value: Arc::new(value) };
        self.before = self.now.replace(now);
        self.asked = None;
    }
}

type KnownSources = BTreeMap<WatchSource, Heard>;

/// All sources, and threads that ask them.
#[derive(Clone)]
pub struct Watch {
    shared: Arc<(Mutex<KnownSources>, Condvar)>,
    interval: Duration,
}

impl Watch {
    /// Begins to ask all sources, each once an interval.
    pub fn begin(interval: Duration) -> Watch {
        let watch = Watch { shared: Arc::default(), interval };
        watch.find();
        watch
    }

    /// Finds new sources, and begins to ask them.
    pub fn find(&self) {
        let runs = sockets::all(sockets::RUN).into_iter();
        let runs = runs.map(|(pid, path)| (WatchSource::Run(pid), path));
        let servers = sockets::all(sockets::BLK).into_iter();
        let servers = servers.map(|(pid, path)| (WatchSource::Server(pid), path));
        for (source, path) in runs.chain(servers) {
            self.ask_always(source, move || stat(source, &path));
        }
        self.ask_always(WatchSource::Groups, || Some(groups()));
    }

    /// Returns what is known now.
    pub fn heard(&self) -> Vec<Heard> {
        let mut all: Vec<Heard> = self.known().values().cloned().collect();
        let now = Instant::now();
        for one in all.iter_mut().filter(|one| one.silent(now).is_some()) {
            one.process = match one.source {
                WatchSource::Groups => None,
                WatchSource::Run(pid) | WatchSource::Server(pid) => Some(SilentProcess::read(pid)),
            };
        }
        all
    }

    /// Waits until every source has answered twice, at most `patience` in all.
    pub fn wait_for_rates(&self, patience: Duration) {
        let (known, change) = &*self.shared;
        let is_lacking =
            |known: &mut KnownSources| known.values().any(|answers| answers.before.is_none());
        let guard = known.lock().expect("no thread panics with the lock");
        drop(change.wait_timeout_while(guard, patience, is_lacking));
    }

    fn known(&self) -> MutexGuard<'_, KnownSources> {
        self.shared.0.lock().expect("no thread panics with the lock")
    }

    /// Starts a thread that asks a source until it has ended, unless there is one.
    fn ask_always(&self, source: WatchSource, ask: impl Fn() -> Option<Value> + Send + 'static) {
        if self.known().contains_key(&source) {
            return;
        }
        self.known().insert(source, Heard::new(source));
        let watch = self.clone();
        let ask_always = move || {
            loop {
                let begin = Instant::now();
                if let Some(answers) = watch.known().get_mut(&source) {
                    answers.asked = Some(begin);
                }
                let Some(value) = ask() else { break };
                if let Some(answers) = watch.known().get_mut(&source) {
                    answers.answered(value);
                }
                watch.shared.1.notify_all();
                thread::sleep(watch.interval.saturating_sub(begin.elapsed()));
            }
            watch.known().remove(&source);
            watch.shared.1.notify_all();
        };
        // Without a thread the source is forgotten, and tried again by the next look.
        if thread::Builder::new().name("memfold-ask".to_string()).spawn(ask_always).is_err() {
            self.known().remove(&source);
        }
    }
}

/// Asks a run or a server. Returns `None` if it has ended.
fn stat(source: WatchSource, path: &Path) -> Option<Value> {
    let mut answer = sockets::ask(path, &json!({"do": "stat"}), None).ok().flatten()?;
    if let (WatchSource::Run(_), Some(all)) = (source, answer["processes"].as_array_mut()) {
        for process in all {
            process["name"] = name_of(process["pid"].as_u64().unwrap_or(0)).into();
        }
    }
    Some(answer)
}

/// Returns the name of a process. A process that has just ended has none.
fn name_of(pid: u64) -> String {
    let name = fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    String::from_utf8_lossy(&name).trim_end_matches('\n').to_string()
}

fn groups() -> Value {
    let one = |group: group::GroupFigures| {
        json!({
            "group": group.name,
            "limit_bytes": group.limit_bytes,
            "used_bytes": group.held_bytes,
            "runs": group.runs,
        })
    };
    group::figures().into_iter().map(one).collect()
}
