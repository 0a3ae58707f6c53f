//! One run of the walk on the kernel's zram swap, in a memory cgroup.

use crate::harness::message::Message;
use crate::harness::runner::{RunResult, run};
use crate::host::cgroup::{Cgroup, Hierarchy};
use crate::host::folio::FolioKib;
use crate::host::guard;
use crate::host::zram::Zram;
use std::process::Command;
use std::time::Duration;

/// Memory of the cgroup beyond the resident size, in bytes: for the walking process itself.
const OWN_BYTES: u64 = 1 << 20;
/// A page table entry of 8 bytes maps 4096 bytes. Page tables are charged to the cgroup, so its
/// limit is increased by them.
const PAGE_TABLE_SHARE: u64 = 512;

/// Returns the limit of a cgroup in which `resident_bytes` of an area may be resident.
pub fn charged_bytes(area_bytes: u64, resident_bytes: u64) -> u64 {
    resident_bytes + area_bytes / PAGE_TABLE_SHARE + OWN_BYTES
}

/// Codec, folio size and sizes in bytes of one zram run.
pub struct ZramRun<'a> {
    /// The kernel's name of the codec.
    pub codec: &'a str,
    /// The folio size of the kernel.
    pub folio: FolioKib,
    /// Size of the walk's area.
    pub area_bytes: u64,
    /// How much of it may be resident.
    pub resident_bytes: u64,
}

impl ZramRun<'_> {
    /// Sets up the kernel, runs `command` (a `walk-child` over plain memory), and restores every
    /// setting.
    pub fn run(
        &self,
        peer: &str,
        command: &mut Command,
        silence_max: Duration,
        on_message: impl FnMut(&Message) -> anyhow::Result<()>,
    ) -> anyhow::Result<RunResult> {
        let result = self.run_unrestored(peer, command, silence_max, on_message);
        guard::restore();
        result
    }

    fn run_unrestored(
        &self,
        peer: &str,
        command: &mut Command,
        silence_max: Duration,
        mut on_message: impl FnMut(&Message) -> anyhow::Result<()>,
    ) -> anyhow::Result<RunResult> {
        let hierarchy = Hierarchy::find()?;
        let limit_bytes = charged_bytes(self.area_bytes, self.resident_bytes);
        let disk_bytes = self.area_bytes + self.area_bytes / 4 + (64 << 20);
        guard::change(|journal| self.folio.select(journal))?;
        let zram = guard::change(|journal| Zram::swap_on(journal, self.codec, disk_bytes))?;
        let cgroup = guard::change(|journal| Cgroup::create(journal, &hierarchy, limit_bytes))?;
        let _current = cgroup.keep_current();
        let before = self.folio.counters();
        let mut figures = Vec::new();
        let mut result = run(peer, command, silence_max, |message| {
            match message {
                Message::Ready { pid } => guard::change(|_| cgroup.add(*pid))?,
                Message::Phase(_) => {}
                Message::Done { .. } => {
                    let (bytes, counters) = (zram.bytes()?, self.folio.counters().since(&before));
                    figures = vec![
                        ("stored_bytes", bytes.original),
                        ("compressed_bytes", bytes.compressed),
                        ("pool_bytes", bytes.held_max),
                        ("pages_swapped_out", counters.swapped_out),
                        ("pages_swapped_in", counters.swapped_in),
                        ("pages_out_in_folios", counters.large_out),
                        ("pages_in_in_folios", counters.large_in),
                        ("pages_allocated_in_folios", counters.large_alloc),
                        ("cgroup_limit_bytes", limit_bytes),
                        ("cgroup_bytes_max", cgroup.peak_bytes().unwrap_or(0)),
                    ];
                }
            }
            on_message(message)
        })?;
        result.counters.extend(figures.into_iter().map(|(name, value)| (name.to_string(), value)));
        if result.broke_off.is_some() && cgroup.oom_kills() > 0 {
            result.counters.insert("oom_kills".into(), cgroup.oom_kills());
        }
        Ok(result)
    }
}
