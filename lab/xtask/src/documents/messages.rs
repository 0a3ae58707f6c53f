//! The page of messages quotes what the code prints, and has each warning, each reason why a process
//! ends, and each refusal that doesn't say itself what to do.

use std::ops::Range;

use crate::finding::Finding;
use crate::scan;
use crate::source::{Source, matching};
use crate::tree::Tree;

use super::code::spans;

const PAGE: &str = "docs/messages.md";
/// Rooms of the code that users run.
const ROOMS: [&str; 5] = ["engine/", "run/", "bindings/", "block/", "remote/"];
/// What the text of a warning begins with.
const WARNING: &str = "warning: ";
/// Functions that end the process with a reason.
const ENDS: [&str; 2] = ["die", "raw::end"];
/// Functions that refuse to run.
const REFUSES: [&str; 3] =
    ["CommandFailure::own", "CommandFailure::not_executable", "CommandFailure::not_found"];
/// Words that begin a sentence of advice.
const ADVICE: [&str; 17] = [
    "Allow",
    "Ask",
    "Free",
    "Give",
    "Keep",
    "Leave",
    "Make",
    "Move",
    "Put",
    "Raise",
    "Remove",
    "Run",
    "Try",
    "Use",
    "Write",
    "memfold top --once",
    "--help",
];

/// Stands for a value: `<size>` in a document, `{}` or `{size}` in a format string.
const HOLE: char = '\0';

/// Checks the page against the code, and the code against the page.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let Some(text) = tree.document(PAGE) else { return Vec::new() };
    let quotes = quotes(text);
    let code = shipped_code(tree);
    let unprinted = quotes.iter().filter(|(_, quote)| !code.contains(holed(quote).as_str()));
    let mut findings: Vec<Finding> = unprinted
        .map(|(line, quote)| {
            Finding::error(PAGE, *line, format!("no code prints `{quote}`: quote what it prints"))
        })
        .collect();
    let quotes: Vec<String> = quotes.iter().map(|(_, quote)| holed(quote)).collect();
    findings.extend(shipped(tree).flat_map(|source| unlisted(source, &quotes)));
    if quotes.len() <= 40 {
        findings.push(Finding::error(PAGE, 0, format!("only {} messages in it", quotes.len())));
    }
    findings
}

/// Returns the quotes in the first cells of the tables, with their lines.
fn quotes(text: &str) -> Vec<(usize, String)> {
    let mut all = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| line.starts_with("| `")) {
        let cell = line[2..].split(" | ").next().unwrap_or_default();
        all.extend(spans(cell).map(|quote| (number + 1, quote.text)));
    }
    all
}

fn holed(quote: &str) -> String {
    with_holes(quote, ('<', '>'), |_| true).trim_matches([HOLE, ' ']).to_owned()
}

/// Returns the messages of a file that no quote is part of.
fn unlisted(source: &Source, quotes: &[String]) -> Vec<Finding> {
    let literals = literals(source);
    let is_listed = |texts: &[String]| {
        texts.iter().any(|text| quotes.iter().any(|quote| text.contains(quote.as_str())))
    };
    let finding = |at: usize, texts: &[String]| {
        let text = texts.join("").replace(HOLE, "<...>");
        let message = format!("{PAGE} lacks `{}`: add what to do", text.trim());
        Finding::error(&source.path, source.line(at), message)
    };
    let mut messages: Vec<(usize, Vec<String>)> = warnings(source, &literals);
    for name in ENDS {
        messages.extend(calls(source, name).map(|call| (call.start, inside(&literals, &call))));
    }
    for call in REFUSES.iter().flat_map(|name| calls(source, name)) {
        let texts = inside(&literals, &call);
        let text = texts.join("");
        let names_its_cause = text.starts_with(['-', HOLE]);
        if !names_its_cause && !ADVICE.iter().any(|word| text.contains(word)) {
            messages.push((call.start, texts));
        }
    }
    // Fewer words are only the frame of a cause.
    let is_sentence = |text: &String| {
        let text = text.trim_start_matches("memfold: ").trim_start_matches(WARNING);
        text.replace(HOLE, "").split_whitespace().count() >= 3
    };
    messages.retain(|(at, texts)| {
        !source.in_test(*at) && texts.iter().any(is_sentence) && !is_listed(texts)
    });
    messages.iter().map(|(at, texts)| finding(*at, texts)).collect()
}

/// Returns the texts of warnings: a literal with the mark of one, and the others of its call.
fn warnings(source: &Source, literals: &[(usize, String)]) -> Vec<(usize, Vec<String>)> {
    let is_warning =
        |text: &str| text.strip_prefix("memfold: ").unwrap_or(text).starts_with(WARNING);
    let marked = literals.iter().filter(|(_, text)| is_warning(text));
    marked
        .map(|(at, text)| {
            let call = around(&source.code, *at);
            // In a block, or outside of all brackets, it is a constant.
            let is_call = source.code[call.start..].starts_with(['(', '[']);
            let texts = if is_call { inside(literals, &call) } else { vec![text.clone()] };
            (*at, texts)
        })
        .collect()
}

/// Returns the range of the bracket around an offset.
fn around(code: &str, at: usize) -> Range<usize> {
    let mut depth = 0;
    for (open, byte) in code.bytes().enumerate().take(at).collect::<Vec<_>>().into_iter().rev() {
        match byte {
            b')' | b']' | b'}' => depth += 1,
            b'(' | b'[' | b'{' if depth == 0 => return open..matching(code, open),
            b'(' | b'[' | b'{' => depth -= 1,
            _ => {}
        }
    }
    0..code.len()
}

/// Returns the arguments of the calls of a function.
fn calls<'a>(source: &'a Source, name: &'a str) -> impl Iterator<Item = Range<usize>> + 'a {
    let is_call = move |at: &usize| source.code[at + name.len()..].starts_with('(');
    let is_definition = |at: &usize| source.code[..*at].trim_end().ends_with("fn");
    scan::words(&source.code, name)
        .filter(is_call)
        .filter(move |at| !is_definition(at))
        .map(move |at| at + name.len()..matching(&source.code, at + name.len()))
}

fn inside(literals: &[(usize, String)], range: &Range<usize>) -> Vec<String> {
    literals.iter().filter(|(at, _)| range.contains(at)).map(|(_, text)| text.clone()).collect()
}

/// Returns the strings of a file with their offsets: each in one line, with holes for its values.
fn literals(source: &Source) -> Vec<(usize, String)> {
    let (text, code) = (source.text.as_bytes(), source.code.as_bytes());
    let is_blank = |at: usize| code[at] == b' ' && source.comments.as_bytes()[at] == b' ';
    let (mut found, mut at) = (Vec::new(), 0);
    while at < text.len() {
        if text[at] == b'"' && is_blank(at) {
            let start = at + 1;
            at = start;
            while at < text.len() && text[at] != b'"' {
                at += if text[at] == b'\\' { 2 } else { 1 };
            }
            let inner = &source.text[start..at.min(text.len())];
            found.push((start, with_holes(&joined(inner), ('{', '}'), is_value)));
        }
        at += 1;
    }
    found
}

/// Returns a string of several lines as one line.
fn joined(text: &str) -> String {
    let mut lines = text.split("\\\n");
    let first = lines.next().unwrap_or_default().to_owned();
    lines.fold(first, |out, line| out + line.trim_start())
}

fn is_value(text: &str) -> bool {
    !text.contains([' ', '{', '"', '\n', ',', ';'])
}

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

fn shipped(tree: &Tree) -> impl Iterator<Item = &Source> {
    let sources = tree.crates.iter().flat_map(|krate| &krate.sources);
    sources.filter(|source| ROOMS.iter().any(|room| source.path.starts_with(room)))
}

/// Returns all code without tests and comments, with strings of several lines as one line, and with
/// holes in format strings.
pub fn shipped_code(tree: &Tree) -> String {
    let mut code = String::new();
    for source in shipped(tree) {
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
    with_holes(&code, ('{', '}'), is_value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::Crate;

    /// Returns what the check finds in a page with these first cells, for this code.
    fn found(code: &str, cells: &[&str]) -> Vec<String> {
        let rows: String = cells.iter().map(|cell| format!("| {cell} | what to do |\n")).collect();
        let filled = "| `The file` |\n".repeat(41);
        let code = format!("const A: &str = \"The file\";\n{code}");
        let mut tree = Tree::of_documents(vec![(PAGE.into(), rows + &filled)]);
        tree.crates = vec![Crate {
            name: "x".into(),
            manifest_path: "run/x/Cargo.toml".into(),
            manifest: String::new(),
            sources: vec![Source::new("run/x/src/a.rs", &code, false)],
        }];
        check(&tree).into_iter().map(|finding| finding.message).collect()
    }

    #[test]
    fn quotes_are_what_the_code_prints() {
        let code = "fn f() {\n    warn(\"A disk {name} \\\n        is gone\");\n}";
        assert!(found(code, &["`A disk <name> is gone`", "`disk <name> is`, `A disk`"]).is_empty());
        let wrong = found(code, &["`A disk <name> is away`"]);
        assert_eq!(wrong, ["no code prints `A disk <name> is away`: quote what it prints"]);
    }

    #[test]
    fn page_has_each_warning_and_each_end() {
        let lacks = |code: &str| found(code, &[]).len();
        assert_eq!(lacks("fn f() { warn(\"warning: A disk is gone\"); }"), 1);
        assert_eq!(
            lacks("fn f() { warn(&[\"memfold: warning: \", name, \" is gone for good\"]); }"),
            1
        );
        assert_eq!(lacks("fn f() { die(format_args!(\"No memory for {size}\")); }"), 1);
        assert_eq!(lacks("fn die(text: &str) {} // die(\"no call of it\")"), 0);
        assert_eq!(
            lacks("fn f() { warn(\"warning: The file is gone\"); }"),
            0,
            "it is in the page"
        );
        assert_eq!(lacks("#[cfg(test)]\nmod tests { const B: &str = \"warning: a disk\"; }"), 0);
    }

    #[test]
    fn page_has_each_refusal_that_gives_no_advice() {
        let lacks = |text: &str| found(&format!("fn f() {{ CommandFailure::own({text}); }}"), &[]);
        assert_eq!(lacks("\"A disk is gone\"").len(), 1);
        assert_eq!(lacks("\"A disk is gone. Give another.\"").len(), 0);
        assert_eq!(lacks("format!(\"{path}: {why}\")").len(), 0, "the cause is a value");
    }
}
