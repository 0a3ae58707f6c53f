//! `memfold top`: all runs, groups and block devices of this user on one screen, with rates.
// Bottom first: a module imports only from modules listed above it.
mod text;
mod watch;
mod areas;
mod model;
mod history;
mod columns;
mod json;
mod keys;
mod draw;
mod screen;

#[cfg(test)]
mod tests;

use crate::blk;
use crate::failure::CommandFailure;
use crate::group;
use crate::program::plain;
use crate::runs;
use clap::{Arg, ArgAction, ArgMatches, Command};
use model::{RowKey, TopPage};
use std::env;
use std::fs::OpenOptions;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};
use watch::{Heard, Watch};

/// A run that does not answer in this time is printed without figures.
const PATIENCE: Duration = Duration::from_millis(2500);
/// Seconds between two looks, at least and at most.
const INTERVAL_MIN: f64 = 0.1;
const INTERVAL_MAX: f64 = 60.0;
/// Files of one second, at most.
const EXPORTS: u32 = 100;

/// Returns the command line of `top`.
pub fn command() -> Command {
    let flag = |name: &'static str, help: &'static str| {
        Arg::new(name).long(name).action(ArgAction::SetTrue).help(help)
    };
    Command::new("top")
        .about("Shows the runs, groups and block devices of this user, with their rates, until it is quit")
        .override_usage("memfold top [--interval SECONDS] [--no-color]\n       memfold top --once [--json] [--interval SECONDS]")
        .arg(
            Arg::new("interval")
                .long("interval")
                .value_name("SECONDS")
                .default_value("1")
                .value_parser(interval)
                .help("Time between two looks, 0.1 to 60"),
        )
        .arg(flag("once", "Look twice, one interval apart, print a table, and end"))
        .arg(flag("json", "Print JSON instead, with the processes of each run; implies --once"))
        .arg(flag("no-color", "Use no colours; also if NO_COLOR is set, or TERM is dumb"))
        .after_help(
            "Keys: arrows select, Enter opens, Esc leads back, s sorts, / filters, l changes a limit, e writes JSON, ? explains, q quits.\n\
             \nExit status: 0; 125 if stdout is no terminal and --once is not given; 128 and its number after a signal.",
        )
}

fn interval(text: &str) -> Result<Duration, String> {
    let seconds: Option<f64> = text.parse().ok();
    match seconds.filter(|seconds| (INTERVAL_MIN..=INTERVAL_MAX).contains(seconds)) {
        Some(seconds) => Ok(Duration::from_secs_f64(seconds)),
        None => Err(format!("it is no number from {INTERVAL_MIN} to {INTERVAL_MAX}")),
    }
}

/// Runs `memfold top`.
///
/// # Errors
/// 125: stdout is no terminal or can't be written.
pub fn main(matches: &ArgMatches) -> Result<u8, CommandFailure> {
    let interval = *matches.get_one::<Duration>("interval").expect("it has a default");
    let is_json = matches.get_flag("json");
    if is_json || matches.get_flag("once") {
        return once(interval, is_json);
    }
    if !io::stdout().is_terminal() {
        return Err(CommandFailure::own(
            "top: stdout is no terminal. Give --once to print a table, or --json.",
        ));
    }
    let is_set = |name: &str| env::var_os(name).is_some_and(|value| !value.is_empty());
    let is_dumb = env::var_os("TERM").is_none_or(|name| name == "dumb" || name.is_empty());
    let is_plain = matches.get_flag("no-color") || is_set("NO_COLOR") || is_dumb;
    screen::show(interval, !is_plain)
}

/// Looks twice, and prints what was found.
fn once(interval: Duration, is_json: bool) -> Result<u8, CommandFailure> {
    let watch = Watch::begin(interval);
    watch.wait_for_rates(interval + PATIENCE);
    let answers = watch.heard();
    if is_json {
        say!("{:#}", json::json(&answers));
        return Ok(0);
    }
    let rows = model::rows(&answers, &TopPage::All, Instant::now());
    if rows.is_empty() {
        say!("No runs, groups or block devices of this user.");
        return Ok(0);
    }
    for line in columns::table(&rows) {
        say!("{line}");
    }
    Ok(0)
}

/// Writes all figures to a new file in a directory. Returns its name.
fn export(heard: &[Heard], directory: &Path) -> io::Result<String> {
    let text = format!("{:#}\n", json::json(heard));
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    for number in 0..EXPORTS {
        let suffix = if number == 0 { String::new() } else { format!("-{number}") };
        let name = format!("memfold-top-{}{suffix}.json", now.as_secs());
        match OpenOptions::new().write(true).create_new(true).open(directory.join(&name)) {
            Ok(mut file) => {
                file.write_all(text.as_bytes()).map_err(|e| io::Error::other(plain(&e)))?;
                return Ok(name);
            }
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
            Err(e) => return Err(io::Error::other(plain(&e))),
        }
    }
    Err(ErrorKind::AlreadyExists.into())
}

/// Changes the limit of a run, a group or a server, as `memfold set` and `memfold blk set` do.
/// Returns a line about the new limit.
fn limit(of: &RowKey, size: &str) -> Result<String, CommandFailure> {
    match of {
        RowKey::Run(run) => runs::set_limit(*run, size),
        RowKey::Group(name) => group::set_limit(name, size),
        RowKey::Server(pid) => blk::set_limit(*pid, size),
        RowKey::Process(_) | RowKey::Export(_) => Err(CommandFailure::own("It has no limit.")),
    }
}

/// Returns the titles of all columns, each with what it shows.
#[cfg(test)]
pub fn columns() -> impl Iterator<Item = (&'static str, &'static str)> {
    columns::COLUMNS.iter().map(|column| (column.title, column.help))
}

/// Returns the keys, each with what it does.
#[cfg(test)]
pub fn keys_of_screen() -> impl Iterator<Item = (&'static str, &'static str)> {
    draw::KEYS.iter().map(|[key, help]| (*key, *help))
}
