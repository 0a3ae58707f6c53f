//! The content of a report: every requirement and target, and its state.

use crate::common::table::layout;
use crate::common::verdict::Verdict;
use crate::harness::file_run::zswap_history;
use crate::host::machine::Machine;
use crate::report::gather::Gathered;
use crate::report::state::{RequirementState, figure, states};
use serde::Serialize;

/// The explanation of the figures in all tables.
pub const LEGEND: &str = "Figures are medians over the rounds, with the least and the greatest where they differ. Noisy: these, or \
                          the medians of this report and of an earlier one, differ by more than 15%.";

/// The content of a report.
#[derive(Serialize)]
pub struct Evidence {
    /// The machine.
    pub machine: Machine,
    /// The commit that the program is built from.
    pub commit: String,
    /// The command line.
    pub command: String,
    /// The duration of the run.
    pub seconds: f64,
    /// The results of the benchmarks.
    pub gathered: Gathered,
    /// The state of each requirement.
    pub states: Vec<RequirementState>,
    /// What changed since an earlier report.
    pub against: Vec<String>,
}

impl Evidence {
    /// Evaluates these results.
    pub fn of(gathered: Gathered, command: String) -> Evidence {
        let (states, commit) = (states(&gathered), env!("MEMFOLD_COMMIT").to_string());
        Evidence {
            machine: Machine::read(),
            commit,
            command,
            seconds: 0.0,
            gathered,
            states,
            against: Vec::new(),
        }
    }

    /// Returns date, machine and command line, one item per line.
    pub fn heading(&self) -> Vec<String> {
        let machine = &self.machine;
        let mut lines: Vec<String> = machine.heading().lines().map(String::from).collect();
        lines.push(format!(
            "zswap enabled: {} ({}); vm.page-cluster {}; THP {}",
            machine.zswap_enabled,
            zswap_history(),
            machine.page_cluster,
            machine.thp_enabled
        ));
        lines.push(format!(
            "command: `{}`; commit {}; {:.1} minutes",
            self.command,
            self.commit,
            self.seconds / 60.0
        ));
        if !self.gathered.notes.is_empty() {
            lines.push(self.gathered.notes.join("; "));
        }
        lines
    }

    /// Returns one line with the counts of all states and verdicts.
    pub fn sum(&self) -> String {
        let states = ["shown", "in part", "SHORT", "not run", "missing"].map(|state| {
            format!("{} {state}", self.states.iter().filter(|s| s.state == state).count())
        });
        let verdicts =
            [Verdict::Pass, Verdict::Short, Verdict::Bound, Verdict::Void, Verdict::NotRun].map(
                |verdict| {
                    let count = self
                        .gathered
                        .facts
                        .iter()
                        .filter(|fact| fact.verdict() == Some(verdict))
                        .count();
                    format!("{count} {}", verdict.name())
                },
            );
        let noisy = self.gathered.facts.iter().filter(|fact| fact.is_noisy()).count();
        let all = self.gathered.facts.len();
        let (states, verdicts) = (states.join(", "), verdicts.join(", "));
        format!("Requirements: {states}. Targets: {verdicts}. {noisy} of {all} figures are noisy.")
    }

    /// Returns whether nothing is short and no benchmark failed.
    pub fn is_good(&self) -> bool {
        let bad = |verdict| matches!(verdict, Some(Verdict::Short | Verdict::Void));
        !self.gathered.facts.iter().any(|fact| bad(fact.verdict()))
            && self.gathered.steps.iter().all(|step| step.trouble.is_none())
    }

    /// Returns the states and targets as text.
    pub fn text(&self) -> String {
        let mut text =
            format!("memfold bench report, {}\n{}\n\n", self.heading().join("\n"), self.sum());
        let mut rows = vec![["requirement", "state"].map(String::from).to_vec()];
        rows.extend(
            self.states.iter().map(|s| vec![format!("{:8}{}", s.name, s.what), s.state.into()]),
        );
        text += &layout(&rows);
        text += &format!("\n{LEGEND}\n\n");
        let mut rows =
            vec![["it must reach", "figure", "target", "verdict"].map(String::from).to_vec()];
        for fact in &self.gathered.facts {
            let Some(verdict) = fact.verdict() else { continue };
            let label = format!("{}: {}", fact.bench, fact.label);
            rows.push(vec![label, figure(fact), fact.target.clone(), verdict.name().into()]);
        }
        text += &layout(&rows);
        for step in &self.gathered.steps {
            if let Some(trouble) = &step.trouble {
                text += &format!("{}: {trouble}\n", step.command);
            }
        }
        self.against.iter().for_each(|line| text += &format!("{line}\n"));
        text
    }
}
