//! Checks that the preload library needs no thread-local storage and no symbol of the host. The
//! kernel can execute it, without a dynamic linker and a libc.
//!
//! The fault path runs while the program's own memory may be folded. A folded thread-local block or
//! heap page would make the engine wait for itself.
//!
//! The library also defines no symbol that the program may look up, except those for debuggers. The
//! gate sees the program's system calls. A function in front of libc's would miss most of them, and
//! conflict with programs that define their own.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::finding::Finding;

/// The reason why the library may need no symbol of others. A weak one may be missing.
const NEEDS_NOTHING: &str = "nothing provides it where the library itself loads a program: use memfold_os, \
     bytes.rs or the library's own heap";

/// The relocations that `run/preload/src/executed.rs` knows.
const RELOCATIONS: [&str; 4] =
    ["R_X86_64_RELATIVE", "R_X86_64_GLOB_DAT", "R_X86_64_JUMP_SLOT", "R_X86_64_64"];

/// The prefix of symbols that the library defines for others.
const OWN: &str = "memfold_";

/// Checks a built library with `nm` and `readelf`.
pub fn check(library: &Path) -> Result<Vec<Finding>> {
    if !library.is_file() {
        bail!("{}: no such file: build it first (make build)", library.display());
    }
    let path = library.to_string_lossy();
    let mut findings = undefined(&path, &output("nm", &["-D", "--undefined-only", &path])?);
    findings.extend(defined(&path, &output("nm", &["-D", "--defined-only", &path])?));
    let listing = output("readelf", &["-rW", &path])?;
    findings.extend(relocations(&path, &listing));
    if listing.contains("'.relr.dyn'") {
        let message = "has packed relocations (RELR), which executed.rs doesn't know";
        findings.push(Finding::error(&path, 0, message));
    }
    findings.extend(tls_segment(&path, &output("readelf", &["-lW", &path])?));
    Ok(findings)
}

/// Checks that a built file needs no symbol of a glibc newer than `most`, as in `2.17`.
pub fn check_glibc(file: &Path, most: &str) -> Result<Vec<Finding>> {
    let most = version(most).with_context(|| format!("{most}: not a version such as 2.17"))?;
    if !file.is_file() {
        bail!("{}: no such file: build it first (make portable)", file.display());
    }
    let path = file.to_string_lossy();
    Ok(newer(&path, &output("nm", &["-D", "--undefined-only", &path])?, most))
}

fn version(text: &str) -> Option<(u32, u32)> {
    let (major, rest) = text.split_once('.')?;
    let minor = rest.split('.').next()?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Returns what `nm` lists of a newer glibc. A weak symbol may be missing.
fn newer(path: &str, listing: &str, most: (u32, u32)) -> Vec<Finding> {
    let exports = listing.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let (kind, name) = (words.next()?, words.next()?);
        let (_, its) = name.split_once("@GLIBC_")?;
        (kind == "U" && version(its).is_none_or(|its| its > most)).then_some(name)
    });
    let message = |name| format!("needs {name}, which a glibc {}.{} lacks", most.0, most.1);
    exports.map(|name| Finding::error(path, 0, message(name))).collect()
}

fn output(program: &str, arguments: &[&str]) -> Result<String> {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .with_context(|| format!("can't run {program} (binutils)"))?;
    if !output.status.success() {
        bail!(
            "{program} {}: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns the names in the output of `nm`, without their versions.
fn names(listing: &str) -> impl Iterator<Item = &str> {
    listing
        .lines()
        .filter_map(|line| line.split_whitespace().last())
        .map(|name| name.split('@').next().unwrap_or(name))
}

/// Returns names that stand in front of those of other libraries.
fn defined(path: &str, listing: &str) -> Vec<Finding> {
    let others = names(listing).filter(|name| !name.starts_with(OWN));
    others
        .map(|name| {
            let why = "hide it: the program would find it in place of libc's or its own";
            Finding::error(path, 0, format!("defines {name}: {why}"))
        })
        .collect()
}

/// Returns the names that the library can't do without.
fn undefined(path: &str, listing: &str) -> Vec<Finding> {
    let imports = listing.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        (words.next()? == "U").then(|| words.next())?
    });
    imports.map(|name| Finding::error(path, 0, format!("needs {name}: {NEEDS_NOTHING}"))).collect()
}

/// Returns the relocations that only a dynamic linker knows.
fn relocations(path: &str, listing: &str) -> Vec<Finding> {
    let kinds = listing.lines().filter_map(|line| line.split_whitespace().nth(2));
    let unknown = kinds.filter(|kind| kind.starts_with("R_") && !RELOCATIONS.contains(kind));
    unknown
        .map(|kind| Finding::error(path, 0, format!("has {kind}, which executed.rs doesn't know")))
        .collect()
}

fn tls_segment(path: &str, headers: &str) -> Option<Finding> {
    let has_tls = headers.lines().any(|line| line.split_whitespace().next() == Some("TLS"));
    has_tls.then(|| {
        Finding::error(
            path,
            0,
            "has a TLS segment: find the thread_local or #[thread_local] and take it out",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLEAN: &str =
        "                 v environ@GLIBC_2.2.5\n                 w __cxa_finalize@GLIBC_2.2.5\n";

    #[test]
    fn a_clean_library_passes() {
        assert!(undefined("x.so", CLEAN).is_empty());
        assert_eq!(tls_segment("x.so", "  LOAD  0x0 0x0\n  GNU_STACK 0x0\n"), None);
    }

    #[test]
    fn thread_local_storage_and_malloc_are_errors() {
        let listing = format!(
            "{CLEAN}                 U __tls_get_addr@GLIBC_2.3\n                 U malloc\n"
        );
        let findings = undefined("x.so", &listing);
        assert_eq!(findings.len(), 2);
        assert!(findings.iter().all(|finding| !finding.warning));
        assert!(
            tls_segment("x.so", "Program Headers:\n  TLS            0x001d30 0x2d30\n").is_some()
        );
    }

    #[test]
    fn symbols_for_interposition_are_errors() {
        let own = "00000000000d23b0 T memfold_fold\n";
        assert!(defined("x.so", own).is_empty());
        let findings =
            defined("x.so", &format!("{own}00000000000d23e0 T mmap\n0000 W ioctl@@V1\n"));
        assert_eq!(findings.len(), 2);
        assert!(findings.iter().all(|finding| !finding.warning));
        assert!(findings[1].message.contains("defines ioctl:"), "{}", findings[1].message);
    }

    #[test]
    fn symbols_of_a_newer_glibc_are_errors() {
        let listing = format!(
            "{CLEAN} U mmap@GLIBC_2.2.5\n   U pidfd_open@GLIBC_2.36\n   w gettid@GLIBC_2.30\n   U dlsym@GLIBC_2.34\n"
        );
        let count = |most| newer("x.so", &listing, version(most).unwrap()).len();
        assert_eq!(["2.2", "2.17", "2.34", "2.36"].map(count), [2, 2, 1, 0]);
        assert!(version("2").is_none() && version("2.2.5") == Some((2, 2)));
        let own = std::env::current_exe().expect("a test has a path");
        assert!(!check_glibc(&own, "2.1").expect("nm runs").is_empty());
    }

    #[test]
    fn relocations_of_dynamic_linkers_are_errors() {
        let listing = "Relocation section '.rela.dyn' at offset 0x6b0 contains 2 entries:\n\
             \x20   Offset             Info             Type               Symbol's Value\n\
             000000000020fda0  0000000000000008 R_X86_64_RELATIVE                         612d0\n";
        assert!(relocations("x.so", listing).is_empty());
        let more = format!("{listing}000000000020fda8  0000000000000025 R_X86_64_IRELATIVE   61\n");
        assert_eq!(relocations("x.so", &more).len(), 1);
    }

    #[test]
    fn a_real_library_is_read_and_a_missing_one_is_an_error() {
        let own = std::env::current_exe().expect("a test has a path");
        // A std program has thread-local storage.
        let findings = check(&own).expect("nm and readelf run");
        assert!(findings.iter().any(|finding| finding.message.contains("TLS segment")));
        assert!(check(Path::new("/nonexistent.so")).is_err());
    }
}
