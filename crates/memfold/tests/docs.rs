//! The tables in README.md and ARCHITECTURE.md say what the tables in the code say.
use memfold::config::keys::KEYS;
use memfold::stats::{FIGURES, Figure, Kind, ORDER_FIGURES};
use std::path::Path;

/// What stands in a document at the root between `<!-- NAME:begin -->` and `<!-- NAME:end -->`.
fn section(document: &str, name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(document);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let (begin, end) = (format!("<!-- {name}:begin -->\n"), format!("<!-- {name}:end -->"));
    let (before, rest) = text.split_once(&begin).unwrap_or_else(|| panic!("{document} has no {begin}"));
    let (inside, after) = rest.split_once(&end).unwrap_or_else(|| panic!("{document} has no {end}"));
    assert!(!before.contains(&begin) && !after.contains(&begin), "{document} has {begin} twice");
    inside.to_string()
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
    let found = section(document, name);
    assert!(found == wanted, "{document}, between the marks of `{name}`: replace\n{found}\nby\n{wanted}");
}

#[test]
fn the_readme_lists_every_flag_with_its_default_and_help() {
    let rows = KEYS.iter().map(|key| row(&[&format!("`--{} {}`", key.name, key.value), key.default, key.help]));
    assert_same("README.md", "flags", &table(&["flag", "default", "what it sets"], rows));
}

#[test]
fn the_readme_lists_every_codec_with_its_levels() {
    let rows = memfold_store::CODECS.iter().map(|codec| {
        let (low, high) = (codec.levels.start(), codec.levels.end());
        let levels = if low == high { "none".to_string() } else { format!("{low} to {high}") };
        row(&[&format!("`{}`", codec.name), &levels, &codec.level_default.to_string(), codec.help])
    });
    assert_same("README.md", "codecs", &table(&["codec", "levels", "default", "what it is"], rows));
}

#[test]
fn the_map_lists_every_counter_with_its_help() {
    let one = |figure: &Figure, kind: &str| row(&[&format!("`{}`", figure.name), kind, figure.help]);
    let plain = FIGURES.iter().map(|f| one(f, if f.kind == Kind::Gauge { "gauge" } else { "counter" }));
    let per_order = ORDER_FIGURES.iter().map(|f| one(f, "counter, per order"));
    assert_same("ARCHITECTURE.md", "counters", &table(&["name", "kind", "what it counts"], plain.chain(per_order)));
}
