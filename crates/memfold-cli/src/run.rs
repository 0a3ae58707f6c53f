//! `memfold run`: a program in less memory.
use crate::child::Child;
use crate::control::{Control, Run};
use crate::failure::Failure;
use crate::log::Log;
use crate::report::figures::Figures;
use crate::report::json;
use crate::report::stats_file::StatsFile;
use crate::report::summary::{Ended, summary};
use crate::table::seatless;
use crate::table::slots::Slots;
use crate::{delivery, dict, machine, program, runs};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use memfold::config::keys::{Audience, COUNTED, KEYS, Key};
use memfold::config::{Config, Size};
use memfold::table::{ORDER, Table, order_in};
use memfold_store::{CODECS, Codec, CodecSpec};
use memfold_swap::disk::file_disk::{FileDisk, FileDiskOptions};
use std::ffi::{CStr, CString, NulError, OsString, c_char};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;
use std::{env, fs};

/// The environment variable that tells the preload library what to do.
pub const VARIABLE: &str = ORDER;
const LIBRARY: &str = "libmemfold_preload.so";
const SUMMARY: &str = "summary";
const STATS_FILE: &str = "stats-file";
const LOG: &str = "log";
/// A flag that `run` had.
const DELIVERY: &str = "delivery";
/// Where the program and its arguments are.
pub const COMMAND: &str = "command";
const LIST: &str = "list";
/// The flag by which `run` only says whether it would work.
pub const CHECK: &str = "check";

const EXAMPLES: &str = "\
Examples:
  memfold run --limit 1G -- python3 train.py
      all its processes in 1 GiB of physical memory
  memfold run --limit 25% --codec zstd:1 -- ./app
      a quarter of the memory there is, stronger compression
  memfold run --resident 512M --summary -- ./app
      512 MiB uncompressed and as much compressed as it takes, with a summary
  memfold run --limit 1G --stats-file run.json -- sort big.txt

Sizes are bytes, or K, M, G, T (powers of 1024), or a percentage of the memory
of this machine or cgroup. A program that stays under its limit runs untouched.
MEMFOLD_DISABLE=1 in the environment switches memfold off.

INT, TERM, HUP, QUIT, USR1, USR2, CONT and TSTP are passed on to CMD. If memfold
itself is killed (SIGKILL), so is CMD.

Exit status: CMD's own; 128+n if signal n ended CMD; 125 if memfold itself
failed, 126 if CMD can't be executed, 127 if CMD was not found.";
/// Columns of a flag's help; clap indents it by the width of the flags.
const HELP_COLUMNS: usize = 60;

/// The keys of [`KEYS`] that are flags of `run`.
fn flags() -> impl Iterator<Item = &'static Key> {
    KEYS.iter().filter(|key| key.audience != Audience::Libraries)
}

/// The command line of `run`: a flag for every key that is one, and those for reports.
pub fn command() -> Command {
    let keys = flags().map(|key| {
        let help = match key.default {
            // Its default depends.
            "none" => key.help.to_string(),
            default => format!("{} [default: {default}]", key.help),
        };
        let arg = Arg::new(key.name).long(key.name).value_name(key.value).help(wrapped(&help));
        arg.hide_short_help(key.audience == Audience::Measuring)
    });
    Command::new("run")
        .about("Runs a program with its memory folded: compressed where it is cold, within a limit")
        .override_usage("memfold run --limit SIZE [OPTIONS] [--] CMD [ARGS]...")
        .args(keys)
        .arg(Arg::new(DELIVERY).long(DELIVERY).num_args(0..=1).hide(true))
        .disable_help_flag(true)
        .arg(Arg::new("help").short('h').long("help").action(ArgAction::HelpShort).help("print help"))
        .arg(
            Arg::new("help-all")
                .long("help-all")
                .action(ArgAction::HelpLong)
                .help("print help, with the settings for measuring"),
        )
        .arg(Arg::new(SUMMARY).long(SUMMARY).action(ArgAction::SetTrue).help("print what the run came to on stderr"))
        .arg(
            Arg::new(STATS_FILE)
                .long(STATS_FILE)
                .value_name("FILE")
                .value_parser(value_parser!(PathBuf))
                .help("write every figure to FILE as JSON at the end"),
        )
        .arg(
            Arg::new(LOG)
                .long(LOG)
                .value_name("FILE")
                .value_parser(value_parser!(PathBuf))
                .help(wrapped("append what memfold says while CMD runs, and the summary, to FILE in place of stderr")),
        )
        .arg(
            Arg::new(CHECK)
                .long(CHECK)
                .action(ArgAction::SetTrue)
                .help("say what of this works here, and why the rest doesn't"),
        )
        .arg(Arg::new(LIST).long(LIST).action(ArgAction::SetTrue).exclusive(true).help("list the runs of this user"))
        .arg(
            Arg::new(COMMAND)
                .value_name("CMD")
                .num_args(0..)
                .trailing_var_arg(true)
                .value_parser(value_parser!(OsString))
                .help("the program and its arguments"),
        )
        .after_help(format!("{}\n{}\n\n{EXAMPLES}", codecs(), wrapped_at(COUNTED, 78)))
}

/// The codecs that `--codec` takes, from the registry.
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
    format!("Codecs, with their levels:\n{}", CODECS.iter().map(line).collect::<String>())
}

fn wrapped(text: &str) -> String {
    wrapped_at(text, HELP_COLUMNS)
}

fn wrapped_at(text: &str, columns: usize) -> String {
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

/// Runs the program; the status to exit with.
///
/// # Errors
/// 125, 126, 127, as the help says, before the program is started; 125 also if the stats file can't
/// be completed.
pub fn main(matches: &ArgMatches) -> Result<u8, Failure> {
    if matches.get_flag(LIST) {
        return Ok(runs::list());
    }
    let arguments: Vec<OsString> =
        matches.get_many(COMMAND).map(|all| all.cloned().collect()).unwrap_or_default();
    let Some(name) = arguments.first() else {
        return Err(Failure::own("no command given: memfold run --limit SIZE -- CMD [ARGS]..."));
    };
    // First: to see whether the swap file can be had is one of the calls.
    delivery::survives(matches.get_one::<String>("swap").is_some())?;
    let mut config = config(matches)?;
    if is_inside_a_run() {
        return Err(Failure::own(
            "this is already running under memfold run, which can't be nested",
        ));
    }
    let path = program::find(name, env::var_os("PATH").as_deref())?;
    program::check(&path, &arguments)?;
    let otherwise = delivery::settle(&mut config)?;
    let library = library()?;
    let stats_file =
        matches.get_one::<PathBuf>(STATS_FILE).map(|name| StatsFile::open(name)).transpose()?;
    let log = Arc::new(Log::open(matches.get_one::<PathBuf>(LOG).map(PathBuf::as_path))?);
    if let Some(line) = otherwise {
        log.say(&format!("memfold: {line}\n"));
    }
    let slots = Slots::new()?;
    slots.set_bounds(&config);
    // SAFETY: no thread of memfold uses a robust mutex. Without, processes of the run may leave
    // lines that nobody reads.
    let _ = unsafe { slots.bounds().run_here() };
    let mut remote = crate::remote::start(&mut config, &log)?;

    let environment = environment(&config, &slots, library)?;
    // Whoever knows of the program finds its run.
    let control = Control::listen();
    let child = Child::start(&path, &arguments, environment)?;
    let run = Arc::new(Run { slots, config: Mutex::new(config), arguments, start: Instant::now() });
    // Threads come after the child: signals are blocked by now.
    tend(&run, &log, child.number())?;
    let control = control.and_then(|(control, listener)| control.serve(listener, run.clone()));
    if let Err(e) = &control {
        let why = "memfold run --list, stat and set don't find this run";
        log.say(&format!("memfold: warning: {why}: {}\n", program::plain(e)));
    }
    let end = child.wait()?;
    let seconds = run.start.elapsed().as_secs_f64();
    let largest_bytes = largest_bytes();
    drop(control);
    log.say_left(&run.slots, end.pid as u32);
    if let Some(Err(why)) = remote.as_mut().map(|remote| remote.end()) {
        log.say(&format!("memfold: warning: --remote: {why}\n"));
    }
    if end.dumped {
        warn_of_dump(&run.slots, &log, end.pid as u32);
    }

    if matches.get_flag(SUMMARY) {
        let ended = Ended { status: end.status, largest_bytes };
        log.say(&summary(&run.config(), &run.slots, &ended));
    }
    if let Some(file) = stats_file {
        write_stats(file, &run, end.status, seconds)?;
    }
    Ok(end.status)
}

/// The largest resident size of a process that was waited for, bytes.
fn largest_bytes() -> u64 {
    // SAFETY: zeros are a value of the type, which the kernel fills.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_CHILDREN, &raw mut usage);
        usage
    };
    (usage.ru_maxrss as u64) << 10
}

fn write_stats(file: StatsFile, run: &Run, status: u8, seconds: f64) -> Result<(), Failure> {
    let (config, arguments) = (&run.config(), &run.arguments);
    let about = json::Run { config, arguments, status, seconds };
    file.write(&json::json(&about, &Figures::sum(&run.slots), &run.slots))
}

/// The kernel asks nobody for what is folded when it writes a core dump.
fn warn_of_dump(slots: &Slots, log: &Log, pid: u32) {
    let process = slots.processes().find(|process| process.pid() == pid);
    let folded = process.map_or(0, |process| process.stats().folded_bytes.load(Relaxed));
    if folded > 0 {
        log.say(&format!(
            "memfold: the core dump has zeros in place of {} that were folded; to have them, stop the program in gdb, \
             `call ((int(*)(void))memfold_unfold)()` and use gcore\n",
            Size(folded)
        ));
    }
}

/// Starts three threads: one prints the lines that processes of the run leave, one gives processes
/// the table, and one measures the processes without a seat in it.
fn tend(run: &Arc<Run>, log: &Arc<Log>, command: u32) -> Result<(), Failure> {
    let [for_door, for_looks] = [run.clone(), run.clone()];
    let start = |name: &str, work: Box<dyn FnOnce() + Send>| {
        let started = thread::Builder::new().name(name.to_string()).spawn(work);
        started.map(drop)
    };
    let (follow_run, follow_log) = (run.clone(), log.clone());
    let follow = move |table: &'static Table| {
        let (run, log) = (follow_run.clone(), follow_log.clone());
        start("memfold-log", Box::new(move || log.follow(&run.slots, table, command)))
    };
    let failed = |e| Failure::own(format!("starting a thread: {}", program::plain(&e)));
    follow(run.slots.tables()[0]).map_err(failed)?;
    // If a thread for a further user can't be started, its lines are printed with the next line of
    // another table, or at the end.
    let serve = move || for_door.slots.serve(|table| drop(follow(table)));
    start("memfold-door", Box::new(serve)).map_err(failed)?;
    start("memfold-look", Box::new(move || seatless::watch(&for_looks.slots))).map_err(failed)
}

/// The settings that the command line asks for; they can be kept here as far as that is known
/// without starting anything.
///
/// # Errors
/// One is no setting, or can't be kept: status 125.
pub fn config(matches: &ArgMatches) -> Result<Config, Failure> {
    let mut config = Config::new(machine::memory_bytes());
    if matches.contains_id(DELIVERY) {
        return Err(Failure::own(
            "--delivery: run has no such flag any more, as the gate serves every program; leave it out",
        ));
    }
    for key in flags() {
        if let Some(value) = matches.get_one::<String>(key.name) {
            config.set(key.name, value).map_err(Failure::own)?;
        }
    }
    if config.limit_bytes.is_none()
        && config.resident_bytes.is_none()
        && let Some(bytes) = machine::cgroup_bytes()
    {
        // The rest is for the page cache, the kernel's own and what isn't looked at every moment.
        config.limit_bytes = Some(bytes - bytes / 8);
    }
    if let Some(path) = &config.swap {
        let whole = std::path::absolute(path)
            .map_err(|e| Failure::own(format!("--swap: {path}: {}", program::plain(&e))))?;
        let whole = whole
            .to_str()
            .ok_or_else(|| Failure::own(format!("--swap: {path}: not in UTF-8")))?
            .to_string();
        config.set("swap", &whole).map_err(Failure::own)?;
        // A file made and gone again: what is wrong with it is better said before the program
        // starts.
        FileDisk::open(&whole, FileDiskOptions::default())
            .map_err(|e| Failure::own(format!("--swap: {e}")))?;
    }
    config.check().map_err(Failure::own)?;
    let codec =
        CodecSpec::parse(&config.codec).map_err(|e| Failure::own(format!("--codec: {e}")))?;
    dict::check(&mut config.canned, codec)?;
    if let Some(spec) = &config.recompress {
        CodecSpec::parse(spec).map_err(|e| Failure::own(format!("--recompress: {e}")))?;
    }
    if config.batch > 1 {
        return Err(Failure::own(
            "--batch: run needs 1: its threads are not there in children of fork",
        ));
    }
    Ok(config)
}

/// Whether this process was given an order.
fn is_inside_a_run() -> bool {
    let all = fs::read("/proc/self/environ").unwrap_or_default();
    env::var_os(VARIABLE).is_some_and(|own| !own.is_empty()) || order_in(&all).is_some()
}

/// The preload library: beside this executable, or installed as `../lib/memfold`.
///
/// # Errors
/// It isn't there, or where LD_PRELOAD can't name it: status 125.
pub fn library() -> Result<PathBuf, Failure> {
    let own = env::current_exe()
        .map_err(|e| Failure::own(format!("finding {LIBRARY}: {}", program::plain(&e))))?;
    let beside = own.with_file_name(LIBRARY);
    let installed = own
        .parent()
        .and_then(|bin| bin.parent())
        .map(|prefix| prefix.join("lib/memfold").join(LIBRARY));
    let found = [Some(beside.clone()), installed].into_iter().flatten().find(|path| path.is_file());
    let Some(path) = found else {
        return Err(Failure::own(format!(
            "{} is missing (also from ../lib/memfold)",
            beside.display()
        )));
    };
    if path.as_os_str().as_encoded_bytes().iter().any(|b| matches!(b, b' ' | b':')) {
        let why = "LD_PRELOAD can't name a file with a space or colon in its path; move it";
        return Err(Failure::own(format!("{}: {why}", path.display())));
    }
    Ok(path)
}

/// The environment that memfold was given, in its order, with what the preload library needs.
fn environment(config: &Config, slots: &Slots, library: PathBuf) -> Result<Vec<CString>, Failure> {
    let settings = config.encode().trim_end().replace('\n', ";");
    let order = format!("{VARIABLE}={settings};{}", slots.order());
    let library = library.into_os_string().into_vec();
    environment_with(given(), order.into_bytes(), &library)
        .map_err(|_| Failure::own("a setting has a zero byte in it"))
}

/// `entries`, and behind them a LD_PRELOAD with the library in front of what the last of them loads,
/// and the order: the dynamic linker goes by the last, and the library hides these two.
fn environment_with(
    entries: Vec<CString>,
    order: Vec<u8>,
    library: &[u8],
) -> Result<Vec<CString>, NulError> {
    let is_order = |bytes: &[u8]| {
        bytes.strip_prefix(VARIABLE.as_bytes()).is_some_and(|rest| rest.starts_with(b"="))
    };
    let mut all: Vec<CString> =
        entries.into_iter().filter(|entry| !is_order(entry.as_bytes())).collect();
    let others = all.iter().rev().find_map(|entry| entry.as_bytes().strip_prefix(b"LD_PRELOAD="));
    let others = others.unwrap_or_default();
    let between: &[u8] = if others.is_empty() { b"" } else { b":" };
    let loads = [b"LD_PRELOAD=", library, between, others].concat();
    all.push(CString::new(loads)?);
    all.push(CString::new(order)?);
    Ok(all)
}

/// The entries of this process's environment as they are, also those without a name, or twice.
fn given() -> Vec<CString> {
    unsafe extern "C" {
        static environ: *const *const c_char;
    }
    let mut all = Vec::new();
    // SAFETY: there is one thread and nobody changes the environment; it is null or a
    // null-terminated array of C strings.
    unsafe {
        let mut at = environ;
        while !at.is_null() && !(*at).is_null() {
            all.push(CStr::from_ptr(*at).to_owned());
            at = at.add(1);
        }
    }
    all
}
