//! A source file by lines, with code, comments and tests separated.

use crate::scan;

/// A Rust file as the checks need it.
pub struct Source {
    /// Path from the root of the workspace.
    pub path: String,
    /// The complete text.
    pub text: String,
    /// The text with comments and the contents of literals blanked.
    pub code: String,
    /// The text with everything but comments blanked.
    pub comments: String,
    /// Offsets of the lines' first bytes.
    starts: Vec<usize>,
    /// Byte ranges of the items that exist only in tests or models.
    tests: Vec<(usize, usize)>,
}

impl Source {
    /// Splits a file. `all_test` says that all of it is a test.
    pub fn new(path: &str, text: &str, all_test: bool) -> Self {
        let parts = scan::split(text);
        let starts =
            std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).collect();
        let tests = if all_test { vec![(0, text.len())] } else { test_items(text, &parts.code) };
        Source {
            path: path.to_owned(),
            text: text.to_owned(),
            code: parts.code,
            comments: parts.comments,
            starts,
            tests,
        }
    }

    /// Returns the line of a byte, counted from 1.
    pub fn line(&self, offset: usize) -> usize {
        self.starts.partition_point(|&start| start <= offset)
    }

    /// Returns the number of lines.
    pub fn lines(&self) -> usize {
        self.text.lines().count()
    }

    /// Returns whether the byte is in an item that exists only in tests or models.
    pub fn in_test(&self, offset: usize) -> bool {
        self.tests.iter().any(|&(start, end)| (start..end).contains(&offset))
    }

    /// Marks the whole file as a test.
    pub fn mark_test(&mut self) {
        self.tests = vec![(0, self.text.len())];
    }

    /// Returns the modules in their own files that this file declares only for tests or models, as
    /// paths without `.rs`.
    pub fn test_modules(&self) -> Vec<String> {
        let own = self.path.trim_end_matches(".rs");
        let root = ["lib", "main", "mod"]
            .iter()
            .find_map(|name| own.strip_suffix(name)?.strip_suffix('/'));
        let directory = root.unwrap_or(own);
        scan::words(&self.code, "mod")
            .filter(|&offset| self.in_test(offset))
            .filter_map(|offset| self.code[offset + 3..].split_once(';'))
            .map(|(name, _)| name.trim())
            .filter(|name| name.bytes().all(scan::is_word))
            .map(|name| format!("{directory}/{name}"))
            .collect()
    }
}

/// Finds the items under `#[test]` or a `#[cfg]` that holds only in tests or models, from the
/// attribute to the item's end.
fn test_items(text: &str, code: &str) -> Vec<(usize, usize)> {
    let mut items = Vec::new();
    for (at, _) in code.match_indices("#[").chain(code.match_indices("#![")) {
        let open = at + code[at..].find('[').unwrap_or(0);
        let close = matching(code, open);
        // From the text, because the code has no strings.
        let attribute = text[open + 1..close].trim();
        let condition =
            attribute.strip_prefix("cfg").map(str::trim).and_then(|rest| rest.strip_prefix('('));
        let test = match condition {
            Some(rest) => only_in_tests(rest.strip_suffix(')').unwrap_or(rest)),
            None => attribute == "test",
        };
        match (test, code[at..].starts_with("#!")) {
            (true, true) => items.push((0, text.len())),
            (true, false) => items.push((at, item_end(code, close + 1))),
            _ => {}
        }
    }
    items
}

/// Returns whether a `cfg` condition can hold only in tests or shuttle models.
fn only_in_tests(condition: &str) -> bool {
    let condition = condition.trim();
    let argument = |name: &str| {
        condition
            .strip_prefix(name)
            .map(str::trim)
            .and_then(|rest| rest.strip_prefix('(')?.strip_suffix(')'))
    };
    if let Some(parts) = argument("all") {
        return arguments(parts).into_iter().any(only_in_tests);
    }
    if let Some(parts) = argument("any") {
        let parts = arguments(parts);
        return !parts.is_empty() && parts.into_iter().all(only_in_tests);
    }
    matches!(condition, "test" | "feature = \"shuttle\"")
}

/// Splits at the commas outside brackets.
pub fn arguments(list: &str) -> Vec<&str> {
    let (mut depth, mut start, mut parts) = (0, 0, Vec::new());
    for (at, byte) in list.bytes().enumerate() {
        match byte {
            b'(' => depth += 1,
            b')' => depth -= 1,
            b',' if depth == 0 => {
                parts.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&list[start..]);
    parts.retain(|part| !part.trim().is_empty());
    parts
}

/// Returns the end of the item that begins after its attribute: its closing brace, or its semicolon
/// or comma.
fn item_end(code: &str, from: usize) -> usize {
    let bytes = code.as_bytes();
    let mut at = from;
    while at < bytes.len() {
        match bytes[at] {
            b'{' => return (matching(code, at) + 1).min(bytes.len()),
            b'(' | b'[' => at = matching(code, at),
            b';' | b',' => return at + 1,
            b'}' => return at,
            _ => {}
        }
        at += 1;
    }
    bytes.len()
}

/// Returns the offset of the bracket that closes the one at `open`; the end of the text if there is
/// none.
pub fn matching(code: &str, open: usize) -> usize {
    let mut depth = 0;
    for (at, byte) in code.bytes().enumerate().skip(open) {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at;
        }
    }
    code.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tested(text: &str, word: &str) -> bool {
        let source = Source::new("a.rs", text, false);
        source.in_test(text.find(word).expect("the word is in the text"))
    }

    #[test]
    fn items_under_cfg_test_are_tests() {
        let text = "fn a() {}\n#[cfg(test)]\nmod tests { fn b() { if x { y } } }\nfn c() {}";
        assert!(!tested(text, "fn a"));
        assert!(tested(text, "fn b"));
        assert!(!tested(text, "fn c"));
        assert!(tested("#[test]\n#[ignore]\nfn b([x]: [u8; 1]) { z }", "z"));
        assert!(tested("#[cfg(test)] use std::vec; fn c() {}", "std"));
        assert!(!tested("#[cfg(test)] use std::vec; fn c() {}", "fn c"));
        assert!(tested("#![cfg(test)]\nfn b() {}", "fn b"));
    }

    #[test]
    fn conditions_that_hold_elsewhere_are_no_tests() {
        assert!(!tested("#[cfg(not(test))] fn b() {}", "fn b"));
        assert!(!tested("#[cfg(any(test, unix))] fn b() {}", "fn b"));
        assert!(tested("#[cfg(any(test, feature = \"shuttle\"))] fn b() {}", "fn b"));
        assert!(tested("#[cfg(all(unix, test))] fn b() {}", "fn b"));
        assert!(!tested("#[cfg(all(unix, not(test)))] fn b() {}", "fn b"));
        assert!(!tested("// #[cfg(test)]\nfn b() {}", "fn b"));
    }

    #[test]
    fn files_of_test_modules_are_named() {
        let text = "mod a;\n#[cfg(test)]\nmod b;\n#[cfg(test)]\nmod c { fn d() {} }\n#[cfg(feature = \"shuttle\")]\npub mod e;";
        assert_eq!(Source::new("x/src/lib.rs", text, false).test_modules(), ["x/src/b", "x/src/e"]);
        assert_eq!(
            Source::new("x/src/sync/mod.rs", text, false).test_modules(),
            ["x/src/sync/b", "x/src/sync/e"]
        );
        assert_eq!(
            Source::new("x/src/sync.rs", text, false).test_modules(),
            ["x/src/sync/b", "x/src/sync/e"]
        );
    }

    #[test]
    fn lines_count_from_one() {
        let source = Source::new("a.rs", "a\nb // c\n", false);
        assert_eq!((source.line(0), source.line(2), source.lines()), (1, 2, 2));
        let line = |text: &str| text.lines().map(str::trim).map(String::from).collect::<Vec<_>>();
        assert_eq!(
            (line(&source.code), line(&source.comments)),
            (vec!["a".into(), "b".into()], vec!["".into(), "// c".into()])
        );
    }
}
