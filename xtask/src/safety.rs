//! Every `unsafe` block and `unsafe impl` has its SAFETY comment, in macros and tests too.
//!
//! The comment stands on the same line or above the statement; attributes and the statement's own first lines may lie
//! between, another statement may not.

use crate::finding::Finding;
use crate::scan;
use crate::source::Source;
use crate::tree::Tree;

/// Lines of code that may lie between the comment and the word it argues for.
const LINES_BETWEEN_MAX: usize = 6;

/// Checks all sources.
pub fn check(tree: &Tree) -> Vec<Finding> {
    tree.crates.iter().flat_map(|krate| &krate.sources).flat_map(check_source).collect()
}

fn check_source(source: &Source) -> Vec<Finding> {
    scan::words(&source.code, "unsafe")
        .filter_map(|offset| {
            let what = needs_comment(&source.code[offset + "unsafe".len()..])?;
            let line = source.line(offset);
            let message = format!("{what} without a `// SAFETY:` comment: argue above it why it is sound");
            (!has_comment(source, line)).then(|| Finding::error(&source.path, line, message))
        })
        .collect()
}

/// What the word `unsafe` introduces, if that needs a comment.
fn needs_comment(rest: &str) -> Option<&'static str> {
    let rest = rest.trim_start();
    if rest.starts_with('{') {
        return Some("unsafe block");
    }
    let implements = rest.strip_prefix("impl").is_some_and(|rest| !rest.bytes().next().is_some_and(scan::is_word));
    implements.then_some("unsafe impl")
}

fn has_comment(source: &Source, line: usize) -> bool {
    if source.comment_line(line).contains("SAFETY:") {
        return true;
    }
    let mut between = 0;
    for above in (1..line).rev() {
        if source.comment_line(above).contains("SAFETY:") {
            return source.code_line(above).trim().is_empty() || between == 0;
        }
        let code = source.code_line(above).trim();
        let comment = !source.comment_line(above).trim().is_empty();
        let attribute = code.starts_with("#[") && code.ends_with(']');
        if code.is_empty() && !comment {
            return false;
        }
        if code.is_empty() || attribute {
            continue;
        }
        between += 1;
        if code.ends_with([';', '{', '}']) || between > LINES_BETWEEN_MAX {
            return false;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<usize> {
        check_source(&Source::new("a.rs", text, false)).into_iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn a_comment_above_or_beside_is_enough() {
        assert!(found("// SAFETY: it is.\nunsafe { f() }").is_empty());
        assert!(found("// SAFETY: it is,\n// truly.\nlet x =\n    unsafe { f() };").is_empty());
        assert!(found("// SAFETY: it is.\n#[cfg(a)]\nunsafe impl Send for A {}").is_empty());
        assert!(found("unsafe { f() } // SAFETY: it is.").is_empty());
        assert!(found("// SAFETY: it is.\ncall(\n    a,\n    unsafe { f() },\n)").is_empty());
    }

    #[test]
    fn no_comment_is_found() {
        assert_eq!(found("fn a() {\n    unsafe { f() }\n}"), [2]);
        assert_eq!(found("unsafe impl<T> Send for A<T> {}"), [1]);
        assert_eq!(found("// it is\nunsafe\n{ f() }"), [2]);
        assert_eq!(found("macro_rules! m { () => { unsafe { f() } } }"), [1]);
        assert_eq!(found("#[cfg(test)]\nmod tests {\n    fn a() { unsafe { f() } }\n}"), [3]);
    }

    #[test]
    fn a_comment_argues_for_one_statement_only() {
        assert_eq!(found("// SAFETY: it is.\nunsafe { f() };\nunsafe { g() };"), [3]);
        assert_eq!(found("// SAFETY: it is.\n\nunsafe { f() }"), [3]);
        assert_eq!(found("// SAFETY: it is.\nunsafe impl Send for A {}\nunsafe impl Sync for A {}"), [3]);
    }

    #[test]
    fn functions_traits_strings_and_comments_need_none() {
        assert!(found("unsafe fn f() {}\nunsafe trait T {}\nunsafe extern \"C\" { fn g(); }").is_empty());
        assert!(found("// unsafe { f() }\nlet x = \"unsafe { f() }\";\ntype F = unsafe fn();").is_empty());
        assert!(found("let unsafe_impl = 1;").is_empty());
    }
}
