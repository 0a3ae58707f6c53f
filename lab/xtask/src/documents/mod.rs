//! The documents say what there is: files, links, names, messages, commands. All checks of documents
//! are here, except those of tables, which need the crates that have them (`e2e/documents.rs`).

mod code;
mod messages;
mod described;
pub mod commands;

use std::path::{Component, Path, PathBuf};

use crate::finding::Finding;
use crate::tree::Tree;

use code::spans;

/// A file that a text names, and its line.
type Mention = (usize, String);

/// Checks all documents, and the comments of all sources.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in &tree.documents {
        let missing_names = mentions(text).into_iter().filter(|(_, name)| !exists(tree, name));
        findings.extend(missing_names.map(|(line, name)| gone(path, line, &name)));
        let dead = links(text).into_iter().filter(|(_, link)| !leads_somewhere(tree, path, link));
        findings.extend(dead.map(|(line, link)| {
            Finding::error(path, line, format!("the link {link} leads nowhere: correct it"))
        }));
    }
    for source in tree.crates.iter().flat_map(|krate| &krate.sources) {
        let missing_names =
            mentions(&source.comments).into_iter().filter(|(_, name)| !exists(tree, name));
        findings.extend(missing_names.map(|(line, name)| gone(&source.path, line, &name)));
    }
    findings.extend(messages::check(tree));
    findings.extend(described::check(tree));
    findings
}

fn gone(path: &str, line: usize, name: &str) -> Finding {
    Finding::error(path, line, format!("there is no file {name}: name the one that there is"))
}

/// Returns whether a file of the tree has this path or ends with it.
fn exists(tree: &Tree, name: &str) -> bool {
    let is_end = |path: &String| path.strip_suffix(name).is_some_and(is_directory);
    tree.paths.iter().any(is_end)
}

fn is_directory(before: &str) -> bool {
    before.is_empty() || before.ends_with('/')
}

/// Returns the Rust files, and the documents with their folders, that stand between backquotes. Braces
/// name several.
fn mentions(text: &str) -> Vec<Mention> {
    let mut names = Vec::new();
    for span in spans(text) {
        let is_path = |byte: u8| byte.is_ascii_alphanumeric() || b"_./{},-".contains(&byte);
        let name = span.text.split('#').next().unwrap_or_default();
        let is_named =
            name.len() > 3 && name.ends_with(".rs") || name.contains('/') && name.ends_with(".md");
        if is_named && name.bytes().all(is_path) {
            names.extend(expand(name).into_iter().map(|name| (span.line, name)));
        }
    }
    names
}

fn expand(name: &str) -> Vec<String> {
    let parts = name.split_once('{').and_then(|(before, rest)| {
        let (middle, after) = rest.split_once('}')?;
        Some((before, middle, after))
    });
    match parts {
        Some((before, inside, after)) => {
            inside.split(',').map(|part| format!("{before}{part}{after}")).collect()
        }
        None => vec![name.to_owned()],
    }
}

/// Returns the targets of the links to other places than the web.
fn links(text: &str) -> Vec<Mention> {
    let mut link_targets = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let targets = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        let local = targets.filter(|target| !target.contains("://") && !target.contains(' '));
        link_targets.extend(local.map(|target| (number + 1, target.to_owned())));
    }
    link_targets
}

fn leads_somewhere(tree: &Tree, from: &str, link: &str) -> bool {
    let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
    let directory = Path::new(from).parent().unwrap_or(Path::new(""));
    let target = if file.is_empty() { from.to_owned() } else { plain(&directory.join(file)) };
    let below = format!("{}/", target.trim_end_matches('/'));
    if !tree.paths.iter().any(|path| *path == target || path.starts_with(&below)) {
        return false;
    }
    let document = tree.documents.iter().find(|(path, _)| *path == target);
    anchor.is_empty()
        || document.is_none_or(|(_, text)| headings(text).iter().any(|heading| heading == anchor))
}

/// Returns the path without `..`.
fn plain(path: &Path) -> String {
    let mut parts = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => _ = parts.pop(),
            Component::CurDir => {}
            part => parts.push(part),
        }
    }
    parts.to_string_lossy().into_owned()
}

/// Returns the anchors of all headings, as they are made on GitHub.
fn headings(text: &str) -> Vec<String> {
    let titles = text.lines().filter(|line| line.starts_with('#'));
    let keeps = |letter: &char| letter.is_alphanumeric() || " -_".contains(*letter);
    let anchor = |title: &str| {
        let title = title.trim_start_matches('#').trim().to_lowercase();
        title.chars().filter(keeps).collect::<String>().replace(' ', "-")
    };
    titles.map(anchor).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Source;
    use crate::tree::Crate;

    fn tree(document: &str, comment: &str) -> Tree {
        let crates = vec![Crate {
            name: "x".into(),
            manifest_path: "crates/x/Cargo.toml".into(),
            manifest: String::new(),
            sources: vec![Source::new("crates/x/src/a.rs", comment, false)],
        }];
        let paths = ["crates/x/src/a.rs", "crates/x/src/b/mod.rs", "docs/one.md", "docs/two.md"];
        let documents = vec![
            ("docs/one.md".into(), document.into()),
            ("docs/two.md".into(), "# The `two`, and more\n".into()),
        ];
        let paths = paths.map(String::from).to_vec();
        Tree { crates, paths, ..Tree::of_documents(documents) }
    }

    fn lines(document: &str, comment: &str) -> Vec<usize> {
        check(&tree(document, comment)).iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn named_files_exist() {
        let right = "`x/src/{a,b/mod}.rs` `own.md` `docs/two.md#the` `not a path.rs` `.rs` `c.py`";
        assert!(lines(right, &format!("// {right}")).is_empty());
        assert_eq!(lines("text\n`x/src/{a,c}.rs`", "fn f() {}\n// `b.rs`\n"), [2, 2]);
        assert_eq!(lines("`od.rs`", "let text = \"`b.rs`\";"), [1], "a part of a name is no name");
    }

    #[test]
    fn links_lead_to_files_and_headings() {
        let right =
            "[a](two.md) [b](two.md#the-two-and-more) [c](../crates/x) [d](https://x.org/y)";
        assert!(lines(right, "").is_empty());
        assert_eq!(
            lines("[a](two.md#other)\n[b](no.md)\n# Own\n[c](#own) [d](#no)", ""),
            [1, 2, 4]
        );
    }
}
