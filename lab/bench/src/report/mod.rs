//! `memfold bench report`: runs every benchmark, and shows the state of every requirement and
//! target.

mod rows;
mod gather;
mod state;
mod plot;
mod charts;
mod evidence;
mod text;
mod html;

use crate::common::refusal::Refusal;
use crate::host::machine::Machine;
use crate::host::program::THIS;
use crate::report::evidence::Evidence;
use crate::report::gather::{Gathered, ReportStep};
use crate::report::html::page;
use crate::report::state::{against, states};
use crate::report::text::{markdown, write_readme};
use anyhow::Context;
use indicatif::{ProgressBar, ProgressStyle};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Arguments of `memfold bench report`.
#[derive(clap::Args, Debug, Clone)]
pub struct ReportArgs {
    /// A quick run, under three minutes: one round of each benchmark's own quick run
    #[arg(long)]
    pub quick: bool,
    /// Rounds over all benchmarks, in turn [default: 2, with --quick 1]
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..))]
    pub rounds: Option<u8>,
    /// Only these benchmarks [default: all]
    #[arg(long, value_delimiter = ',', value_name = "BENCH")]
    pub only: Vec<String>,
    /// Also zswap, at the very end: from then to the next boot the kernel reads no large folios
    /// from swap
    #[arg(long)]
    pub zswap: bool,
    /// Directory of report.html, report.md and report.json
    #[arg(long, value_name = "DIR", default_value = "memfold-report")]
    pub out: PathBuf,
    /// Compare with the report.json of an earlier run: figures that moved by more than 15% are
    /// named
    #[arg(long, value_name = "FILE")]
    pub against: Option<PathBuf>,
    /// Put the targets into this file, between its marks <!-- report:begin --> and <!-- report:end
    /// -->
    #[arg(long, value_name = "FILE")]
    pub readme: Option<PathBuf>,
    /// Take the figures from the report.json of an earlier run, and run nothing
    #[arg(long, value_name = "FILE", conflicts_with_all = ["quick", "rounds", "only", "zswap"])]
    pub from: Option<PathBuf>,
    /// Exit with status 1 if a row is short of its target
    #[arg(long)]
    pub check: bool,
}

/// Runs the benchmarks, writes the page, the table and the figures, and returns the exit status: 1
/// with `--check` if a row is short or a benchmark failed.
pub fn report(args: ReportArgs) -> anyhow::Result<i32> {
    let start = Instant::now();
    let command = std::iter::once("memfold bench".to_string())
        .chain(std::env::args().skip(1))
        .collect::<Vec<_>>()
        .join(" ");
    std::fs::create_dir_all(&args.out).with_context(|| format!("making {}", args.out.display()))?;
    let mut evidence = match &args.from {
        Some(path) => read(path)?,
        None => {
            let mut evidence = Evidence::of(gather(&args)?, command);
            evidence.seconds = start.elapsed().as_secs_f64();
            evidence
        }
    };
    if let Some(earlier) = &args.against {
        evidence.against = against(&mut evidence.gathered, earlier)?;
        evidence.states = states(&evidence.gathered);
    }
    let write = |name: &str, text: String| {
        let path = args.out.join(name);
        std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))
    };
    write("report.json", serde_json::to_string(&evidence)?)?;
    write("report.html", page(&evidence))?;
    write("report.md", markdown(&evidence))?;
    if let Some(readme) = &args.readme {
        write_readme(&evidence, readme)?;
    }
    print!("{}", evidence.text());
    println!("{}", args.out.join("report.html").display());
    Ok(i32::from(args.check && !evidence.is_good()))
}

/// Reads the figures of an earlier report, and evaluates them with the present table of
/// requirements.
fn read(path: &Path) -> anyhow::Result<Evidence> {
    #[derive(serde::Deserialize)]
    struct Earlier {
        machine: Machine,
        commit: String,
        command: String,
        seconds: f64,
        gathered: Gathered,
    }
    let text =
        std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    let earlier: Earlier = serde_json::from_str(&text).map_err(|e| {
        Refusal::Usage(format!(
            "{}: not a report.json of memfold bench report: {e}",
            path.display()
        ))
    })?;
    let Earlier { machine, commit, command, seconds, gathered: results } = earlier;
    let states = states(&results);
    Ok(Evidence {
        machine,
        commit,
        command,
        seconds,
        gathered: results,
        states,
        against: Vec::new(),
    })
}

fn gather(args: &ReportArgs) -> anyhow::Result<Gathered> {
    let this = Path::new(THIS);
    let mut steps = steps(args.quick, args.zswap);
    for name in &args.only {
        if !steps.iter().any(|step| step.bench == name) {
            let names: Vec<&str> = steps.iter().map(|step| step.bench).collect();
            return Err(Refusal::Usage(format!(
                "no benchmark '{name}', only: {}",
                names.join(", ")
            ))
            .into());
        }
    }
    steps.retain(|step| args.only.is_empty() || args.only.iter().any(|name| name == step.bench));
    let rounds = usize::from(args.rounds.unwrap_or(if args.quick { 1 } else { 2 }));
    let count = steps.iter().map(|step| if step.once { 1 } else { rounds }).sum::<usize>();
    let bar = ProgressBar::new(count as u64); // Draws to stderr, and only on a terminal.
    bar.set_style(
        ProgressStyle::with_template("{wide_bar} {pos}/{len} {elapsed} {msg}")
            .expect("a valid template"),
    );
    bar.enable_steady_tick(Duration::from_millis(500));
    let mut results = Gathered::default();
    // Steps that change the kernel until the next boot run last, and once.
    let last: Vec<ReportStep> =
        steps.extract_if(.., |step| step.args.iter().any(|arg| arg.contains("zswap"))).collect();
    results.run(this, &steps, rounds, |step, number| {
        bar.set_position(number as u64);
        bar.set_message(format!("bench {}", step.bench));
    })?;
    results.run(this, &last, 1, |_, _| bar.set_message("zswap"))?;
    bar.finish_and_clear();
    Ok(results)
}

/// Returns all benchmarks, in the order of a round. Full: two rounds in about 30 minutes. Quick:
/// one in about 3.
fn steps(quick: bool, zswap: bool) -> Vec<ReportStep> {
    // SAFETY: geteuid touches no memory and can't fail.
    let root = unsafe { libc::geteuid() } == 0;
    let walk = match (root, quick) {
        // An operation of half a millisecond needs only a few seconds instead of the usual 10.
        (true, true) => "--quick --random-seconds 2 --vs zram:4k,zram:64k",
        (true, false) => "--runs 1 --random-seconds 5 --vs zram",
        (false, true) => "--quick",
        (false, false) => "--runs 1",
    };
    let short = if quick { "--quick" } else { "" };
    let step = |bench, args: &str, seconds_max| {
        let args = args.split_whitespace().map(String::from).collect();
        ReportStep { bench, args, seconds_max, once: false }
    };
    let mut steps =
        vec![step("walk", walk, 600), step("usemem", if quick { "--quick" } else { "128M" }, 300)];
    if quick {
        steps.push(step("store", "--quick", 120));
    } else {
        // At full length: 100 times out and in; a soak; a terabyte.
        steps.push(ReportStep { once: true, ..step("store", "--part engine", 400) });
        let soak = "--peer memfold-thread --runs 1 --phases fill,random --soak 45";
        steps.push(ReportStep { once: true, ..step("walk", soak, 200) });
        steps.push(ReportStep { once: true, ..step("swap", "--part index", 300) });
        steps.push(step("store", "--quick --part canned,zram,batch,overhead,churn,pools", 120));
    }
    steps.push(step("blocks", short, 120));
    steps.push(step("pools", "--quick", 120));
    steps.push(step(
        "swap",
        if quick { "--quick --part folios,index,wait,ageing,kernel" } else { "--quick" },
        300,
    ));
    steps.push(step("peers", "--quick", 120));
    steps.push(step("apps", if quick { "--quick sqlite python" } else { "--quick" }, 300));
    if zswap && root {
        let size = if quick { "--quick" } else { "128M" };
        let args = format!(
            "{size} --peer memfold:lz4:64k+swap --peer zswap:lzo:64k --peer zswap:deflate:64k"
        );
        steps.push(ReportStep { once: true, ..step("usemem", &args, 300) });
        steps.push(ReportStep {
            once: true,
            ..step("swap", &format!("{short} --part kernel --zswap"), 300)
        });
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::gather::StepDone;
    use serde_json::json;

    /// Makes a report of these rounds, without a run, and compares it with an earlier round.
    /// Returns its exit status, and its content as text, Markdown, HTML and README.md.
    fn written(rounds: &[f64], before: f64, trouble: Option<&str>) -> (i32, [String; 4]) {
        let name =
            format!("memfold-report-{}-{}-{}", std::process::id(), rounds.len(), trouble.is_some());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&directory).unwrap();
        let file = |name: &str| directory.join(name);
        let save = |name: &str, figures: &[f64]| {
            let mut results = Gathered::default();
            for figure in figures {
                let row = |label: &str, figure: f64| json!({ "label": label, "figure": figure, "target": ">= 1", "verdict": "Pass" });
                results.add(
                    "store",
                    false,
                    json!({ "rows": [row("the one", *figure), row("another", 2.0)] }),
                );
            }
            let (command, text) = ("memfold bench swap".to_string(), String::new());
            results.steps.push(StepDone {
                command,
                seconds: 1.0,
                trouble: trouble.map(String::from),
                text,
            });
            let evidence = Evidence::of(results, "memfold bench report".into());
            std::fs::write(file(name), serde_json::to_string(&evidence).unwrap()).unwrap();
        };
        save("now.json", rounds);
        save("before.json", &[before]);
        std::fs::write(file("README.md"), "<!-- report:begin -->\n<!-- report:end -->\n").unwrap();
        let args = ReportArgs {
            quick: false,
            rounds: None,
            only: Vec::new(),
            zswap: false,
            out: directory.clone(),
            against: Some(file("before.json")),
            readme: Some(file("README.md")),
            from: Some(file("now.json")),
            check: true,
        };
        let status = report(args).unwrap();
        let texts = ["report.md", "report.html", "README.md"]
            .map(|name| std::fs::read_to_string(file(name)).unwrap());
        let text = read(&file("report.json")).unwrap().text();
        std::fs::remove_dir_all(directory).unwrap();
        let [markdown, html, readme] = texts;
        (status, [text, markdown, html, readme])
    }

    /// Returns the line or table row of a figure in a text.
    fn row_of<'a>(text: &'a str, label: &str) -> &'a str {
        let rows = if text.contains("<tr>") {
            text.split("<tr>").collect::<Vec<_>>()
        } else {
            text.lines().collect()
        };
        rows.into_iter()
            .find(|row| row.contains(label))
            .unwrap_or_else(|| panic!("no row of {label}: {text}"))
    }

    #[test]
    fn a_figure_that_moved_is_marked_in_every_table() {
        let (status, texts) = written(&[1.0], 1.2, None);
        assert_eq!(status, 0);
        for text in texts {
            let (row, other) = (row_of(&text, "the one"), row_of(&text, "another"));
            assert!(row.contains("1.000 noisy, 1.200 before"), "{row}");
            assert!(!other.contains("noisy"), "{other}");
        }
    }

    #[test]
    fn a_figure_whose_rounds_differ_is_marked_in_every_table() {
        for text in written(&[1.0, 1.2], 1.1, None).1 {
            let row = row_of(&text, "the one");
            assert!(row.contains("1.100 (1.000..1.200) noisy") && !row.contains("before"), "{row}");
        }
        for text in written(&[1.0, 1.1, 1.05], 1.1, None).1 {
            let row = row_of(&text, "the one");
            assert!(row.contains("1.050 (1.000..1.100)") && !row.contains("noisy"), "{row}");
        }
    }

    #[test]
    fn failed_run_is_reported_everywhere_and_others_count() {
        let (status, texts) = written(&[1.0], 1.0, Some("stopped after 300 s"));
        assert_eq!(status, 1, "with --check");
        for text in texts {
            assert!(
                text.contains("memfold bench swap") && text.contains("stopped after 300 s"),
                "{text}"
            );
            assert!(row_of(&text, "the one").contains("1.000"));
        }
    }

    #[test]
    fn zswap_runs_only_on_request_and_every_step_has_a_timeout() {
        for quick in [false, true] {
            let names_zswap = |steps: &[ReportStep]| {
                steps.iter().flat_map(|step| &step.args).any(|arg| arg.contains("zswap"))
            };
            assert!(!names_zswap(&steps(quick, false)));
            assert!(steps(quick, false).iter().all(|step| step.seconds_max <= 600));
        }
    }
}
