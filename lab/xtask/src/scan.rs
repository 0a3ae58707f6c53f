//! Splits Rust text into code and comments, byte for byte, without parsing it.

/// The text twice: once with comments and the contents of literals blanked, once with only comments
/// left. Both have the length and line breaks of the original, so an offset is the same place in
/// all three.
pub struct Split {
    /// Only code; the contents of strings and characters are spaces.
    pub code: String,
    /// Only comments, with their slashes.
    pub comments: String,
}

/// Splits `text`; an unfinished literal or comment reaches to the end of the text.
pub fn split(text: &str) -> Split {
    let bytes = text.as_bytes();
    let mut code = blank(bytes);
    let mut comments = blank(bytes);
    let mut at = 0;
    while at < bytes.len() {
        let (kind, end) = next(bytes, at);
        match kind {
            Kind::Code => code[at..end].copy_from_slice(&bytes[at..end]),
            Kind::Comment => comments[at..end].copy_from_slice(&bytes[at..end]),
            Kind::Literal => {}
        }
        at = end;
    }
    Split { code: into_string(code), comments: into_string(comments) }
}

/// Returns whether `byte` can be part of an identifier.
pub fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte >= 0x80
}

/// Returns the offsets at which `word` stands in `code` as a whole word.
pub fn words<'a>(code: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let bytes = code.as_bytes();
    code.match_indices(word).map(|(at, _)| at).filter(move |&at| {
        let before = at == 0 || !is_word(bytes[at - 1]);
        let after = bytes.get(at + word.len()).is_none_or(|&byte| !is_word(byte));
        before && after
    })
}

enum Kind {
    Code,
    Comment,
    Literal,
}

/// Returns the piece that starts at `at`, and its end. Code comes one byte or one word at a time.
fn next(bytes: &[u8], at: usize) -> (Kind, usize) {
    let rest = &bytes[at..];
    match rest[0] {
        b'/' if rest.starts_with(b"//") => (Kind::Comment, at + find(rest, b'\n')),
        b'/' if rest.starts_with(b"/*") => (Kind::Comment, at + block_comment(rest)),
        b'"' => (Kind::Literal, at + quoted(rest, b'"')),
        b'\'' => character(bytes, at),
        first if is_word(first) => word(bytes, at),
        _ => (Kind::Code, at + 1),
    }
}

/// Returns the end of a word. `r"`, `br#"` and similar prefixes begin a literal instead, and so do
/// `b"`, `c"` and `b'` after their letter.
fn word(bytes: &[u8], at: usize) -> (Kind, usize) {
    let length = bytes[at..].iter().take_while(|&&byte| is_word(byte)).count();
    let end = at + length;
    if matches!(&bytes[at..end], b"r" | b"br" | b"cr") {
        let hashes = bytes[end..].iter().take_while(|&&byte| byte == b'#').count();
        if bytes.get(end + hashes) == Some(&b'"') {
            return (
                Kind::Literal,
                end + hashes + 1 + raw_string(&bytes[end + hashes + 1..], hashes),
            );
        }
    }
    (Kind::Code, end)
}

/// Returns the end of a character literal, or of the quote of a lifetime.
fn character(bytes: &[u8], at: usize) -> (Kind, usize) {
    let rest = &bytes[at + 1..];
    let escaped = rest.first() == Some(&b'\\');
    let letters = rest.iter().take_while(|&&byte| is_word(byte)).count();
    let one_character = rest.first().is_some_and(|&first| first >= 0x80) || letters <= 1;
    let closes = match letters {
        0 => rest.get(1) == Some(&b'\''),
        _ => one_character && rest.get(letters) == Some(&b'\''),
    };
    if escaped || closes {
        return (Kind::Literal, at + quoted(&bytes[at..], b'\''));
    }
    (Kind::Code, at + 1)
}

/// Returns the length of a literal that starts with a quote, with its escapes and both quotes.
fn quoted(rest: &[u8], quote: u8) -> usize {
    let mut at = 1;
    while at < rest.len() {
        match rest[at] {
            b'\\' => at += 2,
            byte if byte == quote => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

fn raw_string(rest: &[u8], hashes: usize) -> usize {
    let closes = |at: usize| {
        rest[at] == b'"'
            && rest[at + 1..].iter().take(hashes).filter(|&&b| b == b'#').count() == hashes
    };
    (0..rest.len()).find(|&at| closes(at)).map_or(rest.len(), |at| at + 1 + hashes)
}

fn block_comment(rest: &[u8]) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < rest.len() {
        if rest[at..].starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    rest.len()
}

fn find(rest: &[u8], wanted: u8) -> usize {
    rest.iter().position(|&byte| byte == wanted).unwrap_or(rest.len())
}

fn blank(bytes: &[u8]) -> Vec<u8> {
    bytes.iter().map(|&byte| if byte == b'\n' { b'\n' } else { b' ' }).collect()
}

fn into_string(bytes: Vec<u8>) -> String {
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(text: &str) -> String {
        let parts = split(text);
        assert_eq!(parts.code.len(), text.len());
        assert_eq!(parts.comments.len(), text.len());
        parts.code.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn comments_are_no_code() {
        assert_eq!(code("a // b\nc"), "a c");
        assert_eq!(code("a /* b /* c */ d */ e"), "a e");
        assert_eq!(split("a // b\n/* c */").comments.trim_start(), "// b\n/* c */");
    }

    #[test]
    fn literals_are_no_code() {
        assert_eq!(code(r#"f("a // b \" c", 'd', '\'', b"e") g"#), "f( , , , b ) g");
        assert_eq!(code(r###"f(r#"a " b"#, br"\", r"c") g"###), "f( , , ) g");
        assert_eq!(code("f('é', '(', '\\u{1F600}') g"), "f( , , ) g");
    }

    #[test]
    fn lifetimes_and_raw_identifiers_are_code() {
        assert_eq!(
            code("fn f<'a>(x: &'a str) -> &'static str"),
            "fn f<'a>(x: &'a str) -> &'static str"
        );
        assert_eq!(code("r#type b'x' for"), "r#type b for");
        assert_eq!(code("'outer: loop { break 'outer; }"), "'outer: loop { break 'outer; }");
    }

    #[test]
    fn words_are_whole() {
        assert_eq!(words("std x_std std_ (std", "std").collect::<Vec<_>>(), [0, 16]);
    }
}
