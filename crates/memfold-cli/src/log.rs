//! The messages of a run while and after its program runs. They go to standard error, or to the
//! file of `--log`. The processes of the run leave their lines in the table that they share with
//! memfold. Each message is printed once, however many processes leave it.
use crate::failure::CommandFailure;
use crate::program::plain;
use memfold_run::mailbox::MailLine;
use memfold_run::table::RunTable;
use memfold_run::users::UserTables;
use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Mutex;

/// Different lines that are remembered, at most, so that a program that never ends can't fill the
/// memory. Further lines are not printed, and one warning reports that.
const REMEMBERED: usize = 10_000;

/// The destination of lines, and the lines printed so far.
pub struct Log {
    inner: Mutex<LogState>,
}

struct LogState {
    out: Box<dyn Write + Send>,
    said: HashSet<String>,
    /// Processes that have left the reason why memfold ended them.
    ended: HashSet<u32>,
}

impl Log {
    /// Opens standard error, or a file for appending.
    ///
    /// # Errors
    /// 125: the file can't be written.
    pub fn open(file: Option<&Path>) -> Result<Log, CommandFailure> {
        let out: Box<dyn Write + Send> = match file {
            None => Box::new(io::stderr()),
            Some(path) => {
                let fail = |e: io::Error| {
                    CommandFailure::own(format!("--log: {}: {}", path.display(), plain(&e)))
                };
                Box::new(File::options().append(true).create(true).open(path).map_err(fail)?)
            }
        };
        Ok(Log { inner: Mutex::new(LogState { out, said: HashSet::new(), ended: HashSet::new() }) })
    }

    /// Prints one or more lines, each with the prefix `memfold: `.
    pub fn say(&self, text: &str) {
        let mut inner = self.inner.lock().expect("nobody panics with the lock");
        // A closed destination is no error.
        let _ = inner.out.write_all(text.as_bytes());
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
                let _ = inner.out.write_all(line.as_bytes());
            }
        }
        let lost_lines = tables.iter().map(|table| table.mailbox().take_lost()).max().unwrap_or(0);
        if let Some(line) = lost(&mut inner.said, lost_lines) {
            let _ = inner.out.write_all(line.as_bytes());
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

/// Returns a warning, once, that lines were not printed.
fn lost(said: &mut HashSet<String>, count: u32) -> Option<String> {
    let why = if count > 0 {
        "Some warnings were lost, because processes reported them faster than memfold printed them"
    } else if said.len() >= REMEMBERED {
        "Further warnings are not printed, because 10000 different ones have been printed already"
    } else {
        return None;
    };
    said.insert(why.to_string()).then(|| format!("memfold: warning: {why}\n"))
}

/// Returns a line for output, or `None` if it has been printed already. The reason why a process
/// ends is printed for each process. Lines that differ only in numbers count as one.
fn line(said: &mut HashSet<String>, letter: &MailLine, command: u32) -> Option<String> {
    let thing = || letter.text.chars().filter(|c| !c.is_ascii_digit()).collect();
    if !letter.last && (said.len() >= REMEMBERED || !said.insert(thing())) {
        return None;
    }
    let text = printable(&letter.text);
    Some(match letter.last && letter.process != command {
        true => format!("memfold: process {}: {text}\n", letter.process),
        false => format!("memfold: {text}\n"),
    })
}

/// Escapes the control characters of a text, because a process may leave any bytes, and a terminal
/// would obey them.
fn printable(text: &str) -> String {
    let escaped = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.into() };
    text.chars().map(escaped).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_are_not_said_are_told_of_once() {
        let mut said = HashSet::new();
        assert_eq!(lost(&mut said, 0), None);
        assert!(lost(&mut said, 3).is_some_and(|line| line.contains("were lost")));
        assert_eq!(lost(&mut said, 3), None);
        said.extend((said.len()..REMEMBERED).map(|n| n.to_string()));
        let letter = MailLine { process: 1, last: false, text: "another one".to_string() };
        assert_eq!(line(&mut said, &letter, 7), None);
        assert!(lost(&mut said, 0).is_some_and(|line| line.contains("are not printed")));
        assert_eq!(lost(&mut said, 0), None);
    }

    #[test]
    fn what_a_terminal_would_obey_is_escaped() {
        let letter =
            MailLine { process: 1, last: true, text: "a\u{1b}[2J\r\nmemfold: b é".to_string() };
        let expected = "memfold: process 1: a\\u{1b}[2J\\r\\nmemfold: b é\n";
        assert_eq!(line(&mut HashSet::new(), &letter, 7).as_deref(), Some(expected));
    }

    #[test]
    fn warning_prints_once_and_each_process_end_prints() {
        let mut said = HashSet::new();
        let mut of = |process, last, text: &str| {
            line(&mut said, &MailLine { process, last, text: text.to_string() }, 7)
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
