//! The tables in the documents are those of the code; docs/reference.md is compared by the tests of
//! memfold-cli. All other checks of documents are made by
//! `cargo xtask tidy` and `cargo xtask commands`.
use memfold_engine::config::keys::COUNTED;
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
fn limits_describe_the_limit_in_the_words_of_the_help() {
    let normal_text =
        |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ").replace('`', "");
    let text = normal_text(&read("docs/limits.md"));
    assert!(text.contains(&normal_text(COUNTED)), "docs/limits.md lacks\n{COUNTED}");
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
