//! The program to run: its path, and whether the preload library can work in it.
mod elf;

use crate::failure::CommandFailure;
use crate::program::elf::Elf;
use std::ffi::{CStr, CString, OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, ErrorKind};
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

/// Returns the file that `name` means. If `name` has no slash, it is searched in `search`, the
/// value of PATH.
///
/// # Errors
/// - 127: the file was not found.
/// - 126: the file is a directory or has no execute permission.
pub fn find(name: &OsStr, search: Option<&OsStr>) -> Result<PathBuf, CommandFailure> {
    let shown = name.display();
    if name.as_bytes().contains(&b'/') {
        let path = PathBuf::from(name);
        return match executable(&path) {
            Ok(()) => Ok(path),
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                Err(CommandFailure::not_found(format!("{shown}: {}", plain(&e))))
            }
            Err(e) => Err(CommandFailure::not_executable(format!("{shown}: {}", plain(&e)))),
        };
    }
    let mut refused = None;
    let search = search.unwrap_or(OsStr::new(PATH_DEFAULT));
    for directory in search.as_bytes().split(|&b| b == b':').filter(|_| !name.is_empty()) {
        // An empty entry is the working directory.
        let directory = if directory.is_empty() { b"." } else { directory };
        let path = Path::new(OsStr::from_bytes(directory)).join(name);
        match executable(&path) {
            Ok(()) => return Ok(path),
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {}
            Err(e) => refused = refused.or(Some(format!("{}: {}", path.display(), plain(&e)))),
        }
    }
    Err(match refused {
        Some(why) => CommandFailure::not_executable(why),
        None => CommandFailure::not_found(format!("{shown}: command not found")),
    })
}

/// Checks that the dynamic linker will load the preload library into the program at `path`. For a
/// script, checks its interpreter, or the shell if the kernel finds no interpreter. If the program
/// is the dynamic linker itself, checks the program that `arguments` name. The first of them is the
/// linker's own name.
///
/// # Errors
/// - 125: the program is static, set-user-ID or the like, for another machine, or for another C
///   library.
/// - 126: an ELF file that is no program.
/// - 127: a script's interpreter is missing.
pub fn check(path: &Path, arguments: &[OsString]) -> Result<(), CommandFailure> {
    let mut at = path.to_path_buf();
    for _ in 0..=SCRIPTS_MAX {
        let shown = at.display();
        let file = File::open(&at).map_err(|e| match e.kind() {
            ErrorKind::PermissionDenied => CommandFailure::own(format!(
                "{shown}: can't be read, so memfold can't tell whether it can manage it"
            )),
            _ => CommandFailure::not_executable(format!("{shown}: {}", plain(&e))),
        })?;
        if let Some(next) = script_interpreter(&file, &at)? {
            at = next;
            continue;
        }
        if !elf::is_one(&file) {
            at = PathBuf::from(OsStr::from_bytes(SHELL.to_bytes()));
            let shell = File::open(&at).map_err(|e| {
                CommandFailure::not_executable(format!("{}: {}", at.display(), plain(&e)))
            })?;
            return check_image(&shell, &at);
        }
        return match at == path && is_own_linker(path) {
            true => check_linked(arguments),
            false => check_image(&file, &at),
        };
    }
    Err(CommandFailure::not_executable(format!(
        "{}: too many scripts that name scripts",
        path.display()
    )))
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
            return File::open(path).map_or(Ok(()), |file| check_elf(&file, path));
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

fn check_image(file: &File, path: &Path) -> Result<(), CommandFailure> {
    check_elf(file, path)?;
    match privilege(file)? {
        None => Ok(()),
        Some(what) => Err(CommandFailure::own(format!(
            "{}: {what}; the dynamic linker ignores memfold in programs that gain privileges",
            path.display()
        ))),
    }
}

fn check_elf(file: &File, path: &Path) -> Result<(), CommandFailure> {
    let shown = path.display();
    let elf = elf::read(file)
        .map_err(|e| CommandFailure::not_executable(format!("{shown}: exec format error: {e}")))?;
    let interpreter = match elf {
        None => {
            let why = "exec format error: not an ELF program";
            return Err(CommandFailure::not_executable(format!("{shown}: {why}")));
        }
        Some(Elf::Foreign(machine)) => {
            return Err(CommandFailure::own(format!(
                "{shown}: a program for another machine ({machine}); memfold manages {} programs only",
                std::env::consts::ARCH
            )));
        }
        Some(Elf::Native { interpreter: None }) => {
            return Err(CommandFailure::own(format!(
                "{shown}: statically linked; memfold can manage only programs that load shared libraries"
            )));
        }
        Some(Elf::Native { interpreter: Some(name) }) => name,
    };
    let ours = own_interpreter().and_then(|own| own.file_name().map(OsString::from));
    match (Path::new(&interpreter).file_name(), ours) {
        (theirs, Some(ours)) if theirs != Some(&ours) => Err(CommandFailure::own(format!(
            "{shown}: uses another C library ({interpreter}); this memfold was built for {}",
            ours.display()
        ))),
        _ => Ok(()),
    }
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

/// Returns the interpreter of the script `file`, or `None` if it isn't a script. `#!/usr/bin/env
/// NAME` means NAME.
fn script_interpreter(file: &File, script: &Path) -> Result<Option<PathBuf>, CommandFailure> {
    let mut start = [0u8; FIRST_LINE_LEN];
    let len = elf::read_up_to(file, &mut start).map_err(|e| {
        CommandFailure::not_executable(format!("{}: {}", script.display(), plain(&e)))
    })?;
    let Some(line) = start[..len].strip_prefix(b"#!") else { return Ok(None) };
    let line = line.split(|&b| b == b'\n').next().unwrap_or_default();
    let mut words = line.split(|b| matches!(b, b' ' | b'\t' | 0)).filter(|w| !w.is_empty());
    let bad = |why: &str| format!("{}: bad interpreter: {why}", script.display());
    let Some(first) = words.next() else {
        return Err(CommandFailure::not_executable(bad("none is named")));
    };
    let path = PathBuf::from(OsString::from_vec(first.to_vec()));
    if let Err(e) = executable(&path) {
        let text = bad(&format!("{}: {}", path.display(), plain(&e)));
        let missing = matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory);
        return Err(if missing {
            CommandFailure::not_found(text)
        } else {
            CommandFailure::not_executable(text)
        });
    }
    if path.file_name() == Some(OsStr::new("env")) {
        let name = words.find(|w| !w.starts_with(b"-") && !w.contains(&b'='));
        let found =
            name.and_then(|n| find(OsStr::from_bytes(n), std::env::var_os("PATH").as_deref()).ok());
        // If env won't find the program, env itself reports that.
        return Ok(Some(found.unwrap_or(path)));
    }
    Ok(Some(path))
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
