//! Well-known programs with more data than the memory that they are given.

use crate::random::Random;
use crate::refusal::Refusal;
use anyhow::Context;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A program with its work.
#[derive(clap::ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum App {
    /// sort, with a buffer that holds the whole file
    Sort,
    /// sqlite3: scans of a table in memory
    Sqlite,
    /// python3: a dictionary of lists, grouped and summed
    Python,
}

impl App {
    /// All of them.
    pub const ALL: [App; 3] = [App::Sort, App::Sqlite, App::Python];

    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            App::Sort => "sort",
            App::Sqlite => "sqlite",
            App::Python => "python",
        }
    }

    /// How many times as fast as on the kernel's zram it must be.
    pub fn target(self) -> f64 {
        1.5
    }

    /// The command: it prints the same each time. Files that it reads are made in `directory`. `quick` has less to do.
    pub fn command(self, directory: &Path, quick: bool) -> anyhow::Result<Vec<String>> {
        let pick = |normal: usize, short: usize| if quick { short } else { normal };
        match self {
            App::Sort => {
                let file = directory.join("lines");
                fs::write(&file, lines(pick(4_000_000, 1_000_000))).context("writing what is to be sorted")?;
                let file = file.to_str().context("a path that is not text")?.to_string();
                Ok([find("sort")?, "-S".into(), "2G".into(), "--parallel=1".into(), file].into())
            }
            App::Sqlite => Ok(vec![find("sqlite3")?, ":memory:".into(), script(pick(4_000_000, 800_000))]),
            App::Python => Ok(vec![python()?, "-c".into(), PYTHON.into(), pick(1_500_000, 300_000).to_string()]),
        }
    }
}

fn lines(count: usize) -> String {
    let mut random = Random::new(1);
    let mut text = String::with_capacity(count * 48);
    for number in 0..count {
        let _ = writeln!(text, "{:016x} line {number} of {count}", random.next());
    }
    text
}

fn script(rows: usize) -> String {
    format!(
        "create table t(a integer primary key, b text, c integer);
         with recursive n(i) as (select 1 union all select i+1 from n where i<{rows})
         insert into t select i, 'customer '||(i*7919%{rows})||' of the northern region', i%1000 from n;
         select count(*), max(b) from t where b like '%77%';
         select sum(c), min(b) from t where c > 500;
         select count(*) from t where b like '%12% of%' and c < 900;
         select sum(length(b)) from t;"
    )
}

const PYTHON: &str = "
import sys
n = int(sys.argv[1])
groups = {}
for i in range(n):
    groups.setdefault(i * 7919 % 50021, []).append((i, 'row %d' % (i % 1000)))
for turn in range(3):
    total = 0
    for key, rows in groups.items():
        total += sum(row[0] for row in rows) % (key + turn + 1) + len(rows[0][1])
    print(total)
";

fn find(name: &str) -> Result<String, Refusal> {
    let missing = || Refusal::Machine(format!("{name} is not installed"));
    let directories = std::env::var_os("PATH").ok_or_else(missing)?;
    let found = std::env::split_paths(&directories).map(|dir| dir.join(name)).find(|path| path.is_file());
    found.and_then(|path: PathBuf| path.to_str().map(String::from)).ok_or_else(missing)
}

/// The interpreter itself: `python3` may be a script that starts it.
fn python() -> anyhow::Result<String> {
    let output = Command::new(find("python3")?).args(["-c", "import sys; print(sys.executable)"]).output();
    Ok(String::from_utf8(output.context("starting python3")?.stdout)?.trim().to_string())
}
