//! The messages of a run while and after its program runs. They go to standard error, or to the
//! file of `--log`, as text or JSON. The processes of the run leave their lines in the table that they share with
//! memfold. Each message is printed once, however many processes leave it.
use crate::failure::CommandFailure;
use crate::printable::printable;
use crate::program::plain;
use clap::ValueEnum;
use memfold_run::mailbox::MailLine;
use memfold_run::table::RunTable;
use memfold_run::users::UserTables;
use serde_json::json;
use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::SystemTime;

/// Different lines that are remembered, at most, so that a program that never ends can't fill the
/// memory. Further lines are not printed, and one warning reports that.
const REMEMBERED: usize = 10_000;

/// How urgent a line is. Less urgent ones than that of `--log-level` are not printed.
#[derive(Copy, Clone, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum LogLevel {
    /// Why a process ends.
    Error,
    /// Something doesn't work as it was asked for.
    Warning,
    /// The settings of a run, and its summary.
    Info,
}

/// The form of a line.
#[derive(Copy, Clone, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// The text, with the prefix `memfold: `.
    Text,
    /// An object of JSON: time (RFC 3339), level, run, message, and the process if it has ended.
    Json,
}

/// The destination of lines, and the lines printed so far.
pub struct Log {
    level: LogLevel,
    format: LogFormat,
    inner: Mutex<LogState>,
}

struct LogState {
    out: Box<dyn Write + Send>,
    /// The file that `out` writes to, until a write fails.
    file: Option<PathBuf>,
    said: HashSet<String>,
    /// Processes that have left the reason why memfold ended them.
    ended: HashSet<u32>,
}

/// A line to be printed.
struct LogLine {
    level: LogLevel,
    /// The process that ends, if it is not the program itself.
    process: Option<u32>,
    text: String,
}

impl Log {
    /// Opens standard error, or a file for appending.
    ///
    /// # Errors
    /// 125: the file can't be written.
    pub fn open(
        file: Option<&Path>,
        level: LogLevel,
        format: LogFormat,
    ) -> Result<Log, CommandFailure> {
        let out: Box<dyn Write + Send> = match file {
            None => Box::new(io::stderr()),
            Some(path) => {
                let fail = |e: io::Error| {
                    CommandFailure::own(format!("--log: {}: {}", path.display(), plain(&e)))
                };
                Box::new(File::options().append(true).create(true).open(path).map_err(fail)?)
            }
        };
        let file = file.map(Path::to_path_buf);
        let state = LogState { out, file, said: HashSet::new(), ended: HashSet::new() };
        Ok(Log { level, format, inner: Mutex::new(state) })
    }

    /// Prints one or more lines, each with the prefix `memfold: `.
    pub fn say(&self, text: &str) {
        let mut inner = self.inner.lock().expect("nobody panics with the lock");
        text.lines().for_each(|line| self.put(&mut inner, &LogLine::of(line)));
    }

    /// Prints lines as [`Log::say`] does, with this level.
    pub fn say_at(&self, level: LogLevel, text: &str) {
        let mut inner = self.inner.lock().expect("nobody panics with the lock");
        let lines = text.lines().map(|line| LogLine { level, ..LogLine::of(line) });
        lines.for_each(|line| self.put(&mut inner, &line));
    }

    /// Prints the lines that processes have left. `command` is the process ID of the program
    /// itself.
    pub fn say_left(&self, tables: &UserTables, command: u32) {
        let mut inner = self.inner.lock().expect("nobody panics with the lock");
        let tables = tables.tables();
        for letter in tables.iter().flat_map(|table| table.mailbox().take()) {
            if letter.last {
                inner.ended.insert(letter.process);
            }
            if let Some(line) = line(&mut inner.said, &letter, command) {
                self.put(&mut inner, &line);
            }
        }
        let lost_lines = tables.iter().map(|table| table.mailbox().take_lost()).max().unwrap_or(0);
        if let Some(line) = lost(&mut inner.said, lost_lines) {
            self.put(&mut inner, &line);
        }
    }

    fn put(&self, inner: &mut LogState, line: &LogLine) {
        if line.level > self.level {
            return;
        }
        let text = self.formatted(line, inner.file.is_some());
        let Err(e) = inner.out.write_all(text.as_bytes()) else { return };
        // A closed stderr is no error.
        let Some(file) = inner.file.take() else { return };
        let why = LogLine::of(&format!(
            "{WARNING}--log: Writing to {} failed: {}. Further messages go to stderr",
            file.display(),
            plain(&e)
        ));
        inner.out = Box::new(io::stderr());
        let _ = inner
            .out
            .write_all((self.formatted(&why, false) + &self.formatted(line, false)).as_bytes());
    }

    /// Returns a line for a file, which several runs may share, or for stderr.
    fn formatted(&self, line: &LogLine, in_file: bool) -> String {
        match self.format {
            LogFormat::Text => line.text(in_file.then(std::process::id)),
            LogFormat::Json => line.json(),
        }
    }

    /// Returns whether memfold has ended the process `command` itself, and how many other processes
    /// it has ended.
    pub fn ended(&self, command: u32) -> (bool, usize) {
        let inner = self.inner.lock().expect("nobody panics with the lock");
        let is_ours = inner.ended.contains(&command);
        (is_ours, inner.ended.len() - usize::from(is_ours))
    }

    /// Prints the lines of one table as its processes leave them. Never returns.
    pub fn follow(&self, tables: &UserTables, table: &RunTable, command: u32) {
        loop {
            let rung = table.mailbox().rung();
            self.say_left(tables, command);
            table.mailbox().wait(rung);
        }
    }
}

/// The start of a warning.
const WARNING: &str = "warning: ";

impl LogLine {
    /// Returns the line of a text, which may have the prefix.
    fn of(text: &str) -> LogLine {
        let text = text.strip_prefix("memfold: ").unwrap_or(text).to_string();
        let level = if text.starts_with(WARNING) { LogLevel::Warning } else { LogLevel::Info };
        LogLine { level, process: None, text }
    }

    /// Returns the line with its control characters escaped, because a process may leave any bytes, and
    /// a terminal would obey them. `run` is the process ID to name, as syslog does.
    fn text(&self, run: Option<u32>) -> String {
        let text = printable(&self.text);
        let whose = run.map_or(String::new(), |run| format!("[{run}]"));
        match self.process {
            Some(process) => format!("memfold{whose}: process {process}: {text}\n"),
            None => format!("memfold{whose}: {text}\n"),
        }
    }

    fn json(&self) -> String {
        let level = self.level.to_possible_value().expect("each has a name");
        let mut about = json!({
            "time": humantime::format_rfc3339_millis(SystemTime::now()).to_string(),
            "level": level.get_name(),
            "run": std::process::id(),
            "message": self.text.strip_prefix(WARNING).unwrap_or(&self.text),
        });
        if let Some(process) = self.process {
            about["process"] = process.into();
        }
        format!("{about}\n")
    }
}

/// Returns a warning, once, that lines were not printed.
fn lost(said: &mut HashSet<String>, count: u32) -> Option<LogLine> {
    let why = if count > 0 {
        "Some warnings were lost, because processes reported them faster than memfold printed them"
    } else if said.len() >= REMEMBERED {
        "Further warnings are not printed, because 10000 different ones have been printed already"
    } else {
        return None;
    };
    said.insert(why.to_string()).then(|| LogLine::of(&format!("{WARNING}{why}")))
}

/// Returns a line for output, or `None` if it has been printed already. The reason why a process
/// ends is printed for each process. Lines that differ only in numbers count as one.
fn line(said: &mut HashSet<String>, letter: &MailLine, command: u32) -> Option<LogLine> {
    let thing = || letter.text.chars().filter(|c| !c.is_ascii_digit()).collect();
    if !letter.last && (said.len() >= REMEMBERED || !said.insert(thing())) {
        return None;
    }
    let line = LogLine::of(&letter.text);
    Some(match letter.last {
        true => {
            let process = (letter.process != command).then_some(letter.process);
            LogLine { level: LogLevel::Error, process, ..line }
        }
        false => line,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_are_not_said_are_told_of_once() {
        let mut messages = HashSet::new();
        let lost_text = |messages: &mut HashSet<String>, count| {
            lost(messages, count).map(|line| line.text(None))
        };
        assert_eq!(lost_text(&mut messages, 0), None);
        assert!(lost_text(&mut messages, 3).is_some_and(|line| line.contains("were lost")));
        assert_eq!(lost_text(&mut messages, 3), None);
        messages.extend((messages.len()..REMEMBERED).map(|n| n.to_string()));
        let letter = MailLine { process: 1, last: false, text: "another one".to_string() };
        assert!(line(&mut messages, &letter, 7).is_none());
        assert!(lost_text(&mut messages, 0).is_some_and(|line| line.contains("are not printed")));
        assert_eq!(lost_text(&mut messages, 0), None);
    }

    #[test]
    fn control_characters_are_escaped() {
        let letter =
            MailLine { process: 1, last: true, text: "a\u{1b}[2J\r\nmemfold: b é".to_string() };
        let expected = "memfold: process 1: a\\u{1b}[2J\\r\\nmemfold: b é\n";
        let line = line(&mut HashSet::new(), &letter, 7).unwrap();
        assert_eq!(line.text(None), expected);
        let json: serde_json::Value = serde_json::from_str(&line.json()).unwrap();
        assert_eq!((&json["level"], &json["process"]), (&"error".into(), &1.into()));
        assert_eq!(json["message"], "a\u{1b}[2J\r\nmemfold: b é");
        assert!(json["time"].as_str().unwrap().ends_with('Z'), "{json}");
    }

    #[test]
    fn failed_write_moves_all_further_lines_to_stderr() {
        let file = Path::new("/dev/full");
        let log = Log::open(Some(file), LogLevel::Info, LogFormat::Text).unwrap();
        assert_eq!(log.inner.lock().unwrap().file.as_deref(), Some(file));
        log.say("memfold: one");
        assert_eq!(log.inner.lock().unwrap().file, None);
        log.say("memfold: two");
    }

    #[test]
    fn level_is_that_of_the_text() {
        let level = |text: &str| LogLine::of(text).level;
        assert_eq!(level("memfold: warning: The limit"), LogLevel::Warning);
        assert_eq!(level("memfold: peak 3 MiB"), LogLevel::Info);
        assert!(LogLevel::Error < LogLevel::Warning && LogLevel::Warning < LogLevel::Info);
        let json = LogLine::of("memfold: warning: The limit \"x\"").json();
        assert!(json.contains(r#""message":"The limit \"x\"""#) && json.ends_with("}\n"), "{json}");
    }

    #[test]
    fn warning_prints_once_and_each_process_end_prints() {
        let mut messages = HashSet::new();
        let mut of = |process, last, text: &str| {
            let letter = MailLine { process, last, text: text.to_string() };
            line(&mut messages, &letter, 7).map(|line| line.text(None))
        };
        assert_eq!(
            of(8, false, "warning: process 8 is so").as_deref(),
            Some("memfold: warning: process 8 is so\n")
        );
        assert_eq!(of(9, false, "warning: process 9 is so"), None);
        assert!(of(9, false, "warning: process 9 is different").is_some());
        assert_eq!(of(9, true, "stopped").as_deref(), Some("memfold: process 9: stopped\n"));
        assert_eq!(of(7, true, "stopped").as_deref(), Some("memfold: stopped\n"));
    }
}
