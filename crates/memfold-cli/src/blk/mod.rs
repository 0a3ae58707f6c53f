//! `memfold blk`: compressed block devices.
mod flags;
mod listeners;
mod serve;

use crate::failure::Failure;
use clap::{ArgMatches, Command};

const EXAMPLES: &str = "\
Examples:
  memfold blk --size 8G --limit 2G --unix /run/disk.sock
  memfold blk --size 1G --tcp 127.0.0.1:10809

Exit status: 0 after INT or TERM; 125 if the device could not be served.";

/// The command line of `blk`.
pub fn command() -> Command {
    Command::new("blk")
        .about("Serves compressed block devices from memory")
        .override_usage("memfold blk --size SIZE [--limit SIZE] --unix PATH [OPTIONS]")
        .args(flags::arguments())
        .after_help(EXAMPLES)
}

/// Runs `blk` or one of its subcommands; the status to exit with.
///
/// # Errors
/// 125, as the help says.
pub fn main(matches: &ArgMatches) -> Result<u8, Failure> {
    serve::main(matches)
}
