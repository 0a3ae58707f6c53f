//! The description of the machine in a report.

use crate::common::size::show_size;
use serde::{Deserialize, Serialize};
use std::fs;

/// Facts of the machine at the time of the benchmark.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Name of the processor.
    pub cpu: String,
    /// Processors that this process may use.
    pub cores: usize,
    /// Memory of the machine in bytes.
    pub memory_bytes: u64,
    /// Kernel release.
    pub kernel: String,
    /// Coordinated universal time, `2026-01-31 12:00:00`.
    pub date_utc: String,
    /// zswap's switch (`Y`, `N`, or `absent`). It is never written here, because that would change
    /// how the kernel swaps.
    pub zswap_enabled: String,
    /// vm.page-cluster, the kernel's swap read-ahead, which is not changed.
    pub page_cluster: String,
    /// The machine's own transparent huge page mode.
    pub thp_enabled: String,
}

impl Machine {
    /// Returns the first line of a report: the date and the machine.
    pub fn heading(&self) -> String {
        let memory = show_size(self.memory_bytes);
        format!(
            "{} UTC\n{}, {} cores, {memory}; Linux {}",
            self.date_utc, self.cpu, self.cores, self.kernel
        )
    }

    /// Reads the facts. Unreadable ones are `?`.
    pub fn read() -> Machine {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let cpu = cpuinfo
            .lines()
            .find(|line| line.starts_with("model name"))
            .and_then(|line| line.split_once(": "));
        let zswap = fs::read_to_string("/sys/module/zswap/parameters/enabled");
        Machine {
            cpu: cpu.map_or("?", |(_, name)| name).to_string(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: kib_field(&meminfo, "MemTotal:").unwrap_or(0),
            kernel: read("/proc/sys/kernel/osrelease"),
            date_utc: date_utc(),
            zswap_enabled: zswap.map_or("absent".into(), |text| text.trim().to_string()),
            page_cluster: read("/proc/sys/vm/page-cluster"),
            thp_enabled: read("/sys/kernel/mm/transparent_hugepage/enabled"),
        }
    }
}

/// Returns the bytes of a `Name:   123 kB` line of /proc/meminfo or /proc/PID/status.
pub fn kib_field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kib| kib << 10)
}

fn read(path: &str) -> String {
    fs::read_to_string(path).map_or("?".into(), |text| text.trim().to_string())
}

fn date_utc() -> String {
    // SAFETY: time accepts null; gmtime_r reads the first and writes the second, both live; an
    // all-zero tm is valid.
    let tm = unsafe {
        let now = libc::time(std::ptr::null_mut());
        let mut tm: libc::tm = std::mem::zeroed();
        libc::gmtime_r(&now, &mut tm);
        tm
    };
    let (year, month, day) = (tm.tm_year + 1900, tm.tm_mon + 1, tm.tm_mday);
    format!("{year}-{month:02}-{day:02} {:02}:{:02}:{:02}", tm.tm_hour, tm.tm_min, tm.tm_sec)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kib_fields_are_bytes() {
        let status = "VmRSS:\t    1234 kB\nRssAnon:\t      10 kB\n";
        assert_eq!(kib_field(status, "RssAnon:"), Some(10240));
        assert_eq!(kib_field(status, "VmSwap:"), None);
        assert!(
            kib_field(&fs::read_to_string("/proc/meminfo").unwrap(), "MemTotal:").unwrap()
                > 1 << 20
        );
    }
}
