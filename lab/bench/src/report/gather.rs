//! Runs the other benchmarks as children, in turn, and gathers the rows of their `--json` files.

use crate::common::summary::Spread;
use crate::common::verdict::Verdict;
use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Differences between runs above this share count as noise.
pub const NOISE: f64 = 0.15;

/// One child: `memfold bench NAME ARGS`.
#[derive(Debug, Clone)]
pub struct ReportStep {
    /// Name of the benchmark.
    pub bench: &'static str,
    /// Its arguments.
    pub args: Vec<String>,
    /// The time after which it is ended.
    pub seconds_max: u64,
    /// Whether it runs in the first round only.
    pub once: bool,
}

/// The result of a child.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StepDone {
    /// The command line, as a user would write it.
    pub command: String,
    /// Its duration.
    pub seconds: f64,
    /// Why it gave no result, if so.
    pub trouble: Option<String>,
    /// Its output.
    pub text: String,
}

/// A figure of one benchmark, from all rounds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Fact {
    /// The benchmark.
    pub bench: String,
    /// The name of the figure.
    pub label: String,
    /// The figures, one for each round that has it.
    pub figures: Vec<f64>,
    /// `<= 1.1`, `>= 4x`; empty for a figure that only explains another.
    pub target: String,
    /// The verdicts of the rounds.
    pub verdicts: Vec<Verdict>,
    /// How the last figure was computed, or why there is none.
    pub note: String,
    /// The median in the earlier report that this one was compared with, if they differ by more
    /// than [`NOISE`].
    #[serde(default)]
    pub before: Option<f64>,
}

impl Fact {
    /// Returns median, minimum and maximum of the rounds.
    pub fn spread(&self) -> Option<Spread> {
        Spread::of(self.figures.clone())
    }

    /// Returns the verdict on the median; none without a target.
    pub fn verdict(&self) -> Option<Verdict> {
        let last = *self.verdicts.last()?;
        if let Some(void) = self.verdicts.iter().find(|verdict| **verdict == Verdict::Void) {
            return Some(*void);
        }
        let Some(spread) = self.spread() else { return Some(last) };
        let bound = self
            .target
            .trim_start_matches(['<', '>', '=', ' '])
            .trim_end_matches('x')
            .parse::<f64>();
        let is_reached = match (bound, self.target.get(..2)) {
            (Ok(most), Some("<=")) => spread.median <= most,
            (Ok(least), Some(">=")) => spread.median >= least,
            _ => return Some(last),
        };
        Some(match is_reached {
            true => Verdict::Pass,
            false
                if self
                    .verdicts
                    .iter()
                    .all(|verdict| matches!(verdict, Verdict::Bound | Verdict::Pass)) =>
            {
                Verdict::Bound
            }
            false => Verdict::Short,
        })
    }

    /// Returns whether two rounds, or this and the earlier report, differ by more than [`NOISE`].
    pub fn is_noisy(&self) -> bool {
        self.before.is_some() || self.spread().is_some_and(|spread| differ(spread.min, spread.max))
    }
}

/// Returns whether two figures differ by more than [`NOISE`].
pub fn differ(a: f64, b: f64) -> bool {
    let (less, more) = (a.abs().min(b.abs()), a.abs().max(b.abs()));
    more > less * (1.0 + NOISE)
}

/// All results of the children.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Gathered {
    /// The children, in the order they ran.
    pub steps: Vec<StepDone>,
    /// Their figures, in order of arrival.
    pub facts: Vec<Fact>,
    /// Differences of the conditions from those that the targets are set for.
    #[serde(default)]
    pub notes: Vec<String>,
    /// The JSON files of the last round, by benchmark.
    pub documents: BTreeMap<String, serde_json::Value>,
}

/// A row of any benchmark: a figure with a target, or a figure of memfold against the kernel's
/// best.
#[derive(Deserialize)]
struct RawRow {
    label: String,
    #[serde(default)]
    figure: Option<f64>,
    #[serde(default)]
    ratio: Option<f64>,
    #[serde(default)]
    best: Option<(f64, String)>,
    #[serde(default)]
    target: String,
    #[serde(default)]
    verdict: Option<Verdict>,
    #[serde(default)]
    note: String,
}

impl Gathered {
    /// Runs all steps in turn, `rounds` times. `before` gets the next step and its number.
    pub fn run(
        &mut self,
        program: &Path,
        steps: &[ReportStep],
        rounds: usize,
        mut before: impl FnMut(&ReportStep, usize),
    ) -> anyhow::Result<()> {
        let all =
            (0..rounds).flat_map(|round| steps.iter().filter(move |step| round == 0 || !step.once));
        for (number, step) in all.enumerate() {
            before(step, number);
            self.step(program, step)?;
        }
        Ok(())
    }

    fn step(&mut self, program: &Path, step: &ReportStep) -> anyhow::Result<()> {
        let files = Files::new()?;
        let start = Instant::now();
        let outcome = run_child(program, step, &files);
        let text = fs::read_to_string(files.path("text")).unwrap_or_default();
        let mut trouble = outcome.err().map(|error| format!("{error:#}"));
        match fs::read_to_string(files.path("json")).ok().map(|json| serde_json::from_str(&json)) {
            Some(Ok(document)) => self.add(step.bench, step.once, document),
            Some(Err(error)) => trouble = Some(format!("its report can't be read: {error}")),
            None => trouble = trouble.or(Some("it left no report".into())),
        }
        let command =
            format!("memfold bench {} {}", step.bench, step.args.join(" ")).trim_end().to_string();
        self.steps.push(StepDone {
            command,
            seconds: start.elapsed().as_secs_f64(),
            trouble,
            text,
        });
        Ok(())
    }

    /// Adds a benchmark's report. Rows of an unknown form stay in the document only. A report that
    /// ran `aside` of the others does not replace theirs.
    pub fn add(&mut self, bench: &str, aside: bool, document: serde_json::Value) {
        for row in document["rows"].as_array().into_iter().flatten() {
            let Ok(row) = serde_json::from_value::<RawRow>(row.clone()) else { continue };
            let note = match (&row.best, row.figure) {
                (Some((best, size)), Some(figure)) => {
                    format!("{figure:.1} against {best:.1} ({size})")
                }
                _ => row.note,
            };
            let figure = if row.best.is_some() { row.ratio } else { row.figure };
            let known =
                self.facts.iter().position(|fact| fact.bench == bench && fact.label == row.label);
            let at = known.unwrap_or_else(|| {
                let (bench, label) = (bench.to_string(), row.label.clone());
                let (figures, verdicts) = (Vec::new(), Vec::new());
                let (target, note) = (row.target, String::new());
                self.facts.push(Fact {
                    bench,
                    label,
                    figures,
                    target,
                    verdicts,
                    note,
                    before: None,
                });
                self.facts.len() - 1
            });
            let fact = &mut self.facts[at];
            if row.verdict == Some(Verdict::NotRun) && !fact.figures.is_empty() {
                // Without the other side, the figure is not a ratio.
                continue;
            }
            fact.figures.extend(figure.filter(|figure| figure.is_finite()));
            fact.verdicts.extend(row.verdict);
            fact.note = note;
        }
        for departure in
            document["departures"].as_array().into_iter().flatten().filter_map(|text| text.as_str())
        {
            let note = format!("bench {bench}: the targets are set for {departure}");
            if !self.notes.contains(&note) {
                self.notes.push(note);
            }
        }
        if !aside || !self.documents.contains_key(bench) {
            self.documents.insert(bench.to_string(), document);
        }
    }
}

/// Runs a child to its end. If this process dies, the child ends and restores its changes.
fn run_child(program: &Path, step: &ReportStep, files: &Files) -> anyhow::Result<()> {
    let mut command = Command::new(program);
    command.arg(step.bench).args(&step.args).arg("--json").arg(files.path("json"));
    command
        .stdin(Stdio::null())
        .stdout(File::create(files.path("text"))?)
        .stderr(File::create(files.path("errors"))?);
    // SAFETY: between fork and exec only prctl is called, which is async-signal-safe and touches no
    // memory here.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        })
    };
    let mut child = command.spawn().with_context(|| format!("starting {}", program.display()))?;
    let start = Instant::now();
    let mut has_asked = false;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        let over = start.elapsed().saturating_sub(Duration::from_secs(step.seconds_max));
        if !over.is_zero() && !has_asked {
            // SAFETY: signals our own child, which has not been waited for. SIGTERM makes the child
            // restore its changes.
            unsafe { libc::kill(child.id() as i32, libc::SIGTERM) };
            has_asked = true;
        }
        if over > Duration::from_secs(60) {
            child.kill()?;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    if has_asked {
        bail!("stopped after {} s", step.seconds_max);
    }
    match status.code() {
        // Status 1: a row is short, or a byte was wrong. The rows show that.
        Some(0 | 1) => Ok(()),
        _ => {
            let errors = fs::read_to_string(files.path("errors")).unwrap_or_default();
            let line = errors.lines().last().unwrap_or("it said nothing");
            bail!("{line} ({status})")
        }
    }
}

/// A directory for a child's output. Dropping it removes it.
struct Files(PathBuf);

impl Files {
    fn new() -> anyhow::Result<Files> {
        let path = std::env::temp_dir().join(format!("memfold-report-{}", std::process::id()));
        fs::create_dir_all(&path).with_context(|| format!("making {}", path.display()))?;
        Ok(Files(path))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn gathered(rounds: &[serde_json::Value]) -> Gathered {
        let mut results = Gathered::default();
        rounds.iter().for_each(|round| results.add("some", false, json!({ "rows": [round] })));
        results
    }

    #[test]
    fn rounds_are_judged_by_their_median() {
        let row = |figure: f64, verdict: &str| json!({ "label": "a", "figure": figure, "target": ">= 1.5", "verdict": verdict, "note": "n" });
        let all = gathered(&[row(1.6, "Pass"), row(1.4, "Short"), row(1.55, "Pass")]);
        assert_eq!(all.facts.len(), 1);
        assert_eq!((all.facts[0].verdict(), all.facts[0].is_noisy()), (Some(Verdict::Pass), false));
        let all = gathered(&[row(1.4, "Short"), row(1.7, "Pass"), row(1.45, "Short")]);
        assert_eq!((all.facts[0].verdict(), all.facts[0].is_noisy()), (Some(Verdict::Short), true));
    }

    #[test]
    fn a_row_against_the_kernel_is_its_ratio() {
        let row = json!({ "label": "a", "figure": 300.0, "best": [200.0, "1m"], "ratio": 1.5, "target": ">= 1.5x", "verdict": "Pass" });
        let all = gathered(&[row]);
        assert_eq!(
            (all.facts[0].figures.clone(), all.facts[0].note.as_str()),
            (vec![1.5], "300.0 against 200.0 (1m)")
        );
        assert_eq!(all.facts[0].verdict(), Some(Verdict::Pass));
    }

    #[test]
    fn a_figure_without_its_other_side_is_no_ratio() {
        let row = json!({ "label": "a", "figure": 300.0, "best": [200.0, "1m"], "ratio": 1.5, "target": ">= 1.5x", "verdict": "Pass" });
        let row_alone =
            json!({ "label": "a", "figure": 310.0, "target": ">= 1.5x", "verdict": "NotRun" });
        assert_eq!(gathered(&[row, row_alone.clone()]).facts[0].figures, [1.5]);
        assert_eq!(gathered(&[row_alone]).facts[0].figures, [310.0]);
    }

    #[test]
    fn rows_not_run_have_no_figure_and_bounds_stay_bounds() {
        let row_missing = json!({ "label": "a", "figure": null, "target": "<= 1", "verdict": "NotRun", "note": "no zram" });
        assert_eq!(gathered(&[row_missing]).facts[0].verdict(), Some(Verdict::NotRun));
        let bound = json!({ "label": "a", "figure": 1.2, "target": "<= 1", "verdict": "Bound", "note": "" });
        assert_eq!(gathered(&[bound]).facts[0].verdict(), Some(Verdict::Bound));
    }

    #[test]
    fn failed_or_hung_child_is_reported() {
        let program = std::env::temp_dir().join(format!("memfold-child-{}", std::process::id()));
        let script = "#!/bin/sh\n[ $1 = bad ] && { echo why >&2; exit 70; }\n[ $1 = slow ] && exec sleep 600\n\
                      echo '{\"rows\":[{\"label\":\"a\",\"figure\":2}]}' >$3\n";
        fs::write(&program, script).unwrap();
        fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
        let step =
            |bench| ReportStep { bench, args: Vec::new(), seconds_max: 1, once: bench == "bad" };
        let mut results = Gathered::default();
        results.run(&program, &[step("good"), step("bad"), step("slow")], 1, |_, _| ()).unwrap();
        results.run(&program, &[step("bad"), step("good")], 2, |_, _| ()).unwrap();
        fs::remove_file(&program).unwrap();
        let troubles: Vec<_> =
            results.steps.iter().map(|step| step.trouble.clone().unwrap_or_default()).collect();
        assert_eq!(troubles[0], "");
        assert!(
            troubles[1].contains("why") && troubles[2].contains("stopped after 1 s"),
            "{troubles:?}"
        );
        let commands: Vec<&str> =
            results.steps[3..].iter().map(|step| step.command.as_str()).collect();
        assert_eq!(commands, ["memfold bench bad", "memfold bench good", "memfold bench good"]);
        assert_eq!((results.facts.len(), results.facts[0].figures.clone()), (1, vec![2.0; 3]));
    }
}
