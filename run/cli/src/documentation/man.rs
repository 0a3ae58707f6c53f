//! `memfold man`: the man pages, one for each subcommand.
use crate::failure::CommandFailure;
use crate::program::plain;
use clap::{Arg, ArgMatches, Command, value_parser};
use clap_mangen::Man;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Returns the command line of `man`.
pub fn command() -> Command {
    Command::new("man").about("Writes memfold's man pages into a directory").arg(
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
    let mut root = described.disable_help_subcommand(true);
    root.build();
    write_pages(root, &directory).map_err(|e| {
        CommandFailure::own(format!(
            "Writing man pages to {} failed: {}. Give an existing directory.",
            directory.display(),
            plain(&e)
        ))
    })?;
    Ok(0)
}

/// Writes the page of a command, and those of its subcommands.
fn write_pages(command: Command, directory: &Path) -> io::Result<()> {
    let subcommands = command.get_subcommands().filter(|one| !one.is_hide_set()).cloned();
    subcommands.into_iter().try_for_each(|one| write_pages(one, directory))?;
    let (man, mut page) = (Man::new(command), Vec::new());
    man.render(&mut page)?;
    // The generator has no better name for the text after the flags.
    let page = String::from_utf8_lossy(&page).replace("\n.SH EXTRA\n", "\n.SH NOTES\n");
    fs::write(directory.join(man.get_filename()), page)
}
