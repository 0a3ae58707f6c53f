//! From answers to rows: what each run, group, server, process and device holds, and its rates
//! between two answers.
use super::text::{short_count, short_size};
use super::watch::{Answer, Heard, WatchSource};
use crate::report::json::read_times;
use crate::runs::counted;
use memfold_stats::TimeCounts;
use serde_json::Value;
use std::time::{Duration, Instant};

/// The subject of a row. The order is that of the list.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RowKey {
    Run(u32),
    Group(String),
    Server(u32),
    Process(u32),
    Export(String),
}

/// The content of the screen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TopPage {
    /// All runs, groups and servers.
    All,
    /// The runs of a group.
    Group(String),
    /// The processes of a run.
    Run(u32),
    /// The devices of a server.
    Server(u32),
    /// One process of a run.
    Process { run: u32, pid: u32 },
}

/// One row. Figures that a row can't have are `None`.
#[derive(Clone, Debug)]
pub struct Row {
    pub key: RowKey,
    /// Command without directories, name of the group, or names of the devices.
    pub name: String,
    /// The whole command of a run.
    pub command: Option<String>,
    pub pid: Option<u32>,
    pub group: Option<String>,
    /// For how long it has not answered, if that is long.
    pub silent: Option<Duration>,
    /// Whether it is stopped by a signal, and so has not answered.
    pub is_stopped: bool,
    /// Whether it has answered at all. If not, its limit and its sizes are not known.
    pub has_figures: bool,
    pub limit_bytes: Option<u64>,
    /// Memory that counts against the limit.
    pub used_bytes: u64,
    /// The uncompressed part of it.
    pub resident_bytes: u64,
    /// The compressed part of it, with the tables that find it.
    pub compressed_bytes: u64,
    /// Space used in the swap file and in the remote store.
    pub spilled_bytes: u64,
    /// Data that is only stored, before compression.
    pub folded_bytes: u64,
    /// Stored data before and after compression, over the time of the run.
    pub stored: [u64; 2],
    pub rates: Rates,
    /// Loads a second at each of the last looks, if they were noted.
    pub loads_by_look: Vec<f64>,
    /// Why it is above its limit, if it is.
    pub excess_cause: Option<String>,
    pub codec: Option<String>,
    /// Live processes, runs or devices in it.
    pub members: Option<u64>,
}

/// Events in a second, between two answers.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct Rates {
    pub faults: Option<f64>,
    /// Faults that loaded data; reads of a device.
    pub loads: Option<f64>,
    /// First touches.
    pub zeros: Option<f64>,
    /// First writes to loaded pages; writes to a device.
    pub writes: Option<f64>,
    /// CPU seconds of threads in faults.
    pub fault_seconds: Option<f64>,
    /// The time that 99 of 100 loads did not exceed, nanoseconds.
    pub load_p99_ns: Option<u64>,
}

impl Rates {
    fn sum(all: impl Iterator<Item = Rates>) -> Rates {
        let add = |a: Option<f64>, b: Option<f64>| a.map_or(b, |a| Some(a + b.unwrap_or(0.0)));
        all.fold(Rates::default(), |a, b| Rates {
            faults: add(a.faults, b.faults),
            loads: add(a.loads, b.loads),
            zeros: add(a.zeros, b.zeros),
            writes: add(a.writes, b.writes),
            fault_seconds: add(a.fault_seconds, b.fault_seconds),
            load_p99_ns: a.load_p99_ns.max(b.load_p99_ns),
        })
    }
}

impl Row {
    /// Returns a row without figures.
    pub fn new(key: RowKey, name: String) -> Row {
        Row {
            key,
            name,
            command: None,
            pid: None,
            group: None,
            silent: None,
            is_stopped: false,
            has_figures: true,
            limit_bytes: None,
            used_bytes: 0,
            resident_bytes: 0,
            compressed_bytes: 0,
            spilled_bytes: 0,
            folded_bytes: 0,
            stored: [0, 0],
            rates: Rates::default(),
            loads_by_look: Vec::new(),
            excess_cause: None,
            codec: None,
            members: None,
        }
    }

    /// Returns by how many bytes it is above its limit. A limit is kept within a hundredth.
    pub fn excess_bytes(&self) -> Option<u64> {
        let limit = self.limit_bytes?;
        (self.used_bytes > limit + limit / 100).then(|| self.used_bytes - limit)
    }

    /// Returns bytes before compression for each byte after it; `None` if nothing was stored.
    pub fn ratio(&self) -> Option<f64> {
        (self.stored[1] > 0).then(|| self.stored[0] as f64 / self.stored[1] as f64)
    }

    /// Returns how much of a second threads spent in faults, percent of a CPU.
    pub fn fault_percent(&self) -> Option<f64> {
        self.rates.fault_seconds.map(|seconds| seconds * 100.0)
    }
}

/// Returns the rows of a page, in the order of their keys.
pub fn rows(heard: &[Heard], page: &TopPage, now: Instant) -> Vec<Row> {
    let mut rows = match page {
        TopPage::All => all(heard, now),
        TopPage::Group(name) => {
            let is_in_it =
                |row: &Row| matches!(row.key, RowKey::Run(_)) && row.group.as_ref() == Some(name);
            all(heard, now).into_iter().filter(is_in_it).collect()
        }
        TopPage::Run(run) | TopPage::Process { run, .. } => processes(heard, *run),
        TopPage::Server(pid) => exports(heard, *pid),
    };
    rows.sort_by(|a, b| a.key.cmp(&b.key));
    rows
}

fn all(heard: &[Heard], now: Instant) -> Vec<Row> {
    let mut rows = Vec::new();
    for one in heard {
        let row = match one.source {
            WatchSource::Groups => continue,
            WatchSource::Run(pid) => of_run(pid, one),
            WatchSource::Server(pid) => of_server(pid, one),
        };
        let is_stopped = one.process.as_ref().is_some_and(|process| process.is_stopped);
        rows.push(Row { silent: one.silent(now), is_stopped, ..row });
    }
    let groups = found(heard, WatchSource::Groups).and_then(|one| one.now.as_ref());
    for group in groups.iter().flat_map(|answer| list(&answer.value)) {
        rows.push(of_group(group, &rows));
    }
    rows
}

fn found(heard: &[Heard], source: WatchSource) -> Option<&Heard> {
    heard.iter().find(|one| one.source == source)
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn number(value: &Value, name: &str) -> u64 {
    value[name].as_u64().unwrap_or(0)
}

fn text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_string)
}

/// Two values of one thing, and the time between them.
#[derive(Copy, Clone)]
pub struct Pair<'a> {
    before: Option<&'a Value>,
    now: &'a Value,
    seconds: f64,
}

impl<'a> Pair<'a> {
    /// Returns the last two answers. Answers of two runs with one process ID are no pair.
    fn of(heard: &'a Heard) -> Option<Pair<'a>> {
        let now = heard.now.as_ref()?;
        let is_older = |before: &&Answer| {
            let age = |answer: &Answer| answer.value["seconds"].as_f64().unwrap_or(0.0);
            age(before) <= age(now)
        };
        let before = heard.before.as_ref().filter(is_older);
        let seconds = before.map_or(0.0, |before| (now.at - before.at).as_secs_f64());
        Some(Pair { before: before.map(|before| &*before.value), now: &now.value, seconds })
    }

    /// Returns the pair of a part of each.
    fn part(self, now: &'a Value, before: impl Fn(&'a Value) -> Option<&'a Value>) -> Pair<'a> {
        Pair { before: self.before.and_then(before), now, ..self }
    }

    /// Returns by how much a counter grows in a second. A counter that is less than before began
    /// anew at zero.
    pub fn rate(&self, name: &str) -> Option<f64> {
        let (before, now) = (self.before?[name].as_u64()?, self.now[name].as_u64()?);
        let growth = now.checked_sub(before).unwrap_or(now);
        (self.seconds > 0.0).then(|| growth as f64 / self.seconds)
    }

    fn rates(&self) -> Rates {
        Rates {
            faults: self.rate("faults"),
            loads: self.rate("pgmajfault"),
            zeros: self.rate("faults_zero"),
            writes: self.rate("faults_write"),
            fault_seconds: self.rate("fault_ns").map(|ns| ns / 1e9),
            load_p99_ns: self.load_p99_ns(),
        }
    }

    fn load_p99_ns(&self) -> Option<u64> {
        let before = self.before?;
        let mut loads = TimeCounts::NONE;
        // One load from the pool in 16 is timed, and each other one.
        for (name, times) in
            [("fault_pool_time", 16), ("fault_file_time", 1), ("fault_remote_time", 1)]
        {
            let counts = read_times(&self.now[name]).since(&read_times(&before[name]));
            (0..times).for_each(|_| loads.add(&counts));
        }
        loads.percentile_ns(99)
    }
}

fn of_run(pid: u32, heard: &Heard) -> Row {
    let Some(pair) = Pair::of(heard) else {
        let words = heard.process.iter().flat_map(|process| &process.command);
        let row = named_run(pid, words.map(String::as_str).collect());
        return Row { has_figures: false, ..row };
    };
    let about = pair.now;
    let command = list(&about["command"]).iter().filter_map(Value::as_str).collect();
    let (mut row, sum) = (named_run(pid, command), &about["sum"]);
    row.name = text(&about["name"]).unwrap_or(row.name);
    for process in list(&about["processes"]) {
        add(&mut row, process);
    }
    let slotless = number(about, "unmanaged_processes_bytes");
    row.resident_bytes += slotless;
    row.used_bytes += slotless;
    let share = about["group"]["share_bytes"].as_u64();
    row.limit_bytes = about["limit_bytes"].as_u64().into_iter().chain(share).min();
    Row {
        group: text(&about["group"]["name"]),
        excess_cause: row.excess_bytes().map(|excess| excess_cause(about, excess)),
        stored: stored(sum),
        rates: pair.part(sum, |before| Some(&before["sum"])).rates(),
        codec: text(&about["codec"]),
        members: Some(
            list(&about["processes"]).len() as u64 + number(about, "unmanaged_processes"),
        ),
        ..row
    }
}

/// Returns why a run holds so many bytes more than its limit: the largest part of it that can't be
/// folded, if that is as large.
fn excess_cause(about: &Value, excess_bytes: u64) -> String {
    let sum =
        |name: &str| list(&about["processes"]).iter().map(|one| number(one, name)).sum::<u64>();
    let parts = [
        (sum("refused_dense_bytes"), "do not compress; --swap DIR moves them to a file"),
        (sum("refused_full_bytes"), "do not fit beside the compressed data; give a larger limit"),
        (sum("refused_pinned_bytes"), "are pinned by a device"),
        (sum("refused_shared_bytes"), "are shared since a fork"),
        (
            sum("unmanaged_bytes") + number(about, "unmanaged_processes_bytes"),
            "can't be folded; memfold explain says which",
        ),
    ];
    match parts.into_iter().max_by_key(|(bytes, _)| *bytes) {
        Some((bytes, why)) if bytes >= excess_bytes => format!("{} {why}", short_size(bytes)),
        _ => "it uses memory faster than memfold folds it".to_string(),
    }
}

/// Returns the row of a run, with its command if that is known.
fn named_run(pid: u32, command: Vec<&str>) -> Row {
    let short: Vec<&str> = command.iter().map(|word| without_directories(word)).collect();
    let name = if command.is_empty() { format!("run {pid}") } else { short.join(" ") };
    let command = (!command.is_empty()).then(|| command.join(" "));
    Row { pid: Some(pid), command, ..Row::new(RowKey::Run(pid), name) }
}

/// Returns the last part of an absolute path, and any other word as it is.
fn without_directories(word: &str) -> &str {
    let last = word.strip_prefix('/').and_then(|path| path.rsplit('/').next());
    last.filter(|last| !last.is_empty()).unwrap_or(word)
}

/// Adds what a process holds.
fn add(row: &mut Row, process: &Value) {
    let [resident, compressed_bytes] = counted(process);
    row.resident_bytes += resident;
    row.compressed_bytes += compressed_bytes;
    row.used_bytes += resident + compressed_bytes;
    row.spilled_bytes += number(process, "swap_bytes") + number(process, "remote_bytes");
    row.folded_bytes += number(process, "folded_bytes");
}

fn stored(counters: &Value) -> [u64; 2] {
    let payload = number(counters, "payload_bytes");
    let payload = payload.saturating_sub(number(counters, "recompress_gained_bytes"));
    [number(counters, "saved_bytes"), payload]
}

/// Returns the row of a group, which has the sums of its runs.
fn of_group(group: &Value, rows: &[Row]) -> Row {
    let name = text(&group["group"]).unwrap_or_default();
    let runs = || rows.iter().filter(|row| row.group.as_ref() == Some(&name));
    let sum = |of: fn(&Row) -> u64| runs().map(of).sum::<u64>();
    Row {
        limit_bytes: group["limit_bytes"].as_u64(),
        used_bytes: number(group, "used_bytes"),
        resident_bytes: sum(|row| row.resident_bytes),
        compressed_bytes: sum(|row| row.compressed_bytes),
        spilled_bytes: sum(|row| row.spilled_bytes),
        folded_bytes: sum(|row| row.folded_bytes),
        stored: [sum(|row| row.stored[0]), sum(|row| row.stored[1])],
        rates: Rates::sum(runs().map(|row| row.rates)),
        members: Some(number(group, "runs")),
        ..Row::new(RowKey::Group(name.clone()), name.clone())
    }
}

fn of_server(pid: u32, heard: &Heard) -> Row {
    let Some(pair) = Pair::of(heard) else {
        let row = Row::new(RowKey::Server(pid), format!("blk {pid}"));
        return Row { pid: Some(pid), has_figures: false, ..row };
    };
    let (about, mm) = (pair.now, &pair.now["mm_stat"]);
    let names = list(&about["exports"]).iter().map(|export| match text(&export["name"]) {
        Some(name) if !name.is_empty() => name,
        _ => short_size(number(export, "size_bytes")),
    });
    let names: Vec<String> = names.collect();
    let held_bytes = number(mm, "mem_used_total");
    Row {
        pid: Some(pid),
        limit_bytes: about["limit_bytes"].as_u64(),
        used_bytes: held_bytes,
        compressed_bytes: held_bytes,
        spilled_bytes: number(&about["writeback"], "used_bytes"),
        folded_bytes: number(mm, "orig_data_size"),
        stored: [number(mm, "orig_data_size"), number(mm, "compr_data_size")],
        rates: Rates::sum(exports_of(pair).map(|(_, counters)| device_rates(&counters))),
        codec: text(&about["codec"]),
        members: Some(list(&about["exports"]).len() as u64),
        ..Row::new(RowKey::Server(pid), format!("blk {}", names.join(",")))
    }
}

/// Returns the devices of a server, each with its counters.
fn exports_of<'a>(pair: Pair<'a>) -> impl Iterator<Item = (&'a Value, Pair<'a>)> {
    list(&pair.now["exports"]).iter().map(move |export| {
        let earlier = |before: &'a Value| {
            let all = list(&before["exports"]).iter();
            Some(&all.clone().find(|one| one["name"] == export["name"])?["counters"])
        };
        (export, pair.part(&export["counters"], earlier))
    })
}

fn device_rates(counters: &Pair<'_>) -> Rates {
    Rates { loads: counters.rate("reads"), writes: counters.rate("writes"), ..Rates::default() }
}

fn exports(heard: &[Heard], pid: u32) -> Vec<Row> {
    let Some(pair) = found(heard, WatchSource::Server(pid)).and_then(Pair::of) else {
        return Vec::new();
    };
    let one = |(export, counters): (&Value, Pair<'_>)| {
        let name = text(&export["name"]).unwrap_or_default();
        let name_shown =
            if name.is_empty() { "(without a name)".to_string() } else { name.clone() };
        Row {
            limit_bytes: export["size_bytes"].as_u64(),
            rates: device_rates(&counters),
            ..Row::new(RowKey::Export(name), name_shown)
        }
    };
    exports_of(pair).map(one).collect()
}

fn processes(heard: &[Heard], run: u32) -> Vec<Row> {
    let Some(pair) = found(heard, WatchSource::Run(run)).and_then(Pair::of) else {
        return Vec::new();
    };
    let codec = text(&pair.now["codec"]);
    let one = |process: Pair<'_>| {
        let pid = number(process.now, "pid") as u32;
        let name = text(&process.now["name"]).unwrap_or_default();
        let mut row = Row::new(RowKey::Process(pid), name);
        add(&mut row, process.now);
        Row {
            pid: Some(pid),
            stored: stored(process.now),
            rates: process.rates(),
            codec: codec.clone(),
            ..row
        }
    };
    processes_of(pair).map(one).collect()
}

fn processes_of<'a>(pair: Pair<'a>) -> impl Iterator<Item = Pair<'a>> {
    list(&pair.now["processes"]).iter().map(move |process| {
        let earlier = |before: &'a Value| {
            list(&before["processes"]).iter().find(|one| one["pid"] == process["pid"])
        };
        pair.part(process, earlier)
    })
}

/// How a counter of a process is shown.
enum Shown {
    Size,
    /// Its events in a second.
    Rate,
    /// Its events since the start.
    Count,
}

/// The counters on the page of a process, column by column.
const COUNTERS: [(&str, &str, Shown); 24] = [
    ("mapped", "resident_bytes", Shown::Size),
    ("frames", "frame_bytes", Shown::Size),
    ("unmanaged", "unmanaged_bytes", Shown::Size),
    ("pool", "pool_bytes", Shown::Size),
    ("index", "index_bytes", Shown::Size),
    ("folded", "folded_bytes", Shown::Size),
    ("swap file", "swap_bytes", Shown::Size),
    ("remote store", "remote_bytes", Shown::Size),
    ("faults/s", "faults", Shown::Rate),
    ("loads/s", "pgmajfault", Shown::Rate),
    ("first touches/s", "faults_zero", Shown::Rate),
    ("first writes/s", "faults_write", Shown::Rate),
    ("waits for others/s", "faults_waited", Shown::Rate),
    ("own reclaims/s", "direct_reclaims", Shown::Rate),
    ("refaulted pages/s", "workingset_refault", Shown::Rate),
    ("pages saved/s", "zswpout", Shown::Rate),
    ("pages to swap/s", "pswpout", Shown::Rate),
    ("pages from swap/s", "pswpin", Shown::Rate),
    ("saves refused", "save_refused", Shown::Count),
    ("refused", "refused_bytes", Shown::Size),
    ("failed swap writes", "swap_write_failed", Shown::Count),
    ("failed remote calls", "remote_failed", Shown::Count),
    ("calls refused", "calls_refused", Shown::Count),
    ("peak", "peak_bytes", Shown::Size),
];

/// Returns the counters of a process, each as its label and its value.
pub fn counters(heard: &[Heard], run: u32, pid: u32) -> Vec<(&'static str, String)> {
    let pair = found(heard, WatchSource::Run(run)).and_then(Pair::of);
    let process =
        pair.and_then(|pair| processes_of(pair).find(|one| one.now["pid"] == u64::from(pid)));
    let Some(process) = process else { return Vec::new() };
    let value = |name: &str, form: &Shown| match form {
        Shown::Size => short_size(number(process.now, name)),
        Shown::Rate => process.rate(name).map_or("-".to_string(), short_count),
        Shown::Count => number(process.now, name).to_string(),
    };
    COUNTERS.iter().map(|(label, name, form)| (*label, value(name, form))).collect()
}
