//! Values of settings from text, and sizes as text.
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use memfold_os::units::{MAX_ORDER, Order, PAGE_SIZE};

/// Bytes, shown with the largest unit that divides or rounds them well.
pub struct Size(pub u64);

impl core::fmt::Display for Size {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let b = self.0;
        match b {
            0..1024 => write!(f, "{b} B"),
            1024..1_048_576 => write!(f, "{:.1} KiB", b as f64 / 1024.0),
            1_048_576..1_073_741_824 => write!(f, "{:.1} MiB", b as f64 / 1_048_576.0),
            _ => write!(f, "{:.2} GiB", b as f64 / 1_073_741_824.0),
        }
    }
}

/// Parses bytes: a number with an optional K, M, G or T (powers of 1024, also as `KiB` and `KB`),
/// or a percentage of `whole` bytes.
///
/// # Errors
/// Text that is neither, or a size that doesn't fit.
pub fn parse_size(text: &str, whole: u64) -> Result<u64, String> {
    let wrong = || alloc::format!("{text:?} is not a size. Write for example 512M, 2G or 25%.");
    let t = text.trim();
    if let Some(percent) = t.strip_suffix('%') {
        let p: f64 = percent.trim().parse().map_err(|_| wrong())?;
        if !(p > 0.0 && p <= 100.0) {
            return Err(alloc::format!("{text:?} is not a percentage above 0 and up to 100"));
        }
        return Ok((whole as f64 * p / 100.0) as u64);
    }
    let digits = t.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(t.len());
    let unit = match t[digits..].trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1u64,
        "k" | "kb" | "kib" => 1 << 10,
        "m" | "mb" | "mib" => 1 << 20,
        "g" | "gb" | "gib" => 1 << 30,
        "t" | "tb" | "tib" => 1 << 40,
        _ => return Err(wrong()),
    };
    if let Ok(n) = t[..digits].parse::<u64>() {
        return n.checked_mul(unit).ok_or_else(wrong);
    }
    let n: f64 = t[..digits].parse().map_err(|_| wrong())?;
    let bytes = n * unit as f64;
    if bytes >= u64::MAX as f64 { Err(wrong()) } else { Ok(bytes as u64) }
}

/// Parses the order of a folio or block size.
pub(crate) fn parse_order(text: &str) -> Result<Order, String> {
    let bytes = parse_size(text, 0)? as usize;
    match Order::covering(bytes) {
        Some(order) if order.bytes() == bytes => Ok(order),
        _ => {
            let valid: Vec<String> =
                (0..=MAX_ORDER).map(|n| alloc::format!("{}K", (PAGE_SIZE << n) >> 10)).collect();
            Err(alloc::format!("{text:?} is not one of {}", valid.join(", ")))
        }
    }
}

/// Parses the span of one lock of the index, bytes.
pub(crate) fn parse_shard(text: &str) -> Result<u64, String> {
    let bytes = parse_size(text, 0)?;
    if bytes.is_power_of_two() && (2 << 20..=1 << 30).contains(&bytes) {
        Ok(bytes)
    } else {
        Err(alloc::format!("{text:?} is not a power of two from 2M to 1G"))
    }
}

/// Parses a number up to `max`.
pub(crate) fn number(text: &str, max: u32) -> Result<u32, String> {
    match text.parse() {
        Ok(n) if n <= max => Ok(n),
        _ => Err(alloc::format!("{text:?} is not a number from 0 to {max}")),
    }
}

/// Parses a path, or other text that is valid in a line of settings.
pub(crate) fn path(text: &str) -> Result<String, String> {
    if text.is_empty() || text.contains([';', '\n', '\0']) {
        return Err(alloc::format!(
            "{text:?} can't be used as a path, because it is empty or has a semicolon or a line break. Give another path."
        ));
    }
    Ok(text.to_string())
}

/// Parses `on` or `off`.
pub(crate) fn on_off(text: &str) -> Result<bool, String> {
    choice(text, &[("on", true), ("off", false)])
}

/// Parses one of some words.
pub(crate) fn choice<T: Copy>(text: &str, all: &[(&str, T)]) -> Result<T, String> {
    all.iter().find(|(name, _)| *name == text).map(|(_, v)| *v).ok_or_else(|| {
        let names: Vec<&str> = all.iter().map(|(n, _)| *n).collect();
        alloc::format!("{text:?} is not one of {}", names.join(", "))
    })
}
