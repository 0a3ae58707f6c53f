//! The loop of the screen: keys, signals, new figures, and the terminal, which is restored at each
//! end.
use super::areas::AreaReader;
use super::columns::{filter, sort};
use super::draw::{Screen, draw, table_width};
use super::history::LoadHistory;
use super::keys::{KeyAction, ViewState, press};
use super::model::{Row, RowKey, TopPage, counters, rows};
use super::watch::{Heard, Watch};
use super::{export, limit};
use crate::child::signals::{PassedSignals, stop};
use crate::failure::CommandFailure;
use crate::program::plain;
use ratatui_core::terminal::Terminal;
use ratatui_termion::TermionBackend;
use ratatui_termion::termion::event::Key;
use ratatui_termion::termion::input::TermRead;
use ratatui_termion::termion::raw::{IntoRawMode, RawTerminal};
use std::fs::File;
use std::io::{self, BufWriter, IsTerminal, Read, Stdout, Write};
use std::panic;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

/// The terminal changes its size without a message, so it is looked at this often.
const RESIZE_PERIOD: Duration = Duration::from_millis(250);
/// If the terminal takes no output, a signal ends the process after this time.
const PATIENCE: Duration = Duration::from_secs(1);
/// To the other screen, without a cursor; and back. A terminal that is there already is cleared.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const CLEAR: &str = "\x1b[2J";
const LEAVE: &str = "\x1b[0m\x1b[?25h\x1b[?1049l";

/// The terminal as it was, from the moment when it is changed.
static RAW: OnceLock<RawTerminal<Stdout>> = OnceLock::new();

/// An event for which the loop waits.
enum Event {
    Key(Key),
    /// The keyboard has gone.
    Closed,
    Signal(i32),
    /// It shall stop, as Ctrl-Z asks.
    Suspend,
    /// It was stopped and goes on. The shell may have changed the terminal.
    Continue,
    /// The result of setting a limit.
    Message(String),
}

/// Shows the screen until it is quit. Returns the exit status.
///
/// # Errors
/// 125: there is no keyboard, or the terminal can't be used.
pub fn show(interval: Duration, is_coloured: bool) -> Result<u8, CommandFailure> {
    let fail = |e: &io::Error| {
        CommandFailure::own(format!(
            "top: The terminal can't be used: {}. memfold top --once prints a table.",
            plain(e)
        ))
    };
    let keyboard = keyboard().map_err(|e| fail(&e))?;
    let signals = PassedSignals::block();
    enter().map_err(|e| fail(&e))?;
    let (to, events) = channel();
    let status = listen(signals, keyboard, &to)
        .and_then(|()| TopLoop::new(interval, is_coloured, to))
        .and_then(|top| top.run(&events));
    leave();
    status.map_err(|e| fail(&e))
}

/// Returns where keys come from: stdin, or the terminal of the session if stdin is none.
fn keyboard() -> io::Result<Box<dyn Read + Send>> {
    if io::stdin().is_terminal() {
        return Ok(Box::new(io::stdin()));
    }
    Ok(Box::new(File::open("/dev/tty")?))
}

/// Changes the terminal, after all ends are prepared to restore it.
fn enter() -> io::Result<()> {
    let before = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        leave();
        before(info);
    }));
    let raw = io::stdout().into_raw_mode()?;
    // It is set once, because the screen is shown once in a process.
    let _ = RAW.set(raw);
    switch()
}

/// Switches to the other screen.
fn switch() -> io::Result<()> {
    io::stdout().write_all([ENTER, CLEAR].concat().as_bytes())?;
    io::stdout().flush()
}

/// Restores the terminal. A failure is ignored, because the terminal may have gone.
fn leave() {
    if let Some(raw) = RAW.get() {
        let _ = raw.suspend_raw_mode();
        let _ = io::stdout().write_all(LEAVE.as_bytes());
        let _ = io::stdout().flush();
    }
}

/// Starts the threads that wait for signals and keys. Without one of them the screen could not be
/// quit.
fn listen(
    signals: PassedSignals,
    keyboard: Box<dyn Read + Send>,
    to: &Sender<Event>,
) -> io::Result<()> {
    let builder = |name: &str| thread::Builder::new().name(name.to_string());
    let to_of_signals = to.clone();
    builder("memfold-signals").spawn(move || wait_for_signals(&signals, &to_of_signals))?;
    let to_of_keys = to.clone();
    builder("memfold-keys").spawn(move || read_keys(keyboard, &to_of_keys))?;
    Ok(())
}

fn wait_for_signals(signals: &PassedSignals, to: &Sender<Event>) {
    const ENDING: [i32; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];
    loop {
        let Some(signal) = signals.next(None) else { continue };
        match signal.number {
            libc::SIGTSTP => drop(to.send(Event::Suspend)),
            libc::SIGCONT => drop(to.send(Event::Continue)),
            _ => {}
        }
        if !ENDING.contains(&signal.number) {
            continue;
        }
        let _ = to.send(Event::Signal(signal.number));
        thread::sleep(PATIENCE);
        // The loop still writes to a terminal that takes nothing.
        if let Some(raw) = RAW.get() {
            let _ = raw.suspend_raw_mode();
        }
        std::process::exit(128 + signal.number);
    }
}

fn read_keys(keyboard: Box<dyn Read + Send>, to: &Sender<Event>) {
    for key in keyboard.keys() {
        let event = match key {
            Ok(key) => Event::Key(key),
            Err(e) if e.raw_os_error().is_some() => break,
            // The bytes are no key.
            Err(_) => continue,
        };
        if to.send(event).is_err() {
            return;
        }
    }
    let _ = to.send(Event::Closed);
}

/// Returns the terminal, of which nothing is known to be drawn. `Terminal::clear` would ask it where
/// its cursor is, and the thread that reads keys would get the answer.
fn terminal() -> io::Result<Terminal<TermionBackend<BufWriter<Stdout>>>> {
    Terminal::new(TermionBackend::new(BufWriter::new(io::stdout())))
}

/// The screen and what it shows.
struct TopLoop {
    terminal: Terminal<TermionBackend<BufWriter<Stdout>>>,
    is_coloured: bool,
    interval: Duration,
    watch: Watch,
    reader: AreaReader,
    state: ViewState,
    heard: Vec<Heard>,
    history: LoadHistory,
    /// Whether `heard` is not in the history yet.
    is_new: bool,
    to: Sender<Event>,
}

impl TopLoop {
    fn new(interval: Duration, is_coloured: bool, to: Sender<Event>) -> io::Result<TopLoop> {
        Ok(TopLoop {
            terminal: terminal()?,
            is_coloured,
            interval,
            watch: Watch::begin(interval),
            reader: AreaReader::default(),
            state: ViewState::new(),
            heard: Vec::new(),
            history: LoadHistory::default(),
            is_new: false,
            to,
        })
    }

    /// Draws at each interval, and after each key. Returns the exit status.
    fn run(mut self, events: &Receiver<Event>) -> io::Result<u8> {
        // The first figures come at once.
        let mut next = Instant::now() + self.interval.min(RESIZE_PERIOD);
        loop {
            let rows = self.draw()?;
            let wait = next.saturating_duration_since(Instant::now()).min(RESIZE_PERIOD);
            match events.recv_timeout(wait) {
                Ok(Event::Key(key)) => match self.press(key, &rows) {
                    KeyAction::Quit => return Ok(0),
                    KeyAction::Suspend => self.suspend()?,
                    _ => {}
                },
                Ok(Event::Suspend) => self.suspend()?,
                Ok(Event::Continue) => self.resume()?,
                Ok(Event::Message(text)) => self.state.message = text,
                Ok(Event::Signal(number)) => return Ok(128 + number as u8),
                Ok(Event::Closed) | Err(RecvTimeoutError::Disconnected) => return Ok(0),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if Instant::now() >= next {
                self.heard = self.watch.heard();
                self.is_new = true;
                self.watch.find();
                next = Instant::now() + self.interval;
            }
        }
    }

    /// Draws the screen. Returns the rows that it shows.
    fn draw(&mut self) -> io::Result<Vec<Row>> {
        let now = Instant::now();
        let page = self.state.page().clone();
        let all = rows(&self.heard, &TopPage::All, now);
        let mut rows_of_page = match &page {
            TopPage::All => all.clone(),
            page => rows(&self.heard, page, now),
        };
        if std::mem::take(&mut self.is_new) {
            self.history.note(all.iter().chain(&rows_of_page));
        }
        self.history.fill(&mut rows_of_page);
        filter(&mut rows_of_page, &self.state.filter);
        sort(&mut rows_of_page, self.state.sort);
        let process = match page {
            TopPage::Process { run, pid } => Some((run, pid)),
            _ => None,
        };
        self.reader.look_at(process.map(|(_, pid)| pid));
        let counters = process.map_or(Vec::new(), |(run, pid)| counters(&self.heard, run, pid));
        let areas = self.reader.areas();
        let size = self.terminal.size()?;
        self.state.width = table_width(size.width);
        self.state.note(&all);
        let screen = Screen {
            at: self.state.select_in(&rows_of_page),
            rows: &rows_of_page,
            all: &all,
            state: &self.state,
            is_coloured: self.is_coloured,
            counters: &counters,
            areas: areas.as_ref(),
        };
        self.terminal.draw(|frame| {
            let area = frame.area();
            draw(frame.buffer_mut(), area, &screen);
        })?;
        Ok(rows_of_page)
    }

    /// Gives the terminal back until the process is continued.
    fn suspend(&mut self) -> io::Result<()> {
        leave();
        stop();
        self.resume()
    }

    /// Takes the terminal again, and draws all of it.
    fn resume(&mut self) -> io::Result<()> {
        if let Some(raw) = RAW.get() {
            raw.activate_raw_mode()?;
        }
        switch()?;
        self.terminal = terminal()?;
        Ok(())
    }

    /// Does what a key asks, except to quit and to suspend. Returns the action.
    fn press(&mut self, key: Key, rows: &[Row]) -> KeyAction {
        let action = press(&mut self.state, key, rows);
        match &action {
            KeyAction::None | KeyAction::Quit | KeyAction::Suspend => {}
            KeyAction::Export => {
                self.state.message = match export(&self.watch.heard(), Path::new(".")) {
                    Ok(name) => format!("Written: {name}"),
                    Err(e) => format!("The figures can't be written to the current directory: {e}"),
                };
            }
            KeyAction::SetLimit { of, size } => self.set_limit(of.clone(), size.clone()),
        }
        action
    }

    /// Changes a limit in a thread, because a stopped run does not answer.
    fn set_limit(&mut self, of: RowKey, size: String) {
        self.state.message = "The limit is being changed.".to_string();
        let to = self.to.clone();
        let change = move || {
            let outcome = limit(&of, &size).unwrap_or_else(|failure| failure.text);
            let _ = to.send(Event::Message(outcome));
        };
        if thread::Builder::new().spawn(change).is_err() {
            self.state.message =
                "No thread can be started to set it. Try again, or use memfold set.".to_string();
        }
    }
}
