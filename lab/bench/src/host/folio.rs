//! The kernel's large anonymous folios: selects a size, and counts whether it was used.

use crate::common::refusal::Refusal;
use crate::host::journal::Journal;
use std::fs;
use std::path::{Path, PathBuf};

const THP: &str = "/sys/kernel/mm/transparent_hugepage";

/// A folio size of the kernel in KiB; 4 means single pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FolioKib(pub u64);

impl FolioKib {
    /// The folio sizes that memfold is compared with.
    pub const ALL: [FolioKib; 6] =
        [FolioKib(4), FolioKib(16), FolioKib(64), FolioKib(256), FolioKib(1024), FolioKib(2048)];

    /// Parses `4k`, `64k`, `1m` …: a power of two from 4k to 2m, except 8k, which anonymous memory
    /// does not support.
    pub fn parse(text: &str) -> Option<FolioKib> {
        let kib = match text.to_ascii_lowercase() {
            t if t.ends_with('k') => t[..t.len() - 1].parse().ok()?,
            t if t.ends_with('m') => t[..t.len() - 1].parse::<u64>().ok()?.checked_mul(1024)?,
            _ => return None,
        };
        (u64::is_power_of_two(kib) && (4..=2048).contains(&kib)).then_some(FolioKib(kib))
    }

    /// Returns `4k`, `64k`, `1m`.
    pub fn name(self) -> String {
        if self.0 >= 1024 { format!("{}m", self.0 / 1024) } else { format!("{}k", self.0) }
    }

    fn dir(self) -> PathBuf {
        Path::new(THP).join(format!("hugepages-{}kB", self.0))
    }

    /// Returns an error if this kernel has no folios of this size.
    pub fn check(self) -> Result<(), Refusal> {
        if self.0 == 4 || self.dir().join("enabled").exists() {
            return Ok(());
        }
        Err(Refusal::Machine(format!(
            "this kernel has no {} folios: {} is missing",
            self.name(),
            self.dir().display()
        )))
    }

    /// Makes the kernel use only this size, in memory that asks for large folios.
    pub fn select(self, journal: &mut Journal) -> anyhow::Result<()> {
        let mut sizes: Vec<PathBuf> = fs::read_dir(THP)
            .map(|dir| {
                dir.flatten()
                    .map(|entry| entry.path().join("enabled"))
                    .filter(|path| path.exists())
                    .collect()
            })
            .unwrap_or_default();
        sizes.sort();
        let choice = self.dir().join("enabled");
        for size in &sizes {
            journal.set(size, if *size == choice { "always" } else { "never" })?;
        }
        Ok(())
    }

    /// Reads the counters of this size, and of all swap.
    pub fn counters(self) -> FolioCounters {
        let stat = |name: &str| number(&self.dir().join("stats").join(name));
        FolioCounters {
            swapped_out: vmstat("pswpout"),
            swapped_in: vmstat("pswpin"),
            large_out: stat("swpout") * self.0 / 4,
            large_in: stat("swpin") * self.0 / 4,
            large_alloc: stat("anon_fault_alloc") * self.0 / 4,
        }
    }
}

/// Counters in pages since boot. The difference of two readings covers the time between them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FolioCounters {
    /// Pages swapped out, in folios of any size.
    pub swapped_out: u64,
    /// Pages swapped in.
    pub swapped_in: u64,
    /// Pages swapped out in folios of the chosen size.
    pub large_out: u64,
    /// Pages swapped in, in folios of the chosen size.
    pub large_in: u64,
    /// Pages first allocated in folios of the chosen size.
    pub large_alloc: u64,
}

impl FolioCounters {
    /// Returns the difference from `before` to `self`.
    pub fn since(&self, before: &FolioCounters) -> FolioCounters {
        FolioCounters {
            swapped_out: self.swapped_out.wrapping_sub(before.swapped_out),
            swapped_in: self.swapped_in.wrapping_sub(before.swapped_in),
            large_out: self.large_out.wrapping_sub(before.large_out),
            large_in: self.large_in.wrapping_sub(before.large_in),
            large_alloc: self.large_alloc.wrapping_sub(before.large_alloc),
        }
    }
}

fn number(path: &Path) -> u64 {
    fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

fn vmstat(name: &str) -> u64 {
    let text = fs::read_to_string("/proc/vmstat").unwrap_or_default();
    let mut fields = text.lines().filter_map(|line| line.split_once(' '));
    fields.find(|(field, _)| *field == name).and_then(|(_, value)| value.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folio_sizes_parse_and_print() {
        for size in FolioKib::ALL {
            assert_eq!(FolioKib::parse(&size.name()), Some(size));
        }
        assert_eq!(FolioKib::parse("2M"), Some(FolioKib(2048)));
        for bad in ["", "k", "3k", "4m", "2k", "64", "64g"] {
            assert_eq!(FolioKib::parse(bad), None, "{bad}");
        }
    }
}
