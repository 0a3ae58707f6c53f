//! The engine's own policy, and changes to it. All decisions are those of `memfold_engine::policy`: the
//! lists, refault distances, batches and streams.

use crate::policy::memory::{
    Arrival, Batches, Candidate, LoadPlan, MapProtection, Place, PolicyMemory,
};
use crate::policy::trace::{PageNumber, Trace};
use memfold_engine::policy::eviction::{self, LruList};
use memfold_engine::policy::stream_readahead::{Streams, is_protected};
use memfold_engine::policy::workingset;
use memfold_os::units::Order;

/// The block's order by default.
const BLOCK: Order = match Order::new(2) {
    Some(order) => order,
    None => unreachable!(),
};
/// Pages of a run that learns.
const RUN_PAGES: u64 = 16;
/// A run that has stopped to load neighbours tries again after so many misses.
const RETRY: i8 = 16;
const SCORE_MOST: i8 = 4;

/// Changes to the engine's policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Changes {
    /// A page that is read is loaded read-only, even if it was dirty when it left.
    forgets: bool,
    /// A stream loads no further pages.
    no_streams: bool,
    /// A page that was written to since it was listed is listed again instead of evicted.
    write_bits: bool,
    /// A miss loads the aligned run of so many pages.
    around: u64,
    /// Only where neighbours that were loaded lately were touched. The engine cannot see these
    /// touches as cheaply as this assumes.
    learns: bool,
}

impl Changes {
    /// The engine as it is.
    pub const NONE: Changes =
        Changes { forgets: false, no_streams: false, write_bits: false, around: 1, learns: false };
}

pub const FORGETS: Changes = Changes { forgets: true, ..Changes::NONE };
pub const NO_STREAMS: Changes = Changes { no_streams: true, ..Changes::NONE };
pub const WRITE_BITS: Changes = Changes { write_bits: true, ..Changes::NONE };
pub const AROUND_4: Changes = Changes { around: 4, ..Changes::NONE };
pub const AROUND_16: Changes = Changes { around: 16, ..Changes::NONE };
pub const LEARNED_16: Changes = Changes { around: 16, learns: true, ..Changes::NONE };
pub const COMBINED: Changes = Changes { around: 4, ..WRITE_BITS };
pub const COMBINED_LEARNED: Changes = Changes { learns: true, around: 16, ..WRITE_BITS };

/// What the engine knows of a page.
#[derive(Debug, Clone, Copy, Default)]
struct Known {
    /// Its shadow while it is evicted.
    age: u32,
    active: bool,
    /// It was written to since it was listed.
    written: bool,
    /// It was loaded as a neighbour, and not touched since.
    beside: bool,
}

/// The engine with changes.
pub struct EngineCandidate {
    changes: Changes,
    streams: Streams,
    known: Vec<Known>,
    /// For each run: above 0 if neighbours are used, below 0 if not.
    scores: std::collections::HashMap<u64, i8>,
    /// The page that was mapped last. The touch that it was mapped for says nothing new.
    fresh: Option<PageNumber>,
}

impl EngineCandidate {
    /// Makes it for a trace.
    pub fn boxed(trace: &Trace, changes: Changes) -> Box<dyn Candidate> {
        Box::new(EngineCandidate {
            changes,
            streams: Streams::new(BLOCK, Order::MAX),
            known: vec![Known::default(); trace.pages()],
            scores: Default::default(),
            fresh: None,
        })
    }

    fn list(&self, page: PageNumber, memory: &PolicyMemory<'_>) {
        let active = self.known[page as usize].active;
        memory.list(page, if active { LruList::Active } else { LruList::Inactive });
    }

    /// Records whether a neighbour was of use.
    fn learn(&mut self, page: PageNumber, used: bool, memory: &PolicyMemory<'_>) {
        if std::mem::take(&mut self.known[page as usize].beside) {
            let score = self.scores.entry(memory.address(page) / RUN_PAGES).or_default();
            *score = if used { (*score + 1).min(SCORE_MOST) } else { (*score - 1).max(-RETRY) };
        }
    }

    /// Returns the neighbours to load with a page.
    fn around(
        &mut self,
        page: PageNumber,
        memory: &PolicyMemory<'_>,
    ) -> std::ops::Range<PageNumber> {
        let (address, pages) = (memory.address(page), self.changes.around);
        if self.changes.learns {
            let score = self.scores.entry(address / RUN_PAGES).or_default();
            if *score < 0 {
                *score += 1;
                return page..page;
            }
        }
        let start = address / pages * pages;
        memory.pages_in(page, start..start + pages)
    }
}

/// Returns the pages after `page`, up to the address `end`, that are stored without a gap.
fn stored_after(
    page: PageNumber,
    end: u64,
    memory: &PolicyMemory<'_>,
) -> std::ops::Range<PageNumber> {
    let next = memory.address(page) + 1;
    let pages = memory.pages_in(page, next..end);
    let count = pages
        .clone()
        .zip(next..)
        .take_while(|(page, at)| {
            memory.address(*page) == *at && memory.place(*page) == Place::Stored
        })
        .count();
    pages.start..pages.start + count as PageNumber
}

impl Candidate for EngineCandidate {
    fn arrived(&mut self, page: PageNumber, how: Arrival, memory: &mut PolicyMemory<'_>) {
        if how == Arrival::First {
            let key = memory.address(page);
            self.streams.advise(key);
            self.streams.loaded(key, key, key + 1);
        }
        let known = &mut self.known[page as usize];
        let distance = workingset::distance(memory.clock(), known.age);
        known.active = match how {
            Arrival::First | Arrival::Beside => false,
            Arrival::Rescue => true,
            Arrival::Load | Arrival::Stream => {
                workingset::is_workingset(distance, memory.mapped(), Order::PAGE)
            }
        };
        (known.written, known.beside) = (false, how == Arrival::Beside);
        if how != Arrival::Beside && how != Arrival::Stream {
            self.fresh = Some(page);
        }
        self.list(page, memory);
    }

    fn victim(&mut self, memory: &mut PolicyMemory<'_>) -> PageNumber {
        loop {
            let (id, _) = eviction::next_victim(&memory.lists).expect("a page is mapped");
            memory.lists.detach(id);
            let page = id - 1;
            if std::mem::take(&mut self.known[page as usize].written) {
                memory.count_spared();
                self.list(page, memory);
                continue;
            }
            self.learn(page, false, memory);
            let known = &mut self.known[page as usize];
            known.age = workingset::shadow(memory.clock(), known.active);
            return page;
        }
    }

    fn touched(&mut self, page: PageNumber, write: bool, memory: &mut PolicyMemory<'_>) {
        self.learn(page, true, memory);
        if self.fresh.take() != Some(page) && write {
            self.known[page as usize].written = self.changes.write_bits;
        }
    }

    fn plan(&mut self, page: PageNumber, write: bool, memory: &PolicyMemory<'_>) -> LoadPlan {
        let key = memory.address(page);
        let advice = self.streams.advise(key);
        let after = advice.pages_after(key + 1);
        let is_stream = !after.is_empty() && !self.changes.no_streams;
        let ahead = if is_stream {
            stored_after(page, after.end, memory)
        } else {
            self.around(page, memory)
        };
        let end = if is_stream { key + 1 + ahead.len() as u64 } else { key + 1 };
        self.streams.loaded(key, key, end);
        let is_expected = !self.changes.forgets && memory.left_dirty(page);
        LoadPlan {
            protected: is_protected(advice.touch, write || is_expected),
            ahead,
            protects_ahead: match is_protected(advice.touch, false) {
                true if self.changes.forgets => MapProtection::All,
                true => MapProtection::LeftClean,
                false => MapProtection::None,
            },
            arrival_ahead: if is_stream { Arrival::Stream } else { Arrival::Beside },
        }
    }

    fn batches(&self, capacity: u64) -> Batches {
        Batches { dropped: eviction::batch_pages(capacity), dirty_wait: true }
    }
}
