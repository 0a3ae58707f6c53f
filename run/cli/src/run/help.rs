//! The help of `memfold run`: `-h` for the flags that most users need, `--help` for all, and
//! `--help-all` also for the settings for measurements.
use crate::failure::CommandFailure;
use clap::{Arg, ArgAction, Command};
use memfold_engine::config::keys::{Audience, COUNTED, KEYS};
use memfold_store::{CODECS, Codec};

/// The flag that prints all flags for users.
pub const HELP: &str = "help";
/// Names of the arguments that `-h` lists.
const COMMON: [&str; 18] = [
    "limit",
    "resident",
    "slowdown",
    "codec",
    "on-full",
    "swap",
    "summary",
    "stats-file",
    "log",
    "check",
    "list",
    "group",
    "if-possible",
    "output",
    "every",
    HELP,
    "short-help",
    super::COMMAND,
];
/// Columns of a flag's help; clap indents it by the width of the flags.
const HELP_COLUMNS: usize = 60;

/// What `-h` prints after the flags.
pub const SHORT: &str = "\
Examples:
  memfold run --limit 1G -- python3 train.py
  memfold run --limit 25% --summary -- ./app

A size is a number of bytes, a number with K, M, G or T (powers of 1024), or a
percentage of the memory of this machine or cgroup. `memfold run --help` lists
all flags, the codecs and the exit statuses.";

const EXAMPLES: &str = "\
Examples:
  memfold run --limit 1G -- python3 train.py
      All processes of the program share 1 GiB of physical memory.
  memfold run --limit 25% --codec zstd:1 -- ./app
      A quarter of the machine's memory, with stronger compression.
  memfold run --resident 512M --summary -- ./app
      512 MiB of uncompressed memory, compressed memory without a limit, and a summary at the end.
  memfold run --limit 1G --stats-file run.json -- sort big.txt
  memfold run -- node server.js
      What the program does not use is folded, at a slowdown of at most 2%.

A size is a number of bytes, a number with K, M, G or T (powers of 1024), or a
percentage of the memory of this machine or cgroup. With a limit, memfold folds
nothing while the program stays well under it. MEMFOLD_DISABLE=1 in the
environment switches memfold off.

memfold passes INT, TERM, HUP, QUIT, USR1, USR2, ALRM, WINCH, CONT, TSTP and the
real-time signals on to CMD. If memfold is killed by SIGKILL, the kernel kills
CMD too. As PID 1 of a container, memfold reaps orphans.

Exit status: that of CMD; 128+n if signal n ended CMD; 125 if memfold failed or
refused; 126 if CMD can't be executed; 127 if CMD was not found.";
/// Returns the flags that print help.
pub fn args() -> [Arg; 3] {
    [
        Arg::new("short-help")
            .short('h')
            .action(ArgAction::HelpShort)
            .help("Print the flags that most users need"),
        Arg::new(HELP).long(HELP).action(ArgAction::SetTrue).help("Print help with all flags"),
        Arg::new("help-all")
            .long("help-all")
            .action(ArgAction::HelpLong)
            .help("Print help, including the settings for measurements"),
    ]
}

/// Hides the flags that few users need from `-h`.
pub fn shortened(command: Command) -> Command {
    command.mut_args(|arg| {
        let is_common = COMMON.contains(&arg.get_id().as_str());
        arg.hide_short_help(!is_common)
    })
}

/// Prints the help of a command whose flags are those of `run`, with all flags for users.
///
/// # Errors
/// 125: stdout can't be written.
pub fn print(command: Command) -> Result<u8, CommandFailure> {
    let is_for_measuring =
        |name: &str| KEYS.iter().any(|key| key.name == name && key.audience == Audience::Measuring);
    let text = command.get_after_long_help().map(ToString::to_string).unwrap_or_default();
    let command = command.mut_args(|arg| {
        let hides = is_for_measuring(arg.get_id().as_str());
        arg.hide_short_help(hides)
    });
    let text = command.after_help(text).render_help();
    say!("{}", text.to_string().trim_end());
    Ok(0)
}

/// Returns what `--help` prints after the flags.
pub fn full_text() -> String {
    format!("{}\n{}\n\n{EXAMPLES}", codecs(), wrapped_at(COUNTED, 78))
}

/// Returns the codecs of `--codec`, from the registry.
fn codecs() -> String {
    let line = |codec: &Codec| {
        let (low, high) = (codec.levels.start(), codec.levels.end());
        let levels = match low == high {
            true => String::new(),
            false => format!("[:{low}..{high}], {} by default", codec.level_default),
        };
        format!(
            "  {}{levels}\n      {}\n",
            codec.name,
            wrapped(codec.help).replace('\n', "\n      ")
        )
    };
    format!("Codecs and their levels:\n{}", CODECS.iter().map(line).collect::<String>())
}

/// Returns a text in lines that fit beside the flags.
pub fn wrapped(text: &str) -> String {
    wrapped_at(text, HELP_COLUMNS)
}

/// Returns a text in lines of at most so many columns.
pub fn wrapped_at(text: &str, columns: usize) -> String {
    let (mut out, mut column) = (String::new(), 0);
    for word in text.split(' ') {
        if column > 0 {
            let fits = column + 1 + word.len() <= columns;
            out.push(if fits { ' ' } else { '\n' });
            column = if fits { column + 1 } else { 0 };
        }
        out.push_str(word);
        column += word.len();
    }
    out
}
