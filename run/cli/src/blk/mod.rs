//! `memfold blk`: compressed block devices.
mod flags;
mod listeners;
mod devices;
mod swap_safe;
mod vhost;
mod serve;
mod ask;

use crate::failure::CommandFailure;
use clap::{ArgMatches, Command};

const EXAMPLES: &str = "\
Examples:
  memfold blk --size 8G --limit 2G --unix /run/disk.sock
  memfold blk --size 8G --limit 2G --writeback /var/tmp --unix /run/disk.sock
  memfold blk --size 8G --limit 2G --vhost /run/vm.sock
  memfold blk --size 1G --persist disk.img --tcp 127.0.0.1:10809
  memfold blk stat
  memfold blk idle --older 600 && memfold blk writeback --pick idle

A size is a number of bytes, or a number with K, M, G or T (powers of 1024). Any
NBD client can use the device: nbdcopy, nbdfuse, qemu -drive, fio, or the kernel
with nbd-client. Sockets of systemd's socket activation (LISTEN_FDS) are served
too.

Exit status: 0 after INT or TERM; 125 if the device can't be served.";

/// Returns the command line of `blk`.
pub fn command() -> Command {
    Command::new("blk")
        .about("Serves compressed block devices in memory")
        .override_usage("memfold blk --size SIZE [--limit SIZE] --unix PATH [OPTIONS]")
        .args(flags::arguments())
        .subcommands(ask::commands())
        .args_conflicts_with_subcommands(true)
        .after_help(EXAMPLES)
}

pub use ask::set_limit;

/// Runs `blk` or one of its subcommands. Returns the exit status.
///
/// # Errors
/// 125, as the help says.
pub fn main(matches: &ArgMatches) -> Result<u8, CommandFailure> {
    match matches.subcommand() {
        Some((name, matches)) => ask::main(name, matches),
        None => serve::main(matches),
    }
}
