//! Text of users and of other programs, made safe for a terminal.

/// Returns a text as one line that can't change the terminal: control characters, and those that
/// reorder or hide text, are written as escapes. A text that was made printable stays as it is.
pub fn printable(text: &str) -> String {
    let is_plain = |c: char| {
        !c.is_control()
            && !matches!(c, '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}')
            && !matches!(c, '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}')
            && !matches!(c, '\u{e0000}'..='\u{e0fff}')
    };
    let mut text_shown = String::with_capacity(text.len());
    for c in text.chars() {
        match is_plain(c) {
            true => text_shown.push(c),
            false => text_shown.extend(c.escape_default()),
        }
    }
    text_shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_that_would_change_the_terminal_is_escaped() {
        let text = printable("a\u{1b}[2J\n\u{202e}b ü 日本");
        assert_eq!(text, "a\\u{1b}[2J\\n\\u{202e}b ü 日本");
        assert_eq!(printable(&text), text);
    }
}
