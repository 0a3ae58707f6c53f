//! The recorder of a run: takes the samples that its processes leave, and writes the profiles at the
//! end.
use crate::failure::CommandFailure;
use crate::log::Log;
use crate::profile::flame::flame_graph;
use crate::profile::outputs::{stack_loads, write_collapsed, write_firefox};
use crate::profile::recording::Recording;
use crate::profile::symbols::NamedStacks;
use crate::profile::tables::{costs, tables};
use crate::program::plain;
use crate::report::output_file::OutputFile;
use memfold_run::request;
use memfold_run::samples::SampleRing;
use rustix::fd::{AsRawFd, OwnedFd};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Pause between two looks at the ring. It has room for many more samples than processes leave in
/// that time.
const PAUSE: Duration = Duration::from_millis(5);

/// What a run's processes need to leave samples, before the run begins.
pub struct Recorder {
    ring: SampleRing,
    /// The file of the ring, by whose path processes open it.
    file: OwnedFd,
    outputs: [OutputFile; 3],
}

/// A recorder at work.
pub struct RunningRecorder {
    recorder: Recorder,
    ends: Arc<AtomicBool>,
    thread: JoinHandle<Recording>,
}

/// Opens NAME with a suffix.
fn open(name: &Path, suffix: &str) -> Result<OutputFile, CommandFailure> {
    let mut path = name.as_os_str().to_os_string();
    path.push(suffix);
    OutputFile::open("--output", Path::new(&path))
}

impl Recorder {
    /// Makes the ring for samples of one load in `every`, and opens the files NAME.json,
    /// NAME.collapsed and NAME.svg. They stay as they are until the end.
    ///
    /// # Errors
    /// 125: a file can't be written, or there is no memory.
    pub fn new(name: &Path, every: u64) -> Result<Recorder, CommandFailure> {
        let outputs = [open(name, ".json")?, open(name, ".collapsed")?, open(name, ".svg")?];
        let (ring, file) = SampleRing::create(every).map_err(|e| {
            let e = io::Error::from_raw_os_error(e.raw_os_error());
            CommandFailure::own(format!("Making the ring for samples failed: {}", plain(&e)))
        })?;
        Ok(Recorder { ring, file, outputs })
    }

    /// Returns the path by which processes of the run open the ring.
    pub fn path(&self) -> String {
        request::path_of(std::process::id(), self.file.as_raw_fd())
    }

    /// Starts to take samples, in a thread.
    ///
    /// # Errors
    /// 125: there is no thread.
    pub fn start(self) -> Result<RunningRecorder, CommandFailure> {
        let (ring, ends) = (self.ring, Arc::new(AtomicBool::new(false)));
        let until = ends.clone();
        let take = move || {
            let mut recording = Recording::new(ring.every());
            while !until.load(SeqCst) {
                recording.take(&ring);
                thread::sleep(PAUSE);
            }
            recording.take(&ring);
            recording
        };
        let thread = thread::Builder::new().name("memfold-record".to_string()).spawn(take);
        let thread = thread
            .map_err(|e| CommandFailure::own(format!("Starting a thread failed: {}", plain(&e))))?;
        Ok(RunningRecorder { recorder: self, ends, thread })
    }
}

impl RunningRecorder {
    /// Takes the last samples, prints the tables, and writes the files. `limit_bytes` is the limit
    /// that would have cost 10%, if that is more than the run had.
    ///
    /// # Errors
    /// 125: a file can't be written completely.
    ///
    /// # Panics
    /// If the thread that takes samples has panicked.
    pub fn end(self, log: &Log, limit_bytes: Option<u64>) -> Result<(), CommandFailure> {
        self.ends.store(true, SeqCst);
        let recording = self.thread.join().expect("it doesn't panic");
        let stacks = NamedStacks::of(&recording);
        let Recorder { ring, outputs: [json, collapsed_file, picture], .. } = self.recorder;
        let [first, second, third] =
            [&json, &collapsed_file, &picture].map(|file| file.name().display());
        let paths = format!("{first}, {second} and {third}");
        match tables(&recording, &stacks) {
            Some(tables) => {
                log.say(&format!(
                    "{} samples, each for {} loads of folded memory; their stacks are in {paths}",
                    recording.loads.len(),
                    recording.every
                ));
                log.say(&tables);
                log.say(&costs(&recording, &stacks, limit_bytes));
            }
            None => log.say(&format!(
                "no load of folded memory was sampled, so {paths} are empty. Give a lower --limit, or --every 1"
            )),
        }
        if ring.lost() > 0 {
            log.say(&format!(
                "warning: {} samples were lost, because processes left them faster than they were read. Give a larger --every",
                ring.lost()
            ));
        }
        let old = [json.keep_old()?, collapsed_file.keep_old()?, picture.keep_old()?]
            .into_iter()
            .flatten();
        let old: Vec<String> = old.map(|path| path.display().to_string()).collect();
        if !old.is_empty() {
            log.say(&format!("the files of an earlier record are now {}", old.join(", ")));
        }
        let json = json.write_by(|out| write_firefox(&recording, &stacks, "memfold record", out));
        let loads = stack_loads(&recording, &stacks);
        let collapsed_file = collapsed_file.write_by(|out| write_collapsed(&loads, out));
        let picture = picture.write(&flame_graph(&loads));
        json.and(collapsed_file).and(picture)
    }
}
