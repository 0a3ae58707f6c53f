//! A region of memfold's library, in signal or thread mode.

use memfold_engine::{Delivery, Memory, Region};
use memfold_stats::{ORDER_FIGURES, size_suffix};
use std::collections::BTreeMap;

/// A region and its `Memory`.
pub struct FoldedArea {
    // The region first, because it must be dropped before its `Memory`.
    region: Region,
    memory: Memory,
}

impl FoldedArea {
    /// Makes a region of `len` bytes, of which `resident_bytes` may be resident, folded with
    /// `codec`. `settings` have the form `name=value`.
    pub fn new(
        len: usize,
        resident_bytes: u64,
        codec: &str,
        signal: bool,
        settings: &[String],
    ) -> anyhow::Result<FoldedArea> {
        let delivery = if signal { Delivery::Signal } else { Delivery::Thread };
        let mut all = vec![format!("resident={resident_bytes}"), format!("codec={codec}")];
        all.extend_from_slice(settings);
        let (memory, region) = folded(len, delivery, &all)?;
        Ok(FoldedArea { region, memory })
    }

    /// Returns the start of the region.
    pub fn as_ptr(&self) -> *mut u8 {
        self.region.as_ptr()
    }

    /// Returns memfold's counters by name.
    pub fn counters(&self) -> BTreeMap<String, u64> {
        counters_of(&self.memory)
    }
}

/// Makes a region of `len` bytes in an engine with these `settings`, each `name=value`.
pub fn folded(
    len: usize,
    delivery: Delivery,
    settings: &[String],
) -> anyhow::Result<(Memory, Region)> {
    let pairs = settings.iter().map(|setting| setting.split_once('=').unwrap_or((setting, "")));
    let builder = pairs.fold(Memory::builder().delivery(delivery), |builder, (name, value)| {
        builder.set(name, value)
    });
    let memory = builder.build().map_err(|error| anyhow::anyhow!("memfold: {error}"))?;
    let region = memory.region(len).map_err(|error| anyhow::anyhow!("memfold: {error}"))?;
    Ok((memory, region))
}

/// Returns all counters of an engine, by their names in a stats file.
pub fn counters_of(memory: &Memory) -> BTreeMap<String, u64> {
    let stats = memory.stats();
    let mut all: BTreeMap<String, u64> =
        stats.iter().map(|(name, value)| (name.into(), value)).collect();
    for (figure, values) in ORDER_FIGURES.iter().zip(stats.order_values()) {
        let name = figure.name.trim_end_matches("_folio");
        all.extend(
            values
                .iter()
                .enumerate()
                .map(|(order, &value)| (format!("{name}_{}", size_suffix(order)), value)),
        );
    }
    all
}
