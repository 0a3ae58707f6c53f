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
    /// php: an array of arrays, sorted by a function
    Php,
    /// perl: a hash of numbers, its keys sorted by value
    Perl,
    /// luajit: random look-ups in a table of tables
    Luajit,
    /// python3 far under its limit, against no limit
    Idle,
}

/// A measured figure, and its target against the kernel's zram.
pub struct CaseFigure {
    /// Name, with the unit.
    pub name: &'static str,
    /// Whether more is better.
    pub more: bool,
    /// The least factor of improvement over the kernel.
    pub target: f64,
}

/// What is measured of a program, and how.
#[derive(Copy, Clone)]
pub struct Case<'a> {
    /// Its name in reports.
    pub name: &'a str,
    /// The measured figures.
    pub figures: &'static [CaseFigure],
    /// The flags of `memfold run` beside the limit.
    pub flags: &'static [&'static str],
    /// Its uncompressed memory, bytes. `None`: a part of what it takes.
    pub resident_bytes: Option<u64>,
}

impl Case<'_> {
    /// Returns the case of a command that does its work and ends.
    pub fn of_command(name: &str, resident_bytes: Option<u64>) -> Case<'_> {
        Case { name, figures: &POINTERS, flags: &[], resident_bytes }
    }
}

const fn figure(name: &'static str, more: bool, target: f64) -> CaseFigure {
    CaseFigure { name, more, target }
}

const TIME: [CaseFigure; 1] = [figure("time, s", false, 1.5)];
/// Programs that follow pointers.
const POINTERS: [CaseFigure; 1] = [figure("time, s", false, 1.0)];
const MARIADB: [CaseFigure; 2] =
    [figure("transactions/s", true, 1.0), figure("p99, ms", false, 1.0)];
const MEMCACHED: [CaseFigure; 2] =
    [figure("new keys, sets/s", true, 1.0), figure("random keys, sets/s", true, 1.0)];
const REDIS: [CaseFigure; 3] = [
    figure("SET, ops/s", true, 1.0),
    figure("GET, ops/s", true, 1.0),
    figure("BGSAVE, s", false, 1.0),
];

impl App {
    /// All programs.
    pub const ALL: [App; 11] = [
        App::Mariadb,
        App::Memcached,
        App::Redis,
        App::Sqlite,
        App::Pandas,
        App::Sort,
        App::Python,
        App::Php,
        App::Perl,
        App::Luajit,
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
            App::Php => "php",
            App::Perl => "perl",
            App::Luajit => "luajit",
            App::Idle => "idle",
        }
    }

    /// What is measured of the program.
    pub fn case(self) -> Case<'static> {
        let (name, figures) = (self.name(), self.figures());
        Case { name, figures, flags: self.flags(), resident_bytes: None }
    }

    /// The figures measured for the program.
    pub fn figures(self) -> &'static [CaseFigure] {
        match self {
            App::Mariadb => &MARIADB,
            App::Memcached => &MEMCACHED,
            App::Redis => &REDIS,
            App::Sqlite | App::Pandas | App::Sort | App::Python | App::Idle => &TIME,
            App::Php | App::Perl | App::Luajit => &POINTERS,
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
        let job = |count: usize| {
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
            App::Python => job(pick(1_500_000, 300_000)),
            App::Php => {
                let rows = pick(200_000, 50_000).to_string();
                Ok(Work::Job(vec![find("php", "php-cli")?, "-r".into(), PHP.into(), rows]))
            }
            App::Perl => {
                let keys = pick(800_000, 200_000).to_string();
                Ok(Work::Job(vec![find("perl", "perl")?, "-e".into(), PERL.into(), keys]))
            }
            App::Luajit => {
                let tables = pick(1_500_000, 300_000).to_string();
                let script = directory.join("tables.lua");
                fs::write(&script, LUA).context("writing the script for luajit")?;
                let script = script.to_str().context("a path that is not text")?.to_string();
                Ok(Work::Job(vec![find("luajit", "luajit")?, script, tables]))
            }
            App::Idle => job(pick(3_000_000, 1_000_000)),
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

const PHP: &str = "
ini_set('memory_limit', '-1');
mt_srand(1);
$rows = [];
for ($i = 0; $i < (int) $argv[1]; $i++)
    $rows[] = ['id' => mt_rand(), 'name' => 'row ' . $i, 'tags' => [$i % 7, $i % 11]];
usort($rows, fn($a, $b) => $a['id'] <=> $b['id']);
$sum = 0;
foreach ($rows as $row) $sum += $row['tags'][0] * strlen($row['name']);
echo $sum, ' ', $rows[0]['id'], chr(10);
";

const PERL: &str = "
srand 1;
my (%h, $sum);
$h{int(rand(1e9))} = $_ for 1..$ARGV[0];
my @keys = sort { $h{$a} <=> $h{$b} } keys %h;
$sum += $h{$keys[$_]} * ($_ % 7) for 0..$#keys;
print $sum, chr(10);
";

const LUA: &str = "
local count, state = tonumber(arg[1]), 1
local function random() state = state * 48271 % 2147483647 return state end
local all = {}
for i = 1, count do all[i] = {i, random()} end
local sum = 0
for i = 1, count / 4 do
    local one = all[random() % count + 1]
    sum = sum + one[2] % 7
    if i % 4 == 0 then one[1] = i end
end
print(sum)
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
