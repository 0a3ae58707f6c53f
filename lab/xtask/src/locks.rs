//! The list of locks: each lock of a crate that runs inside a program has a row in docs/locks.md,
//! which says what happens to it at a fork.

use crate::finding::Finding;
use crate::scan;
use crate::source::Source;
use crate::text::ENGINE;
use crate::tree::Tree;

/// Path of the list.
const LIST: &str = "docs/locks.md";
const LOCKS: &[&str] = &["Mutex", "StaticMutex", "RwLock"];
/// The folder that defines the locks, whose guards refer to them.
const DEFINITIONS: &str = "engine/os/src/sync/";
/// What may happen at a fork.
const KINDS: &[&str] = &["held", "quiet", "reset", "one thread", "apart"];

/// A lock by its file and its name.
type LockKey = (String, String);

/// Checks the list against all crates.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let (rows, mut findings) = rows(&tree.locks);
    let sources = tree.crates.iter().filter(|krate| ENGINE.contains(&krate.name.as_str()));
    let mut locks: Vec<LockKey> = Vec::new();
    for source in sources.flat_map(|krate| &krate.sources) {
        for (offset, name) in locks_of(source) {
            let lock = (source.path.clone(), name);
            if !rows.iter().any(|(_, row)| *row == lock) {
                let message = format!(
                    "{} has no row in {LIST}: say there what happens to it at a fork",
                    lock.1
                );
                findings.push(Finding::error(&source.path, source.line(offset), message));
            }
            locks.push(lock);
        }
    }
    for (line, row) in &rows {
        if !locks.contains(row) {
            let message = format!("{} in {} is no lock: take the row out", row.1, row.0);
            findings.push(Finding::error(LIST, *line, message));
        }
    }
    findings
}

/// Returns the locks that the rows name, with their lines, and the rows that say nothing known.
fn rows(list: &str) -> (Vec<(usize, LockKey)>, Vec<Finding>) {
    let (mut rows, mut findings) = (Vec::new(), Vec::new());
    for (number, line) in list.lines().enumerate() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, name, path, what, _] = cells[..] else { continue };
        if !path.ends_with(".rs") {
            continue;
        }
        let is_known = KINDS.iter().any(|kind| what.split([':', ';']).next() == Some(kind));
        if !is_known {
            let message =
                format!("{name}: the third cell must begin with one of {KINDS:?} and a colon");
            findings.push(Finding::error(LIST, number + 1, message));
        }
        rows.push((number + 1, (path.to_owned(), name.to_owned())));
    }
    (rows, findings)
}

/// Returns the statics, fields and types of a file that are locks, by offset and name.
fn locks_of(source: &Source) -> Vec<(usize, String)> {
    if source.path.starts_with(DEFINITIONS) {
        return Vec::new();
    }
    let code = &source.code;
    let mut places: Vec<(usize, String)> = Vec::new();
    for offset in LOCKS.iter().flat_map(|lock| scan::words(code, lock)) {
        let start = code[..offset].rfind('\n').map_or(0, |at| at + 1);
        let before = code[start..offset].trim_start();
        let is_type = code[offset..]
            .split_once(['<', ':', ';', '('])
            .is_some_and(|(word, _)| code.as_bytes()[offset + word.len()] == b'<');
        if !is_type || source.in_test(offset) {
            continue;
        }
        places.extend(declared(before).map(|name| (offset, name.to_owned())));
    }
    places
}

/// Returns the name that a line declares, whose text before its type is `before`: a static, a field,
/// or a type around a lock.
fn declared(before: &str) -> Option<&str> {
    let rest = before.strip_prefix("pub ").unwrap_or(before);
    let rest = rest.strip_prefix("pub(crate) ").unwrap_or(rest);
    if let Some(rest) = rest.strip_prefix("struct ") {
        return rest.split_once('(').map(|(name, _)| name);
    }
    let rest = rest.strip_prefix("static ").unwrap_or(rest);
    let (name, holder) = rest.split_once(':')?;
    let is_name = !name.is_empty() && name.bytes().all(scan::is_word);
    // A guard or a function refers to a lock.
    (is_name && !holder.contains(['&', '='])).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Vec<String> {
        let source = Source::new("engine/engine/src/a.rs", text, false);
        locks_of(&source).into_iter().map(|(_, name)| name).collect()
    }

    #[test]
    fn statics_fields_and_types_are_found() {
        let text = "static A: Mutex<()> = Mutex::new(());\nstruct S {\n    pub b: Box<[Mutex<u8>]>,\n}\npub struct C(RwLock<u8>);\n";
        assert_eq!(names(text), ["A", "b", "C"]);
    }

    #[test]
    fn guards_values_and_tests_are_no_locks() {
        let text = "struct G<'a> {\n    lock: &'a Mutex<u8>,\n}\nfn f() {\n    let a = Mutex::new(1);\n}\n#[cfg(test)]\nmod tests {\n    static T: Mutex<()> = Mutex::new(());\n}\n";
        assert_eq!(names(text), [""; 0]);
    }

    #[test]
    fn row_without_a_known_word_is_found() {
        let (rows, findings) = rows(
            "| A | engine/engine/src/a.rs | perhaps |\n| B | engine/engine/src/b.rs | held: x |\n",
        );
        assert_eq!((rows.len(), findings.len()), (2, 1));
    }
}
