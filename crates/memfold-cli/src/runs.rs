//! The runs of this user: `memfold run --list`, `memfold stat PID` and `memfold set PID`.
use crate::failure::CommandFailure;
use crate::sockets;
use crate::table::processes::run_of;
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use memfold::config::Size;
use serde_json::{Value, json};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

/// A run that does not answer in this time is stopped, or too busy.
const PATIENCE: Duration = Duration::from_secs(5);
/// Most columns of a command in the list.
const COMMAND_LEN_MAX: usize = 60;

/// Returns the command line of `stat`.
pub fn stat_command() -> Command {
    let json = Arg::new("json")
        .long("json")
        .action(ArgAction::SetTrue)
        .help("Print every counter as JSON");
    Command::new("stat")
        .about("Prints the memory use and counters of a program under memfold run")
        .arg(pid())
        .arg(json)
        .after_help("Exit status: 0; 125 if no run of this user has this process.")
}

/// Returns the command line of `set`.
pub fn set_command() -> Command {
    let bound = |name: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name("SIZE").help(help)
    };
    Command::new("set")
        .about("Changes the limit of a running program under memfold run")
        .override_usage("memfold set PID [--limit SIZE] [--resident SIZE]")
        .arg(pid())
        .arg(bound("limit", "Physical memory of the whole run, as in memfold run; none removes the limit"))
        .arg(bound("resident", "Uncompressed memory, as in memfold run; none removes the limit"))
        .after_help(
            "The limit applies to the whole run, whichever of its processes PID names. One of the two limits must remain.\n\
             \nExit status: 0; 125 if no run of this user has this process, or if memfold refuses the size.",
        )
}

fn pid() -> Arg {
    Arg::new("pid")
        .value_name("PID")
        .required(true)
        .value_parser(value_parser!(u32).range(1..))
        .help("Process ID of memfold run, or of any process of the run")
}

/// Runs `memfold run --list`.
pub fn list() -> u8 {
    let sized =
        |value: &Value| value.as_u64().map_or("none".to_string(), |bytes| Size(bytes).to_string());
    println!(
        "{:>8} {:>10} {:>10} {:>10} {:>10} {:>10} {:>5} {:>8}  COMMAND",
        "PID", "LIMIT", "RESIDENT<", "RESIDENT", "FOLDED", "POOL", "PROCS", "SECONDS"
    );
    for (run, path) in sockets::all(sockets::RUN) {
        let about = match ask(&path, &json!({"do": "stat"})) {
            Ok(Some(about)) => about,
            Ok(None) => continue,
            Err(e) => {
                println!("{run:>8} does not answer: {e}");
                continue;
            }
        };
        println!(
            "{run:>8} {:>10} {:>10} {:>10} {:>10} {:>10} {:>5} {:>8.0}  {}",
            sized(&about["limit_bytes"]),
            sized(&about["resident_limit_bytes"]),
            Size(uncompressed(&about)).to_string(),
            Size(sum(&about, "folded_bytes")).to_string(),
            Size(sum(&about, "pool_bytes")).to_string(),
            processes(&about).len(),
            about["seconds"].as_f64().unwrap_or(0.0),
            command_of(&about),
        );
    }
    0
}

/// Runs `memfold stat PID`.
///
/// # Errors
/// 125: no such run, or it does not answer.
pub fn stat(matches: &ArgMatches) -> Result<u8, CommandFailure> {
    let (_, about) = find(matches)?;
    if matches.get_flag("json") {
        println!("{about:#}");
        return Ok(0);
    }
    println!(
        "run {}, {:.1} s: {}",
        about["run"],
        about["seconds"].as_f64().unwrap_or(0.0),
        command_of(&about)
    );
    println!("{}", bounds(&about));
    println!(
        "{:>8} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10}",
        "PID",
        "MAPPED",
        "FRAMES",
        "UNMANAGED",
        "POOL",
        "INDEX",
        "FOLDED",
        "FILES",
        "SHARED",
        "FAULTS",
        "MAJOR"
    );
    for one in processes(&about) {
        let size = |name: &str| Size(one[name].as_u64().unwrap_or(0)).to_string();
        println!(
            "{:>8} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10}",
            one["pid"],
            size("resident_bytes"),
            size("frame_bytes"),
            size("unmanaged_bytes"),
            size("pool_bytes"),
            size("index_bytes"),
            size("folded_bytes"),
            size("file_bytes"),
            size("shmem_bytes"),
            one["faults"],
            one["pgmajfault"]
        );
    }
    println!(
        "processes without an engine: {}, {} (counted against the limit)\nFILES and SHARED are not counted against the limit",
        about["unmanaged_processes"],
        Size(about["unmanaged_processes_bytes"].as_u64().unwrap_or(0))
    );
    Ok(0)
}

/// Runs `memfold set PID`.
///
/// # Errors
/// 125: no such run, it does not answer, or it refuses the bounds.
pub fn set(matches: &ArgMatches) -> Result<u8, CommandFailure> {
    let mut request = json!({"do": "set"});
    for name in ["limit", "resident"] {
        if let Some(size) = matches.get_one::<String>(name) {
            request[name] = size.as_str().into();
        }
    }
    if request.as_object().is_some_and(|request| request.len() == 1) {
        return Err(CommandFailure::own("No limit given. Give --limit SIZE or --resident SIZE"));
    }
    let (path, about) = find(matches)?;
    let run = &about["run"];
    let answer =
        ask(&path, &request).map_err(|e| CommandFailure::own(format!("Run {run}: {e}")))?;
    let Some(answer) = answer else {
        return Err(CommandFailure::own(format!("Run {run} has just ended.")));
    };
    if let Some(why) = answer["error"].as_str() {
        return Err(CommandFailure::own(why));
    }
    println!("run {run}: {}", bounds(&answer));
    Ok(0)
}

/// Returns the run with the given process, and its answer to `stat`.
fn find(matches: &ArgMatches) -> Result<(std::path::PathBuf, Value), CommandFailure> {
    let pid = *matches.get_one::<u32>("pid").expect("clap requires it");
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
            Err(e) if run == pid => return Err(CommandFailure::own(format!("Run {pid}: {e}"))),
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
        Ok(_) => "it belongs to no run of yours. `memfold run --list` shows your runs.".to_string(),
    };
    Err(CommandFailure::own(format!("Process {pid}: {why}")))
}

/// Sends a request to a run; `None` if it has ended.
fn ask(path: &Path, request: &Value) -> io::Result<Option<Value>> {
    sockets::ask(path, request, Some(PATIENCE))
}

fn processes(about: &Value) -> &[Value] {
    about["processes"].as_array().map_or(&[], Vec::as_slice)
}

fn sum(about: &Value, name: &str) -> u64 {
    processes(about).iter().map(|one| one[name].as_u64().unwrap_or(0)).sum()
}

fn uncompressed(about: &Value) -> u64 {
    sum(about, "resident_bytes") + sum(about, "frame_bytes") + sum(about, "unmanaged_bytes")
}

fn bounds(about: &Value) -> String {
    let size = |name: &str| {
        about[name].as_u64().map_or("none".to_string(), |bytes| Size(bytes).to_string())
    };
    format!("limit {}, resident limit {}", size("limit_bytes"), size("resident_limit_bytes"))
}

/// Returns the command as one line; control characters would make it several.
fn command_of(about: &Value) -> String {
    let words: Vec<&str> =
        about["command"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let line: String =
        words.join(" ").chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    match line.char_indices().nth(COMMAND_LEN_MAX) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line,
    }
}
