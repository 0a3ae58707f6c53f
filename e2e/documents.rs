//! The documents say what the code says: its tables, the files that there are; and they are short
//! enough to be read.
use memfold_engine::config::keys::{Audience, COUNTED, KEYS};
use memfold_stats::{FIGURES, Figure, FigureKind, ORDER_FIGURES, TIME_FIGURES};
use std::path::{Path, PathBuf};

/// A document, by its path from the root.
fn read(document: &str) -> String {
    let path = root().join(document);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// What stands in a document between `<!-- NAME:begin -->` and `<!-- NAME:end -->`.
fn section(document: &str, name: &str) -> String {
    let text = read(document);
    let (begin, end) = (format!("<!-- {name}:begin -->\n"), format!("<!-- {name}:end -->"));
    let (before, rest) =
        text.split_once(&begin).unwrap_or_else(|| panic!("{document} has no {begin}"));
    let (middle, after) =
        rest.split_once(&end).unwrap_or_else(|| panic!("{document} has no {end}"));
    assert!(!before.contains(&begin) && !after.contains(&begin), "{document} has {begin} twice");
    middle.to_string()
}

/// A row; a bar within a cell would end it.
fn row(cells: &[&str]) -> String {
    let cells: Vec<String> = cells.iter().map(|cell| cell.replace('|', "\\|")).collect();
    format!("| {} |\n", cells.join(" | "))
}

fn table(head: &[&str], rows: impl Iterator<Item = String>) -> String {
    let rule = format!("|{}\n", "---|".repeat(head.len()));
    row(head) + &rule + &rows.collect::<String>()
}

fn assert_same(document: &str, name: &str, wanted: &str) {
    let text = section(document, name);
    assert!(
        text == wanted,
        "{document}, between the marks of `{name}`: replace\n{text}\nby\n{wanted}"
    );
}

#[test]
fn documents_describe_the_limit_in_the_same_words() {
    let normal_text =
        |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ").replace('`', "");
    for document in ["README.md", "docs/limits.md"] {
        let text = normal_text(&read(document));
        assert!(text.contains(&normal_text(COUNTED)), "{document} lacks\n{COUNTED}");
    }
}

#[test]
fn usage_lists_every_flag_with_its_default_and_help() {
    let rows = KEYS
        .iter()
        .filter(|key| key.audience != Audience::Libraries)
        .map(|key| row(&[&format!("`--{} {}`", key.name, key.value), key.default, key.help]));
    assert_same("docs/usage.md", "flags", &table(&["flag", "default", "what it sets"], rows));
}

#[test]
fn usage_lists_every_codec_with_its_levels() {
    let rows = memfold_store::CODECS.iter().map(|codec| {
        let (low, high) = (codec.levels.start(), codec.levels.end());
        let levels = if low == high { "none".to_string() } else { format!("{low} to {high}") };
        row(&[&format!("`{}`", codec.name), &levels, &codec.level_default.to_string(), codec.help])
    });
    assert_same(
        "docs/usage.md",
        "codecs",
        &table(&["codec", "levels", "default", "what it is"], rows),
    );
}

/// A message that has changed would send its reader to no row, or to a wrong one.
#[test]
fn usage_quotes_messages_as_the_code_prints_them() {
    let code = printing_code();
    let table = section("docs/usage.md", "messages");
    let cells = table.lines().filter_map(|line| line.strip_prefix("| `")?.split(" | ").next());
    let quotes = cells.flat_map(|cell| cell.split('`').step_by(2));
    let mut count = 0;
    for quote in quotes.filter(|quote| !quote.is_empty()) {
        let message = with_holes(quote, ('<', '>'), |_| true);
        let message = message.trim_matches([HOLE, ' ']);
        assert!(code.contains(message), "docs/usage.md: no code prints `{quote}`");
        count += 1;
    }
    assert!(count > 40, "only {count} messages were found");
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
fn printing_code() -> String {
    let mut code = String::new();
    let rooms = ["engine", "run", "bindings", "block", "remote"].map(|room| root().join(room));
    for file in rooms.iter().flat_map(|room| sources(room)) {
        let text = std::fs::read_to_string(&file).unwrap();
        let mut continues = false;
        let text = text.split("#[cfg(test)]\nmod ").next().expect("there is a first part");
        for line in text.lines().filter(|line| !line.trim_start().starts_with("//")) {
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

/// Returns the Rust files below `folder` that are built into memfold.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let (path, name) = (entry.path(), entry.file_name());
        match name.to_str().unwrap_or_default() {
            "tests" | "tests.rs" | "examples" => {}
            _ if path.is_dir() => names.extend(sources(&path)),
            name if name.ends_with(".rs") => names.push(path),
            _ => {}
        }
    }
    names
}

/// What is not a hidden line of it: rustdoc compiles and runs it.
#[test]
fn usage_shows_the_example_that_the_crate_runs() {
    let usage = read("docs/usage.md");
    let example = usage.split("```rust\n").nth(1).and_then(|rest| rest.split("```").next());
    let source = read("bindings/memfold/src/lib.rs");
    let run = source.split("//! ```\n").nth(1).expect("an example").lines();
    let run: Vec<&str> = run
        .map(|line| line.strip_prefix("//!").expect("a line of documentation"))
        .map(|line| line.strip_prefix(' ').unwrap_or(line))
        .filter(|line| !line.starts_with("# "))
        .collect();
    assert_eq!(example.expect("docs/usage.md has no block of Rust").trim_end(), run.join("\n"));
    assert_eq!(usage.matches("```rust").count(), 1, "others would not be run");
}

#[test]
fn counters_lists_every_counter_with_its_help() {
    let one = |figure: &Figure, kind: &str| {
        let kernel = match figure.kernel {
            "" => String::new(),
            name => format!("`{name}`"),
        };
        row(&[&format!("`{}`", figure.name), kind, figure.unit.name(), &kernel, figure.help])
    };
    let kind = |figure: &Figure| match figure.kind {
        FigureKind::Gauge => "gauge",
        FigureKind::Counter => "counter",
        FigureKind::Times => "histogram",
    };
    let plain_figures = FIGURES.iter().chain(TIME_FIGURES).map(|figure| one(figure, kind(figure)));
    let per_order = ORDER_FIGURES.iter().map(|figure| one(figure, "counter, per order"));
    assert_same(
        "docs/counters.md",
        "counters",
        &table(
            &["name", "kind", "unit", "in Linux", "what it counts"],
            plain_figures.chain(per_order),
        ),
    );
}

#[test]
fn readme_and_map_are_short_enough_to_be_read() {
    for (document, most) in [("README.md", 8 << 10), ("ARCHITECTURE.md", 20 << 10)] {
        let len = read(document).len();
        assert!(
            len <= most,
            "{document}: {len} bytes of at most {most}: move what is for few to docs/ or the code"
        );
    }
}

fn documents() -> Vec<String> {
    let docs =
        std::fs::read_dir(root().join("docs")).unwrap().map(|entry| entry.unwrap().file_name());
    let docs = docs
        .map(|name| format!("docs/{}", name.to_str().unwrap()))
        .filter(|name| name.ends_with(".md"));
    docs.chain(["README.md", "ARCHITECTURE.md"].map(str::to_string)).collect()
}

#[test]
fn links_between_documents_lead_somewhere() {
    for document in documents() {
        let text = read(&document);
        for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if target.contains("://") {
                continue;
            }
            let (file, heading) = target.split_once('#').unwrap_or((target, ""));
            let folder = Path::new(&document).parent().unwrap();
            let path = if file.is_empty() { PathBuf::from(&document) } else { folder.join(file) };
            assert!(
                root().join(&path).exists(),
                "{document}: a link to {target}, which isn't there"
            );
            let has_heading = heading.is_empty()
                || read(path.to_str().unwrap()).lines().any(|line| is_heading(line, heading));
            assert!(has_heading, "{document}: a link to {target}, which has no such heading");
        }
    }
}

/// Returns whether a line is the heading of this name in links, as GitHub makes them.
fn is_heading(line: &str, name: &str) -> bool {
    let Some(title) = line.strip_prefix('#') else { return false };
    let title = title.trim_start_matches('#').trim().to_lowercase();
    let letters = title.chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
    letters.map(|c| if c == ' ' { '-' } else { c }).eq(name.chars())
}

#[test]
fn map_names_every_folder_of_the_engine_and_no_missing_file() {
    let map = read("ARCHITECTURE.md");
    let source = root().join("engine/engine/src");
    for entry in std::fs::read_dir(&source).unwrap().map(Result::unwrap) {
        let name = entry.file_name().into_string().unwrap();
        let entry_name =
            if entry.path().is_dir() { format!("`{name}/`") } else { format!("`{name}`") };
        assert!(
            map.contains(&entry_name) || name == "lib.rs",
            "ARCHITECTURE.md doesn't name {entry_name}"
        );
    }
    let walks = map.split("## The fault walk").nth(1).expect("the walks");
    for file in walks.split('`').filter(|word| word.ends_with(".rs") && word.contains('/')) {
        assert!(
            source.join(file).exists() || root().join(file).exists(),
            "ARCHITECTURE.md names {file}"
        );
    }
}

#[test]
fn documents_name_no_missing_function_type_or_variant() {
    let (code, mut count) = (printing_code(), 0);
    for document in documents() {
        let text = read(&document);
        let quotes = text.split('`').skip(1).step_by(2);
        let paths = quotes.filter(|word| !word.contains(' ') && !word.starts_with("std::"));
        for name in paths.filter_map(|word| Some(word.rsplit_once("::")?.1)) {
            count += 1;
            let name = name.trim_end_matches("()");
            let begins = ["fn", "struct", "enum", "trait"];
            let is_item = begins.iter().any(|begin| {
                [" ", "(", "<", "{", ";"]
                    .iter()
                    .any(|end| code.contains(&format!("{begin} {name}{end}")))
            });
            let others = [format!(" {name}: "), format!(" {name},"), format!(" {name}(")];
            let is_there = is_item || others.iter().any(|form| code.contains(form));
            assert!(is_there, "{document} names `{name}`, which no code has");
        }
    }
    assert!(count > 30, "only {count} names were found");
}
