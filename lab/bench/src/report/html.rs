//! The report as one self-contained page, without scripts, external fonts or pictures.

use crate::common::verdict::Verdict;
use crate::report::charts::charts;
use crate::report::evidence::{Evidence, LEGEND};
use crate::report::gather::Fact;
use crate::report::state::figure;
use maud::{DOCTYPE, Markup, PreEscaped, html};

const STYLE: &str = "
:root{color-scheme:light dark;--ground:#fff;--text:#1b1f24;--line:#d0d7de;--soft:#f6f8fa;--good:#157f3b;--bad:#c4202f;--warn:#9a5b00;--dull:#667085}
@media (prefers-color-scheme:dark){:root{--ground:#0f1419;--text:#e6e8eb;--line:#30363d;--soft:#181f26;--good:#4ac26b;--bad:#ff7b72;--warn:#e3a13c;--dull:#98a2b3}}
body{background:var(--ground);color:var(--text);font:15px/1.45 system-ui,sans-serif;max-width:1180px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.6rem}h2{font-size:1.2rem;margin-top:2.4rem}h3{font-size:1rem;margin:1.6rem 0 .4rem}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:13px;width:100%}
th,td{border-bottom:1px solid var(--line);padding:.3rem .6rem;text-align:left;vertical-align:top}
th{background:var(--soft);position:sticky;top:0}td:first-child{white-space:nowrap}td.n{font-variant-numeric:tabular-nums;white-space:nowrap}
code,pre{font:12px/1.4 ui-monospace,monospace}pre{background:var(--soft);padding:.8rem;overflow-x:auto}
.noisy{color:var(--warn)}.good{color:var(--good)}.bad{color:var(--bad);font-weight:600}.dull{color:var(--dull)}
figure{margin:0 0 1.2rem}figure svg{width:100%;max-width:860px;height:auto}
";

/// The page.
pub fn page(evidence: &Evidence) -> String {
    let body = html! {
        h1 { "memfold: the evidence" }
        @for line in evidence.heading() { div { (line.replace('`', "")) } }
        p { (evidence.sum()) }
        h2 { "Requirements" }
        (requirements(evidence))
        h2 { "Targets" }
        p.dull { (LEGEND) }
        (facts(evidence, true))
        h2 { "Plots" }
        @for chart in charts(&evidence.gathered) {
            figure {
                h3 { (chart.title) }
                @match chart.svg {
                    Ok(svg) => (PreEscaped(svg)),
                    Err(why) => p.dull { "No plot: " (why) },
                }
            }
        }
        h2 { "Other figures" }
        (facts(evidence, false))
        @if !evidence.against.is_empty() {
            h2 { "Against an earlier report" }
            ul { @for line in &evidence.against { li { (line) } } }
        }
        h2 { "Runs" }
        @for step in &evidence.gathered.steps {
            details {
                summary {
                    code { (step.command) } " " (format!("{:.0} s", step.seconds))
                    @if let Some(trouble) = &step.trouble { " " span.bad { (trouble) } }
                }
                pre { (step.text) }
            }
        }
    };
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { "memfold: the evidence" }
                style { (PreEscaped(STYLE)) }
            }
            body { (body) }
        }
    }
    .into_string()
}

fn requirements(evidence: &Evidence) -> Markup {
    html! {
        div.wide { table {
            thead { tr { th { "row" } th { "it asks for" } th { "state" } th { "shown by" } } }
            tbody { @for state in &evidence.states {
                tr id=(state.name) {
                    td { b { (state.name) } }
                    td { (state.what) }
                    td class=(class(state.state)) { (state.state) }
                    td {
                        @for line in &state.figures { div { (line) } }
                        @for test in &state.tests { div { code { (test) } } }
                        @if !state.lacks.is_empty() { div.dull { "missing: " (state.lacks) } }
                    }
                }
            } }
        } }
    }
}

fn facts(evidence: &Evidence, judged: bool) -> Markup {
    let is_chosen = |fact: &&Fact| fact.verdict().is_some() == judged;
    html! {
        div.wide { table {
            thead { tr { th { "bench" } th { "figure of" } th { "figure" } th { "target" } th { "verdict" } th { "from" } } }
            tbody { @for fact in evidence.gathered.facts.iter().filter(is_chosen) {
                @let verdict = fact.verdict().map_or("", Verdict::name);
                tr {
                    td { (fact.bench) }
                    td { (fact.label) }
                    td.n.noisy[fact.is_noisy()] { (figure(fact)) }
                    td.n { (fact.target) }
                    td class=(class(verdict)) { (verdict) }
                    td.dull { (fact.note) }
                }
            } }
        } }
    }
}

fn class(state: &str) -> &'static str {
    match state {
        "pass" | "shown" => "good",
        "SHORT" | "missing" | "VOID" => "bad",
        _ => "dull",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::evidence::Evidence;
    use crate::report::gather::Gathered;
    use serde_json::json;

    #[test]
    fn page_is_self_contained() {
        let mut results = Gathered::default();
        let phase = json!({ "phase": "fill", "mb_per_s": 100.0, "cdf": [] });
        let document = json!({
            "rows": [{ "label": "a <b>", "figure": 1.2, "target": "<= 1", "verdict": "Short", "note": "x & y" }],
            "runs": [{ "peer": "memfold-run", "phases": [phase] }],
        });
        results.add("walk", false, document);
        let page = page(&Evidence::of(results, "memfold bench report".into()));
        for phrase in [
            "a &lt;b&gt;",
            "SHORT",
            "prefers-color-scheme",
            "<svg",
            "currentColor",
            "id=\"Z-bench\"",
            "No plot",
        ] {
            assert!(page.contains(phrase), "the page has no {phrase}");
        }
        for foreign in ["http://", "https://", "<script", "<link", "url("] {
            let own = page.replace("http://www.w3.org/2000/svg", "");
            assert!(!own.contains(foreign), "the page needs {foreign}");
        }
    }
}
