//! Well-known programs with more data than their memory limit.

use crate::apps::run::Work;
use crate::apps::server::{mariadb, memcached, redis};
use crate::common::refusal::Refusal;
use crate::host::program::find;
use anyhow::Context;
use memfold_testkit::random::Sequence as Random;
use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::Command;

/// A program and its work.
#[derive(clap::ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum App {
    /// MariaDB: sysbench's read-only transactions
    Mariadb,
    /// memcached: values of 1000 bytes, only written
    Memcached,
    /// redis: SET and GET by redis-benchmark, and a snapshot
    Redis,
    /// sqlite3: scans of a table in memory
    Sqlite,
    /// pandas: groups of a table, summed
    Pandas,
    /// sort, with a buffer that holds the whole file
    Sort,
    /// python3: a dictionary of lists, grouped and summed
    Python,
    /// python3 far under its limit, against no limit
    Idle,
}

/// A measured figure, and its target against the kernel's zram.
pub struct Figure {
    /// Name, with the unit.
    pub name: &'static str,
    /// Whether more is better.
    pub more: bool,
    /// The least factor of improvement over the kernel.
    pub target: f64,
}

const fn figure(name: &'static str, more: bool, target: f64) -> Figure {
    Figure { name, more, target }
}

const TIME: [Figure; 1] = [figure("time, s", false, 1.5)];
const MARIADB: [Figure; 2] = [figure("transactions/s", true, 1.0), figure("p99, ms", false, 1.0)];
const MEMCACHED: [Figure; 2] =
    [figure("new keys, sets/s", true, 1.0), figure("random keys, sets/s", true, 1.0)];
const REDIS: [Figure; 3] = [
    figure("SET, ops/s", true, 1.0),
    figure("GET, ops/s", true, 1.0),
    figure("BGSAVE, s", false, 1.0),
];

impl App {
    /// All programs.
    pub const ALL: [App; 8] = [
        App::Mariadb,
        App::Memcached,
        App::Redis,
        App::Sqlite,
        App::Pandas,
        App::Sort,
        App::Python,
        App::Idle,
    ];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            App::Mariadb => "mariadb",
            App::Memcached => "memcached",
            App::Redis => "redis",
            App::Sqlite => "sqlite",
            App::Pandas => "pandas",
            App::Sort => "sort",
            App::Python => "python",
            App::Idle => "idle",
        }
    }

    /// The figures measured for the program.
    pub fn figures(self) -> &'static [Figure] {
        match self {
            App::Mariadb => &MARIADB,
            App::Memcached => &MEMCACHED,
            App::Redis => &REDIS,
            App::Sqlite | App::Pandas | App::Sort | App::Python | App::Idle => &TIME,
        }
    }

    /// The flags of `memfold run` beside the limit.
    pub fn flags(self) -> &'static [&'static str] {
        match self {
            // MariaDB excludes its buffer pool from core dumps, so by default it would not be
            // folded.
            App::Mariadb => &["--dont-dump", "fold"],
            _ => &[],
        }
    }

    /// Returns the program's work. Creates the files that it needs in `directory`. `quick` makes
    /// less data. Fails if the program is not installed, and the error names what is missing.
    pub fn work(self, directory: &Path, quick: bool) -> anyhow::Result<Work> {
        let pick = |normal: usize, short: usize| if quick { short } else { normal };
        let grouped = |count: usize| {
            Ok(Work::Job(vec![python("sys")?, "-c".into(), PYTHON.into(), count.to_string()]))
        };
        match self {
            App::Mariadb => mariadb(directory, pick(1_000_000, 300_000) as u64, pick(10, 3) as u32),
            App::Memcached => memcached(directory, pick(400_000, 120_000) as u64),
            App::Redis => redis(directory, pick(300_000, 80_000) as u64),
            App::Sqlite => {
                let script = script(pick(4_000_000, 800_000));
                Ok(Work::Job(vec![find("sqlite3", "sqlite3")?, ":memory:".into(), script]))
            }
            App::Pandas => {
                let rows = pick(6_000_000, 2_000_000).to_string();
                Ok(Work::Job(vec![python("pandas")?, "-c".into(), PANDAS.into(), rows]))
            }
            App::Sort => {
                let file = directory.join("lines");
                fs::write(&file, lines(pick(4_000_000, 500_000)))
                    .context("writing what is to be sorted")?;
                let file = file.to_str().context("a path that is not text")?.to_string();
                Ok(Work::Job(
                    [
                        find("sort", "coreutils")?,
                        "-S".into(),
                        "2G".into(),
                        "--parallel=1".into(),
                        file,
                    ]
                    .into(),
                ))
            }
            App::Python => grouped(pick(1_500_000, 300_000)),
            App::Idle => grouped(pick(3_000_000, 1_000_000)),
        }
    }
}

fn lines(count: usize) -> String {
    let mut random = Random::new(1);
    let mut text = String::with_capacity(count * 48);
    for number in 0..count {
        let _ = writeln!(text, "{:016x} line {number} of {count}", random.word());
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

const PANDAS: &str = "
import sys
import numpy, pandas
n = int(sys.argv[1])
random = numpy.random.default_rng(1)
table = pandas.DataFrame({
    'customer': random.integers(0, 20000, n),
    'region': random.integers(0, 50, n),
    'day': numpy.arange(n) * 365 // n,
    'count': random.integers(1, 10, n),
    'price': random.integers(100, 100000, n) / 100,
})
for key in 'region', 'day', 'customer', 'region':
    sums = table.groupby(key)[['count', 'price']].sum()
    means = table.groupby(key)['price'].mean()
    print(key, len(sums), sums['count'].sum(), round(sums['price'].max(), 2), round(means.min(), 4))
";

/// Returns the interpreter itself that has a module. `python3` may be a script that starts it.
fn python(module: &str) -> anyhow::Result<String> {
    let script = format!("import sys, {module}; print(sys.executable)");
    for name in [find("python3", "python3")?.as_str(), "/usr/bin/python3"] {
        let output = Command::new(name).args(["-c", &script]).output();
        if let Ok(output) = output.context("starting python3")
            && output.status.success()
        {
            return Ok(String::from_utf8(output.stdout)?.trim().to_string());
        }
    }
    Err(Refusal::Machine(format!("python3 has no {module}: apt-get install python3-{module}"))
        .into())
}
