//! The processes of `memfold bench usemem`: a leader, and the tasks that it starts, each with its
//! own memory.

use crate::common::size::parse_size;
use crate::corpus::file::{CorpusFile, PAGE};
use crate::corpus::page::{Pages, corpus_sums};
use crate::harness::message::{Message, say, wait_for_line};
use crate::harness::plain::PlainArea;
use crate::harness::workload::{Phase, PhaseResult};
use crate::host::program::THIS;
use anyhow::Context;
use memfold_testkit::random::Sequence as Random;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

/// Arguments of `memfold bench usemem-child`, which only `memfold bench usemem` calls.
#[derive(clap::Args, Debug, Clone)]
pub struct UsememChildArgs {
    /// Tasks to start, each a process
    #[arg(long)]
    pub nproc: usize,
    /// Memory of each
    #[arg(long, value_parser = parse_size)]
    pub size: u64,
    /// The corpus file
    #[arg(long)]
    pub corpus: PathBuf,
    /// Ask for large folios of the kernel
    #[arg(long)]
    pub huge: bool,
    /// Write once, and time only reads
    #[arg(long)]
    pub readonly: bool,
    /// Pages in random order
    #[arg(long)]
    pub random: bool,
    /// Passes that read and change every page, after the one that fills
    #[arg(long, default_value_t = 1)]
    pub repeat: u32,
    /// Run as the task of this number
    #[arg(long)]
    pub task: Option<u64>,
}

/// The results of one of a task's two parts.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
struct TaskPart {
    init_s: f64,
    user_us: u64,
    system_us: u64,
    faults_minor: u64,
    faults_major: u64,
    bytes_wrong: u64,
}

/// Runs as the leader or as a task.
pub fn usemem_child(args: UsememChildArgs) -> anyhow::Result<()> {
    // SAFETY: PR_SET_PDEATHSIG takes a signal number and touches no memory.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    match args.task {
        Some(number) => task(&args, number),
        None => lead(&args),
    }
}

fn lead(args: &UsememChildArgs) -> anyhow::Result<()> {
    say(&Message::Ready { pid: std::process::id() as i32 })?;
    wait_for_line()?;
    let mut tasks = (0..args.nproc)
        .map(|number| Task::start(args, number))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let bytes = args.size * args.nproc as u64;
    let mut counters = BTreeMap::new();
    for task in &mut tasks {
        let init = task.hear()?;
        *counters.entry("init_us".to_string()).or_default() += (init.init_s * 1e6) as u64;
    }
    let passes = if args.readonly { args.repeat } else { args.repeat.max(1) };
    let mut bytes_wrong = 0;
    for (phase, name, passes) in [(Phase::Fill, "out", passes), (Phase::Read1, "in", 1)] {
        let start = Instant::now();
        tasks.iter_mut().try_for_each(Task::go)?;
        let parts = tasks.iter_mut().map(Task::hear).collect::<anyhow::Result<Vec<_>>>()?;
        let seconds = start.elapsed().as_secs_f64();
        let sum = |of: fn(&TaskPart) -> u64| parts.iter().map(of).sum::<u64>();
        let figures = [
            ("user_us", sum(|part| part.user_us)),
            ("system_us", sum(|part| part.system_us)),
            ("faults_minor", sum(|part| part.faults_minor)),
            ("faults_major", sum(|part| part.faults_major)),
        ];
        counters.extend(figures.map(|(figure, value)| (format!("{name}_{figure}"), value)));
        let wrong_bytes = sum(|part| part.bytes_wrong);
        bytes_wrong += wrong_bytes;
        let moved_bytes = bytes * u64::from(passes.max(1));
        say(&Message::Phase(PhaseResult {
            phase,
            seconds,
            mb_per_s: moved_bytes as f64 / 1e6 / seconds,
            accesses: moved_bytes / PAGE as u64,
            mean_us: 0.0,
            p50_us: 0.0,
            p99_us: 0.0,
            max_us: 0.0,
            cdf: Vec::new(),
            bytes_wrong: wrong_bytes,
        }))?;
    }
    say(&Message::Done { bytes_wrong, counters })?;
    wait_for_line()?;
    tasks.into_iter().try_for_each(Task::end)
}

/// A task, in its leader.
struct Task {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Task {
    fn start(args: &UsememChildArgs, number: usize) -> anyhow::Result<Task> {
        let mut command = Command::new(THIS);
        command.args(["usemem-child", "--nproc", "1", "--task", &number.to_string()]);
        command
            .args([
                "--size",
                &args.size.to_string(),
                "--repeat",
                &args.repeat.to_string(),
                "--corpus",
            ])
            .arg(&args.corpus);
        let flags =
            [("--huge", args.huge), ("--readonly", args.readonly), ("--random", args.random)];
        command.args(flags.iter().filter(|flag| flag.1).map(|flag| flag.0));
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("starting a task")?;
        let input = child.stdin.take().context("no pipe to a task")?;
        let output = BufReader::new(child.stdout.take().context("no pipe from a task")?);
        Ok(Task { child, input, output })
    }

    fn go(&mut self) -> anyhow::Result<()> {
        self.input.write_all(b"\n").context("a task has ended early")
    }

    fn hear(&mut self) -> anyhow::Result<TaskPart> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        serde_json::from_str(&line)
            .with_context(|| format!("a task has ended early: it said '{}'", line.trim()))
    }

    fn end(mut self) -> anyhow::Result<()> {
        drop(self.input);
        let status = self.child.wait()?;
        anyhow::ensure!(status.success(), "a task ended with {status}");
        Ok(())
    }
}

fn task(args: &UsememChildArgs, number: u64) -> anyhow::Result<()> {
    let start = Instant::now();
    let corpus = CorpusFile::open(&args.corpus)?;
    let sums = corpus_sums(&corpus);
    let pages = args.size as usize / PAGE;
    let area = PlainArea::new(pages * PAGE, args.huge)
        .with_context(|| format!("can't map {} bytes", args.size))?;
    // SAFETY: the area has this length, is page-aligned, lives until the end of this function, and
    // nothing else touches it.
    let mut work =
        unsafe { Pages::new(area.as_ptr(), pages, number * pages as u64, &corpus, &sums) };
    let mut order: Vec<u32> = (0..pages as u32).collect();
    if args.random {
        Random::new(number).shuffle(&mut order);
    }
    if args.readonly {
        order.iter().for_each(|&page| work.fill(page as usize));
    }
    say(&TaskPart { init_s: start.elapsed().as_secs_f64(), ..TaskPart::default() })?;
    timed(&mut work, |work| {
        for pass in 0..args.repeat.max(1) {
            for &page in &order {
                match (args.readonly, pass) {
                    (true, _) => work.check_samples(page as usize),
                    (false, 0) => work.fill(page as usize),
                    (false, _) => {
                        work.check_samples(page as usize);
                        work.change(page as usize);
                    }
                }
            }
        }
    })?;
    timed(&mut work, |work| order.iter().for_each(|&page| work.check_sum(page as usize)))?;
    wait_for_line()
}

/// Waits for the start message, works, and reports its usage.
fn timed(work: &mut Pages<'_>, job: impl FnOnce(&mut Pages<'_>)) -> anyhow::Result<()> {
    wait_for_line()?;
    let (before, wrong_bytes) = (usage(), work.bytes_wrong);
    job(work);
    let after = usage();
    say(&TaskPart {
        init_s: 0.0,
        user_us: after.user_us - before.user_us,
        system_us: after.system_us - before.system_us,
        faults_minor: after.faults_minor - before.faults_minor,
        faults_major: after.faults_major - before.faults_major,
        bytes_wrong: work.bytes_wrong - wrong_bytes,
    })
}

/// Returns the usage of the whole process, memfold's threads included.
fn usage() -> TaskPart {
    // SAFETY: an all-zero rusage is valid, and getrusage only writes to it.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    };
    let us = |time: libc::timeval| time.tv_sec as u64 * 1_000_000 + time.tv_usec as u64;
    TaskPart {
        user_us: us(usage.ru_utime),
        system_us: us(usage.ru_stime),
        faults_minor: usage.ru_minflt as u64,
        faults_major: usage.ru_majflt as u64,
        ..TaskPart::default()
    }
}
