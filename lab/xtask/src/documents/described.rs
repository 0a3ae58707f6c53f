//! The documents name code that there is, quote messages as it prints them, show the example that
//! rustdoc runs, and are short enough to be read.

use crate::finding::Finding;
use crate::tree::Tree;

use super::code::spans;

const MAP: &str = "ARCHITECTURE.md";
const USAGE: &str = "docs/usage.md";
/// Rooms of the code that users run.
const ROOMS: [&str; 5] = ["engine/", "run/", "bindings/", "block/", "remote/"];
/// Documents, and their bytes at most.
const SHORT: [(&str, usize); 2] = [("README.md", 8 << 10), (MAP, 20 << 10)];
const EXAMPLE: &str = "bindings/memfold/src/lib.rs";

/// Checks what the documents say of the code.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let code = shipped_code(tree);
    let mut findings = lengths(tree);
    findings.extend(names(tree, &code));
    findings.extend(messages(tree, &code));
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

/// Checks the messages in the first cells of a table: a changed one would send its reader to no row,
/// or to a wrong one.
fn messages(tree: &Tree, code: &str) -> Vec<Finding> {
    let Some(text) = tree.document(USAGE) else { return Vec::new() };
    let is_row = |line: &&str| line.starts_with("| `");
    let (mut is_table, mut findings, mut count) = (false, Vec::new(), 0);
    for (number, line) in text.lines().enumerate() {
        match line {
            "<!-- messages:begin -->" => is_table = true,
            "<!-- messages:end -->" => is_table = false,
            _ => {}
        }
        let row = Some(line).filter(|line| is_table && is_row(line));
        let cell = row.and_then(|row| row[2..].split(" | ").next()).unwrap_or("");
        for quote in spans(cell) {
            count += 1;
            let message = with_holes(&quote.text, ('<', '>'), |_| true);
            if !code.contains(message.trim_matches([HOLE, ' '])) {
                let message = format!("no code prints `{}`: quote what it prints", quote.text);
                findings.push(Finding::error(USAGE, number + 1, message));
            }
        }
    }
    if count <= 40 {
        findings.push(Finding::error(USAGE, 0, format!("only {count} messages in its table")));
    }
    findings
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

/// Checks that the only Rust in the usage is the example in the crate's page, without its hidden lines.
fn example(tree: &Tree) -> Option<Finding> {
    let usage = tree.document(USAGE)?;
    let shown = usage.split("```rust\n").skip(1).filter_map(|rest| rest.split("```").next());
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
    (!is_same).then(|| Finding::error(USAGE, 0, message))
}

/// Stands for a value: `<size>` in a document, `{}` or `{size}` in a format string.
const HOLE: char = '\0';

/// Returns `text` with a hole for each value, which is between the two marks.
fn with_holes(text: &str, marks: (char, char), is_value: fn(&str) -> bool) -> String {
    let (mut out, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once(marks.0) {
        out.push_str(before);
        let value = after.split_once(marks.1).filter(|(value, _)| is_value(value));
        out.push(if value.is_some() { HOLE } else { marks.0 });
        rest = value.map_or(after, |(_, rest_of_text)| rest_of_text);
    }
    out + rest
}

/// Returns all code without tests and comments, with strings of several lines as one line, and with
/// holes in format strings.
fn shipped_code(tree: &Tree) -> String {
    let mut code = String::new();
    let sources = tree.crates.iter().flat_map(|krate| &krate.sources);
    for source in sources.filter(|source| ROOMS.iter().any(|room| source.path.starts_with(room))) {
        let (mut continues, mut offset) = (false, 0);
        for line in source.text.split_inclusive('\n') {
            let at = offset;
            offset += line.len();
            if source.in_test(at) || line.trim_start().starts_with("//") {
                continue;
            }
            let line = line.trim_end_matches('\n');
            let line = if continues { line.trim_start() } else { line };
            let part = line.strip_suffix('\\');
            continues = part.is_some();
            code.push_str(part.unwrap_or(line));
            code.extend((!continues).then_some('\n'));
        }
    }
    let is_value = |text: &str| !text.contains([' ', '{', '"', '\n', ',', ';']);
    with_holes(&code, ('{', '}'), is_value)
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
    fn messages_are_printed_by_code() {
        let code = "fn f() {\n    warn(\"The file {name} \\\n        is gone\");\n}";
        let found = |cell: &str| {
            let rows = format!("| {cell} | `not a message` |\n").repeat(41);
            let usage = format!("<!-- messages:begin -->\n{rows}<!-- messages:end -->\n| `x` |");
            let tree = tree("run/x/src/a.rs", code, (USAGE, &usage));
            messages(&tree, &shipped_code(&tree)).len()
        };
        assert_eq!(found("`The file <name> is gone`"), 0);
        assert_eq!(found("`file <name> is gone`, `The file`"), 0);
        assert_eq!(found("`The file <name> is away`"), 41);
        assert_eq!(found("no quote"), 1, "too few");
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
    fn usage_shows_the_example_of_the_crate() {
        let page =
            "//! A crate.\n//! ```\n//! # hidden();\n//! let a = 1;\n//!\n//! shown(a);\n//! ```\n";
        let is_right = |usage: &str| example(&tree(EXAMPLE, page, (USAGE, usage))).is_none();
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
}
