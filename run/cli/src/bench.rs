//! `memfold bench`: executes `memfold-bench`. It is a separate program, so that this command
//! doesn't depend on the benchmarks.
use crate::failure::CommandFailure;
use crate::program;
use clap::{Arg, ArgMatches, Command, value_parser};
use std::env;
use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;

const PROGRAM: &str = "memfold-bench";

/// Returns the command line of `bench`. The benchmarks parse the rest, also `--help`.
pub fn command() -> Command {
    let rest = Arg::new("rest")
        .value_name("BENCHMARK")
        .num_args(0..)
        .trailing_var_arg(true)
        .allow_hyphen_values(true)
        .value_parser(value_parser!(OsString))
        .help("The benchmark and its flags; `memfold bench --help` lists them");
    Command::new("bench")
        .about("Compares memfold with the kernel's compressed swap")
        .disable_help_flag(true)
        .arg(rest)
}

/// Executes the program with the benchmarks. Returns only if that fails.
///
/// # Errors
/// 125: the program is missing or can't be executed.
pub fn main(matches: &ArgMatches) -> Result<u8, CommandFailure> {
    Err(become_benchmarks(matches.get_many("rest").into_iter().flatten().cloned()))
}

/// Executes `memfold help bench ...`, which clap can't answer here. Returns if that is not the
/// command, or if it fails.
pub fn help() -> Option<CommandFailure> {
    let mut words = env::args_os().skip(1);
    let names_bench = words.next()? == "help" && words.next()? == "bench";
    names_bench.then(|| become_benchmarks(std::iter::once("help".into()).chain(words)))
}

/// Executes the program beside this one, or else that of PATH, under the name that the user knows.
fn become_benchmarks(arguments: impl Iterator<Item = OsString>) -> CommandFailure {
    let sibling = env::current_exe().ok().map(|own| own.with_file_name(PROGRAM));
    let program = sibling.filter(|path| path.is_file()).unwrap_or_else(|| PROGRAM.into());
    let error = std::process::Command::new(&program).arg0("memfold bench").args(arguments).exec();
    let text = match error.kind() {
        ErrorKind::NotFound => {
            "it is neither beside memfold nor in PATH. Build it: cargo build --release -p memfold-bench".to_string()
        }
        _ => program::plain(&error).to_string(),
    };
    CommandFailure::own(format!("{}: {text}", program.display()))
}
