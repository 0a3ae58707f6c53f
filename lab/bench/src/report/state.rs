//! The state of each requirement, from tests and figures.

use crate::common::summary::show;
use crate::common::verdict::Verdict;
use crate::report::gather::{Fact, Gathered, differ};
use crate::report::rows::{REQUIREMENTS, Requirement, ShownBy};
use serde::Serialize;
use std::path::Path;

/// A requirement with its evidence.
#[derive(Debug, Serialize)]
pub struct RequirementState {
    /// Its name.
    pub name: &'static str,
    /// Its summary.
    pub what: &'static str,
    /// `shown`, `SHORT`, `in part`, `not run` or `missing`.
    pub state: &'static str,
    /// The names of its tests.
    pub tests: Vec<&'static str>,
    /// Its figures as text.
    pub figures: Vec<String>,
    /// Its known gaps, and figures that were not measured.
    pub lacks: String,
}

/// The most figures of one benchmark in a row. The tables have all.
const FIGURES_MAX: usize = 4;

/// Returns the states of all requirements.
pub fn states(gathered: &Gathered) -> Vec<RequirementState> {
    REQUIREMENTS.iter().map(|requirement| state(requirement, gathered)).collect()
}

fn state(requirement: &Requirement, gathered: &Gathered) -> RequirementState {
    let (mut tests, mut figures, mut facts, mut unmeasured) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for evidence in requirement.shown {
        match evidence {
            ShownBy::Test(_, name) => tests.push(*name),
            ShownBy::Figures(bench, label) => {
                let matches = |fact: &&Fact| fact.bench == *bench && fact.label.starts_with(label);
                let matching_facts: Vec<&Fact> = gathered.facts.iter().filter(matches).collect();
                // Figures with a verdict come first.
                let mut first: Vec<&&Fact> =
                    matching_facts.iter().filter(|fact| fact.verdict().is_some()).collect();
                first.extend(matching_facts.iter().filter(|fact| fact.verdict().is_none()));
                figures.extend(first.iter().take(FIGURES_MAX).map(|fact| in_words(fact)));
                if first.len() > FIGURES_MAX {
                    figures.push(format!("{} more of bench {bench}", first.len() - FIGURES_MAX));
                }
                if matching_facts.iter().all(|fact| fact.figures.is_empty()) {
                    unmeasured.push(format!("bench {bench} {label}").trim_end().to_string());
                }
                facts.extend(matching_facts);
            }
        }
    }
    let is_short = |fact: &&Fact| matches!(fact.verdict(), Some(Verdict::Short | Verdict::Void));
    let is_measured = facts.iter().any(|fact| !fact.figures.is_empty());
    let mut lacks: Vec<String> =
        Some(requirement.lacks.to_string()).into_iter().filter(|lack| !lack.is_empty()).collect();
    if !unmeasured.is_empty() {
        lacks.push(format!("not measured: {}", unmeasured.join(", ")));
    }
    let state = match () {
        () if requirement.shown.is_empty() => "missing",
        () if facts.iter().any(is_short) => "SHORT",
        () if tests.is_empty() && !is_measured => "not run",
        () if !lacks.is_empty() => "in part",
        () => "shown",
    };
    RequirementState {
        name: requirement.name,
        what: requirement.what,
        state,
        tests,
        figures,
        lacks: lacks.join("; "),
    }
}

fn in_words(fact: &Fact) -> String {
    let verdict = fact
        .verdict()
        .map_or(String::new(), |verdict| format!(" ({}, {})", fact.target, verdict.name()));
    format!("{}: {}{verdict}", fact.label, figure(fact))
}

/// Formats a figure: `1.05`, or `1.05 (0.98..1.12)`, with `noisy` where the rounds or an earlier
/// report differ too much.
pub fn figure(fact: &Fact) -> String {
    let Some(spread) = fact.spread() else { return "-".into() };
    let short = |value: f64| if value.abs() < 10.0 { format!("{value:.3}") } else { show(value) };
    let mut text = short(spread.median);
    if spread.min < spread.max {
        text += &format!(" ({}..{})", short(spread.min), short(spread.max));
    }
    if fact.is_noisy() {
        text += " noisy";
    }
    if let Some(before) = fact.before {
        text += &format!(", {} before", short(before));
    }
    text
}

/// Compares with the facts of an earlier report. Marks each figure that moved by more than the
/// noise allowed, and returns a line for each.
pub fn against(gathered: &mut Gathered, earlier: &Path) -> anyhow::Result<Vec<String>> {
    #[derive(serde::Deserialize)]
    struct EarlierFacts {
        gathered: Gathered,
    }
    let text = std::fs::read_to_string(earlier)
        .map_err(|error| anyhow::anyhow!("{}: {error}", earlier.display()))?;
    let earlier: EarlierFacts = serde_json::from_str(&text).map_err(|error| {
        anyhow::anyhow!("{}: not a report of memfold bench report: {error}", earlier.display())
    })?;
    let mut lines = Vec::new();
    let mut count = 0;
    for fact in &mut gathered.facts {
        let before =
            earlier.gathered.facts.iter().find(|b| b.bench == fact.bench && b.label == fact.label);
        let (Some(before), Some(now)) = (before.and_then(Fact::spread), fact.spread()) else {
            continue;
        };
        count += 1;
        if differ(before.median, now.median) {
            fact.before = Some(before.median);
            let short = |value: f64| format!("{value:.3}");
            lines.push(format!(
                "noisy: bench {}: {}: {} before, {} now",
                fact.bench,
                fact.label,
                short(before.median),
                short(now.median)
            ));
        }
    }
    lines.insert(0, format!("{count} figures compared, {} differ by more than 15%", lines.len()));
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn row(label: &str, figure: f64, verdict: &str) -> serde_json::Value {
        let target = if verdict == "Pass" { "<= 99" } else { "<= 0.1" };
        json!({ "rows": [{ "label": label, "figure": figure, "target": target, "verdict": verdict, "note": "" }] })
    }

    #[test]
    fn row_is_short_if_any_figure_is_and_not_run_without_figures() {
        let mut results = Gathered::default();
        results.add("store", false, row("all loads on small pages: time in", 1.3, "Short"));
        let states = states(&results);
        let of = |name: &str| states.iter().find(|state| state.name == name).unwrap().state;
        assert_eq!(
            (of("M6"), of("M10"), of("Z1"), of("P2")),
            ("SHORT", "shown", "shown", "not run")
        );
        let of = |name: &str| states.iter().find(|state| state.name == name).unwrap();
        assert_eq!(
            (of("Z9").state, of("Z9").lacks.contains("not measured: bench store lz4: batches")),
            ("in part", true)
        );
    }

    #[test]
    fn an_earlier_report_is_compared_figure_by_figure() {
        let (mut before, mut now) = (Gathered::default(), Gathered::default());
        before.add("store", false, row("a", 1.0, "Pass"));
        before.add("store", false, row("b", 1.0, "Pass"));
        now.add("store", false, row("a", 1.1, "Pass"));
        now.add("store", false, row("b", 1.2, "Pass"));
        now.add("store", false, row("c", 1.2, "Pass"));
        let path = std::env::temp_dir().join(format!("memfold-against-{}", std::process::id()));
        std::fs::write(&path, json!({ "gathered": before }).to_string()).unwrap();
        let lines = against(&mut now, &path).unwrap();
        std::fs::write(&path, "{}").unwrap();
        let refusal = against(&mut now, &path);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(lines[0], "2 figures compared, 1 differ by more than 15%");
        assert!(lines[1].contains(": b: 1.000 before, 1.200 now") && lines.len() == 2, "{lines:?}");
        let marks: Vec<String> = now.facts.iter().map(figure).collect();
        assert_eq!(marks, ["1.100", "1.200 noisy, 1.000 before", "1.200"]);
        assert!(refusal.is_err_and(|error| error.to_string().contains("not a report")));
    }
}
