//! The kernel's own swap to a file, in a memory cgroup, with or without zswap.

use crate::common::refusal::Refusal;
use crate::harness::message::Message;
use crate::harness::runner::{RunResult, run};
use crate::harness::zram_run::charged_bytes;
use crate::host::cgroup::{Cgroup, Hierarchy};
use crate::host::folio::FolioKib;
use crate::host::guard;
use crate::host::journal::{FILE_PREFIX, Journal, Undo, current_value};
use crate::host::zram::{swap_on, write_swap_header};
use anyhow::Context;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const ZSWAP: &str = "/sys/module/zswap/parameters";
/// The codec of zswap that memfold is compared with.
pub const ZSWAP_CODEC: &str = "lzo";

/// Checks whether the kernel's swap can be used here.
pub fn check() -> Result<(), Refusal> {
    // SAFETY: geteuid touches no memory and can't fail.
    if unsafe { libc::geteuid() } != 0 {
        return Err(Refusal::Machine("the kernel's swap needs root".into()));
    }
    Hierarchy::find().map(drop)
}

/// Checks whether zswap can be used here.
pub fn check_zswap() -> Result<(), Refusal> {
    if !Path::new(ZSWAP).join("max_pool_percent").exists() {
        return Err(Refusal::Machine("this kernel has no zswap (CONFIG_ZSWAP)".into()));
    }
    Ok(())
}

/// Returns whether zswap was ever set up since the boot. After that, the kernel swaps in large
/// folios page by page.
pub fn zswap_history() -> &'static str {
    let is_on =
        fs::read_to_string(Path::new(ZSWAP).join("enabled")).is_ok_and(|text| text.trim() == "Y");
    let has_debugfs = Path::new("/sys/kernel/debug/extfrag").exists()
        || Path::new("/sys/kernel/debug/block").exists();
    match () {
        () if !Path::new(ZSWAP).exists() => "absent",
        () if is_on => "on",
        () if Path::new("/sys/kernel/debug/zswap").exists() => "off; it was on since the boot",
        () if has_debugfs => "never on since the boot",
        () => "off; whether it was on before can't be told without debugfs",
    }
}

/// One run on a swap file of the kernel.
pub struct FileRun<'a> {
    /// Directory of the swap file.
    pub dir: &'a Path,
    /// The folio size of the kernel.
    pub folio: FolioKib,
    /// Size of the load.
    pub area_bytes: u64,
    /// How much of it may be resident.
    pub resident_bytes: u64,
    /// The codec of zswap, and its size limit in percent of the machine's memory; `None` for no
    /// zswap.
    pub zswap: Option<(&'a str, u64)>,
}

impl FileRun<'_> {
    /// Sets up the kernel, runs `command` (a `walk-child` over plain memory), and restores every
    /// setting.
    pub fn run(
        &self,
        peer: &str,
        command: &mut Command,
        silence_max: Duration,
    ) -> anyhow::Result<RunResult> {
        let result = self.run_unrestored(peer, command, silence_max);
        guard::restore();
        result
    }

    fn run_unrestored(
        &self,
        peer: &str,
        command: &mut Command,
        silence_max: Duration,
    ) -> anyhow::Result<RunResult> {
        let hierarchy = Hierarchy::find()?;
        guard::change(|journal| self.folio.select(journal))?;
        guard::change(|journal| {
            swap_file_on(journal, self.dir, self.area_bytes + self.area_bytes / 4 + (64 << 20))
        })?;
        if let Some((codec, percent)) = self.zswap {
            guard::change(|journal| zswap_on(journal, codec, percent))?;
        }
        let limit_bytes = charged_bytes(self.area_bytes, self.resident_bytes);
        let cgroup = guard::change(|journal| Cgroup::create(journal, &hierarchy, limit_bytes))?;
        let _current = cgroup.keep_current();
        let before = self.folio.counters();
        let mut most_bytes = 0;
        let mut result = run(peer, command, silence_max, |message| {
            match message {
                Message::Ready { pid } => guard::change(|_| cgroup.add(*pid))?,
                Message::Phase(_) => most_bytes = zswap_bytes().max(most_bytes),
                Message::Done { .. } => {}
            }
            Ok(())
        })?;
        let counters = self.folio.counters().since(&before);
        let figures = [
            ("pages_swapped_out", counters.swapped_out),
            ("pages_swapped_in", counters.swapped_in),
            ("zswap_bytes", most_bytes),
            ("cgroup_bytes_max", cgroup.peak_bytes().unwrap_or(0)),
            ("oom_kills", cgroup.oom_kills()),
        ];
        result.counters.extend(figures.map(|(name, value)| (name.to_string(), value)));
        Ok(result)
    }
}

/// Makes a swap file in `dir`, without holes, and swaps to it.
fn swap_file_on(journal: &mut Journal, dir: &Path, bytes: u64) -> anyhow::Result<()> {
    let dir = fs::canonicalize(dir).with_context(|| dir.display().to_string())?;
    let path: PathBuf = dir.join(format!("{FILE_PREFIX}{}", std::process::id()));
    journal.record(&Undo::RemoveFile { path: path.clone() })?;
    let context = || format!("swap file {}", path.display());
    let file = File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path)
        .with_context(context)?;
    // SAFETY: fallocate takes numbers only.
    if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, bytes as i64) } != 0 {
        return Err(std::io::Error::last_os_error()).with_context(context);
    }
    drop(file);
    write_swap_header(&path, bytes).with_context(context)?;
    journal.record(&Undo::SwapOff { device: path.clone() })?;
    swap_on(&path)
}

/// Enables zswap with this codec. Its switch is set last, and restored first.
fn zswap_on(journal: &mut Journal, codec: &str, percent: u64) -> anyhow::Result<()> {
    let path = |name: &str| Path::new(ZSWAP).join(name);
    journal.set(&path("max_pool_percent"), &percent.to_string())?;
    journal.set(&path("compressor"), codec)?;
    journal.set(&path("shrinker_enabled"), "N")?;
    journal.set(&path("enabled"), "Y")?;
    let compressor = current_value(&path("compressor"))?;
    anyhow::ensure!(compressor == codec, "zswap took {compressor} in place of {codec}");
    Ok(())
}

/// Returns the current size of zswap.
fn zswap_bytes() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    crate::host::machine::kib_field(&text, "Zswap:").unwrap_or(0)
}
