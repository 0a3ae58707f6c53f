//! The report as Markdown, and the generated section of docs/benchmarks.md.

use crate::report::evidence::{Evidence, LEGEND};
use crate::report::gather::Fact;
use crate::report::state::figure;
use anyhow::Context;
use std::path::Path;

/// The marks around the section of docs/benchmarks.md.
pub const MARKS: (&str, &str) = ("<!-- report:begin -->\n", "<!-- report:end -->");

fn row(cells: &[&str]) -> String {
    let cells: Vec<String> =
        cells.iter().map(|cell| cell.replace('|', "\\|").replace('\n', " ")).collect();
    format!("| {} |\n", cells.join(" | "))
}

fn head(cells: &[&str]) -> String {
    row(cells) + &format!("|{}\n", "---|".repeat(cells.len()))
}

/// Returns the table of requirements and their states.
pub fn requirements(evidence: &Evidence) -> String {
    let mut text = head(&["row", "it asks for", "state", "figures", "tests", "missing"]);
    for state in &evidence.states {
        let tests: Vec<String> = state.tests.iter().map(|test| format!("`{test}`")).collect();
        text += &row(&[
            state.name,
            state.what,
            state.state,
            &state.figures.join("; "),
            &tests.join(", "),
            &state.lacks,
        ]);
    }
    text
}

/// Returns the figures of all benchmarks that have a target, or all the others.
pub fn facts(evidence: &Evidence, judged: bool) -> String {
    let mut text = head(&["bench", "it must reach", "figure", "target", "verdict", "from"]);
    for fact in evidence.gathered.facts.iter().filter(|fact| fact.verdict().is_some() == judged) {
        let verdict = fact.verdict().map_or("", |verdict| verdict.name());
        text += &row(&[&fact.bench, &fact.label, &figure(fact), &fact.target, verdict, &fact.note]);
    }
    text
}

/// Returns the whole report.
pub fn markdown(evidence: &Evidence) -> String {
    let mut text = format!("# memfold: the evidence\n\n{}\n\n", evidence.heading().join("  \n"));
    text += &format!("## Requirements\n{}\n{}\n", evidence.sum(), requirements(evidence));
    text += &format!(
        "{LEGEND}\n\n## Targets\n{}\n## Other figures\n{}\n",
        facts(evidence, true),
        facts(evidence, false)
    );
    text += "## Runs\n";
    for step in &evidence.gathered.steps {
        let trouble =
            step.trouble.as_ref().map_or(String::new(), |trouble| format!(": **{trouble}**"));
        text += &format!("- `{}`, {:.0} s{trouble}\n", step.command, step.seconds);
    }
    if !evidence.against.is_empty() {
        text += "\n## Against an earlier report\n";
        evidence.against.iter().for_each(|line| text += &format!("- {line}\n"));
    }
    text
}

/// Returns the section of docs/benchmarks.md: the summary of requirements, and the targets.
fn section(evidence: &Evidence) -> String {
    let mut text =
        format!("{}\n\n{} {LEGEND}\n\n", evidence.heading().join("  \n"), evidence.sum());
    text += &head(&["bench", "it must reach", "figure", "target", "verdict"]);
    let has_target = |fact: &&Fact| fact.verdict().is_some();
    for fact in evidence.gathered.facts.iter().filter(has_target) {
        let verdict = fact.verdict().map_or("", |verdict| verdict.name());
        text += &row(&[&fact.bench, &fact.label, &figure(fact), &fact.target, verdict]);
    }
    let open: Vec<String> = evidence
        .states
        .iter()
        .filter(|state| state.state != "shown")
        .map(|state| {
            let why =
                if state.lacks.is_empty() { String::new() } else { format!(" ({})", state.lacks) };
            format!("{} {}{why}", state.name, state.state)
        })
        .collect();
    for step in &evidence.gathered.steps {
        if let Some(trouble) = &step.trouble {
            text += &format!("\nA run that gave nothing: `{}`: {trouble}.\n", step.command);
        }
    }
    text + &format!("\nRows of the requirements that are not wholly shown: {}.\n", open.join("; "))
}

/// Writes the section into docs/benchmarks.md, between its marks.
pub fn write_readme(evidence: &Evidence, readme: &Path) -> anyhow::Result<()> {
    let text =
        std::fs::read_to_string(readme).with_context(|| format!("reading {}", readme.display()))?;
    let text = replaced(&text, &section(evidence)).with_context(|| readme.display().to_string())?;
    std::fs::write(readme, text).with_context(|| format!("writing {}", readme.display()))
}

/// Replaces the text between the marks, which must occur once.
fn replaced(text: &str, section: &str) -> anyhow::Result<String> {
    let (before, rest) =
        text.split_once(MARKS.0).with_context(|| format!("has no line {}", MARKS.0.trim()))?;
    let (_, after) =
        rest.split_once(MARKS.1).with_context(|| format!("has no {} after it", MARKS.1))?;
    anyhow::ensure!(!after.contains(MARKS.0) && !before.contains(MARKS.1), "has its marks twice");
    Ok(format!("{before}{}{section}{}{after}", MARKS.0, MARKS.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_readme_has_the_marks_of_the_generated_section() {
        let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/benchmarks.md");
        let text = std::fs::read_to_string(readme).unwrap();
        let new = replaced(&text, "new\n").unwrap();
        assert!(new.contains(&format!("{}new\n{}", MARKS.0, MARKS.1)));
        let (_, rest) = text.split_once(MARKS.0).unwrap();
        let (section, _) = rest.split_once(MARKS.1).unwrap();
        // The first lines name the machine, the command and the commit. The table follows.
        for word in ["UTC", "cores", "Linux", "command: ", "commit "] {
            assert!(section.contains(word), "the section has no '{word}'");
        }
        let columns = |line: &str| line.replace("\\|", "").matches('|').count();
        let mut table = section.lines().filter(|line| line.starts_with('|'));
        let head = table.next().expect("a table");
        assert!(table.all(|line| columns(line) == columns(head)));
    }

    #[test]
    fn a_readme_without_marks_is_left_alone() {
        assert!(replaced("text", "new").is_err());
        assert!(replaced(&format!("{}old", MARKS.0), "new").is_err());
        assert!(replaced(&format!("{0}{1}{0}{1}", MARKS.0, MARKS.1), "new").is_err());
    }
}
