//! Records the page trace of a program: qemu runs it, and a plugin of qemu tells its touches.
//!
//! Anonymous memory and written pages of private file mappings are recorded. Code, constants and
//! the main thread's stack are not, as memfold folds none of them.

use crate::common::refusal::Refusal;
use crate::host::program::find;
use crate::policy::trace::Trace;
use anyhow::{Context, ensure};
use std::collections::HashSet;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;

const PLUGIN: &str = include_str!("pagetrace.c");
const PAGE_BYTES: u64 = 4096;
/// Most references that are recorded before the program is ended.
const RECORDED_MOST: u64 = 200_000_000;

/// Arguments of `memfold bench policy record`.
#[derive(clap::Args, Debug, Clone)]
pub struct RecordArgs {
    /// The file to write, by convention NAME.trace
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// A touch of one of the last N pages that were recorded is dropped
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub filter: usize,
    /// Touches to keep after the fill
    #[arg(long, value_name = "N", default_value_t = 300_000)]
    pub references: usize,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// Runs a program, and writes its trace.
pub fn record(args: &RecordArgs) -> anyhow::Result<()> {
    let directory = TraceDirectory::new()?;
    let file = |name: &str| directory.0.join(name);
    let plugin = build(&directory.0)?;
    let (touches, maps) = (file("touches"), file("maps"));
    let options = format!(
        "{},out={},maps={},filter={},most={RECORDED_MOST}",
        plugin.display(),
        touches.display(),
        maps.display(),
        args.filter
    );
    let program = find(&args.command[0], &args.command[0])?;
    let status = Command::new(find("qemu-x86_64", "qemu-user")?)
        .args(["-plugin", &options, &program])
        .args(&args.command[1..])
        .status()
        .context("starting qemu-x86_64")?;
    ensure!(maps.is_file(), "the program ended without a trace: {status}");
    let ranges = excluded(&fs::read_to_string(&maps)?);
    let touches = fs::read(&touches)?;
    let words = touches.chunks_exact(8).map(|word| {
        let word = u64::from_le_bytes(word.try_into().expect("chunks of 8 bytes"));
        (word >> 1, word & 1 != 0)
    });
    let stack = words
        .clone()
        .next()
        .map(|(page, _)| page)
        .and_then(|page| ranges.all.iter().find(|range| range.contains(&page)).cloned());
    let is_counted =
        |page: u64| !ranges.constant.iter().chain(&stack).any(|range| range.contains(&page));
    let references: Vec<(u64, bool)> = words.filter(|(page, _)| is_counted(*page)).collect();
    let sample = keep(&references, args.references);
    let trace = Trace::new(&sample);
    let bytes = trace.pack()?;
    fs::write(&args.file, &bytes).with_context(|| format!("writing {}", args.file.display()))?;
    println!(
        "{}: {} pages ({} MiB), {} of {} touches, {} KiB",
        args.file.display(),
        trace.pages(),
        (trace.pages() as u64 * PAGE_BYTES) >> 20,
        trace.references.len(),
        references.len(),
        bytes.len() >> 10
    );
    Ok(())
}

/// A directory that is removed at the end.
struct TraceDirectory(PathBuf);

impl TraceDirectory {
    fn new() -> anyhow::Result<TraceDirectory> {
        let path = std::env::temp_dir().join(format!("memfold-record-{}", std::process::id()));
        fs::create_dir_all(&path).with_context(|| format!("creating {}", path.display()))?;
        Ok(TraceDirectory(path))
    }
}

impl Drop for TraceDirectory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn build(directory: &Path) -> anyhow::Result<PathBuf> {
    let (source, plugin) = (directory.join("pagetrace.c"), directory.join("pagetrace.so"));
    fs::write(&source, PLUGIN)?;
    let status = Command::new(find("gcc", "gcc")?)
        .args(["-O2", "-shared", "-fPIC", "-o"])
        .args([&plugin, &source])
        .status()
        .context("starting gcc")?;
    if !status.success() {
        return Err(Refusal::Machine("gcc could not build the plugin of qemu".into()).into());
    }
    Ok(plugin)
}

/// Mappings of a process, as ranges of page numbers.
struct RecordedMappings {
    all: Vec<Range<u64>>,
    /// Those of files that the process can't write to.
    constant: Vec<Range<u64>>,
}

/// Reads `/proc/PID/maps`.
fn excluded(maps: &str) -> RecordedMappings {
    let mut mappings = RecordedMappings { all: Vec::new(), constant: Vec::new() };
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        let (Some(range), Some(access)) = (words.next(), words.next()) else { continue };
        let Some((start, end)) = range.split_once('-') else { continue };
        let page = |address| u64::from_str_radix(address, 16).unwrap_or(0) / PAGE_BYTES;
        let range = page(start)..page(end);
        if !access.contains('w') && line.contains('/') {
            mappings.constant.push(range.clone());
        }
        mappings.all.push(range);
    }
    mappings
}

/// Returns the touches to keep: the pages of the fill once each, in the order of their first
/// touches, and `most` touches after it. The fill lasts until nine tenths of all pages were
/// touched, or fewer if not so many touches follow.
fn keep(touches: &[(u64, bool)], most: usize) -> Vec<(u64, bool)> {
    if touches.len() <= most {
        return touches.to_vec();
    }
    let all = touches.iter().map(|(page, _)| *page).collect::<HashSet<u64>>().len();
    let mut pages = HashSet::new();
    let mut fill = Vec::new();
    for (n, &(page, _)) in touches.iter().enumerate() {
        if pages.len() * 10 >= all * 9 || n + most >= touches.len() {
            fill.extend_from_slice(&touches[n..n + most]);
            break;
        }
        if pages.insert(page) {
            fill.push((page, true));
        }
    }
    fill
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_traces_keep_the_fill_once_and_the_touches_after_it() {
        let fill = (0..10).flat_map(|page| [(page, true), (0, false)]);
        let touches: Vec<_> = fill.chain((0..100).map(|n| (n % 10, false))).collect();
        assert_eq!(keep(&touches, 1000), touches);
        let sample = keep(&touches, 5);
        assert_eq!(sample.len(), 9 + 5);
        assert!(
            sample[..9].iter().map(|(page, _)| *page).eq(0..9),
            "nine of ten pages: {sample:?}"
        );
        assert_eq!(sample[9..], touches[17..22]);
    }

    #[test]
    fn mappings_of_read_only_files_are_constant() {
        let maps = "1000-3000 r-xp 00000000 00:00 1 /bin/a\n3000-4000 rw-p 00000000 00:00 1 /bin/a\n\
                    5000-6000 r--p 00000000 00:00 0\n";
        let ranges = excluded(maps);
        let starts: Vec<u64> = ranges.constant.iter().map(|range| range.start).collect();
        assert_eq!((starts, ranges.all.len()), (vec![1], 3));
    }
}
