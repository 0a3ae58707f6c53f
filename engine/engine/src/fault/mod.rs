//! The fault path: `fault` -> index look-up -> swap cache (take, or wait) -> load -> map in. Pages
//! that must be read from a device are passed on to threads that may sleep
//! (`requests/device_faults.rs`).
pub(crate) mod readahead;
pub(crate) mod load;
pub(crate) mod load_by_copy;
pub(crate) mod zeros;
pub(crate) mod copies;

use crate::area::lock::AreaLock;
use crate::area::{Area, Areas};
use crate::backing::Backing;
use crate::config::Config;
use crate::fault::load::{BlockSource, LoadOutcome, LoadPurpose, Loads, align};
use crate::fault::readahead::Readahead;
use crate::fault::zeros::FirstTouch;
use crate::folio::FolioState;
use crate::folio::index::{FolioId, ShardGuard};
use crate::folio::table::FolioTable;
use crate::limits::Limits;
use crate::memory::budget::Budget;
use crate::memory::mapper::Mapper;
use crate::memory::unshare::ToUnshare;
use crate::parts::{EngineParts, bytes};
use crate::policy::first_touches::FirstTouches;
use crate::policy::stream_readahead::WindowAdvice;
use crate::requests::device_faults::DeviceFaults;
use crate::requests::pause::ForkPauses;
use crate::residency::Residency;
use crate::residency::copy_in::FaultAccess;
use crate::stats_place::StatsPlace;
use memfold_os::Errno;
use memfold_os::sync::atomic::Ordering::Relaxed;
use memfold_os::thread::{cpu_ns, now_ns};
use memfold_os::units::{Order, PAGE_SIZE};
use memfold_stats::{self as stats, TimeHistogram};
use memfold_swap::ObjectLocation;

/// One fault in so many is timed, because timing takes two system calls.
const TIMED: u64 = 16;

/// The result of a fault.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum FaultOutcome {
    /// The page is mapped. Or another thread works on its folio, maps it, and wakes the threads
    /// that wait for it.
    Yes,
    /// The kernel returned EAGAIN, and the faulting thread still waits. Serve it again, or wake it.
    Again,
    /// The address is not under management.
    NotManaged,
}

/// The place that a fault's page came from.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum FaultSource {
    /// Nowhere: the page is zeros.
    Zero,
    /// The swap cache: the page was on its way out, or loaded ahead.
    SwapCache,
    /// The compressed pool.
    Pool,
    /// The swap file or the remote store. Such loads are all timed.
    Device,
    /// The page was there, or another thread brings it.
    Other,
}

/// A fault as the kernel reports it.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Default)]
pub struct PageFault {
    /// The address that was touched.
    pub addr: usize,
    /// The page is mapped but write-protected.
    pub protected: bool,
    /// It certainly was a write. A missing page is then loaded to be written to.
    pub write: bool,
}

/// Serves faults.
#[derive(Copy, Clone)]
pub struct Faults<'a> {
    config: &'a Config,
    stats: &'a StatsPlace,
    table: &'a FolioTable,
    mapper: &'a Mapper,
    backing: &'a Backing,
    budget: &'a Budget,
    areas: &'a AreaLock,
    first_touches: &'a FirstTouches,
    reads: &'a DeviceFaults,
    pauses: &'a ForkPauses,
    to_unshare: &'a ToUnshare,
    engine: &'a EngineParts,
}

impl<'a> Faults<'a> {
    /// Returns the walk over the parts of an engine.
    #[inline]
    pub(crate) fn new(engine: &'a EngineParts) -> Faults<'a> {
        Faults {
            config: &engine.config,
            stats: &engine.stats,
            table: &engine.table,
            mapper: &engine.mapper,
            backing: &engine.backing,
            budget: &engine.budget,
            areas: &engine.areas,
            first_touches: &engine.first_touches,
            reads: &engine.reads,
            pauses: &engine.pauses,
            to_unshare: &engine.to_unshare,
            engine,
        }
    }

    /// Serves one fault. In inline delivery the page is mapped on return. In thread delivery
    /// another thread may map it later.
    pub fn fault(&self, fault: PageFault) -> FaultOutcome {
        self.fault_with_source(fault).0
    }

    /// Serves one fault as [`Faults::fault`] does. Returns also where its page came from.
    pub fn fault_with_source(&self, fault: PageFault) -> (FaultOutcome, FaultSource) {
        if !self.stats.faults.load(Relaxed).is_multiple_of(TIMED) {
            return self.serve_untimed(fault);
        }
        let (begin, begin_cpu) = (now_ns(), cpu_ns());
        let (served, source) = self.serve_untimed(fault);
        stats::add(&self.stats.fault_ns, (cpu_ns() - begin_cpu) * TIMED);
        let times = match source {
            FaultSource::Zero => &self.stats.fault_zero_time,
            FaultSource::SwapCache => &self.stats.fault_rescue_time,
            FaultSource::Pool => &self.stats.fault_pool_time,
            FaultSource::Device | FaultSource::Other => return (served, source),
        };
        times.note(now_ns().saturating_sub(begin));
        (served, source)
    }

    fn serve_untimed(&self, fault: PageFault) -> (FaultOutcome, FaultSource) {
        let areas = self.areas.read();
        let Some(area) = areas.find(fault.addr).copied() else {
            return (FaultOutcome::NotManaged, FaultSource::Other);
        };
        stats::add(&self.stats.faults, 1);
        self.serve_with_source(
            &areas,
            &area,
            fault,
            if self.reads.is_served() { BlockSource::Pool } else { BlockSource::Any },
        )
    }

    /// Notes that threads call [`Faults::serve_passed`] from now on. Faults that need a device are passed
    /// to them.
    pub fn expect_readers(&self) {
        self.reads.set_served();
    }

    /// Waits for one fault that a handler has passed on, and serves it. Returns `false` after
    /// [`crate::pager::Pager::stop`].
    pub fn serve_passed(&self) -> bool {
        let Some((addr, protected)) = self.reads.next() else { return false };
        let fault = PageFault { addr, protected, ..PageFault::default() };
        loop {
            let _open = self.pauses.background();
            let areas = self.areas.read();
            let Some(area) = areas.find(addr).copied() else {
                // Its area has ended since: the thread faults again, and finds that.
                self.mapper.space().wake(addr, PAGE_SIZE);
                return true;
            };
            if self.serve(&areas, &area, fault, BlockSource::Any) != FaultOutcome::Again {
                return true;
            }
            drop((areas, _open));
            memfold_os::thread::yield_now();
        }
    }

    pub(crate) fn serve(
        &self,
        areas: &Areas,
        area: &Area,
        fault: PageFault,
        from: BlockSource,
    ) -> FaultOutcome {
        self.serve_with_source(areas, area, fault, from).0
    }

    fn serve_with_source(
        &self,
        areas: &Areas,
        area: &Area,
        fault: PageFault,
        from: BlockSource,
    ) -> (FaultOutcome, FaultSource) {
        let other = |served| (served, FaultSource::Other);
        let key = area.key_of(fault.addr);
        let mut guard = self.table.lock(key);
        let mut copy_order = None;
        loop {
            let Some(id) = self.table.find(&guard, key) else {
                return (self.first_touch(areas, area, guard, key, fault), FaultSource::Zero);
            };
            let folio = self.table.get(&guard, id);
            if let Some(order) = self.copied_order(&guard, area, folio, fault, copy_order) {
                if copy_order.is_some() {
                    return other(self.make_private(&mut guard, area, fault.addr, order));
                }
                drop(guard);
                self.charge_copies(areas, order);
                copy_order = Some(order);
                guard = self.table.lock(key);
                continue;
            }
            match folio.state.get() {
                FolioState::Resident => {
                    return other(self.touch_resident(&guard, area, id, fault));
                }
                FolioState::Partial if folio.is_here(key) => {
                    return other(self.touch_resident(&guard, area, id, fault));
                }
                FolioState::Cached => {
                    return (self.rescue(&mut guard, area, id, key), FaultSource::SwapCache);
                }
                FolioState::Stored | FolioState::Partial => {
                    return self.major(areas, area, guard, key, fault, from);
                }
                FolioState::Loading | FolioState::Saving => {
                    folio.wanted.store(true, Relaxed);
                    stats::add(&self.stats.faults_waited, 1);
                    if !self.config.delivery.is_inline() {
                        return other(FaultOutcome::Yes);
                    }
                    guard = self.table.wait(guard);
                }
                FolioState::Leaving => {
                    stats::add(&self.stats.faults_waited, 1);
                    guard = self.table.wait(guard);
                }
            }
        }
    }

    /// Serves a fault on a page that is mapped, or that the program has discarded. A missing page
    /// of a `Resident` folio is zeros, and so is one that is `here`.
    fn touch_resident(
        &self,
        guard: &ShardGuard<'_>,
        area: &Area,
        id: FolioId,
        fault: PageFault,
    ) -> FaultOutcome {
        let page = fault.addr & !(PAGE_SIZE - 1);
        let folio = self.table.get(guard, id);
        let (was_clean, hides) = (self.table.is_clean(folio), self.mapper.space().hides());
        if fault.protected || fault.write && was_clean || hides {
            // The first write since the page was loaded, after which it may differ from its copy.
            // Or the eviction that protected or hid the page was undone. Or the eviction has ended,
            // and the page was loaded again.
            stats::add(if hides { &self.stats.faults_stale } else { &self.stats.faults_write }, 1);
            folio.clean_in.set(0);
            self.note_write(guard, id);
            let (start, len) = match was_clean || hides {
                true => (area.addr_of(folio.key()), bytes(folio.pages() as usize)),
                false => (page, PAGE_SIZE),
            };
            return match self.mapper.space().protect(start, len, false) {
                Ok(()) => FaultOutcome::Yes,
                Err(Errno::AGAIN) => FaultOutcome::Again,
                // A thread past the gate may have unmapped a page. The touch finds that.
                Err(_) => {
                    self.mapper.space().wake(page, PAGE_SIZE);
                    FaultOutcome::Yes
                }
            };
        }
        // SAFETY: the shard is locked and the page's folio is `Resident`, or the page is `here`. If
        // the page is missing, it is zeros.
        match unsafe {
            self.mapper.space().copy(page, self.mapper.frames().zeros(), PAGE_SIZE, true)
        } {
            Ok(()) => {
                folio.clean_in.set(0);
                stats::add(&self.stats.faults_zero, 1);
            }
            Err(partial) if partial.errno == Errno::AGAIN => return FaultOutcome::Again,
            Err(_) => {
                stats::add(&self.stats.faults_stale, 1);
                self.mapper.space().wake(page, PAGE_SIZE);
            }
        }
        FaultOutcome::Yes
    }

    /// Notes the first write to a protected page of a folio that isn't clean: its probe, if it has
    /// one.
    fn note_write(&self, guard: &ShardGuard<'_>, id: FolioId) {
        let folio = self.table.get(guard, id);
        if self.table.settle_probe(folio) {
            self.first_touches.proven(folio.key());
        }
    }

    /// Maps a folio back from the swap cache: a second chance.
    fn rescue(
        &self,
        guard: &mut ShardGuard<'_>,
        area: &Area,
        id: FolioId,
        key: u64,
    ) -> FaultOutcome {
        let folio = self.table.get(guard, id);
        let (start, order, ahead) = (folio.key(), folio.order(), folio.untouched.get());
        folio.active.set(!ahead);
        self.table.lists().detach(id);
        let readahead = Readahead::new(self.engine);
        let in_file = readahead.is_in_file(folio);
        if !ahead {
            stats::add(&self.stats.rescues, 1);
        }
        let arrival = Residency::new(self.engine).map_in(guard, area.addr_of(start), id);
        if ahead {
            let end = start + order.pages() as u64;
            readahead.advance_stream(area, key, start, end, in_file);
        }
        let outcome = if arrival.pages > (key - start) as usize {
            LoadOutcome::Done
        } else {
            LoadOutcome::Again
        };
        served(outcome)
    }

    fn first_touch(
        &self,
        areas: &Areas,
        area: &Area,
        guard: ShardGuard<'_>,
        key: u64,
        fault: PageFault,
    ) -> FaultOutcome {
        stats::add(&self.stats.faults_zero, 1);
        let touch = match (fault.protected, fault.write) {
            (true, _) => FirstTouch::WriteToZeros,
            (false, true) => FirstTouch::Write,
            (false, false) => FirstTouch::Read,
        };
        let outcome = Loads::new(self.engine).first_touch(areas, area, guard, key, touch);
        Limits::new(self.engine).ask_past_target();
        served(outcome)
    }

    fn major(
        &self,
        areas: &Areas,
        area: &Area,
        guard: ShardGuard<'_>,
        key: u64,
        fault: PageFault,
        from: BlockSource,
    ) -> (FaultOutcome, FaultSource) {
        let (loads, readahead) = (Loads::new(self.engine), Readahead::new(self.engine));
        let mut from = from;
        if from == BlockSource::Pool && loads.reaches_file(&guard, key, Order::PAGE) {
            if self.reads.ask(fault.addr, fault.protected) {
                return (FaultOutcome::Yes, FaultSource::Other);
            }
            from = BlockSource::Any;
        }
        stats::add(&self.stats.pgmajfault, 1);
        let advice = readahead.advise_load(key);
        let location = self
            .table
            .find(&guard, key)
            .and_then(|id| readahead.location_in_file(self.table.get(&guard, id)));
        let in_file = location.is_some();
        let device = location.map(|location| (now_ns(), self.times_of(location)));
        if in_file && advice.order == self.config.block_order {
            readahead.ask_beside(area, key);
        }
        let start = align(key, advice.order);
        let end = start + advice.order.pages() as u64;
        readahead.ask_ahead(area, start, end, advice, in_file);
        let access = FaultAccess { touch: advice.touch, write: fault.write };
        let purpose = LoadPurpose::Fault(access);
        let (loaded, start, end) = loads.load(areas, area, guard, key, advice.order, purpose, from);
        let end = if loaded == LoadOutcome::Done {
            self.load_pages_after(areas, area, end, advice, from)
        } else {
            end
        };
        readahead.note_loaded(key, start, end);
        Limits::new(self.engine).ask_past_target();
        let Some((begin, times)) = device else { return (served(loaded), FaultSource::Pool) };
        times.note(now_ns().saturating_sub(begin));
        (served(loaded), FaultSource::Device)
    }

    /// Returns the histogram for loads of an object of the swap file, which may be in the remote
    /// store.
    fn times_of(&self, location: ObjectLocation) -> &TimeHistogram {
        match self.backing.swap() {
            Some(swap) if swap.is_remote(location) => &self.stats.fault_remote_time,
            _ => &self.stats.fault_file_time,
        }
    }

    /// Loads and maps the pages that follow, for a stream, where blocks were cut into pages, so
    /// that a window is not one folio. Returns the end of the loaded range.
    fn load_pages_after(
        &self,
        areas: &Areas,
        area: &Area,
        end: u64,
        advice: WindowAdvice,
        from: BlockSource,
    ) -> u64 {
        let loads = Loads::new(self.engine);
        let last = advice.pages_after(end).end.min(area.key_end());
        let mut at = end;
        while at < last {
            let guard = self.table.lock(at);
            let Some(id) = self.table.find(&guard, at) else { break };
            let folio = self.table.get(&guard, id);
            let (state, order) = (folio.state.get(), folio.order());
            if state != FolioState::Stored
                || order >= self.config.block_order
                || from == BlockSource::Pool && loads.reaches_file(&guard, at, Order::PAGE)
            {
                break;
            }
            let access = FaultAccess { touch: advice.touch, write: false };
            let purpose = LoadPurpose::Fault(access);
            let (loaded, _, after) =
                loads.load(areas, area, guard, at, advice.order, purpose, from);
            if loaded != LoadOutcome::Done {
                break;
            }
            at = after;
        }
        at
    }
}

/// Returns the result of a fault after a load.
fn served(loaded: LoadOutcome) -> FaultOutcome {
    match loaded {
        LoadOutcome::Again => FaultOutcome::Again,
        LoadOutcome::Done => FaultOutcome::Yes,
    }
}
