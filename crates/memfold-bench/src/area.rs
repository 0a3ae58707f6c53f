//! An area of memfold's library: a region in signal or thread mode.

use memfold::stats::FIGURES;
use memfold::{Delivery, Memory, Region};
use std::collections::BTreeMap;

/// A region with the memory that it belongs to.
pub struct FoldedArea {
    // The region first: it must go before its memory does.
    region: Region,
    memory: Memory,
}

impl FoldedArea {
    /// A region of `len` bytes of which `resident_bytes` stay mapped, folded with `codec`.
    pub fn new(len: usize, resident_bytes: u64, codec: &str, signal: bool) -> anyhow::Result<FoldedArea> {
        let delivery = if signal { Delivery::Signal } else { Delivery::Thread };
        let builder = Memory::builder().resident_bytes(resident_bytes).codec(codec).delivery(delivery);
        let memory = builder.build().map_err(|error| anyhow::anyhow!("memfold: {error}"))?;
        let region = memory.region(len).map_err(|error| anyhow::anyhow!("memfold: {error}"))?;
        Ok(FoldedArea { region, memory })
    }

    /// Start of the region.
    pub fn as_ptr(&self) -> *mut u8 {
        self.region.as_ptr()
    }

    /// memfold's own counters, by name.
    pub fn counters(&self) -> BTreeMap<String, u64> {
        FIGURES.iter().zip(self.memory.stats().values()).map(|(figure, value)| (figure.name.into(), value)).collect()
    }
}
