//! The program to run: its path, and whether the preload library can work in it.
mod elf;

use crate::failure::CommandFailure;
use crate::program::elf::Elf;
use std::ffi::{CStr, CString, OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// The value that the C library uses if PATH is not set.
const PATH_DEFAULT: &str = "/bin:/usr/bin";
/// The shell that executes files that the kernel can't execute, as with execvp.
pub const SHELL: &CStr = c"/bin/sh";
/// How many scripts may name one another. The kernel has the same bound.
const SCRIPTS_MAX: usize = 5;
/// Bytes of a script's first line that the kernel reads.
const FIRST_LINE_LEN: usize = 256;

/// Returns this executable's path as text.
pub fn own_path() -> Result<String, CommandFailure> {
    let own = std::env::current_exe().map_err(|e| CommandFailure::own(plain(&e)))?;
    own.to_str().map(str::to_string).ok_or_else(|| {
        CommandFailure::own(format!(
            "{}: the path is not valid UTF-8. Move memfold.",
            own.display()
        ))
    })
}

/// Returns a directory of this user: that of a variable, or one below HOME.
pub fn user_folder(variable: &str, below_home: &str) -> Result<PathBuf, CommandFailure> {
    let set =
        |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let directory =
        set(variable).or_else(|| set("HOME").map(|home_directory| home_directory.join(below_home)));
    directory
        .ok_or_else(|| CommandFailure::own("The user has no directory, because HOME is not set."))
}

/// The first lines of a script of `memfold wrap`.
pub const WRAPPER_BEGIN: &str = "#!/bin/sh\n# Made by memfold wrap";

/// Returns whether a file is a script of `memfold wrap`.
pub fn is_wrapper(path: &Path) -> bool {
    let mut begin = [0; WRAPPER_BEGIN.len()];
    // To open a pipe would wait for its other end.
    let is_file = fs::metadata(path).is_ok_and(|about| about.is_file());
    let mut read_begin = || File::open(path).and_then(|mut file| file.read_exact(&mut begin));
    is_file && read_begin().is_ok() && begin == *WRAPPER_BEGIN.as_bytes()
}

/// Returns the file that `name` means. If `name` has no slash, it is searched in `search`, the
/// value of PATH. Files that `skips` selects are passed over there.
///
/// # Errors
/// - 127: the file was not found.
/// - 126: the file is a directory or has no execute permission.
pub fn find(
    name: &OsStr,
    search: Option<&OsStr>,
    skips: impl Fn(&Path) -> bool,
) -> Result<PathBuf, CommandFailure> {
    let name_shown = name.display();
    if name.as_bytes().contains(&b'/') {
        let path = PathBuf::from(name);
        return match executable(&path) {
            Ok(()) => Ok(path),
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                Err(CommandFailure::not_found(format!("{name_shown}: {}", plain(&e))))
            }
            Err(e) => Err(CommandFailure::not_executable(format!("{name_shown}: {}", plain(&e)))),
        };
    }
    let mut refusal = None;
    let search = search.unwrap_or(OsStr::new(PATH_DEFAULT));
    for directory in search.as_bytes().split(|&b| b == b':').filter(|_| !name.is_empty()) {
        // An empty entry is the working directory.
        let directory = if directory.is_empty() { b"." } else { directory };
        let path = Path::new(OsStr::from_bytes(directory)).join(name);
        match executable(&path) {
            Ok(()) if skips(&path) => {}
            Ok(()) => return Ok(path),
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {}
            Err(e) => refusal = refusal.or(Some(format!("{}: {}", path.display(), plain(&e)))),
        }
    }
    Err(match refusal {
        Some(why) => CommandFailure::not_executable(why),
        None => CommandFailure::not_found(format!("{name_shown}: command not found")),
    })
}

/// How memfold's library gets into a program.
#[derive(Debug, PartialEq, Eq)]
pub enum Loading {
    /// The dynamic linker loads it.
    ByLinker,
    /// The library is executed, and loads the program itself.
    ByLibrary {
        /// The file of the program.
        path: PathBuf,
        /// Its arguments. The first is its name.
        arguments: Vec<OsString>,
    },
}

/// Decides how the preload library gets into the program at `path`. For a script, that is its
/// interpreter, or the shell if the kernel finds no interpreter. If the program is the dynamic
/// linker itself, this checks the program that `arguments` name. The first of them is the linker's
/// own name.
///
/// # Errors
/// - 125: the program is set-user-ID or the like, or for another machine.
/// - 126: an ELF file that is no program.
/// - 127: the interpreter of a script or of an ELF file is missing.
pub fn loading(path: &Path, arguments: &[OsString]) -> Result<Loading, CommandFailure> {
    let (mut at, mut arguments) = (path.to_path_buf(), arguments.to_vec());
    for _ in 0..=SCRIPTS_MAX {
        let path_shown = at.display();
        let file = File::open(&at).map_err(|e| match e.kind() {
            ErrorKind::PermissionDenied => CommandFailure::own(format!(
                "{path_shown}: can't be read, so memfold can't tell whether it can manage it"
            )),
            _ => CommandFailure::not_executable(format!("{path_shown}: {}", plain(&e))),
        })?;
        if let Some(Script { interpreter, argument, means }) = script(&file, &at)? {
            if let Some(program) = means {
                loading(&program, &[program.clone().into_os_string()])?;
            }
            let first = arguments.drain(..arguments.len().min(1)).count();
            debug_assert!(first <= 1);
            let words = [Some(interpreter.clone().into_os_string()), argument, Some(at.into())];
            arguments.splice(0..0, words.into_iter().flatten());
            at = interpreter;
            continue;
        }
        if !elf::is_one(&file) {
            let shell = PathBuf::from(OsStr::from_bytes(SHELL.to_bytes()));
            let file = File::open(&shell).map_err(|e| {
                CommandFailure::not_executable(format!("{}: {}", shell.display(), plain(&e)))
            })?;
            let is_linked = check_image(&file, &shell)?;
            arguments.splice(0..arguments.len().min(1), [shell.clone().into(), at.into()]);
            return Ok(way(is_linked, shell, arguments));
        }
        if at == path && is_own_linker(path) {
            return check_linked(&arguments).map(|()| Loading::ByLinker);
        }
        let is_linked = check_image(&file, &at)?;
        return Ok(way(is_linked, at, arguments));
    }
    Err(CommandFailure::not_executable(format!(
        "{}: too many scripts that name scripts",
        path.display()
    )))
}

fn way(is_linked: bool, path: PathBuf, arguments: Vec<OsString>) -> Loading {
    if is_linked { Loading::ByLinker } else { Loading::ByLibrary { path, arguments } }
}

/// Options of the dynamic linker that take a value.
const LINKER_OPTIONS: [&str; 7] = [
    "--library-path",
    "--glibc-hwcaps-prepend",
    "--glibc-hwcaps-mask",
    "--inhibit-rpath",
    "--audit",
    "--preload",
    "--argv0",
];

/// Checks the program that the dynamic linker is given. If it can't be opened, or none is given,
/// the linker reports that itself.
fn check_linked(arguments: &[OsString]) -> Result<(), CommandFailure> {
    let mut words = arguments.iter().skip(1);
    while let Some(word) = words.next() {
        if LINKER_OPTIONS.iter().any(|option| word == option) {
            words.next();
        } else if !word.as_bytes().starts_with(b"-") {
            let path = Path::new(word);
            // The linker ignores set-user-ID bits and capabilities of the file.
            let is_linked = File::open(path).map_or(Ok(true), |file| check_elf(&file, path))?;
            return match is_linked {
                true => Ok(()),
                false => Err(CommandFailure::own(format!(
                    "{}: the dynamic linker can't load it with memfold's library. Run it without the linker",
                    path.display()
                ))),
            };
        }
    }
    Ok(())
}

/// Returns whether this file is the dynamic linker of memfold's own C library.
fn is_own_linker(path: &Path) -> bool {
    let real = |path: &Path| fs::canonicalize(path).ok();
    own_interpreter().is_some_and(|own| {
        path.file_name() == own.file_name() || real(path).is_some_and(|it| Some(it) == real(&own))
    })
}

/// Returns whether the dynamic linker loads the library into this program.
fn check_image(file: &File, path: &Path) -> Result<bool, CommandFailure> {
    let is_linked = check_elf(file, path)?;
    match privilege(file)? {
        None => Ok(is_linked),
        Some(what) => Err(CommandFailure::own(format!(
            "{}: {what}; the dynamic linker ignores memfold in programs that gain privileges",
            path.display()
        ))),
    }
}

/// Returns whether the program's dynamic linker is that of memfold's own C library.
fn check_elf(file: &File, path: &Path) -> Result<bool, CommandFailure> {
    let path_shown = path.display();
    let elf = elf::read(file).map_err(|e| {
        CommandFailure::not_executable(format!("{path_shown}: exec format error: {e}"))
    })?;
    let interpreter = match elf {
        None => {
            let why = "exec format error: not an ELF program";
            return Err(CommandFailure::not_executable(format!("{path_shown}: {why}")));
        }
        Some(Elf::Foreign(machine)) => {
            return Err(CommandFailure::own(format!(
                "{path_shown}: a program for another machine ({machine}); memfold manages {} programs only",
                std::env::consts::ARCH
            )));
        }
        Some(Elf::Native { interpreter: None }) => return Ok(false),
        Some(Elf::Native { interpreter: Some(name) }) => PathBuf::from(name),
    };
    let ours = own_interpreter().and_then(|own| own.file_name().map(OsString::from));
    if ours.is_none() || interpreter.file_name() == ours.as_deref() {
        return Ok(true);
    }
    if let Err(e) = File::open(&interpreter) {
        return Err(CommandFailure::not_found(format!(
            "{path_shown}: its dynamic linker {}: {}",
            interpreter.display(),
            plain(&e)
        )));
    }
    Ok(false)
}

/// Returns the dynamic linker that memfold, and so its preload library, uses. Returns `None` for a
/// static build.
fn own_interpreter() -> Option<PathBuf> {
    match elf::read(&File::open("/proc/self/exe").ok()?) {
        Ok(Some(Elf::Native { interpreter: Some(name) })) => Some(PathBuf::from(name)),
        _ => None,
    }
}

/// Returns how a program gains privileges when it is executed, if it does. The mode bits count even
/// if this user gains nothing by them, so that refusals do not depend on the user.
fn privilege(file: &File) -> Result<Option<&'static str>, CommandFailure> {
    let mode = file.metadata().map_err(|e| CommandFailure::own(plain(&e)))?.permissions().mode();
    if mode & libc::S_ISUID != 0 {
        return Ok(Some("a set-user-ID program"));
    }
    // Without the group's execute bit, the set-group-ID bit means mandatory locking.
    if mode & libc::S_ISGID != 0 && mode & libc::S_IXGRP != 0 {
        return Ok(Some("a set-group-ID program"));
    }
    use std::os::fd::AsRawFd;
    // SAFETY: the name is a C string. With size 0 the kernel writes no value, so the pointer may be
    // null.
    let len = unsafe {
        libc::fgetxattr(file.as_raw_fd(), c"security.capability".as_ptr(), std::ptr::null_mut(), 0)
    };
    Ok((len > 0).then_some("a program with file capabilities"))
}

/// The first line of a script.
struct Script {
    interpreter: PathBuf,
    argument: Option<OsString>,
    /// The program that the interpreter executes, if it is `env`.
    means: Option<PathBuf>,
}

/// Returns what the first line of the script `file` names, or `None` if it isn't a script.
fn script(file: &File, script: &Path) -> Result<Option<Script>, CommandFailure> {
    let mut start = [0u8; FIRST_LINE_LEN];
    let len = elf::read_up_to(file, &mut start).map_err(|e| {
        CommandFailure::not_executable(format!("{}: {}", script.display(), plain(&e)))
    })?;
    let Some(line) = start[..len].strip_prefix(b"#!") else { return Ok(None) };
    let line = line.split(|&b| b == b'\n').next().unwrap_or_default();
    let is_blank = |b: &u8| matches!(b, b' ' | b'\t' | 0);
    let mut words = line.split(is_blank).filter(|w| !w.is_empty());
    let bad = |why: &str| format!("{}: bad interpreter: {why}", script.display());
    let Some(first) = words.next() else {
        return Err(CommandFailure::not_executable(bad("none is named")));
    };
    let path = PathBuf::from(OsString::from_vec(first.to_vec()));
    if let Err(e) = executable(&path) {
        let text = bad(&format!("{}: {}", path.display(), plain(&e)));
        let is_missing = matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory);
        return Err(if is_missing {
            CommandFailure::not_found(text)
        } else {
            CommandFailure::not_executable(text)
        });
    }
    // The kernel passes the rest of the line as one argument.
    let rest = line.trim_ascii_start().strip_prefix(first).unwrap_or_default();
    let rest = rest.trim_ascii();
    let argument = (!rest.is_empty()).then(|| OsString::from_vec(rest.to_vec()));
    let mut means = None;
    if path.file_name() == Some(OsStr::new("env")) {
        let name = words.find(|w| !w.starts_with(b"-") && !w.contains(&b'='));
        // If env won't find the program, env itself reports that.
        means = name.and_then(|n| {
            find(OsStr::from_bytes(n), std::env::var_os("PATH").as_deref(), |_| false).ok()
        });
    }
    Ok(Some(Script { interpreter: path, argument, means }))
}

/// Returns the name of the file that the kernel executes for the program at `path`: for a script,
/// that of its interpreter, or of the program that `env` executes.
pub fn image_name(path: &Path) -> String {
    let mut at = path.to_path_buf();
    for _ in 0..=SCRIPTS_MAX {
        match File::open(&at).map(|file| script(&file, &at)) {
            Ok(Ok(Some(Script { interpreter, means, .. }))) => at = means.unwrap_or(interpreter),
            _ => break,
        }
    }
    at.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Checks that `path` is a file that this user may execute.
///
/// # Errors
/// The reason why it is not.
fn executable(path: &Path) -> io::Result<()> {
    if fs::metadata(path)?.is_dir() {
        return Err(ErrorKind::IsADirectory.into());
    }
    let name = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: the name is a C string that outlives the call.
    if unsafe { libc::access(name.as_ptr(), libc::X_OK) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Returns an error's text without Rust's `(os error 2)`.
pub fn plain(error: &io::Error) -> String {
    let text = error.to_string();
    match text.find(" (os error") {
        Some(end) => text[..end].to_string(),
        None => text,
    }
}
