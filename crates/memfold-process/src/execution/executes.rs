//! The program that is about to be executed. It is given the variables that load memfold into it
//! (`environment.rs`). If memfold can't be in it, it runs as without memfold, and is counted in the
//! run's table. If the run itself is given such a program, `memfold run` refuses it
//! (`memfold-cli/src/program`).
//!
//! A static program keeps the variables. Nothing in it reads them, and the programs that it
//! executes are managed by them.
//!
//! A filter of system calls may kill a thread that makes a call that the filter doesn't know. So
//! under `no_new_privs`, where there may be a filter, only those calls are made that the dynamic
//! linker of the new program will make anyway: open, stat, read, close.
use crate::execution::environment;
use crate::limits;
use core::ffi::{CStr, c_char};
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use elf::abi::{DT_STRTAB, DT_VERNEED, DT_VERNEEDNUM, PT_DYNAMIC, PT_INTERP, PT_LOAD, PT_PHDR};
use elf::abi::{EI_CLASS, EI_DATA, EI_NIDENT, ELFCLASS64, ELFDATA2LSB, ELFMAGIC, EM_X86_64};
use elf::dynamic::DynamicTable;
use elf::endian::LittleEndian;
use elf::file::{Class, ELF64_EHDR_TAILSIZE, FileHeader};
use elf::gnu_symver::VerNeedIterator;
use elf::parse::ParseAt;
use elf::segment::{Elf64_Phdr, ProgramHeader, SegmentTable};
use elf::string_table::StringTable;
use memfold_gate::{image, read_bytes};
use memfold_os::text::path_of;
use memfold_run::member;
use memfold_run::table::UNMANAGED_BYTES_MAX;
use rustix::fd::{BorrowedFd, OwnedFd, RawFd};
use rustix::fs::{CWD, FileType, Mode, OFlags, StatVfsMountFlags};
use rustix::fs::{fgetxattr, fstat, fstatvfs, openat, stat};
use rustix::io::pread;
use rustix::process::{getgid, getuid};
use rustix::thread::no_new_privs;

const PATH_BYTES: usize = 4096;
/// Bytes of the first line of a script that the kernel reads. `SCRIPTS_MAX` is how many scripts may
/// name one another.
const LINE_BYTES: usize = 256;
const SCRIPTS_MAX: usize = 5;
const ENTRY_BYTES: usize = size_of::<Elf64_Phdr>();
const STATIC: &str = "it is statically linked";
/// The file name of the dynamic linker that loads the library.
const LINKER: &[u8] = b"ld-linux-x86-64.so.2";

/// Makes `execve` or `execveat` by `make`, which is given the arguments to pass.
pub fn execute(nr: usize, args: &[usize; 6], make: &mut dyn FnMut(&[usize; 6]) -> isize) -> isize {
    if environment::library().is_none() {
        return make(args);
    }
    let by_fd = nr as i64 == libc::SYS_execveat;
    let (path, place) = if by_fd { (args[1], 3) } else { (args[0], 2) };
    let mut name = [0u8; PATH_BYTES];
    let Some(len) = read_name(path, &mut name) else { return make(args) };
    let from = if by_fd { args[0] as RawFd } else { libc::AT_FDCWD };
    if len == 0 {
        // The program is named by a descriptor.
        replace(&mut name, path_of(from).as_bytes());
    }
    let from = if len == 0 { libc::AT_FDCWD } else { from };
    let is_limited = limits::are_set() && may_execute(from, &name);
    if is_limited {
        limits::hand_on();
    }
    let why = unserved(from, &mut name);
    let noted = why.map(|why| member::note_unmanaged(&about(&name, why)));
    let adds = why.is_none_or(|why| why == STATIC);
    let mut with = |environment: usize| {
        let mut args = *args;
        args[place] = environment;
        make(&args)
    };
    let mut failed = environment::with(args[place], adds, &mut with);
    if adds && failed == -(libc::E2BIG as isize) {
        // There may be room for the program's own environment.
        failed = make(args);
    }
    if let Some(noted) = noted {
        member::forget_unmanaged(noted);
    }
    if is_limited {
        limits::take_back();
    }
    failed
}

/// Returns the text about a program that isn't managed: its name, and the reason.
fn about(name: &[u8; PATH_BYTES], why: &str) -> [u8; UNMANAGED_BYTES_MAX] {
    let mut text = [0u8; UNMANAGED_BYTES_MAX];
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    let parts = name.iter().chain(b": ").chain(why.as_bytes());
    // A long name is cut off at the front, because its end says more.
    let skipped = (name.len() + 2 + why.len()).saturating_sub(text.len());
    text.iter_mut().zip(parts.skip(skipped)).for_each(|(to, from)| *to = *from);
    text
}

fn read_name(at: usize, to: &mut [u8; PATH_BYTES]) -> Option<usize> {
    // Bytes that can't be read stay zeros; the kernel will refuse the same name.
    let _ = read_bytes(at, to);
    to.iter().position(|byte| *byte == 0)
}

/// Replaces the name by `to`. No bytes of the old name remain behind it.
fn replace(name: &mut [u8; PATH_BYTES], to: &[u8]) {
    name.fill(0);
    name[..to.len()].copy_from_slice(to);
}

fn may_execute(from: RawFd, name: &[u8; PATH_BYTES]) -> bool {
    CStr::from_bytes_until_nul(name).is_ok_and(|name| open(from, name).is_some())
}

/// Returns why memfold can't be in the program of this name, or `None` if it can. The name of a
/// script is replaced by that of its interpreter.
fn unserved(from: RawFd, name: &mut [u8; PATH_BYTES]) -> Option<&'static str> {
    let mut from = from;
    for _ in 0..=SCRIPTS_MAX {
        let file = open(from, CStr::from_bytes_until_nul(name).ok()?)?;
        let mut start = [0u8; LINE_BYTES];
        let len = pread(&file, &mut start, 0).ok()?;
        let Some(line) = start[..len].strip_prefix(b"#!") else {
            let unsuited = || unsuitable(&file, &start, len, name).or_else(lacks_library);
            return gains_privileges(&file).or_else(unsuited);
        };
        let line = line.split(|byte| *byte == b'\n').next()?;
        let mut words = line.split(|byte| matches!(byte, b' ' | b'\t' | 0));
        let word = words.find(|word| !word.is_empty())?;
        replace(name, word);
        from = libc::AT_FDCWD;
    }
    None
}

/// Opens the file, if it is regular and executable.
fn open(from: RawFd, name: &CStr) -> Option<OwnedFd> {
    let from = match from {
        libc::AT_FDCWD => CWD,
        // SAFETY: the descriptor is the program's, which names it in its own call. It is borrowed
        // for this call only.
        0.. => unsafe { BorrowedFd::borrow_raw(from) },
        _ => return None,
    };
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

/// Returns the reason that an ELF file itself gives. A file of another format is not for this
/// function to judge.
fn unsuitable(
    file: &OwnedFd,
    start: &[u8; LINE_BYTES],
    len: usize,
    name: &[u8],
) -> Option<&'static str> {
    let (ident, rest) = start.split_at(EI_NIDENT);
    if len < EI_NIDENT + ELF64_EHDR_TAILSIZE || !ident.starts_with(&ELFMAGIC) {
        return None;
    }
    let header = FileHeader::parse_tail((LittleEndian, Class::ELF64, 0, 0), rest).ok()?;
    let is_ours = ident[EI_CLASS] == ELFCLASS64 && ident[EI_DATA] == ELFDATA2LSB;
    if !is_ours || header.e_machine != EM_X86_64 {
        return Some("it is a program for another machine");
    }
    for n in 0..u64::from(header.e_phnum) {
        let mut entry = [0u8; ENTRY_BYTES];
        let at = header.e_phoff.checked_add(n * ENTRY_BYTES as u64)?;
        if pread(file, &mut entry, at).ok()? < ENTRY_BYTES {
            return None;
        }
        let entry = ProgramHeader::parse_at(LittleEndian, Class::ELF64, &mut 0, &entry).ok()?;
        if entry.p_type == PT_INTERP {
            let mut linker = [0u8; LINE_BYTES];
            pread(file, &mut linker, entry.p_offset).ok()?;
            if !is_linker(&linker) {
                return Some("it uses another C library");
            }
            return is_too_old(&linker).then_some("its C library is too old");
        }
    }
    // The linker, which can itself be executed with a program as its argument, loads the library.
    (!is_linker(name)).then_some(STATIC)
}

/// Returns whether a path ends in the name of the linker.
fn is_linker(path: &[u8]) -> bool {
    let path = path.split(|byte| *byte == 0).next().unwrap_or_default();
    path.rsplit(|byte| *byte == b'/').next() == Some(LINKER)
}

/// Device and inode of this process's dynamic linker.
static OWN_LINKER: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// Records the file of this process's dynamic linker. The constructor calls it, because later the
/// same path may lead to another file.
pub fn note_linker() {
    let found = own_linker().and_then(|path| stat(path).ok());
    if let Some(found) = found {
        OWN_LINKER[0].store(found.st_dev, Relaxed);
        OWN_LINKER[1].store(found.st_ino, Relaxed);
    }
}

/// Returns the path of this process's dynamic linker, from the program headers that the auxiliary
/// vector names.
fn own_linker() -> Option<&'static CStr> {
    // SAFETY: `getauxval` has no conditions.
    let of = |kind| unsafe { libc::getauxval(kind) } as usize;
    let (start, count) = (of(libc::AT_PHDR), of(libc::AT_PHNUM));
    if start == 0 {
        return None;
    }
    let bytes = count * ENTRY_BYTES;
    // SAFETY: the auxiliary vector gives the place and number of the program's headers, which are
    // mapped and never change.
    let headers = unsafe { core::slice::from_raw_parts(start as *const u8, bytes) };
    let headers = SegmentTable::new(LittleEndian, Class::ELF64, headers);
    let at = |kind| headers.iter().find(|each| each.p_type == kind).map(|each| each.p_vaddr);
    let base = start.wrapping_sub(at(PT_PHDR)? as usize);
    let path = base.wrapping_add(at(PT_INTERP)? as usize) as *const c_char;
    // SAFETY: the segment holds a string that ends in a zero. It is mapped with the program and
    // never changes.
    Some(unsafe { CStr::from_ptr(path) })
}

/// Returns whether the C library beside a dynamic linker lacks versions that memfold's library
/// needs.
fn is_too_old(linker: &[u8; LINE_BYTES]) -> bool {
    let Some(file) = CStr::from_bytes_until_nul(linker).ok().and_then(|p| open(libc::AT_FDCWD, p))
    else {
        // The kernel doesn't find that linker either.
        return false;
    };
    let is_own = fstat(&file).is_ok_and(|found| {
        [found.st_dev, found.st_ino] == [0, 1].map(|n: usize| OWN_LINKER[n].load(Relaxed))
    });
    !is_own && release_of(&file).unwrap_or(0) < needed_release()
}

/// Returns the glibc release of a dynamic linker, 36 for 2.36. It is in the text that the linker
/// prints for `--version`. Returns `None` for older linkers, which have no such text.
fn release_of(file: &OwnedFd) -> Option<u32> {
    const BEFORE: &[u8] = b"release version 2.";
    let (mut text, mut at, mut kept) = ([0u8; PATH_BYTES], 0, 0);
    loop {
        let len = pread(file, &mut text[kept..], at).ok().filter(|len| *len > 0)?;
        let seen = &text[..kept + len];
        let found = seen.windows(BEFORE.len() + 4).find(|part| part.starts_with(BEFORE));
        if let Some(found) = found {
            let digits = found[BEFORE.len()..].iter().take_while(|byte| byte.is_ascii_digit());
            return Some(digits.fold(0, |sum, digit| sum * 10 + u32::from(digit - b'0')));
        }
        at += len as u64;
        kept = seen.len().min(BEFORE.len() + 4);
        let from = seen.len() - kept;
        text.copy_within(from..from + kept, 0);
    }
}

/// Returns the reason if memfold's library is not in the present root directory. The dynamic linker
/// would only print an error then.
fn lacks_library() -> Option<&'static str> {
    let mut path = [0u8; PATH_BYTES];
    let library = environment::library().filter(|library| library.len() < path.len())?;
    path[..library.len()].copy_from_slice(library);
    let path = CStr::from_bytes_until_nul(&path).ok()?;
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let is_there = openat(CWD, path, flags, Mode::empty()).is_ok();
    (!is_there).then_some("memfold's library isn't there in its root directory")
}

/// Returns the glibc release that memfold's library needs, 34 for 2.34. It is the newest version
/// that the library's own dynamic section asks for.
fn needed_release() -> u32 {
    newest_version(b"GLIBC_2.").unwrap_or(u32::MAX)
}

/// Returns the greatest number after `before` among the versions that the library needs.
fn newest_version(before: &[u8]) -> Option<u32> {
    let (base, segments) = (image::start(), image::segments()?);
    let find = |kind| segments.iter().find(|each| each.p_type == kind);
    let (first, dynamic) = (find(PT_LOAD)?, find(PT_DYNAMIC)?);
    let slice = |at: usize, bytes: u64| {
        // SAFETY: each range is a segment of this library, mapped with it and not written to after
        // relocation.
        unsafe { core::slice::from_raw_parts(at as *const u8, bytes as usize) }
    };
    // Strings and versions lie in the first segment.
    let all = slice(base, first.p_memsz);
    let dynamic = slice(base + dynamic.p_vaddr as usize, dynamic.p_memsz);
    let dynamic = DynamicTable::new(LittleEndian, Class::ELF64, dynamic);
    let value = |tag| dynamic.iter().find(|entry| entry.d_tag == tag).map(|entry| entry.d_val());
    // glibc has made these addresses absolute.
    let offset = |tag| {
        let at = value(tag)? as usize;
        Some(at.checked_sub(base).unwrap_or(at))
    };
    let texts = StringTable::new(all.get(offset(DT_STRTAB)?..)?);
    let (needs, count) = (offset(DT_VERNEED)?, value(DT_VERNEEDNUM)?);
    let files = VerNeedIterator::new(LittleEndian, Class::ELF64, count, needs, all);
    let names = files.flat_map(|(_, versions)| versions).map(|version| version.vna_name as usize);
    let releases = names.map(|name| {
        let digits = texts.get_raw(name).ok().and_then(|name| name.strip_prefix(before));
        let digits = digits.unwrap_or_default().iter().take_while(|byte| byte.is_ascii_digit());
        digits.fold(0, |sum, digit| sum * 10 + u32::from(digit - b'0'))
    });
    releases.max()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::forking;
    use memfold_testkit::scratch::Scratch;
    use std::ffi::CString;
    use std::string::String;
    use std::vec::Vec;
    use std::{format, vec};

    const HEADER_BYTES: usize = EI_NIDENT + ELF64_EHDR_TAILSIZE;
    const MUSL: &str = "/lib/ld-musl-x86_64.so.1";

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

    fn why(path: &str) -> Option<&'static str> {
        unserved(libc::AT_FDCWD, &mut named(path))
    }

    /// Returns an ELF file with one program header, that of an interpreter, or without any.
    fn elf(machine: u16, class: u8, interpreter: Option<&str>) -> Vec<u8> {
        let mut file = vec![0u8; HEADER_BYTES + ENTRY_BYTES];
        file[..6].copy_from_slice(&[0x7f, b'E', b'L', b'F', class, 1]);
        file[18..20].copy_from_slice(&machine.to_le_bytes());
        file[32..40].copy_from_slice(&(HEADER_BYTES as u64).to_le_bytes());
        file[56..58].copy_from_slice(&1u16.to_le_bytes());
        if let Some(path) = interpreter {
            let at = file.len() as u64;
            file[HEADER_BYTES..][..4].copy_from_slice(&PT_INTERP.to_le_bytes());
            file[HEADER_BYTES + 8..][..8].copy_from_slice(&at.to_le_bytes());
            file.extend(path.bytes().chain([0]));
        }
        file
    }

    /// Makes a dynamic linker that names a release of glibc.
    fn linker(scratch: &Scratch, release: &str) -> String {
        let name = core::str::from_utf8(LINKER).unwrap();
        let padding = "x".repeat(PATH_BYTES - 9);
        file(
            scratch,
            name,
            format!("{padding}GNU C Library, release version {release}.\nCopyright"),
            0o755,
        )
    }

    #[test]
    fn dynamic_program_of_this_machine_is_managed() {
        assert_eq!(why("/bin/sh"), None);
        let scratch = Scratch::new();
        let linker = linker(&scratch, "2.99");
        assert_eq!(why(&file(&scratch, "new", elf(EM_X86_64, 2, Some(&linker)), 0o755)), None);
    }

    #[test]
    fn program_that_memfold_can_not_be_in_is_told_of() {
        let scratch = Scratch::new();
        let why = |name: &str, bytes: Vec<u8>| why(&file(&scratch, name, bytes, 0o755));
        assert_eq!(why("static", elf(EM_X86_64, 2, None)), Some(STATIC));
        assert_eq!(why("arm", elf(183, 2, None)), Some("it is a program for another machine"));
        assert_eq!(why("i386", elf(3, 1, None)), Some("it is a program for another machine"));
        let musl = elf(EM_X86_64, 2, Some(MUSL));
        assert_eq!(why("musl", musl), Some("it uses another C library"));
    }

    /// The end of the first read lies in the middle of the release text.
    #[test]
    fn program_of_an_older_glibc_is_told_of() {
        for (release, is_managed) in
            [("2.99", true), ("2.1", false), ("2.999", true), ("3.1", false)]
        {
            let scratch = Scratch::new();
            let linker = linker(&scratch, release);
            let found = why(&file(&scratch, "program", elf(EM_X86_64, 2, Some(&linker)), 0o755));
            let wanted = if is_managed { None } else { Some("its C library is too old") };
            assert_eq!(found, wanted, "{release}");
        }
        // The kernel doesn't find that linker either.
        let scratch = Scratch::new();
        let gone = format!("{}/ld-linux-x86-64.so.2", scratch.path("none"));
        assert_eq!(why(&file(&scratch, "program", elf(EM_X86_64, 2, Some(&gone)), 0o755)), None);
    }

    #[test]
    fn linker_that_is_executed_itself_loads_the_library() {
        let scratch = Scratch::new();
        let name = core::str::from_utf8(LINKER).unwrap();
        assert_eq!(why(&file(&scratch, name, elf(EM_X86_64, 2, None), 0o755)), None);
    }

    #[test]
    fn script_is_judged_by_its_interpreter() {
        let scratch = Scratch::new();
        let fixed = file(&scratch, "static", elf(EM_X86_64, 2, None), 0o755);
        for line in [format!("#!{fixed}\n"), format!("#! \t{fixed} -x\necho"), format!("#!{fixed}")]
        {
            let mut name = named(&file(&scratch, "script", line.as_bytes(), 0o755));
            assert_eq!(unserved(libc::AT_FDCWD, &mut name), Some(STATIC), "{line:?}");
            assert!(name.starts_with(fixed.as_bytes()) && name[fixed.len()] == 0);
        }
        assert_eq!(why(&file(&scratch, "script", "#!/bin/sh\n", 0o755)), None);
        assert_eq!(why(&file(&scratch, "empty", "#!\n", 0o755)), None);
    }

    #[test]
    fn chain_of_scripts_is_followed_as_far_as_the_kernel_does() {
        let scratch = Scratch::new();
        let mut last = file(&scratch, "0", elf(EM_X86_64, 2, None), 0o755);
        for n in 1..=SCRIPTS_MAX {
            last = file(&scratch, &format!("{n}"), format!("#!{last}\n"), 0o755);
            assert_eq!(why(&last), Some(STATIC), "{n}");
        }
        assert_eq!(why(&file(&scratch, "more", format!("#!{last}\n"), 0o755)), None);
        let itself = scratch.path("itself");
        assert_eq!(why(&file(&scratch, "itself", format!("#!{itself}\n"), 0o755)), None);
    }

    #[test]
    fn file_that_nobody_can_execute_is_left_to_the_kernel() {
        let scratch = Scratch::new();
        assert_eq!(why(&file(&scratch, "plain", elf(EM_X86_64, 2, None), 0o644)), None);
        assert_eq!(why(&scratch.path("none")), None);
        assert_eq!(why("/"), None);
        assert_eq!(why(""), None);
    }

    #[test]
    fn damaged_program_is_left_to_the_kernel() {
        let scratch = Scratch::new();
        let whole = elf(EM_X86_64, 2, Some(MUSL));
        for len in 0..HEADER_BYTES + ENTRY_BYTES {
            assert_eq!(why(&file(&scratch, "cut", &whole[..len], 0o755)), None, "{len}");
        }
        let mut far = elf(EM_X86_64, 2, Some(MUSL));
        far[32..40].copy_from_slice(&u64::MAX.to_le_bytes());
        assert_eq!(why(&file(&scratch, "far", far, 0o755)), None);
    }

    #[test]
    fn release_is_read_across_the_end_of_a_read() {
        let scratch = Scratch::new();
        for before in PATH_BYTES - 30..PATH_BYTES + 5 {
            let text = "x".repeat(before) + "release version 2.36.\nCopyright";
            let file = file(&scratch, "text", &text, 0o755);
            let file = open(libc::AT_FDCWD, &CString::new(file).unwrap()).unwrap();
            assert_eq!(release_of(&file), Some(36), "{before}");
        }
        let file = file(&scratch, "none", "x".repeat(3 * PATH_BYTES), 0o755);
        let file = open(libc::AT_FDCWD, &CString::new(file).unwrap()).unwrap();
        assert_eq!(release_of(&file), None);
    }

    #[test]
    fn long_name_is_told_by_its_end() {
        let text = |name: &str| {
            let about = about(&named(name), STATIC);
            let end = about.iter().position(|byte| *byte == 0).unwrap_or(about.len());
            String::from_utf8(about[..end].to_vec()).unwrap()
        };
        assert_eq!(text("/bin/busybox"), format!("/bin/busybox: {STATIC}"));
        let long = format!("/{}/end", "x".repeat(500));
        let told = text(&long);
        assert_eq!(told.len(), UNMANAGED_BYTES_MAX);
        assert!(told.ends_with(&format!("x/end: {STATIC}")));
    }

    #[test]
    fn shorter_name_leaves_nothing_of_the_one_before() {
        let mut name = named("/a/long/name");
        replace(&mut name, b"/b");
        assert_eq!(name, named("/b"));
    }

    #[test]
    fn this_program_needs_a_release_that_is_here() {
        let needed = needed_release();
        assert!((1..1000).contains(&needed), "{needed}");
        note_linker();
        assert!(OWN_LINKER[1].load(Relaxed) != 0);
    }
}
