//! The `memfold` command. It is the top of the project: only this crate reads arguments and
//! environment.

// Bottom first: a module imports only from modules listed above it.
#[macro_use]
mod failure;
mod printable;
mod machine;
mod program;
mod table;
mod log;
mod sockets;
mod group;
mod remote;
mod report;
mod child;
mod control;
mod runs;
mod explain;
mod metrics;
mod dict;
mod delivery;
mod profile;
mod run;
mod record;
mod check;
mod jupyter;
mod wrap;
mod blk;
mod top;
mod bench;
mod documentation;

use clap::Command;
use clap::error::ErrorKind;
use documentation::{completions, man};
use failure::CommandFailure;
use printable::printable;
use run::help::{self, HELP};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  memfold run --limit 1G -- python3 train.py
  memfold run --limit 25% --summary -- ./app --its-own-flag
  memfold check
  memfold list
  memfold stat 1234
  memfold set 1234 --limit 512M
  memfold curve 1234
  memfold top
  memfold explain 1234
  memfold metrics --listen 127.0.0.1:9464
  memfold wrap node python3
  memfold blk --size 8G --limit 2G --unix /run/disk.sock
  memfold bench corpus --out /tmp/corpus
  memfold bench walk --help
  memfold dict train --out app.dict core.bin
  memfold completions bash > ~/.local/share/bash-completion/completions/memfold
  memfold man ~/.local/share/man/man1

`memfold run -h` lists the flags that most users need, `memfold run --help` all, with the exit statuses.";

fn main() -> ExitCode {
    let result = bench::help().map_or_else(dispatch, Err);
    ExitCode::from(result.unwrap_or_else(|failure| {
        eprintln!("memfold: {}", printable(&failure.text));
        failure.status
    }))
}

/// Runs the subcommand. Returns the exit status.
fn dispatch() -> Result<u8, CommandFailure> {
    match command().try_get_matches() {
        Ok(matches) => match matches.subcommand() {
            Some(("run", matches)) if matches.get_flag(HELP) => help::print(run::command()),
            Some(("record", matches)) if matches.get_flag(HELP) => help::print(record::command()),
            Some(("check", matches)) if matches.get_flag(HELP) => help::print(check::command()),
            Some(("run", matches)) if matches.get_flag(run::CHECK) => check::main(matches),
            Some(("run", matches)) => run::main(matches),
            Some(("check", matches)) => check::main(matches),
            Some(("jupyter", matches)) => jupyter::main(matches),
            Some(("wrap", matches)) => wrap::wrap(matches),
            Some(("unwrap", matches)) => wrap::unwrap(matches),
            Some(("list", _)) => runs::list(),
            Some(("stat", matches)) => runs::stat(matches),
            Some(("set", matches)) => runs::set(matches),
            Some(("curve", matches)) => runs::curve(matches),
            Some(("top", matches)) => top::main(matches),
            Some(("record", matches)) => record::main(matches),
            Some(("explain", matches)) => explain::main(matches),
            Some(("metrics", matches)) => metrics::main(matches),
            Some(("blk", matches)) => blk::main(matches),
            Some(("bench", matches)) => bench::main(matches),
            Some(("dict", matches)) => dict::main(matches),
            Some(("completions", matches)) => completions::main(matches, command()),
            Some(("man", matches)) => man::main(matches, command()),
            _ => unreachable!("clap requires a subcommand"),
        },
        Err(error) => usage(error),
    }
}

fn command() -> Command {
    Command::new("memfold")
        .about("Compressed memory for Linux programs, in user space")
        .version(env!("CARGO_PKG_VERSION"))
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(run::command())
        .subcommand(record::command())
        .subcommand(check::command())
        .subcommand(runs::list_command())
        .subcommand(runs::stat_command())
        .subcommand(runs::set_command())
        .subcommand(runs::curve_command())
        .subcommand(top::command())
        .subcommand(explain::command())
        .subcommand(metrics::command())
        .subcommand(blk::command())
        .subcommand(bench::command())
        .subcommand(dict::command())
        .subcommand(jupyter::command())
        .subcommand(wrap::wrap_command())
        .subcommand(wrap::unwrap_command())
        .subcommand(completions::command())
        .subcommand(man::command())
        .after_help(EXAMPLES)
}

/// Prints help and version. Any other error becomes a failure with one line.
fn usage(error: clap::Error) -> Result<u8, CommandFailure> {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        let _ = error.print();
        return Ok(0);
    }
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let _ = error.print();
        return Ok(failure::OWN);
    }
    // clap prints a first line, then for some errors a list, then advice after an empty line.
    let text = error.render().to_string();
    let mut lines = text.lines().map(str::trim);
    let what: Vec<&str> = lines.by_ref().take_while(|line| !line.is_empty()).collect();
    let what = what.join(" ");
    let what = what.trim_start_matches("error: ");
    let similar =
        lines.find_map(|line| line.strip_prefix("tip: ").filter(|tip| tip.contains("similar")));
    Err(match (similar, error.kind()) {
        (Some(similar), _) => {
            let (first, rest) = similar.split_at(1);
            CommandFailure::own(format!("{what}. {}{rest}.", first.to_uppercase()))
        }
        (None, ErrorKind::InvalidSubcommand | ErrorKind::UnknownArgument) => {
            CommandFailure::own(format!("{what}. --help lists all there are."))
        }
        _ => CommandFailure::own(what),
    })
}
