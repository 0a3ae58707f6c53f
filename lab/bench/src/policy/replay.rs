//! Replays traces on policies, and prints how they compare.

use crate::common::output::Output;
use crate::common::refusal::Refusal;
use crate::common::table::layout;
use crate::policy::candidates::{ALL, Named, OWN};
use crate::policy::counts::{COSTS, COSTS_BUSY, CostTable, Counts};
use crate::policy::memory;
use crate::policy::trace::Trace;
use anyhow::Context;
use serde::Serialize;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Shares of a trace's pages that are in memory, percent.
pub const SHARES: [u32; 3] = [25, 45, 70];
/// The figures of the engine's own policy may grow by one part in so many.
const TOLERANCE: u64 = 100;

/// Arguments of `memfold bench policy replay`.
#[derive(clap::Args, Debug, Clone)]
pub struct ReplayArgs {
    /// Traces [default: those of the repository]
    #[arg(value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Shares of a program's pages that are in memory, percent
    #[arg(long, value_delimiter = ',', value_name = "PERCENT", default_values_t = SHARES,
          value_parser = clap::value_parser!(u32).range(1..=100))]
    pub at: Vec<u32>,
    /// Only these policies, beside memfold's own [default: all]
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    pub policy: Vec<String>,
    /// Count the costs of a program with another busy thread
    #[arg(long, conflicts_with = "check")]
    pub busy: bool,
    /// Print only the summary
    #[arg(long)]
    pub brief: bool,
    /// Store the figures of memfold's own policy as those that tests expect
    #[arg(long, conflicts_with_all = ["busy", "files"])]
    pub expect: bool,
    /// Where the report goes
    #[command(flatten)]
    pub output: Output,
}

/// The result of one policy on one trace.
#[derive(Debug, Clone, Serialize)]
pub struct ReplayRow {
    /// The trace.
    pub trace: String,
    /// Share of its pages in memory, percent.
    pub at: u32,
    /// The policy.
    pub policy: &'static str,
    /// What happened.
    pub counts: Counts,
    /// Its time by the table of costs, seconds.
    pub seconds: f64,
    /// That, divided by the time of the engine's own policy.
    pub relative: f64,
}

/// Replays traces, and prints the tables. With `--check`, fails if the engine's own policy is worse
/// than expected.
pub fn replay(args: &ReplayArgs) -> anyhow::Result<i32> {
    let unknown = args.policy.iter().find(|name| !ALL.iter().any(|policy| policy.name == **name));
    if let Some(name) = unknown {
        let names = ALL.map(|policy| policy.name).join(", ");
        return Err(Refusal::Usage(format!("--policy {name}: choose of {names}")).into());
    }
    let is_chosen = |named: &&Named| {
        args.policy.is_empty() || named.name == OWN || args.policy.iter().any(|n| n == named.name)
    };
    let policies: Vec<&Named> = ALL.iter().filter(is_chosen).collect();
    let files = if args.files.is_empty() { stored()? } else { args.files.clone() };
    let costs = if args.busy { COSTS_BUSY } else { COSTS };
    let mut rows = Vec::new();
    for file in &files {
        let (name, trace) = (name_of(file), Trace::read(file)?);
        let first = rows.len();
        for at in &args.at {
            rows.extend(compare(&name, &trace, *at, &policies, &costs));
        }
        if !args.brief {
            println!("{name}: {} pages, {} touches", trace.pages(), trace.references.len());
            println!("{}", layout(&table(&rows[first..])));
        }
    }
    println!("{}", layout(&summary(&rows, &policies, &args.at)));
    if args.expect {
        let path = expected_path();
        std::fs::write(&path, expected(&rows))
            .with_context(|| format!("writing {}", path.display()))?;
    }
    let worse = if args.output.check { worse_than_expected(&rows)? } else { Vec::new() };
    worse.iter().for_each(|line| eprintln!("memfold: {line}"));
    args.output.finish(&rows, false, worse.is_empty())
}

/// Replays a trace on each policy with `at` percent of its pages in memory.
pub fn compare(
    name: &str,
    trace: &Trace,
    at: u32,
    policies: &[&Named],
    costs: &CostTable,
) -> Vec<ReplayRow> {
    let capacity = trace.pages() as u64 * at as u64 / 100;
    let mut rows: Vec<ReplayRow> = policies
        .iter()
        .map(|policy| {
            let counts = memory::replay(trace, capacity, &mut *(policy.make)(trace));
            let seconds = counts.seconds(costs);
            ReplayRow {
                trace: name.into(),
                at,
                policy: policy.name,
                counts,
                seconds,
                relative: 1.0,
            }
        })
        .collect();
    if let Some(own) = rows.iter().find(|row| row.policy == OWN).map(|row| row.seconds) {
        rows.iter_mut().for_each(|row| row.relative = row.seconds / own.max(f64::MIN_POSITIVE));
    }
    rows
}

fn cells<const N: usize>(texts: [&str; N]) -> Vec<String> {
    texts.map(String::from).to_vec()
}

fn table(rows: &[ReplayRow]) -> Vec<Vec<String>> {
    let heading = cells([
        "policy",
        "at",
        "misses",
        "first writes",
        "rescues",
        "saved",
        "unchanged",
        "dropped",
        "ahead",
        "wasted",
        "spared",
        "time, s",
        "of memfold's",
    ]);
    let lines = rows.iter().map(|row| {
        let c = &row.counts;
        let counts = [
            c.misses,
            c.write_faults,
            c.rescues,
            c.saved,
            c.unchanged,
            c.dropped,
            c.ahead,
            c.wasted,
            c.spared,
        ];
        [row.policy.to_string(), format!("{}%", row.at)]
            .into_iter()
            .chain(counts.map(|count| count.to_string()))
            .chain([format!("{:.3}", row.seconds), format!("{:.2}", row.relative)])
            .collect()
    });
    std::iter::once(heading).chain(lines).collect()
}

/// For each policy: the mean of its times and misses, relative to the engine's own, and the traces
/// where it does best and worst.
fn summary(rows: &[ReplayRow], policies: &[&Named], shares: &[u32]) -> Vec<Vec<String>> {
    let mut heading = cells(["time, of memfold's"]);
    heading.extend(shares.iter().map(|at| format!("{at}%")));
    heading.extend(["best", "worst"].map(String::from));
    heading.extend(shares.iter().map(|at| format!("misses {at}%")));
    let lines = policies.iter().map(|policy| {
        let of = |at: Option<u32>| {
            rows.iter()
                .filter(move |row| row.policy == policy.name && at.is_none_or(|at| row.at == at))
        };
        let mean = |at: u32| geometric_mean(of(Some(at)).map(|row| row.relative));
        let mut line = vec![policy.name.to_string()];
        line.extend(shares.iter().map(|at| format!("{:.2}", mean(*at))));
        let text = |row: Option<&ReplayRow>| {
            row.map_or_else(String::new, |row| {
                format!("{:.2} {} {}%", row.relative, row.trace, row.at)
            })
        };
        line.push(text(of(None).min_by(|a, b| a.relative.total_cmp(&b.relative))));
        line.push(text(of(None).max_by(|a, b| a.relative.total_cmp(&b.relative))));
        line.extend(
            shares
                .iter()
                .map(|at| of(Some(*at)).map(|row| row.counts.misses).sum::<u64>().to_string()),
        );
        line
    });
    std::iter::once(heading).chain(lines).collect()
}

fn geometric_mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0), |(sum, count), value| (sum + value.ln(), count + 1));
    (sum / count.max(1) as f64).exp()
}

/// The directory of the repository's traces.
fn directory() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../traces"))
}

fn expected_path() -> PathBuf {
    directory().join("memfold.tsv")
}

/// Returns the repository's traces.
pub fn stored() -> anyhow::Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(directory()).map_err(|error| {
        Refusal::Corpus(format!("{}: {error}. Name the traces", directory().display()))
    })?;
    let mut files: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|end| end == "trace"))
        .collect();
    files.sort();
    Ok(files)
}

/// Returns the name of the trace in a file.
pub fn name_of(file: &Path) -> String {
    file.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// Returns the lines of the file of expected figures.
fn expected(rows: &[ReplayRow]) -> String {
    let mut text = String::from("trace\tat\tmisses\tus\n");
    for row in rows.iter().filter(|row| row.policy == OWN) {
        let us = (row.seconds * 1e6).round();
        let _ = writeln!(text, "{}\t{}\t{}\t{us}", row.trace, row.at, row.counts.misses);
    }
    text
}

/// Returns what is worse than the stored figures, one line each.
pub fn worse_than_expected(rows: &[ReplayRow]) -> anyhow::Result<Vec<String>> {
    let path = expected_path();
    let text =
        std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    Ok(worse(rows, &text))
}

fn worse(rows: &[ReplayRow], expected: &str) -> Vec<String> {
    let mut lines = Vec::new();
    for row in rows.iter().filter(|row| row.policy == OWN) {
        let start = format!("{}\t{}\t", row.trace, row.at);
        let figures = expected.lines().find_map(|line| line.strip_prefix(&start));
        let Some(figures) = figures else {
            lines.push(format!("{} at {}%: no expected figures", row.trace, row.at));
            continue;
        };
        let now = [row.counts.misses, (row.seconds * 1e6).round() as u64];
        for ((what, now), before) in ["misses", "us"].iter().zip(now).zip(figures.split('\t')) {
            let before: u64 = before.parse().unwrap_or(0);
            if now > before + before / TOLERANCE {
                lines.push(format!("{} at {}%: {now} {what}, not {before}", row.trace, row.at));
            }
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    /// After a change that is meant: `memfold bench policy replay --expect`.
    #[test]
    fn own_policy_is_no_worse_than_expected_on_any_trace() {
        let own: Vec<&Named> = ALL.iter().filter(|policy| policy.name == OWN).collect();
        let files = stored().unwrap();
        assert!(files.len() >= 10, "{files:?}");
        let mut rows = Vec::new();
        for file in files {
            let trace = Trace::read(&file).unwrap();
            rows.extend(SHARES.map(|at| compare(&name_of(&file), &trace, at, &own, &COSTS)));
        }
        assert_eq!(worse_than_expected(&rows.concat()).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn figures_may_grow_by_a_hundredth() {
        let row = |misses, seconds| ReplayRow {
            trace: "a".into(),
            at: 25,
            policy: OWN,
            counts: Counts { misses, ..Counts::default() },
            seconds,
            relative: 1.0,
        };
        let text = expected(&[row(200, 0.001)]);
        assert_eq!(text, "trace\tat\tmisses\tus\na\t25\t200\t1000\n");
        assert!(worse(&[row(202, 0.00101)], &text).is_empty());
        assert_eq!(worse(&[row(203, 0.001)], &text), ["a at 25%: 203 misses, not 200"]);
        assert_eq!(worse(&[row(1, 0.00102)], &text), ["a at 25%: 1020 us, not 1000"]);
        assert_eq!(worse(&[ReplayRow { at: 26, ..row(1, 0.0) }], &text).len(), 1);
    }
}
