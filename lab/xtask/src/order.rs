//! Order of modules: a module imports only from modules that are listed above it.
//!
//! `lib.rs` (or `main.rs`), and the `mod.rs` of a folder, list their modules bottom first. Pseudocode:
//! for every path `crate::a::b` in a file: where the file's own module and the path part ways, the
//! path's module is listed above the file's. Between a `mod.rs` and what it lists both ways are good.
//! Tests are free.
//!
//! That calls go down too follows from privacy: a walk's methods can be called only by who has
//! imported its type.

use std::collections::HashMap;

use crate::finding::Finding;
use crate::scan;
use crate::source::Source;
use crate::tree::{Crate, Tree};

/// Checks all crates that have a `lib.rs` or `main.rs`.
pub fn check(tree: &Tree) -> Vec<Finding> {
    tree.crates.iter().flat_map(check_crate).collect()
}

/// From a module's path (`pool::check`, empty for the root) to the names that it lists, in order.
type Listed = HashMap<String, Vec<String>>;

fn check_crate(krate: &Crate) -> Vec<Finding> {
    let root = format!("{}src/", krate.directory());
    let own: Vec<(String, &Source)> = krate
        .sources
        .iter()
        .filter_map(|source| Some((module_of(source.path.strip_prefix(&root)?)?, source)))
        .collect();
    let modules: Listed =
        own.iter().map(|(module, source)| (module.clone(), listed_in(source))).collect();
    own.iter().flat_map(|(module, source)| check_file(&modules, module, source)).collect()
}

/// The module of a file, by its path from `src`; `None` for a second root, such as a binary's.
fn module_of(path: &str) -> Option<String> {
    let path = path.strip_suffix(".rs")?;
    if matches!(path, "lib" | "main") {
        return Some(String::new());
    }
    (!path.starts_with("bin/")).then(|| path.trim_end_matches("/mod").replace('/', "::"))
}

/// The modules that a file lists.
fn listed_in(source: &Source) -> Vec<String> {
    scan::words(&source.code, "mod")
        .filter_map(|offset| source.code[offset + 3..].split_once(';'))
        .map(|(name, _)| name.trim().to_owned())
        .filter(|name| !name.is_empty() && name.bytes().all(scan::is_word))
        .collect()
}

fn check_file(listed: &Listed, module: &str, source: &Source) -> Vec<Finding> {
    let from: Vec<String> =
        module.split("::").filter(|name| !name.is_empty()).map(str::to_owned).collect();
    let paths = source
        .code
        .match_indices("crate::")
        .filter(|(at, _)| !source.in_test(*at) && !source.code[..*at].ends_with(['$', '_']));
    let findings = paths.flat_map(|(at, start)| {
        let (from, to) = (&from, paths_at(&source.code[at + start.len()..]));
        to.into_iter().filter_map(move |to| Some((at, upward(listed, from, &to)?)))
    });
    findings
        .map(|(at, (own, other))| {
            let message = format!(
                "{own} uses {other}, which is listed below it: move the code down, or the `mod` line up"
            );
            Finding::error(&source.path, source.line(at), message)
        })
        .collect()
}

/// The paths that begin after `crate::`: one, or those of a group in braces.
fn paths_at(code: &str) -> Vec<Vec<String>> {
    let code = code.trim_start();
    if let Some(group) = code.strip_prefix('{') {
        let end = crate::source::matching(code, 0).saturating_sub(1).min(group.len());
        return crate::source::arguments(&group[..end]).into_iter().flat_map(paths_at).collect();
    }
    let name = |part: &str| {
        let end = part.bytes().position(|byte| !scan::is_word(byte)).unwrap_or(part.len());
        part[..end].to_owned()
    };
    let mut names = Vec::new();
    let mut rest = code;
    loop {
        let word = name(rest);
        let len = word.len();
        if len == 0 {
            break;
        }
        names.push(word);
        match rest[len..].strip_prefix("::") {
            Some(more) => rest = more,
            None => break,
        }
    }
    vec![names]
}

/// The two modules beside each other of which the lower one uses the upper one, if it does.
fn upward(listed: &Listed, from: &[String], to: &[String]) -> Option<(String, String)> {
    let common = from.iter().zip(to).take_while(|(from, to)| from == to).count();
    let (own, other) = (from.get(common)?, to.get(common)?);
    let siblings = listed.get(&from[..common].join("::"))?;
    let place = |name: &String| siblings.iter().position(|sibling| sibling == name);
    let path = |name: &String| [&from[..common], core::slice::from_ref(name)].concat().join("::");
    (place(other)? > place(own)?).then(|| (path(own), path(other)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        let sources: Vec<Source> = files
            .iter()
            .map(|(path, text)| Source::new(&format!("x/src/{path}"), text, false))
            .collect();
        let krate = Crate {
            name: "x".to_owned(),
            manifest_path: "x/Cargo.toml".to_owned(),
            manifest: String::new(),
            sources,
        };
        check_crate(&krate).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn imports_lead_down_at_each_level() {
        let good = [
            ("lib.rs", "mod low; mod high;"),
            ("low.rs", "fn f() {}"),
            ("high/mod.rs", "mod a; mod b; use crate::high::b::B; use crate::low;"),
            ("high/a.rs", "use crate::low::f;"),
            ("high/b.rs", "use crate::{low::f, high::a::A};"),
        ];
        assert_eq!(found(&good), Vec::<String>::new());
        let bad = [
            ("lib.rs", "mod low; mod high;"),
            ("low.rs", "#[cfg(test)] use crate::high; // crate::high\nuse crate::{low, high::x};"),
            ("high/mod.rs", "mod a; mod b;"),
            ("high/a.rs", "fn f() { crate::high::b::g() }"),
        ];
        let findings = found(&bad);
        assert_eq!(findings.len(), 2, "{findings:?}");
        assert!(findings[0].contains("low uses high"), "{findings:?}");
        assert!(findings[1].contains("high::a uses high::b"), "{findings:?}");
    }
}
