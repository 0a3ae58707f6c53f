//! `memfold bench corpus`: builds the file from which every walk copies its pages.

pub mod file;
pub mod parts;
pub mod page;

use crate::common::refusal::Refusal;
use crate::common::size::{parse_size, show_size};
use crate::corpus::file::{CORPUS_BYTES_MIN, PAGE};
use anyhow::Context;
use std::fs;
use std::path::{Path, PathBuf};

/// Arguments of `memfold bench corpus`.
#[derive(clap::Args, Debug, Clone)]
pub struct CorpusArgs {
    /// Where to write it [default: memfold/corpus.bin in $XDG_CACHE_HOME or ~/.cache]
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Size of the corpus
    #[arg(long, default_value = "64M", value_parser = parse_size)]
    pub size: u64,
}

/// The corpus argument of the other benchmarks.
#[derive(clap::Args, Debug, Clone)]
pub struct Given {
    /// The corpus file; without it the default one is used, and built if it is missing
    #[arg(long, value_name = "FILE")]
    pub corpus: Option<PathBuf>,
}

impl Given {
    /// Returns the given file, or the default one, which is built if it is missing.
    pub fn find(&self) -> anyhow::Result<PathBuf> {
        if let Some(path) = &self.corpus {
            return Ok(path.clone());
        }
        let path = default_path()?;
        if !path.exists() {
            eprintln!("building the corpus {}", path.display());
            build(&path, 64 << 20)?;
        }
        Ok(path)
    }
}

/// Builds the corpus and prints its composition. The result is always the same on one machine.
pub fn corpus(args: CorpusArgs) -> anyhow::Result<()> {
    let path = args.out.clone().map_or_else(default_path, Ok)?;
    for line in build(&path, args.size)? {
        println!("{line}");
    }
    Ok(())
}

/// Returns the path of the default corpus.
fn default_path() -> anyhow::Result<PathBuf> {
    let cache = match (std::env::var_os("XDG_CACHE_HOME"), std::env::var_os("HOME")) {
        (Some(cache), _) if !cache.is_empty() => PathBuf::from(cache),
        (_, Some(home)) if !home.is_empty() => Path::new(&home).join(".cache"),
        _ => {
            return Err(Refusal::Usage(
                "neither XDG_CACHE_HOME nor HOME is set: name the corpus file".into(),
            )
            .into());
        }
    };
    Ok(cache.join("memfold/corpus.bin"))
}

/// Size of the pieces that alternate in the file, so that every part of it has mixed content.
pub const PIECE: usize = 1 << 20;

/// Writes a corpus of `bytes` (rounded down to pages) to `path`, atomically. Returns lines that
/// describe it.
pub fn build(path: &Path, bytes: u64) -> anyhow::Result<Vec<String>> {
    if bytes < CORPUS_BYTES_MIN {
        let least = show_size(CORPUS_BYTES_MIN);
        return Err(Refusal::Usage(format!(
            "a corpus of {bytes} bytes is too small: at least {least}"
        ))
        .into());
    }
    let share = bytes as usize / 4 / PAGE * PAGE;
    let last = bytes as usize / PAGE * PAGE - 3 * share;
    let (libraries, files) = parts::libraries(share)?;
    let parts = [
        (format!("shared libraries ({files} files)"), libraries),
        ("pickled Python heap".into(), parts::pickled_heap(share)?),
        ("JSON lines".into(), parts::json_text(share, 0x4a53)),
        ("f64 and f32 arrays".into(), parts::floats(last, 0xf10a)),
    ];
    let whole = interleave(&parts.each_ref().map(|(_, part)| part.as_slice()));
    write_whole(path, &whole).with_context(|| format!("corpus {}", path.display()))?;

    let mut lines = vec![format!(
        "{}: {}, xxh3 {:016x}",
        path.display(),
        show_size(whole.len() as u64),
        hash(&whole)
    )];
    for (name, part) in &parts {
        lines.push(format!(
            "  {:>9} {name}, xxh3 {:016x}",
            show_size(part.len() as u64),
            hash(part)
        ));
    }
    Ok(lines)
}

/// Describes a corpus. Reads all of it, which also puts it into the page cache and charges it to
/// this process.
pub fn describe(path: &Path) -> anyhow::Result<String> {
    let bytes =
        fs::read(path).map_err(|e| Refusal::Corpus(format!("corpus {}: {e}", path.display())))?;
    Ok(format!("{}, {}, xxh3 {:016x}", path.display(), show_size(bytes.len() as u64), hash(&bytes)))
}

/// Returns the XXH3 of some bytes in hexadecimal.
pub fn hash(bytes: &[u8]) -> u64 {
    twox_hash::XxHash3_64::oneshot(bytes)
}

fn interleave(parts: &[&[u8]]) -> Vec<u8> {
    let mut whole = Vec::with_capacity(parts.iter().map(|p| p.len()).sum());
    let rounds = parts.iter().map(|p| p.len().div_ceil(PIECE)).max().unwrap_or(0);
    for round in 0..rounds {
        for part in parts {
            let piece = part.get(round * PIECE..).unwrap_or(&[]);
            whole.extend_from_slice(&piece[..piece.len().min(PIECE)]);
        }
    }
    whole
}

fn write_whole(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
        fs::create_dir_all(dir)?;
    }
    let mut part = path.as_os_str().to_owned();
    part.push(format!(".{}.part", std::process::id()));
    let part = PathBuf::from(part);
    let outcome = fs::write(&part, bytes).and_then(|()| fs::rename(&part, path));
    if outcome.is_err() {
        let _ = fs::remove_file(&part);
    }
    Ok(outcome?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_all_parts_alternate_and_no_byte_is_lost() {
        let (a, b) = (vec![1u8; 2 * PIECE + 10], vec![2u8; PIECE / 2]);
        let whole = interleave(&[&a, &b]);
        assert_eq!(whole.len(), a.len() + b.len());
        assert_eq!((whole[0], whole[PIECE], whole[PIECE + PIECE / 2]), (1, 2, 1));
        assert_eq!(whole.iter().filter(|&&x| x == 2).count(), b.len());
    }

    #[test]
    fn an_unwritable_or_tiny_corpus_is_an_error() {
        assert!(build(Path::new("/proc/no/corpus"), 4 << 20).is_err());
        assert!(build(&std::env::temp_dir().join("never"), 4096).is_err());
    }
}
