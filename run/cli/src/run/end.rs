//! The end of a run: why its program ended, and the summary.
use crate::child::ProgramEnd;
use crate::control::RunControl;
use crate::log::{Log, LogLevel};
use crate::machine::limits::address_limits;
use crate::machine::oom::{OomCounts, OomKills};
use crate::program;
use crate::report::ending::{Ending, words};
use crate::report::figures::RunFigures;
use crate::report::summary::{RunEnd, bound, dense_bytes, summary};
use memfold_engine::config::Size;
use memfold_run::users::UserTables;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;

/// A run whose program has ended.
pub struct EndedRun<'a> {
    run: &'a RunControl,
    log: &'a Log,
    program: &'a ProgramEnd,
    /// Wall time from the start of the run to the end of its program.
    pub seconds: f64,
    /// The largest resident size of a process that was waited for, bytes.
    largest_bytes: u64,
    kills: OomKills,
}

impl<'a> EndedRun<'a> {
    /// Notes the end. `before` are the kernel's counts before the program was started.
    pub fn new(
        run: &'a RunControl,
        log: &'a Log,
        program: &'a ProgramEnd,
        before: &OomCounts,
    ) -> EndedRun<'a> {
        let seconds = run.start.elapsed().as_secs_f64();
        let (largest_bytes, kills) = (largest_child_bytes(), before.until(&OomCounts::now()));
        EndedRun { run, log, program, seconds, largest_bytes, kills }
    }

    /// Prints why the program at `path` ended, if that was no ordinary end, and a warning about
    /// its core dump.
    pub fn explain(&self, path: &Path) {
        if let Some(lines) = self.ending(path).lines() {
            self.log.say_at(LogLevel::Error, &lines);
        }
        if self.program.dumped {
            warn_of_dump(&self.run.shared.tables, self.log, self.program.pid as u32);
        }
    }

    /// Prints the summary, also with the slowdown by limit.
    pub fn sum_up(&self, with_curve: bool) {
        let end = RunEnd {
            status: self.program.status,
            largest_bytes: self.largest_bytes,
            seconds: self.seconds,
            group: self.group(),
            with_curve,
            kills: self.kills.clone(),
        };
        self.log.say(&summary(&self.run.config(), &self.run.shared.tables, &end));
    }

    fn group(&self) -> Option<String> {
        self.run.group.as_ref().map(ToString::to_string)
    }

    /// Returns what is known about the end of the program at `path`.
    fn ending(&self, path: &Path) -> Ending {
        let (is_ours, end) = self.log.ended(self.program.pid as u32);
        let config = self.run.config();
        let sum = RunFigures::sum(&self.run.shared.tables);
        Ending {
            signal: self.program.signal,
            status: self.program.status,
            image: program::image_name(path),
            words: words(&self.run.arguments),
            kills: self.kills.clone(),
            peak_bytes: sum.get("peak_bytes"),
            dense_bytes: dense_bytes(&config, &sum),
            largest_bytes: self.largest_bytes,
            bound: bound(&config, self.group().as_deref()),
            limit_bytes: config.limit_bytes,
            address_limits: address_limits(),
            cpu_limit: self.program.cpu_limit,
            is_ours,
            ended: end,
        }
    }
}

/// Returns the largest resident size of a process that was waited for, bytes.
fn largest_child_bytes() -> u64 {
    // SAFETY: the struct has only integers, for which zeros are valid. The kernel writes one
    // `rusage` to `usage`.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_CHILDREN, &raw mut usage);
        usage
    };
    (usage.ru_maxrss as u64) << 10
}

/// Warns of a core dump, in which the kernel writes zeros for folded memory.
fn warn_of_dump(tables: &UserTables, log: &Log, pid: u32) {
    let process = tables.processes().find(|process| process.pid() == pid);
    let folded_bytes = process.map_or(0, |process| process.stats().folded_bytes.load(Relaxed));
    if folded_bytes > 0 {
        log.say_at(LogLevel::Warning, &format!(
            "memfold: The core dump has zeros in place of {} of folded memory, which the kernel can't read. For a whole \
             dump, stop the program in gdb, `call ((int(*)(void))memfold_unfold)()` and use gcore.\n",
            Size(folded_bytes)
        ));
    }
}
