//! Kinds of settings: how a value is parsed and shown.
use crate::config::choices::{Delivery, DictionarySource, OnFull, PagingKind};
use crate::config::parse::{
    choice, number as read_number, on_off, parse_order, parse_shard, parse_size, path,
};
use alloc::string::{String, ToString};
use memfold_os::units::Order;

/// Most background threads, and pools.
pub(super) const COUNT_MAX: u32 = 64;

/// How values of one kind are parsed and shown.
pub(super) struct ValueKind<T> {
    /// Parses text. A percentage refers to the number, bytes. Errors name the valid values.
    pub parse: fn(&str, u64) -> Result<T, String>,
    /// Returns text that `parse` takes; `None` for a value that is not set.
    pub show: fn(&T) -> Option<String>,
}

fn shown<T: ToString>(value: &T) -> Option<String> {
    Some(value.to_string())
}

fn word<T: Copy + PartialEq>(value: T, all: &[(&str, T)]) -> Option<String> {
    all.iter().find(|(_, v)| *v == value).map(|(name, _)| name.to_string())
}

/// Bytes.
pub(super) const SIZE: ValueKind<u64> = ValueKind { parse: parse_size, show: shown };

/// Bytes, or `none`.
pub(super) const SIZE_OR_NONE: ValueKind<Option<u64>> = ValueKind {
    parse: |text, whole| if text == "none" { Ok(None) } else { parse_size(text, whole).map(Some) },
    show: |bytes| bytes.as_ref().and_then(shown),
};

/// The size of a folio or block.
pub(super) const ORDER: ValueKind<Order> =
    ValueKind { parse: |text, _| parse_order(text), show: |order| shown(&order.bytes()) };

/// The span of one lock of the index, bytes.
pub(super) const SHARD: ValueKind<u64> =
    ValueKind { parse: |text, _| parse_shard(text), show: shown };

/// A percentage, with or without `%`.
pub(super) const PERCENT: ValueKind<u32> = ValueKind {
    parse: |text, _| read_number(text.strip_suffix('%').unwrap_or(text), 100),
    show: shown,
};

/// A percentage with up to two decimals, in ten-thousandths, or `off`.
pub(super) const SLOWDOWN: ValueKind<u32> = ValueKind {
    parse: |text, _| match text {
        "off" => Ok(0),
        _ => hundredths(text.strip_suffix('%').unwrap_or(text)),
    },
    show: |share| {
        Some(match share {
            0 => "off".to_string(),
            _ => alloc::format!("{}.{:02}%", share / 100, share % 100),
        })
    },
};

/// Parses a percentage from 0.01 to 100 with up to two decimals.
fn hundredths(text: &str) -> Result<u32, String> {
    let refused =
        || alloc::format!("{text:?} is no slowdown. Give off, or a percentage from 0.01 to 100.");
    let (whole, part) = text.split_once('.').unwrap_or((text, "0"));
    let are_digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
    if !are_digits(whole) || !are_digits(part) || whole.len() > 3 || part.len() > 2 {
        return Err(refused());
    }
    let number = |s: &str| s.parse::<u32>().expect("at most three digits");
    let part = number(part) * if part.len() == 1 { 10 } else { 1 };
    match number(whole) * 100 + part {
        0 | 10_001.. => Err(refused()),
        share => Ok(share),
    }
}

/// Makes the kind of numbers up to `MAX`.
pub(super) const fn number<const MAX: u32>() -> ValueKind<u32> {
    ValueKind { parse: |text, _| read_number(text, MAX), show: shown }
}

/// Seconds that an object lives in a remote store: up to a year.
pub(super) const EXPIRY: ValueKind<u32> = ValueKind {
    parse: |text, _| match read_number(text, 365 * 24 * 60 * 60)? {
        0 | 1 => Err(alloc::format!(
            "{text:?} is too short. Give at least 2 seconds; a day is a good value."
        )),
        seconds => Ok(seconds),
    },
    show: shown,
};

/// A number of threads or pools.
pub(super) const COUNT: ValueKind<usize> =
    ValueKind { parse: |text, _| read_number(text, COUNT_MAX).map(|n| n as usize), show: shown };

/// Blocks that are compressed at once.
pub(super) const BATCH: ValueKind<usize> = ValueKind {
    parse: |text, _| match read_number(text, 64)? {
        0 => Err("\"0\" is not a number from 1 to 64".to_string()),
        n => Ok(n as usize),
    },
    show: shown,
};

/// `on` or `off`.
pub(super) const SWITCH: ValueKind<bool> = ValueKind {
    parse: |text, _| on_off(text),
    show: |on| word(*on, &[("on", true), ("off", false)]),
};

/// Text that is checked elsewhere.
pub(super) const TEXT: ValueKind<String> =
    ValueKind { parse: |text, _| Ok(text.to_string()), show: shown };

/// Text that is checked elsewhere, or `off`.
pub(super) const TEXT_OR_OFF: ValueKind<Option<String>> = ValueKind {
    parse: |text, _| Ok((text != "off").then(|| text.to_string())),
    show: |text| Some(text.clone().unwrap_or_else(|| "off".to_string())),
};

/// A path, if there is one.
pub(super) const PATH: ValueKind<Option<String>> =
    ValueKind { parse: |text, _| path(text).map(Some), show: Clone::clone };

const DELIVERIES: &[(&str, Delivery)] =
    &[("thread", Delivery::Thread), ("signal", Delivery::Signal), ("gate", Delivery::Gate)];
const ON_FULLS: &[(&str, OnFull)] = &[("grow", OnFull::Grow), ("stop", OnFull::Stop)];
const PAGINGS: &[(&str, PagingKind)] = &[
    ("userfaultfd", PagingKind::Userfaultfd),
    ("guard", PagingKind::Guard),
    ("protection", PagingKind::Protection),
];
const DONT_DUMPS: &[(&str, bool)] = &[("leave", false), ("fold", true)];

/// How faults arrive.
pub(super) const DELIVERY: ValueKind<Delivery> = ValueKind {
    parse: |text, _| choice(text, DELIVERIES),
    show: |delivery| word(*delivery, DELIVERIES),
};

/// Action at the limit.
pub(super) const ON_FULL: ValueKind<OnFull> =
    ValueKind { parse: |text, _| choice(text, ON_FULLS), show: |on_full| word(*on_full, ON_FULLS) };

/// How a touch of folded memory is reported.
pub(super) const PAGING: ValueKind<PagingKind> =
    ValueKind { parse: |text, _| choice(text, PAGINGS), show: |paging| word(*paging, PAGINGS) };

/// Whether memory that is kept out of core dumps is folded.
pub(super) const DONT_DUMP: ValueKind<bool> =
    ValueKind { parse: |text, _| choice(text, DONT_DUMPS), show: |fold| word(*fold, DONT_DUMPS) };

/// The source of dictionaries.
pub(super) const CANNED: ValueKind<DictionarySource> = ValueKind {
    parse: |text, _| match text {
        "off" => Ok(DictionarySource::Off),
        "on" => Ok(DictionarySource::On),
        // Settings are passed on as lines, joined by semicolons. A bare word is more likely a
        // mistake than a file.
        path if path.contains(['\n', ';']) => {
            Err(alloc::format!("{text:?} has a line break or a semicolon. Rename the file."))
        }
        path if path.contains(['/', '.']) => Ok(DictionarySource::File(path.to_string())),
        _ => Err(alloc::format!(
            "{text:?} is neither on nor off. Write the name of a file as ./{text}."
        )),
    },
    show: |canned| match canned {
        DictionarySource::Off => Some("off".to_string()),
        DictionarySource::On => Some("on".to_string()),
        DictionarySource::File(path) => Some(path.clone()),
    },
};
