//! The list of what the crate `memfold` exports, from the pages that `cargo doc` makes of it. A
//! change of it is a change of the promise to users, so `bindings/memfold/api.txt` must show it.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::finding::Finding;

/// Path of the list.
const LIST: &str = "bindings/memfold/api.txt";
/// Where a page shows items that a type has only by its `Deref`, or by a trait.
const NOT_OWN: [&str; 2] = ["id=\"deref-methods-", "id=\"trait-implementations\""];

/// Checks the list against the pages in the folder `pages`, or writes it.
pub fn check(root: &Path, pages: &Path, writes: bool) -> Result<Vec<Finding>> {
    let list = list(pages)?;
    let path = root.join(LIST);
    if writes {
        fs::write(&path, &list).with_context(|| format!("can't write {LIST}"))?;
        return Ok(Vec::new());
    }
    let known = fs::read_to_string(&path).with_context(|| format!("can't read {LIST}"))?;
    Ok(compare(&known, &list))
}

/// Returns a finding for each line that only one of the lists has.
fn compare(known: &str, list: &str) -> Vec<Finding> {
    let lacks = |list: &str, line: &str| !list.lines().any(|other| other == line);
    let lost_lines =
        known.lines().enumerate().filter(|(_, line)| lacks(list, line)).map(|(n, line)| {
            let message = format!("`{line}` is not exported any more: run cargo xtask api --write");
            Finding::error(LIST, n + 1, message)
        });
    let new = list.lines().filter(|line| lacks(known, line)).map(|line| {
        Finding::error(LIST, 0, format!("`{line}` is not listed: run cargo xtask api --write"))
    });
    lost_lines.chain(new).collect()
}

/// Returns the list: a line for each type, constant, variant, field and method.
fn list(pages: &Path) -> Result<String> {
    let mut lines = Vec::new();
    let what = || format!("no pages in {}: run cargo doc -p memfold --no-deps", pages.display());
    for entry in fs::read_dir(pages).with_context(what)? {
        let path = entry?.path();
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        if let [kind, name, "html"] = file.split('.').collect::<Vec<_>>()[..] {
            lines.extend(items(kind, name, &fs::read_to_string(&path)?));
        }
    }
    anyhow::ensure!(!lines.is_empty(), what());
    lines.sort();
    Ok(lines.join("\n") + "\n")
}

/// Returns the lines for the page of one item.
fn items(kind: &str, name: &str, page: &str) -> Vec<String> {
    let end = NOT_OWN.iter().filter_map(|mark| page.find(mark)).min().unwrap_or(page.len());
    let page = &page[..end];
    let mut lines = vec![format!("{kind} {name}")];
    let ids = |mark: &str| page.split(&format!("id=\"{mark}.")).skip(1).collect::<Vec<_>>();
    let word = |part: &str| part.split('"').next().unwrap_or_default().to_owned();
    for mark in ["variant", "structfield"] {
        lines.extend(ids(mark).into_iter().filter(|part| !word(part).contains('.')).map(|part| {
            let kind = if mark == "variant" { "variant" } else { "field" };
            format!("{kind} {name}::{}", word(part))
        }));
    }
    lines.extend(ids("method").into_iter().filter_map(|part| {
        let (_, head) = part.split_once("code-header\">")?;
        let (head, _) = head.split_once("</h4>")?;
        Some(format!("{name}: {}", plain(head)))
    }));
    lines.dedup();
    lines
}

/// Returns the text of HTML, in one line.
fn plain(html: &str) -> String {
    let mut text = String::new();
    for part in html.split('<') {
        text.push_str(part.split_once('>').map_or(part, |(_, after)| after));
    }
    for (code, character) in
        [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&#39;", "'"), ("&amp;", "&")]
    {
        text = text.replace(code, character);
    }
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_tells_what_a_type_has_itself() {
        let page = "<section id=\"method.pin\" class=\"method\"><h4 class=\"code-header\">pub fn \
            <a href=\"#method.pin\">pin</a>(&amp;self) -&gt; <a>Pin</a>&lt;'_&gt;</h4></section>\
            <section id=\"variant.One\" class=\"variant\"></section>\
            <span id=\"variant.One.field.0\"></span><span id=\"structfield.size\"></span>\
            <h2 id=\"trait-implementations\"></h2>\
            <section id=\"method.fmt\"><h4 class=\"code-header\">fn fmt()</h4></section>";
        let expected =
            ["struct T", "variant T::One", "field T::size", "T: pub fn pin(&self) -> Pin<'_>"];
        assert_eq!(items("struct", "T", page), expected);
    }

    #[test]
    fn each_difference_is_found() {
        assert!(compare("a\nb\n", "a\nb\n").is_empty());
        let findings = compare("a\nb\n", "a\nc\n");
        assert_eq!(findings.iter().map(|finding| finding.line).collect::<Vec<_>>(), [2, 0]);
    }
}
