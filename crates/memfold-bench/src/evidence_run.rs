//! `memfold bench report`: runs every benchmark, and says of every requirement and target where it stands.

use crate::evidence::Evidence;
use crate::evidence_gather::{Gathered, Step};
use crate::evidence_html::page;
use crate::evidence_state::{against, states};
use crate::evidence_text::{markdown, write_readme};
use crate::machine::Machine;
use crate::refusal::Refusal;
use anyhow::Context;
use indicatif::{ProgressBar, ProgressStyle};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Arguments of `memfold bench report`.
#[derive(clap::Args, Debug, Clone)]
pub struct ReportArgs {
    /// A short look, under three minutes: one round of each benchmark's own short look
    #[arg(long)]
    pub quick: bool,
    /// Rounds over all benchmarks, which take turns [default: 2, with --quick 1]
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..))]
    pub rounds: Option<u8>,
    /// Only these benchmarks [default: all that there are]
    #[arg(long, value_delimiter = ',', value_name = "BENCH")]
    pub only: Vec<String>,
    /// Also zswap, at the very end: from then to the next boot the kernel reads no large folios from swap
    #[arg(long)]
    pub zswap: bool,
    /// Directory of report.html, report.md and report.json
    #[arg(long, value_name = "DIR", default_value = "memfold-report")]
    pub out: PathBuf,
    /// Compare with the report.json of an earlier run: figures that moved by more than 15% are named
    #[arg(long, value_name = "FILE")]
    pub against: Option<PathBuf>,
    /// Put the targets into this file, between its marks <!-- report:begin --> and <!-- report:end -->
    #[arg(long, value_name = "FILE")]
    pub readme: Option<PathBuf>,
    /// Take the figures from the report.json of an earlier run instead of running anything
    #[arg(long, value_name = "FILE", conflicts_with_all = ["quick", "rounds", "only", "zswap"])]
    pub from: Option<PathBuf>,
    /// Exit with status 1 if a row is short of its target
    #[arg(long)]
    pub check: bool,
}

/// Runs the benchmarks, writes the page, the table and the figures, and returns the exit status: with `--check` 1 if
/// a row is short or a benchmark failed.
pub fn report(args: ReportArgs) -> anyhow::Result<i32> {
    let start = Instant::now();
    let command = std::iter::once("memfold".to_string()).chain(std::env::args().skip(1)).collect::<Vec<_>>().join(" ");
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
        evidence.against = against(&evidence.gathered, earlier)?;
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

/// An earlier report's figures, with the present table of requirements.
fn read(path: &Path) -> anyhow::Result<Evidence> {
    #[derive(serde::Deserialize)]
    struct Earlier {
        machine: Machine,
        commit: String,
        command: String,
        seconds: f64,
        gathered: Gathered,
    }
    let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    let earlier: Earlier = serde_json::from_str(&text)
        .map_err(|e| Refusal::Usage(format!("{}: not a report.json of memfold bench report: {e}", path.display())))?;
    let Earlier { machine, commit, command, seconds, gathered } = earlier;
    let states = states(&gathered);
    Ok(Evidence { machine, commit, command, seconds, gathered, states, against: Vec::new() })
}

fn gather(args: &ReportArgs) -> anyhow::Result<Gathered> {
    let this = std::env::current_exe().context("finding this program's own file")?;
    let mut steps = steps(args.quick, args.zswap);
    for name in &args.only {
        if !steps.iter().any(|step| step.bench == name) {
            let names: Vec<&str> = steps.iter().map(|step| step.bench).collect();
            return Err(Refusal::Usage(format!("no benchmark '{name}', only: {}", names.join(", "))).into());
        }
    }
    steps.retain(|step| args.only.is_empty() || args.only.iter().any(|name| name == step.bench));
    steps.retain(|step| exists(&this, step.bench));
    let rounds = usize::from(args.rounds.unwrap_or(if args.quick { 1 } else { 2 }));
    let count = steps.iter().map(|step| if step.once { 1 } else { rounds }).sum::<usize>();
    let bar = ProgressBar::new(count as u64); // Draws to stderr, and only on a terminal.
    bar.set_style(ProgressStyle::with_template("{wide_bar} {pos}/{len} {elapsed} {msg}").expect("a valid template"));
    bar.enable_steady_tick(Duration::from_millis(500));
    let mut gathered = Gathered::default();
    // What changes the kernel for good comes last of all, once.
    let last: Vec<Step> = steps.extract_if(.., |step| step.args.iter().any(|arg| arg.contains("zswap"))).collect();
    gathered.run(&this, &steps, rounds, |step, number| {
        bar.set_position(number as u64);
        bar.set_message(format!("bench {}", step.bench));
    })?;
    gathered.run(&this, &last, 1, |_, _| bar.set_message("zswap"))?;
    bar.finish_and_clear();
    Ok(gathered)
}

/// Whether this program has such a benchmark.
fn exists(this: &Path, bench: &str) -> bool {
    let mut probe = Command::new(this);
    probe.args(["bench", bench, "--help"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    probe.status().is_ok_and(|status| status.success())
}

/// All benchmarks, in the order of a round. Full: two rounds under 40 minutes; quick: one under 3.
fn steps(quick: bool, zswap: bool) -> Vec<Step> {
    // SAFETY: geteuid touches no memory and can't fail.
    let root = unsafe { libc::geteuid() } == 0;
    let walk = match (root, quick) {
        (true, true) => "--quick --vs zram:4k,zram:64k,zram:1m",
        (true, false) => "--runs 2 --vs zram",
        (false, true) => "--quick",
        (false, false) => "--runs 2",
    };
    let short = if quick { "--quick" } else { "" };
    let step = |bench, args: &str, seconds_max| {
        let args = args.split_whitespace().map(String::from).collect();
        Step { bench, args, seconds_max, once: false }
    };
    let mut steps = vec![step("walk", walk, 600), step("usemem", if quick { "--quick" } else { "128M" }, 300)];
    if quick {
        steps.push(step("store", "--quick", 120));
    } else {
        // At full length: 100 times out and in.
        steps.push(Step { once: true, ..step("store", "--part engine", 400) });
        let soak = "--peer memfold-thread --runs 1 --phases fill,random --soak 60";
        steps.push(Step { once: true, ..step("walk", soak, 200) });
        steps.push(step("store", "--quick --part canned,zram,batch,overhead,churn,pools", 120));
    }
    steps.push(step("blocks", short, 120));
    steps.push(step("pools", short, 120));
    steps.push(step("swap", if quick { "--quick --part folios,index,wait,ageing,kernel" } else { "" }, 300));
    steps.push(step("peers", short, 120));
    steps.push(step("apps", if quick { "--quick sqlite python" } else { "--quick" }, 300));
    if zswap && root {
        let size = if quick { "--quick" } else { "128M" };
        let args = format!("{size} --peer memfold:lz4:64k+swap --peer zswap:lzo:64k --peer zswap:deflate:64k");
        steps.push(Step { once: true, ..step("usemem", &args, 300) });
        steps.push(Step { once: true, ..step("swap", &format!("{short} --part kernel --zswap"), 300) });
    }
    steps
}
