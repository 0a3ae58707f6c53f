//! Loads a program that no dynamic linker prepares for memfold: a static one, or one of another C
//! library. The kernel has executed this library itself, with the program's arguments and
//! environment. The last variable of the environment names the program
//! ([`memfold_run::loaded_program`]).
//!
//! The program finds on its stack what the kernel would have left there. It is mapped before the
//! gate is armed, like a program and its libraries before the preload library's constructor.
pub mod image;
mod map;
mod names;
mod description;

pub use map::protect_own_relocations;

use crate::diagnostics::die;
use crate::initial_stack::InitialStack;
use crate::loader::image::{PATH_BYTES, ProgramImage};
use crate::loader::map::map;
use alloc::boxed::Box;
use alloc::ffi::CString;
use core::ffi::{CStr, c_char, c_void};
use core::fmt;
use core::ops::Range;
use memfold_gate::keep_room;
use memfold_gate::syscalls::note_program;
use memfold_os::Errno;
use memfold_os::text::path_of;
use memfold_os::units::PAGE_SIZE;
use memfold_run::loaded_program::{LoadedProgram, VARIABLE};
use rustix::fd::{AsRawFd, FromRawFd, OwnedFd};
use rustix::fs::{CWD, Mode, OFlags, open, readlinkat_raw};
use rustix::mm::{MprotectFlags, mprotect};

/// Why a program can't be loaded.
pub enum ProgramLoadError {
    /// This library was executed by hand.
    NoProgram,
    /// The program's name, and the reason.
    Unsuitable(&'static [u8], &'static str),
    Failed(&'static [u8], &'static str, Errno),
}

impl ProgramLoadError {
    /// Ends the process with a message.
    pub fn end(self) -> ! {
        match self {
            ProgramLoadError::NoProgram => {
                die(format_args!("This file is a library. memfold run loads it into programs"))
            }
            ProgramLoadError::Unsuitable(name, why) => {
                die(format_args!("{}: Loading it failed: {why}", ShownName(name)))
            }
            ProgramLoadError::Failed(name, what, e) => {
                die(format_args!("{}: {what} failed: {e}", ShownName(name)))
            }
        }
    }
}

/// Displays a name, which may have any bytes.
struct ShownName(&'static [u8]);

impl fmt::Display for ShownName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.utf8_chunks().try_for_each(|chunk| f.write_str(chunk.valid()))
    }
}

/// Loads the program that the environment names. Hides that variable, and describes the program in
/// the auxiliary vector. Returns the address at which it begins.
///
/// # Errors
/// Why it can't be loaded. Nothing of it runs then.
pub fn load(stack: &InitialStack) -> Result<usize, ProgramLoadError> {
    let variable = stack.take(VARIABLE.as_bytes()).ok_or(ProgramLoadError::NoProgram)?;
    let text = &variable[VARIABLE.len() + 1..variable.len() - 1];
    let program = LoadedProgram::parse(text).ok_or(ProgramLoadError::NoProgram)?;
    let refusal = |why| ProgramLoadError::Unsuitable(program.name, why);
    let failure = |what| move |errno| ProgramLoadError::Failed(program.name, what, errno);
    let file = open_program(&program).map_err(failure("opening it"))?;
    let image = ProgramImage::read(&file).map_err(refusal)?;
    let mut path = [0u8; PATH_BYTES];
    let linker = match image.read_interpreter(&file, &mut path).map_err(refusal)? {
        true => {
            let path = CStr::from_bytes_until_nul(&path).unwrap_or_default();
            let file = open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
            let file = file.map_err(failure("opening its interpreter"))?;
            let image = ProgramImage::read(&file).map_err(refusal)?;
            Some((file, image))
        }
        false => None,
    };
    let bias = map(&image, &file).map_err(failure("mapping it at its addresses"))?;
    let at = |pages: Range<usize>, bias: usize| {
        pages.start.wrapping_add(bias)..pages.end.wrapping_add(bias)
    };
    let linker = match linker {
        Some((file, image)) => {
            let bias = map(&image, &file).map_err(failure("mapping its interpreter"))?;
            Some((at(image.pages(), bias), image.entry.wrapping_add(bias)))
        }
        None => None,
    };
    // An interpreter is the libc too, which makes most calls.
    let of_calls = linker.as_ref().map(|(pages, _)| pages.clone());
    keep_room(&of_calls.unwrap_or_else(|| at(image.pages(), bias)));
    let entry = image.entry.wrapping_add(bias);
    let headers = image.headers.map_or(0, |at| at.wrapping_add(bias));
    let values = [
        (libc::AT_PHDR, headers),
        (libc::AT_PHNUM, image.header_count),
        (libc::AT_BASE, linker.as_ref().map_or(0, |(pages, _)| pages.start)),
        (libc::AT_ENTRY, entry),
        (libc::AT_EXECFN, program.name.as_ptr() as usize),
    ];
    if image.has_executable_stack {
        make_executable(stack).map_err(failure("making the stack executable"))?;
    }
    values.iter().for_each(|(kind, value)| stack.set_auxiliary(*kind, *value));
    description::give(stack, &image, bias, variable.as_ptr() as usize);
    note_path(&file);
    names::give(program.name);
    Ok(linker.map_or(entry, |(_, entry)| entry))
}

/// Makes the stack executable, which a program with code on its stack asks the kernel for.
fn make_executable(stack: &InitialStack) -> Result<(), Errno> {
    // The name of the executed file is the last thing on the stack, but for a null word.
    let last = stack.auxiliary(libc::AT_EXECFN).ok_or(Errno::INVAL)?;
    // SAFETY: it is a string that the kernel has put there.
    let bytes = unsafe { CStr::from_ptr(last as *const c_char) }.count_bytes();
    let end = (last + bytes + size_of::<usize>()).next_multiple_of(PAGE_SIZE);
    let start = stack.lowest() & !(PAGE_SIZE - 1);
    let access = MprotectFlags::READ | MprotectFlags::WRITE | MprotectFlags::EXEC;
    // The pages below, to which the stack grows, are part of the same mapping.
    let access = access | MprotectFlags::GROWSDOWN;
    // SAFETY: the pages are the kernel's stack of this process, and stay readable and writable.
    unsafe { mprotect(start as *mut c_void, end - start, access) }
}

/// Notes the program's path for `/proc/self/exe`, which leads to this library. Without /proc nothing
/// leads anywhere.
fn note_path(file: &OwnedFd) {
    let link = path_of(file.as_raw_fd());
    let mut path = [0u8; PATH_BYTES];
    let Ok(link) = link.as_c_str() else { return };
    let Ok(len) = readlinkat_raw(CWD, link, &mut path[..]) else { return };
    if let Ok(path) = CString::new(&path[..len]) {
        note_program(Box::leak(path.into_boxed_c_str()));
    }
}

fn open_program(program: &LoadedProgram) -> Result<OwnedFd, Errno> {
    if let Some(number) = program.descriptor {
        // SAFETY: the process that executed this library has opened it for the loader, which alone
        // knows its number.
        return Ok(unsafe { OwnedFd::from_raw_fd(number as i32) });
    }
    open(program.path, OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY, Mode::empty())
}
