//! Sizes in the form `64k`, `256M`, `1G`, always in powers of 1024.

/// Parses a size in bytes. Suffixes K, M, G, T (either case, `iB` or `B` may follow) are powers of
/// 1024.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, suffix) = text.split_at(digits);
    let number: u64 =
        number.parse().map_err(|_| format!("'{text}' is not a size (like 64K, 256M or 1G)"))?;
    let shift = match suffix.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return Err(format!("'{text}' is not a size (like 64K, 256M or 1G)")),
    };
    number.checked_mul(1 << shift).ok_or_else(|| format!("'{text}' is too large"))
}

/// Formats bytes in the largest unit that leaves a number of at least one: `1 GiB`, `256 MiB`, `1.5
/// MiB`.
pub fn show_size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut unit = 0;
    while unit + 1 < UNITS.len() && bytes >> (10 * (unit + 1)) != 0 {
        unit += 1;
    }
    let whole = 1u64 << (10 * unit);
    if bytes.is_multiple_of(whole) {
        format!("{} {}", bytes / whole, UNITS[unit])
    } else {
        format!("{:.1} {}", bytes as f64 / whole as f64, UNITS[unit])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_of_1024() {
        assert_eq!(parse_size("4096"), Ok(4096));
        assert_eq!(parse_size("64k"), Ok(65536));
        assert_eq!(parse_size("256M"), Ok(256 << 20));
        assert_eq!(parse_size("1GiB"), Ok(1 << 30));
    }

    #[test]
    fn bad_sizes_are_refused() {
        for bad in ["", "k", "1x", "-1", "1.5G", "99999999999T", "1 G"] {
            assert!(parse_size(bad).is_err(), "{bad} was taken");
        }
    }

    #[test]
    fn sizes_print_short() {
        assert_eq!(show_size(1 << 30), "1 GiB");
        assert_eq!(show_size(3 << 19), "1.5 MiB");
        assert_eq!(show_size(0), "0 B");
    }
}
