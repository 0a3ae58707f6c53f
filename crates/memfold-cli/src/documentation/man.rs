//! `memfold man`: the man pages, one for each subcommand.
use crate::failure::CommandFailure;
use crate::program::plain;
use clap::{Arg, ArgMatches, Command, value_parser};
use std::path::PathBuf;

/// Returns the command line of `man`.
pub fn command() -> Command {
    Command::new("man").about("Writes memfold's man pages into a directory").hide(true).arg(
        Arg::new("dir")
            .value_name("DIR")
            .required(true)
            .value_parser(value_parser!(PathBuf))
            .help("An existing directory, such as ~/.local/share/man/man1"),
    )
}

/// Writes the pages for the command line `described`.
///
/// # Errors
/// 125: a page can't be written.
pub fn main(matches: &ArgMatches, described: Command) -> Result<u8, CommandFailure> {
    let directory = matches.get_one::<PathBuf>("dir").cloned().unwrap_or_default();
    clap_mangen::generate_to(described, &directory).map_err(|e| {
        CommandFailure::own(format!(
            "Writing man pages to {} failed: {}. Give an existing directory.",
            directory.display(),
            plain(&e)
        ))
    })?;
    Ok(0)
}
