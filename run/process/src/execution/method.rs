//! How memfold gets into a program that is about to be executed. Nothing is allocated here: a child
//! of vfork shares its memory with its parent, and an allocation would outlive the call.
use crate::execution::environment;
use crate::loader::image::{ElfHeaders, NotProgram, ProgramImage};
use core::ffi::CStr;
use elf::abi::PT_INTERP;
use memfold_os::raw::system_call;
use rustix::fd::{BorrowedFd, OwnedFd, RawFd};
use rustix::fs::{Access, AtFlags, CWD, FileType, Mode, OFlags, StatVfsMountFlags};
use rustix::fs::{accessat, fgetxattr, fstat, fstatvfs, openat};
use rustix::io::pread;
use rustix::process::{getgid, getuid};
use rustix::thread::no_new_privs;

/// Bytes of a path with its final zero.
pub const PATH_BYTES: usize = 4096;
/// Bytes of the first line of a script that the kernel reads. `SCRIPTS_MAX` is how many scripts may
/// name one another.
const LINE_BYTES: usize = 256;
const SCRIPTS_MAX: usize = 5;
/// The file name of the dynamic linker that loads the library.
const LINKER: &[u8] = b"ld-linux-x86-64.so.2";

/// How memfold gets into a program.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum ExecMethod {
    /// The dynamic linker loads the library, or the kernel refuses the file.
    Linked,
    /// The library is executed, and loads the program.
    Loaded,
    /// It can't be in it, for this reason.
    Unmanaged(&'static str),
    /// It can't be in it, for this reason, but in the programs that it executes by the variables.
    PassesOn(&'static str),
}

/// The arguments that the kernel puts before those of the caller, if the file is a script: its
/// interpreter, the argument of its first line, and the script's name. The last one is first.
pub struct ScriptWords {
    bytes: [u8; (SCRIPTS_MAX + 1) * LINE_BYTES],
    used: usize,
    words: [usize; 2 * SCRIPTS_MAX + 2],
    count: usize,
}

impl ScriptWords {
    pub const fn new() -> ScriptWords {
        let bytes = [0; (SCRIPTS_MAX + 1) * LINE_BYTES];
        ScriptWords { bytes, used: 0, words: [0; 2 * SCRIPTS_MAX + 2], count: 0 }
    }

    /// Returns whether the file is no script.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the addresses of the arguments in their order, behind `script`, the address of the
    /// script's name. They are valid while this value stays in place.
    pub fn before(&self, script: usize) -> impl Iterator<Item = usize> {
        let start = self.bytes.as_ptr() as usize;
        self.words[..self.count].iter().rev().map(move |at| start + at).chain([script])
    }

    fn add(&mut self, word: &[u8]) {
        let place = &mut self.bytes[self.used..];
        place[..word.len()].copy_from_slice(word);
        place[word.len()] = 0;
        self.words[self.count] = self.used;
        self.used += word.len() + 1;
        self.count += 1;
    }
}

/// Decides how memfold gets into the program of this name. The name of a script is replaced by that
/// of its interpreter.
pub fn of(from: RawFd, name: &mut [u8; PATH_BYTES], script: &mut ScriptWords) -> ExecMethod {
    judge(from, name, script).unwrap_or(ExecMethod::Linked)
}

/// Returns `None` if only the kernel can judge the file.
fn judge(from: RawFd, name: &mut [u8; PATH_BYTES], script: &mut ScriptWords) -> Option<ExecMethod> {
    let mut from = from;
    for _ in 0..=SCRIPTS_MAX {
        let file = open(from, CStr::from_bytes_until_nul(name).ok()?)?;
        let mut start = [0u8; LINE_BYTES];
        let len = pread(&file, &mut start, 0).ok()?;
        let Some(line) = start[..len].strip_prefix(b"#!") else {
            if let Some(why) = gains_privileges(&file) {
                return Some(ExecMethod::Unmanaged(why));
            }
            let method = method_of_elf(&file, name)?;
            if method == ExecMethod::Loaded {
                // The kernel's own refusal must come from the kernel.
                let path = CStr::from_bytes_until_nul(name).ok()?;
                accessat(borrowed(from)?, path, Access::EXEC_OK, AtFlags::empty()).ok()?;
            }
            return Some(match (method, lacks_library(method == ExecMethod::Loaded)) {
                (ExecMethod::Linked | ExecMethod::Loaded, Some(why)) => ExecMethod::Unmanaged(why),
                _ => method,
            });
        };
        let is_blank = |byte: &u8| matches!(byte, b' ' | b'\t' | 0);
        let line = line.split(|byte| *byte == b'\n').next()?;
        let word = line.split(is_blank).find(|word| !word.is_empty())?;
        let first = line.iter().position(|byte| !is_blank(byte))?;
        let rest = &line[first + word.len()..];
        let rest = rest.split(|byte| *byte == 0).next()?.trim_ascii();
        if !rest.is_empty() {
            script.add(rest);
        }
        script.add(word);
        replace(name, word);
        from = libc::AT_FDCWD;
    }
    None
}

fn borrowed(from: RawFd) -> Option<BorrowedFd<'static>> {
    match from {
        libc::AT_FDCWD => Some(CWD),
        // SAFETY: the descriptor is the program's, which names it in its own call. It is borrowed
        // for this call only.
        0.. => Some(unsafe { BorrowedFd::borrow_raw(from) }),
        _ => None,
    }
}

/// Opens the file, if it is regular and executable.
pub fn open(from: RawFd, name: &CStr) -> Option<OwnedFd> {
    let from = borrowed(from)?;
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = openat(from, name, flags, Mode::empty()).ok()?;
    let mode = fstat(&file).ok()?.st_mode;
    let is_file = FileType::from_raw_mode(mode) == FileType::RegularFile;
    (is_file && mode & (libc::S_IXUSR | libc::S_IXGRP | libc::S_IXOTH) != 0).then_some(file)
}

/// Returns the reason if executing the file gains privileges, because the dynamic linker then
/// ignores the library.
fn gains_privileges(file: &OwnedFd) -> Option<&'static str> {
    if no_new_privs().unwrap_or(false)
        || fstatvfs(file).ok()?.f_flag.contains(StatVfsMountFlags::NOSUID)
    {
        return None;
    }
    let about = fstat(file).ok()?;
    let has = |bits: u32| about.st_mode & bits == bits;
    if has(libc::S_ISUID) && about.st_uid != getuid().as_raw() {
        return Some("it is a set-user-ID program");
    }
    if has(libc::S_ISGID | libc::S_IXGRP) && about.st_gid != getgid().as_raw() {
        return Some("it is a set-group-ID program");
    }
    let capable = fgetxattr(file, c"security.capability", &mut [0u8; 64]).is_ok_and(|len| len > 0);
    (capable && !getuid().is_root()).then_some("it has file capabilities")
}

/// Returns how memfold gets into an ELF file. Returns `None` for a file of another format, or one that is
/// damaged.
fn method_of_elf(file: &OwnedFd, name: &[u8]) -> Option<ExecMethod> {
    let headers = match ElfHeaders::read(file) {
        Err(other @ NotProgram::OtherMachine) => return Some(ExecMethod::Unmanaged(other.why())),
        read => read.ok()?,
    };
    for entry in headers.entries(file) {
        let entry = entry.ok()?;
        if entry.p_type == PT_INTERP {
            let mut linker = [0u8; LINE_BYTES];
            pread(file, &mut linker, entry.p_offset).ok()?;
            return if is_linker(&linker) {
                Some(ExecMethod::Linked)
            } else {
                loaded(file, Some(&linker))
            };
        }
    }
    // The linker, which can itself be executed with a program as its argument, loads the library.
    match name {
        name if is_linker(name) => Some(ExecMethod::Linked),
        name if is_valgrind(name) => Some(ExecMethod::PassesOn("it is valgrind")),
        _ => loaded(file, None),
    }
}

/// Returns how memfold gets into a program that the library must load, with the interpreter `linker`. Returns
/// `None` if the kernel will refuse it.
fn loaded(file: &OwnedFd, linker: Option<&[u8; LINE_BYTES]>) -> Option<ExecMethod> {
    match ProgramImage::read(file) {
        Err(why) => return Some(ExecMethod::Unmanaged(why)),
        Ok(image) if image.has_executable_stack && denies_executable() => {
            let why =
                "it needs an executable stack, which only the kernel may make here (PR_SET_MDWE)";
            return Some(ExecMethod::Unmanaged(why));
        }
        Ok(_) => {}
    }
    if let Some(linker) = linker {
        let linker = open(libc::AT_FDCWD, CStr::from_bytes_until_nul(linker).ok()?)?;
        if ProgramImage::read(&linker).is_err() {
            return Some(ExecMethod::Unmanaged("it uses another C library"));
        }
    }
    Some(ExecMethod::Loaded)
}

/// Returns whether this process, and each program that it executes, may make no memory executable
/// (`PR_SET_MDWE`, Linux 6.3).
fn denies_executable() -> bool {
    // SAFETY: the call takes no memory, and only returns a setting.
    let set = unsafe { system_call(libc::SYS_prctl, [libc::PR_GET_MDWE as usize, 0, 0, 0, 0, 0]) };
    set.is_ok_and(|set| set & libc::PR_MDWE_REFUSE_EXEC_GAIN as i64 != 0)
}

/// Returns whether a path is that of a static program of valgrind. It makes the system calls of the
/// program that it runs, and its own.
fn is_valgrind(path: &[u8]) -> bool {
    const FOLDER: &[u8] = b"valgrind";
    let path = path.split(|byte| *byte == 0).next().unwrap_or_default();
    let mut parts = path.rsplit(|byte| *byte == b'/');
    parts.next().is_some_and(|file| file.ends_with(b"-amd64-linux")) && parts.next() == Some(FOLDER)
}

/// Returns whether a path ends in the name of the linker.
fn is_linker(path: &[u8]) -> bool {
    let path = path.split(|byte| *byte == 0).next().unwrap_or_default();
    path.rsplit(|byte| *byte == b'/').next() == Some(LINKER)
}

/// Returns the reason if memfold's library is not in the present root directory, or, if it is to be
/// executed, can't be. The dynamic linker would only print an error then.
fn lacks_library(is_executed: bool) -> Option<&'static str> {
    let path = environment::library_path()?;
    if is_executed && accessat(CWD, path, Access::EXEC_OK, AtFlags::empty()).is_err() {
        return Some("memfold's library can't be executed there");
    }
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let is_there = openat(CWD, path, flags, Mode::empty()).is_ok();
    (!is_there).then_some("memfold's library isn't there in its root directory")
}

/// Replaces the name by `to`. No bytes of the old name remain behind it.
pub fn replace(name: &mut [u8; PATH_BYTES], to: &[u8]) {
    name.fill(0);
    name[..to.len()].copy_from_slice(to);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::forking;
    use core::ffi::c_char;
    use elf::abi::{EI_NIDENT, EM_X86_64, ET_EXEC, PF_R, PF_X, PT_GNU_STACK, PT_LOAD};
    use elf::file::ELF64_EHDR_TAILSIZE;
    use elf::segment::Elf64_Phdr;
    use memfold_testkit::scratch::Scratch;
    use std::string::String;
    use std::vec::Vec;
    use std::{format, vec};

    const HEADER_BYTES: usize = EI_NIDENT + ELF64_EHDR_TAILSIZE;
    const ENTRY_BYTES: usize = size_of::<Elf64_Phdr>();

    /// Makes an executable file. A child writes it, so that it can be executed at once, whatever
    /// other threads start meanwhile.
    fn file(scratch: &Scratch, name: &str, bytes: impl AsRef<[u8]>, mode: u32) -> String {
        forking(|| scratch.file(name, bytes, mode))
    }

    fn named(path: &str) -> [u8; PATH_BYTES] {
        let mut name = [0u8; PATH_BYTES];
        replace(&mut name, path.as_bytes());
        name
    }

    fn method(path: &str) -> ExecMethod {
        of(libc::AT_FDCWD, &mut named(path), &mut ScriptWords::new())
    }

    /// Returns an ELF file with a segment of code, and the header of an interpreter if one is given.
    fn elf(machine: u16, class: u8, interpreter: Option<&str>) -> Vec<u8> {
        let mut file = vec![0u8; HEADER_BYTES + 2 * ENTRY_BYTES];
        let mut copy = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
        copy(0, &[0x7f, b'E', b'L', b'F', class, 1]);
        copy(16, &ET_EXEC.to_le_bytes());
        copy(18, &machine.to_le_bytes());
        copy(24, &0x40_0000u64.to_le_bytes());
        copy(32, &(HEADER_BYTES as u64).to_le_bytes());
        copy(54, &(ENTRY_BYTES as u16).to_le_bytes());
        copy(56, &(1 + u16::from(interpreter.is_some())).to_le_bytes());
        copy(HEADER_BYTES, &PT_LOAD.to_le_bytes());
        copy(HEADER_BYTES + 4, &(PF_R | PF_X).to_le_bytes());
        copy(HEADER_BYTES + 16, &0x40_0000u64.to_le_bytes());
        for at in [32, 40] {
            copy(HEADER_BYTES + at, &100u64.to_le_bytes());
        }
        if let Some(path) = interpreter {
            let (at, second) = (HEADER_BYTES + 2 * ENTRY_BYTES, HEADER_BYTES + ENTRY_BYTES);
            copy(second, &PT_INTERP.to_le_bytes());
            copy(second + 8, &(at as u64).to_le_bytes());
            copy(second + 32, &(path.len() as u64 + 1).to_le_bytes());
            file.extend(path.bytes().chain([0]));
        }
        file
    }

    const OTHER_MACHINE: ExecMethod = ExecMethod::Unmanaged("it is a program for another machine");

    #[test]
    fn dynamic_program_of_this_machine_is_linked() {
        assert_eq!(method("/bin/sh"), ExecMethod::Linked);
        let (scratch, path) = (Scratch::new(), "/lib64/ld-linux-x86-64.so.2");
        assert_eq!(
            method(&file(&scratch, "new", elf(EM_X86_64, 2, Some(path)), 0o755)),
            ExecMethod::Linked
        );
        // The kernel doesn't find that linker.
        let linker_path = format!("{}/ld-linux-x86-64.so.2", scratch.path("none"));
        let program = file(&scratch, "program", elf(EM_X86_64, 2, Some(&linker_path)), 0o755);
        assert_eq!(method(&program), ExecMethod::Linked);
    }

    #[test]
    fn valgrind_is_told_by_its_path() {
        assert!(is_valgrind(b"/usr/libexec/valgrind/memcheck-amd64-linux\0\0"));
        for other in ["/usr/bin/valgrind", "/x/memcheck-amd64-linux", "valgrind/none", ""] {
            assert!(!is_valgrind(other.as_bytes()), "{other}");
        }
    }

    #[test]
    fn program_that_no_linker_prepares_is_loaded() {
        let scratch = Scratch::new();
        let method = |name: &str, bytes: Vec<u8>| method(&file(&scratch, name, bytes, 0o755));
        assert_eq!(method("static", elf(EM_X86_64, 2, None)), ExecMethod::Loaded);
        assert_eq!(method("arm", elf(183, 2, None)), OTHER_MACHINE);
        assert_eq!(method("i386", elf(3, 1, None)), OTHER_MACHINE);
        let musl = file(&scratch, "ld-musl", elf(EM_X86_64, 2, None), 0o755);
        assert_eq!(method("musl", elf(EM_X86_64, 2, Some(&musl))), ExecMethod::Loaded);
        // The kernel refuses a program without its interpreter.
        assert_eq!(method("gone", elf(EM_X86_64, 2, Some("/no/such/linker"))), ExecMethod::Linked);
        let mut stack = elf(EM_X86_64, 2, Some(&musl));
        stack[HEADER_BYTES + ENTRY_BYTES..][..4].copy_from_slice(&PT_GNU_STACK.to_le_bytes());
        stack[HEADER_BYTES + ENTRY_BYTES + 4] = PF_X as u8;
        assert_eq!(method("stack", stack), ExecMethod::Loaded);
    }

    #[test]
    fn linker_that_is_executed_itself_loads_the_library() {
        let scratch = Scratch::new();
        let name = core::str::from_utf8(LINKER).unwrap();
        assert_eq!(
            method(&file(&scratch, name, elf(EM_X86_64, 2, None), 0o755)),
            ExecMethod::Linked
        );
    }

    #[test]
    fn script_is_judged_by_its_interpreter() {
        let scratch = Scratch::new();
        let static_program = file(&scratch, "static", elf(EM_X86_64, 2, None), 0o755);
        for line in [
            format!("#!{static_program}\n"),
            format!("#! \t{static_program} -x\necho"),
            format!("#!{static_program}"),
        ] {
            let mut name = named(&file(&scratch, "script", line.as_bytes(), 0o755));
            assert_eq!(
                of(libc::AT_FDCWD, &mut name, &mut ScriptWords::new()),
                ExecMethod::Loaded,
                "{line:?}"
            );
            assert!(name.starts_with(static_program.as_bytes()) && name[static_program.len()] == 0);
        }
        assert_eq!(method(&file(&scratch, "script", "#!/bin/sh\n", 0o755)), ExecMethod::Linked);
        assert_eq!(method(&file(&scratch, "empty", "#!\n", 0o755)), ExecMethod::Linked);
    }

    #[test]
    fn chain_of_scripts_is_followed_as_far_as_the_kernel_does() {
        let scratch = Scratch::new();
        let mut last = file(&scratch, "0", elf(EM_X86_64, 2, None), 0o755);
        for n in 1..=SCRIPTS_MAX {
            last = file(&scratch, &format!("{n}"), format!("#!{last}\n"), 0o755);
            assert_eq!(method(&last), ExecMethod::Loaded, "{n}");
        }
        assert_eq!(
            method(&file(&scratch, "more", format!("#!{last}\n"), 0o755)),
            ExecMethod::Linked
        );
        let itself = scratch.path("itself");
        assert_eq!(
            method(&file(&scratch, "itself", format!("#!{itself}\n"), 0o755)),
            ExecMethod::Linked
        );
    }

    #[test]
    fn file_that_nobody_can_execute_is_left_to_the_kernel() {
        let scratch = Scratch::new();
        assert_eq!(
            method(&file(&scratch, "plain", elf(EM_X86_64, 2, None), 0o644)),
            ExecMethod::Linked
        );
        assert_eq!(method(&scratch.path("none")), ExecMethod::Linked);
        assert_eq!(method("/"), ExecMethod::Linked);
        assert_eq!(method(""), ExecMethod::Linked);
    }

    #[test]
    fn damaged_program_is_left_to_the_kernel() {
        let scratch = Scratch::new();
        let whole = elf(EM_X86_64, 2, None);
        for len in 0..HEADER_BYTES + ENTRY_BYTES {
            assert_eq!(
                method(&file(&scratch, "cut", &whole[..len], 0o755)),
                ExecMethod::Linked,
                "{len}"
            );
        }
        let mut far = elf(EM_X86_64, 2, None);
        far[32..40].copy_from_slice(&u64::MAX.to_le_bytes());
        assert_eq!(method(&file(&scratch, "far", far, 0o755)), ExecMethod::Linked);
    }

    #[test]
    fn shorter_name_leaves_nothing_of_the_one_before() {
        let mut name = named("/a/long/name");
        replace(&mut name, b"/b");
        assert_eq!(name, named("/b"));
    }

    #[test]
    fn script_gets_the_arguments_that_the_kernel_gives() {
        let scratch = Scratch::new();
        let static_program = file(&scratch, "static", elf(EM_X86_64, 2, None), 0o755);
        let inner = file(&scratch, "inner", format!("#! {static_program} \t-a  b \nx"), 0o755);
        let outer = file(&scratch, "outer", format!("#!{inner}\n"), 0o755);
        let (mut name, mut script) = (named(&outer), ScriptWords::new());
        assert_eq!(of(libc::AT_FDCWD, &mut name, &mut script), ExecMethod::Loaded);
        let words: Vec<&str> = script
            .before(c"outer".as_ptr() as usize)
            // SAFETY: each is a string in `script` or the constant above.
            .map(|at| unsafe { CStr::from_ptr(at as *const c_char) }.to_str().unwrap())
            .collect();
        assert_eq!(words, [&*static_program, "-a  b", &inner, "outer"]);
    }
}
