//! Figures and text in few columns.
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

/// Returns a ratio in at most five columns: `3.69`, `99.90`, `123.4`, `1234`, `123k`.
pub fn short_ratio(value: f64) -> String {
    match value {
        v if v < 99.995 => format!("{v:.2}"),
        v if v < 999.95 => format!("{v:.1}"),
        v if v < 99_999.5 => format!("{v:.0}"),
        v => short_count(v),
    }
}

fn three_digits(value: f64) -> String {
    match value {
        v if v < 9.995 => format!("{v:.2}"),
        v if v < 99.95 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    }
}

/// Returns as much of a text as fits in `width` columns. What was cut is marked by a `~`.
pub fn fit(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_string();
    }
    let mut text_cut = text.to_string();
    // A character may be wider beside the next one, so the width is that of the whole.
    while !text_cut.is_empty() && text_cut.width() + 1 > width {
        text_cut.pop();
    }
    if width > 0 {
        text_cut.push('~');
    }
    text_cut
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::printable::printable;
    use proptest::prelude::*;

    #[test]
    fn sizes_and_counts_keep_three_digits() {
        let sizes: [u64; 8] =
            [0, 999, 1000, 64_906_854, 64 << 20, 1_342_177_280, (1 << 30) - 1, u64::MAX];
        let texts = sizes.map(short_size);
        assert_eq!(texts, ["0B", "999B", "0.98K", "61.9M", "64.0M", "1.25G", "1.00G", "16.0E"]);
        let counts = [0.0, 0.04, 9.94, 9.96, 9999.0, 12_345.0, 1e6, 2.5e9].map(short_count);
        assert_eq!(counts, ["0", "0.0", "9.9", "10", "9999", "12.3k", "1.00M", "2.50G"]);
        let ratios = [0.0, 3.688, 99.9, 99.996, 123.44, 1234.0, 99_999.6].map(short_ratio);
        assert_eq!(ratios, ["0.00", "3.69", "99.90", "100.0", "123.4", "1234", "100k"]);
    }

    proptest! {
        #[test]
        fn figures_fit_their_columns(bytes in any::<u64>(), shift in 0u32..64, count in 0.0f64..1e13) {
            prop_assert!(short_size(bytes >> shift).len() <= 5);
            prop_assert!(short_count(count).len() <= 6, "{}", short_count(count));
            prop_assert!(short_ratio(count).len() <= 5, "{}", short_ratio(count));
        }

        #[test]
        fn text_is_cut_to_its_width(
            parts in proptest::collection::vec("[#0❤a日\u{fe0f}\u{20e3}]|.", 0..12),
            width in 0usize..40,
        ) {
            let text = parts.concat();
            let text = printable(&text);
            prop_assert!(text.chars().all(|c| !c.is_control()));
            prop_assert!(fit(&text, width).width() <= width);
        }
    }

    #[test]
    fn cut_text_has_a_mark() {
        assert_eq!(fit("日本語", 5), "日本~");
    }
}
