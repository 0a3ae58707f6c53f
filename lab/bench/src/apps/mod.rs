//! `memfold bench apps`: well-known programs in a third of their memory, under `memfold run` and on
//! the kernel's zram.

mod pipe;
mod run;
mod server;
mod case;

use crate::apps::case::{App, Case, CaseFigure};
use crate::apps::run::{AppPeer, Done, Work, run_with};
use crate::common::output::Output;
use crate::common::refusal::Refusal;
use crate::common::row::StoreRow;
use crate::common::size::{parse_size, show_size};
use crate::common::summary::{Spread, show};
use crate::common::table::layout;
use crate::harness::report::Report;
use crate::host::cgroup::Hierarchy;
use crate::host::folio::FolioKib;
use crate::host::guard::{self, GuardedDirectory};
use crate::host::journal::JOURNAL_PATH;
use crate::host::zram::Zram;
use anyhow::Context;
use serde::Serialize;
use std::path::Path;

/// Arguments of `memfold bench apps`.
#[derive(clap::Args, Debug, Clone)]
pub struct AppsArgs {
    /// Only these programs [default: all]
    #[arg(value_enum, value_name = "NAME")]
    pub names: Vec<App>,
    /// Measure this command instead of these programs. It must end by itself. Each run must print the same output
    #[arg(last = true, value_name = "CMD", conflicts_with_all = ["names", "quick"])]
    pub command: Vec<String>,
    /// Uncompressed memory of CMD [default: a third of what it takes]
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "command")]
    pub resident: Option<u64>,
    /// A quick run: less data, one run, two folio sizes of the kernel
    #[arg(long)]
    pub quick: bool,
    /// Runs of each program and peer, in turn [default: 3]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub runs: Option<u32>,
    /// Where the report goes
    #[command(flatten)]
    pub output: Output,
}

/// The limit is the memory that a program holds without a limit, divided by this.
const PART: u64 = 3;
/// The smallest limit that `memfold run` accepts.
const LIMIT_MIN_BYTES: u64 = 8 << 20;
/// For a program far under its limit: the limit as a multiple of its memory.
const FAR: u64 = 8;

/// All results.
#[derive(Serialize)]
struct AppFindings {
    runs: u32,
    measured: Vec<Measured>,
}

/// A figure of a program with a peer.
#[derive(Serialize)]
struct Measured {
    app: String,
    peer: String,
    limit_bytes: u64,
    what: &'static str,
    spread: Option<Spread>,
    note: String,
    /// A run of memfold failed, or a run printed something else than without a limit.
    failed: bool,
}

/// The results of several runs with a peer.
#[derive(Default)]
struct Runs {
    /// One list for each figure.
    figures: Vec<Vec<f64>>,
    note: String,
    is_wrong: bool,
    broke_off: bool,
}

/// Measures, prints the report, and returns the exit status: 1 if a program printed something else
/// than without a limit, a run of memfold failed or, with `--check`, a row is short. Every kernel
/// setting is restored, as by `bench walk`.
pub fn apps(args: AppsArgs) -> anyhow::Result<i32> {
    guard::install()?;
    let kernel = Hierarchy::find().map(drop).and_then(|()| Zram::check("lz4"));
    let runs = args.runs.unwrap_or(if args.quick { 1 } else { 3 });
    let mut report = Report::new(AppFindings { runs, measured: Vec::new() });
    if kernel.is_ok() {
        guard::open_journal(Path::new(JOURNAL_PATH))?;
    }
    let why = kernel.as_ref().err().map(|why| why.to_string());
    let names = if args.names.is_empty() { App::ALL.to_vec() } else { args.names.clone() };
    let outcome = match args.command.first() {
        None => names.into_iter().try_for_each(|app| report.measure(app, args.quick, &why)),
        Some(name) => {
            let case = Case::of_command(name, args.resident);
            report.measure_limited(case, &Work::Job(args.command.clone()), false, &why)
        }
    };
    if kernel.is_ok() {
        guard::close_journal();
    }
    outcome?;
    let has_failed = report.found.measured.iter().any(|row| row.failed);
    report.finish(&args.output, "apps", ("", &report.found.text()), has_failed)
}

const WRONG: &str = "PRINTED SOMETHING ELSE";

impl Runs {
    /// Returns the median of a figure over the runs.
    fn median(&self, figure: usize) -> Option<f64> {
        Spread::of(self.figures.get(figure)?.clone()).map(|spread| spread.median)
    }

    /// Returns the least value of a figure over the runs.
    fn least(&self, figure: usize) -> Option<f64> {
        Spread::of(self.figures.get(figure)?.clone()).map(|spread| spread.min)
    }

    fn add(&mut self, done: anyhow::Result<Done>, output: u64) {
        match done {
            Ok(done) if done.output == output => {
                self.figures.resize_with(done.figures.len(), Vec::new);
                self.figures
                    .iter_mut()
                    .zip(done.figures)
                    .for_each(|(all, figure)| all.push(figure));
            }
            Ok(_) => (self.note, self.is_wrong) = (WRONG.into(), true),
            Err(error) => {
                (self.note, self.broke_off) = (format!("a run broke off: {error:#}"), true)
            }
        }
    }

    /// Returns whether the benchmark fails because of these runs. If the kernel's own swap can't
    /// run a program, that is a result and not a failure.
    fn has_failed(&self, peer: AppPeer) -> bool {
        self.is_wrong || self.broke_off && !matches!(peer, AppPeer::Zram(_))
    }
}

impl Report<AppFindings> {
    /// Measures one program. A program that isn't installed gets a row with the reason.
    fn measure(&mut self, app: App, quick: bool, no_kernel: &Option<String>) -> anyhow::Result<()> {
        let scratch = GuardedDirectory::new("apps")?;
        eprintln!("memfold bench: {}", app.name());
        match app.work(scratch.path(), quick) {
            Ok(work) if app == App::Idle => self.measure_idle(&work),
            Ok(work) => self.measure_limited(app.case(), &work, quick, no_kernel),
            Err(error) if error.is::<Refusal>() => {
                for figure in app.figures() {
                    let (label, target) =
                        (label(app.name(), figure), format!(">= {}", figure.target));
                    self.rows.push(StoreRow::not_run(&label, &target, &error.to_string()));
                }
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    fn measure_limited(
        &mut self,
        case: Case,
        work: &Work,
        quick: bool,
        no_kernel: &Option<String>,
    ) -> anyhow::Result<()> {
        let plain_result = run_with(AppPeer::Plain, work, 0, 0)
            .with_context(|| format!("{} without a limit", case.name))?;
        let (output, data_bytes) = (plain_result.output, plain_result.peak_bytes);
        let part = (data_bytes / PART).max(LIMIT_MIN_BYTES);
        let limit_bytes = case.resident_bytes.unwrap_or(part);
        let mut baseline = Runs::default();
        baseline.add(Ok(plain_result), output);
        self.note(case, AppPeer::Plain, data_bytes, &baseline);
        let mut flags = vec!["--resident".to_string(), limit_bytes.to_string()];
        flags.extend(case.flags.iter().map(|flag| flag.to_string()));
        let mut peers = vec![AppPeer::Memfold(&flags)];
        if no_kernel.is_none() {
            let sizes =
                if quick { vec![FolioKib(4), FolioKib(64)] } else { FolioKib::ALL.to_vec() };
            peers.extend(sizes.into_iter().filter(|size| size.check().is_ok()).map(AppPeer::Zram));
        }
        let mut runs: Vec<Runs> = peers.iter().map(|_| Runs::default()).collect();
        for _ in 0..self.found.runs {
            for (peer, runs) in peers.iter().zip(&mut runs) {
                runs.add(run_with(*peer, work, limit_bytes, data_bytes), output);
            }
        }
        for (i, figure) in case.figures.iter().enumerate() {
            let theirs = peers
                .iter()
                .zip(&runs)
                .skip(1)
                .filter_map(|(peer, runs)| Some((runs.median(i)?, peer.name())));
            let better =
                |a: &f64, b: &f64| if figure.more { b.total_cmp(a) } else { a.total_cmp(b) };
            let best = theirs.min_by(|a, b| better(&a.0, &b.0));
            let ours = (runs[0].median(i), runs[0].note.as_str());
            self.rows.push(judge(case.name, figure, ours, best, no_kernel));
        }
        peers.iter().zip(&runs).for_each(|(peer, runs)| self.note(case, *peer, limit_bytes, runs));
        Ok(())
    }

    /// Measures a program far under its limit. Runs with and without memfold alternate, and the
    /// shortest times are compared, because other load on the machine only adds time.
    fn measure_idle(&mut self, work: &Work) -> anyhow::Result<()> {
        let first = run_with(AppPeer::Plain, work, 0, 0).context("idle without a limit")?;
        let limit_bytes = first.peak_bytes * FAR;
        let flags = ["--limit".to_string(), limit_bytes.to_string()];
        let (mut without, mut with) = (Runs::default(), Runs::default());
        for _ in 0..(2 * self.found.runs + 1).max(3) {
            with.add(run_with(AppPeer::Memfold(&flags), work, 0, 0), first.output);
            without.add(run_with(AppPeer::Plain, work, 0, 0), first.output);
        }
        let name = "idle: % slower than without memfold";
        self.rows.push(match (with.least(0), without.least(0)) {
            (Some(with), Some(without)) => {
                let note = format!(
                    "{with:.3} s against {without:.3} s, the least of {} each",
                    2 * self.found.runs + 1
                );
                StoreRow::at_most(name, (with / without - 1.0) * 100.0, 1.0, note)
            }
            _ => StoreRow::at_most(name, f64::NAN, 1.0, with.note.clone() + &without.note),
        });
        self.note(App::Idle.case(), AppPeer::Plain, first.peak_bytes, &without);
        self.note(App::Idle.case(), AppPeer::Memfold(&flags), limit_bytes, &with);
        Ok(())
    }

    fn note(&mut self, case: Case, peer: AppPeer, limit_bytes: u64, runs: &Runs) {
        self.found.measured.extend(case.figures.iter().enumerate().map(|(i, figure)| Measured {
            app: case.name.to_string(),
            peer: peer.name(),
            limit_bytes,
            what: figure.name,
            spread: runs.figures.get(i).and_then(|all| Spread::of(all.clone())),
            note: runs.note.clone(),
            failed: runs.has_failed(peer),
        }));
    }
}

impl AppFindings {
    fn text(&self) -> String {
        let head = ["program", "memory", "with", "what", "figure", ""];
        let mut rows = vec![head.map(String::from).to_vec()];
        rows.extend(self.measured.iter().map(|row| {
            let figure = row.spread.map_or("-".into(), show_spread);
            let (memory, note) = (show_size(row.limit_bytes), row.note.clone());
            vec![row.app.clone(), memory, row.peer.clone(), row.what.into(), figure, note]
        }));
        format!("{} run(s) each; figures: median (min..max)\n\n{}", self.runs, layout(&rows))
    }
}

fn label(app: &str, figure: &CaseFigure) -> String {
    format!("{app}: {}, times as good as on zram", figure.name)
}

/// Adds the row of a figure: `ours` with a note, and the kernel's best with its name.
fn judge(
    app: &str,
    figure: &CaseFigure,
    ours: (Option<f64>, &str),
    best: Option<(f64, String)>,
    no_kernel: &Option<String>,
) -> StoreRow {
    let label = label(app, figure);
    match (ours, best) {
        ((Some(ours), _), Some((theirs, name))) => {
            let ratio = if figure.more { ours / theirs } else { theirs / ours };
            let note = format!("{} against {} ({name})", show_one(ours), show_one(theirs));
            StoreRow::at_least(&label, ratio, figure.target, note)
        }
        ((None, why), _) => StoreRow::at_least(&label, f64::NAN, figure.target, why.into()),
        (_, None) => {
            let why = no_kernel.clone().unwrap_or_else(|| "no run on zram came to its end".into());
            StoreRow::not_run(&label, &format!(">= {}", figure.target), &why)
        }
    }
}

fn show_one(value: f64) -> String {
    if value < 100.0 { format!("{value:.2}") } else { show(value) }
}

fn show_spread(spread: Spread) -> String {
    let [median, min, max] = [spread.median, spread.min, spread.max].map(show_one);
    if min == max { median } else { format!("{median} ({min}..{max})") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::row::all_good;

    #[test]
    fn a_figure_is_judged_by_what_is_better() {
        let [time, rate] = [&App::Sort.figures()[0], &App::Mariadb.figures()[0]];
        let ratio = |figure, ours| {
            judge("sort", figure, (Some(ours), ""), Some((6.0, "4k".into())), &None).figure
        };
        assert_eq!((ratio(time, 3.0), ratio(rate, 3.0)), (Some(2.0), Some(0.5)));
        let failure = judge("sort", time, (None, "why"), Some((6.0, "4k".into())), &None);
        assert!(!all_good(std::slice::from_ref(&failure)) && failure.note == "why");
        assert!(all_good(&[judge("sort", time, (Some(1.0), ""), None, &Some("no root".into()))]));
    }

    #[test]
    fn runs_with_other_output_or_failure_are_reported() {
        let result_of = |output| Ok(Done { figures: vec![1.0, 2.0], output, peak_bytes: 0 });
        let mut runs = Runs::default();
        runs.add(result_of(7), 7);
        assert_eq!((runs.median(1), runs.note.as_str()), (Some(2.0), ""));
        runs.add(result_of(8), 7);
        assert!(runs.note == WRONG && runs.figures[0].len() == 1);
        // A later run that is right, or fails, doesn't hide the wrong result.
        runs.add(result_of(7), 7);
        runs.add(Err(anyhow::anyhow!("killed")), 7);
        assert!(
            runs.has_failed(AppPeer::Memfold(&[])) && runs.has_failed(AppPeer::Zram(FolioKib(4)))
        );
        let mut runs = Runs::default();
        runs.add(Err(anyhow::anyhow!("killed")), 7);
        assert!(
            runs.has_failed(AppPeer::Memfold(&[])) && !runs.has_failed(AppPeer::Zram(FolioKib(4)))
        );
    }
}
