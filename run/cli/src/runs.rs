//! The runs of this user: `memfold run --list`, `memfold stat PID` and `memfold set PID`.
use crate::failure::CommandFailure;
use crate::group;
use crate::printable::printable;
use crate::report::curve::CurvePoints;
use crate::report::summary::cost;
use crate::sockets;
use crate::table::processes::run_of;
use clap::{Arg, ArgAction, ArgMatches, Command};
use memfold_engine::config::Size;
use serde_json::{Value, json};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A run that does not answer in this time is stopped, or too busy.
const PATIENCE: Duration = Duration::from_secs(5);
/// The flag of `curve` that counts the start of a run.
const SINCE_START: &str = "since-start";
/// Columns of a command in the list, at most.
const COMMAND_LEN_MAX: usize = 60;

/// Returns the command line of `list`.
pub fn list_command() -> Command {
    Command::new("list")
        .visible_aliases(["ls", "ps"])
        .about("Lists the runs of this user, as memfold run --list does")
}

/// Returns the command line of `stat`.
pub fn stat_command() -> Command {
    let json = Arg::new("json")
        .long("json")
        .action(ArgAction::SetTrue)
        .help("Print every counter as JSON");
    Command::new("stat")
        .about("Prints the memory use and counters of a program under memfold run, or of a group")
        .override_usage("memfold stat [--json] [PID]\n       memfold stat [--json] --group NAME")
        .arg(pid_or_only().conflicts_with(group::GROUP))
        .arg(group_flag("Print the runs of this group"))
        .arg(json)
        .after_help(format!(
            "{}\nFILES and SHARED don't count against the limit; all but FOLDED, FAULTS and MAJOR do.\n\n\
             Exit status: 0; 125 if no run of this user has this process, or there is no such group.",
            STAT_COLUMNS.iter().map(|column| format!("{:<10} {}\n", column.title, column.help)).collect::<String>()
        ))
}

/// Returns the command line of `set`.
pub fn set_command() -> Command {
    let bound = |name: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name("SIZE").help(help)
    };
    Command::new("set")
        .about("Changes the limit of a running program under memfold run, or makes or changes a group")
        .override_usage("memfold set PID [--limit SIZE] [--resident SIZE]\n       memfold set --group NAME --limit SIZE")
        .arg(pid_of_run().required_unless_present(group::GROUP).conflicts_with(group::GROUP))
        .arg(group_flag("Make this group, or change its limit; --limit none removes it"))
        .arg(bound("limit", "Physical memory of the whole run, as in memfold run; none removes the limit"))
        .arg(bound("resident", "Uncompressed memory, as in memfold run; none removes the limit"))
        .after_help(
            "The limit applies to the whole run, whichever of its processes PID names. One of the two limits must remain.\n\
             A group is a limit that several runs of this user share: memfold run --group NAME. It stays until it is removed, or its directory is, which is in $XDG_RUNTIME_DIR or /tmp.\n\
             \nExit status: 0; 125 if no run of this user has this process, or if memfold refuses the size.",
        )
}

/// Returns the command line of `curve`.
pub fn curve_command() -> Command {
    let form = |name: &'static str, help: &'static str| {
        Arg::new(name).long(name).action(ArgAction::SetTrue).help(help)
    };
    Command::new("curve")
        .about("Prints the slowdown that a program under memfold run would have with larger limits, by an estimate")
        .override_usage("memfold curve [--json|--svg] [--since-start] [PID]")
        .arg(pid_or_only())
        .arg(form("json", "Print it as JSON").conflicts_with("svg"))
        .arg(form("svg", "Print a picture as SVG"))
        .arg(form(
            SINCE_START,
            "Count the run from its start, and not only the last two to four minutes",
        ))
        .after_help("Exit status: 0; 125 if no run of this user has this process, or if it has loaded nothing yet.")
}

/// Returns the argument for a run that may be left out where there is only one.
pub fn pid_or_only() -> Arg {
    pid_of_run().help(
        "Process ID of memfold run, or of any process of the run; not needed if this user has only one run",
    )
}

/// Reads a process ID. Returns `None` if the text is none.
pub fn process_id(text: &str) -> Option<u32> {
    text.parse().ok().filter(|pid| *pid > 0)
}

fn pid_of_run() -> Arg {
    Arg::new("pid")
        .value_name("PID")
        .value_parser(|text: &str| {
            process_id(text).ok_or("it is no process ID. `memfold list` shows those of the runs")
        })
        .help("Process ID of memfold run, or of any process of the run")
}

fn group_flag(help: &'static str) -> Arg {
    Arg::new(group::GROUP).long(group::GROUP).value_name("NAME").help(help)
}

fn group_of(matches: &ArgMatches) -> Option<&str> {
    matches.get_one::<String>(group::GROUP).map(String::as_str)
}

/// Runs `memfold run --list`.
///
/// # Errors
/// 125: stdout can't be written.
pub fn list() -> Result<u8, CommandFailure> {
    let size_of =
        |value: &Value| value.as_u64().map_or("none".to_string(), |bytes| Size(bytes).to_string());
    say!(
        "{:>8} {:>10} {:>10} {:>10} {:>10} {:>10} {:>5} {:>8}  COMMAND",
        "PID",
        "LIMIT",
        "RESIDENT<",
        "RESIDENT",
        "FOLDED",
        "POOL",
        "PROCS",
        "SECONDS"
    );
    for (run, path) in sockets::all(sockets::RUN) {
        let about = match ask(&path, &json!({"do": "stat"})) {
            Ok(Some(about)) => about,
            Ok(None) => continue,
            Err(e) => {
                say!("{run:>8} does not answer: {e}");
                continue;
            }
        };
        say!(
            "{run:>8} {:>10} {:>10} {:>10} {:>10} {:>10} {:>5} {:>8.0}  {}",
            size_of(&about["limit_bytes"]),
            size_of(&about["resident_limit_bytes"]),
            Size(uncompressed(&about) + number(&about, "unmanaged_processes_bytes")).to_string(),
            Size(sum(&about, "folded_bytes")).to_string(),
            Size(sum(&about, "pool_bytes")).to_string(),
            processes(&about).len() as u64 + number(&about, "unmanaged_processes"),
            about["seconds"].as_f64().unwrap_or(0.0),
            command_of(&about),
        );
    }
    for line in group::lines() {
        say!("{line}");
    }
    Ok(0)
}

/// Runs `memfold stat`.
///
/// # Errors
/// 125: there is no such run, or it does not answer.
pub fn stat(matches: &ArgMatches) -> Result<u8, CommandFailure> {
    if let Some(name) = group_of(matches) {
        return group::stat(name, matches);
    }
    let (_, about) = named(matches)?;
    if matches.get_flag("json") {
        say!("{about:#}");
        return Ok(0);
    }
    say!(
        "run {}, {:.1} s: {}",
        about["run"],
        about["seconds"].as_f64().unwrap_or(0.0),
        command_of(&about)
    );
    say!("{}", bounds(&about));
    say!("{}", gains(&about));
    say!("{}", columns(|column| column.title.to_string()));
    for one in processes(&about) {
        say!("{}", columns(|column| column.of(one)));
    }
    say!(
        "processes without an engine: {}, {} (counted against the limit)\nFILES and SHARED are not counted against the limit",
        about["unmanaged_processes"],
        Size(about["unmanaged_processes_bytes"].as_u64().unwrap_or(0))
    );
    Ok(0)
}

/// Runs `memfold curve`.
///
/// # Errors
/// 125: there is no such run, it does not answer, or it has loaded nothing yet.
pub fn curve(matches: &ArgMatches) -> Result<u8, CommandFailure> {
    let (_, about) = named(matches)?;
    let from_start = CurvePoints::from_json(&about["slowdown_by_limit"]).ok_or_else(|| {
        let run = &about["run"];
        CommandFailure::own(format!(
            "Run {run} has loaded no folded memory yet, so nothing can be estimated. Try again later."
        ))
    })?;
    let recent = Some(&about["recent"]).filter(|_| !matches.get_flag(SINCE_START));
    let recent = recent.and_then(|recent| {
        let points = CurvePoints::from_json(&recent["slowdown_by_limit"])?;
        Some((points, format!("in the last {:.0} s", recent["seconds"].as_f64()?)))
    });
    let (points, when) = recent.unwrap_or((from_start, "since the start".to_string()));
    if matches.get_flag("json") {
        say!("{:#}", points.json());
    } else if matches.get_flag("svg") {
        say!("{}", points.svg());
    } else if points.0.is_empty() {
        say!(
            "No folded memory was loaded {when}, so a larger limit would save nothing. --since-start counts the start too."
        );
    } else {
        say!("slowdown by limit {when}, an estimate:");
        for line in points.lines() {
            say!("{line}");
        }
    }
    Ok(0)
}

/// Returns what folding costs and saves.
fn gains(about: &Value) -> String {
    let slowdown = about["slowdown"].as_u64().unwrap_or(0) as u32;
    let [idle, waking] = ["idle_ns", "waking_ns"].map(|name| sum(about, name));
    let cost = cost(about["slowdown_percent"].as_f64(), slowdown, idle, waking);
    let takes = ["pool_bytes", "index_bytes", "frame_bytes"].map(|name| sum(about, name));
    let saved_bytes = sum(about, "folded_bytes").saturating_sub(takes.iter().sum());
    format!("{cost}, {} saved now", Size(saved_bytes))
}

/// A column of `memfold stat`.
struct StatColumn {
    title: &'static str,
    /// Name of its value in the answer of a run. It ends with the unit, if there is one.
    name: &'static str,
    help: &'static str,
}

impl StatColumn {
    /// Returns its value for one process.
    fn of(&self, process: &Value) -> String {
        let number = process[self.name].as_u64().unwrap_or(0);
        if self.name.ends_with("_bytes") { Size(number).to_string() } else { number.to_string() }
    }
}

const fn column(title: &'static str, name: &'static str, help: &'static str) -> StatColumn {
    StatColumn { title, name, help }
}

/// The columns of `memfold stat`.
const STAT_COLUMNS: [StatColumn; 11] = [
    column("PID", "pid", "a process of the run that has an engine"),
    column("MAPPED", "resident_bytes", "uncompressed pages of the program that memfold manages"),
    column(
        "FRAMES",
        "frame_bytes",
        "memfold's own pages: data that is being evicted or was loaded ahead, and free pages for it",
    ),
    column(
        "UNMANAGED",
        "unmanaged_bytes",
        "other private memory of the program: stacks, small areas, and what can't be folded",
    ),
    column("POOL", "pool_bytes", "compressed data"),
    column("INDEX", "index_bytes", "tables that find folded data"),
    column(
        "FOLDED",
        "folded_bytes",
        "data that is only in the pool, the swap file or the remote store, before compression. FOLDED less POOL, INDEX and FRAMES is the memory that memfold saves",
    ),
    column("FILES", "file_bytes", "mapped pages of files; not counted"),
    column("SHARED", "shmem_bytes", "shared memory; not counted"),
    column("FAULTS", "faults", "touches that memfold served, since the start"),
    column("MAJOR", "pgmajfault", "of these, touches that loaded data"),
];

/// Returns a line of `memfold stat`, with a cell for each column.
fn columns(cell: impl Fn(&StatColumn) -> String) -> String {
    let cells: Vec<String> =
        STAT_COLUMNS.iter().map(|column| format!("{:>10}", cell(column))).collect();
    cells.join(" ")
}

/// Runs `memfold set`.
///
/// # Errors
/// 125: there is no such run, it does not answer, or it refuses the bounds.
pub fn set(matches: &ArgMatches) -> Result<u8, CommandFailure> {
    if let Some(name) = group_of(matches) {
        return group::set(name, matches);
    }
    let mut request = json!({"do": "set"});
    for name in ["limit", "resident"] {
        if let Some(size) = matches.get_one::<String>(name) {
            request[name] = size.as_str().into();
        }
    }
    if request.as_object().is_some_and(|request| request.len() == 1) {
        return Err(CommandFailure::own("No limit given. Give --limit SIZE or --resident SIZE"));
    }
    let (path, about) = named(matches)?;
    say!("{}", set_bounds(&path, &about["run"], &request)?);
    Ok(0)
}

/// Sets the limit of a run, by the process ID of its `memfold run`. Returns a line about its bounds.
///
/// # Errors
/// 125: it does not answer, or it refuses the limit.
pub fn set_limit(run: u32, size: &str) -> Result<String, CommandFailure> {
    let all = sockets::all(sockets::RUN).into_iter();
    let path = all.filter(|(pid, _)| *pid == run).map(|(_, path)| path).next();
    let path = path.ok_or_else(|| CommandFailure::own(format!("Run {run} has ended.")))?;
    set_bounds(&path, &run.into(), &json!({"do": "set", "limit": size}))
}

fn set_bounds(path: &Path, run: &Value, request: &Value) -> Result<String, CommandFailure> {
    let answer = ask(path, request).map_err(|e| CommandFailure::own(format!("Run {run}: {e}")))?;
    let Some(answer) = answer else {
        return Err(CommandFailure::own(format!("Run {run} has just ended.")));
    };
    match answer["error"].as_str() {
        Some(why) => Err(CommandFailure::own(why)),
        None => Ok(format!("run {run}: {}", bounds(&answer))),
    }
}

/// Returns the run with the process that the command line names, and its answer to `stat`. If it names
/// none, returns the only run.
///
/// # Errors
/// Those of [`find`]. 125: no process is named, and there is no run or more than one.
pub fn named(matches: &ArgMatches) -> Result<(PathBuf, Value), CommandFailure> {
    if let Some(pid) = matches.get_one::<u32>("pid") {
        return find(*pid);
    }
    let all = sockets::all(sockets::RUN).into_iter();
    let mut all = all.filter_map(|(run, path)| match ask(&path, &json!({"do": "stat"})) {
        Ok(about) => about.map(|about| (run, Ok((path, about)))),
        Err(e) => Some((run, Err(CommandFailure::own(format!("Run {run}: {e}"))))),
    });
    match (all.next(), all.next()) {
        (None, _) => Err(CommandFailure::own(
            "This user has no run. memfold run starts one. For that of another user, ask as that user.",
        )),
        (Some((_, only)), None) => only,
        (Some((one, _)), Some((other, _))) => {
            let rest = all.map(|(run, _)| format!(", {run}")).collect::<String>();
            Err(CommandFailure::own(format!(
                "This user has several runs. Give the PID of one: {one}, {other}{rest}. `memfold list` shows their commands."
            )))
        }
    }
}

/// Returns the run with the given process, and its answer to `stat`.
///
/// # Errors
/// 125: no run of this user has the process, or the run does not answer.
pub fn find(pid: u32) -> Result<(PathBuf, Value), CommandFailure> {
    let its = run_of(pid);
    for (run, path) in sockets::all(sockets::RUN) {
        match ask(&path, &json!({"do": "stat"})) {
            Ok(Some(about))
                if run == pid
                    || its == Some(run)
                    || processes(&about).iter().any(|one| one["pid"] == pid) =>
            {
                return Ok((path, about));
            }
            Err(e) if run == pid || its == Some(run) => {
                return Err(CommandFailure::own(format!("Run {run}: {e}")));
            }
            _ => {}
        }
    }
    let why = match fs::metadata(format!("/proc/{pid}")) {
        Err(_) => "no such process".to_string(),
        Ok(about) if about.uid() != sockets::own_user() => {
            format!(
                "it belongs to another user ({}). Only that user can query its run.",
                about.uid()
            )
        }
        Ok(_) => "it belongs to no run of yours. `memfold list` shows your runs.".to_string(),
    };
    Err(CommandFailure::own(format!("Process {pid}: {why}")))
}

/// Sends a request to a run. Returns `None` if the run has ended.
fn ask(path: &Path, request: &Value) -> io::Result<Option<Value>> {
    sockets::ask(path, request, Some(PATIENCE))
}

/// Returns the processes with an engine in the answer of a run to `stat`.
pub fn processes(about: &Value) -> &[Value] {
    about["processes"].as_array().map_or(&[], Vec::as_slice)
}

fn sum(about: &Value, name: &str) -> u64 {
    processes(about).iter().map(|one| one[name].as_u64().unwrap_or(0)).sum()
}

fn number(about: &Value, name: &str) -> u64 {
    about[name].as_u64().unwrap_or(0)
}

fn uncompressed(about: &Value) -> u64 {
    sum(about, "resident_bytes") + sum(about, "frame_bytes") + sum(about, "unmanaged_bytes")
}

/// Returns the memory of a process that counts against the limit, bytes: the uncompressed part, and
/// the compressed one with the tables that find it. Of memory that processes share after a fork, each
/// has a part.
pub fn counted(process: &Value) -> [u64; 2] {
    let of = |name: &str| process[name].as_u64().unwrap_or(0);
    let plain_bytes = of("resident_bytes") + of("frame_bytes") + of("unmanaged_bytes");
    let compressed_bytes = of("pool_bytes") + of("index_bytes");
    [plain_bytes.saturating_sub(of("shared_bytes")), compressed_bytes]
}

/// Returns the bounds in the answer of a run.
pub fn bounds(about: &Value) -> String {
    let size = |name: &str| {
        about[name].as_u64().map_or("none".to_string(), |bytes| Size(bytes).to_string())
    };
    let own =
        format!("limit {}, resident limit {}", size("limit_bytes"), size("resident_limit_bytes"));
    let group = &about["group"];
    let size = |name: &str| Size(group[name].as_u64().unwrap_or(0));
    match group["name"].as_str() {
        Some(name) => {
            format!("{own}, group {name}: {} of {}", size("share_bytes"), size("limit_bytes"))
        }
        None => own,
    }
}

/// Returns the name of the run, if it has one, and its command as one printable line, cut where it is
/// long.
pub fn command_of(about: &Value) -> String {
    let name = about["name"].as_str().map(|name| format!("{name}: ")).unwrap_or_default();
    let words: Vec<&str> =
        about["command"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let line = printable(&format!("{name}{}", words.join(" ")));
    match line.char_indices().nth(COMMAND_LEN_MAX) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_stat_stand_below_their_titles() {
        let process = json!({"pid": 7, "resident_bytes": 3 << 20, "faults": 12, "pgmajfault": 5});
        let (title, line) =
            (columns(|column| column.title.to_string()), columns(|column| column.of(&process)));
        assert_eq!(title.len(), line.len(), "{title}\n{line}");
        assert!(line.starts_with("         7    3.0 MiB        0 B"), "{line}");
        assert!(line.ends_with("        12          5"), "{line}");
    }
}
