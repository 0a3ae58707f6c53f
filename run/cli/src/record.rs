//! `memfold record`: runs a program, and shows which of its functions touch folded memory.
use crate::failure::CommandFailure;
use crate::profile::recorder::Recorder;
use crate::run;
use clap::{Arg, ArgMatches, Command, ValueHint, value_parser};
use std::path::PathBuf;

const OUTPUT: &str = "output";
const EVERY: &str = "every";
/// One load in so many is sampled by default.
const EVERY_DEFAULT: &str = "64";

/// Flags of `run` that do something else than running a program.
const REFUSED: [&str; 4] = ["check", "if-possible", "list", "wrapped"];

const EXAMPLES: &str = "\
Examples:
  memfold record --limit 512M -- python3 train.py
      Print the functions with the most loads, and write memfold-record.json,
      memfold-record.collapsed and memfold-record.svg.
  memfold record --output /tmp/job --every 1 --limit 1G -- ./app
      Sample each load. A program that loads much becomes a few times slower.

NAME.json is for the Firefox Profiler (https://profiler.firefox.com). NAME.svg
is a flame graph, and NAME.collapsed is for tools that draw others. Functions of
Python 3.9 to 3.13 have their own names. Node needs --perf-basic-prof, and Java
-XX:+PreserveFramePointer and a map in /tmp/perf-PID.map.";

/// Returns the command line of `record`: that of `run`, and two more flags.
pub fn command() -> Command {
    run::command()
        .name("record")
        .about(
            "Runs a program as `memfold run` does, and records which functions touch folded memory",
        )
        .override_usage(
            "memfold record [--output NAME] [--every N] [FLAGS OF run] [--] CMD [ARGS]...",
        )
        .arg(
            Arg::new(OUTPUT)
                .long(OUTPUT)
                .value_name("NAME")
                .default_value("memfold-record")
                .value_parser(value_parser!(PathBuf))
                .value_hint(ValueHint::AnyPath)
                .help("Write the profiles to NAME.json, NAME.collapsed and NAME.svg; earlier ones get the suffix .old"),
        )
        .arg(
            Arg::new(EVERY)
                .long(EVERY)
                .value_name("N")
                .default_value(EVERY_DEFAULT)
                .value_parser(value_parser!(u64).range(1..=1_000_000))
                .help("Sample one load in N"),
        )
        .mut_args(|arg| {
            if REFUSED.contains(&arg.get_id().as_str()) {
                arg.hide(true).exclusive(false)
            } else {
                arg
            }
        })
        .after_help(EXAMPLES)
        .after_long_help(EXAMPLES)
}

/// Runs the program and records it. Returns its exit status.
///
/// # Errors
/// Those of `run`. 125: a profile can't be written.
pub fn main(matches: &ArgMatches) -> Result<u8, CommandFailure> {
    if let Some(flag) = REFUSED.into_iter().find(|flag| matches.get_flag(flag)) {
        return Err(CommandFailure::own(format!(
            "--{flag}: memfold record has no such flag. Use memfold run."
        )));
    }
    let name = matches.get_one::<PathBuf>(OUTPUT).expect("it has a default");
    let every = matches.get_one::<u64>(EVERY).expect("it has a default");
    run::run(matches, Some(Recorder::new(name, *every)?))
}
