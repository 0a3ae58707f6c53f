//! Mappings: the owner's requests, and the effect of the program's calls on managed memory.
pub(crate) mod ranges;
mod advice;
mod managed;
pub(crate) mod release;
pub mod calls;

use crate::area::lock::AreaLock;
use crate::backing::Backing;
use crate::config::Config;
use crate::folio::table::FolioTable;
use crate::holds::Holds;
use crate::memory::budget::Budget;
use crate::memory::mapper::Mapper;
use crate::parts::EngineParts;
use crate::stats_place::StatsPlace;

/// Changes managed memory, by address: hints, adoption, and calls that change mappings.
#[derive(Copy, Clone)]
pub struct Mappings<'a> {
    config: &'a Config,
    stats: &'a StatsPlace,
    table: &'a FolioTable,
    mapper: &'a Mapper,
    backing: &'a Backing,
    budget: &'a Budget,
    areas: &'a AreaLock,
    holds: &'static Holds,
    engine: &'a EngineParts,
}

impl<'a> Mappings<'a> {
    /// Returns the walk over the parts of an engine.
    #[inline]
    pub(crate) fn new(engine: &'a EngineParts) -> Mappings<'a> {
        Mappings {
            config: &engine.config,
            stats: &engine.stats,
            table: &engine.table,
            mapper: &engine.mapper,
            backing: &engine.backing,
            budget: &engine.budget,
            areas: &engine.areas,
            holds: engine.holds,
            engine,
        }
    }
}
