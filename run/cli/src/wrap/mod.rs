//! `memfold wrap` and `memfold unwrap`: commands of this user run under `memfold run` from now on,
//! without a change of the scripts that call them.
mod service;
mod wrapper;

use crate::failure::CommandFailure;
use crate::printable::printable;
use crate::run;
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use service::UserService;
use std::path::PathBuf;
use wrapper::WrapperFolder;

/// Returns the command line of `wrap`.
pub fn wrap_command() -> Command {
    Command::new("wrap")
        .about("Makes commands run under memfold run from now on; without COMMAND, lists them")
        .override_usage("memfold wrap [OPTIONS] [COMMAND]... [-- FLAGS of memfold run]")
        .arg(commands())
        .arg(folder())
        .arg(services("Make this service of the user's systemd run under memfold run"))
        .arg(run::later_flags("Flags of memfold run, such as --limit 2G; without any, only unused memory is folded"))
        .after_help(
            "It writes a small script for each COMMAND into a directory of the user, which must come early in PATH. \
             memfold unwrap removes it again. Where memfold can't work, the command runs without it (--if-possible).\n\
             \nExit status: 0; 125 if memfold refuses; 126 or 127 if COMMAND can't be executed or found.",
        )
}

/// Returns the command line of `unwrap`.
pub fn unwrap_command() -> Command {
    Command::new("unwrap")
        .about("Undoes memfold wrap")
        .override_usage("memfold unwrap [OPTIONS] [COMMAND]...")
        .arg(commands())
        .arg(folder())
        .arg(services("Undo memfold wrap --service"))
        .arg(
            Arg::new("all")
                .long("all")
                .action(ArgAction::SetTrue)
                .help("Undo it for every command and service"),
        )
        .after_help("Exit status: 0; 125 if one of them is not wrapped.")
}

fn commands() -> Arg {
    Arg::new("commands").value_name("COMMAND").num_args(0..).help("Name of a command in PATH")
}

fn folder() -> Arg {
    Arg::new("dir")
        .long("dir")
        .value_name("PATH")
        .value_parser(value_parser!(PathBuf))
        .help("Directory of the scripts [default: memfold/bin in this user's data directory]")
}

fn services(help: &'static str) -> Arg {
    Arg::new("services").long("service").value_name("NAME").action(ArgAction::Append).help(help)
}

fn given(matches: &ArgMatches, name: &str) -> Vec<String> {
    matches.get_many::<String>(name).into_iter().flatten().cloned().collect()
}

/// Runs `memfold wrap`.
///
/// # Errors
/// 125: flags that `run` would refuse, a program that memfold can't manage, or a file that is in
/// the way or can't be written. 126, 127: a command can't be executed, or was not found. Earlier
/// commands of the line are wrapped then.
pub fn wrap(matches: &ArgMatches) -> Result<u8, CommandFailure> {
    let (names, services) = (given(matches, "commands"), given(matches, "services"));
    let folder = WrapperFolder::of(matches.get_one("dir"))?;
    let flags = given(matches, "flags");
    if names.is_empty() && services.is_empty() {
        if !flags.is_empty() {
            return Err(CommandFailure::own(
                "No command given. Write memfold wrap COMMAND -- FLAGS",
            ));
        }
        let all = [folder.wrapped()?, service::wrapped()?].concat();
        for (name, line) in &all {
            say!("{name}: {line}");
        }
        return Ok(0);
    }
    run::check_flags(&flags)?;
    for name in &names {
        say!("{}", folder.wrap(name, &flags)?.display());
    }
    for name in &services {
        say!("{}", UserService::find(name)?.wrap(&flags)?.display());
    }
    if let Some(line) = folder.line_for_path(&names) {
        eprintln!(
            "memfold: these shells don't find the scripts yet. Add this line to ~/.profile, and log in again:\n{}",
            printable(&line)
        );
    }
    service::say_reload(&services);
    Ok(0)
}

/// Runs `memfold unwrap`.
///
/// # Errors
/// 125: a command is not wrapped. Earlier ones of the line are unwrapped then.
pub fn unwrap(matches: &ArgMatches) -> Result<u8, CommandFailure> {
    let (mut names, mut services) = (given(matches, "commands"), given(matches, "services"));
    let folder = WrapperFolder::of(matches.get_one("dir"))?;
    match (matches.get_flag("all"), names.is_empty() && services.is_empty()) {
        (true, true) => {
            let names_of =
                |all: Vec<(String, String)>| all.into_iter().map(|(name, _)| name).collect();
            (names, services) = (names_of(folder.wrapped()?), names_of(service::wrapped()?));
        }
        (true, false) => return Err(CommandFailure::own("--all: give it without other names")),
        (false, true) => {
            return Err(CommandFailure::own("No command given. Give COMMAND or --all"));
        }
        (false, false) => {}
    }
    names.iter().try_for_each(|name| folder.unwrap(name))?;
    services.iter().try_for_each(|name| service::unwrap(name))?;
    service::say_reload(&services);
    Ok(0)
}
