//! A zram device as swap, for one run.

use crate::common::refusal::Refusal;
use crate::host::journal::{Journal, Undo, current_value};
use anyhow::Context;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

const HOT_ADD: &str = "/sys/class/zram-control/hot_add";
const SWAP_FLAG_PREFER: i32 = 0x8000;
const PRIORITY_MAX: i32 = 0x7fff;

/// A zram device in use as swap, with the highest priority.
pub struct Zram {
    index: u32,
}

/// Sizes of a zram device, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZramBytes {
    /// Data stored, uncompressed.
    pub original: u64,
    /// Compressed data.
    pub compressed: u64,
    /// Memory in use, with overhead.
    pub held: u64,
    /// Peak memory in use, with overhead.
    pub held_max: u64,
}

impl Zram {
    /// Checks whether zram can be used here. The kernel must offer `codec`.
    pub fn check(codec: &str) -> Result<(), Refusal> {
        let refuse = |why: String| Err(Refusal::Machine(why));
        // SAFETY: geteuid touches no memory and can't fail.
        if unsafe { libc::geteuid() } != 0 {
            return refuse("--vs zram needs root: it changes swap, cgroups and folio sizes (and restores them)".into());
        }
        let Ok(codecs) = fs::read_to_string("/sys/block/zram0/comp_algorithm") else {
            if Path::new(HOT_ADD).exists() {
                return Ok(());
            }
            return refuse("this kernel has no zram (CONFIG_ZRAM, or modprobe zram)".into());
        };
        if !codecs.split_whitespace().any(|name| name.trim_matches(['[', ']']) == codec) {
            return refuse(format!(
                "this kernel's zram has no codec '{codec}', only: {}",
                codecs.trim()
            ));
        }
        Ok(())
    }

    /// Claims an unused device (or adds one) and swaps to it: `disk_bytes` of pages, compressed
    /// with `codec`.
    pub fn swap_on(journal: &mut Journal, codec: &str, disk_bytes: u64) -> anyhow::Result<Zram> {
        let zram = Zram::claim(journal)?;
        fs::write(zram.attribute("comp_algorithm"), codec)
            .with_context(|| format!("zram codec {codec}"))?;
        fs::write(zram.attribute("disksize"), disk_bytes.to_string()).context("zram disksize")?;
        let device = zram.device();
        write_swap_header(&device, disk_bytes)
            .with_context(|| format!("swap header on {}", device.display()))?;
        journal.record(&Undo::SwapOff { device: device.clone() })?;
        swap_on(&device)?;
        Ok(zram)
    }

    /// Claims an unused device (or adds one) as a plain disk of `disk_bytes`, compressed with
    /// `codec`.
    pub fn disk(journal: &mut Journal, codec: &str, disk_bytes: u64) -> anyhow::Result<Zram> {
        let zram = Zram::claim(journal)?;
        fs::write(zram.attribute("comp_algorithm"), codec)
            .with_context(|| format!("zram codec {codec}"))?;
        fs::write(zram.attribute("disksize"), disk_bytes.to_string()).context("zram disksize")?;
        Ok(zram)
    }

    /// Opens the disk with O_DIRECT, which bypasses the page cache.
    pub fn open_direct(&self) -> anyhow::Result<File> {
        use std::os::unix::fs::OpenOptionsExt;
        let device = self.device();
        let file =
            File::options().read(true).write(true).custom_flags(libc::O_DIRECT).open(&device);
        file.with_context(|| device.display().to_string())
    }

    /// Returns the device's current sizes.
    pub fn bytes(&self) -> anyhow::Result<ZramBytes> {
        let text = fs::read_to_string(self.attribute("mm_stat"))?;
        parse_mm_stat(&text).with_context(|| format!("zram mm_stat '{}'", text.trim()))
    }

    /// Chooses the device, and records its undo. An existing device keeps its number and its codec.
    fn claim(journal: &mut Journal) -> anyhow::Result<Zram> {
        for index in 0..16 {
            let zram = Zram { index };
            if fs::read_to_string(zram.attribute("initstate"))
                .is_ok_and(|state| state.trim() == "0")
            {
                let path = zram.attribute("comp_algorithm");
                let value = current_value(&path)?;
                journal.record(&Undo::Write { path, value })?;
                journal.record(&Undo::ResetZram { index })?;
                return Ok(zram);
            }
        }
        let index = fs::read_to_string(HOT_ADD).context("adding a zram device")?.trim().parse()?;
        journal.record(&Undo::RemoveZram { index })?;
        Ok(Zram { index })
    }

    fn attribute(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/sys/block/zram{}/{name}", self.index))
    }

    fn device(&self) -> PathBuf {
        PathBuf::from(format!("/dev/zram{}", self.index))
    }
}

/// Swaps to a device or file with a header, before all others.
pub fn swap_on(device: &Path) -> anyhow::Result<()> {
    let name = std::ffi::CString::new(device.as_os_str().as_encoded_bytes())?;
    // SAFETY: swapon reads a NUL-terminated path, which `name` is.
    if unsafe { libc::swapon(name.as_ptr(), SWAP_FLAG_PREFER | PRIORITY_MAX) } != 0 {
        let error = std::io::Error::last_os_error();
        return Err(error).with_context(|| format!("swapon {}", device.display()));
    }
    Ok(())
}

/// Writes the header of mkswap: the first page of the device or file, version 1, no bad pages.
pub fn write_swap_header(device: &Path, disk_bytes: u64) -> std::io::Result<()> {
    let mut page = [0u8; 4096];
    let last_page = (disk_bytes / 4096 - 1) as u32;
    page[1024..1028].copy_from_slice(&1u32.to_ne_bytes());
    page[1028..1032].copy_from_slice(&last_page.to_ne_bytes());
    page[4086..].copy_from_slice(b"SWAPSPACE2");
    let mut file = File::options().write(true).open(device)?;
    file.write_all(&page)?;
    file.sync_all()
}

fn parse_mm_stat(text: &str) -> Option<ZramBytes> {
    let fields: Vec<u64> = text.split_whitespace().map_while(|field| field.parse().ok()).collect();
    match fields[..] {
        [original, compressed, held, _, held_max, ..] => {
            Some(ZramBytes { original, compressed, held, held_max })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mm_stat_parses() {
        let text = " 805306368 395311874 402178048        0 403000000     4096        0        7       11\n";
        let bytes = parse_mm_stat(text).unwrap();
        let (original, compressed_bytes) = (805306368, 395311874);
        assert_eq!(
            bytes,
            ZramBytes {
                original,
                compressed: compressed_bytes,
                held: 402178048,
                held_max: 403000000
            }
        );
        assert_eq!(parse_mm_stat("1 2"), None);
    }
}
