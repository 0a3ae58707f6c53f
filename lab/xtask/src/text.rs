//! `no_std`, printing and leftovers.

use crate::finding::Finding;
use crate::scan;
use crate::source::Source;
use crate::tree::{Crate, Tree};

/// Crates that run inside the program: no std (it brings thread-local storage, the host's malloc
/// and locks) and no printing.
pub const ENGINE: &[&str] = &[
    "memfold-os",
    "memfold-gate",
    "memfold-store",
    "memfold-swap",
    "memfold-stats",
    "memfold-run",
    "memfold-engine",
    "memfold",
    "memfold-process",
    "memfold-preload",
];
const PRINTING: &[&str] = &["print", "println", "eprint", "eprintln", "dbg"];
const UNFINISHED: &[&str] = &["todo", "unimplemented"];
const LEFTOVERS: &[&str] = &[concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")];
/// Beginnings of comments that only point to another one.
const POINTING: &[&str] = &["as above", "as before", "the same", "likewise", "see above"];

/// Checks all sources, scripts and manifests.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings: Vec<Finding> = tree.crates.iter().flat_map(check_crate).collect();
    for (path, text) in &tree.others {
        findings.extend(leftovers(path, text));
    }
    findings
}

fn check_crate(krate: &Crate) -> Vec<Finding> {
    let engine = ENGINE.contains(&krate.name.as_str());
    let mut findings = leftovers(&krate.manifest_path, &krate.manifest);
    for source in &krate.sources {
        findings.extend(unfinished(source));
        findings.extend(leftovers(&source.path, &source.comments));
        findings.extend(pointing(source));
        // A build script runs on the machine that compiles.
        if engine && !source.path.ends_with("/build.rs") {
            findings.extend(no_std(source));
        }
        if engine && source.path.ends_with("/src/lib.rs") {
            findings.extend(declares_no_std(source));
        }
    }
    findings
}

fn no_std(source: &Source) -> Vec<Finding> {
    let code = &source.code;
    let mut findings = Vec::new();
    for offset in scan::words(code, "std").filter(|&offset| !source.in_test(offset)) {
        let path = code[offset + 3..].trim_start().starts_with("::");
        let before = code[..offset].trim_end();
        if path || before.ends_with("extern crate") || before.ends_with("use") {
            let message = "std in an engine crate: use core, alloc or memfold_os (std brings thread-local storage and malloc)";
            findings.push(Finding::error(&source.path, source.line(offset), message));
        }
    }
    for (offset, name) in macros(code, PRINTING).filter(|&(offset, _)| !source.in_test(offset)) {
        let message = format!(
            "{name}! in an engine crate: return an error or count it; only the command prints"
        );
        findings.push(Finding::error(&source.path, source.line(offset), message));
    }
    findings
}

fn declares_no_std(lib: &Source) -> Option<Finding> {
    let message = "an engine crate without #![no_std]: add #![cfg_attr(not(test), no_std)]";
    let is_declared = lib.code.match_indices("#![").any(|(offset, _)| {
        let end = crate::source::matching(&lib.code, offset + 2);
        scan::words(&lib.code[offset..end], "no_std").next().is_some()
    });
    (!is_declared).then(|| Finding::error(&lib.path, 1, message))
}

fn unfinished(source: &Source) -> Vec<Finding> {
    macros(&source.code, UNFINISHED)
        .map(|(offset, name)| {
            Finding::error(
                &source.path,
                source.line(offset),
                format!("{name}!: write it or take it out"),
            )
        })
        .collect()
}

/// Finds notes to oneself in `text`.
fn leftovers(path: &str, text: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (number, line) in text.lines().enumerate() {
        for word in LEFTOVERS {
            if scan::words(line, word).next().is_some() {
                let message = format!("{word}: do it, or open an issue and take the note out");
                findings.push(Finding::error(path, number + 1, message));
            }
        }
    }
    findings
}

/// Finds comments on unsafe code that argue nothing.
fn pointing(source: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (number, line) in source.comments.lines().enumerate() {
        let Some((_, argument)) = line.split_once("SAFETY: ") else { continue };
        if POINTING.iter().any(|start| argument.starts_with(start)) {
            let message = "a SAFETY comment that only points: argue each condition here";
            findings.push(Finding::error(&source.path, number + 1, message));
        }
    }
    findings
}

/// Returns the calls of these macros, by offset and name.
fn macros<'a>(code: &'a str, names: &'a [&'a str]) -> impl Iterator<Item = (usize, &'a str)> {
    names.iter().flat_map(move |name| {
        scan::words(code, name)
            .filter(move |offset| code[offset + name.len()..].starts_with('!'))
            .map(move |offset| (offset, *name))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(name: &str, text: &str) -> Vec<usize> {
        let manifest_path = format!("crates/{name}/Cargo.toml");
        let sources = vec![Source::new(&format!("crates/{name}/src/part.rs"), text, false)];
        let krate =
            Crate { name: name.to_owned(), manifest_path, manifest: String::new(), sources };
        check_crate(&krate)
            .into_iter()
            .filter(|finding| !finding.warning)
            .map(|finding| finding.line)
            .collect()
    }

    #[test]
    fn engine_crates_do_without_std() {
        assert_eq!(
            found(
                "memfold",
                "use std::vec::Vec;\nlet x = ::std::mem::take(y);\nextern crate std;\nuse std;"
            ),
            [1, 2, 3, 4]
        );
        assert!(
            found(
                "memfold",
                "// std::vec\nuse core::mem;\nlet no_std = my::std_like;\nlet x = \"std::\";"
            )
            .is_empty()
        );
        assert!(found("memfold", "#[cfg(test)]\nmod tests { use std::vec::Vec; }").is_empty());
        assert!(found("memfold-cli", "use std::vec::Vec;").is_empty());
    }

    #[test]
    fn engine_crates_do_not_print() {
        assert_eq!(
            found("memfold-store", "fn f() {\n    println!(\"x\");\n    dbg!(x);\n}"),
            [2, 3]
        );
        assert!(found("memfold-store", "#[test]\nfn f() { println!(\"x\"); }").is_empty());
        assert!(found("memfold-cli", "println!(\"x\");").is_empty());
    }

    #[test]
    fn an_engine_crate_says_that_it_has_no_std() {
        let findings_of =
            |text| declares_no_std(&Source::new("engine/engine/src/lib.rs", text, false)).is_none();
        assert!(findings_of("#![no_std]"));
        assert!(findings_of("//! x\n#![cfg_attr(not(any(test, feature = \"shuttle\")), no_std)]"));
        assert!(!findings_of("// #![no_std]\n#![allow(missing_docs)]"));
    }

    #[test]
    fn unsafe_code_is_argued_where_it_stands() {
        let text = "fn f() {\n    // SAFETY: as above.\n    // SAFETY: as the caller promises.\n}";
        assert_eq!(found("xtask", text), [2]);
    }

    #[test]
    fn nothing_unfinished_stays() {
        assert_eq!(
            found("xtask", "fn f() {\n    todo!()\n}\nfn g() { unimplemented!(\"x\") }"),
            [2, 4]
        );
        let note = format!("// {}: later\nfn f() {{}} // {}", LEFTOVERS[0], LEFTOVERS[1]);
        assert_eq!(found("xtask", &note), [1, 2]);
        assert!(found("xtask", "let todo = 1; // mastodons").is_empty());
        assert_eq!(leftovers("Makefile", &format!("all:\n# {} x", LEFTOVERS[2])).len(), 1);
    }
}
