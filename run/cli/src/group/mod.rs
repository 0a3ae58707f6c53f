//! Groups: runs of this user that share a limit.
mod file;
pub mod member;

use crate::failure::CommandFailure;
use crate::machine;
use clap::ArgMatches;
use file::GroupFile;
use member::GroupRequest;
use memfold_engine::config::{Config, Size};
use memfold_run::fair_share::{WEIGHT, WEIGHT_MAX};
use serde_json::json;

/// Name of the flag that names a group.
pub const GROUP: &str = "group";
const WEIGHT_FLAG: &str = "weight";
const FLOOR: &str = "floor";
const NAME_LEN_MAX: usize = 64;

/// The flags with which `run` joins a group: the name of each, that of its value, and its help.
pub const FLAGS: [[&str; 3]; 3] = [
    [
        GROUP,
        "NAME",
        "Share the limit of this group with its other runs; memfold set --group makes it",
    ],
    [
        WEIGHT_FLAG,
        "N",
        "With --group: the part of the limit that the run may have beside others, 1 to 10000 [default: 100]",
    ],
    [
        FLOOR,
        "SIZE",
        "With --group: memory that the run has before weights count, as far as it needs it [default: 0]",
    ],
];

/// Returns a name if it may be that of a group or a run, whose flag is `flag`.
///
/// # Errors
/// 125: it has other characters than letters, digits, `-`, `_` and `.`, or begins with `.`, or is
/// empty or too long.
pub fn checked_name(flag: &str, name: &str) -> Result<String, CommandFailure> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let fits = (1..=NAME_LEN_MAX).contains(&name.len()) && !name.starts_with('.');
    if fits && name.chars().all(is_plain) {
        return Ok(name.to_string());
    }
    Err(CommandFailure::own(format!(
        "--{flag}: '{name}' can't be a name. Use up to {NAME_LEN_MAX} letters, digits, '-', '_' and '.', but no '.' at its start."
    )))
}

/// Returns what the flags of `run` ask of a group.
///
/// # Errors
/// 125: a value is wrong, or a flag needs `--group`.
pub fn request(matches: &ArgMatches) -> Result<Option<GroupRequest>, CommandFailure> {
    let value = |name: &str| matches.get_one::<String>(name).map(String::as_str);
    let Some(name) = value(GROUP) else {
        return match [WEIGHT_FLAG, FLOOR].into_iter().find(|name| value(name).is_some()) {
            Some(name) => Err(CommandFailure::own(format!("--{name}: give --group NAME too."))),
            None => Ok(None),
        };
    };
    let name = checked_name(GROUP, name)?;
    let weight = match value(WEIGHT_FLAG) {
        None => WEIGHT,
        Some(text) => {
            text.parse().ok().filter(|n| (1..=WEIGHT_MAX).contains(n)).ok_or_else(|| {
                CommandFailure::own(format!(
                    "--weight: '{text}' is no number from 1 to {WEIGHT_MAX}."
                ))
            })?
        }
    };
    let floor_bytes = match value(FLOOR) {
        None | Some("0") => 0,
        Some(text) => size(FLOOR, text)?,
    };
    Ok(Some(GroupRequest { name, weight, floor_bytes }))
}

/// Returns a line about the group that the flags of `run` name, if they name one.
///
/// # Errors
/// 125: there is no such group.
pub fn about(matches: &ArgMatches) -> Result<Option<String>, CommandFailure> {
    match request(matches)? {
        Some(request) => Ok(Some(GroupFile::known(&request.name)?.lock()?.line())),
        None => Ok(None),
    }
}

/// Reads a size as `--limit` does.
fn size(flag: &str, text: &str) -> Result<u64, CommandFailure> {
    let mut config = Config::new(machine::memory_bytes());
    config.set("limit", text).and_then(|()| config.check()).map_err(|e| {
        CommandFailure::own(e.to_string().replacen("--limit", &format!("--{flag}"), 1))
    })?;
    Ok(config.limit_bytes.expect("it was set"))
}

/// Runs `memfold set --group NAME --limit SIZE`.
///
/// # Errors
/// 125: a value is wrong, or the group can't be made, changed or removed.
pub fn set(name: &str, matches: &ArgMatches) -> Result<u8, CommandFailure> {
    let value = |name: &str| matches.get_one::<String>(name).map(String::as_str);
    if value("resident").is_some() {
        return Err(CommandFailure::own(
            "--resident: a group has only a limit of all its memory. Give --limit SIZE.",
        ));
    }
    let Some(limit) = value("limit") else {
        return Err(CommandFailure::own(
            "No limit given. Give --limit SIZE, or --limit none to remove the group.",
        ));
    };
    say!("{}", set_limit(name, limit)?);
    Ok(0)
}

/// Makes a group or changes its limit; `none` removes it. Returns a line about it.
///
/// # Errors
/// 125: the size is wrong, or the group can't be made, changed or removed.
pub fn set_limit(name: &str, limit: &str) -> Result<String, CommandFailure> {
    if limit == "none" {
        GroupFile::known(name)?.lock()?.remove()?;
        return Ok(format!("group {name}: removed"));
    }
    let group = GroupFile::make(name, size("limit", limit)?)?;
    let contents = group.lock()?;
    Ok(contents.line())
}

/// Runs `memfold stat --group NAME`.
///
/// # Errors
/// 125: there is no such group, or it can't be read.
pub fn stat(name: &str, matches: &ArgMatches) -> Result<u8, CommandFailure> {
    let group = GroupFile::known(name)?;
    let contents = group.lock()?;
    if matches.get_flag("json") {
        let one = |run: &memfold_run::group::GroupRun| {
            json!({
                "run": run.pid,
                "weight": run.weight,
                "floor_bytes": run.floor_bytes,
                "need_bytes": run.need_bytes,
                "least_bytes": run.least_bytes,
                "used_bytes": run.held_bytes,
                "share_bytes": run.share_bytes,
                "quiet": run.is_quiet,
            })
        };
        let runs: Vec<_> = contents.runs.iter().map(|(_, run)| one(run)).collect();
        let all = json!({"group": name, "limit_bytes": contents.limit_bytes, "runs": runs});
        // The runs need the lock, and a reader of stdout may be slow.
        drop(contents);
        say!("{all:#}");
        return Ok(0);
    }
    let (line, runs) = (contents.line(), contents.runs.clone());
    drop(contents);
    say!("{line}");
    say!(
        "{:>8} {:>7} {:>10} {:>10} {:>10} {:>10}",
        "PID",
        "WEIGHT",
        "FLOOR",
        "NEEDS",
        "USED",
        "SHARE"
    );
    for (_, run) in &runs {
        let sizes = [run.floor_bytes, run.need_bytes, run.held_bytes, run.share_bytes];
        let sizes = sizes.map(|bytes| format!("{:>10}", Size(bytes).to_string()));
        say!("{:>8} {:>7} {}", run.pid, run.weight, sizes.join(" "));
    }
    Ok(0)
}

/// The figures of a group.
pub struct GroupFigures {
    pub name: String,
    pub limit_bytes: u64,
    pub held_bytes: u64,
    pub runs: u64,
}

/// Returns the figures of each group of this user that can be read.
pub fn figures() -> Vec<GroupFigures> {
    let figures = |group: GroupFile| {
        let contents = group.lock().ok()?;
        Some(GroupFigures {
            name: group.name().to_string(),
            limit_bytes: contents.limit_bytes,
            held_bytes: contents.held_bytes(),
            runs: contents.runs.len() as u64,
        })
    };
    GroupFile::all().into_iter().filter_map(figures).collect()
}

/// Returns a line about each group of this user.
pub fn lines() -> Vec<String> {
    let line = |group: GroupFile| match group.lock() {
        Ok(locked) => locked.line(),
        Err(e) => e.text,
    };
    GroupFile::all().into_iter().map(line).collect()
}
