//! Bounds on the length of files and functions, and on the number of files in a folder.

use std::collections::BTreeMap;

use syn::spanned::Spanned;
use syn::visit::{self, Visit};

use crate::finding::Finding;
use crate::source::Source;
use crate::tree::{Crate, Tree};

/// Longer files give a warning.
const FILE_LINES_WARN: usize = 600;
/// Longer files fail.
const FILE_LINES_MAX: usize = 800;
/// Longer functions give a warning; from their name to their closing brace.
const FUNCTION_LINES_WARN: usize = 60;
/// More files in one folder of `src` fail.
const FOLDER_FILES_MAX: usize = 15;

/// Checks all crates.
pub fn check(tree: &Tree) -> Vec<Finding> {
    tree.crates.iter().flat_map(check_crate).collect()
}

fn check_crate(krate: &Crate) -> Vec<Finding> {
    let mut findings: Vec<Finding> = krate.sources.iter().filter_map(length).collect();
    findings.extend(krate.sources.iter().flat_map(functions));
    findings.extend(folders(krate));
    findings
}

fn length(source: &Source) -> Option<Finding> {
    let lines = source.lines();
    let message = format!("{lines} lines: split it by nouns (at most {FILE_LINES_WARN})");
    match lines {
        _ if lines > FILE_LINES_MAX => Some(Finding::error(&source.path, 0, message)),
        _ if lines > FILE_LINES_WARN => Some(Finding::warning(&source.path, 0, message)),
        _ => None,
    }
}

/// Finds folders of `src` with too many files.
fn folders(krate: &Crate) -> Vec<Finding> {
    let mut files: BTreeMap<&str, usize> = BTreeMap::new();
    let root = format!("{}src/", krate.directory());
    for source in krate.sources.iter().filter(|source| source.path.starts_with(&root)) {
        let folder = source.path.rsplit_once('/').map_or("", |(folder, _)| folder);
        *files.entry(folder).or_default() += 1;
    }
    files.retain(|_, count| *count > FOLDER_FILES_MAX);
    let message =
        |count| format!("{count} files in a folder: group them (at most {FOLDER_FILES_MAX})");
    files.into_iter().map(|(folder, count)| Finding::error(folder, 0, message(count))).collect()
}

/// Finds long functions outside tests. A file that can't be parsed has none; other checks report
/// it.
fn functions(source: &Source) -> Vec<Finding> {
    let mut reader = Functions { source, found: Vec::new() };
    if let Ok(file) = syn::parse_file(&source.text) {
        reader.visit_file(&file);
    }
    reader.found
}

struct Functions<'a> {
    source: &'a Source,
    found: Vec<Finding>,
}

impl Functions<'_> {
    fn function(&mut self, signature: &syn::Signature, body: &syn::Block) {
        let (start, end) = (signature.span(), body.span());
        let lines = end.end().line - start.start().line + 1;
        if lines > FUNCTION_LINES_WARN && !self.source.in_test(start.byte_range().start) {
            let message = format!(
                "{} is {lines} lines: split it (about {FUNCTION_LINES_WARN})",
                signature.ident
            );
            self.found.push(Finding::warning(&self.source.path, start.start().line, message));
        }
    }
}

impl<'ast> Visit<'ast> for Functions<'_> {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.function(&item.sig, &item.block);
        visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.function(&item.sig, &item.block);
        visit::visit_impl_item_fn(self, item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_files_are_told_and_longer_ones_fail() {
        let file = |lines| Source::new("a.rs", &"\n".repeat(lines), false);
        assert_eq!(length(&file(FILE_LINES_WARN)), None);
        assert!(length(&file(FILE_LINES_WARN + 1)).expect("it is long").warning);
        assert!(!length(&file(FILE_LINES_MAX + 1)).expect("it is too long").warning);
    }

    #[test]
    fn long_functions_are_told_by_name_and_line() {
        let function = |lines| format!("// x\nfn long(\n) {{\n{}}}\n", "f();\n".repeat(lines));
        let lengths_of = |text: &str| functions(&Source::new("a.rs", text, false));
        assert_eq!(lengths_of(&function(FUNCTION_LINES_WARN - 3)), []);
        let lengths = lengths_of(&function(FUNCTION_LINES_WARN - 2));
        assert_eq!((lengths.len(), lengths[0].line, lengths[0].warning), (1, 2, true));
        assert!(lengths[0].message.starts_with("long is 61 lines"));
        assert_eq!(lengths_of(&format!("impl X {{\n{}}}", function(70))).len(), 1);
        assert_eq!(lengths_of(&format!("#[cfg(test)] mod tests {{\n{}}}", function(70))), []);
    }

    #[test]
    fn a_folder_of_sixteen_files_fails() {
        let findings_of = |folder: &str, count: usize| {
            let sources = (0..count)
                .map(|n| Source::new(&format!("x/src/{folder}f{n}.rs"), "", false))
                .collect();
            let manifest_path = "x/Cargo.toml".to_owned();
            folders(&Crate {
                name: "x".to_owned(),
                manifest_path,
                manifest: String::new(),
                sources,
            })
        };
        assert_eq!(findings_of("", FOLDER_FILES_MAX), []);
        let findings = findings_of("deep/", FOLDER_FILES_MAX + 1);
        assert_eq!((findings[0].path.as_str(), findings[0].warning), ("x/src/deep", false));
    }
}
