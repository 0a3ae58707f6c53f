//! Module order: `lib.rs` lists its modules bottom first, and a module uses only those listed above it.
//!
//! A path counts if it starts with `crate::` (or with `super::` in a module's own file). A name that `lib.rs`
//! re-exports counts as a use of the module that it comes from. Tests are free.

use std::collections::HashMap;

use crate::finding::Finding;
use crate::scan;
use crate::source::{self, Source};
use crate::tree::{Crate, Tree};

/// Checks all crates that have a `lib.rs`.
pub fn check(tree: &Tree) -> Vec<Finding> {
    tree.crates.iter().flat_map(check_crate).collect()
}

fn check_crate(krate: &Crate) -> Vec<Finding> {
    let Some(lib) = krate.source("src/lib.rs") else { return Vec::new() };
    let modules = modules(lib);
    let names = names(lib, &modules);
    let mut findings = Vec::new();
    for source in &krate.sources {
        let Some(path) = source.path.strip_prefix(krate.directory()).and_then(|path| path.strip_prefix("src/")) else {
            continue;
        };
        let own = path.split('/').next().unwrap_or(path).trim_end_matches(".rs");
        let Some(place) = modules.iter().position(|module| module == own) else { continue };
        let top = !path.contains('/') || path.ends_with("/mod.rs") && path.matches('/').count() == 1;
        findings.extend(check_file(source, place, top, &modules, &names));
    }
    findings
}

/// Checks one file of the module at `place`; `top` says that `super` is the crate.
fn check_file(
    source: &Source,
    place: usize,
    top: bool,
    modules: &[String],
    names: &HashMap<String, usize>,
) -> Vec<Finding> {
    let own = &modules[place];
    let mut findings = Vec::new();
    for root in if top { &["crate", "super"][..] } else { &["crate"][..] } {
        for (offset, name) in first_names(&source.code, root) {
            let Some(&used) = names.get(&name).filter(|&&used| used > place) else { continue };
            if !source.in_test(offset) {
                let through = if modules[used] == name { String::new() } else { format!(" (through {name})") };
                let message = format!(
                    "{own} uses {}{through}, which lib.rs lists below it: move the code down, or the `mod` line up",
                    modules[used]
                );
                findings.push(Finding::error(&source.path, source.line(offset), message));
            }
        }
    }
    findings
}

/// The modules that `lib.rs` declares outside tests, in order.
fn modules(lib: &Source) -> Vec<String> {
    let code = lib.code.as_str();
    let outermost = |offset: usize| code[..offset].bytes().fold(0, |depth, byte| depth + step(byte)) == 0;
    scan::words(code, "mod")
        .filter(|&offset| !lib.in_test(offset) && outermost(offset))
        .map(|offset| word_at(code, offset + 3).1)
        .filter(|name| !name.is_empty())
        .collect()
}

/// What each name at the crate's root belongs to: a module itself, or the module that it is re-exported from.
fn names(lib: &Source, modules: &[String]) -> HashMap<String, usize> {
    let mut names: HashMap<String, usize> = modules.iter().cloned().zip(0..).collect();
    for offset in scan::words(&lib.code, "use") {
        let end = lib.code[offset..].find(';').map_or(lib.code.len(), |length| offset + length);
        for path in expand(&lib.code[offset + 3..end]) {
            let path = path.strip_prefix("crate::").or_else(|| path.strip_prefix("self::")).unwrap_or(&path);
            let Some((module, rest)) = path.split_once("::") else { continue };
            let Some(place) = modules.iter().position(|known| known == module) else { continue };
            let name =
                rest.rsplit_once(" as ").map_or_else(|| rest.rsplit("::").next().unwrap_or(rest), |(_, name)| name);
            if name != "*" && !names.contains_key(name) {
                names.insert(name.to_owned(), place);
            }
        }
    }
    names
}

/// Every path of a use tree: `a::{b, c as d}` gives `a::b` and `a::c as d`.
fn expand(tree: &str) -> Vec<String> {
    let tree = tree.trim();
    let Some(open) = tree.find('{') else { return vec![tree.split_whitespace().collect::<Vec<_>>().join(" ")] };
    let close = source::matching(tree, open);
    let prefix: String = tree[..open].split_whitespace().collect();
    let inside = &tree[open + 1..close.min(tree.len())];
    parts(inside).into_iter().flat_map(expand).map(|path| format!("{prefix}{path}")).collect()
}

/// Splits a list at the commas that are in no braces.
fn parts(list: &str) -> Vec<&str> {
    let (mut depth, mut start, mut parts) = (0, 0, Vec::new());
    for (at, byte) in list.bytes().enumerate() {
        depth += step(byte);
        if byte == b',' && depth == 0 {
            parts.push(&list[start..at]);
            start = at + 1;
        }
    }
    parts.push(&list[start..]);
    parts.retain(|part| !part.trim().is_empty());
    parts
}

/// The first names of all paths that start with `root::`, with their offsets; groups count each of their members.
fn first_names(code: &str, root: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for offset in scan::words(code, root) {
        let Some(rest) = code[offset + root.len()..].trim_start().strip_prefix("::") else { continue };
        let start = code.len() - rest.len();
        let start = start + rest.len() - rest.trim_start().len();
        if code[start..].starts_with('{') {
            let inside = &code[start + 1..source::matching(code, start)];
            for part in parts(inside) {
                let at = part.as_ptr() as usize - code.as_ptr() as usize;
                found.push(word_at(code, at));
            }
        } else {
            found.push(word_at(code, start));
        }
    }
    // `crate::name!` is a macro, which lives outside the modules.
    found.retain(|(offset, name)| !code[offset + name.len()..].starts_with('!'));
    found
}

/// The word at or after `from` past white space, with its offset.
fn word_at(code: &str, from: usize) -> (usize, String) {
    let start = code.len() - code[from..].trim_start().len();
    let name = code[start..].split(|character: char| !character.is_alphanumeric() && character != '_').next();
    (start, name.unwrap_or_default().to_owned())
}

fn step(byte: u8) -> i32 {
    match byte {
        b'{' => 1,
        b'}' => -1,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIB: &str = "//! mod comment;\nmod low;\npub mod middle;\npub(crate) mod high;\n#[cfg(test)]\nmod tests;\n\
        pub use high::{Engine, inner::{Part as Piece, *}};\npub use low::Unit;\n";

    fn found(path: &str, text: &str) -> Vec<usize> {
        let sources = vec![
            Source::new("crates/x/src/lib.rs", LIB, false),
            Source::new(&format!("crates/x/src/{path}"), text, false),
        ];
        let manifest_path = "crates/x/Cargo.toml".to_owned();
        let krate = Crate { name: "x".to_owned(), manifest_path, manifest: String::new(), sources };
        check_crate(&krate).into_iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn modules_are_read_in_order() {
        assert_eq!(modules(&Source::new("lib.rs", LIB, false)), ["low", "middle", "high"]);
    }

    #[test]
    fn a_module_may_use_what_is_listed_above_it() {
        assert!(found("middle.rs", "use crate::low::A;\nuse crate::middle::B;\nuse crate::{low, Unit};").is_empty());
        assert!(found("high.rs", "use crate::{low::{A, high}, middle};\nlet x = crate::middle::f();").is_empty());
    }

    #[test]
    fn a_module_may_not_use_what_is_listed_below_it() {
        assert_eq!(found("middle.rs", "use crate::low::A;\nuse crate::high::B;"), [2]);
        assert_eq!(found("middle/part.rs", "use crate::{\n    low::A,\n    high::B,\n};"), [3]);
        assert_eq!(found("low.rs", "fn f() {\n    crate::middle::g()\n}"), [2]);
        assert_eq!(found("low.rs", "use super::high::B;"), [1]);
        assert!(found("low/part.rs", "use super::high::B;").is_empty());
    }

    #[test]
    fn a_re_exported_name_counts_as_its_module() {
        assert_eq!(found("middle.rs", "use crate::Engine;\nuse crate::Piece;\nuse crate::Part;"), [1, 2]);
    }

    #[test]
    fn tests_comments_and_macros_are_free() {
        assert!(found("low.rs", "// crate::high\n#[cfg(test)]\nmod tests { use crate::high::B; }").is_empty());
        assert!(found("low.rs", "crate::high!(1);").is_empty());
    }
}
