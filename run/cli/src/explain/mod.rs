//! `memfold explain PID`: what is in the memory of a run or of one of its processes, why it is not
//! folded, what to do, and what folding costs.
mod memory;
mod reasons;

use crate::explain::memory::ProcessMemory;
use crate::explain::reasons::{Explanation, Reason, ReasonText};
use crate::failure::CommandFailure;
use crate::runs;
use clap::{Arg, ArgAction, ArgMatches, Command};
use memfold_engine::config::Size;
use serde_json::{Value, json};

/// The slowdown above which no lower limit is advised, percent.
const SLOWDOWN: f64 = 10.0;

/// Returns the command line of `explain`.
pub fn command() -> Command {
    Command::new("explain")
        .about("Prints what keeps memory of a program under memfold run from being folded, and what to do")
        .override_usage("memfold explain [--json] [PID]")
        .arg(runs::pid_or_only().help(
            "Process ID of memfold run for the whole run, or of one process of it; not needed if this user has only one run",
        ))
        .arg(
            Arg::new("json")
                .long("json")
                .action(ArgAction::SetTrue)
                .help("Print the same as JSON"),
        )
        .after_help("Exit status: 0; 125 if no run of this user has this process, or it does not answer.")
}

/// Runs `memfold explain`.
///
/// # Errors
/// 125: there is no such run, it does not answer, or its processes have ended.
pub fn main(matches: &ArgMatches) -> Result<u8, CommandFailure> {
    let (_, about) = runs::named(matches)?;
    let run = about["run"].as_u64().unwrap_or(0) as u32;
    let pid = matches.get_one::<u32>("pid").copied().unwrap_or(run);
    let scene = Scene::of(pid, &about)
        .ok_or_else(|| CommandFailure::own(format!("Process {pid} has just ended.")))?;
    if matches.get_flag("json") {
        say!("{:#}", scene.json());
        return Ok(0);
    }
    for line in scene.lines() {
        say!("{line}");
    }
    Ok(0)
}

/// The processes that are explained: all processes of a run, or one of them.
struct Scene<'a> {
    /// The answer of the run to `stat`.
    about: &'a Value,
    /// The counters of the processes with an engine.
    counters: Vec<&'a Value>,
    /// The process, if it is only one.
    one: Option<u32>,
    explanation: Explanation,
}

impl Scene<'_> {
    /// Reads the memory of the process `pid`, or of all processes if it is `memfold run` itself.
    /// Returns `None` if there is no such process any more.
    fn of(pid: u32, about: &Value) -> Option<Scene<'_>> {
        let mut explanation = Explanation::default();
        let is_run = about["run"] == pid;
        let is_meant = |process: &&Value| is_run || process["pid"] == pid;
        let mut counters: Vec<&Value> = runs::processes(about).iter().filter(is_meant).collect();
        counters.retain(|process| {
            let pid = process["pid"].as_u64().unwrap_or(0) as u32;
            let memory = ProcessMemory::read(pid);
            memory.iter().for_each(|memory| explanation.add(process, memory));
            memory.is_some()
        });
        let small = about["unmanaged_processes_bytes"].as_u64().unwrap_or(0);
        match () {
            () if is_run => explanation.add_private(small),
            () if counters.is_empty() => explanation.add_small(&ProcessMemory::read(pid)?),
            () => {}
        }
        let one = (!is_run).then_some(pid);
        Some(Scene { about, counters, one, explanation })
    }

    fn sum(&self, name: &str) -> u64 {
        self.counters.iter().map(|one| one[name].as_u64().unwrap_or(0)).sum()
    }

    /// Returns what folding costs, percent. Of a run, ended processes count too.
    fn slowdown(&self) -> Option<f64> {
        match self.one {
            None => self.about["slowdown_percent"].as_f64(),
            Some(_) => {
                let (folding, own) = (self.sum("folding_ns"), self.sum("own_ns"));
                (own > 0).then(|| folding as f64 * 100.0 / own as f64)
            }
        }
    }

    /// Returns the touches that had to load data: of a run, of all processes that it had.
    fn loads(&self) -> u64 {
        match self.one {
            None => self.about["sum"]["pgmajfault"].as_u64().unwrap_or(0),
            Some(_) => self.sum("pgmajfault"),
        }
    }

    fn seconds(&self) -> f64 {
        self.about["seconds"].as_f64().unwrap_or(0.0)
    }

    fn loads_per_second(&self) -> f64 {
        self.loads() as f64 / self.seconds().max(0.001)
    }

    /// Returns the remedy of a reason in this run. A program that folding slows down gets no advice
    /// to fold more of it.
    fn fix(&self, row: &ReasonText) -> String {
        let recent = &self.about["recent"]["slowdown_percent"];
        let recent = recent.as_f64().filter(|_| self.one.is_none());
        match recent.or(self.slowdown()) {
            Some(percent) if row.reason == Reason::Hot && percent > SLOWDOWN => format!(
                "nothing: folding slows the program down by {percent:.0}% already, and a lower limit would more"
            ),
            _ => row.fix.replace("PID", &self.about["run"].to_string()),
        }
    }

    fn json(&self) -> Value {
        let explanation = &self.explanation;
        let rows = explanation.rows().into_iter().map(|(row, bytes)| {
            json!({
                "reason": row.name,
                "bytes": bytes,
                "counts": row.reason.is_counted(),
                "what": row.what,
                "fix": self.fix(row),
            })
        });
        json!({
            "run": self.about["run"],
            "process": self.one,
            "processes": self.counters.iter().map(|one| one["pid"].clone()).collect::<Vec<_>>(),
            "resident_bytes": explanation.resident_bytes,
            "explained_bytes": explanation.explained_bytes(),
            "reasons": rows.collect::<Vec<_>>(),
            "folded_bytes": self.sum("folded_bytes"),
            "swap_bytes": self.sum("swap_bytes"),
            "shared_bytes": self.sum("shared_bytes"),
            "limit_bytes": self.about["limit_bytes"],
            "resident_limit_bytes": self.about["resident_limit_bytes"],
            "seconds": self.about["seconds"],
            "slowdown_percent": self.slowdown(),
            "loads": self.loads(),
            "loads_per_second": self.loads_per_second(),
            "recommended_limits": self.about["recommended_limits"],
        })
    }

    fn lines(&self) -> Vec<String> {
        let explanation = &self.explanation;
        let whose = match self.one {
            Some(pid) => format!("process {pid} of run {}", self.about["run"]),
            None => format!("run {}", self.about["run"]),
        };
        let mut lines = vec![
            format!("{whose}, {:.1} s: {}", self.seconds(), runs::command_of(self.about)),
            runs::bounds(self.about),
            format!(
                "{} in memory, {:.1}% of it explained:",
                Size(explanation.resident_bytes),
                explanation.explained_percent()
            ),
        ];
        for (row, bytes) in explanation.rows() {
            let counts = if row.reason.is_counted() { "" } else { " (not counted)" };
            lines.push(format!("{:>10}  {}{counts}", Size(bytes).to_string(), row.what));
            lines.push(format!("{:>12}to do: {}", "", self.fix(row)));
        }
        lines.extend(self.folded_line());
        lines.extend(self.shared_line());
        lines.push(self.time_line());
        lines.extend(self.limits_line());
        lines
    }

    /// Returns what is folded, and where it is.
    fn folded_line(&self) -> Option<String> {
        let [folded_bytes, pool, swap] =
            ["folded_bytes", "pool_bytes", "swap_bytes"].map(|name| self.sum(name));
        let file = match swap {
            0 => String::new(),
            bytes => format!(" and {} in the swap file", Size(bytes)),
        };
        (folded_bytes > 0).then(|| {
            format!("folded: {}, which takes {} compressed{file}", Size(folded_bytes), Size(pool))
        })
    }

    fn shared_line(&self) -> Option<String> {
        let shared_bytes = self.sum("shared_bytes");
        (shared_bytes > 0).then(|| {
            format!(
                "{} of it counts in other processes that share it after a fork",
                Size(shared_bytes)
            )
        })
    }

    /// Returns what folding costs.
    fn time_line(&self) -> String {
        let slowdown = self.slowdown().map_or("-".to_string(), |percent| format!("{percent:.1}%"));
        format!(
            "slowdown {slowdown} since the start; {} touches loaded data, {:.0} a second",
            self.loads(),
            self.loads_per_second()
        )
    }

    /// Returns the limits that would cost less time.
    fn limits_line(&self) -> Option<String> {
        let limits = self.about["recommended_limits"].as_object()?;
        let one = |(percent, bytes): (&String, &Value)| {
            Some((percent.parse::<f64>().ok()?, bytes.as_u64()?))
        };
        let mut all: Vec<(f64, u64)> = limits.iter().filter_map(one).collect();
        all.sort_by(|(one, _), (other, _)| one.total_cmp(other));
        let all: Vec<String> =
            all.iter().map(|(percent, bytes)| format!("{} for {percent}%", Size(*bytes))).collect();
        (!all.is_empty()).then(|| {
            format!("limits of the run for a smaller slowdown, by an estimate: {}", all.join(", "))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn about() -> Value {
        let own = std::process::id();
        let counters = |pid: u32| {
            json!({"pid": pid, "pgmajfault": 50, "folded_bytes": 3 << 20, "pool_bytes": 1 << 20,
                "folding_ns": 30, "own_ns": 60, "shared_bytes": 2 << 20, "adopted_bytes": 1})
        };
        json!({
            "run": 7, "seconds": 10.0, "command": ["app"], "limit_bytes": 64 << 20, "slowdown_percent": 12.5,
            "processes": [counters(own), counters(u32::MAX)], "sum": {"pgmajfault": 400},
            "unmanaged_processes_bytes": 5 << 20,
            "recommended_limits": {"2": 512 << 20, "10": 256 << 20, "50": null},
        })
    }

    #[test]
    fn a_run_is_all_its_processes_and_the_ended_ones() {
        let about = about();
        let scene = Scene::of(7, &about).unwrap();
        let json = scene.json();
        assert_eq!(json["processes"], json!([std::process::id()]), "the other one has ended");
        assert_eq!((&json["loads"], &json["loads_per_second"]), (&json!(400), &json!(40.0)));
        let text = scene.lines().join("\n");
        for words in [
            "run 7, 10.0 s: app\nlimit 64.0 MiB",
            "   5.0 MiB  processes without an engine",
            "slowdown 12.5% since the start; 400 touches loaded data, 40 a second",
            "folded: 3.0 MiB, which takes 1.0 MiB compressed\n",
            "2.0 MiB of it counts in other processes",
            "for a smaller slowdown, by an estimate: 512.0 MiB for 2%, 256.0 MiB for 10%",
        ] {
            assert!(text.contains(words), "{words}: {text}");
        }
    }

    #[test]
    fn lower_limit_is_advised_only_to_a_run_that_is_not_slow() {
        let mut about = about();
        for process in about["processes"].as_array_mut().unwrap() {
            process["resident_bytes"] = (9 << 20).into();
        }
        let lines = |about: &Value| Scene::of(7, about).unwrap().lines().join("\n");
        assert!(
            lines(&about).contains("slows the program down by 12% already"),
            "{}",
            lines(&about)
        );
        about["slowdown_percent"] = 1.5.into();
        assert!(lines(&about).contains("memfold set 7 --limit SIZE"), "{}", lines(&about));
    }

    #[test]
    fn a_process_has_its_own_figures() {
        let about = about();
        let own = std::process::id();
        let scene = Scene::of(own, &about).unwrap();
        let text = scene.lines().join("\n");
        assert!(text.starts_with(&format!("process {own} of run 7, ")), "{text}");
        assert!(
            text.contains("slowdown 50.0%") && text.contains("50 touches loaded data, 5 a second")
        );
        assert!(!text.contains("without an engine"), "{text}");
        assert!(Scene::of(u32::MAX, &about).is_none());
    }
}
