//! A simulated memory of pages, after the engine: where each page is, and what happens to it.
//!
//! All folios are single pages, as the engine makes them for programs that touch memory at random.
//! A page that was never touched before is mapped without a load. Dirty pages go through the swap
//! cache, where a touch maps them back. Background threads save them as soon as the engine wakes
//! one, and take no time to do so.

use crate::policy::counts::Counts;
use crate::policy::trace::{PageNumber, Reference, Trace};
use memfold_engine::policy::eviction::{self, Lru, LruList, ReclaimStep};
use memfold_os::units::Order;
use std::ops::Range;

/// Where a page is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Never touched.
    Nowhere,
    /// In the page table.
    Mapped,
    /// In the swap cache.
    Cached,
    /// In the store only.
    Stored,
}

#[derive(Debug, Clone, Copy)]
struct Record {
    place: Place,
    /// Write-protected, and so equal to its stored copy.
    protected: bool,
    /// It was written to since it was stored, or was never stored.
    dirty: bool,
    /// It was dirty when it was last evicted.
    left_dirty: bool,
    /// It was loaded ahead, and not touched since.
    ahead: bool,
}

const UNTOUCHED: Record = Record {
    place: Place::Nowhere,
    protected: false,
    dirty: false,
    left_dirty: false,
    ahead: false,
};

/// How many pages leave together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batches {
    /// Clean pages dropped together. So many pages are also free after a reclaim.
    pub dropped: u64,
    /// Whether dirty pages wait in the swap cache until they take more than a 128th of memory
    /// (`eviction::next_step`). Otherwise they are saved at once.
    pub dirty_wait: bool,
}

/// Why a page is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// Its first touch.
    First,
    /// A touch while it was in the swap cache.
    Rescue,
    /// A miss.
    Load,
    /// Loaded with another page, as the next page of a stream.
    Stream,
    /// Loaded with another page, as its neighbour.
    Beside,
}

/// Which pages are mapped write-protected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MapProtection {
    /// All.
    All,
    /// None.
    None,
    /// Those that were not dirty when they were last evicted.
    LeftClean,
}

/// How a miss is served.
#[derive(Debug, Clone)]
pub struct LoadPlan {
    /// The page is mapped write-protected.
    pub protected: bool,
    /// Pages to load too, if they are stored.
    pub ahead: Range<PageNumber>,
    /// Which of them are mapped write-protected.
    pub protects_ahead: MapProtection,
    /// How they arrive.
    pub arrival_ahead: Arrival,
}

impl LoadPlan {
    /// Loads the page alone. A page that is read is write-protected.
    pub fn alone(page: PageNumber, write: bool) -> LoadPlan {
        LoadPlan {
            protected: !write,
            ahead: page..page,
            protects_ahead: MapProtection::All,
            arrival_ahead: Arrival::Beside,
        }
    }
}

/// A policy: which page leaves next, and what a miss loads.
pub trait Candidate {
    /// A page is about to be mapped. It is on no list.
    fn arrived(&mut self, page: PageNumber, how: Arrival, memory: &mut PolicyMemory<'_>);

    /// Takes the page that is evicted next off its list. At least one page is mapped.
    fn victim(&mut self, memory: &mut PolicyMemory<'_>) -> PageNumber;

    /// A mapped page was touched. An engine in user space does not see this.
    fn touched(&mut self, _page: PageNumber, _write: bool, _memory: &mut PolicyMemory<'_>) {}

    /// Returns how to serve a miss.
    fn plan(&mut self, page: PageNumber, write: bool, _memory: &PolicyMemory<'_>) -> LoadPlan {
        LoadPlan::alone(page, write)
    }

    /// Returns how many pages leave together where `capacity` pages may be in memory.
    fn batches(&self, _capacity: u64) -> Batches {
        Batches { dropped: 1, dirty_wait: false }
    }
}

/// The memory, and the lists of its pages. A page's id on the lists is its number + 1.
pub struct PolicyMemory<'t> {
    trace: &'t Trace,
    records: Vec<Record>,
    /// The engine's lists. Candidates use those of mapped pages as they like.
    pub lists: Lru,
    capacity: u64,
    mapped: u64,
    evicted: u64,
    counts: Counts,
}

impl<'t> PolicyMemory<'t> {
    /// Makes an empty memory of `capacity` pages.
    pub fn new(trace: &'t Trace, capacity: u64) -> PolicyMemory<'t> {
        PolicyMemory {
            trace,
            records: vec![UNTOUCHED; trace.pages()],
            lists: Lru::new().expect("address space for lists"),
            capacity,
            mapped: 0,
            evicted: 0,
            counts: Counts::default(),
        }
    }

    /// Returns the number of mapped pages.
    pub fn mapped(&self) -> u64 {
        self.mapped
    }

    /// Returns the number of pages evicted so far: the clock of refault distances.
    pub fn clock(&self) -> u64 {
        self.evicted
    }

    /// Returns where a page is.
    pub fn place(&self, page: PageNumber) -> Place {
        self.records[page as usize].place
    }

    /// Returns whether a page was dirty when it was last evicted.
    pub fn left_dirty(&self, page: PageNumber) -> bool {
        self.records[page as usize].left_dirty
    }

    /// Returns the address of a page, in pages.
    pub fn address(&self, page: PageNumber) -> u64 {
        self.trace.addresses[page as usize]
    }

    /// Returns the pages of the trace in a range of addresses that has `page` or begins after it.
    pub fn pages_in(&self, page: PageNumber, addresses: Range<u64>) -> Range<PageNumber> {
        let all = &self.trace.addresses;
        let (mut first, mut end) = (page as usize, page as usize);
        while first > 0 && all[first - 1] >= addresses.start {
            first -= 1;
        }
        while first < all.len() && all[first] < addresses.start {
            first += 1;
        }
        while end < all.len() && all[end] < addresses.end {
            end += 1;
        }
        first as PageNumber..end.max(first) as PageNumber
    }

    /// Puts a page at the head of a list.
    pub fn list(&self, page: PageNumber, list: LruList) {
        self.lists.push(page + 1, page as u64, 0, list);
    }

    /// Counts a page that was chosen for eviction, and stays because it was used lately.
    pub fn count_spared(&mut self) {
        self.counts.spared += 1;
    }

    fn held(&self) -> u64 {
        self.mapped + self.lists.pages(LruList::Cooling) + self.lists.pages(LruList::Dirty)
    }

    fn touch(&mut self, candidate: &mut dyn Candidate, Reference { page, write }: Reference) {
        match self.place(page) {
            Place::Mapped => {
                if write && self.records[page as usize].protected {
                    self.counts.write_faults += 1;
                    self.records[page as usize].protected = false;
                }
            }
            Place::Cached => {
                self.counts.rescues += 1;
                self.lists.detach(page + 1);
                self.map(candidate, page, false, Arrival::Rescue);
            }
            Place::Nowhere => {
                self.make_room(candidate);
                self.records[page as usize].dirty = true;
                self.map(candidate, page, false, Arrival::First);
            }
            Place::Stored => self.load(candidate, page, write),
        }
        let record = &mut self.records[page as usize];
        record.ahead = false;
        record.dirty |= write;
        candidate.touched(page, write, self);
    }

    fn load(&mut self, candidate: &mut dyn Candidate, page: PageNumber, write: bool) {
        let plan = candidate.plan(page, write, self);
        self.counts.misses += 1;
        self.make_room(candidate);
        self.map(candidate, page, plan.protected, Arrival::Load);
        for neighbour in plan.ahead.filter(|neighbour| *neighbour != page) {
            if self.place(neighbour) != Place::Stored {
                continue;
            }
            self.make_room(candidate);
            self.counts.ahead += 1;
            self.records[neighbour as usize].ahead = true;
            let is_protected = match plan.protects_ahead {
                MapProtection::All => true,
                MapProtection::None => false,
                MapProtection::LeftClean => !self.left_dirty(neighbour),
            };
            self.map(candidate, neighbour, is_protected, plan.arrival_ahead);
        }
    }

    fn map(
        &mut self,
        candidate: &mut dyn Candidate,
        page: PageNumber,
        protected: bool,
        how: Arrival,
    ) {
        candidate.arrived(page, how, self);
        let record = &mut self.records[page as usize];
        (record.place, record.protected) = (Place::Mapped, protected);
        self.mapped += 1;
    }

    /// Reclaims if there is no room for one page more.
    fn make_room(&mut self, candidate: &mut dyn Candidate) {
        if self.held() < self.capacity {
            return;
        }
        let batches = candidate.batches(self.capacity);
        let slack = batches.dropped.max(1);
        while self.held() + slack > self.capacity {
            match eviction::next_step(&self.lists, self.capacity, Order::PAGE, false) {
                ReclaimStep::Save { list, compress } => self.save(list, compress, batches),
                ReclaimStep::Evict if self.mapped > 0 => self.evict(candidate, batches),
                ReclaimStep::Evict => self.save(LruList::Dirty, true, batches),
            }
        }
    }

    fn evict(&mut self, candidate: &mut dyn Candidate, batches: Batches) {
        let (mut moves, mut drops) = (0, 0);
        while self.mapped > 0 {
            let page = candidate.victim(self);
            let record = &mut self.records[page as usize];
            assert!(record.place == Place::Mapped, "a victim is mapped");
            self.counts.wasted += record.ahead as u64;
            (record.ahead, record.left_dirty) = (false, record.dirty);
            self.mapped -= 1;
            if record.protected {
                record.place = Place::Stored;
                self.counts.dropped += 1;
                self.evicted += 1;
                drops += 1;
            } else {
                record.place = Place::Cached;
                self.list(page, LruList::Cooling);
                self.evicted += 1;
                moves += 1;
            }
            if eviction::is_enough(moves, drops, drops as u64 >= batches.dropped) {
                break;
            }
        }
    }

    /// Saves the oldest page of a list, or puts it on `Dirty`.
    fn save(&mut self, list: LruList, compress: bool, batches: Batches) {
        let (id, _) = self.lists.isolate(list).expect("the list is not empty");
        let page = id - 1;
        let record = &mut self.records[page as usize];
        if record.dirty && !compress && batches.dirty_wait {
            self.list(page, LruList::Dirty);
            return;
        }
        if record.dirty {
            self.counts.saved += 1;
        } else {
            self.counts.unchanged += 1;
        }
        (record.place, record.dirty) = (Place::Stored, false);
        self.lists.detach(id);
    }
}

/// Replays a trace in a memory of `capacity` pages, and returns what happened.
pub fn replay(trace: &Trace, capacity: u64, candidate: &mut dyn Candidate) -> Counts {
    let mut memory = PolicyMemory::new(trace, capacity.max(1));
    for reference in &trace.references {
        memory.touch(candidate, *reference);
    }
    memory.counts
}
