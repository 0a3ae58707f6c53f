//! An area of memfold's library: a region in signal or thread mode.

use memfold::stats::{ORDER_FIGURES, size_suffix};
use memfold::{Delivery, Memory, Region};
use std::collections::BTreeMap;

/// A region with the memory that it belongs to.
pub struct FoldedArea {
    // The region first: it must go before its memory does.
    region: Region,
    memory: Memory,
}

impl FoldedArea {
    /// A region of `len` bytes of which `resident_bytes` stay mapped, folded with `codec`;
    /// `settings` are `name=value`.
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

    /// Start of the region.
    pub fn as_ptr(&self) -> *mut u8 {
        self.region.as_ptr()
    }

    /// memfold's own counters, by name.
    pub fn counters(&self) -> BTreeMap<String, u64> {
        counters_of(&self.memory)
    }
}

/// A region of `len` bytes in an engine with these `settings`, each `name=value`.
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

/// All counters of an engine, by the names they have in a stats file.
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
