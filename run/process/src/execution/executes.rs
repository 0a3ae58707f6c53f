//! The program that is about to be executed. It is given the variables that load memfold into it
//! (`environment.rs`), or memfold's library is executed in its place and loads it (`loader/`). If
//! memfold can't be in it, it runs as without memfold, and is counted in the run's table. If the run
//! itself is given such a program, `memfold run` refuses it (`run/cli/src/program`).
//!
//! A filter of system calls may kill a thread that makes a call that the filter doesn't know. So
//! under `no_new_privs`, where there may be a filter, only those calls are made that the dynamic
//! linker of the new program will make anyway: open, stat, read, close. A static program has none,
//! so `access` is added for it.
use crate::execution::environment::{self, PassedOn};
use crate::execution::method::{self, ExecMethod, PATH_BYTES, ScriptWords, open, replace};
use crate::limits;
use core::ffi::CStr;
use memfold_gate::read_bytes;
use memfold_gate::syscalls::program_at;
use memfold_os::raw::renumber;
use memfold_os::text::path_of;
use memfold_run::loaded_program::{LoadedProgram, VARIABLE};
use memfold_run::member;
use memfold_run::table::UNMANAGED_BYTES_MAX;
use rustix::fd::{AsRawFd, OwnedFd, RawFd};
use rustix::io::{FdFlags, fcntl_setfd};

/// Most arguments of a script whose interpreter the library loads. A script with more runs
/// unmanaged.
const SCRIPT_ARGUMENTS_MAX: usize = 2000;
/// The least number of the descriptor of a program that has no path.
const DESCRIPTOR_LEAST: i32 = 64;

/// A call of `execve` or `execveat`.
struct ExecCall {
    /// Its arguments. `/proc/self/exe` is replaced by the program's path.
    args: [usize; 6],
    by_fd: bool,
    /// Where its path begins. [`libc::AT_FDCWD`] also if a descriptor names the program itself.
    from: RawFd,
    /// Whether a descriptor names the program itself.
    is_open: bool,
}

impl ExecCall {
    /// Returns the index of the array of arguments; the environment follows.
    fn arguments_at(&self) -> usize {
        if self.by_fd { 2 } else { 1 }
    }

    /// Returns the arguments of the call with another environment.
    fn with(&self, environment: usize) -> [usize; 6] {
        let mut args = self.args;
        args[self.arguments_at() + 1] = environment;
        args
    }

    /// Returns the arguments of the call that executes the library.
    fn of_library(&self, library: &CStr, arguments: usize, environment: usize) -> [usize; 6] {
        let path = library.as_ptr() as usize;
        match self.by_fd {
            true => [libc::AT_FDCWD as usize, path, arguments, environment, 0, 0],
            false => [path, arguments, environment, 0, 0, 0],
        }
    }
}

/// Makes `execve` or `execveat` by `make`, which is given the arguments to pass.
pub fn execute(nr: usize, args: &[usize; 6], make: &mut dyn FnMut(&[usize; 6]) -> isize) -> isize {
    let Some(library) = environment::library_path() else { return make(args) };
    let by_fd = nr as i64 == libc::SYS_execveat;
    let path = if by_fd { args[1] } else { args[0] };
    let mut name = [0u8; PATH_BYTES];
    let Some(len) = read_name(path, &mut name) else { return make(args) };
    let from = if by_fd { args[0] as RawFd } else { libc::AT_FDCWD };
    let is_open = by_fd && len == 0;
    if is_open {
        replace(&mut name, path_of(from).as_bytes());
    }
    let from = if is_open { libc::AT_FDCWD } else { from };
    let mut call = ExecCall { args: *args, by_fd, from, is_open };
    let is_limited = limits::are_set() && may_execute(from, &name);
    if is_limited {
        limits::hand_on();
    }
    let mut script = ScriptWords::new();
    let mut program = name;
    let mut room = [0u8; PATH_BYTES];
    if let Some(path) = program_at(path, &mut room) {
        call.args[usize::from(by_fd)] = path.as_ptr() as usize;
        replace(&mut program, path.to_bytes());
    }
    let method = method::of(from, &mut program, &mut script);
    let result = match method {
        ExecMethod::Loaded => load(&call, library, &name, &program, &script, make),
        _ => None,
    };
    let result = result.unwrap_or_else(|| execute_itself(&call, method, &program, make));
    if is_limited {
        limits::take_back();
    }
    result
}

/// Executes the program itself.
fn execute_itself(
    call: &ExecCall,
    method: ExecMethod,
    program: &[u8; PATH_BYTES],
    make: &mut dyn FnMut(&[usize; 6]) -> isize,
) -> isize {
    let why = match method {
        ExecMethod::Linked => None,
        ExecMethod::Loaded => Some("memfold's variables don't fit into its environment"),
        ExecMethod::Unmanaged(why) | ExecMethod::PassesOn(why) => Some(why),
    };
    let note = why.map(|why| member::note_unmanaged(&about(program, why)));
    let adds = matches!(method, ExecMethod::Linked | ExecMethod::PassesOn(_));
    let variables = if adds { PassedOn::Variables } else { PassedOn::Nothing };
    let environment = call.args[call.arguments_at() + 1];
    let mut with = |environment: usize| make(&call.with(environment));
    let mut result = environment::with(environment, variables, &mut with);
    if adds && result == -(libc::E2BIG as isize) {
        // There may be room for the program's own environment.
        result = make(&call.args);
    }
    if let Some(note) = note {
        member::forget_unmanaged(note);
    }
    result
}

/// Executes the library, which loads the program. Returns `None` if that can't be tried, or the
/// arguments become too long.
#[inline(never)]
fn load(
    call: &ExecCall,
    library: &CStr,
    name: &[u8; PATH_BYTES],
    program: &[u8; PATH_BYTES],
    script: &ScriptWords,
    make: &mut dyn FnMut(&[usize; 6]) -> isize,
) -> Option<isize> {
    let until_zero = |text: &'_ [u8; PATH_BYTES]| text.iter().position(|byte| *byte == 0);
    let (name, path) = (&name[..until_zero(name)?], &program[..until_zero(program)?]);
    let has_path = !call.is_open && (call.from == libc::AT_FDCWD || path.starts_with(b"/"));
    let file = match has_path || !script.is_empty() {
        true => None,
        false => Some(open_for_library(call.from, CStr::from_bytes_until_nul(program).ok()?)?),
    };
    let mut text_shown = EntryText::new();
    if call.is_open || !has_path {
        text_shown.add_of_descriptor(call, name);
    } else {
        text_shown.add(name);
    }
    let mut text = EntryText::new();
    text.add(VARIABLE.as_bytes());
    text.add(b"=");
    let descriptor = file.as_ref().map(|file| file.as_raw_fd() as u32);
    LoadedProgram { path, name: text_shown.text()?, descriptor }.write(&mut |part| text.add(part));
    text.add(b"\0");
    text_shown.add(b"\0");
    let script_name = text_shown.text()?.as_ptr() as usize;
    let mut words = [0usize; SCRIPT_ARGUMENTS_MAX + 16];
    let mut arguments = call.args[call.arguments_at()];
    if !script.is_empty() {
        let mut len = 0;
        for word in script.before(script_name) {
            words[len] = word;
            len += 1;
        }
        copy_arguments(arguments, words.get_mut(len..)?)?;
        arguments = words.as_ptr() as usize;
    }
    let environment = call.args[call.arguments_at() + 1];
    let mut with = |environment: usize| make(&call.of_library(library, arguments, environment));
    let result = environment::with(environment, PassedOn::Program(text.text()?), &mut with);
    (result != -(libc::E2BIG as isize)).then_some(result)
}

/// Copies the addresses of all arguments but the first, and the null word behind them. Returns
/// `None` if there are too many.
fn copy_arguments(from: usize, to: &mut [usize]) -> Option<()> {
    let word_at = |n: usize| {
        let mut word = [0u8; 8];
        read_bytes(from + n * 8, &mut word).ok()?;
        Some(usize::from_ne_bytes(word))
    };
    if from == 0 || word_at(0)? == 0 {
        *to.first_mut()? = 0;
        return Some(());
    }
    for (n, place) in to.iter_mut().enumerate() {
        *place = word_at(n + 1)?;
        if *place == 0 {
            return Some(());
        }
    }
    None
}

/// Opens a program under a number that the library inherits.
fn open_for_library(from: RawFd, name: &CStr) -> Option<OwnedFd> {
    let file = renumber(open(from, name)?, DESCRIPTOR_LEAST).ok()?;
    fcntl_setfd(&file, FdFlags::empty()).ok()?;
    Some(file)
}

/// The text of an entry of the environment.
struct EntryText {
    bytes: [u8; 2 * PATH_BYTES + 64],
    len: usize,
    is_cut: bool,
}

impl EntryText {
    const fn new() -> EntryText {
        EntryText { bytes: [0; 2 * PATH_BYTES + 64], len: 0, is_cut: false }
    }

    fn add(&mut self, part: &[u8]) {
        match self.bytes[self.len..].get_mut(..part.len()) {
            Some(place) => {
                place.copy_from_slice(part);
                self.len += part.len();
            }
            None => self.is_cut = true,
        }
    }

    /// Adds the name that the kernel gives to a program that a descriptor names.
    fn add_of_descriptor(&mut self, call: &ExecCall, name: &[u8]) {
        self.add(b"/dev/fd/");
        let path = path_of(call.args[0] as i32);
        self.add(path.as_bytes().rsplit(|byte| *byte == b'/').next().unwrap_or_default());
        if !call.is_open {
            self.add(b"/");
            self.add(name);
        }
    }

    fn text(&self) -> Option<&[u8]> {
        (!self.is_cut).then_some(&self.bytes[..self.len])
    }
}

/// Returns the text about a program that isn't managed: its name, and the reason.
fn about(name: &[u8; PATH_BYTES], why: &str) -> [u8; UNMANAGED_BYTES_MAX] {
    let mut text = [0u8; UNMANAGED_BYTES_MAX];
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    let parts = name.iter().chain(b": ").chain(why.as_bytes());
    // A long name is cut off at the front, because its end says more.
    let start = (name.len() + 2 + why.len()).saturating_sub(text.len());
    text.iter_mut().zip(parts.skip(start)).for_each(|(to, from)| *to = *from);
    text
}

fn read_name(at: usize, to: &mut [u8; PATH_BYTES]) -> Option<usize> {
    // Bytes that can't be read stay zeros; the kernel will refuse the same name.
    let _ = read_bytes(at, to);
    to.iter().position(|byte| *byte == 0)
}

fn may_execute(from: RawFd, name: &[u8; PATH_BYTES]) -> bool {
    CStr::from_bytes_until_nul(name).is_ok_and(|name| open(from, name).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::format;
    use std::string::String;

    const WHY: &str = "it has file capabilities";

    fn named(path: &str) -> [u8; PATH_BYTES] {
        let mut name = [0u8; PATH_BYTES];
        replace(&mut name, path.as_bytes());
        name
    }

    #[test]
    fn long_name_is_told_by_its_end() {
        let text = |name: &str| {
            let about = about(&named(name), WHY);
            let end = about.iter().position(|byte| *byte == 0).unwrap_or(about.len());
            String::from_utf8(about[..end].to_vec()).unwrap()
        };
        assert_eq!(text("/bin/busybox"), format!("/bin/busybox: {WHY}"));
        let long = format!("/{}/end", "x".repeat(500));
        let note = text(&long);
        assert_eq!(note.len(), UNMANAGED_BYTES_MAX);
        assert!(note.ends_with(&format!("x/end: {WHY}")));
    }
}
