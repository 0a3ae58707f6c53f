//! The effects of keys: from a key and the state of the screen to a new state, and to an action for the
//! caller.
use super::columns::shown;
use super::model::{Row, RowKey, TopPage};
use crate::printable::printable;
use ratatui_termion::termion::event::Key;
use std::mem;

/// Characters of an input, at most.
const INPUT_LEN_MAX: usize = 200;
/// Rows that PageUp and PageDown pass.
const PAGE_ROWS: usize = 10;

/// The caller's action after a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyAction {
    None,
    Quit,
    /// Give the terminal back to the shell until it continues the process.
    Suspend,
    /// Write all figures to a file.
    Export,
    /// Change the limit of a run, group or server.
    SetLimit {
        of: RowKey,
        size: String,
    },
}

/// A line that the user types.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// A filter, and the filter before it.
    Filter { before: String },
    /// A limit.
    Limit { of: RowKey, text: String },
}

/// The page on the screen, and the selected row.
#[derive(Clone, Debug)]
pub struct ViewState {
    /// The page, above those to which Esc leads, each with what was selected and the filter before.
    pages: Vec<(TopPage, Option<RowKey>, String)>,
    /// The selected row of this page.
    selected: Option<RowKey>,
    /// Its place in the rows that were last shown.
    at: usize,
    /// Index of the column that the rows are sorted by.
    pub sort: usize,
    pub filter: String,
    pub input: Option<Input>,
    /// A line about the last action, until the next key.
    pub message: String,
    pub is_help: bool,
    /// Whether the run, or the server, of this page has ended.
    pub has_ended: bool,
    /// Columns of the terminal.
    pub width: usize,
}

impl ViewState {
    pub fn new() -> ViewState {
        ViewState {
            pages: vec![(TopPage::All, None, String::new())],
            selected: None,
            at: 0,
            sort: 0,
            filter: String::new(),
            input: None,
            message: String::new(),
            is_help: false,
            has_ended: false,
            width: 80,
        }
    }

    pub fn page(&self) -> &TopPage {
        &self.pages.last().expect("the first page is never left").0
    }

    /// Notes whether the run, or the server, of this page is still among all rows.
    pub fn note(&mut self, all: &[Row]) {
        let key = match self.page() {
            TopPage::Run(run) | TopPage::Process { run, .. } => RowKey::Run(*run),
            TopPage::Server(pid) => RowKey::Server(*pid),
            TopPage::All | TopPage::Group(_) => {
                self.has_ended = false;
                return;
            }
        };
        self.has_ended = all.iter().all(|row| row.key != key);
    }

    /// Returns the place of the selected row. If it has gone, the row at its place is selected.
    pub fn select_in(&mut self, rows: &[Row]) -> usize {
        let position = rows.iter().position(|row| Some(&row.key) == self.selected.as_ref());
        self.at = position.unwrap_or(self.at.min(rows.len().saturating_sub(1)));
        self.selected = rows.get(self.at).map(|row| row.key.clone());
        self.at
    }

    fn select(&mut self, at: usize, rows: &[Row]) {
        self.at = at.min(rows.len().saturating_sub(1));
        self.selected = rows.get(self.at).map(|row| row.key.clone());
    }

    fn open(&mut self, page: TopPage) {
        self.pages.push((page, self.selected.take(), mem::take(&mut self.filter)));
        self.at = 0;
    }

    /// Leaves the page, or ends the filter.
    fn back(&mut self) {
        if !self.filter.is_empty() {
            self.filter.clear();
        } else if self.pages.len() > 1
            && let Some((_, selection, filter)) = self.pages.pop()
        {
            (self.selected, self.filter) = (selection, filter);
        }
    }

    /// Sorts by another column of those that the terminal shows.
    fn sort_by(&mut self, next: impl Fn(usize, usize) -> usize) {
        let columns = shown(self.width);
        let at = columns.iter().position(|(column, _)| *column == self.sort);
        let next = at.map_or(0, |at| next(at, columns.len()));
        self.sort = columns.get(next).map_or(0, |(column, _)| *column);
    }

    /// Returns which run, group or server the selected row is about, or is in.
    fn limited(&self) -> Option<RowKey> {
        match self.page() {
            TopPage::Run(run) | TopPage::Process { run, .. } => Some(RowKey::Run(*run)),
            TopPage::Server(pid) => Some(RowKey::Server(*pid)),
            TopPage::All | TopPage::Group(_) => self.selected.clone(),
        }
    }
}

/// Does what a key asks. `rows` are those on the screen.
pub fn press(state: &mut ViewState, key: Key, rows: &[Row]) -> KeyAction {
    state.select_in(rows);
    match key {
        Key::Ctrl('c') => return KeyAction::Quit,
        Key::Ctrl('z') => return KeyAction::Suspend,
        _ => {}
    }
    if let Some(input) = state.input.take() {
        return type_key(state, input, key);
    }
    state.message.clear();
    if state.is_help {
        state.is_help = false;
        return if key == Key::Char('q') { KeyAction::Quit } else { KeyAction::None };
    }
    match key {
        Key::Char('q') => return KeyAction::Quit,
        Key::Char('e') => return KeyAction::Export,
        Key::Char('?' | 'h') | Key::F(1) => state.is_help = true,
        Key::Char('s') => state.sort_by(|at, count| (at + 1) % count),
        Key::Char('S') => state.sort_by(|at, count| (at + count - 1) % count),
        Key::Char('/') => state.input = Some(Input::Filter { before: state.filter.clone() }),
        Key::Char('l') if state.has_ended => {
            state.message = "It has ended, so its limit can't be changed.".to_string();
        }
        Key::Char('l') => match state.limited() {
            Some(of) => state.input = Some(Input::Limit { of, text: String::new() }),
            None => state.message = "No run is selected.".to_string(),
        },
        Key::Char('\n') | Key::Right => enter(state),
        Key::Esc | Key::Backspace | Key::Left => state.back(),
        Key::Up | Key::Char('k') => state.select(state.at.saturating_sub(1), rows),
        Key::Down | Key::Char('j') => state.select(state.at + 1, rows),
        Key::PageUp => state.select(state.at.saturating_sub(PAGE_ROWS), rows),
        Key::PageDown => state.select(state.at + PAGE_ROWS, rows),
        Key::Home | Key::Char('g') => state.select(0, rows),
        Key::End | Key::Char('G') => state.select(rows.len(), rows),
        _ => {}
    }
    KeyAction::None
}

/// Opens the page of the selected row.
fn enter(state: &mut ViewState) {
    let Some(key) = state.selected.clone() else { return };
    let page = match (key, state.page()) {
        (RowKey::Run(pid), _) => TopPage::Run(pid),
        (RowKey::Group(name), _) => TopPage::Group(name),
        (RowKey::Server(pid), _) => TopPage::Server(pid),
        (RowKey::Process(pid), TopPage::Run(run)) => TopPage::Process { run: *run, pid },
        _ => return,
    };
    state.open(page);
}

/// Adds a key to the line that is typed.
fn type_key(state: &mut ViewState, mut input: Input, key: Key) -> KeyAction {
    let text = match &mut input {
        Input::Filter { .. } => &mut state.filter,
        Input::Limit { text, .. } => text,
    };
    match key {
        Key::Char('\n') => {
            return match input {
                Input::Limit { of, text } if !text.trim().is_empty() => {
                    KeyAction::SetLimit { of, size: text.trim().to_string() }
                }
                _ => KeyAction::None,
            };
        }
        Key::Esc => {
            if let Input::Filter { before } = input {
                state.filter = before;
            }
            return KeyAction::None;
        }
        Key::Char(c) if printable(&c.to_string()).starts_with(c) && text.len() < INPUT_LEN_MAX => {
            text.push(c);
        }
        Key::Backspace => drop(text.pop()),
        Key::Ctrl('u') => text.clear(),
        _ => {}
    }
    state.input = Some(input);
    KeyAction::None
}
