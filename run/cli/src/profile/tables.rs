//! The tables of `memfold record` on the terminal: the functions and the mappings with the most
//! loads of folded memory.
use crate::printable::printable;
use crate::profile::recording::Recording;
use crate::profile::symbols::{Function, NamedStacks};
use memfold_engine::config::Size;
use std::collections::HashMap;
use std::fmt::Write;

/// Rows of the tables.
const FUNCTIONS: usize = 10;
const MAPPINGS: usize = 5;
/// Functions for which the cost is explained.
const COSTS: usize = 5;
/// Functions of a stack that a mapping names, at most.
const MAPPERS: usize = 3;
/// Columns for the name of a function.
const NAME_COLUMNS: usize = 60;
/// Parts of the names of files whose functions map memory on behalf of others.
const ALLOCATES: [&str; 5] = ["libc.so", "libc-", "ld-linux", "ld-musl", "libmemfold"];

/// The loads of a function, or of a mapping.
#[derive(Copy, Clone, Default)]
struct Count {
    /// Sampled loads in it.
    own: u64,
    own_ns: u64,
    /// Sampled loads in it and in what it called.
    all: u64,
}

/// Returns the lines of the tables. Returns `None` if nothing was sampled.
pub fn tables(recording: &Recording, named: &NamedStacks) -> Option<String> {
    let samples = recording.loads.len() as u64;
    if samples == 0 {
        return None;
    }
    let mut text = String::from("   LOADS  SHARE     TIME  WITH CALLEES  FUNCTION\n");
    for (function, count) in by_function(recording, named).into_iter().take(FUNCTIONS) {
        let function = &named.functions.values()[function];
        let _ = writeln!(
            text,
            "{:>8} {:>5.1}% {:>8} {:>12.1}%  {}",
            count.own * recording.every,
            percent(count.own, samples),
            seconds(count.own_ns.saturating_mul(recording.every)),
            percent(count.all, samples),
            label(function, NAME_COLUMNS),
        );
    }
    let mappings = by_mapping(recording, named);
    if !mappings.is_empty() {
        text += "   LOADS  SHARE      SIZE  MAPPED BY\n";
    }
    for (mappers, count, bytes) in mappings.into_iter().take(MAPPINGS) {
        let _ = writeln!(
            text,
            "{:>8} {:>5.1}% {:>9}  {mappers}",
            count * recording.every,
            percent(count, samples),
            Size(bytes).to_string(),
        );
    }
    Some(text)
}

/// Returns the functions that cost most time, with what they loaded, and what to do. `limit_bytes` is
/// the limit that would have cost 10%, if that is more than the run had. Returns nothing if nothing
/// was sampled.
pub fn costs(recording: &Recording, named: &NamedStacks, limit_bytes: Option<u64>) -> String {
    let total_ns = recording.loads.iter().fold(0u64, |sum, load| sum.saturating_add(load.spent_ns));
    let mut rows = by_function(recording, named);
    rows.sort_by_key(|(function, count)| (std::cmp::Reverse(count.own_ns), *function));
    let Some((first, _)) = rows.first() else { return String::new() };
    let name = |function: usize| label(&named.functions.values()[function], NAME_COLUMNS);
    let mut text = String::from("what cost most time:\n");
    // The others cost less than 1%.
    let matter = |(_, count): &&(usize, Count)| percent(count.own_ns, total_ns) >= 1.0;
    for (n, (function, count)) in rows.iter().filter(matter).take(COSTS).enumerate() {
        let _ = writeln!(
            text,
            "{}. {}: {:.1}% of the time of all loads, {}{}",
            n + 1,
            name(*function),
            percent(count.own_ns, total_ns),
            seconds(count.own_ns.saturating_mul(recording.every)),
            loaded_most(recording, named, *function),
        );
    }
    let larger = limit_bytes.map(|bytes| {
        format!(
            "give it --limit {:.0}M, which would have cost 10% by an estimate; or ",
            (bytes as f64 / 1048576.0).ceil()
        )
    });
    let _ = writeln!(
        text,
        "what to do: {}let {} touch less of that memory at a time, or in the order of its addresses",
        larger.unwrap_or_default(),
        name(*first)
    );
    text
}

/// Returns which mapping had most of a function's loads, and how many, as the end of a sentence.
fn loaded_most(recording: &Recording, named: &NamedStacks, function: usize) -> String {
    let loads = recording.loads.iter().filter(|load| charged(named, load.stack) == Some(function));
    let (mut all, mut by_mappers) = (0, HashMap::<String, u64>::new());
    for load in loads {
        all += 1;
        if let Some(mapping) = load.mapping {
            let mappers = mappers(named, recording.mappings[mapping].stack);
            *by_mappers.entry(mappers).or_default() += 1;
        }
    }
    let most = by_mappers.into_iter().max_by(|a, b| (a.1, &b.0).cmp(&(b.1, &a.0)));
    most.map_or(String::new(), |(mappers, count)| {
        format!("; {:.0}% of its loads were of memory mapped by {mappers}", percent(count, all))
    })
}

/// Returns the function that a load with this stack counts for. What compiled code does for a Python
/// function counts as that function's.
fn charged(named: &NamedStacks, stack: usize) -> Option<usize> {
    let stack = &named.stacks[stack];
    let is_python = |function: &&usize| named.functions.values()[**function].is_python();
    stack.iter().find(is_python).or(stack.first()).copied()
}

/// Returns the functions with their counts, those with the most loads of their own first.
fn by_function(recording: &Recording, named: &NamedStacks) -> Vec<(usize, Count)> {
    let mut counts = vec![Count::default(); named.functions.values().len()];
    for load in &recording.loads {
        if let Some(function) = charged(named, load.stack) {
            counts[function].own += 1;
            counts[function].own_ns = counts[function].own_ns.saturating_add(load.spent_ns);
        }
        let mut functions = named.stacks[load.stack].clone();
        functions.sort_unstable();
        functions.dedup();
        functions.iter().for_each(|function| counts[*function].all += 1);
    }
    let mut rows: Vec<(usize, Count)> =
        counts.into_iter().enumerate().filter(|(_, count)| count.own > 0).collect();
    rows.sort_by_key(|(function, count)| (std::cmp::Reverse(count.own), *function));
    rows
}

/// Returns who made the mappings, with the sampled loads there and the bytes of these mappings.
fn by_mapping(recording: &Recording, named: &NamedStacks) -> Vec<(String, u64, u64)> {
    let mut loads: HashMap<usize, u64> = HashMap::new();
    for mapping in recording.loads.iter().filter_map(|load| load.mapping) {
        *loads.entry(mapping).or_default() += 1;
    }
    let mut by_mappers: HashMap<String, (u64, u64)> = HashMap::new();
    for (mapping, count) in loads {
        let mapping = &recording.mappings[mapping];
        let of = by_mappers.entry(mappers(named, mapping.stack)).or_default();
        of.0 += count;
        of.1 += mapping.len;
    }
    let mut rows: Vec<_> =
        by_mappers.into_iter().map(|(name, (count, bytes))| (name, count, bytes)).collect();
    rows.sort_by(|a, b| (b.1, &a.0).cmp(&(a.1, &b.0)));
    rows
}

/// Returns the innermost functions of a stack: those of Python, or else those outside the C library.
fn mappers(named: &NamedStacks, stack: usize) -> String {
    let has_python = named.stack(stack).any(Function::is_python);
    let is_own = |function: &&Function| match has_python {
        true => function.is_python(),
        false => ALLOCATES.iter().all(|of| !function.file.contains(of)),
    };
    let names: Vec<String> = named
        .stack(stack)
        .filter(is_own)
        .take(MAPPERS)
        .map(|function| label(function, NAME_COLUMNS / 2))
        .collect();
    if names.is_empty() { "unknown".to_string() } else { names.join(" < ") }
}

/// Returns a function's name, with its file if it is one of Python.
pub fn label(function: &Function, columns: usize) -> String {
    let Function { name, file, line } = function;
    let text = match line {
        Some(line) => format!("{name} ({}:{line})", file.rsplit('/').next().unwrap_or_default()),
        None => name.clone(),
    };
    let mut text = printable(&text);
    if let Some((end, _)) = text.char_indices().nth(columns) {
        text.truncate(end);
        text.pop();
        text.push('~');
    }
    text
}

fn percent(part: u64, whole: u64) -> f64 {
    100.0 * part as f64 / whole.max(1) as f64
}

fn seconds(ns: u64) -> String {
    match ns {
        0..1_000_000 => format!("{} us", ns / 1000),
        1_000_000..1_000_000_000 => format!("{:.1} ms", ns as f64 / 1e6),
        _ => format!("{:.2} s", ns as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::outputs::{stack_loads, write_collapsed};
    use crate::profile::recording::tests::{leave, own};
    use memfold_run::samples::SampleRing;

    #[test]
    fn tables_count_a_load_for_the_innermost_python_function() {
        let (ring, _file) = SampleRing::create(50).unwrap();
        let mut recording = Recording::new(50);
        assert_eq!(tables(&recording, &NamedStacks::of(&recording)), None);
        assert_eq!(costs(&recording, &NamedStacks::of(&recording), Some(1)), "");
        for (at, frames) in [[21, 22], [21, 22], [22, 21], [22, 22]].iter().enumerate() {
            leave(&ring, own(1), at as u64 + 1, frames);
        }
        for (code, text) in [(21, *b"inner\0f\0"), (22, *b"outer\0f\0")] {
            let sample = ring.begin().unwrap();
            sample.set_thread(own(1), 1, 1);
            sample.set_name(code, 3);
            sample.add_words(&[u64::from_ne_bytes(text)]);
            sample.finish();
        }
        recording.take(&ring);
        let names = NamedStacks::of(&recording);
        let text = tables(&recording, &names).unwrap();
        let rows: Vec<Vec<&str>> =
            text.lines().skip(1).map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[0], ["100", "50.0%", "1", "us", "75.0%", "inner", "(f:3)"]);
        assert_eq!(rows[1], ["100", "50.0%", "1", "us", "100.0%", "outer", "(f:3)"]);
        let mut output = Vec::new();
        write_collapsed(&stack_loads(&recording, &names), &mut output).unwrap();
        let text = String::from_utf8(output).unwrap();
        assert!(text.lines().any(|line| line.ends_with("outer (f:3);inner (f:3) 100")), "{text}");
        assert_eq!(text.lines().count(), 3, "{text}");
        let text = costs(&recording, &names, Some(100 << 20));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[1], "1. inner (f:3): 50.0% of the time of all loads, 1 us");
        assert_eq!(lines[2], "2. outer (f:3): 50.0% of the time of all loads, 1 us");
        assert!(lines[3].starts_with("what to do: give it --limit 100M,"), "{text}");
        assert!(lines[3].contains("let inner (f:3) touch less"), "{text}");
        assert!(!costs(&recording, &names, None).contains("--limit"));
    }

    #[test]
    fn long_label_is_cut_and_harmless() {
        let function = Function { name: "a\u{1b}[2Jb".repeat(9), file: String::new(), line: None };
        let text = label(&function, 20);
        assert_eq!((text.chars().count(), text.ends_with('~')), (20, true));
        assert!(!text.contains('\u{1b}'));
    }
}
