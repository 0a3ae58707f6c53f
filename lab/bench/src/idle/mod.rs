//! `memfold bench idle`: memory that idle programs give back without a limit, what it costs to wake
//! them, and servers that share a limit.

mod phases;
mod server;
mod group;

use crate::common::output::Output;
use crate::common::row::StoreRow;
use crate::common::summary::Spread;
use crate::harness::report::Report;
use crate::host::guard;
use crate::idle::group::{GroupPlan, WokenServers};
use crate::idle::phases::PhaseFigures;
use crate::idle::server::{Language, RunningServer, ServerPrograms};
use serde::Serialize;
use std::thread::sleep;
use std::time::Duration;

pub use phases::{IdleChildArgs, idle_child};

/// Arguments of `memfold bench idle`.
#[derive(clap::Args, Debug, Clone)]
pub struct IdleArgs {
    /// Runs of each server, in turn with runs without memfold
    #[arg(long, default_value_t = 3)]
    pub runs: usize,
    /// A quick run: one run, less memory, fewer servers
    #[arg(long)]
    pub quick: bool,
    /// Where the report goes
    #[command(flatten)]
    pub output: Output,
}

/// The figures of one run of a server.
#[derive(Serialize)]
struct ServerFigures {
    language: &'static str,
    /// Anonymous memory while it worked, and while it was idle, in bytes.
    warm_bytes: u64,
    idle_bytes: u64,
    /// The first request after that, with memfold and without, seconds.
    first_seconds: f64,
    first_plain_seconds: f64,
    /// CPU time of memfold's threads while the server is idle, percent of a CPU.
    idle_cpu_percent: f64,
    is_right: bool,
}

#[derive(Default, Serialize)]
struct IdleFindings {
    servers: Vec<ServerFigures>,
    group: Option<WokenServers>,
    phases: Option<PhaseFigures>,
}

struct IdlePlan {
    mib: u64,
    idle_seconds: u64,
    /// Wait after the last request, seconds.
    wait: u64,
    runs: usize,
}

/// Measures, prints the report, and returns the exit status: 1 if an answer was wrong or, with
/// `--check`, a row is short.
pub fn idle(args: IdleArgs) -> anyhow::Result<i32> {
    guard::install()?;
    let plan = match args.quick {
        true => IdlePlan { mib: 100, idle_seconds: 2, wait: 8, runs: 1 },
        false => IdlePlan { mib: 350, idle_seconds: 10, wait: 40, runs: args.runs },
    };
    let programs = ServerPrograms::write()?;
    let (mut findings, mut rows) = (IdleFindings::default(), Vec::new());
    for language in Language::ALL {
        let all: anyhow::Result<Vec<ServerFigures>> =
            (0..plan.runs).map(|_| measure(&programs, language, &plan)).collect();
        match all {
            Ok(all) => {
                rows.extend(rows_of(&all, args.quick));
                findings.servers.extend(all);
            }
            Err(why) => rows.push(StoreRow::not_run(language.name(), "", &format!("{why:#}"))),
        }
    }
    let group = match args.quick {
        true => GroupPlan { servers: 4, mib: 100, limit_bytes: 240 << 20, idle_seconds: 2 },
        false => GroupPlan { servers: 10, mib: 400, limit_bytes: 1 << 30, idle_seconds: 5 },
    };
    match group::measure(&programs, &group) {
        Ok(figures) => {
            rows.extend(group::rows(&figures));
            findings.group = Some(figures);
        }
        Err(why) => rows.push(StoreRow::not_run("group", "", &format!("{why:#}"))),
    }
    let phases =
        phases::measure(if args.quick { 64 } else { 300 }, if args.quick { 10 } else { 40 })?;
    rows.extend(phases::rows(&phases));
    findings.phases = Some(phases);
    let is_wrong = findings.servers.iter().any(|server| !server.is_right)
        || findings.group.as_ref().is_some_and(|group| group.wrong_answers > 0);
    let mut report = Report::new(findings);
    report.rows = rows;
    report.finish(&args.output, "idle", ("", ""), is_wrong)
}

/// Measures a server with memfold and without.
fn measure(
    programs: &ServerPrograms,
    language: Language,
    plan: &IdlePlan,
) -> anyhow::Result<ServerFigures> {
    let wait = Duration::from_secs(plan.wait);
    let warm = |flags: &[&str]| {
        let server = RunningServer::start(programs, language, plan.mib, flags)?;
        (0..4).try_for_each(|_| server.request().map(drop))?;
        anyhow::Ok(server)
    };
    let server = warm(&[])?;
    sleep(wait);
    let (first_plain_seconds, right) = server.request()?;
    drop(server);
    let idle = plan.idle_seconds.to_string();
    let server = warm(&["--idle", &idle])?;
    let warm_bytes = server.anonymous_bytes()?;
    let half = wait / 2;
    sleep(wait - half);
    let before = server.own_cpu_seconds()?;
    sleep(half);
    let cpu = server.own_cpu_seconds()? - before;
    let idle_bytes = server.anonymous_bytes()?;
    let (first_seconds, answer) = server.request()?;
    Ok(ServerFigures {
        language: language.name(),
        warm_bytes,
        idle_bytes,
        first_seconds,
        first_plain_seconds,
        idle_cpu_percent: cpu * 100.0 / half.as_secs_f64(),
        is_right: answer == right,
    })
}

/// Returns the rows of the runs of one server.
fn rows_of(all: &[ServerFigures], is_quick: bool) -> Vec<StoreRow> {
    let median = |of: &dyn Fn(&ServerFigures) -> f64| {
        Spread::of(all.iter().map(of).collect()).map_or(f64::NAN, |spread| spread.median)
    };
    let Some(one) = all.first() else { return Vec::new() };
    let label = |what: &str| format!("{}: {what}", one.language);
    let mib = |of: &dyn Fn(&ServerFigures) -> u64| median(&|one| (of(one) >> 20) as f64);
    let back = median(&|one| 100.0 - one.idle_bytes as f64 * 100.0 / one.warm_bytes as f64);
    let memory =
        format!("{:.0} MiB to {:.0}", mib(&|one| one.warm_bytes), mib(&|one| one.idle_bytes));
    let note = format!("{:.2} without memfold", median(&|one| one.first_plain_seconds));
    let (cpu, label_of_cpu) =
        (median(&|one| one.idle_cpu_percent), label("CPU of memfold while idle, %"));
    vec![
        StoreRow::at_least(&label("memory given back, %"), back, 80.0, memory),
        StoreRow::at_most(&label("first request, s"), median(&|one| one.first_seconds), 0.5, note),
        match is_quick {
            true => StoreRow::plain(&label_of_cpu, cpu, "it still compresses".to_string()),
            false => StoreRow::at_most(&label_of_cpu, cpu, 0.3, String::new()),
        },
    ]
}
