//! `memfold run`: runs a program in less memory.
mod end;
pub mod help;

use crate::child::{ChildProgram, end_like_the_program, execute};
use crate::control::{ControlSocket, RunControl};
use crate::failure::{CommandFailure, OWN};
use crate::group::{self, member::GroupMember, member::GroupRequest};
use crate::log::{Log, LogFormat, LogLevel};
use crate::machine::oom::OomCounts;
use crate::printable::printable;
use crate::profile::recorder::Recorder;
use crate::program::Loading;
use crate::report::figures::RunFigures;
use crate::report::json;
use crate::report::notes::RunNotes;
use crate::report::output_file::OutputFile;
use crate::report::recommended::LimitCurve;
use crate::run::end::EndedRun;
use crate::run::help::wrapped;
use crate::table::processes;
use crate::{delivery, dict, machine, program, runs};
use clap::{Arg, ArgAction, ArgMatches, Command, ValueHint, value_parser};
use memfold_engine::config::Config;
use memfold_engine::config::keys::{Audience, KEYS, SettingKey};
use memfold_run::loaded_program::{self, LoadedProgram};
use memfold_run::request::{RunRequest, VARIABLE};
use memfold_run::table::RunTable;
use memfold_store::CodecSpec;
use memfold_swap::disk::file_disk::{FileDisk, FileDiskOptions};
use std::ffi::{CStr, CString, NulError, OsStr, OsString, c_char};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::{env, fs};

const LIBRARY: &str = "libmemfold_preload.so";
const SUMMARY: &str = "summary";
const CURVE: &str = "curve";
const STATS_FILE: &str = "stats-file";
const LOG: &str = "log";
const LOG_LEVEL: &str = "log-level";
const LOG_FORMAT: &str = "log-format";
const WRAPPED: &str = "wrapped";
const NAME: &str = "name";
/// A former flag of `run`.
const DELIVERY: &str = "delivery";
/// Name of the argument with the program and its arguments.
pub const COMMAND: &str = "command";
const LIST: &str = "list";
/// The flag with which `run` executes a program as it is where memfold can't work.
pub const IF_POSSIBLE: &str = "if-possible";
/// The flag with which `run` only checks whether it would work.
pub const CHECK: &str = "check";

/// The codec that compresses the memory of idle processes again. Of a node server's heap, lz4 leaves a
/// third, lz4hc a quarter, and this a tenth.
const IDLE_CODEC: &str = "zstd:3";
/// The slowdown where there is no limit, in ten-thousandths.
const SLOWDOWN: u32 = 200;

/// Returns the keys of [`KEYS`] that are flags of `run`.
fn flags() -> impl Iterator<Item = &'static SettingKey> {
    KEYS.iter().filter(|key| key.audience != Audience::Libraries)
}

/// Returns the command line of `run`: a flag for every such key, and those for reports.
pub fn command() -> Command {
    let keys = flags().map(|key| {
        let help = match key.default {
            // The default depends on the machine.
            "none" => key.help.to_string(),
            default => format!("{} [default: {default}]", key.help),
        };
        Arg::new(key.name).long(key.name).value_name(key.value).help(wrapped(&help))
    });
    let command = Command::new("run")
        .about("Runs a program, within a memory limit or without one, and keeps its cold memory compressed")
        .override_usage("memfold run [--limit SIZE] [OPTIONS] [--] CMD [ARGS]...")
        .args(keys)
        .arg(Arg::new(DELIVERY).long(DELIVERY).num_args(0..=1).hide(true))
        .disable_help_flag(true)
        .args(help::args())
        .arg(
            Arg::new(SUMMARY)
                .long(SUMMARY)
                .value_name("curve")
                .num_args(0..=1)
                .require_equals(true)
                .default_missing_value("")
                .value_parser(["", CURVE])
                .hide_possible_values(true)
                .help(wrapped("Print a summary to stderr at the end; with =curve also the slowdown that larger limits would have cost")),
        )
        .arg(
            Arg::new(STATS_FILE)
                .long(STATS_FILE)
                .value_name("FILE")
                .value_parser(value_parser!(PathBuf))
                .help("Write every counter to FILE as JSON at the end"),
        )
        .arg(
            Arg::new(LOG)
                .long(LOG)
                .value_name("FILE")
                .value_parser(value_parser!(PathBuf))
                .help(wrapped("Append warnings and the summary to FILE instead of stderr")),
        )
        .arg(
            Arg::new(LOG_LEVEL)
                .long(LOG_LEVEL)
                .value_name("error|warning|info")
                .value_parser(value_parser!(LogLevel))
                .hide_possible_values(true)
                .help(wrapped("Print only lines that are at least so urgent: why a process ends, warnings, or all [default: info]")),
        )
        .arg(
            Arg::new(LOG_FORMAT)
                .long(LOG_FORMAT)
                .value_name("text|json")
                .value_parser(value_parser!(LogFormat))
                .hide_possible_values(true)
                .help(wrapped("Print these lines as text, or each as an object of JSON [default: text]")),
        )
        .arg(
            Arg::new(CHECK).long(CHECK).action(ArgAction::SetTrue).help(wrapped(
                "Check whether this run would work here, and print what does not work and why",
            )),
        )
        .arg(
            Arg::new(IF_POSSIBLE)
                .long(IF_POSSIBLE)
                .action(ArgAction::SetTrue)
                .overrides_with(IF_POSSIBLE)
                .help(wrapped("Where memfold can't work (an old kernel, a sandbox, a limit above the machine's memory), run CMD without it, with one warning on stderr")),
        )
        .arg(
            Arg::new(WRAPPED)
                .long(WRAPPED)
                .action(ArgAction::SetTrue)
                .help(wrapped("For scripts of memfold wrap: skip them in PATH, and execute CMD as it is inside another run")),
        )
        .arg(Arg::new(NAME).long(NAME).value_name("NAME").help(wrapped(
            "Name the run in list, stat, top and metrics. The figures of runs with the same name are one series in metrics, also after a new start",
        )))
        .args(group::FLAGS.map(|[name, value, help]| {
            Arg::new(name).long(name).value_name(value).help(wrapped(help))
        }))
        .arg(
            Arg::new(LIST)
                .long(LIST)
                .action(ArgAction::SetTrue)
                .exclusive(true)
                .help("List the runs of this user"),
        )
        .arg(
            Arg::new(COMMAND)
                .value_name("CMD")
                .num_args(0..)
                .trailing_var_arg(true)
                .value_hint(ValueHint::CommandWithArguments)
                .value_parser(value_parser!(OsString))
                .help("The program and its arguments"),
        )
        .after_help(help::SHORT)
        .after_long_help(help::full_text());
    help::shortened(command)
}

/// Returns the command in the words of a `memfold run`, from the program's own name on. Returns `None`
/// if they are those of another command.
pub fn command_in(words: impl Iterator<Item = OsString>) -> Option<Vec<OsString>> {
    let words = words.skip(1).skip_while(|word| word != "run");
    let matches = command().try_get_matches_from(words).ok()?;
    Some(matches.get_many(COMMAND)?.cloned().collect())
}

/// Runs the program. Returns the exit status.
///
/// # Errors
/// 125, 126 or 127 before the program is started, as the help says. 125 also if the stats file
/// can't be completed.
pub fn main(matches: &ArgMatches) -> Result<u8, CommandFailure> {
    if matches.get_flag(LIST) {
        return runs::list();
    }
    run(matches, None)
}

/// Runs the program. Its loads are recorded, if there is a recorder. Returns the exit status.
///
/// # Errors
/// Those of [`main`], and 125 if the recorder can't write its files.
pub fn run(matches: &ArgMatches, recorder: Option<Recorder>) -> Result<u8, CommandFailure> {
    let arguments: Vec<OsString> =
        matches.get_many(COMMAND).map(|all| all.cloned().collect()).unwrap_or_default();
    let Some(program) = arguments.first() else {
        let subcommand = if recorder.is_some() { "record" } else { "run" };
        return Err(CommandFailure::own(format!(
            "No command given. Write memfold {subcommand} [--limit SIZE] -- CMD [ARGS]...",
        )));
    };
    let is_wrapped = matches.get_flag(WRAPPED);
    if is_wrapped && is_inside_a_run() {
        return Err(execute(&find(program, is_wrapped)?, &arguments));
    }
    let plan = match plan(matches, &arguments) {
        Ok(plan) => plan,
        Err(Refusal::Place(why)) if matches.get_flag(IF_POSSIBLE) && why.status == OWN => {
            let path = find(program, is_wrapped)?;
            eprintln!(
                "memfold: warning: {} runs without memfold (--if-possible). Reason: {}",
                printable(&program.to_string_lossy()),
                printable(&why.text)
            );
            return Err(execute(&path, &arguments));
        }
        Err(Refusal::Place(why) | Refusal::Mistake(why)) => return Err(why),
    };
    let RunPlan { mut config, name, group, path, loading, otherwise, library } = plan;
    let stats_file = matches
        .get_one::<PathBuf>(STATS_FILE)
        .map(|name| OutputFile::open("--stats-file", name))
        .transpose()?;
    let log = Arc::new(open_log(matches)?);
    if let Some(line) = otherwise {
        log.say(&format!("memfold: {line}\n"));
    }
    // This forks, so it comes before the run has locks or threads.
    let mut remote = crate::remote::start(&mut config, &log)?;
    let run = Arc::new(RunControl::begin(config, arguments, name, group)?);
    let environment = environment(&run, &library, &path, &loading, recorder.as_ref())?;
    // A process that sees the program must be able to find its run, so the socket is made first.
    let control = ControlSocket::listen();
    let counts = OomCounts::now();
    let child = match &loading {
        Loading::ByLinker => ChildProgram::start(&path, &run.arguments, environment)?,
        Loading::ByLibrary { arguments, .. } => {
            ChildProgram::start(&library, arguments, environment)?
        }
    };
    // Threads are started after the child, because the signals are blocked by then.
    tend(&run, &log, child.number())?;
    let recording = recorder.map(Recorder::start).transpose()?;
    let control = control.and_then(|(control, listener)| control.serve(listener, run.clone()));
    if let Err(e) = &control {
        let why =
            "memfold list, stat and set can't find this run, because its socket could not be made";
        log.say(&format!("memfold: warning: {why}: {}\n", program::plain(e)));
    }
    let end = child.wait()?;
    let run_end = EndedRun::new(&run, &log, &end, &counts);
    drop(control);
    log.say_left(&run.shared.tables, end.pid as u32);
    if let Some(Err(why)) = remote.as_mut().map(|remote| remote.end()) {
        log.say(&format!("memfold: warning: --remote: {why}\n"));
    }
    run_end.explain(&path);
    if let Some(kind) = matches.get_one::<String>(SUMMARY) {
        run_end.sum_up(kind == CURVE);
    }
    let outcome = recording.map_or(Ok(()), |recording| {
        let tables = &run.shared.tables;
        let curve = LimitCurve::of(tables, &RunFigures::sum(tables));
        recording.end(&log, curve.and_then(|curve| curve.limit_for(10.0)))
    });
    if let Some(file) = stats_file {
        write_stats(file, &run, end.status, run_end.seconds)?;
    }
    outcome?;
    if is_wrapped && let Some(signal) = end.signal {
        end_like_the_program(signal);
    }
    Ok(end.status)
}

/// Everything about a run that is settled before it changes anything.
struct RunPlan {
    config: Config,
    name: Option<String>,
    group: Option<GroupRequest>,
    path: PathBuf,
    loading: Loading,
    /// The warning about how memory is paged.
    otherwise: Option<String>,
    library: PathBuf,
}

/// Why there can be no run.
enum Refusal {
    /// A flag or the command is wrong.
    Mistake(CommandFailure),
    /// It may work elsewhere, or for another program.
    Place(CommandFailure),
}

impl From<CommandFailure> for Refusal {
    fn from(failure: CommandFailure) -> Refusal {
        Refusal::Mistake(failure)
    }
}

/// Settles what the run needs.
///
/// # Errors
/// 125, 126 or 127: there can be no such run here.
fn plan(matches: &ArgMatches, arguments: &[OsString]) -> Result<RunPlan, Refusal> {
    // This comes first, because the swap file's check makes one of the calls that a filter may kill
    // for.
    delivery::survives(matches.get_one::<String>("swap").is_some()).map_err(Refusal::Place)?;
    fits_machine(matches).map_err(Refusal::Place)?;
    let mut config = config(matches)?;
    let group = group::request(matches)?;
    let name = matches.get_one::<String>(NAME);
    let name = name.map(|name| group::checked_name(NAME, name)).transpose()?;
    if is_inside_a_run() {
        return Err(Refusal::Place(CommandFailure::own(
            "memfold run can't be nested: this process already runs under memfold run. Run CMD without it.",
        )));
    }
    let path = find(&arguments[0], matches.get_flag(WRAPPED))?;
    let loading = program::loading(&path, arguments).map_err(Refusal::Place)?;
    let otherwise = delivery::settle(&mut config).map_err(Refusal::Place)?;
    let library = library().map_err(Refusal::Place)?;
    Ok(RunPlan { config, name, group, path, loading, otherwise, library })
}

/// Refuses a limit above the memory of this machine. Other mistakes in it are found by [`config`].
fn fits_machine(matches: &ArgMatches) -> Result<(), CommandFailure> {
    let mut config = Config::new(machine::memory_bytes());
    for name in ["limit", "resident"] {
        if let Some(value) = matches.get_one::<String>(name) {
            let _ = config.set(name, value);
        }
    }
    let most = config.limit_bytes.max(config.resident_bytes);
    match most.is_some_and(|bytes| bytes > config.memory_bytes) {
        true => config.check().map_err(CommandFailure::own),
        false => Ok(()),
    }
}

fn open_log(matches: &ArgMatches) -> Result<Log, CommandFailure> {
    let level = matches.get_one(LOG_LEVEL).copied().unwrap_or(LogLevel::Info);
    let format = matches.get_one(LOG_FORMAT).copied().unwrap_or(LogFormat::Text);
    Log::open(matches.get_one::<PathBuf>(LOG).map(PathBuf::as_path), level, format)
}

fn write_stats(
    file: OutputFile,
    run: &RunControl,
    status: u8,
    seconds: f64,
) -> Result<(), CommandFailure> {
    let (config, arguments) = (&run.config(), &run.arguments);
    let about = json::RunReport { config, arguments, status, seconds };
    file.write(&json::json(&about, &RunFigures::sum(&run.shared.tables), &run.shared.tables))
}

/// Starts the threads of the run: one prints the lines that its processes leave, one gives processes
/// the table, and one measures the processes without a slot in it. In a group, one more renews the
/// claim of the run.
fn tend(run: &Arc<RunControl>, log: &Arc<Log>, command: u32) -> Result<(), CommandFailure> {
    let [for_door, for_looks, for_group] = [run.clone(), run.clone(), run.clone()];
    let start = |name: &str, work: Box<dyn FnOnce() + Send>| {
        thread::Builder::new().name(name.to_string()).spawn(work)
    };
    let (follow_run, follow_log) = (run.clone(), log.clone());
    let follow = move |table: &'static RunTable| {
        let (run, log) = (follow_run.clone(), follow_log.clone());
        start("memfold-log", Box::new(move || log.follow(&run.shared.tables, table, command)))
    };
    let failure =
        |e| CommandFailure::own(format!("Starting a thread failed: {}", program::plain(&e)));
    follow(run.shared.tables.tables()[0]).map_err(failure)?;
    let (log, mut notes) = (log.clone(), RunNotes::default());
    let look = move || {
        let tables = &for_looks.shared.tables;
        let mut note = || {
            let now_ns = memfold_os::thread::now_ns();
            for_looks.note_work(now_ns);
            notes.line(tables, now_ns)
        };
        processes::watch(tables, || note().into_iter().for_each(|line| log.say(&line)));
    };
    start("memfold-look", Box::new(look)).map_err(failure)?;
    let serve = move || {
        for_door.shared.serve(|table| {
            for_door.shared.tables.tables()[0].stir();
            // If a thread for another user can't be started, the lines of that user are printed
            // with the next line of another table, or at the end.
            drop(follow(table));
        });
    };
    if run.group.is_some() {
        start("memfold-group", Box::new(move || for_group.tend_group())).map_err(failure)?;
    }
    start("memfold-door", Box::new(serve)).map_err(failure).map(drop)
}

/// Returns the settings of the command line, checked as far as that is possible without starting
/// anything.
///
/// # Errors
/// 125: a setting is unknown, invalid, or impossible here.
pub fn config(matches: &ArgMatches) -> Result<Config, CommandFailure> {
    let mut config = Config::new(machine::memory_bytes());
    if matches.contains_id(DELIVERY) {
        return Err(CommandFailure::own(
            "--delivery: memfold run has no such flag any more, because the gate serves every program. Leave it out.",
        ));
    }
    for key in flags() {
        if let Some(value) = matches.get_one::<String>(key.name) {
            config.set(key.name, value).map_err(CommandFailure::own)?;
        }
    }
    if config.limit_bytes.is_none() && config.resident_bytes.is_none() {
        // The rest is for the page cache, kernel memory, and growth between two samples.
        config.limit_bytes = machine::cgroup_bytes().map(|bytes| bytes - bytes / 8);
    }
    // A run of a group gives what it does not use to the others.
    group::request(matches)?;
    let has_no_bound = config.limit_bytes.is_none() && config.resident_bytes.is_none();
    let is_shared = matches.get_one::<String>(group::GROUP).is_some();
    if (has_no_bound || is_shared) && matches.get_one::<String>("slowdown").is_none() {
        config.slowdown = SLOWDOWN;
    }
    let is_given = |name: &str| matches.get_one::<String>(name).is_some();
    if config.slowdown > 0 && !is_given("recompress") && !is_given("codec") {
        config.recompress = Some(IDLE_CODEC.into());
    }
    if config.slowdown == 0 && matches.get_one::<String>("idle").is_some() {
        return Err(CommandFailure::own(
            "--idle: with a limit, nothing is folded for being idle. Give --slowdown PERCENT too.",
        ));
    }
    if let Some(path) = &config.swap {
        let whole = std::path::absolute(path)
            .map_err(|e| CommandFailure::own(format!("--swap: {path}: {}", program::plain(&e))))?;
        let whole = whole
            .to_str()
            .ok_or_else(|| {
                CommandFailure::own(format!(
                    "--swap: {path}: the path is not valid UTF-8. Give another path."
                ))
            })?
            .to_string();
        config.set("swap", &whole).map_err(CommandFailure::own)?;
        // This makes a file and removes it, so that errors are reported before the program starts.
        FileDisk::open(&whole, FileDiskOptions::default())
            .map_err(|e| CommandFailure::own(format!("--swap: {e}")))?;
    }
    // The group has a limit.
    let limit_bytes = config.limit_bytes.or(is_shared.then_some(config.memory_bytes));
    Config { limit_bytes, ..config.clone() }.check().map_err(CommandFailure::own)?;
    let codec = CodecSpec::parse(&config.codec)
        .map_err(|e| CommandFailure::own(format!("--codec: {e}")))?;
    dict::check(&mut config.canned, codec)?;
    if let Some(spec) = &config.recompress {
        CodecSpec::parse(spec).map_err(|e| CommandFailure::own(format!("--recompress: {e}")))?;
    }
    Ok(config)
}

/// Returns the file that a command means. If a script of `memfold wrap` calls it, no such script is
/// meant.
fn find(name: &OsStr, is_wrapped: bool) -> Result<PathBuf, CommandFailure> {
    let skips = |path: &Path| is_wrapped && program::is_wrapper(path);
    program::find(name, env::var_os("PATH").as_deref(), skips)
}

/// Returns the argument of another command for flags that are for a later run.
pub fn later_flags(help: &'static str) -> Arg {
    Arg::new("flags")
        .value_name("FLAGS")
        .num_args(0..)
        .last(true)
        .allow_hyphen_values(true)
        .help(help)
}

/// Checks flags that are for a later run.
///
/// # Errors
/// 125: `run` would refuse them.
pub fn check_flags(flags: &[String]) -> Result<(), CommandFailure> {
    let line = ["run"].into_iter().chain(flags.iter().map(String::as_str)).chain(["--", "true"]);
    let matches = command().try_get_matches_from(line).map_err(|e| {
        let text = e.to_string();
        CommandFailure::own(text.lines().next().unwrap_or_default().trim_start_matches("error: "))
    })?;
    let words: Vec<&OsString> = matches.get_many(COMMAND).into_iter().flatten().collect();
    if words != ["true"] {
        return Err(CommandFailure::own(format!(
            "{}: is no flag of memfold run",
            words[0].display()
        )));
    }
    for name in [CHECK, LIST, WRAPPED] {
        if matches.get_flag(name) {
            return Err(CommandFailure::own(format!("--{name}: can't be a flag of a later run")));
        }
    }
    for name in [LOG, STATS_FILE] {
        if matches.get_one::<PathBuf>(name).is_some_and(|path| path.is_relative()) {
            return Err(CommandFailure::own(format!(
                "--{name}: give an absolute path, because a later run may be in any directory"
            )));
        }
    }
    config(&matches).map(drop)
}

/// Returns whether this process runs under `memfold run`.
fn is_inside_a_run() -> bool {
    let all = fs::read("/proc/self/environ").unwrap_or_default();
    env::var_os(VARIABLE).is_some_and(|own| !own.is_empty()) || RunRequest::find(&all).is_some()
}

/// Returns the path of the preload library: beside this executable, or installed as
/// `../lib/memfold`.
///
/// # Errors
/// 125: the library is missing, or LD_PRELOAD can't name its path.
pub fn library() -> Result<PathBuf, CommandFailure> {
    let own = env::current_exe().map_err(|e| {
        CommandFailure::own(format!("Finding {LIBRARY} failed: {}", program::plain(&e)))
    })?;
    let sibling = own.with_file_name(LIBRARY);
    let installed_path = own
        .parent()
        .and_then(|bin| bin.parent())
        .map(|prefix| prefix.join("lib/memfold").join(LIBRARY));
    let path =
        [Some(sibling.clone()), installed_path].into_iter().flatten().find(|path| path.is_file());
    let Some(path) = path else {
        return Err(CommandFailure::own(format!(
            "{} is missing, also from ../lib/memfold. Keep it beside memfold, or install it there.",
            sibling.display()
        )));
    };
    if path.as_os_str().as_encoded_bytes().iter().any(|b| matches!(b, b' ' | b':')) {
        let why = "LD_PRELOAD can't name a file with a space or a colon in its path. Move memfold and its library.";
        return Err(CommandFailure::own(format!("{}: {why}", path.display())));
    }
    Ok(path)
}

/// Returns the environment that memfold was given, in its order, with the preload library's
/// variables.
fn environment(
    run: &RunControl,
    library: &Path,
    name: &Path,
    loading: &Loading,
    recorder: Option<&Recorder>,
) -> Result<Vec<CString>, CommandFailure> {
    let mut config = run.config();
    let of_group = run.group.as_ref().map(GroupMember::limit_bytes);
    let of_group = of_group.map(|bytes| bytes.min(config.memory_bytes));
    config.limit_bytes = config.limit_bytes.into_iter().chain(of_group).min();
    let mut request = format!("{VARIABLE}={}", run.shared.request(&config.encode()));
    if let Some(recorder) = recorder {
        RunRequest::add_samples(&mut request, &recorder.path());
    }
    let library = library.as_os_str().as_bytes();
    let mut program = Vec::new();
    if let Loading::ByLibrary { path, .. } = loading {
        let (path, name) = (path.as_os_str().as_bytes(), name.as_os_str().as_bytes());
        program.extend_from_slice(loaded_program::VARIABLE.as_bytes());
        program.push(b'=');
        LoadedProgram { path, name, descriptor: None }
            .write(&mut |part| program.extend_from_slice(part));
    }
    environment_with(given(), request.into_bytes(), library, program).map_err(|_| {
        CommandFailure::own(
            "A setting contains a zero byte, which the environment can't pass on. Remove it.",
        )
    })
}

/// Returns `entries`, followed by two more, and by `program` if that isn't empty. The first is an
/// LD_PRELOAD with the library before the libraries of the last LD_PRELOAD. The second is the
/// request. The dynamic linker uses the last LD_PRELOAD, and the library hides these entries.
fn environment_with(
    entries: Vec<CString>,
    request: Vec<u8>,
    library: &[u8],
    program: Vec<u8>,
) -> Result<Vec<CString>, NulError> {
    let is_request = |bytes: &[u8]| {
        bytes.strip_prefix(VARIABLE.as_bytes()).is_some_and(|rest| rest.starts_with(b"="))
    };
    let mut all: Vec<CString> =
        entries.into_iter().filter(|entry| !is_request(entry.as_bytes())).collect();
    let others = all.iter().rev().find_map(|entry| entry.as_bytes().strip_prefix(b"LD_PRELOAD="));
    let others = others.unwrap_or_default();
    let between: &[u8] = if others.is_empty() { b"" } else { b":" };
    let loads = [b"LD_PRELOAD=", library, between, others].concat();
    all.push(CString::new(loads)?);
    all.push(CString::new(request)?);
    if !program.is_empty() {
        all.push(CString::new(program)?);
    }
    Ok(all)
}

/// Returns the entries of this process's environment unchanged, including entries without a name
/// and duplicates.
fn given() -> Vec<CString> {
    unsafe extern "C" {
        static environ: *const *const c_char;
    }
    let mut all = Vec::new();
    // SAFETY: there is one thread, and nothing changes the environment. `environ` is null or a
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
