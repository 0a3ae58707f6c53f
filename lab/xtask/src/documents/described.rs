//! The documents name code that there is, show the example that rustdoc runs, and are short enough to
//! be read.

use crate::finding::Finding;
use crate::tree::Tree;

use super::code::spans;
use super::messages::shipped_code;

const MAP: &str = "ARCHITECTURE.md";
const LIBRARY: &str = "docs/library.md";
/// Documents, and their bytes at most.
const SHORT: [(&str, usize); 3] =
    [("README.md", 8 << 10), ("docs/usage.md", 10 << 10), (MAP, 20 << 10)];
/// Lines of README.md before the section on installing it, at most.
const FIRST_SCREEN_LINES: usize = 60;
const EXAMPLE: &str = "bindings/memfold/src/lib.rs";

/// Checks what the documents say of the code.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let code = shipped_code(tree);
    let mut findings = lengths(tree);
    findings.extend(first_screen(tree));
    findings.extend(names(tree, &code));
    findings.extend(folders(tree));
    findings.extend(example(tree));
    findings
}

fn lengths(tree: &Tree) -> Vec<Finding> {
    let too_long = |(path, most): (&str, usize)| {
        let len = tree.document(path)?.len();
        let message =
            format!("{len} bytes of at most {most}: move what is for few to docs/ or the code");
        (len > most).then(|| Finding::error(path, 0, message))
    };
    SHORT.into_iter().filter_map(too_long).collect()
}

/// Checks that README.md tells a newcomer all in one screen, before it says how to install it.
fn first_screen(tree: &Tree) -> Option<Finding> {
    let lines = tree.document("README.md")?.lines();
    let count = lines.take_while(|line| *line != "## Install").count();
    let message = format!("{count} lines before `## Install`, of at most {FIRST_SCREEN_LINES}");
    (count > FIRST_SCREEN_LINES).then(|| Finding::error("README.md", 0, message))
}

/// Checks the functions, types and variants after `::`.
fn names(tree: &Tree, code: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in &tree.documents {
        let paths = spans(text).filter(|span| !span.text.contains(' '));
        for span in paths.filter(|span| !span.text.starts_with("std::")) {
            let Some((_, name)) = span.text.rsplit_once("::") else { continue };
            let name = name.trim_end_matches("()");
            if !is_defined(code, name) {
                let message = format!("no code has `{name}`: name what there is");
                findings.push(Finding::error(path, span.line, message));
            }
        }
    }
    findings
}

fn is_defined(code: &str, name: &str) -> bool {
    let begins = ["fn", "struct", "enum", "trait"];
    let ends = [" ", "(", "<", "{", ";"];
    let is_item =
        |begin: &&str| ends.iter().any(|end| code.contains(&format!("{begin} {name}{end}")));
    let others = [format!(" {name}: "), format!(" {name},"), format!(" {name}(")];
    begins.iter().any(is_item) || others.iter().any(|form| code.contains(form))
}

/// Checks that the map names each file and folder of the engine.
fn folders(tree: &Tree) -> Vec<Finding> {
    let Some(map) = tree.document(MAP) else { return Vec::new() };
    let inside = tree.paths.iter().filter_map(|path| path.strip_prefix("engine/engine/src/"));
    let mut entries: Vec<String> = inside
        .map(|path| {
            path.split_once('/').map_or(path.to_owned(), |(folder, _)| format!("{folder}/"))
        })
        .filter(|entry| entry != "lib.rs")
        .collect();
    entries.dedup();
    entries.retain(|entry| !map.contains(&format!("`{entry}`")));
    let unnamed = |entry| Finding::error(MAP, 0, format!("doesn't name `{entry}`: add it"));
    entries.into_iter().map(unnamed).collect()
}

/// Checks that the only Rust in the page of the library is the example in the crate's page, without its hidden lines.
fn example(tree: &Tree) -> Option<Finding> {
    let page = tree.document(LIBRARY)?;
    let shown = page.split("```rust\n").skip(1).filter_map(|rest| rest.split("```").next());
    let source = tree.crates.iter().flat_map(|krate| &krate.sources);
    let source = source.filter(|source| source.path == EXAMPLE).map(|source| &source.text);
    let run = source.flat_map(|text| text.split("//! ```\n").nth(1)).flat_map(str::lines);
    let run: Vec<&str> = run
        .map(|line| line.strip_prefix("//!").unwrap_or(line))
        .map(|line| line.strip_prefix(' ').unwrap_or(line))
        .filter(|line| !line.starts_with("# "))
        .collect();
    let is_same = shown.map(str::trim_end).eq([run.join("\n")]);
    let message = format!("has other Rust than the example of {EXAMPLE}: no test would run it");
    (!is_same).then(|| Finding::error(LIBRARY, 0, message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Source;
    use crate::tree::Crate;

    fn tree(path: &str, code: &str, document: (&str, &str)) -> Tree {
        let source = Source::new(path, code, false);
        let krate = Crate {
            name: "x".into(),
            manifest_path: "engine/x/Cargo.toml".into(),
            manifest: String::new(),
            sources: vec![source],
        };
        let (name, text) = document;
        let mut tree = Tree::of_documents(vec![(name.into(), text.into())]);
        tree.crates = vec![krate];
        tree.paths = vec![path.into()];
        tree
    }

    #[test]
    fn names_after_colons_are_defined() {
        let code = "pub fn one() {}\nenum E {\n    Two,\n}\n#[cfg(test)]\nmod tests {\n    fn three() {}\n}";
        let lines = |text: &str| {
            let tree = tree("engine/x/src/a.rs", code, ("docs/a.md", text));
            let found = names(&tree, &shipped_code(&tree));
            found.iter().map(|finding| finding.line).collect::<Vec<_>>()
        };
        assert_eq!(lines("`a::one()` `E::Two` `std::gone` `a b::gone`"), [0usize; 0]);
        assert_eq!(lines("`E::Two`\n`E::Gone` `a::three()`"), [2, 2]);
    }

    #[test]
    fn map_names_each_folder_of_the_engine() {
        let found = |path: &str| folders(&tree(path, "", (MAP, "`fault/` `area.rs`"))).len();
        assert_eq!(found("engine/engine/src/fault/mod.rs"), 0);
        assert_eq!(found("engine/engine/src/area.rs"), 0);
        assert_eq!(found("engine/engine/src/lib.rs"), 0);
        assert_eq!(found("engine/engine/src/other/mod.rs"), 1);
    }

    #[test]
    fn library_page_shows_the_example_of_the_crate() {
        let page =
            "//! A crate.\n//! ```\n//! # hidden();\n//! let a = 1;\n//!\n//! shown(a);\n//! ```\n";
        let is_right = |text: &str| example(&tree(EXAMPLE, page, (LIBRARY, text))).is_none();
        assert!(is_right("```rust\nlet a = 1;\n\nshown(a);\n```\n"));
        assert!(!is_right("```rust\nlet a = 2;\n\nshown(a);\n```\n"));
        assert!(!is_right("no example"));
        assert!(!is_right("```rust\nlet a = 1;\n\nshown(a);\n```\n```rust\nother();\n```\n"));
    }

    #[test]
    fn short_documents_are_short() {
        let found =
            |bytes: usize| lengths(&tree("a.rs", "", ("README.md", &"x".repeat(bytes)))).len();
        assert_eq!((found(8192), found(8193)), (0, 1));
    }

    #[test]
    fn first_screen_of_the_readme_is_one_screen() {
        let found = |lines: usize| {
            let text = "x\n".repeat(lines) + "## Install\n" + &"x\n".repeat(100);
            first_screen(&tree("a.rs", "", ("README.md", &text))).is_some()
        };
        assert_eq!((found(60), found(61)), (false, true));
    }
}
