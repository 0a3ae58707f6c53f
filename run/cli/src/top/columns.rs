//! The columns of the list: one table, from which the screen, the sorting and the plain table are
//! made.
use super::history::{self, LOOKS};
use super::model::{Row, RowKey};
use super::text::{fit, short_count, short_ratio, short_size};
use crate::printable::printable;
use std::cmp::Ordering;
use unicode_width::UnicodeWidthStr;

/// The value by which a column sorts.
enum SortValue {
    /// Larger first.
    Number(f64),
    /// In the order of the list.
    Key,
    /// Alphabetically.
    Text(String),
}

/// A column.
pub struct Column {
    pub title: &'static str,
    /// What it shows, for the help and docs/reference.md.
    pub help: &'static str,
    /// Columns of the terminal that it takes. The name takes what is left.
    pub width: usize,
    /// Columns with a lower rank are shown first.
    rank: usize,
    cell: fn(&Row) -> String,
    value: fn(&Row) -> SortValue,
}

/// The column that takes what is left, and its least width.
pub const NAME: &str = "NAME";
const NAME_WIDTH_MIN: usize = 8;
/// Columns from this rank on are shown only beside a name of this width.
const WIDE_RANK: usize = 9;
const NAME_WIDTH_WIDE: usize = 16;
/// The column that is drawn as a bar.
pub const BAR: &str = "MEMORY";
/// The column with the limit.
pub const USED: &str = "USED/LIMIT";
/// The column that draws the loads of the last looks.
const HISTORY: &str = "LAST LOADS";
/// Spaces between two columns.
const GAP: usize = 1;

fn or_dash(cell: Option<String>) -> String {
    cell.unwrap_or_else(|| "-".to_string())
}

fn size(bytes: u64) -> String {
    if bytes == 0 { "-".to_string() } else { short_size(bytes) }
}

fn used(row: &Row) -> String {
    match row.key {
        _ if !row.has_figures => or_dash(None),
        RowKey::Export(_) => or_dash(row.limit_bytes.map(short_size)),
        _ => {
            format!("{}/{}", short_size(row.used_bytes), or_dash(row.limit_bytes.map(short_size)))
        }
    }
}

fn percent(value: f64) -> String {
    if value < 99.95 { format!("{value:.1}") } else { short_count(value) }
}

fn number(value: Option<f64>) -> SortValue {
    SortValue::Number(value.unwrap_or(-1.0))
}

fn bytes(value: u64) -> SortValue {
    SortValue::Number(value as f64)
}

/// All columns, in their order on the screen. The ranks choose those that fit.
pub const COLUMNS: [Column; 19] = [
    Column {
        title: "PID",
        help: "process of memfold run, of memfold blk, or of a run",
        width: 7,
        rank: 1,
        cell: |row| match row.key {
            RowKey::Group(_) => "group".to_string(),
            _ => or_dash(row.pid.map(|pid| pid.to_string())),
        },
        value: |_| SortValue::Key,
    },
    Column {
        title: NAME,
        help: "the command",
        width: NAME_WIDTH_MIN,
        rank: 0,
        cell: |row| row.name.clone(),
        value: |row| SortValue::Text(row.name.to_lowercase()),
    },
    Column {
        title: "GROUP",
        help: "the group of a run",
        width: 10,
        rank: 12,
        cell: |row| or_dash(row.group.clone()),
        value: |row| SortValue::Text(row.group.clone().unwrap_or("\u{7f}".to_string())),
    },
    Column {
        title: "PARTS",
        help: "processes of a run, runs of a group, devices of a server",
        width: 5,
        rank: 15,
        cell: |row| or_dash(row.members.map(|count| count.to_string())),
        value: |row| number(row.members.map(|count| count as f64)),
    },
    Column {
        title: USED,
        help: "memory that counts against the limit. A run in a group: its share",
        width: 11,
        rank: 2,
        cell: used,
        value: |row| bytes(row.used_bytes),
    },
    Column {
        title: BAR,
        help: "# uncompressed, = compressed, . in the swap file or remote store; the whole bar is the limit and what is in the file or remote store",
        width: 10,
        rank: 3,
        cell: |_| String::new(),
        value: |row| {
            let limit = row.limit_bytes.filter(|limit| *limit > 0);
            number(limit.map(|limit| row.used_bytes as f64 / limit as f64))
        },
    },
    Column {
        title: "RES",
        help: "uncompressed memory, the part # of the bar",
        width: 5,
        rank: 16,
        cell: |row| size(row.resident_bytes),
        value: |row| bytes(row.resident_bytes),
    },
    Column {
        title: "POOL",
        help: "compressed memory, the part = of the bar",
        width: 5,
        rank: 17,
        cell: |row| size(row.compressed_bytes),
        value: |row| bytes(row.compressed_bytes),
    },
    Column {
        title: "SPILL",
        help: "data in the swap file and the remote store",
        width: 5,
        rank: 14,
        cell: |row| size(row.spilled_bytes),
        value: |row| bytes(row.spilled_bytes),
    },
    Column {
        title: "FOLD",
        help: "data that is only stored, before compression",
        width: 5,
        rank: 11,
        cell: |row| size(row.folded_bytes),
        value: |row| bytes(row.folded_bytes),
    },
    Column {
        title: "RATIO",
        help: "size before compression / after it, of all data that was stored",
        width: 5,
        rank: 4,
        cell: |row| or_dash(row.ratio().map(short_ratio)),
        value: |row| number(row.ratio()),
    },
    Column {
        title: "FAULT/S",
        help: "all faults: touches that memfold served",
        width: 7,
        rank: 13,
        cell: |row| or_dash(row.rates.faults.map(short_count)),
        value: |row| number(row.rates.faults),
    },
    Column {
        title: "LOAD/S",
        help: "faults that loaded data; reads of a device",
        width: 6,
        rank: 5,
        cell: |row| or_dash(row.rates.loads.map(short_count)),
        value: |row| number(row.rates.loads),
    },
    Column {
        title: HISTORY,
        help: "loads a second at each of the last 12 looks, the newest at the right; each step is five times as many, and the first is one",
        width: LOOKS,
        rank: 9,
        cell: |row| history::drawn(&row.loads_by_look),
        value: |row| number(row.rates.loads),
    },
    Column {
        title: "ZERO/S",
        help: "first touches of pages",
        width: 6,
        rank: 7,
        cell: |row| or_dash(row.rates.zeros.map(short_count)),
        value: |row| number(row.rates.zeros),
    },
    Column {
        title: "WRITE/S",
        help: "first writes to loaded pages; writes to a device",
        width: 7,
        rank: 18,
        cell: |row| or_dash(row.rates.writes.map(short_count)),
        value: |row| number(row.rates.writes),
    },
    Column {
        title: "FAULT%",
        help: "CPU time of threads in faults, as a share of the time; several threads can have more than 100",
        width: 6,
        rank: 6,
        cell: |row| or_dash(row.fault_percent().map(percent)),
        value: |row| number(row.fault_percent()),
    },
    Column {
        title: "P99us",
        help: "time that 99 of 100 loads did not exceed, in us",
        width: 5,
        rank: 10,
        cell: |row| or_dash(row.rates.load_p99_ns.map(|ns| short_count(ns as f64 / 1e3))),
        value: |row| number(row.rates.load_p99_ns.map(|ns| ns as f64)),
    },
    Column {
        title: "CODEC",
        help: "the codec of a run or of devices",
        width: 6,
        rank: 8,
        cell: |row| or_dash(row.codec.clone()),
        value: |row| SortValue::Text(row.codec.clone().unwrap_or("\u{7f}".to_string())),
    },
];

impl Column {
    /// Returns the cell of a row, as wide as it is, and printable.
    pub fn cell(&self, row: &Row) -> String {
        printable(&(self.cell)(row))
    }

    /// Returns whether its cells begin at its left.
    pub fn is_text(&self) -> bool {
        [NAME, "GROUP", BAR, "CODEC"].contains(&self.title)
    }

    fn compare(&self, a: &Row, b: &Row) -> Ordering {
        let order = match ((self.value)(a), (self.value)(b)) {
            (SortValue::Number(a), SortValue::Number(b)) => b.total_cmp(&a),
            (SortValue::Text(a), SortValue::Text(b)) => a.cmp(&b),
            _ => Ordering::Equal,
        };
        order.then_with(|| a.key.cmp(&b.key))
    }
}

/// Sorts rows by a column. Rows that are equal in it keep the order of the list.
pub fn sort(rows: &mut [Row], column: usize) {
    rows.sort_by(|a, b| COLUMNS[column].compare(a, b));
}

/// Keeps the rows that have this text in their name, process ID or group, in upper or lower case.
pub fn filter(rows: &mut Vec<Row>, text: &str) {
    let text = text.to_lowercase();
    rows.retain(|row| has(row, &text));
}

/// Returns whether a row has a text, which is in lower case.
fn has(row: &Row, text: &str) -> bool {
    let pid = row.pid.map(|pid| pid.to_string());
    [Some(&row.name), row.command.as_ref(), row.group.as_ref(), pid.as_ref()]
        .into_iter()
        .flatten()
        .any(|cell| cell.to_lowercase().contains(text))
}

/// Returns the columns that a terminal of this width shows, each with its width.
pub fn shown(width: usize) -> Vec<(usize, usize)> {
    let mut ranking: Vec<usize> = (0..COLUMNS.len()).collect();
    ranking.sort_by_key(|at| COLUMNS[*at].rank);
    let mut used_width = 0;
    let fits = |at: &usize| {
        let column = &COLUMNS[*at];
        used_width += column.width + GAP;
        let for_name = if column.rank < WIDE_RANK { 0 } else { NAME_WIDTH_WIDE - NAME_WIDTH_MIN };
        used_width + for_name <= width + GAP
    };
    let mut columns: Vec<usize> = ranking.into_iter().take_while(fits).collect();
    columns.sort_unstable();
    let used_width: usize = columns.iter().map(|at| COLUMNS[*at].width + GAP).sum();
    let width_left = (width + GAP).saturating_sub(used_width);
    let width_of =
        |at: usize| COLUMNS[at].width + if COLUMNS[at].title == NAME { width_left } else { 0 };
    columns.into_iter().map(|at| (at, width_of(at))).collect()
}

/// Returns a text in a cell of this width, at its left or right.
pub fn padded(text: &str, width: usize, is_text: bool) -> String {
    let text = fit(text, width);
    let blanks = " ".repeat(width.saturating_sub(text.width()));
    if is_text { text + &blanks } else { blanks + &text }
}

/// Returns all rows as lines of a plain table with every column but the bar, the name last.
pub fn table(rows: &[Row]) -> Vec<String> {
    let columns = || COLUMNS.iter().filter(|column| ![NAME, BAR, HISTORY].contains(&column.title));
    let width_of = |column: &Column| {
        let cells = rows.iter().map(|row| column.cell(row).width());
        cells.max().unwrap_or(0).max(column.title.len())
    };
    let widths: Vec<usize> = columns().map(width_of).collect();
    let line = |cell: &dyn Fn(&Column) -> String, name: &str| {
        let cells = columns().zip(&widths);
        let cells =
            cells.map(|(column, width)| padded(&cell(column), *width, column.is_text()) + " ");
        format!("{}{name}", cells.collect::<String>())
    };
    let name = |row: &Row| {
        let name = printable(row.command.as_ref().unwrap_or(&row.name));
        let state = if row.is_stopped { "stopped, " } else { "" };
        match row.silent {
            Some(silent) => format!("{name} ({state}no answer for {} s)", silent.as_secs()),
            None => match &row.excess_cause {
                Some(cause) => format!("{name} (above its limit: {cause})"),
                None => name,
            },
        }
    };
    let head = line(&|column| column.title.to_string(), NAME);
    let rows = rows.iter().map(|row| line(&|column| column.cell(row), &name(row)));
    std::iter::once(head).chain(rows).collect()
}

/// Returns how many cells of a bar are resident, compressed and spilled memory. The whole bar is
/// the limit, or what is in use if that is more, and what is spilled.
pub fn bar(row: &Row, width: u16) -> [u16; 3] {
    let parts = [row.resident_bytes, row.compressed_bytes, row.spilled_bytes].map(|b| b as f64);
    let held_bytes = parts[0] + parts[1];
    let whole = held_bytes.max(row.limit_bytes.unwrap_or(0) as f64) + parts[2];
    let mut sum = 0.0;
    let ends = parts.map(|part| {
        sum += part;
        if whole > 0.0 { (sum / whole * f64::from(width)).round() as u16 } else { 0 }
    });
    [ends[0], ends[1] - ends[0], ends[2] - ends[1]]
}
