//! Figures in few columns, and text of other programs made safe for a terminal.
use unicode_width::UnicodeWidthStr;

/// Returns a size in at most five columns: `512B`, `61.9M`, `1.25G`.
pub fn short_size(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["K", "M", "G", "T", "P", "E"];
    if bytes < 1000 {
        return format!("{bytes}B");
    }
    let (mut value, mut unit) = (bytes as f64 / 1024.0, 0);
    while value >= 999.5 && unit + 1 < UNITS.len() {
        (value, unit) = (value / 1024.0, unit + 1);
    }
    format!("{}{}", three_digits(value), UNITS[unit])
}

/// Returns a number of events in at most six columns: `0`, `0.4`, `1234`, `12.3k`.
pub fn short_count(value: f64) -> String {
    match value {
        0.0 => "0".to_string(),
        v if v < 9.95 => format!("{v:.1}"),
        v if v < 9999.5 => format!("{v:.0}"),
        v if v < 999_500.0 => format!("{}k", three_digits(v / 1e3)),
        v if v < 999.5e6 => format!("{}M", three_digits(v / 1e6)),
        v => format!("{}G", three_digits((v / 1e9).min(9999.0))),
    }
}

fn three_digits(value: f64) -> String {
    match value {
        v if v < 9.995 => format!("{v:.2}"),
        v if v < 99.95 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    }
}

/// Returns text of another program as one line that can't change the terminal: control characters,
/// and those that reorder or hide text, are written as escapes.
pub fn escaped(text: &str) -> String {
    let is_plain = |c: char| {
        !c.is_control()
            && !matches!(c, '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}')
            && !matches!(c, '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}')
            && !matches!(c, '\u{e0000}'..='\u{e0fff}')
    };
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match is_plain(c) {
            true => shown.push(c),
            false => shown.extend(c.escape_default()),
        }
    }
    shown
}

/// Returns as much of a text as fits in `width` columns. What was cut is marked by a `~`.
pub fn fit(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_string();
    }
    let mut cut = text.to_string();
    // A character may be wider beside the next one, so the width is that of the whole.
    while !cut.is_empty() && cut.width() + 1 > width {
        cut.pop();
    }
    if width > 0 {
        cut.push('~');
    }
    cut
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_and_counts_keep_three_digits() {
        let sizes: [u64; 8] =
            [0, 999, 1000, 64_906_854, 64 << 20, 1_342_177_280, (1 << 30) - 1, u64::MAX];
        let shown = sizes.map(short_size);
        assert_eq!(shown, ["0B", "999B", "0.98K", "61.9M", "64.0M", "1.25G", "1.00G", "16.0E"]);
        let counts = [0.0, 0.04, 9.94, 9.96, 9999.0, 12_345.0, 1e6, 2.5e9].map(short_count);
        assert_eq!(counts, ["0", "0.0", "9.9", "10", "9999", "12.3k", "1.00M", "2.50G"]);
    }

    proptest! {
        #[test]
        fn figures_fit_their_columns(bytes in any::<u64>(), shift in 0u32..64, count in 0.0f64..1e13) {
            prop_assert!(short_size(bytes >> shift).len() <= 5);
            prop_assert!(short_count(count).len() <= 6, "{}", short_count(count));
        }

        #[test]
        fn text_is_cut_to_its_width(
            parts in proptest::collection::vec("[#0❤a日\u{fe0f}\u{20e3}]|.", 0..12),
            width in 0usize..40,
        ) {
            let text = parts.concat();
            let shown = escaped(&text);
            prop_assert!(shown.chars().all(|c| !c.is_control()));
            prop_assert!(fit(&shown, width).width() <= width);
        }
    }

    #[test]
    fn text_that_would_change_the_terminal_is_escaped() {
        assert_eq!(escaped("a\u{1b}[2J\n\u{202e}b ü 日本"), "a\\u{1b}[2J\\n\\u{202e}b ü 日本");
        assert_eq!(fit("日本語", 5), "日本~");
    }
}
