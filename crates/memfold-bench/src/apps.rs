//! `memfold bench apps`: well-known programs in a third of their memory, under `memfold run` and on the kernel's zram.

use crate::app_case::App;
use crate::cgroup::{Cgroup, Hierarchy};
use crate::corpus::hash;
use crate::folio::FolioKib;
use crate::guard;
use crate::journal::JOURNAL_PATH;
use crate::machine::{Machine, kib_field};
use crate::size::show_size;
use crate::store_row::{StoreRow, all_good};
use crate::summary::Spread;
use crate::table::layout;
use crate::zram::Zram;
use anyhow::{Context, bail};
use serde::Serialize;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// Arguments of `memfold bench apps`.
#[derive(clap::Args, Debug, Clone)]
pub struct AppsArgs {
    /// Only these programs [default: all]
    #[arg(value_enum, value_name = "NAME")]
    pub names: Vec<App>,
    /// A short look: less data, one run, two folio sizes of the kernel
    #[arg(long)]
    pub quick: bool,
    /// Runs of each program and peer, which take turns [default: 3]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub runs: Option<u32>,
    /// Write everything measured to this file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Exit with status 1 if a row is short of its target
    #[arg(long)]
    pub check: bool,
}

/// A run that takes longer than this is killed.
const PATIENCE: Duration = Duration::from_secs(600);
/// The program may hold one part in this many of what it holds without a limit.
const PART: u64 = 3;
/// `memfold run` takes no less.
const LIMIT_MIN_BYTES: u64 = 8 << 20;

/// Everything that was measured.
#[derive(Serialize)]
struct Report {
    machine: Machine,
    command: String,
    runs: u32,
    times: Vec<Time>,
    rows: Vec<StoreRow>,
}

/// What a program took with a peer.
#[derive(Serialize)]
struct Time {
    app: &'static str,
    peer: String,
    limit_bytes: u64,
    seconds: Option<Spread>,
    note: String,
}

/// Measures, prints the report, and returns the exit status: 1 if a program printed something else than without a limit
/// or, with `--check`, a row is short. Every kernel setting is restored, as by `bench walk`.
pub fn apps(args: AppsArgs) -> anyhow::Result<i32> {
    guard::install()?;
    let kernel = Hierarchy::find().map(drop).and_then(|()| Zram::check("lz4"));
    let runs = args.runs.unwrap_or(if args.quick { 1 } else { 3 });
    let command = std::env::args().collect::<Vec<_>>().join(" ");
    let mut report = Report { machine: Machine::read(), command, runs, times: Vec::new(), rows: Vec::new() };
    if kernel.is_ok() {
        guard::open_journal(Path::new(JOURNAL_PATH))?;
    }
    let names = if args.names.is_empty() { App::ALL.to_vec() } else { args.names.clone() };
    let outcome = names.into_iter().try_for_each(|app| {
        let why = kernel.as_ref().err().map(|why| why.to_string());
        report.measure(app, args.quick, why)
    });
    if kernel.is_ok() {
        guard::close_journal();
    }
    outcome?;
    print!("{}", report.text());
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&report)?;
        fs::write(path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    let wrong = report.times.iter().any(|time| time.note.contains(WRONG));
    Ok(i32::from(wrong || args.check && !all_good(&report.rows)))
}

const WRONG: &str = "PRINTED SOMETHING ELSE";

/// Who gives a program its memory.
#[derive(Copy, Clone, PartialEq)]
enum Peer {
    Memfold,
    Zram(FolioKib),
}

impl Peer {
    fn name(self) -> String {
        match self {
            Peer::Memfold => "memfold-run".into(),
            Peer::Zram(folio) => format!("zram:lz4:{}", folio.name()),
        }
    }
}

impl Report {
    fn measure(&mut self, app: App, quick: bool, no_kernel: Option<String>) -> anyhow::Result<()> {
        let scratch = Scratch::new()?;
        let program = app.command(&scratch.0, quick)?;
        let plain = run(&mut waiting(&program, None), |_| Ok(()))?;
        let limit_bytes = (plain.peak_bytes / PART).max(LIMIT_MIN_BYTES);
        self.note(app, "no limit".into(), plain.peak_bytes, &[plain.seconds], String::new());
        let mut peers = vec![Peer::Memfold];
        if no_kernel.is_none() {
            let sizes = if quick { vec![FolioKib(4), FolioKib(64)] } else { FolioKib::ALL.to_vec() };
            peers.extend(sizes.into_iter().filter(|size| size.check().is_ok()).map(Peer::Zram));
        }
        let mut seconds = vec![Vec::new(); peers.len()];
        let mut notes = vec![String::new(); peers.len()];
        for _ in 0..self.runs {
            for (i, peer) in peers.iter().enumerate() {
                match run_with(*peer, &program, limit_bytes, plain.peak_bytes) {
                    Ok(done) if done.output == plain.output => seconds[i].push(done.seconds),
                    Ok(_) => notes[i] = WRONG.into(),
                    Err(error) => notes[i] = format!("a run broke off: {error:#}"),
                }
            }
        }
        let median = |i: usize| Spread::of(seconds[i].clone()).map(|spread| spread.median);
        let best = (1..peers.len()).filter_map(|i| Some((median(i)?, peers[i].name())));
        let best = best.min_by(|a, b| a.0.total_cmp(&b.0));
        let label = format!("{}: times as fast as on zram", app.name());
        self.rows.push(match (median(0), best) {
            (Some(ours), Some((theirs, name))) => {
                let note = format!("{ours:.2} s against {theirs:.2} s ({name})");
                StoreRow::at_least(&label, theirs / ours, app.target(), note)
            }
            (None, _) => StoreRow::at_least(&label, 0.0, app.target(), notes[0].clone()),
            (_, None) => {
                let why = no_kernel.unwrap_or_else(|| "no run on zram came to its end".into());
                StoreRow::not_run(&label, &format!(">= {}", app.target()), &why)
            }
        });
        for (i, peer) in peers.iter().enumerate() {
            self.note(app, peer.name(), limit_bytes, &seconds[i], std::mem::take(&mut notes[i]));
        }
        Ok(())
    }

    fn note(&mut self, app: App, peer: String, limit_bytes: u64, seconds: &[f64], note: String) {
        self.times.push(Time { app: app.name(), peer, limit_bytes, seconds: Spread::of(seconds.to_vec()), note });
    }

    fn text(&self) -> String {
        let mut text = format!(
            "memfold bench apps, {}\ncommand: {}\n{} run(s) each; seconds: median (min..max)\n\n",
            self.machine.heading(),
            self.command,
            self.runs,
        );
        let head = ["program", "memory", "with", "seconds", ""];
        let mut rows = vec![head.map(String::from).to_vec()];
        rows.extend(self.times.iter().map(|time| {
            let seconds = time.seconds.map_or("-".into(), |s| format!("{:.2} ({:.2}..{:.2})", s.median, s.min, s.max));
            vec![time.app.into(), show_size(time.limit_bytes), time.peer.clone(), seconds, time.note.clone()]
        }));
        text += &layout(&rows);
        let mut rows = vec![["it must reach", "memfold", "target", "verdict", "from"].map(String::from).to_vec()];
        rows.extend(self.rows.iter().map(StoreRow::cells));
        text.push('\n');
        text + &layout(&rows)
    }
}

/// A run of a program.
struct Done {
    seconds: f64,
    /// The hash of what it printed.
    output: u64,
    /// The most that its first process held.
    peak_bytes: u64,
}

fn run_with(peer: Peer, program: &[String], limit_bytes: u64, data_bytes: u64) -> anyhow::Result<Done> {
    match peer {
        Peer::Memfold => run(&mut waiting(program, Some(limit_bytes)), |_| Ok(())),
        Peer::Zram(folio) => {
            let done = run_on_zram(folio, program, limit_bytes, data_bytes);
            guard::restore();
            done
        }
    }
}

fn run_on_zram(folio: FolioKib, program: &[String], limit_bytes: u64, data_bytes: u64) -> anyhow::Result<Done> {
    guard::change(|journal| folio.select(journal))?;
    let _zram = guard::change(|journal| Zram::swap_on(journal, "lz4", data_bytes * 2 + (64 << 20)))?;
    // Page tables are charged to the cgroup too, and what the shell and the program need of the kernel.
    let charged_bytes = limit_bytes + data_bytes / 512 + (1 << 20);
    let cgroup = guard::change(|journal| Cgroup::create(journal, &Hierarchy::find()?, charged_bytes))?;
    let done = run(&mut waiting(program, None), |pid| guard::change(|_| cgroup.add(pid)));
    match done {
        Err(error) if cgroup.oom_kills() > 0 => bail!("{error:#} (out of memory in its cgroup: killed by the kernel)"),
        done => done,
    }
}

/// A shell that waits for a line and becomes the program, with `limit_bytes` under `memfold run --resident`.
fn waiting(program: &[String], limit_bytes: Option<u64>) -> Command {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", "read -r go && exec \"$@\" </dev/null", "sh"]);
    if let Some(bytes) = limit_bytes {
        let this = std::env::current_exe().unwrap_or_else(|_| "memfold".into());
        command.arg(this).args(["run", "--resident", &bytes.to_string(), "--"]);
    }
    command.args(program).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs it to its end; `before` sees the process before it becomes the program.
fn run(command: &mut Command, before: impl FnOnce(i32) -> anyhow::Result<()>) -> anyhow::Result<Done> {
    let mut child = guard::spawn(command).context("starting /bin/sh")?;
    let done = follow(&mut child, before);
    guard::end_child(child)?;
    done
}

fn follow(child: &mut Child, before: impl FnOnce(i32) -> anyhow::Result<()>) -> anyhow::Result<Done> {
    let pid = child.id();
    before(pid as i32)?;
    let (mut input, mut errors) = (child.stdin.take().context("no pipe")?, child.stderr.take().context("no pipe")?);
    let mut output = child.stdout.take().context("no pipe")?;
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let mut text = Vec::new();
        let _ = output.read_to_end(&mut text).map(|_| sender.send(hash(&text)));
    });
    let complaints = std::thread::spawn(move || {
        let mut text = String::new();
        let _ = errors.read_to_string(&mut text);
        text
    });
    let start = Instant::now();
    input.write_all(b"\n")?;
    drop(input);
    let mut peak_bytes = 0;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if start.elapsed() > PATIENCE {
            bail!("not done after {} s", PATIENCE.as_secs());
        }
        let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        peak_bytes = kib_field(&text, "VmHWM:").unwrap_or(0).max(peak_bytes);
        std::thread::sleep(Duration::from_millis(2));
    };
    let seconds = start.elapsed().as_secs_f64();
    if !status.success() {
        let text = complaints.join().unwrap_or_default();
        bail!("{status}: {}", text.lines().next().unwrap_or("it said nothing"));
    }
    let output = receiver.recv_timeout(Duration::from_secs(10)).context("its output did not end")?;
    Ok(Done { seconds, output, peak_bytes })
}

/// A directory that goes away.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> anyhow::Result<Scratch> {
        let path = std::env::temp_dir().join(format!("memfold-apps-{}", std::process::id()));
        fs::create_dir_all(&path).with_context(|| format!("making {}", path.display()))?;
        Ok(Scratch(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_tells_time_output_and_failure() {
        let words = |words: &[&str]| words.iter().map(|word| word.to_string()).collect::<Vec<_>>();
        let done = run(&mut waiting(&words(&["/bin/sh", "-c", "sleep 0.05; echo right"]), None), |_| Ok(())).unwrap();
        assert!(done.seconds >= 0.05 && done.output == hash(b"right\n") && done.peak_bytes > 0);
        let failed = run(&mut waiting(&words(&["/bin/sh", "-c", "echo why >&2; exit 3"]), None), |_| Ok(()));
        assert!(failed.err().is_some_and(|error| error.to_string().contains("why")));
    }
}
