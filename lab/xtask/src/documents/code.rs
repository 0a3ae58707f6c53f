//! The code in a document: spans between backquotes, and blocks between lines of three.

/// A span, or a line of a block.
#[derive(Debug, PartialEq, Eq)]
pub struct Code {
    /// The line of the document, counted from 1.
    pub line: usize,
    /// Without the backquotes. A line that ends with a backslash includes the next one.
    pub text: String,
    pub is_block: bool,
}

/// Returns all code of a document, or of comments.
pub fn codes(text: &str) -> Vec<Code> {
    let mut found: Vec<Code> = Vec::new();
    let (mut is_block, mut is_continued) = (false, false);
    for (number, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            (is_block, is_continued) = (!is_block, false);
        } else if is_block {
            let part = line.strip_suffix('\\').unwrap_or(line);
            match found.last_mut().filter(|_| is_continued) {
                Some(last) => last.text = format!("{} {}", last.text.trim_end(), part.trim_start()),
                None => found.push(Code { line: number + 1, text: part.to_owned(), is_block }),
            }
            is_continued = part.len() < line.len();
        } else {
            let spans = line.split('`').skip(1).step_by(2);
            found.extend(spans.map(|span| Code {
                line: number + 1,
                text: span.to_owned(),
                is_block,
            }));
        }
    }
    found
}

/// Returns the spans alone.
pub fn spans(text: &str) -> impl Iterator<Item = Code> {
    codes(text).into_iter().filter(|code| !code.is_block)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_spans_and_lines_of_blocks() {
        let text = "a `b` c `d e`\n```sh\nf `g`\nh \\\n  i\n```\n`j`";
        let all: Vec<_> = codes(text).iter().map(|code| (code.line, code.text.clone())).collect();
        let wanted = [(1, "b"), (1, "d e"), (3, "f `g`"), (4, "h i"), (7, "j")];
        assert_eq!(all, wanted.map(|(line, text)| (line, text.to_owned())));
        assert_eq!(spans(text).count(), 3);
    }
}
