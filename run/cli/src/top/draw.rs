//! Draws the screen: from rows and the state to a buffer of cells.
use super::areas::ReadAreas;
use super::columns::{BAR, COLUMNS, NAME, USED, bar, padded, shown};
use super::keys::{Input, ViewState};
use super::model::{Row, RowKey, TopPage};
use super::text::{fit, short_size};
use crate::printable::printable;
use crate::run::help::wrapped_at;
use ratatui_core::buffer::Buffer;
use ratatui_core::layout::Rect;
use ratatui_core::style::{Color, Modifier, Style};
use unicode_width::UnicodeWidthStr;

/// Everything that the screen shows.
pub struct Screen<'a> {
    /// The rows of the page, sorted and filtered.
    pub rows: &'a [Row],
    /// All rows of the first page.
    pub all: &'a [Row],
    /// Place of the selected row.
    pub at: usize,
    pub state: &'a ViewState,
    pub is_coloured: bool,
    /// On the page of a process, its counters and its areas.
    pub counters: &'a [(&'static str, String)],
    pub areas: Option<&'a ReadAreas>,
}

/// The parts of a bar: their names, characters and colours. The rest of a bar is room below the
/// limit.
const PARTS: [(&str, char, Color); 3] = [
    ("uncompressed", '#', Color::Green),
    ("compressed", '=', Color::Yellow),
    ("in the swap file or remote store", '.', Color::Blue),
];
/// Columns of a counter on the page of a process, and its widths of a size.
const COUNTER_WIDTH: usize = 25;
const SIZE_WIDTH: usize = 9;

/// What the keys do.
pub const KEYS: [[&str; 2]; 8] = [
    ["arrows, j, k", "select a row; also PgUp, PgDn, Home, End"],
    ["Enter", "open it: the runs of a group, the processes of a run, a process"],
    ["Esc", "back"],
    ["s, S", "sort by the next column, by the one before"],
    ["/", "show only rows with this text in name, PID or group"],
    ["l", "change the limit of the run, group or server: 512M, 25%, none"],
    ["e", "write all figures to a JSON file in the current directory"],
    ["q, Ctrl-C", "quit; Ctrl-Z suspends it"],
];
/// The last line of the help.
const WIDER: &str = "Wider terminals show more columns.";
/// Columns of a key and of a column's title in the help.
const KEY_WIDTH: usize = 14;

/// A buffer, and whether it may have colours.
struct Canvas<'a> {
    buffer: &'a mut Buffer,
    area: Rect,
    is_coloured: bool,
}

impl Canvas<'_> {
    /// Writes a text at a place of the area, with its control characters escaped. What is outside is
    /// cut. Returns the column after it.
    fn put(&mut self, x: usize, y: usize, text: &str, style: Style) -> usize {
        let text = &printable(text);
        let (width, height) = (usize::from(self.area.width), usize::from(self.area.height));
        if x < width && y < height {
            let (column, top) = (self.area.x + x as u16, self.area.y + y as u16);
            self.buffer.set_stringn(column, top, text, width - x, style);
        }
        x + text.width()
    }

    /// Writes a text that takes the whole line.
    fn line(&mut self, y: usize, text: &str, style: Style) {
        let width = usize::from(self.area.width);
        self.put(0, y, &padded(&printable(text), width, true), style);
    }

    fn colour(&self, colour: Color) -> Style {
        if self.is_coloured { Style::new().fg(colour) } else { Style::new() }
    }

    /// Writes a part of a bar: coloured cells, or its character.
    fn part(&mut self, x: usize, y: usize, part: usize, len: usize) -> usize {
        let (_, character, colour) = PARTS[part];
        // In one colour with its ground, the character is not seen, but it can be copied.
        let style = self.colour(colour);
        let style = if self.is_coloured { style.bg(colour) } else { style };
        self.put(x, y, &character.to_string().repeat(len), style)
    }
}

const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);
const REVERSED: Style = Style::new().add_modifier(Modifier::REVERSED);

/// Draws the whole screen.
pub fn draw(buffer: &mut Buffer, area: Rect, screen: &Screen<'_>) {
    let mut canvas = Canvas { buffer, area, is_coloured: screen.is_coloured };
    let height = usize::from(area.height);
    canvas.put(0, 0, &title(screen), BOLD);
    legend(&mut canvas);
    let last = height.saturating_sub(1);
    // In a small terminal rows are worth more than the last line.
    let end = if height > 4 { last } else { height };
    match screen.state.page() {
        _ if screen.state.is_help => help(&mut canvas, end),
        TopPage::Process { pid, .. } => process(&mut canvas, screen, *pid, end),
        _ => list(&mut canvas, screen, end),
    }
    if end == last {
        footer(&mut canvas, last, screen.state);
    }
}

/// Returns the first line: where the screen is, and what all runs and servers hold.
fn title(screen: &Screen<'_>) -> String {
    let of = |key: &RowKey| screen.all.iter().find(|row| row.key == *key);
    match screen.state.page() {
        TopPage::All => summary(screen.all),
        TopPage::Group(name) => format!("runs of group {name}"),
        TopPage::Run(pid) | TopPage::Process { run: pid, .. } => match of(&RowKey::Run(*pid)) {
            Some(row) if !row.has_figures => {
                format!("run {pid}: {}", row.command.as_ref().unwrap_or(&row.name))
            }
            Some(row) => {
                let limit = row.limit_bytes.map_or("none".to_string(), short_size);
                let name = row.command.as_ref().unwrap_or(&row.name);
                format!("run {pid}, {} of {limit}: {name}", short_size(row.used_bytes))
            }
            None => format!("run {pid} has ended"),
        },
        TopPage::Server(pid) => match of(&RowKey::Server(*pid)) {
            Some(row) => format!("devices of {}, process {pid}", row.name),
            None => format!("memfold blk {pid} has ended"),
        },
    }
}

fn summary(all: &[Row]) -> String {
    let count = |is: fn(&RowKey) -> bool, one: &str, many: &str| {
        let count = all.iter().filter(|row| is(&row.key)).count();
        format!("{count} {}", if count == 1 { one } else { many })
    };
    let runs = count(|key| matches!(key, RowKey::Run(_)), "run", "runs");
    let groups = count(|key| matches!(key, RowKey::Group(_)), "group", "groups");
    let servers = count(|key| matches!(key, RowKey::Server(_)), "server", "servers");
    let is_own = |row: &&Row| !matches!(row.key, RowKey::Group(_));
    let sum = |of: fn(&Row) -> u64| short_size(all.iter().filter(is_own).map(of).sum::<u64>());
    format!(
        "memfold top: {runs}, {groups}, {servers}; used {}, folded {}, spilled {}",
        sum(|row| row.used_bytes),
        sum(|row| row.folded_bytes),
        sum(|row| row.spilled_bytes)
    )
}

fn legend(canvas: &mut Canvas<'_>) {
    let mut x = 0;
    for (part, (name, ..)) in PARTS.iter().enumerate() {
        x = canvas.part(x, 1, part, 2) + 1;
        x = canvas.put(x, 1, name, Style::new()) + 2;
    }
}

/// Explains the keys and the columns that this terminal shows. Where they don't fit, the columns
/// come first.
fn help(canvas: &mut Canvas<'_>, end: usize) {
    let width = usize::from(canvas.area.width).saturating_sub(KEY_WIDTH).max(KEY_WIDTH);
    let explained = |name: &str, help: &str| -> Vec<String> {
        let lines = wrapped_at(help, width);
        let names = std::iter::once(name).chain(std::iter::repeat(""));
        lines.lines().zip(names).map(|(line, name)| format!("{name:<KEY_WIDTH$}{line}")).collect()
    };
    let columns = shown(table_width(canvas.area.width)).into_iter();
    let columns = columns.map(|(at, _)| (COLUMNS[at].title, COLUMNS[at].help));
    let columns: Vec<String> = columns.flat_map(|(title, help)| explained(title, help)).collect();
    let keys: Vec<String> = KEYS.iter().flat_map(|[key, help]| explained(key, help)).collect();
    let lines =
        columns.iter().map(String::as_str).chain([""]).chain(keys.iter().map(String::as_str));
    let lines = lines.chain([WIDER]);
    for (y, line) in (2..end).zip(lines) {
        canvas.line(y, line, Style::new());
    }
}

/// Returns the columns of a terminal of this width that its table takes. The first one has the
/// mark of the selected row.
pub fn table_width(width: u16) -> usize {
    usize::from(width).saturating_sub(1)
}

/// Draws the table of rows.
fn list(canvas: &mut Canvas<'_>, screen: &Screen<'_>, end: usize) {
    let columns = shown(table_width(canvas.area.width));
    let mut x = 1;
    for (at, width) in &columns {
        let column = &COLUMNS[*at];
        let style = if *at == screen.state.sort { REVERSED.patch(BOLD) } else { REVERSED };
        let mark = if *at == screen.state.sort { "*" } else { "" };
        let title = format!("{}{mark}", column.title);
        let title = if title.len() > *width { column.title } else { &title };
        x = canvas.put(x, 2, &padded(title, *width, column.is_text()), style);
        x = canvas.put(x, 2, " ", REVERSED);
    }
    let height = end.saturating_sub(3);
    if screen.rows.is_empty() {
        canvas.put(1, 3, &nothing(screen), Style::new());
    }
    let mut y = 3;
    for (at, row) in screen.rows.iter().enumerate().skip(first_row(screen, height)) {
        if y < end {
            list_row(canvas, y, row, at == screen.at, &columns);
        }
        if let Some(cause) = row.excess_cause.as_ref().filter(|_| y + 1 < end) {
            let indent = " ".repeat(COLUMNS[0].width + 2);
            let style = canvas.colour(Color::Red);
            canvas.put(0, y + 1, &format!("{indent}above its limit: {cause}"), style);
        }
        y += lines_of(row);
    }
}

/// Returns how many lines a row takes: one more for why it is above its limit.
fn lines_of(row: &Row) -> usize {
    1 + usize::from(row.excess_cause.is_some())
}

/// Returns the first row that is shown, so that the selected one is always on the screen.
fn first_row(screen: &Screen<'_>, height: usize) -> usize {
    let mut lines = 0;
    let rows = screen.rows.iter().enumerate().take(screen.at + 1).rev();
    let fits = |(_, row): &(usize, &Row)| {
        lines += lines_of(row);
        lines <= height
    };
    rows.take_while(fits).last().map_or(screen.at, |(at, _)| at)
}

/// Returns why the page has no rows.
fn nothing(screen: &Screen<'_>) -> String {
    let state = screen.state;
    let is_silent = |pid: u32, row: &Row| row.key == RowKey::Run(pid) && !row.has_figures;
    if !state.filter.is_empty() {
        return format!("Nothing here has \"{}\" in its name, PID or group.", state.filter);
    }
    match state.page() {
        TopPage::All => "No runs, groups or block devices of this user. New ones are shown.",
        TopPage::Group(_) => "This group has no runs.",
        TopPage::Run(pid) if screen.all.iter().any(|row| is_silent(*pid, row)) => {
            "It does not answer, so its processes are not known."
        }
        TopPage::Run(_) if state.has_ended => "It has ended.",
        TopPage::Run(_) => "No process of this run has an engine.",
        TopPage::Server(_) | TopPage::Process { .. } => "It has ended.",
    }
    .to_string()
}

fn list_row(
    canvas: &mut Canvas<'_>,
    y: usize,
    row: &Row,
    is_selected: bool,
    columns: &[(usize, usize)],
) {
    let style = if is_selected { BOLD } else { Style::new() };
    canvas.put(0, y, if is_selected { ">" } else { " " }, style);
    let mut x = 1;
    for (at, width) in columns {
        let column = &COLUMNS[*at];
        if column.title == BAR && !matches!(row.key, RowKey::Export(_)) {
            let mut end = x;
            for (part, len) in bar(row, *width as u16).into_iter().enumerate() {
                end = canvas.part(end, y, part, usize::from(len));
            }
        } else {
            let is_excess = column.title == USED && row.excess_bytes().is_some();
            let style = if is_excess { style.patch(canvas.colour(Color::Red)) } else { style };
            canvas.put(x, y, &padded(&column.cell(row), *width, column.is_text()), style);
        }
        x += width + 1;
        // Its figures are old, so they are covered.
        if let (Some(silent), NAME) = (row.silent, column.title) {
            let rest = usize::from(canvas.area.width).saturating_sub(x);
            let why = if row.is_stopped { "it is stopped" } else { "it may be busy" };
            let text = format!("no answer for {} s; {why}", silent.as_secs());
            let style = canvas.colour(Color::Red);
            canvas.put(x, y, &padded(&text, rest, true), style);
            return;
        }
    }
}

/// Draws the page of a process: its counters, and below them its areas.
fn process(canvas: &mut Canvas<'_>, screen: &Screen<'_>, pid: u32, end: usize) {
    let row = screen.rows.iter().find(|row| row.key == RowKey::Process(pid));
    let name = row.map_or("has ended", |row| row.name.as_str());
    canvas.line(2, &format!(" process {pid}: {name}"), REVERSED);
    let per_line = ((usize::from(canvas.area.width) + 1) / (COUNTER_WIDTH + 1)).max(1);
    let lines = screen.counters.len().div_ceil(per_line);
    // Tall before wide: counters that belong together are in one column.
    for (at, (label, value)) in screen.counters.iter().enumerate() {
        let (x, y) = (at / lines * (COUNTER_WIDTH + 1), 3 + at % lines);
        if y < end {
            let value = padded(value, COUNTER_WIDTH - label.len(), false);
            canvas.put(x, y, &format!("{label}{value}"), Style::new());
        }
    }
    let top = 3 + lines;
    if top + 1 < end {
        areas(canvas, screen.areas, top, end);
    }
}

fn areas(canvas: &mut Canvas<'_>, areas: Option<&ReadAreas>, top: usize, end: usize) {
    let sizes = |cells: [&str; 3]| {
        let cells = cells.map(|cell| padded(cell, SIZE_WIDTH, false));
        cells.join(" ")
    };
    let (list, note) = match areas {
        Some(Ok(areas)) => (areas.as_slice(), None),
        Some(Err(why)) => (&[][..], Some(format!("Its smaps file can't be read: {why}."))),
        None => (&[][..], Some("Its smaps file is being read.".to_string())),
    };
    let is_unknown = list.iter().any(|area| area.is_managed.is_none());
    let cause =
        if is_unknown { "folded, untouched or unmanaged" } else { "folded, or never touched" };
    let head = sizes(["SIZE", "RESIDENT", "MISSING"]);
    canvas.line(top, &format!("{head}  AREA (missing: {cause})"), REVERSED);
    if let Some(note) = note {
        canvas.line(top + 1, &note, Style::new());
    }
    let width = usize::from(canvas.area.width);
    for (y, area) in (top + 1..end).zip(list) {
        let (text, note) = match area.is_managed {
            Some(false) => ("-".to_string(), " (not managed)"),
            _ => (short_size(area.missing_bytes()), ""),
        };
        let cells = sizes([&short_size(area.bytes), &short_size(area.resident_bytes), &text]);
        let width_left = width.saturating_sub(cells.len() + 2 + note.len());
        canvas.put(0, y, &format!("{cells}  {}{note}", fit(&area.name, width_left)), Style::new());
    }
}

fn footer(canvas: &mut Canvas<'_>, y: usize, state: &ViewState) {
    let style = Style::new();
    match &state.input {
        Some(Input::Filter { .. }) => {
            let text = format!("Show only rows with: {}_", state.filter);
            canvas.line(y, &text, BOLD);
        }
        Some(Input::Limit { of, text }) => {
            let of = match of {
                RowKey::Group(name) => format!("group {name}"),
                RowKey::Server(pid) => format!("memfold blk {pid}"),
                RowKey::Run(pid) | RowKey::Process(pid) => format!("run {pid}"),
                RowKey::Export(name) => name.clone(),
            };
            canvas.line(y, &format!("New limit of {of} (512M, 25%, none): {text}_"), BOLD);
        }
        None if !state.message.is_empty() => canvas.line(y, &state.message, BOLD),
        None => {
            let filter = match state.filter.as_str() {
                "" => "/ filter".to_string(),
                text => format!("/ filter: {text}"),
            };
            let sort = COLUMNS[state.sort].title;
            let text = format!(
                "q quit  ? help  Enter open  Esc back  l limit  e export  s sort: {sort}  {filter}"
            );
            canvas.line(y, &text, style);
        }
    }
}
