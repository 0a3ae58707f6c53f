//! Ten servers share the limit of a group.

use crate::common::row::StoreRow;
use crate::host::program::memfold;
use crate::idle::server::{Language, RunningServer, ServerPrograms};
use anyhow::{Context, ensure};
use serde::Serialize;
use serde_json::Value;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::{scope, sleep};
use std::time::Duration;

/// A group while this lives.
struct BenchGroup {
    name: String,
}

impl BenchGroup {
    fn make(limit: u64) -> anyhow::Result<BenchGroup> {
        let group = BenchGroup { name: format!("bench-{}", std::process::id()) };
        group.ask(&["set", "--limit", &limit.to_string()])?;
        Ok(group)
    }

    fn ask(&self, arguments: &[&str]) -> anyhow::Result<Vec<u8>> {
        let output =
            Command::new(memfold()?).args(arguments).args(["--group", &self.name]).output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(output.stdout)
    }

    /// Returns the memory that all runs hold now, in bytes.
    fn held_bytes(&self) -> anyhow::Result<u64> {
        let about: Value = serde_json::from_slice(&self.ask(&["stat", "--json"])?)?;
        let runs = about["runs"].as_array().context("no runs")?;
        Ok(runs.iter().filter_map(|run| run["held_bytes"].as_u64()).sum())
    }
}

impl Drop for BenchGroup {
    fn drop(&mut self) {
        let _ = self.ask(&["set", "--limit", "none"]);
    }
}

/// What was measured.
#[derive(Default, Serialize)]
pub struct WokenServers {
    pub servers: usize,
    pub limit_bytes: u64,
    pub peak_held_bytes: u64,
    /// The first request to each server after all were idle, seconds.
    pub woken_seconds: Vec<f64>,
    pub wrong_answers: usize,
}

/// The size of the test.
pub struct GroupPlan {
    pub servers: usize,
    pub mib: u64,
    pub limit_bytes: u64,
    pub idle_seconds: u64,
}

/// Starts the servers one after another, lets all become idle, and wakes them one after another.
pub fn measure(programs: &ServerPrograms, plan: &GroupPlan) -> anyhow::Result<WokenServers> {
    let group = BenchGroup::make(plan.limit_bytes)?;
    let (is_over, peak) = (AtomicBool::new(false), AtomicU64::new(0));
    scope(|scope| {
        let watch = scope.spawn(|| {
            while !is_over.load(Relaxed) {
                peak.fetch_max(group.held_bytes()?, Relaxed);
                sleep(Duration::from_millis(100));
            }
            anyhow::Ok(())
        });
        let outcome = wake_all(programs, plan, &group);
        is_over.store(true, Relaxed);
        watch.join().expect("it does not panic")?;
        let mut figures = outcome?;
        figures.peak_held_bytes = peak.load(Relaxed);
        Ok(figures)
    })
}

fn wake_all(
    programs: &ServerPrograms,
    plan: &GroupPlan,
    group: &BenchGroup,
) -> anyhow::Result<WokenServers> {
    let idle = plan.idle_seconds.to_string();
    let flags = ["--group", &group.name, "--idle", &idle];
    let mut servers = Vec::new();
    for _ in 0..plan.servers {
        servers.push(RunningServer::start(programs, Language::Node, plan.mib, &flags)?);
    }
    let right = servers[0].request()?.1;
    sleep(Duration::from_secs(2 * plan.idle_seconds + 5));
    let mut figures = WokenServers {
        servers: plan.servers,
        limit_bytes: plan.limit_bytes,
        ..WokenServers::default()
    };
    for server in &servers {
        let (seconds, answer) = server.request()?;
        figures.woken_seconds.push(seconds);
        figures.wrong_answers += usize::from(answer != right);
        sleep(Duration::from_secs(1));
    }
    Ok(figures)
}

/// Returns the rows of the report.
pub fn rows(figures: &WokenServers) -> [StoreRow; 2] {
    let longest = figures.woken_seconds.iter().copied().fold(0.0, f64::max);
    let of_limit = figures.peak_held_bytes as f64 / figures.limit_bytes as f64;
    let note = format!(
        "{} node servers in {} MiB; {} wrong answers",
        figures.servers,
        figures.limit_bytes >> 20,
        figures.wrong_answers
    );
    [
        StoreRow::at_most("group: longest first request, s", longest, 0.5, note),
        StoreRow::at_most("group: memory held at most, of the limit", of_limit, 1.0, String::new()),
    ]
}
