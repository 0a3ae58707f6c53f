//! `memfold jupyter`: a kernelspec whose kernel runs under `memfold run`.
//!
//! A kernelspec is a directory with a `kernel.json`, which names the command to start. This one
//! puts `memfold run --limit SIZE --` in front of another command, and leaves the rest unchanged.
use crate::failure::CommandFailure;
use crate::{program, run};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use serde_json::{Value, json};
use std::env;
use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// Default name of the directory.
const NAME: &str = "memfold-python3";

/// Returns the command line of `jupyter`.
pub fn command() -> Command {
    let path = |name: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name("PATH").value_parser(value_parser!(PathBuf)).help(help)
    };
    Command::new("jupyter")
        .about("Writes a Jupyter kernelspec whose kernel runs under memfold run")
        .override_usage("memfold jupyter --limit SIZE [OPTIONS] [-- FLAGS of memfold run]")
        .arg(Arg::new("limit").long("limit").value_name("SIZE").required(true).help("Limit of the kernel, as in memfold run"))
        .arg(path("dir", "Directory of the kernelspec [default: kernels/memfold-python3 in this user's Jupyter data directory]"))
        .arg(path("from", "kernel.json whose command is to run under memfold [default: ipykernel of --python]"))
        .arg(path("python", "Python interpreter of the kernel [default: python3 in PATH]"))
        .arg(Arg::new("force").long("force").action(ArgAction::SetTrue).help("Replace an existing kernel.json"))
        .arg(run::later_flags("Further flags of memfold run"))
}

/// Writes the kernelspec, and prints its path.
///
/// # Errors
/// 125: a setting that `run` would refuse, no Python, or a file that exists or can't be written.
pub fn main(matches: &ArgMatches) -> Result<u8, CommandFailure> {
    let limit = matches.get_one::<String>("limit").cloned().unwrap_or_default();
    let mut flags = vec![format!("--limit={limit}")];
    flags.extend(matches.get_many::<String>("flags").into_iter().flatten().cloned());
    // Now, because Jupyter does not show why a kernel can't start.
    run::check_flags(&flags)?;
    let mut spec = match matches.get_one::<PathBuf>("from") {
        Some(path) => read(path)?,
        None => ipykernel(matches.get_one::<PathBuf>("python").map(PathBuf::as_path))?,
    };
    let own = program::own_path()?;
    let before = [vec![own, "run".into()], flags, vec!["--".into()]].concat();
    let argv = spec["argv"].as_array().cloned().unwrap_or_default();
    if argv.is_empty() || argv.iter().any(|word| !word.is_string()) {
        return Err(CommandFailure::own(
            "--from: the file has no argv, so it names no command. Give another kernel.json.",
        ));
    }
    spec["argv"] = before.into_iter().map(Value::from).chain(argv).collect();
    let name = spec["display_name"].as_str().unwrap_or("kernel").to_string();
    spec["display_name"] = format!("{name} in {limit} (memfold)").into();
    let directory = match matches.get_one::<PathBuf>("dir") {
        Some(path) => path.clone(),
        None => directory()?,
    };
    let path = write(&directory, &spec, matches.get_flag("force"))?;
    say!("{}", path.display());
    Ok(0)
}

fn read(path: &Path) -> Result<Value, CommandFailure> {
    let fail = |why: String| CommandFailure::own(format!("--from: {}: {why}", path.display()));
    let text = fs::read_to_string(path).map_err(|e| fail(program::plain(&e)))?;
    let spec: Value = serde_json::from_str(&text).map_err(|e| fail(e.to_string()))?;
    if spec.is_object() { Ok(spec) } else { Err(fail("not a JSON object".to_string())) }
}

/// Returns the kernelspec that ipykernel itself installs.
fn ipykernel(python: Option<&Path>) -> Result<Value, CommandFailure> {
    let python = python.map_or(OsStr::new("python3"), Path::as_os_str);
    let path = program::find(python, env::var_os("PATH").as_deref(), program::is_wrapper)?;
    program::loading(&path, &[])?;
    // The path is absolute but keeps links, because a virtual environment is recognized by its
    // link.
    let path = std::path::absolute(path).map_err(|e| CommandFailure::own(program::plain(&e)))?;
    Ok(json!({
        "argv": [text(&path)?, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "Python 3",
        "language": "python",
        "metadata": { "debugger": true },
    }))
}

fn text(path: &Path) -> Result<String, CommandFailure> {
    let not = || {
        CommandFailure::own(format!(
            "{}: the path is not valid UTF-8. A kernel.json can't name it.",
            path.display()
        ))
    };
    path.to_str().map(str::to_string).ok_or_else(not)
}

/// Returns the directory in which Jupyter looks for a user's own kernelspecs.
fn directory() -> Result<PathBuf, CommandFailure> {
    let data = match env::var_os("JUPYTER_DATA_DIR").filter(|value| !value.is_empty()) {
        Some(path) => PathBuf::from(path),
        None => program::user_folder("XDG_DATA_HOME", ".local/share")
            .map_err(|_| CommandFailure::own("--dir: give it, because HOME is not set"))?
            .join("jupyter"),
    };
    Ok(data.join("kernels").join(NAME))
}

fn write(directory: &Path, spec: &Value, force: bool) -> Result<PathBuf, CommandFailure> {
    let path = directory.join("kernel.json");
    let fail = |e: std::io::Error| match e.kind() {
        ErrorKind::AlreadyExists => CommandFailure::own(format!(
            "{}: the file exists already. Give --force to replace it.",
            path.display()
        )),
        _ => CommandFailure::own(format!("{}: {}", path.display(), program::plain(&e))),
    };
    fs::create_dir_all(directory).map_err(fail)?;
    let mut how = OpenOptions::new();
    how.write(true).create(force).truncate(force).create_new(!force);
    let mut file = how.open(&path).map_err(fail)?;
    file.write_all(format!("{spec:#}\n").as_bytes()).map_err(fail)?;
    Ok(path)
}
